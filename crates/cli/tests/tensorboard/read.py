"""Reads a run's event files with TensorBoard's EventAccumulator and compares everything with events.jsonl.

python read.py RUN [FOLDER]; prints the number of scalars and histograms that were compared.
"""
import json
import math
import sys

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

run = sys.argv[1]
folder = sys.argv[2] if len(sys.argv) > 2 else run + "/tensorboard"
log = [json.loads(line) for line in open(run + "/events.jsonl")]

# What the log says: scalars[tag][step], lists[tag][step].
scalars, lists = {}, {}


def put(table, tag, step, value):
    table.setdefault(tag, {})[step] = value


def walk(prefix, event, step):
    for key, value in event.items():
        if key in ("step", "kind", "time"):
            continue
        tag = key if key.startswith("moe/") else f"{prefix}/{key}"
        if value is None:
            put(scalars, tag, step, math.nan)
        elif isinstance(value, dict):
            walk(tag, value, step)
        elif isinstance(value, list):
            put(lists, tag, step, value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            put(scalars, tag, step, value)


for line in log:
    step = line.get("step", 0)
    if line["kind"] == "step":
        walk("train", line, step)
    elif line["kind"] in ("eval", "checkpoint"):
        walk(line["kind"], line, step)
    elif line["kind"] == "precision":
        for operand in line["operands"]:
            for name in ("saturation", "underflow", "amax", "error"):
                tag = f"fp8/{operand['role']}/{name}"
                lists.setdefault(tag, {}).setdefault(step, []).append(operand[name])
    elif line["kind"] == "sections":
        sys.exit("sections are not compared here")

seen = EventAccumulator(folder, size_guidance={"scalars": 0, "histograms": 0})
seen.Reload()
assert set(seen.Tags()["scalars"]) == set(scalars), set(seen.Tags()["scalars"]) ^ set(scalars)
assert set(seen.Tags()["histograms"]) == set(lists), set(seen.Tags()["histograms"]) ^ set(lists)

compared = [0, 0]
times = {line["step"]: line["time"] for line in log if line["kind"] == "step"}
for tag, expected in scalars.items():
    points = seen.Scalars(tag)
    assert [p.step for p in points] == sorted(expected), (tag, [p.step for p in points], sorted(expected))
    for point in points:
        np.testing.assert_equal(np.float32(point.value), np.float32(expected[point.step]), tag)
        if tag.startswith("train/"):
            assert point.wall_time == times[point.step], (tag, point)
        compared[0] += 1
for tag, expected in lists.items():
    points = seen.Histograms(tag)
    assert [p.step for p in points] == sorted(expected), (tag, [p.step for p in points], sorted(expected))
    for point in points:
        values, h = np.array(expected[point.step], dtype=np.float64), point.histogram_value
        assert (h.min, h.max, h.num) == (values.min(), values.max(), len(values)), (tag, h, values)
        np.testing.assert_allclose(h.sum, values.sum(), rtol=1e-12)
        np.testing.assert_allclose(h.sum_squares, (values**2).sum(), rtol=1e-12)
        # Values up to the right end of each bucket.
        up_to = [int((values <= limit).sum()) for limit in h.bucket_limit]
        assert list(np.cumsum(h.bucket)) == up_to, (tag, h, values)
        compared[1] += 1
print(*compared)
