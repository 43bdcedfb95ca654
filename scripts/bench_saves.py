#!/usr/bin/env python3
"""What saving costs a run with a checkpoint every 5 steps: the time of ten steps with one save, against ten median steps of the
same run. Runs differ by more than saves cost.

On the CPU: a model of 50 million parameters on 4 processes. On a GPU: llama-1b with 0.5 M tokens a step.
Needs a release build (cargo build --release), mpirun on the CPU, and an otherwise idle machine. Checkpoints go to a folder
in OUT (default: the system's folder for temporary files); use a memory-backed one if the disk writes less than 0.5 GB/s.
Usage: scripts/bench_saves.py cpu|gpu [SAVES=7] [OUT [KEY=VALUE...]]      FERROTRON_BIN names another binary; keys are for gpu"""
import json, os, pathlib, shutil, statistics, subprocess, sys, tempfile

kind, pairs = sys.argv[1] if len(sys.argv) > 1 else "cpu", int(sys.argv[2]) if len(sys.argv) > 2 else 7
root = pathlib.Path(__file__).resolve().parent.parent
binary = os.environ.get("FERROTRON_BIN", str(root / "target/release/ferrotron"))
home = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[3] if len(sys.argv) > 3 else None))

EVERY = 5
STEPS = 2 * EVERY * (pairs + 1)
CPU = """
[model]
layers = 8
hidden = 640
heads = 10
ffn = 1792
vocab = 8192
[data]
path = "embedded"
seq_len = 128
[train]
steps = %d
global_batch = 16
micro_batch = 4
log_every = 1
[optimizer]
lr = 1e-4
[parallel]
zero = 1
[generate]
tokens = 0
[checkpoint]
at_end = false
keep = 1
""" % STEPS

if kind == "cpu":
    recipe = home / "recipe.toml"
    recipe.write_text(CPU)
    mpi = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-n", "4"]
    command = mpi + [binary, "train", str(recipe), "--device", "cpu", "--threads", "1"]
else:
    keys = ["data.path=embedded", "checkpoint.at_end=false", "checkpoint.keep=1", "train.log_every=1", "generate.tokens=0"]
    command = [binary, "train", "llama-1b", "--device", "cuda", "--steps", str(STEPS)]
    command += [word for key in keys + sys.argv[4:] for word in ("--set", key)]


def measure():
    """Seconds from each save to the next, and those of as many steps without one: ten times their median."""
    out = home / "run"
    ended = subprocess.run(
        command + ["--out", str(out), "--set", f"checkpoint.every={2 * EVERY}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if ended.returncode:
        sys.exit(ended.stderr.decode())
    events = [json.loads(line) for line in open(out / "events.jsonl")]
    steps = {e["step"]: e for e in events if e["kind"] == "step"}
    rows = []
    # Only before a save is a step's event written when the step ends: the host runs ahead of the GPU otherwise.
    for save in range(2 * EVERY, STEPS - 2 * EVERY + 1, 2 * EVERY):
        alone = statistics.median(steps[save + n]["seconds"] for n in range(1, 2 * EVERY + 1))
        rows.append((steps[save + 2 * EVERY]["time"] - steps[save]["time"], 2 * EVERY * alone))
    return rows


rows = measure()
# One save in ten steps: twice as much with one in five.
costs = [2 * (took / alone - 1) for took, alone in rows]
for n, ((took, alone), cost) in enumerate(zip(rows, costs)):
    first = ", the first, which allocates its memory" if n == 0 else ""
    print(f"save {n + 1}{first}: {took:.2f} s for {2 * EVERY} steps, {alone:.2f} s without: {cost:+.1%} with one every {EVERY}", flush=True)
later = costs[1:] or costs
print(f"{kind}, a checkpoint every {EVERY} steps: {statistics.median(later):+.1%} (median of {len(later)} saves after the first)")
shutil.rmtree(home)
