#!/usr/bin/env bash
# Attacks the program: at least 765 random kills over 15 configurations, 170 of one of four processes under mpirun, a crash at
# every file-system call of `train`, `convert` and `data build`, corrupt inputs of every parser, 1,020 concurrent conversions, 102 drills.
# scripts/test.sh runs a seeded sample of the same.
# Usage: scripts/soak.sh [FACTOR]     (default 17: so many times the rounds of the sample)
set -euo pipefail
cd "$(dirname "$0")/.."
export FERROTRON_SOAK="${1:-17}"
cargo test --locked --workspace --no-fail-fast --test interruptions --test crash_points --test corrupt_files --test convert \
  --test malformed_input --test launch --test untrusted_input --test runs --test chat --test data_files --test drill -- --nocapture
