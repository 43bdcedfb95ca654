#!/usr/bin/env bash
# Every legal layout up to 16 ranks, with every pipeline schedule and ZeRO stage, for four dense models and for MoE models, in f32
# and bf16, against one rank: loss, every gradient, evaluation; for MoE also expert biases and tokens per expert.
# scripts/test.sh runs a seeded sample of the same.
# Usage: scripts/matrix.sh [CASES]     (default: all of them)
set -euo pipefail
cd "$(dirname "$0")/.."
FERROTRON_MATRIX="${1:-whole}" cargo test --locked -p ferrotron-core --test layouts --test moe matrix -- --nocapture
