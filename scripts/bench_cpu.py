#!/usr/bin/env python3
"""Benchmarks Ferrotron against PyTorch on the CPU: the `tiny` recipe, runs interleaved, medians of pairs.

Needs PyTorch (pip install torch), a release build (cargo build --release) and an otherwise idle machine.
Usage: scripts/bench_cpu.py [pairs=5] [threads=2]"""
import json, pathlib, statistics, subprocess, sys

pairs, threads = (int(sys.argv[i]) if len(sys.argv) > i else d for i, d in ((1, 5), (2, 2)))
root = pathlib.Path(__file__).resolve().parent.parent
peer = [sys.executable, str(root / "scripts/peers/torch_cpu.py"), str(threads)]
ours = [str(root / "target/release/ferrotron"), "bench", "train", "--work", "tiny", "--device", "cpu", "--json", "--threads", str(threads)]


def lines(command):
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")]


def measure(dtype):
    out = subprocess.run(ours + ["--dtype", dtype], capture_output=True, text=True, check=True).stdout
    return json.loads(out)["tok_s"]


rows = {"f32": [], "bf16": []}
for pair in range(pairs):
    mine = {dtype: measure(dtype) for dtype in rows}
    theirs = lines(peer)
    for dtype in rows:
        best = max((r for r in theirs if r["dtype"] == dtype), key=lambda r: r["tok_s"])
        rows[dtype].append((mine[dtype], best["tok_s"]))
        how = "compiled" if best["compiled"] else "eager"
        print(f"pair {pair + 1} {dtype}: ours {mine[dtype]:.0f}, {best['peer']} ({how}) {best['tok_s']} tokens/s", flush=True)

print("\n| tiny, tokens/s | ours (median) | PyTorch, its fastest (median) | ratio of medians | median of pair ratios |")
print("|---|---|---|---|---|")
for dtype, got in rows.items():
    a, b = statistics.median(x[0] for x in got), statistics.median(x[1] for x in got)
    pair_ratio = statistics.median(x / y for x, y in got)
    print(f"| {dtype} | {a:,.0f} | {b:,.0f} | {a / b:.2f} | {pair_ratio:.2f} |")
