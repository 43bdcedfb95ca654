#!/usr/bin/env python3
"""Draws a trace of `ferrotron train --trace FILE.json` as an SVG with three lanes: computation, copies to the host, copies from
the host. Forward and backward of layers are named. Prints how long each lane is busy, and how much of the copies runs beside
computation.

Usage: scripts/timeline.py TRACE.json OUT.svg [--rank N] [--from MS] [--to MS] [--title TEXT]
Times count from the beginning of the trace; without them its last micro-batch is drawn, with the update that follows."""
import argparse, html, json

WIDTH, LEFT, LANE, GAP, TOP = 1200, 150, 34, 14, 56
LANES = [("compute", "computation", "#4c78a8"), ("offload", "copies to the host", "#e45756"),
         ("reload", "copies from the host", "#54a24b")]


def parse():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("trace")
    words.add_argument("out")
    words.add_argument("--rank", type=int, default=0)
    words.add_argument("--from", dest="start", type=float, help="milliseconds")
    words.add_argument("--to", dest="end", type=float, help="milliseconds")
    words.add_argument("--title", default="")
    return words.parse_args()


def lanes_of(events, rank):
    """Stream name of every thread of a rank: "compute (stream 0)" is "compute". Streams of one name share a lane."""
    names = {}
    for e in events:
        if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == rank:
            names[e["tid"]] = e["args"]["name"].split(" (stream")[0]
    return names


def merged(intervals, gap=0.0):
    """Sorted intervals, those joined that are at most `gap` apart."""
    out = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1] + gap:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def common(a, b):
    """Length that two lists of disjoint sorted intervals have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return total


def last_micro_batch(layers, end):
    """From the last forward that follows a backward, or from the beginning, to the end."""
    begin, previous = 0.0, "backward"
    for start, _, name in layers:
        kind = name.split(" ")[0]
        if kind == "forward" and previous == "backward":
            begin = start
        previous = kind
    return begin, end


def main():
    args = parse()
    events = json.load(open(args.trace))["traceEvents"]
    names = lanes_of(events, args.rank)
    spans = [(e, names.get(e["tid"], "")) for e in events if e["ph"] == "X" and e["pid"] == args.rank]
    busy = {lane: [] for lane, _, _ in LANES}
    layers = []
    for e, stream in spans:
        start, end = e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3
        if e["cat"] == "kernel" and stream in busy:
            busy[stream].append((start, end))
        if e["cat"] == "region" and stream == "compute" and "layer" in e["name"]:
            layers.append((start, end, e["name"]))
    if not busy["compute"]:
        raise SystemExit(f"{args.trace}: rank {args.rank} computes nothing in it")
    layers.sort()
    latest = max(end for lane in busy.values() for _, end in lane)
    start, end = last_micro_batch(layers, latest)
    start, end = args.start if args.start is not None else start, args.end if args.end is not None else end
    if end <= start:
        raise SystemExit("nothing is between --from and --to")
    scale = (WIDTH - LEFT - 20) / (end - start)
    x = lambda t: LEFT + (min(max(t, start), end) - start) * scale
    height = TOP + 3 * (LANE + GAP) + 40
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
           f'<text x="{LEFT}" y="18" font-size="14">{html.escape(args.title or args.trace)}</text>']
    drawn = {}
    for i, (lane, title, color) in enumerate(LANES):
        y = TOP + i * (LANE + GAP)
        # Closer than half a pixel is one rectangle.
        inside = [(max(a, start), min(b, end)) for a, b in busy[lane] if b > start and a < end]
        drawn[lane] = merged(inside)
        out.append(f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 4}" text-anchor="end">{title}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{LANE}" fill="#f2f2f2"/>')
        for a, b in merged(inside, 0.5 / scale):
            out.append(f'<rect x="{x(a):.1f}" y="{y}" width="{max(x(b) - x(a), 0.3):.1f}" height="{LANE}" fill="{color}"/>')
    for a, b, name in layers:
        if b <= start or a >= end:
            continue
        # "forward layer 3" is "F3".
        short = name[0].upper() + name.split(" ")[-1]
        out.append(f'<rect x="{x(a):.1f}" y="{TOP - 20}" width="{max(x(b) - x(a) - 1, 0.3):.1f}" height="16" '
                   f'fill="{"#9ecae9" if short[0] == "F" else "#d6a5c9"}"><title>{html.escape(name)}</title></rect>')
        if x(b) - x(a) > 8 * len(short):
            out.append(f'<text x="{(x(a) + x(b)) / 2:.1f}" y="{TOP - 8}" text-anchor="middle" font-size="11">{short}</text>')
    y = TOP + 3 * (LANE + GAP)
    step = next(s for s in (m * 10 ** p for p in range(-4, 7) for m in (1, 2, 5)) if (end - start) / s <= 12)
    ticks = int((end - start) / step) + 1
    for k in range(ticks):
        t = start + k * step
        out.append(f'<line x1="{x(t):.1f}" y1="{TOP}" x2="{x(t):.1f}" y2="{y}" stroke="#bbb" stroke-dasharray="2 3"/>')
        out.append(f'<text x="{x(t):.1f}" y="{y + 12}" text-anchor="middle">{k * step:g} ms</text>')
    note = "F and B: forward and backward of a layer" if layers else ""
    out.append(f'<text x="{LEFT}" y="{y + 30}" fill="#555">{note}</text></svg>')
    open(args.out, "w").write("\n".join(out) + "\n")
    for lane, title, _ in LANES:
        total = sum(b - a for a, b in drawn[lane])
        beside = "" if lane == "compute" else f", {common(drawn[lane], drawn['compute']):.2f} ms of it beside computation"
        print(f"{title}: {total:.2f} of {end - start:.2f} ms{beside}")


main()
