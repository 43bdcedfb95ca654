#!/usr/bin/env bash
# Runs the fuzz targets, each from its seeds and the corpus of earlier runs, two at a time. Prints executions, coverage and corpus.
# Usage: scripts/fuzz.sh [SECONDS] [TARGET...]     (default: 3600 seconds each, every target)
# FERROTRON_FUZZ_SEED=N repeats a run; without it every run mutates differently.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"

seconds=${1:-3600}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=($(basename -s .rs fuzz_targets/*.rs))

# What cargo-fuzz would set, so that it need not be installed; RUSTC_BOOTSTRAP lets a stable compiler accept the coverage flags.
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Ccodegen-units=16"
triple=$(rustc -vV | sed -n 's/^host: //p')
cargo build --release --quiet --target "$triple" $(printf -- '--bin %s ' "${targets[@]}")

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
fuzz() {
  local target=$1 seeds=()
  mkdir -p "corpus/$target" "artifacts/$target"
  case $target in
    recipe) seeds=(../crates/core/src/config/recipes) ;;
    hf_config) for model in ../tests/golden*/hf/*/; do cp "$model/config.json" "corpus/$target/$(basename "$model")"; done ;;
    *) [ ! -d "seeds/$target" ] || seeds=("seeds/$target") ;;
  esac
  # 20 seconds and 2 GiB are the limits of every parser.
  "${CARGO_TARGET_DIR:-target}/$triple/release/$target" "corpus/$target" "${seeds[@]}" -artifact_prefix="artifacts/$target/" -timeout=20 \
    -rss_limit_mb=2048 -seed="${FERROTRON_FUZZ_SEED:-0}" -max_total_time="$seconds" -print_final_stats=1 >"$logs/$target" 2>&1
}
failed=0
report() {
  local target=$1 log="$logs/$1" start
  start=$(sed -n 's/.*INITED *\(cov: [0-9]* .*\) exec.*/start \1, /p' "$log" | head -1)
  printf '%-14s %s\n' "$target" "${start}end $(grep -E '(DONE|pulse|NEW|REDUCE)' "$log" |
    tail -1 | sed 's/.*\(cov: [0-9]*\).*\(corp: [^ ]*\).*/\1 \2/'), $(sed -n 's/stat::number_of_executed_units: *//p' "$log") executions"
}
for ((i = 0; i < ${#targets[@]}; i += 2)); do
  pids=()
  for target in "${targets[@]:i:2}"; do fuzz "$target" & pids+=($!:$target); done
  for pair in "${pids[@]}"; do
    if ! wait "${pair%%:*}"; then
      failed=1
      echo "${pair##*:}: CRASH, input in fuzz/artifacts/${pair##*:}" >&2
      tail -30 "$logs/${pair##*:}" >&2
    fi
    report "${pair##*:}"
  done
done
exit $failed
