#!/usr/bin/env python3
"""What saving costs a run: the five steps after a checkpoint, against the next five of the same run, which has one every ten.
Windows of one run share the state of the machine, which differs more between runs than saves cost.

On the CPU: a model of 50 million parameters on 4 processes. On a GPU: llama-1b with 0.5 M tokens a step.
Needs a release build (cargo build --release), mpirun on the CPU, and an otherwise idle machine. Checkpoints go to a folder
in OUT (default: the system's folder for temporary files); use a memory-backed one if the disk writes less than 0.5 GB/s.
Usage: scripts/bench_saves.py cpu|gpu [PAIRS=7] [OUT [KEY=VALUE...]]      FERROTRON_BIN names another binary; keys are for gpu"""
import json, os, pathlib, shutil, statistics, subprocess, sys, tempfile

kind, pairs = sys.argv[1] if len(sys.argv) > 1 else "cpu", int(sys.argv[2]) if len(sys.argv) > 2 else 7
root = pathlib.Path(__file__).resolve().parent.parent
binary = os.environ.get("FERROTRON_BIN", str(root / "target/release/ferrotron"))
home = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[3] if len(sys.argv) > 3 else None))

WINDOW = 5
STEPS = 2 * WINDOW * (pairs + 1)
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
    """Seconds of five steps after each save, and of the five before the next: (with, without)."""
    out = home / "run"
    ended = subprocess.run(
        command + ["--out", str(out), "--set", f"checkpoint.every={2 * WINDOW}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if ended.returncode:
        sys.exit(ended.stderr.decode())
    events = [json.loads(line) for line in open(out / "events.jsonl")]
    at = {e["step"]: e["time"] for e in events if e["kind"] == "step"}
    saves = range(2 * WINDOW, STEPS - 2 * WINDOW + 1, 2 * WINDOW)
    return [(at[s + WINDOW] - at[s], at[s + 2 * WINDOW] - at[s + WINDOW]) for s in saves]


rows = measure()
for n, (after, without) in enumerate(rows):
    print(f"pair {n + 1}: {without:.2f} s without, {after:.2f} s with: {after / without - 1:+.1%}", flush=True)
all_after, all_without = (sum(row[k] for row in rows) for k in (0, 1))
median = statistics.median(a / b for a, b in rows) - 1
print(f"{kind}, a checkpoint every {WINDOW} steps: {all_after / all_without - 1:+.1%} in all, {median:+.1%} median of {pairs} pairs")
shutil.rmtree(home)
