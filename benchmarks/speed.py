#!/usr/bin/env python3
"""Training speed of train_distributed.py on this machine's CPU, between two yardsticks.

    python benchmarks/speed.py                     # 1 and 2 processes, about 10 minutes
    python benchmarks/speed.py --ranks 1 --rounds 3 --steps 100

All train the same network (two 3x3 convolutions 32/64, max pool, linear 9216-128-10) on the same
digits, batch 64 per process, SGD with momentum 0.9, the cores shared out among the processes:

    limit     a bare loop: normalised floats already in memory, no loader, no DDP, no metrics, and
              the trainer's tunings (channels_last, fused SGD, glibc keeps freed memory)
    ours      train_distributed.py, as it is
    template  what most tutorials do: torchvision's MNIST with ToTensor and Normalize per image,
              DataLoader workers, DistributedSampler, DDP, .item() in every step

They take turns, so that a machine whose speed drifts slows all of them; quote the ratios. Printed
are medians over the rounds of: samples per second over all processes, seconds from the command to
the end of the first step, and the peak memory of the largest process while it trains.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SAMPLE = REPO / "data" / "mnist_sample"
BATCH, BLOCK = 64, 20  # samples per step and process; steps between two looks at the clock


def ours(steps: int, directory: str) -> dict:
    sys.path.insert(0, str(REPO))
    import train_distributed

    options = "--no-augment --dropout 0 --warmup-epochs 0 --lr-schedule constant --lr 0.01"
    options += f" --weight-decay 0 --epochs {steps} --stop-at-step {steps}"
    with contextlib.redirect_stdout(sys.stderr):
        train_distributed.main(
            [*options.split(), f"--log-every-steps={BLOCK}", f"--checkpoint-dir={directory}"]
        )
    lines = Path(directory, "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))["kind"] == "train"]
    ranks = int(os.environ["WORLD_SIZE"])
    speeds = [record["samples_per_second"] / ranks for record in records]
    return {"first": records[0]["time"] - (BLOCK - 1) * BATCH / speeds[0], "speeds": speeds[1:]}


def limit(steps: int, _directory: str) -> dict:
    import ctypes

    import torch
    import torchvision

    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 2**31 - 1)
    libc.mallopt(-4, 0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    data = torchvision.datasets.MNIST(SAMPLE)
    images = ((data.data[:, None] / 255) - 0.1307) / 0.3081
    images = images.contiguous(memory_format=torch.channels_last)
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    order = torch.randperm(len(images))

    def step(index: int) -> None:
        start = index * BATCH % (len(images) - BATCH)
        rows = order[start : start + BATCH]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), data.targets[rows]).backward()
        optimizer.step()

    return timed(step, steps)


def template(steps: int, _directory: str) -> dict:
    import torch
    import torch.distributed as dist
    import torchvision
    from torch.utils.data import DataLoader, DistributedSampler
    from torchvision import transforms

    dist.init_process_group("gloo")
    transform = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    data = torchvision.datasets.MNIST(SAMPLE, transform=transforms.Compose(transform))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=2, drop_last=True)
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def batches():
        for epoch in range(steps):
            sampler.set_epoch(epoch)
            yield from loader

    stream, losses = batches(), []

    def step(_index: int) -> None:
        images, labels = next(stream)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return timed(step, steps)


def network():
    from torch import nn

    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    head = nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, *head)


def timed(step, steps: int) -> dict:
    """When the first step ended, and this process's samples per second in each later block."""
    step(0)
    first, speeds = time.time(), []
    for index in range(1, BLOCK):
        step(index)
    for block in range(1, steps // BLOCK):
        began = time.perf_counter()
        for index in range(block * BLOCK, (block + 1) * BLOCK):
            step(index)
        speeds.append(BLOCK * BATCH / (time.perf_counter() - began))
    return {"first": first, "speeds": speeds}


def launch(name: str, ranks: int, steps: int) -> dict:
    """One turn of a contestant, as processes of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, f"--contestant={name}", f"--directory={directory}"]
        env = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
        env |= {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
        began = time.time()
        processes = [
            subprocess.Popen(
                [*command, f"--steps={steps}"],
                env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        results = []
        for process in processes:
            out, err = process.communicate()
            if process.returncode:
                sys.exit(f"speed.py: error: {name} failed:\n{err}")
            results.append(json.loads(out))
    return {
        "samples/s": sum(statistics.median(result["speeds"]) for result in results),
        "first step": max(result["first"] for result in results) - began,
        "peak MB": max(result["peak MB"] for result in results),
    }


def compare(ranks: int, rounds: int, steps: int) -> None:
    turns: dict[str, list[dict]] = {"limit": [], "ours": [], "template": []}
    for _ in range(rounds):
        for name, results in turns.items():
            results.append(launch(name, ranks, steps))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"\n| {ranks} process(es) | samples/s | share of the limit | first step | peak memory |")
    print("| --- | --- | --- | --- | --- |")
    for name, results in turns.items():
        speed, first, peak = (statistics.median(r[key] for r in results) for key in results[0])
        shares = [a["samples/s"] / b["samples/s"] for a, b in zip(results, turns["limit"])]
        share = f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        print(f"| {name} | {speed:.0f} | {share} | {first:.1f} s | {peak:.0f} MB |", flush=True)


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes [1 2]")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant [7]")
    parser.add_argument("--steps", type=int, default=200, help="steps per turn [200]")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contestant = {"limit": limit, "ours": ours, "template": template}[options.contestant]
        result = contestant(options.steps, options.directory)
        # Not after the process has ended: unloading CUDA's libraries touches 100 MB more.
        result["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return
    import torch

    cores = len(os.sched_getaffinity(0))
    print(f"PyTorch {torch.__version__}, {cores} cores of {cpu_name()}")
    for ranks in options.ranks:
        compare(ranks, options.rounds, options.steps)


def cpu_name() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


if __name__ == "__main__":
    main()
