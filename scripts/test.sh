#!/usr/bin/env bash
# Everything that must hold before a change lands: words, formatting, lints, links between doc comments, every test (all golden sets
# included), a quarter of a minute of each fuzz target.
# Needs a Rust toolchain and a C compiler; what else the tests need it installs itself: NVIDIA's run-time compiler, under
# target/, so that every CUDA kernel is compiled here although no GPU is needed; TensorBoard's reader of event files, there
# too; and, where it may, Open MPI, tmux, Chromium, g++ and Python's venv.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v cargo >/dev/null || { echo "test.sh: no cargo; install a Rust toolchain (rustup.rs)" >&2; exit 1; }
step() { printf '\n== %s\n' "$*"; "$@"; }

for component in fmt clippy; do
  cargo "$component" --version >/dev/null 2>&1 || {
    [ -n "${CI:-}" ] && { echo "test.sh: cargo $component is missing" >&2; exit 1; }
    echo "test.sh: SKIPPED: cargo $component is not installed (rustup component add ${component/fmt/rustfmt})"
    eval "no_$component=1"
  }
done

# FERROTRON_CUDA_LIB names an NVRTC that is already installed.
if [ -z "${FERROTRON_CUDA_LIB:-}" ]; then
  if lib=$(scripts/nvrtc.sh); then
    export FERROTRON_CUDA_LIB="$lib"
  elif [ -n "${CI:-}" ]; then
    echo "test.sh: CUDA kernels can't be compiled without NVRTC" >&2
    exit 1
  else
    echo "test.sh: SKIPPED: compiling the CUDA kernels (NVRTC could not be installed)"
  fi
fi

# What the compiler says of a kernel is kept by the hash of its text, so that a new clone compiles only what has changed.
export FERROTRON_KERNEL_RESOURCES="${FERROTRON_KERNEL_RESOURCES:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/ferrotron/kernel_resources}"

# FERROTRON_TENSORBOARD names a folder with the Python package tensorboard.
if [ -z "${FERROTRON_TENSORBOARD:-}" ]; then
  if folder=$(scripts/tensorboard.sh); then
    export FERROTRON_TENSORBOARD="$folder"
  elif [ -n "${CI:-}" ]; then
    echo "test.sh: event files can't be read without TensorBoard" >&2
    exit 1
  else
    echo "test.sh: SKIPPED: reading event files with TensorBoard (it could not be installed)"
  fi
fi

# Tests with ranks as processes need MPI: without it they print that they are skipped, and in CI they fail.
if ! command -v mpirun >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # The package brings the library, whatever the distribution calls that one.
  install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends openmpi-bin >/dev/null; }
  install 2>/dev/null || { apt-get update >/dev/null && install; } \
    || echo "test.sh: Open MPI could not be installed (apt-get install openmpi-bin)" >&2
fi

# `watch` is tested under tmux and in headless Chromium: without them its tests print that they are skipped, and in CI they fail.
for tool in tmux chromium; do
  if ! command -v "$tool" >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$tool" >/dev/null; }
    install 2>/dev/null || { apt-get update >/dev/null && install; } || echo "test.sh: $tool could not be installed" >&2
  fi
done

# The test of the wheel installs it into a virtual environment.
if ! python3 -c 'import venv, ensurepip' 2>/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv >/dev/null; }
  install 2>/dev/null || { apt-get update >/dev/null && install; } || echo "test.sh: python3-venv could not be installed" >&2
fi

# libFuzzer is C++.
if ! command -v c++ >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends g++ >/dev/null; }
  install 2>/dev/null || { apt-get update >/dev/null && install; } || echo "test.sh: g++ could not be installed" >&2
fi

step scripts/words.sh
[ -n "${no_fmt:-}" ] || step cargo fmt --all --check
[ -n "${no_clippy:-}" ] || step cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
step env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet
# Links and commands of the documentation are among the tests; the site needs mdBook, which takes minutes to build.
if [ -n "${CI:-}" ] || command -v mdbook >/dev/null || [ -x target/mdbook/bin/mdbook ]; then
  step scripts/book.sh --install
else
  echo "test.sh: SKIPPED: building the documentation site (no mdbook; scripts/book.sh --install)"
fi
step cargo test --workspace --locked --quiet --no-fail-fast

# A quarter of a minute for each fuzz target, seeded as all tests are; scripts/fuzz.sh alone gives each an hour and mutates differently every time.
if command -v c++ >/dev/null; then
  step env FERROTRON_FUZZ_SEED=1 scripts/fuzz.sh 15
elif [ -n "${CI:-}" ]; then
  echo "test.sh: fuzzing needs a C++ compiler (g++)" >&2
  exit 1
else
  echo "test.sh: SKIPPED: fuzzing (no C++ compiler)"
fi
