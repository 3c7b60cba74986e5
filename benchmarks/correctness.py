#!/usr/bin/env python3
"""Correctness on this machine's GPUs: what the tests show with CPU ranks, over NCCL.

    python benchmarks/correctness.py                      # everything, on all GPUs
    python benchmarks/correctness.py hang-gpu resume      # some of it
    python benchmarks/correctness.py --cpu --ranks 2      # without a GPU, over gloo

    hang-host     rank 1 sleeps instead of joining a collective: does guard.py name it?
    hang-gpu      the GPU of rank 1 is busy for ever before a collective that all have joined
    resume        stopped and resumed: the same weights, bit for bit, with --deterministic
    reproducible  one rank and two ranks: the same weights, bit for bit, with --reproducible

hang-host and hang-gpu need two GPUs. reproducible runs two ranks on one GPU if there is only one.
Exit code: 0 all as promised, 1 not, 2 user error.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from ranks import REPO

TRAINER = REPO / "train_distributed.py"
GUARD = REPO / "scripts/guard.py"
HANG_TIMEOUT = 20  # seconds
LIMIT = 240  # seconds for one launch

HANG = """
import sys, time, torch, torch.distributed as dist

kind = sys.argv[1]
on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
ones = torch.ones(1000, device=device)
for step in range(5):
    dist.all_reduce(ones)
if dist.get_rank() == 1:
    if kind == "hang-host":
        time.sleep(3600)
    torch.cuda._sleep(10**13)  # clock cycles: more than an hour
for step in range(5):
    dist.all_reduce(ones)
print(ones.sum().item())
"""


class Wrong(Exception):
    """Something is not as promised."""


def start(words: list, directory: Path, cpu: bool, **env: str) -> subprocess.Popen:
    """Start a command in a session of its own. Its output goes to DIRECTORY/log."""
    inherited = {}
    for name, value in os.environ.items():
        if not name.startswith(("SLURM_", "PBS_")):  # it should not start steps of this job
            inherited[name] = value
    if cpu:
        inherited["CUDA_VISIBLE_DEVICES"] = ""
    inherited["FAILURE_FILE"] = str(directory / "failure.json")
    with (directory / "log").open("a") as log:
        return subprocess.Popen(
            [str(word) for word in words],
            cwd=REPO,
            env=inherited | env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end(process: subprocess.Popen) -> None:
    """SIGKILL to what is left of the process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def torchrun(ranks: int, script: Path, *words: str) -> list:
    """The command that starts the ranks, as the launchers do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, f"--nproc-per-node={ranks}", GUARD, script, *words]


def run(words: list, directory: Path, cpu: bool, **env: str) -> int:
    """The exit code of a command. Wrong, with the end of its output, after LIMIT seconds."""
    process = start(words, directory, cpu, **env)
    try:
        return process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        raise Wrong(f"still running after {LIMIT} s: {last_line(directory)}") from None
    finally:
        end(process)


def last_line(directory: Path) -> str:
    return (directory / "log").read_text().strip().splitlines()[-1]


def train(directory: Path, options, run_name: str, ranks: int, *words: str, **env: str) -> dict:
    """Train. Returns the newest checkpoint of the run."""
    target = directory / run_name
    command = torchrun(ranks, TRAINER, f"--checkpoint-dir={target}", *words)
    code = run(command, directory, options.cpu, **env)
    if code != 0:
        raise Wrong(f"exit code {code}: {last_line(directory)}")
    newest = max(target.glob("*.pt"), key=os.path.getmtime)
    return torch.load(newest, map_location="cpu", weights_only=True)


def compare_weights(ours: dict, theirs: dict) -> None:
    """Wrong if the parameters and buffers of two models are not equal, bit for bit."""
    for name, value in theirs.items():
        if not torch.equal(ours[name], value):
            largest = (ours[name].double() - value.double()).abs().max().item()
            raise Wrong(f"{name} differs by up to {largest:.1e}")


def hang(kind: str, options, directory: Path) -> str:
    """A rank at fault is named. Returns the verdict of guard.py."""
    script = directory / "hang.py"
    script.write_text(HANG)
    began = time.monotonic()
    command = torchrun(2, script, kind)
    code = run(command, directory, options.cpu, HANG_TIMEOUT=str(HANG_TIMEOUT))
    seconds = time.monotonic() - began
    if code == 0:
        raise Wrong("the ranks did not hang")
    failure = directory / "failure.json"
    if not failure.exists():
        raise Wrong(f"guard.py recorded no cause: {last_line(directory)}")
    record = json.loads(failure.read_text())
    if record["cause"] != "hang":
        raise Wrong(f"recorded as {record['cause']}: {record['reason']}")
    if not re.search(r"\b(rank|ranks|GPU of rank|GPUs of ranks) 1\b", record["reason"]):
        raise Wrong(f"rank 1 is not named: {record['reason']}")
    return f"after {seconds:.0f} s (limit {HANG_TIMEOUT} s): {record['reason']}"


def hang_host(options, directory: Path) -> str:
    return hang("hang-host", options, directory)


def hang_gpu(options, directory: Path) -> str:
    return hang("hang-gpu", options, directory)


def resume(options, directory: Path) -> str:
    """ResNet-50 on GPUs, a small network in a rehearsal."""
    words = ["--deterministic", "--dataset=synthetic", "--stop-at-step=8"]
    if options.cpu:
        words += ["--model=resnet18", "--image-size=32", "--batch-size=4"]
    else:
        words += ["--model=resnet50", "--image-size=224", "--batch-size=32", "--amp=bf16"]
        words += ["--compile"]
    whole = train(directory, options, "whole", options.ranks, *words)
    train(directory, options, "parts", options.ranks, *words, "--stop-at-step=4")
    parts = train(directory, options, "parts", options.ranks, *words)
    compare_weights(parts["model"], whole["model"])
    return f"{len(whole['model'])} tensors are equal after 8 steps, stopped after 4"


def reproducible(options, directory: Path) -> str:
    """SimpleConvNet. With one GPU, two ranks share it and exchange with gloo."""
    words = ["--reproducible", "--dataset=mnist_sample", "--stop-at-step=20"]
    one = train(directory, options, "one", 1, *words, "--global-batch-size=128")
    both = max(2, options.ranks)
    words += ["--global-batch-size=128", f"--batch-size={128 // both}"]
    env = {}
    if options.cpu or options.ranks == 1:
        words.append("--distributed-backend=gloo")
        env["GUARD"] = "0"  # which refuses to start two ranks on one GPU
    several = train(directory, options, "several", both, *words, **env)
    compare_weights(several["model"], one["model"])
    return f"{len(one['model'])} tensors are equal after 20 steps on 1 and {both} ranks"


CHECKS = {
    "hang-host": hang_host,
    "hang-gpu": hang_gpu,
    "resume": resume,
    "reproducible": reproducible,
}


def reason_to_skip(name: str, options) -> str:
    """What a check needs and this machine lacks, or nothing."""
    if name == "hang-gpu" and options.cpu:
        return "needs 2 GPUs"
    if name.startswith("hang") and options.ranks < 2:
        return "needs 2 GPUs"
    return ""


def parse_options() -> argparse.Namespace:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="[all]")
    parser.add_argument("--ranks", type=int, help="[one per GPU; with --cpu 2]")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    options = parser.parse_args()
    for name in options.checks:
        if name not in CHECKS:
            parser.error(f"unknown check {name}; there are {', '.join(CHECKS)}")
    gpus = torch.cuda.device_count()
    if not options.cpu and gpus == 0:
        parser.error("PyTorch finds no GPU here; --cpu is a rehearsal without one")
    if options.ranks is None:
        options.ranks = 2 if options.cpu else gpus
    return options


def main() -> None:
    options = parse_options()
    failed = False
    print("| check | result |\n| --- | --- |")
    for name in options.checks or CHECKS:
        reason = reason_to_skip(name, options)
        if reason:
            print(f"| {name} | not measured ({reason}) |", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            try:
                result = CHECKS[name](options, directory)
            except Wrong as error:
                failed = True
                result = f"WRONG: {error}"
                print((directory / "log").read_text(), file=sys.stderr)
        print(f"| {name} | {result.replace('|', '/')} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
