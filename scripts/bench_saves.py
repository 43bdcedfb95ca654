#!/usr/bin/env python3
"""What saving costs a run: the same run with a checkpoint every 5 steps and without, in turn; medians of pairs.

On the CPU: a model of 50 million parameters on 4 processes. On a GPU: llama-1b with 0.5 M tokens a step.
Needs a release build (cargo build --release), mpirun on the CPU, and an otherwise idle machine. Checkpoints go to a folder
in OUT (default: the system's folder for temporary files); use a memory-backed one if the disk writes less than 0.5 GB/s.
Usage: scripts/bench_saves.py cpu|gpu [PAIRS=3] [OUT [KEY=VALUE...]]      FERROTRON_BIN names another binary; keys are for gpu"""
import os, pathlib, shutil, statistics, subprocess, sys, tempfile, time

kind, pairs = sys.argv[1] if len(sys.argv) > 1 else "cpu", int(sys.argv[2]) if len(sys.argv) > 2 else 3
root = pathlib.Path(__file__).resolve().parent.parent
binary = os.environ.get("FERROTRON_BIN", str(root / "target/release/ferrotron"))
home = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[3] if len(sys.argv) > 3 else None))

STEPS = 11  # saves after 5 and 10
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


def measure(every):
    """Seconds from the end of the first step to the end of the last, as the log's growth shows it."""
    out = home / f"run-{every}"
    shutil.rmtree(out, ignore_errors=True)
    child = subprocess.Popen(
        command + ["--out", str(out), "--set", f"checkpoint.every={every}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    log, times = out / "events.jsonl", {}
    while child.poll() is None and len(times) < STEPS:
        text = log.read_text() if log.exists() else ""
        for n in range(len(times), text.count('"kind":"step"')):
            times[n] = time.monotonic()
        time.sleep(0.01)
    error = child.communicate()[1]
    if child.returncode:
        sys.exit(error.decode())
    shutil.rmtree(out)
    return times[STEPS - 1] - times[0]


measure(0)  # warms caches
rows = []
for pair in range(pairs):
    rows.append((measure(0), measure(5)))
    without, with_saves = rows[-1]
    print(f"pair {pair + 1}: {without:.2f} s without, {with_saves:.2f} s with: {with_saves / without - 1:+.1%}", flush=True)
print(f"{kind}, a checkpoint every 5 steps: {statistics.median(b / a for a, b in rows) - 1:+.1%} (median of {pairs} pairs)")
shutil.rmtree(home)
