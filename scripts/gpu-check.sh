#!/usr/bin/env bash
# Runs a bundle (scripts/gpu-bundle.sh) on a GPU host: conformance, golden vectors, parity with the CPU, training,
# interruptions, the sanitizer and benchmarks against PyTorch. Prints one table and a verdict; logs go to a folder.
# Usage: check.sh [LOGS] [PART...]      parts: start memory conformance precision comm processes layouts moe golden parity train regress docs kill sanitizer bench (default: all)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
logs=${1:-$here/logs}
shift || true
parts=${*:-start memory conformance precision comm processes layouts moe golden parity train regress docs kill sanitizer bench}
mkdir -p "$logs"
export FERROTRON_BIN=$here/ferrotron FERROTRON_GOLDEN=$here/golden:$here/golden-b FERROTRON_TEST_DEVICE=cuda
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rows=() failed=0

# row NAME COMMAND...: runs the command, writes its log, records the verdict and the last line.
row() {
  local name=$1 begin=$SECONDS verdict=ok
  shift
  "$@" >"$logs/$name.log" 2>&1 || { verdict=FAILED; failed=1; }
  rows+=("$(printf '%-22s %-7s %4ds  %s' "$name" "$verdict" $((SECONDS - begin)) "$(tail -n 1 "$logs/$name.log" | cut -c1-110)")")
  echo "${rows[-1]}"
}
has() { [[ " $parts " == *" $1 "* ]]; }
tests() { "$here/tests/$1" --test-threads="${THREADS:-8}" "${@:2}" | grep -v '^test .* ok$'; return "${PIPESTATUS[0]}"; }
ft() { "$here/ferrotron" "$@"; }

load_cold() { FERROTRON_CACHE=$work/cache ft kernels --load; }
damaged_cache() { # a truncated entry and one of another kernel are rebuilt
  local first second
  first=$(ls "$work"/cache/*.cubin | head -1); second=$(ls "$work"/cache/*.cubin | tail -1)
  truncate -s 100 "$first" && cp "$first" "$second" && FERROTRON_CACHE=$work/cache ft kernels --load
}
families() { # parity of CPU and CUDA for every golden Hugging Face model
  local bad=0 dir
  for dir in "$here"/golden*/hf/*/; do
    for dtype in f32 bf16; do
      echo "== $(basename "$dir") $dtype"
      ft parity "cpu,$dtype" "cuda,$dtype" --model "$dir" --input "$dir/expected.safetensors" | tail -1 || bad=1
      [ "${PIPESTATUS[0]}" = 0 ] || bad=1
    done
  done
  return $bad
}
same_bits() {
  ft train --device cuda --out "$work/a" && ft train --device cuda --out "$work/b" &&
    diff -r "$work/a/checkpoints" "$work/b/checkpoints" && echo "two runs wrote identical checkpoints"
}
checked() { ft train --device cuda --check --steps 5 --out "$work/checked" && echo "five steps, every memory access ordered"; }
like_the_cpu() {
  ft train --device cpu --out "$work/cpu" >"$work/cpu.txt" && ft train --device cuda --out "$work/gpu" >"$work/gpu.txt" &&
    python3 - "$work" <<'PY'
import re, sys
loss = [float(re.search(r"validation loss\s+([\d.]+)", open(f"{sys.argv[1]}/{d}.txt").read()).group(1)) for d in ("cpu", "gpu")]
apart = abs(loss[1] / loss[0] - 1)
print(f"validation loss {loss[0]} on the CPU, {loss[1]} on the GPU: {apart:.2%} apart")
sys.exit(apart > 0.01)
PY
}
sanitize() { # TOOL FILTER...: one process per filter, side by side (the tool loses track of launches from
  # many threads), with plain allocations (it takes an access across two mappings for one out of bounds)
  local tool=$1 bad=0 family pids=()
  shift
  for family in "$@"; do
    FERROTRON_EXPANDABLE_SEGMENTS=0 compute-sanitizer --tool "$tool" --error-exitcode 9 "$here/tests/conformance" --test-threads=1 "$family" \
      >"$logs/$tool-${family//::/-}.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || bad=1; done
  grep -h "SUMMARY" "$logs/$tool"-*.log | sort | uniq -c | tail -3
  return $bad
}
model() { # recipe of a model with large GEMMs
  printf '[model]\nlayers = %s\nhidden = 2048\nheads = 16\nkv_heads = 4\nhead_dim = 128\nffn = 8192\nvocab = 256\nmax_positions = 4096\n' "${1:-4}"
  printf '[data]\npath = "embedded"\nseq_len = 4096\n[train]\nsteps = 8\nglobal_batch = 8\nmicro_batch = 2\n[precision]\ndtype = "bf16"\n[generate]\ntokens = 0\n[checkpoint]\nat_end = false\n[optimizer]\nlr = 1e-4\n'
}
same_as_one() { # LAYOUT...: one step of several ranks on one GPU against one rank, bf16
  local bad=0 layout
  model 4 >"$work/model.toml"
  for layout in "$@"; do
    echo "== $layout"
    ft parity "cuda,bf16" "cuda,bf16,$layout" --recipe "$work/model.toml" | tail -2
    [ "${PIPESTATUS[0]}" = 0 ] || bad=1
  done
  return $bad
}
traced() { # RANKS KEY=VALUE...: overlap of communication with compute
  local ranks=$1 set=()
  shift
  for key in "$@"; do set+=(--set "$key"); done
  model 8 >"$work/model.toml"
  ft train "$work/model.toml" --device cuda --ranks "$ranks" "${set[@]}" --out "$work/traced-$1" --fresh --trace "$work/trace.json"
  local rc=$?
  gzip -c "$work/trace.json" >"$logs/trace-${1//[^a-z0-9]/-}.json.gz"
  return $rc
}
families=(attention::every attention::packed elementwise norm optimizer invalid_arguments rope embedding_loss)
ours() { ft bench train --device cuda --work "$1" --profile && ft bench train --device cuda --work "$1" --json >"$logs/$1.json" && python3 -c "
import json, sys; r = json.load(open(sys.argv[1])); print(f\"{r['tok_s']:.0f} tokens/s, {r['tflops']:.0f} TFLOP/s, MFU {r['mfu']:.1%}, {r['peak_bytes']/2**30:.1f} GiB\")" "$logs/$1.json"; }
peer() { SDPA=$2 python3 "$here/peers/torch_train.py" "$1"; }

if has start; then
  row doctor ft doctor
  row kernels-cold load_cold
  row kernels-warm load_cold
  row kernels-damaged damaged_cache
fi
has memory && row memory-pool "$here/tests/tensor_lib" --test-threads=1 pool_tests && row memory-growth python3 "$here/memory_growth.py" cuda
has conformance && row kernels-unit env FERROTRON_TEST_DEVICE=cuda "$here/tests/kernels_lib" --test-threads=1 cuda::
has conformance && row conformance tests conformance && row conformance-checked env FERROTRON_TEST_CHECK=1 "$here/tests/conformance" --test-threads=8
has comm && row ranks-on-one-gpu tests threads && row nccl env FERROTRON_NEEDS_NCCL=1 "$here/tests/comm_lib" nccl::tests
# Processes that share the GPU, which needs NCCL 2.30 (FERROTRON_CUDA_LIB names its folder). A quarter of the layouts: PART=2/4 for others.
if has processes; then
  row nccl-processes env FERROTRON_NEEDS_NCCL=1 "$here/tests/nccl" --test-threads=1
  row nccl-layouts python3 "$here/gpu_layouts.py" "$here/ferrotron" "$logs/layouts" --part "${PART:-1/4}"
  row nccl-faults python3 "$here/gpu_faults.py" "$here/ferrotron" "$logs/faults"
fi
if has layouts; then
  row context-attention env THREADS=1 "$here/tests/context_parallel" --test-threads=1
  row layout-matrix env FERROTRON_MATRIX="${MATRIX:-60}" "$here/tests/layouts" --test-threads=1 --nocapture matrix
  row layouts-bf16 same_as_one tp=2 pp=2 cp=2 dp=2 tp=2,cp=2 tp=2,pp=2,dp=2
  row trace-tp2 traced 2 parallel.tp=2
  row trace-dp2 traced 2 parallel.zero=1
fi
if has precision; then # FP8 GEMMs and FP8 parameters
  for part in fp8 fp8_moe fp8_weight_cast fp8_params_moe; do row "$part" "$here/tests/$part" --test-threads=2; done
fi
if has moe; then
  row golden-router tests golden_router
  row golden-permute tests golden_permute
  row moe-matrix env FERROTRON_MATRIX="${MATRIX:-60}" "$here/tests/moe" --test-threads=1 --nocapture matrix
  row moe-overlap "$here/tests/moe" --test-threads=1 overlap::
  row moe-deadlock "$here/tests/moe" --test-threads=1 deadlock::
fi
has golden && row golden-hf tests golden_hf
has parity && row parity families
has train && row train-cuda-graph tests cuda_graph && row train-same-bits same_bits && row train-like-cpu like_the_cpu && row train-checked checked
has regress && row regress ft regress --device cuda --out "$work/regress"
has docs && row docs-on-gpu env FERROTRON_REPOSITORY="$here/repository" "$here/tests/docs" --nocapture commands_that_need_a_gpu
has kill && row kill-and-resume tests interruptions
# cuBLASLt's own kernels are NVIDIA's to check for races. racecheck runs as sm_86: it orders by an mbarrier's phase only what the
# arriving lane itself has read or written, so that it reports every Hopper kernel in which one lane arrives for its warp.
has sanitizer && row memcheck sanitize memcheck gemm "${families[@]}" && FERROTRON_AS=sm_86 row racecheck sanitize racecheck "${families[@]}"
if has bench; then
  for pair in ${BENCH:-gpt2-124m:gpt2-bf16 llama-1b:llama1b-bf16 llama-8b-8l:llama8b8l-bf16 moe-8l:moe8l-bf16}; do
    row "bench-${pair%%:*}" ours "${pair%%:*}"
    row "peer-${pair##*:}" peer "${pair##*:}" default
    row "peer-${pair##*:}-cudnn" peer "${pair##*:}" cudnn
  done
fi

echo
printf '%s\n' "${rows[@]}"
[ $failed = 0 ] && echo "verdict: all passed" || echo "verdict: something failed, see $logs"
exit $failed
