#!/usr/bin/env bash
# Trains one recipe with AdamW and with Muon at several learning rates and compares their training losses:
#   scripts/compare_optimizers.sh OUT [options of train, such as --device cuda]
# Writes OUT/compare.json, OUT/compare.csv and OUT/compare.svg. RECIPE (default: scripts/compare_optimizers.toml, on this
# repository's text), STEPS (300), ADAMW_LR and MUON_LR (lists of learning rates) and FERROTRON (the binary) can be set.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd) out=$1
shift
ferrotron=${FERROTRON:-ferrotron} steps=${STEPS:-300} recipe=${RECIPE:-$here/compare_optimizers.toml}
mkdir -p "$out"
data=()
if [ -z "${RECIPE:-}" ]; then
  [ -e "$out/text.idx" ] || (cd "$here/.." && find crates docs scripts -type f \( -name '*.rs' -o -name '*.md' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' \) -print0 | sort -z) |
    (cd "$here/.." && xargs -0 cat) | python3 -c '
import json, sys
text = sys.stdin.buffer.read().decode("utf-8", "replace")
for at in range(0, len(text), 8192):
    print(json.dumps({"text": text[at:at + 8192]}))' > "$out/text.jsonl"
  [ -e "$out/text.idx" ] || "$ferrotron" data build --output "$out/text" "$out/text.jsonl"
  data=(--data "$out/text")
fi
for kind in adamw muon; do
  rates=ADAMW_LR; [ $kind = muon ] && rates=MUON_LR
  for lr in ${!rates:-1e-3 2e-3 4e-3}; do
    "$ferrotron" train "$recipe" "${data[@]}" --steps "$steps" --out "$out/$kind-$lr" \
      --set optimizer.kind=$kind --set optimizer.lr=$lr "$@"
  done
done
mapfile -t best < <(python3 - "$out" <<'PY'
import csv, json, pathlib, sys
out, WINDOW = pathlib.Path(sys.argv[1]), 20
rows, target = [], None
for kind in ("adamw", "muon"):
    for path in sorted(out.glob(f"{kind}-*/events.jsonl")):
        events = [json.loads(line) for line in path.open()]
        losses = {e["step"]: e["loss"] for e in events if e.get("kind") == "step"}
        x = [losses[s] for s in sorted(losses)]
        smooth = [sum(x[max(0, i - WINDOW + 1):i + 1]) / min(i + 1, WINDOW) for i in range(len(x))]
        rows.append({"run": path.parent.name, "optimizer": kind, "steps": len(x), "loss": smooth[-1], "smooth": smooth})
target = min((r["loss"] for r in rows if r["optimizer"] == "adamw"))
for r in rows:
    smooth = r.pop("smooth")
    r["reaches_adamw_at"] = next((i + 1 for i, loss in enumerate(smooth) if i + 1 >= WINDOW and loss <= target), None)
(out / "compare.json").write_text(json.dumps({"window": WINDOW, "adamw_loss": target, "runs": rows}, indent=1) + "\n")
with (out / "compare.csv").open("w", newline="") as f:
    table = csv.DictWriter(f, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
for r in rows:
    print(f"{r['run']}: loss {r['loss']:.4f} after {r['steps']} steps; AdamW's best {target:.4f} at step {r['reaches_adamw_at']}", file=sys.stderr)
for kind in ("adamw", "muon"):
    print(min((r for r in rows if r["optimizer"] == kind), key=lambda r: r["loss"])["run"])
PY
)
python3 "$here/curves.py" "$out/compare.svg" "AdamW=$out/${best[0]}" "Muon=$out/${best[1]}"
