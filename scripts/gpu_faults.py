#!/usr/bin/env python3
"""Training with real processes, disturbed: one rank is killed or stopped, the launcher gets SIGTERM, or the port of the job is taken.
Every other rank must name the fault in time and end, and the run must resume to the bytes of an undisturbed run. With --device cuda
the processes share one GPU and use NCCL, with --device cpu they use shared memory.

Usage: gpu_faults.py FERROTRON LOGS [--ranks 2,4] [--device cpu] [--only kill,stop,terminate,port]"""
import argparse, filecmp, os, pathlib, shutil, signal, socket, subprocess, sys, tempfile, time

TIMEOUT = 8  # seconds until a stall is named
NAMED = TIMEOUT + 5  # seconds until every process has named it and ended
DEAD = 10  # the same for a dead process
LAST = 40  # steps
ENV = dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_NVLS_ENABLE="0", NCCL_MAX_CTAS="4")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Job:
    """A run of `ranks` processes, started by variables or by torchrun."""

    def __init__(self, said, ranks, out, log, torchrun=False, port=None):
        command = [said.binary, "train", "tiny", "--device", said.device, "--out", str(out), "--timeout", str(TIMEOUT)]
        keys = [f"train.steps={LAST}", "checkpoint.every=10", "checkpoint.keep=10", "eval.every=0", "generate.tokens=0"]
        keys += ['precision.dtype="bf16"'] if said.device == "cuda" else ["train.global_batch=8"]
        for key in keys + (["parallel.tp=2"] if ranks > 2 else []):
            command += ["--set", key]
        self.out, self.logs, self.jobs = out, [], []
        port = port or free_port()
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
        deadline = time.time() + 180
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

    def silent(self, but, *choices):
        """Ranks that have no line with all words of any choice."""
        says = lambda line: any(all(word in line for word in words) for words in choices)
        return [r for r, log in enumerate(self.logs) if r not in but and not any(says(line) for line in open(log))]

    def kill(self):
        for job in self.jobs:
            job.kill()
            job.wait()


def same(a, b):
    names = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    others = sorted(p.relative_to(b) for p in b.rglob("*") if p.is_file())
    return names == others and names and all(filecmp.cmp(a / n, b / n, shallow=False) for n in names)


def kill(job, victim):
    job.wait_for_step(15)
    job.jobs[victim].send_signal(signal.SIGKILL)
    seconds = job.end(DEAD, but=(victim,))
    return seconds, DEAD, job.silent((victim,), (f"rank {victim}", "has exited"))


def stop(job, victim):
    job.wait_for_step(15)
    job.jobs[victim].send_signal(signal.SIGSTOP)
    seconds = job.end(NAMED, but=(victim,))
    return seconds, NAMED, job.silent((victim,), (f"rank {victim}", "not respond"), (f"rank {victim}", "stopped responding"))


def terminate(job, _):
    job.wait_for_step(15)
    job.jobs[0].send_signal(signal.SIGTERM)
    return job.end(DEAD), DEAD, []


def port_taken(job, _):
    seconds = job.end(NAMED)
    # Rank 0 knows; the others find nobody there who knows the job's secret.
    return seconds, NAMED, job.silent(range(1, len(job.jobs)), ("cannot listen", "MASTER_PORT")) + job.silent((0,), ("rank 0",))


def resumes(said, ranks, calm, out, log):
    """None, or what is wrong with the run that goes on in `out`."""
    again = Job(said, ranks, out, log)
    try:
        if again.end(300) is None or any(j.returncode for j in again.jobs):
            return "the run does not resume"
        last = pathlib.Path("checkpoints") / f"step-{LAST:08}"
        return None if same(calm / last, out / last) else "resumed to other bytes"
    finally:
        again.kill()


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("binary", type=pathlib.Path)
    ask.add_argument("logs", type=pathlib.Path)
    ask.add_argument("--ranks", default="2,4")
    ask.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    ask.add_argument("--only", default="kill,stop,terminate,port")
    said = ask.parse_args()
    said.binary = str(said.binary.resolve())
    said.logs.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp())
    failed = count = 0
    for ranks in map(int, said.ranks.split(",")):
        calm = work / f"calm-{ranks}"
        job = Job(said, ranks, calm, said.logs / f"calm-{ranks}")
        if job.end(300) is None or any(j.returncode for j in job.jobs):
            job.kill()
            print(f"undisturbed run of {ranks} ranks failed")
            sys.exit(1)
        last = ranks - 1
        faults = [("kill", kill, last), ("kill", kill, 0), ("stop", stop, last), ("stop", stop, 0), ("terminate", terminate, None), ("port", port_taken, None)]
        for name, disturb, victim in [f for f in faults if f[0] in said.only.split(",")]:
            label = f"{name}-{ranks}" + ("-rank0" if victim == 0 else "")
            if name == "terminate" and not shutil.which("torchrun"):
                print(f"{label:20} skipped: there is no torchrun", flush=True)
                continue
            out, seconds, error = work / label, None, None
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                port = taken.getsockname()[1] if name == "port" else None
                job = Job(said, ranks, out, said.logs / label, torchrun=name == "terminate", port=port)
                try:
                    seconds, limit, silent = disturb(job, victim)
                    if seconds is None:
                        error = f"not ended after {limit} s"
                    elif silent:
                        error = f"ranks {silent} do not name it"
                except RuntimeError as e:
                    error = str(e)
                job.kill()
            error = error or resumes(said, ranks, calm, out, said.logs / f"{label}-resumed")
            count += 1
            failed += bool(error)
            took = "not ended" if seconds is None else f"ended after {seconds:.1f} s"
            print(f"{label:20} {took}  {error or 'ok, resumed to the same bytes'}", flush=True)
    print(f"{count - failed} passed, {failed} failed")
    shutil.rmtree(work, ignore_errors=True)
    sys.exit(failed > 0)


main()
