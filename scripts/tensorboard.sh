#!/usr/bin/env bash
# Installs TensorBoard's reader of event files under target/tensorboard, from Python wheels, once, and prints the folder for
# PYTHONPATH. With it tests read our files as TensorBoard does.
set -euo pipefail
cd "$(dirname "$0")/.."

at="$PWD/target/tensorboard"
if [ ! -e "$at/tensorboard/version.py" ]; then
  if ! python3 -m pip --version >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      { apt-get update && apt-get install -y --no-install-recommends python3 python3-pip; } >&2
    else
      echo "tensorboard.sh: needs Python with pip to fetch TensorBoard (install python3-pip)" >&2
      exit 1
    fi
  fi
  rm -rf "$at"
  # What the reader imports, without the server's dependencies.
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --target "$at" \
    tensorboard==2.21.0 protobuf==7.36.2 numpy absl-py packaging >&2
fi
echo "$at"
