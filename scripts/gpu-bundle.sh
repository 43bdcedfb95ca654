#!/usr/bin/env bash
# Builds a bundle for a GPU host without a Rust toolchain (default: target/gpu-bundle): the binary, test executables, golden
# vectors, PyTorch benchmark scripts and check.sh, which runs everything there and prints one table.
# Usage: scripts/gpu-bundle.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-target/gpu-bundle}
tests=(ferrotron-tensor:lib ferrotron-kernels:conformance ferrotron-kernels:golden_router ferrotron-kernels:golden_permute ferrotron-kernels:lib ferrotron-comm:threads ferrotron-comm:nccl ferrotron-comm:lib ferrotron-engine:context_parallel ferrotron-core:layouts ferrotron-core:cuda_graph ferrotron-core:fp8 ferrotron-core:fp8_moe ferrotron-core:fp8_weight_cast ferrotron-core:fp8_params_moe ferrotron-core:moe ferrotron-cli:docs ferrotron-cli:golden_hf ferrotron-cli:interruptions ferrotron-cli:parity)

cargo build --release --locked -p ferrotron-cli
rm -rf "$out"
mkdir -p "$out/tests" "$out/peers"
cp "${CARGO_TARGET_DIR:-target}/release/ferrotron" "$out/"
for t in "${tests[@]}"; do
  kind=test which=(--test "${t##*:}") name=${t##*:}
  # Unit tests of a crate: comm_lib, kernels_lib, tensor_lib.
  if [ "$name" = lib ]; then kind=lib which=(--lib) name=${t%%:*} name=${name#ferrotron-}_lib; fi
  cargo test --release --locked -p "${t%%:*}" "${which[@]}" --no-run --message-format=json 2>/dev/null |
    grep "\"kind\":\[\"$kind\"\]" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | xargs -I{} cp {} "$out/tests/$name"
done
strip "$out"/ferrotron "$out"/tests/*
cp -r tests/golden tests/golden-b "$out/"
cp scripts/peers/*.py "$out/peers/"
cp scripts/bench_gpu.py scripts/gpu_layouts.py scripts/gpu_faults.py scripts/bench_saves.py scripts/memory_growth.py "$out/"
cp scripts/gpu-check.sh "$out/check.sh"
mkdir -p "$out/repository/docs"
cp README.md ARCHITECTURE.md BENCHMARKS.md "$out/repository/"
cp docs/*.md "$out/repository/docs/"
du -sh "$out"
