#!/usr/bin/env bash
# Trains a recipe with AdamW and with Muon at several learning rates and compares the losses:
#   scripts/compare_optimizers.sh RECIPE STEPS OUT
# FERROTRON names the binary (default: ferrotron); ADAMW_LR and MUON_LR are lists of learning rates; further arguments go to train.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
recipe=$1 steps=$2 out=$3
shift 3
ferrotron=${FERROTRON:-ferrotron}
for kind in adamw muon; do
  rates=ADAMW_LR; [ $kind = muon ] && rates=MUON_LR
  for lr in ${!rates:-3e-4 1e-3 3e-3}; do
    "$ferrotron" train "$recipe" --steps "$steps" --out "$out/$kind-$lr" \
      --set optimizer.kind=$kind --set optimizer.lr=$lr "$@"
  done
done
python3 - "$out" <<'PY'
import json, pathlib, sys
runs = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/events.jsonl")):
    events = [json.loads(line) for line in path.open()]
    losses = {e["step"]: e["loss"] for e in events if "loss" in e and "step" in e and "grad_norm" in e}
    runs[path.parent.name] = [losses[s] for s in sorted(losses)]
def smooth(x, n=10):
    return [sum(x[max(0, i - n + 1):i + 1]) / len(x[max(0, i - n + 1):i + 1]) for i in range(len(x))]
runs = {name: smooth(x) for name, x in runs.items() if x}
for name, x in runs.items():
    print(f"{name}: loss {x[-1]:.4f} after {len(x)} steps")
adamw = [x[-1] for name, x in runs.items() if name.startswith("adamw")]
if adamw:
    best = min(adamw)
    for name, x in runs.items():
        if name.startswith("muon"):
            first = next((i + 1 for i, loss in enumerate(x) if loss <= best), None)
            print(f"{name}: reaches AdamW's {best:.4f} " + (f"at step {first}" if first else "never"))
PY
