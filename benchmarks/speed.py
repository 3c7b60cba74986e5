#!/usr/bin/env python3
"""Training speed of train_distributed.py on this machine, among its peers.

    python benchmarks/speed.py                     # CPU, 1 and 2 processes, about 25 minutes
    python benchmarks/speed.py --ranks 1 --rounds 3 --steps 100 --only limit ours
    python benchmarks/speed.py --gpu --ranks 1            # launch-bound
    python benchmarks/speed.py --gpu --ranks 1 --batch 256 --model resnet50 --dataset synthetic
    ... and --amp, --compile; with --dataset imagefolder --data-dir DIR --workers 16

The contestants, each in benchmarks/contestants.py as its own documentation writes it:

    limit       a bare loop over floats in memory, with the trainer's tunings
    graphs      the same, each step one CUDA graph (--gpu, not with --compile)
    waits       the same, whose processes wait for each other in each step  (2 processes or more)
    sums        the same, whose processes sum their gradients, all at once  (2 processes or more)
    ours        train_distributed.py, as it is
    ours_graphs the same with --cuda-graphs (--gpu, 1 process)
    template    what most DDP tutorials do
    examples    as pytorch/examples
    lightning   Lightning's Trainer    (pip install -r benchmarks/requirements.txt)
    accelerate  Accelerate             (the same)

All train the same network on the same data with the same optimizer, the cores shared out among
the processes. They take turns, so that a machine whose speed drifts slows all of them; quote the
ratios. Printed are medians over the rounds of: samples per second over all processes, the share of
the limit (with its range), seconds from the command to the end of the first step, and the peak
memory of the largest process, with --gpu on the GPU. A bar chart goes to --output.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import contestants
from ranks import run_ranks

NAMES = list(contestants.CONTESTANTS)
CONTESTANTS = Path(contestants.__file__)
SAMPLE = contestants.REPO / "data" / "mnist_sample"


def launch(name: str, ranks: int, options) -> dict[str, float]:
    """One turn of a contestant, as processes of their own."""
    with tempfile.TemporaryDirectory() as directory:
        given = vars(options) | {"directory": directory}
        names = [field.name for field in fields(contestants.Setup)]
        setup = {key: given[key] for key in names}
        env = {} if options.gpu else {"CUDA_VISIBLE_DEVICES": ""}
        began = time.time()
        outputs = run_ranks([str(CONTESTANTS), name, json.dumps(setup)], ranks, **env)
        results = [json.loads(out.splitlines()[-1]) for out in outputs]
    return {
        "samples/s": sum(statistics.median(result["speeds"]) for result in results),
        "first step": max(result["first"] for result in results) - began,
        "peak MB": max(result["peak"] for result in results),
    }


def write_mnist(root: Path, samples: int) -> None:
    """The sample of MNIST over and over, so that no epoch ends within a turn."""
    (root / "MNIST/raw").mkdir(parents=True)
    for source in (SAMPLE / "MNIST/raw").glob("*ubyte"):
        data = source.read_bytes()
        if source.name.startswith("train"):
            header = 16 if "images" in source.name else 8  # magic number, count, (rows, columns)
            count = int.from_bytes(data[4:8], "big")
            times = samples // count + 1
            data = (
                data[:4]
                + (times * count).to_bytes(4, "big")
                + data[8:header]
                + times * data[header:]
            )
        (root / "MNIST/raw" / source.name).write_bytes(data)


def compare(names: list[str], ranks: int, options) -> dict[str, list[float]]:
    """Prints a table. Returns the shares of the limit, one per round, by contestant."""
    others = ("graphs", "ours_graphs") if ranks > 1 else ("waits", "sums")
    names = [name for name in names if name not in others]
    turns: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names if number % 2 else reversed(names):
            turns[name].append(launch(name, ranks, options))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"\n| {ranks} process(es) | samples/s | share of the limit | first step | peak memory |")
    print("| --- | --- | --- | --- | --- |")
    shares = {}
    for name, results in turns.items():
        speed, first, peak = (statistics.median(r[key] for r in results) for key in results[0])
        shares[name] = [a["samples/s"] / b["samples/s"] for a, b in zip(results, turns[names[0]])]
        low, high = min(shares[name]), max(shares[name])
        share = f"{statistics.median(shares[name]):.3f} ({low:.3f} to {high:.3f})"
        print(f"| {name} | {speed:.0f} | {share} | {first:.1f} s | {peak:.0f} MB |", flush=True)
    return shares


def plot(shares: dict[int, dict[str, list[float]]], title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(shares), figsize=(5 * len(shares), 3.2), squeeze=False)
    for axis, (ranks, of_name) in zip(axes[0], shares.items()):
        names = list(of_name)[::-1]
        middles = [statistics.median(of_name[name]) for name in names]
        spread = [
            [middle - min(of_name[name]) for name, middle in zip(names, middles)],
            [max(of_name[name]) - middle for name, middle in zip(names, middles)],
        ]
        colors = ["tab:blue" if name == "ours" else "silver" for name in names]
        axis.barh(names, middles, xerr=spread, color=colors, capsize=3)
        axis.set(xlabel="share of the limit", title=f"{ranks} process(es)")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], help="processes [1 2]")
    add("--batch", type=int, default=64, help="samples per step and process [64]")
    add("--rounds", type=int, default=5, help="turns of each contestant [5]")
    add("--steps", type=int, help="steps per turn [200; with --gpu 2000]")
    add("--gpu", action="store_true", help="train on GPUs, one per process")
    add("--model", default="simple_convnet", help="or one of torchvision's [simple_convnet]")
    add("--dataset", choices=["mnist", "synthetic", "imagefolder"], default="mnist")
    add("--data-dir", default="data", help="of imagefolder")
    add("--size", type=int, default=224, help="pixels a side, but for MNIST [224]")
    add("--amp", action="store_true", help="bf16")
    add("--compile", action="store_true", help="all of them through torch.compile")
    add(
        "--workers",
        type=int,
        default=2,
        help="loader processes of a rank, but for ours in memory [2]",
    )
    add("--only", nargs="+", choices=NAMES, default=NAMES, help="[all that are installed]")
    add("--output", default="speed.png", help="[speed.png]")
    options = parser.parse_args()
    import torch

    if options.gpu and torch.cuda.device_count() < max(options.ranks):
        sys.exit(f"speed.py: error: --gpu: there are {torch.cuda.device_count()} GPUs")
    names = [name for name in NAMES if name in ["limit", *options.only]]
    if not options.gpu or options.compile:
        names = [name for name in names if name not in ("graphs", "ours_graphs")]
    if (options.model == "simple_convnet") != (options.dataset == "mnist"):
        sys.exit(
            "speed.py: error: simple_convnet goes with mnist, torchvision's models with others"
        )
    options.steps = options.steps or (2000 if options.gpu else 200)
    if options.steps < 20:
        sys.exit("speed.py: error: --steps should be 20 at least")
    options.device, options.classes = "cuda" if options.gpu else "cpu", 1000
    if options.dataset == "imagefolder":
        options.classes = sum(path.is_dir() for path in Path(options.data_dir, "train").iterdir())
    for name in ("lightning", "accelerate"):
        if name in names and not importlib.util.find_spec(name):
            print(f"Without {name}: pip install -r benchmarks/requirements.txt", file=sys.stderr)
            names.remove(name)
    machine = f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}, PyTorch {torch.__version__}"
    if options.gpu:
        machine = f"{torch.cuda.get_device_name(0)}, {machine}"
    print(machine)
    with tempfile.TemporaryDirectory() as directory:
        if options.dataset == "mnist":
            samples = contestants.needed(options.steps, options.batch, max(options.ranks))
            write_mnist(Path(directory), max(samples, 60_000))
            options.data_dir = directory
        shares = {ranks: compare(names, ranks, options) for ranks in options.ranks}
    plot(shares, machine, options.output)


def cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


if __name__ == "__main__":
    main()
