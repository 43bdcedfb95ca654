#!/usr/bin/env bash
# Every data-parallel scheme (DDP, ZeRO-1, 2, 3, HSDP, HFSDP) over tp x cp x pp/vp x ep, precision and recomputation: bits and
# losses against each other and one rank, with the race checker on. In parts, so that it can be stopped and continued:
# scripts/test.sh runs a seeded sample of the same.
# Usage: scripts/schemes.sh [FIRST_PART [PARTS]]     (default: all of 8 parts from the first)
# The last line counts all parts that ran: "N cases, M failures".
set -euo pipefail
cd "$(dirname "$0")/.."
first="${1:-1}" parts="${2:-8}" cases=0 failures=0
for ((part = first; part <= parts; part++)); do
  log=$(FERROTRON_MATRIX=whole FERROTRON_MATRIX_PART="$part/$parts" \
    cargo test --locked --workspace --test schemes -- --nocapture 2>&1 | tee /dev/stderr) || true
  line=$(grep "^part $part of $parts: " <<<"$log") || { echo "schemes.sh: part $part did not run to its end" >&2; exit 1; }
  read -r _ _ _ _ n _ m _ <<<"$line"
  cases=$((cases + n)) failures=$((failures + m))
done
echo "$cases cases, $failures failures"
[ "$failures" -eq 0 ]
