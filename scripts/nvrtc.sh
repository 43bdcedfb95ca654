#!/usr/bin/env bash
# Puts NVIDIA's run-time compiler under target/nvrtc (from Python wheels, once) and prints the folder with its
# library. With it every CUDA kernel is compiled on machines that have no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

at=target/nvrtc
lib="$PWD/$at/nvidia/cu13/lib"
if [ ! -e "$lib/libnvrtc.so.13" ]; then
  if ! python3 -m pip --version >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      { apt-get update && apt-get install -y --no-install-recommends python3 python3-pip; } >&2
    else
      echo "nvrtc.sh: needs Python with pip to fetch the compiler (install python3-pip)" >&2
      exit 1
    fi
  fi
  rm -rf "$at"
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$at" nvidia-cuda-nvrtc==13.0.88 >&2
fi
echo "$lib"
