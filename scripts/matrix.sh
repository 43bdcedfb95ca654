#!/usr/bin/env bash
# Every legal layout up to 16 ranks, with every schedule and division of optimizer state, for four dense models and for mixtures
# of experts, in f32 and bf16, beside one rank: loss, every gradient, evaluation; of mixtures also biases and counts of choices.
# scripts/test.sh runs a seeded sample of the same.
# Usage: scripts/matrix.sh [CASES]     (default: all of them)
set -euo pipefail
cd "$(dirname "$0")/.."
FERROTRON_MATRIX="${1:-whole}" cargo test --locked -p ferrotron-core --test layouts --test moe matrix -- --nocapture
