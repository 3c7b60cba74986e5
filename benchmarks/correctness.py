#!/usr/bin/env python3
"""Correctness on this machine's GPUs: what the tests show with CPU ranks, over NCCL.

    python benchmarks/correctness.py                      # everything, on all GPUs
    python benchmarks/correctness.py hang-gpu resume      # some of it
    python benchmarks/correctness.py --cpu --ranks 2      # without a GPU, over gloo

    hang-host     rank 1 sleeps instead of joining a collective: does guard.py name it?
    hang-gpu      the GPU of rank 1 is busy for ever before a collective that all have joined
    killed        rank 0 is killed with SIGKILL: the recorded cause, the time to the next step
    resume        stopped and resumed: the same weights, bit for bit, with --deterministic
    reproducible  one rank and two ranks: the same weights, bit for bit, with --reproducible

With one GPU, two ranks share it (SHARE_GPU=1 of scripts/guard.py): real NCCL, over sockets.
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
IMAGENET = REPO / "examples/imagenet.py"
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


def train(directory: Path, options, run_name: str, ranks: int, *command: str) -> dict:
    """Train with a script and its options. Returns the newest checkpoint of the run."""
    target = directory / run_name
    command = torchrun(ranks, *command, f"--checkpoint-dir={target}")
    code = run(command, directory, options.cpu)
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


def training_records(run_directory: Path) -> list[dict]:
    records = []
    with suppress(OSError):
        for line in (run_directory / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "train":
                records.append(record)
    return records


def process_of_rank(rank: int, run_directory: Path) -> int:
    """The process id of a rank of a run that was started with CHECKED_RUN in its environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            environment = path.read_bytes().split(b"\0")
            words = (path.parent / "cmdline").read_bytes()
            is_rank = f"RANK={rank}".encode() in environment and b"guard.py" in words
            if is_rank and f"CHECKED_RUN={run_directory}".encode() in environment:
                return int(path.parent.name)
    raise Wrong(f"found no process of rank {rank}")


def killed(options, directory: Path) -> str:
    """Kill a rank of a supervised run. Returns the recorded cause and the time to the next step."""
    run_directory = directory / "killed"
    words = [
        f"--checkpoint-dir={run_directory}",
        "--dataset=mnist_sample",
        "--epochs=100000",
        "--log-every-steps=10",
        "--checkpoint-every-steps=20",
    ]
    ranks = str(options.ranks)
    supervisor = [sys.executable, REPO / "scripts/supervise.py"]
    launcher = [REPO / "scripts/ssh/launch_singlenode.sh", "configs/default_config.yaml", ranks]
    env = {
        "PYTHON": sys.executable,
        "LOG_DIR": str(directory / "logs"),
        "CHECKED_RUN": str(run_directory),
    }
    process = start([*supervisor, *launcher, *words], directory, options.cpu, **env)
    deadline = time.monotonic() + LIMIT
    try:
        wait_for(lambda: list(run_directory.glob("*.pt")), process, directory, deadline)
        os.kill(process_of_rank(0, run_directory), signal.SIGKILL)
        kill_time = time.time()

        def records_after() -> list[dict]:
            records = training_records(run_directory)
            return [record for record in records if record["time"] > kill_time + 0.5]

        wait_for(records_after, process, directory, deadline)
        seconds = records_after()[0]["time"] - kill_time
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        end(process)
    attempts = (run_directory / "attempts.jsonl").read_text().splitlines()
    first = json.loads(attempts[0])
    if first["cause"] != "killed":
        raise Wrong(f"recorded as {first['cause']}: {first['reason']}")
    return f"recorded as {first['cause']}: {first['reason']}; trained again after {seconds:.1f} s"


def wait_for(condition, process: subprocess.Popen, directory: Path, deadline: float) -> None:
    """Return once condition() is true. Wrong if the process ends before, or at the deadline."""
    while not condition():
        if process.poll() is not None:
            raise Wrong(f"exit code {process.returncode}: {last_line(directory)}")
        if time.monotonic() > deadline:
            raise Wrong(f"still waiting after {LIMIT} s: {last_line(directory)}")
        time.sleep(0.1)


def resume(options, directory: Path) -> str:
    """ResNet-50 on GPUs, a small network in a rehearsal."""
    words = [IMAGENET, "--synthetic", "--deterministic", "--stop-at-step=8"]
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
    """SimpleConvNet."""
    both = options.ranks
    words = [TRAINER, "--reproducible", "--dataset=mnist_sample", "--stop-at-step=20"]
    words += ["--global-batch-size=128", f"--batch-size={128 // both}"]
    one = train(directory, options, "one", 1, *words)
    several = train(directory, options, "several", both, *words)
    compare_weights(several["model"], one["model"])
    return f"{len(one['model'])} tensors are equal after 20 steps on 1 and {both} ranks"


CHECKS = {
    "hang-host": hang_host,
    "hang-gpu": hang_gpu,
    "killed": killed,
    "resume": resume,
    "reproducible": reproducible,
}


def reason_to_skip(name: str, options) -> str:
    """What a check needs and this machine lacks, or nothing."""
    if name == "hang-gpu" and options.cpu:
        return "needs a GPU"
    return ""


def parse_options() -> argparse.Namespace:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="[all]")
    parser.add_argument("--ranks", type=int, help="[one per GPU, but at least 2]")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal without a GPU")
    options = parser.parse_args()
    for name in options.checks:
        if name not in CHECKS:
            parser.error(f"unknown check {name}; there are {', '.join(CHECKS)}")
    gpus = torch.cuda.device_count()
    if not options.cpu and gpus == 0:
        parser.error("PyTorch finds no GPU here; --cpu is a rehearsal without one")
    if options.ranks is None:
        options.ranks = max(2, gpus)
    if not options.cpu and options.ranks > gpus:
        os.environ["SHARE_GPU"] = "1"
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
