#!/usr/bin/env python3
"""Plots the training losses of several runs as an SVG.

Each argument is NAME=RUN[,RUN...]: run folders with events.jsonl; several are averaged (one recipe with several seeds). Losses
are moving averages; the legend has the mean of the last 50 steps.
Usage: scripts/curves.py PICTURE.svg NAME=RUN[,RUN...]..."""
import json, pathlib, sys

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT, WINDOW = 760, 420, 60, 40, 30, 20, 10
COLOURS = ["#222222", "#1b6ca8", "#d1495b", "#3a7d44", "#8d5fb0", "#c77d0a"]


def losses(folder):
    lines = (json.loads(line) for line in open(pathlib.Path(folder) / "events.jsonl"))
    return {e["step"]: e["loss"] for e in lines if e["kind"] == "step"}


def mean(runs):
    runs = [losses(r) for r in runs]
    steps = sorted(set.intersection(*(set(r) for r in runs)))
    return [(s, sum(r[s] for r in runs) / len(runs)) for s in steps]


if len(sys.argv) < 3:
    sys.exit(__doc__)
curves = []
for argument in sys.argv[2:]:
    name, _, folders = argument.partition("=")
    points = mean(folders.split(","))
    smooth = []
    for i in range(WINDOW - 1, len(points)):
        part = points[i - WINDOW + 1:i + 1]
        smooth.append((part[-1][0], sum(y for _, y in part) / WINDOW))
    curves.append((name, smooth, sum(y for _, y in points[-50:]) / len(points[-50:]), len(folders.split(","))))

last = max(s for _, c, _, _ in curves for s, _ in c)
high = min(4.0, max(y for _, c, _, _ in curves for _, y in c))
low = min(y for _, c, _, _ in curves for _, y in c)
low, high = low - 0.05 * (high - low), high
x = lambda s: LEFT + (WIDTH - LEFT - RIGHT) * s / last
y = lambda v: TOP + (HEIGHT - TOP - BOTTOM) * (high - min(v, high)) / (high - low)
out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
       f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
for k in range(6):
    v = low + (high - low) * k / 5
    out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>'
               f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.2f}</text>')
for k in range(5):
    s = last * k / 4
    out.append(f'<text x="{x(s):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{s:.0f}</text>')
out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>'
           f'<text x="14" y="{TOP - 10}">training loss</text>')
first = curves[0][2]
for (name, points, end, count), color in zip(curves, COLOURS):
    path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in points)
    out.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')
    row = TOP + 14 + 17 * COLOURS.index(color)
    apart = "" if end == first else f" ({end / first - 1:+.2%})"
    seeds = "" if count == 1 else f", {count} seeds"
    out.append(f'<line x1="{WIDTH - 300}" x2="{WIDTH - 276}" y1="{row - 4}" y2="{row - 4}" stroke="{color}" stroke-width="2"/>'
               f'<text x="{WIDTH - 270}" y="{row}">{name}: {end:.4f}{apart}{seeds}</text>')
    print(f"{name}: mean of the last 50 steps {end:.4f}{apart}{seeds}")
pathlib.Path(sys.argv[1]).write_text("\n".join(out + ["</svg>"]) + "\n")
