#!/usr/bin/env python3
"""Benchmarks Ferrotron against PyTorch on a GPU, interleaved: a run of Ferrotron before and after every PyTorch run.

Needs PyTorch. The binary and the PyTorch scripts are looked for beside this file (in a bundle of scripts/gpu-bundle.sh) and in
the repository. WORK is a benchmark model or a custom/... shape (see peers/torch_train.py). Runs are appended to LOGS/runs.jsonl;
a table is printed at the end.
Usage: bench_gpu.py LOGS WORK... [-- PEER...]     PEER: bf16 bf16-cudnn autocast autocast-cudnn fp8 fp8-cudnn
                                                  (default: bf16 bf16-cudnn autocast autocast-cudnn)
       OURS="--set a.b=c" adds to our command line; STEPS=20"""
import json, os, pathlib, statistics, subprocess, sys, time

NAMES = {"gpt2-124m": "gpt2", "llama-1b": "llama1b", "llama-8b-8l": "llama8b8l", "moe-8l": "moe8l"}
here = pathlib.Path(__file__).resolve().parent
find = lambda *paths: next((p for p in (here / x for x in paths) if p.exists()), None)
program = find("ferrotron", "../target/release/ferrotron")
peers = find("peers/torch_train.py", "scripts/peers/torch_train.py")
if len(sys.argv) < 3 or not program or not peers:
    sys.exit(__doc__ if program and peers else "bench_gpu.py: no program (cargo build --release) or no peers/torch_train.py")
args = sys.argv[2:]
cut = args.index("--") if "--" in args else len(args)
works, variants = args[:cut], args[cut + 1:] or ["bf16", "bf16-cudnn", "autocast", "autocast-cudnn"]
logs = pathlib.Path(sys.argv[1])
logs.mkdir(parents=True, exist_ok=True)


def keep(record):
    with open(logs / "runs.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")
    return record


def ours(work):
    command = [program, "bench", "train", "--device", "cuda", "--work", work, "--json", "--steps", os.environ.get("STEPS", "20")]
    begin = time.time()
    run = subprocess.run(command + os.environ.get("OURS", "").split(), capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"ours failed on {work}: {run.stderr.strip()[-400:]}")
    r = keep(json.loads(run.stdout) | {"who": "ours", "wall_s": time.time() - begin})
    print(f"  ours            {r['step_ms']:8.2f} ms {r['tok_s']:9.0f} tokens/s {r['peak_bytes'] / 2**30:5.1f} GiB, "
          f"{r['of_roofline']:.1%} of the roofline", flush=True)
    return r


def peer(work, variant):
    kind, _, attention = variant.partition("-")
    name = f"{work}/mode={kind}" if work.startswith("custom/") else f"{NAMES[work]}-{kind}"
    env = os.environ | {"SDPA": attention or "default"}
    run = subprocess.run([sys.executable, peers, name], capture_output=True, text=True, env=env)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    r = keep((found or [{"error": run.stderr[-400:]}])[0] | {"who": variant})
    if "tok_s" in r:
        print(f"  {variant:15} {r['step_ms']:8.2f} ms {r['tok_s']:9.0f} tokens/s {r['peak_gib']:5.1f} GiB", flush=True)
    else:
        print(f"  {variant:15} failed: {r.get('error', '')[:200]}", flush=True)
    return r


rows = []
for work in works:
    print(work, flush=True)
    mine, theirs = [ours(work)], {}
    for variant in variants:
        theirs[variant] = peer(work, variant)
        mine.append(ours(work))
    r = sorted(mine, key=lambda r: r["tok_s"])[len(mine) // 2]
    cells = [work, f"{r['tok_s']:,.0f}", f"{r['tflops']:.0f}", f"{r['mfu']:.1%}", f"{r['peak_bytes'] / 2**30:.1f}", f"{r['of_roofline']:.1%}"]
    for kind in dict.fromkeys(v.partition("-")[0] for v in variants):
        got = [t for v, t in theirs.items() if v.partition("-")[0] == kind and "tok_s" in t]
        best = max(got, key=lambda t: t["tok_s"], default=None)
        cells += [f"{best['tok_s']:,}", f"{best['peak_gib']}", f"{r['tok_s'] / best['tok_s']:.3f}"] if best else ["-"] * 3
    rows.append(cells)

heads = ["work", "ours, tokens/s", "TFLOP/s", "MFU", "GiB", "of the roofline"]
for kind in dict.fromkeys(v.partition("-")[0] for v in variants):
    heads += [f"{kind} peer, its faster attention", "GiB", "ratio"]
print()
for line in [heads, ["---"] * len(heads)] + rows:
    print("| " + " | ".join(line) + " |")
