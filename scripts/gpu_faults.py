#!/usr/bin/env python3
"""Training over NCCL with real processes that share one GPU, disturbed: one rank is killed or stopped, or the launcher gets
SIGTERM. Every other rank must name it in time and end, and the run must resume to the bytes of an undisturbed run.

Usage: gpu_faults.py FERROTRON LOGS [--ranks 2,4]"""
import argparse, filecmp, os, pathlib, shutil, signal, socket, subprocess, sys, tempfile, time

KEYS = ["train.steps=40", "checkpoint.every=10", "checkpoint.keep=10", "eval.every=0", "generate.tokens=0", 'precision.dtype="bf16"']
TIMEOUT = 8  # seconds until a stall is named
ENV = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0", NCCL_MAX_CTAS="4")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    """A run of `ranks` processes, started by variables or by torchrun."""

    def __init__(self, binary, ranks, out, log, torchrun=False):
        command = [binary, "train", "tiny", "--device", "cuda", "--out", str(out), "--timeout", str(TIMEOUT)]
        for key in KEYS + (["parallel.tp=2"] if ranks > 2 else []):
            command += ["--set", key]
        self.out, self.logs, self.jobs = out, [], []
        port = free_port()
        if torchrun:
            self.start(["torchrun", "--no-python", f"--nproc-per-node={ranks}", f"--master-port={port}"] + command, ENV, f"{log}.log")
            return
        for rank in range(ranks):
            own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.start(command, dict(ENV, **{k: str(v) for k, v in own.items()}), f"{log}-{rank}.log")

    def start(self, command, env, log):
        self.logs.append(log)
        with open(log, "w") as text:
            self.jobs.append(subprocess.Popen(command, env=env, stdout=text, stderr=text))

    def wait_for_step(self, step):
        deadline = time.time() + 90
        while time.time() < deadline and all(job.poll() is None for job in self.jobs):
            events = self.out / "events.jsonl"
            if events.exists() and f'"kind":"step","step":{step},' in events.read_text():
                return
            time.sleep(0.02)
        raise RuntimeError(f"step {step} was not reached")

    def end(self, limit, but=()):
        """Waits for all processes but some; returns the seconds it took, or None."""
        began = time.time()
        while any(job.poll() is None for rank, job in enumerate(self.jobs) if rank not in but):
            if time.time() - began > limit:
                return None
            time.sleep(0.02)
        return time.time() - began

    def kill(self):
        for job in self.jobs:
            job.kill()
            job.wait()


def same(a, b):
    names = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    others = sorted(p.relative_to(b) for p in b.rglob("*") if p.is_file())
    return names == others and names and all(filecmp.cmp(a / n, b / n, shallow=False) for n in names)


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("binary", type=pathlib.Path)
    ask.add_argument("logs", type=pathlib.Path)
    ask.add_argument("--ranks", default="2,4")
    said = ask.parse_args()
    binary = str(said.binary.resolve())
    said.logs.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp())
    failed = count = 0
    for ranks in map(int, said.ranks.split(",")):
        calm = work / f"calm-{ranks}"
        job = Job(binary, ranks, calm, said.logs / f"calm-{ranks}")
        if job.end(120) is None or any(j.returncode for j in job.jobs):
            job.kill()
            print(f"undisturbed run of {ranks} ranks failed")
            sys.exit(1)
        last = ranks - 1
        faults = [("kill", last, 10, "has exited"), ("kill", 0, 10, "has exited"), ("stop", last, TIMEOUT + 5, "not respond"), ("terminate torchrun", None, 10, "")]
        for name, victim, limit, words in faults:
            label = f"{name}-{ranks}".replace(" ", "-") + ("-rank0" if victim == 0 else "")
            out = work / label
            error = None
            job = Job(binary, ranks, out, said.logs / label, torchrun=victim is None)
            try:
                job.wait_for_step(15)
                target = job.jobs[victim or 0]
                target.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(name, signal.SIGTERM))
                seconds = job.end(limit, but=() if victim is None else (victim,))
                if seconds is None:
                    error = f"not ended after {limit} s"
                elif victim is not None:
                    silent = [r for r in range(ranks) if r != victim and not any(words in line and f"rank {victim}" in line for line in open(job.logs[r]))]
                    error = f"ranks {silent} do not name rank {victim}" if silent else None
            except RuntimeError as e:
                error, seconds = str(e), None
            job.kill()
            if not error:
                again = Job(binary, ranks, out, said.logs / f"{label}-resumed")
                if again.end(120) is None or any(j.returncode for j in again.jobs):
                    error = "the run does not resume"
                elif not same(calm / "checkpoints" / "step-00000040", out / "checkpoints" / "step-00000040"):
                    error = "resumed to other bytes"
                again.kill()
            count += 1
            failed += bool(error)
            print(f"{label:28} ended after {seconds if seconds is None else round(seconds, 1)} s  {error or 'ok, resumed to the same bytes'}", flush=True)
    print(f"{count - failed} passed, {failed} failed")
    shutil.rmtree(work, ignore_errors=True)
    sys.exit(failed > 0)


main()
