#!/usr/bin/env python3
"""Memory that a run reserves beside what its tensors use, when sizes vary every step: a dropless MoE of 8 layers and 32 experts,
top-4, with expert parallelism over 2 ranks, which are threads on one device. Fails if more than 1.08 x the peak is reserved, if
reserved memory grows after step 50 by more than the peak does, or if the last quarter is more than 2 % slower than the second.

Needs a release build (cargo build --release). 2,000 steps take about two minutes on one H200; on the CPU the model is smaller.
Usage: scripts/memory_growth.py [cuda|cpu] [STEPS=2000] [KEY=VALUE...]      FERROTRON_BIN names another binary"""
import json, os, pathlib, subprocess, sys, tempfile

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
root = pathlib.Path(__file__).resolve().parent.parent
binary = os.environ.get("FERROTRON_BIN", str(root / "target/release/ferrotron"))
hidden, seq, batch, dtype = (1024, 1024, 16, "bf16") if device == "cuda" else (64, 128, 8, "f32")

RECIPE = f"""
[model]
layers = 8
hidden = {hidden}
heads = {hidden // 64}
ffn = {hidden}
vocab = 259
max_positions = {seq}
[moe]
experts = 32
topk = 4
ffn = {hidden // 2}
balance = "aux"
[parallel]
ep = 2
[data]
path = "embedded"
seq_len = {seq}
[train]
steps = {steps}
global_batch = {batch}
micro_batch = {batch // 2}
log_every = 1
[optimizer]
lr = 3e-4
[precision]
dtype = "{dtype}"
[generate]
tokens = 0
[checkpoint]
at_end = false
"""

with tempfile.TemporaryDirectory() as home:
    recipe = pathlib.Path(home) / "recipe.toml"
    recipe.write_text(RECIPE)
    command = [binary, "train", str(recipe), "--device", device, "--ranks", "2", "--out", f"{home}/run"]
    command += [word for key in sys.argv[3:] for word in ("--set", key)]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if ended.returncode:
        sys.exit(ended.stderr.decode())
    events = [json.loads(line) for line in open(f"{home}/run/events.jsonl")]

step = {e["step"]: e for e in events if e["kind"] == "step"}
print(f"{'step':>6} {'reserved':>12} {'peak in use':>12} {'ratio':>7}")
for n in sorted({n for n in (1, 10, 50, 500, 1000, 1500, 2000, steps) if n in step}):
    e = step[n]
    print(f"{n:>6} {e['reserved'] / 2**20:>8.1f} MiB {e['memory'] / 2**20:>8.1f} MiB {e['reserved'] / e['memory']:>7.4f}")


def rate(first, last):
    return sum(step[n]["batch"] for n in range(first + 1, last + 1)) * seq / (step[last]["time"] - step[first]["time"])


quarter = steps // 4
rates = [rate(max(1, q * quarter), (q + 1) * quarter) for q in range(4)]
print("tokens/s by quarter: " + ", ".join(f"{r:,.0f}" for r in rates) + f"; last / second {rates[3] / rates[1]:.3f}")
end, warm = step[steps], step[min(50, steps)]
wrong = []
if end["reserved"] > 1.08 * end["memory"]:
    wrong.append(f"reserves {end['reserved'] / end['memory']:.3f} x the peak in use")
if end["reserved"] - warm["reserved"] > end["memory"] - warm["memory"]:
    wrong.append(f"grows by {(end['reserved'] - warm['reserved']) / 2**20:.1f} MiB after step 50")
if rates[3] < 0.98 * rates[1]:
    wrong.append("slows down")
print("; ".join(wrong) or "ok")
sys.exit(bool(wrong))
