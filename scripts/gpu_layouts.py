#!/usr/bin/env python3
"""Trains over NCCL with real processes that share one GPU (NCCL 2.30 or newer), under many layouts, and compares the losses
with those of one rank. Where a case is for CUDA graphs or for MoE messages that overflow, that must have happened.

Usage: gpu_layouts.py FERROTRON LOGS [--part I/N] [--launcher variables|torchrun] [--only NAME]
Each part ends within eight minutes. FERROTRON_CUDA_LIB names the folder of NCCL where the system's is older than 2.30."""
import argparse, json, os, pathlib, re, shutil, socket, subprocess, sys, tempfile, time

DENSE = """[model]
layers = 4
hidden = 128
heads = 4
kv_heads = 4
head_dim = 32
ffn = 256
vocab = 256
max_positions = 256
"""
MOE = DENSE + "[moe]\nexperts = 4\ntopk = 2\nffn = 128\ndense_layers = [0]\n"
# Every token goes to all experts, so that counts are those of the data: messages sized by the steps before do not hold the long
# document, whatever the router does.
LONGER = DENSE + "[moe]\nexperts = 4\ntopk = 4\nffn = 128\ndense_layers = [0]\n"
EMBEDDED = """[data]
path = "embedded"
seq_len = 128
[train]
steps = 16
"""
# A document to a row, padded to 128 tokens: each has 70, but the long one 128. Step 14 reads it, by the order of data.seed = 1234.
DOCUMENTS, LONG_DOCUMENT, LONG_STEP = 640, 324, 14
PADDED_ROWS = f"""[data]
path = "FOLDER/documents.jsonl"
cache = "FOLDER/cache"
packing = "documents"
split = [100, 0, 0]
seed = 1234
seq_len = 128
[train]
steps = {DOCUMENTS // 16}
"""
REST = """global_batch = 16
micro_batch = 2
cuda_graph = "off"
[optimizer]
lr = 1e-3
[checkpoint]
at_end = false
[generate]
tokens = 0
"""
# Nothing is dropped: the capacity is the number of tokens.
PADDED = "moe.capacity=2,moe.pad_to_capacity=true,moe.capacity_per_rank=true"
# (name, model, ranks, keys, of [parallel] unless they name a table); dp follows from the number of ranks
LAYOUTS = [
    ("tp2", DENSE, 2, "tp=2"),
    ("pp2", DENSE, 2, "pp=2"),
    ("cp2", DENSE, 2, "cp=2"),
    ("dp2", DENSE, 2, ""),
    ("dp2-zero2", DENSE, 2, "zero=2"),
    ("tp2-dp2", DENSE, 4, "tp=2"),
    ("tp2-pp2", DENSE, 4, "tp=2,pp=2"),
    ("cp2-dp2", DENSE, 4, "cp=2"),
    ("tp2-cp2", DENSE, 4, "tp=2,cp=2"),
    ("pp2-vp2-dp2", DENSE, 4, "pp=2,vp=2"),
    ("tp4", DENSE, 4, "tp=4"),
    ("pp4-zero-bubble", DENSE, 4, 'pp=4,schedule="zero-bubble"'),
    ("tp2-cp2-pp2", DENSE, 8, "tp=2,cp=2,pp=2"),
    ("tp2-pp2-dp2", DENSE, 8, "tp=2,pp=2"),
    ("dp8", DENSE, 8, ""),
    ("moe-ep2", MOE, 2, "ep=2"),
    ("moe-tp2-etp2", MOE, 2, "tp=2,etp=2"),
    ("moe-ep4", MOE, 4, "ep=4"),
    ("moe-tp2-etp1-ep2", MOE, 4, "tp=2,etp=1,ep=2"),
    ("moe-ep2-pp2", MOE, 4, "ep=2,pp=2"),
    ("moe-tp2-etp2-ep2", MOE, 4, "tp=2,etp=2,ep=2"),
    ("moe-cp2-ep4-dp2", MOE, 8, "cp=2,ep=4"),
    ("zero3-dp2", DENSE, 2, "zero=3"),
    ("zero3-cp2", DENSE, 2, "zero=3,cp=2"),
    ("zero3-dp4", DENSE, 4, 'zero=3,comm_unit="1MB"'),
    ("zero3-tp2-dp2", DENSE, 4, "zero=3,tp=2"),
    ("zero3-pp2-vp2-dp2", DENSE, 4, "zero=3,pp=2,vp=2"),
    ("zero3-recompute", DENSE, 4, 'zero=3,train.recompute="full"'),
    ("zero3-fsdp-group2", DENSE, 4, "zero=3,fsdp_group=2"),
    ("zero3-hfsdp-group2", DENSE, 4, 'zero=3,fsdp_group=2,fsdp_outer="optimizer"'),
    ("zero3-dp8", DENSE, 8, "zero=3"),
    ("zero3-tp2-pp2-dp2", DENSE, 8, "zero=3,tp=2,pp=2"),
    ("moe-zero3-dp2", MOE, 2, "zero=3"),
    ("moe-zero3-ep2-dp4", MOE, 4, "zero=3,ep=2"),
    ("graph-zero3-dp2", DENSE, 2, 'zero=3,train.cuda_graph="on"'),
    ("graph-tp2", DENSE, 2, 'tp=2,train.cuda_graph="on"'),
    ("graph-dp2", DENSE, 2, 'train.cuda_graph="on"'),
    ("graph-offload-tp2", DENSE, 2, 'tp=2,train.cuda_graph="on",offload.activations=2,offload.min_bytes=1'),
    ("graph-tp2-cp2", DENSE, 4, 'tp=2,cp=2,train.cuda_graph="on"'),
    ("graph-dp4-zero2", DENSE, 4, 'zero=2,train.cuda_graph="on"'),
    ("graph-moe-ep2", MOE, 2, f'ep=2,train.cuda_graph="on",{PADDED}'),
    ("moe-ep2-counts", MOE, 2, "ep=2,moe.split_headroom=0"),
    ("moe-ep4-counts", MOE, 4, "ep=4,moe.split_headroom=0"),
    ("moe-overflow-ep2-counts", LONGER, 2, "ep=2,moe.split_headroom=0"),
    ("moe-overflow-ep2", LONGER, 2, "ep=2"),
    ("graph-moe-overflow-ep2", LONGER, 2, 'ep=2,train.cuda_graph="on"'),
    # So much headroom that sizes stay, and three steps in a row have the same.
    ("graph-moe-split-ep2", MOE, 2, 'ep=2,train.cuda_graph="on",moe.split_headroom=2'),
    ("graph-moe-split-ep4", MOE, 4, 'ep=4,train.cuda_graph="on",moe.split_headroom=2'),
    ("graph-moe-tp2-ep2", MOE, 4, f'tp=2,etp=1,ep=2,train.cuda_graph="on",moe.dispatcher="all_gather"'),
]
# Layouts whose losses have the same bits: the host of the second reads the counts of MoE messages.
SAME = {
    "moe-ep2": "moe-ep2-counts",
    "moe-ep4": "moe-ep4-counts",
    "moe-overflow-ep2": "moe-overflow-ep2-counts",
    "graph-moe-overflow-ep2": "moe-overflow-ep2-counts",
    "graph-moe-split-ep2": "moe-ep2-counts",
    "graph-moe-split-ep4": "moe-ep4-counts",
}
# (name, keys, largest relative difference from one rank)
PRECISIONS = [
    ("f32", ['precision.dtype="f32"'], 1e-5),
    ("bf16", ['precision.dtype="bf16"'], 5e-3),
    ("fp8-current", ['precision.dtype="bf16"', 'precision.recipe="fp8-current"'], 2e-2),
]
TIMEOUT = 150


def losses(folder):
    lines = (json.loads(line) for line in open(folder / "events.jsonl"))
    return [line["loss"] for line in lines if line["kind"] == "step"]


def write_documents(folder):
    with open(folder / "documents.jsonl", "w") as file:
        for i in range(DOCUMENTS):
            text = f"document {i}: " + " ".join(str(i + k) for k in range(60))
            file.write(json.dumps({"text": text[: 128 if i == LONG_DOCUMENT else 70]}) + "\n")


def missing(name, out, log):
    """What a case is for and did not happen; None if it did."""
    if "overflow" in name and "counts" not in name:
        if "MoE: more tokens than expected" not in (out / "logs" / "rank-0.log").read_text():
            return "no MoE message overflowed"
    if name.startswith("graph-"):
        found = re.search(r"([\d,]+) of [\d,]+ steps replayed", log.read_text())
        replayed = int(found[1].replace(",", "")) if found else 0
        # More than before the overflow: new sizes have been captured anew.
        least = LONG_STEP if "overflow" in name else 1
        if replayed < least:
            return f"{replayed} steps were replayed, at least {least} should be"
    return None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(binary, model, ranks, keys, out, log, launcher):
    """Trains with one process per rank; returns an error or None."""
    recipe = out.parent / f"{out.name}.toml"
    data = PADDED_ROWS.replace("FOLDER", str(out.parent)) if model == LONGER else EMBEDDED
    recipe.write_text(model + data + REST)
    command = [binary, "train", str(recipe), "--device", "cuda", "--out", str(out), "--timeout", "60"]
    for key in keys:
        command += ["--set", key]
    env = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0", NCCL_MAX_CTAS="4")
    port = free_port()
    jobs = []
    with open(log, "w") as text:
        if ranks == 1:
            jobs.append(subprocess.Popen(command, env=env, stdout=text, stderr=text))
        elif launcher == "torchrun":
            start = ["torchrun", "--no-python", f"--nproc-per-node={ranks}", f"--master-port={port}"]
            jobs.append(subprocess.Popen(start + command, env=env, stdout=text, stderr=text))
        else:
            for rank in range(ranks):
                own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                own = dict(env, **{k: str(v) for k, v in own.items()})
                jobs.append(subprocess.Popen(command, env=own, stdout=text, stderr=text))
        deadline = time.time() + TIMEOUT
        while any(job.poll() is None for job in jobs) and time.time() < deadline:
            time.sleep(0.05)
        late = [rank for rank, job in enumerate(jobs) if job.poll() is None]
        for job in jobs:
            job.kill()
            job.wait()
    if late:
        return f"processes {late} did not end in {TIMEOUT} s"
    codes = [job.returncode for job in jobs]
    return f"exit codes {codes}" if any(codes) else None


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("binary", type=pathlib.Path)
    ask.add_argument("logs", type=pathlib.Path)
    ask.add_argument("--part", default="1/1")
    ask.add_argument("--launcher", choices=["variables", "torchrun"], default="variables")
    ask.add_argument("--only")
    said = ask.parse_args()
    part, parts = map(int, said.part.split("/"))
    binary = str(said.binary.resolve())
    said.logs.mkdir(parents=True, exist_ok=True)
    cases = [(l, p) for p in PRECISIONS for l in LAYOUTS if p[0] == "f32" or l[0] in ("tp2-dp2", "pp2", "moe-ep2", "moe-ep2-counts", "dp2-zero2", "graph-tp2", "graph-moe-ep2", "zero3-dp2", "zero3-tp2-dp2", "moe-zero3-dp2")]
    if said.only:
        cases = [c for c in cases if said.only in c[0][0]]
    # Layouts whose losses are compared are in the same part.
    groups = list(dict.fromkeys((SAME.get(l[0], l[0]), p[0]) for l, p in cases))
    cases = [(l, p) for l, p in cases if groups.index((SAME.get(l[0], l[0]), p[0])) % parts == part - 1]
    work = pathlib.Path(tempfile.mkdtemp())
    write_documents(work)
    one, failed, all = {}, 0, {}
    for (name, model, ranks, layout), (precision, keys, bound) in cases:
        began = time.time()
        if (model, precision) not in one:
            out = work / f"one-{precision}-{len(one)}"
            error = run(binary, model, 1, keys, out, said.logs / f"{out.name}.log", said.launcher)
            one[model, precision] = None if error else losses(out)
            if error:
                print(f"one rank, {precision}: {error}")
        want = one[model, precision]
        out = work / f"{name}-{precision}"
        parallel = [key if "." in key.split("=")[0] else f"parallel.{key}" for key in layout.split(",") if key]
        error = run(binary, model, ranks, keys + parallel, out, said.logs / f"{out.name}.log", said.launcher)
        got = all[name, precision] = losses(out) if not error else []
        if not error and (not want or len(got) != len(want) or len(got) < 10):
            error = f"{len(got)} losses, {len(want or [])} of one rank"
        apart = max((abs(a / b - 1) for a, b in zip(got, want or [])), default=float("nan"))
        if not error and not apart <= bound:
            error = f"more than {bound:g} from one rank"
        error = error or missing(name, out, said.logs / f"{out.name}.log")
        failed += bool(error)
        print(f"{name:24} {ranks} ranks {precision:12} {apart:9.2e} {time.time() - began:5.1f} s  {error or 'ok'}", flush=True)
        shutil.rmtree(out, ignore_errors=True)
    for (name, other), (precision, *_) in ((s, p) for s in SAME.items() for p in PRECISIONS):
        pair = [all.get((n, precision)) for n in (name, other)]
        if None not in pair and pair[0] != pair[1]:
            failed += 1
            print(f"{name} and {other}, {precision}: losses differ: {pair}")
    print(f"{len(cases) - failed} passed, {failed} failed")
    shutil.rmtree(work, ignore_errors=True)
    sys.exit(failed > 0)


main()
