#!/usr/bin/env bash
# Installs NVRTC under target/nvrtc, from its Python wheel, once, and prints the folder of its library. With it CUDA kernels
# compile on machines without a GPU.
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
