#!/usr/bin/env python3
"""Training speed of train_distributed.py on this machine, compared with other programs.

    python benchmarks/speed.py                     # CPU, 1 and 2 ranks, about 25 minutes
    python benchmarks/speed.py --ranks 1 --rounds 3 --steps 100 --only limit ours
    python benchmarks/speed.py --before OTHER_CHECKOUT --only ours
    python benchmarks/speed.py --gpu --ranks 1 --batch 256 --model resnet50 --dataset synthetic
    ... and --amp bf16, --compile; with --dataset imagefolder --data-dir DIR --workers 16

The contestants (benchmarks/contestants.py):

    limit         a loop over floats in memory; malloc keeps freed memory, as in the trainer
    sums          the limit plus one all_reduce of all gradients per step (2 or more ranks)
    ours          train_distributed.py as the launchers start it: with scripts/guard.py, which gives
                  each rank its own cores
    bare          train_distributed.py started by torchrun alone
    reproducible  ours with --reproducible
    template      what most DDP tutorials do
    examples      pytorch/examples
    lightning     Lightning's Trainer    (pip install -r benchmarks/requirements.txt)
    accelerate    Accelerate             (the same)
    timm          timm's loader, loss, optimizer and loop (the same)
    PEER+guard    each of these five, started with scripts/guard.py, like ours
    before        with --before DIR: `ours` of DIR/benchmarks/contestants.py

All train the same network on the same data with the same optimizer. They alternate, so that a
machine whose speed drifts affects all of them: compare the ratios. The output has medians over the
rounds: samples per second over all ranks, the ratio to the first contestant (with its range), the
seconds from the start to the end of the first step, and the peak memory of the largest rank (with
--gpu, on the GPU). --idle adds the share of time in which the GPU runs no kernel, from a profile of
the last tenth of the steps. If a contestant fails, the others go on.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import contestants
from ranks import MALLOC, REPO, run_ranks

PEERS = ["template", "examples", "lightning", "accelerate", "timm"]
NAMES = [*contestants.CONTESTANTS, *[f"{peer}+guard" for peer in PEERS]]


def launch(name: str, ranks: int, options) -> dict[str, float]:
    """Run one turn of a contestant in new processes."""
    root, env = options.before if name == "before" else REPO, {}
    program = "ours" if name == "before" else name.removesuffix("+guard")
    words = [root / "benchmarks/contestants.py", program]
    guard = root / "scripts/guard.py"
    has_guard = program in ("ours", "reproducible") or name.endswith("+guard")
    if has_guard and guard.exists():
        words.insert(0, guard)
    if name in ("limit", "sums", "before") and not options.gpu:
        env = dict(MALLOC)  # the guard.py of an older copy does not set it
    if name == "bare":
        env = {"OMP_NUM_THREADS": "1" if ranks > 1 else None}  # as torchrun sets it
    env |= {} if options.gpu else {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as directory:
        given = vars(options) | {"directory": directory}
        setup = {field.name: given[field.name] for field in fields(contestants.Setup)}
        for field in ("idle", "tuned"):  # which an older checkout does not have
            if not setup[field]:
                del setup[field]
        began = time.time()
        outputs = run_ranks([*words, json.dumps(setup)], ranks, **env)
        results = [json.loads(out.splitlines()[-1]) for out in outputs]
    # Loader workers deliver batches in bursts: their median would be the speed of a burst.
    mean = statistics.harmonic_mean if options.dataset == "imagefolder" else statistics.median
    return {
        "samples/s": sum(mean(result["speeds"]) for result in results),
        "first step": max(result["first"] for result in results) - began,
        "peak MB": max(result["peak"] for result in results),
        "idle": max(result.get("idle", 0) for result in results),
    }


def write_mnist(root: Path, samples: int) -> None:
    """Write the shipped sample of MNIST, repeated so that no epoch ends within a turn."""
    (root / "MNIST/raw").mkdir(parents=True)
    for source in (REPO / "data/mnist_sample/MNIST/raw").glob("*ubyte"):
        data = source.read_bytes()
        header = 16 if "images" in source.name else 8  # magic number, count, (rows, columns)
        count = int.from_bytes(data[4:8], "big")
        times = samples // count + 1 if source.name.startswith("train") else 1
        head = data[:4] + (times * count).to_bytes(4, "big") + data[8:header]
        (root / "MNIST/raw" / source.name).write_bytes(head + times * data[header:])


def take_turns(names: list[str], ranks: int, options) -> tuple[dict[str, list], dict[str, str]]:
    """(the turns of each contestant, why the others have none). SIGTERM and Ctrl-C end it early."""
    turns: dict[str, list[dict]] = {name: [] for name in names}
    failed = {}
    with suppress(KeyboardInterrupt):
        for number in range(options.rounds):
            for name in names if number % 2 else reversed(names):
                if name not in failed:
                    try:
                        turns[name].append(launch(name, ranks, options))
                    except SystemExit as error:
                        failed[name] = "failed"
                        print(f"\n{error}", file=sys.stderr)
                    print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    measured = {name: turns[name] for name in names if turns[name] and name not in failed}
    return measured, {n: failed.get(n, "not measured") for n in names if n not in measured}


def compare(names: list[str], ranks: int, options) -> None:
    """Print a table, with the ratios to the first contestant."""
    names = [name for name in names if name != "sums" or ranks > 1]
    turns, absent = take_turns(names, ranks, options)
    absent = options.absent | absent
    options.failed = options.failed or absent != options.absent
    heads = [f"{ranks} rank(s)", "samples/s", f"/ {next(iter(turns), '-')}", "first step"]
    heads += ["peak memory", *["idle"] * options.idle]
    print(f"\n| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|")
    others = next(iter(turns.values()), [])
    for name, results in turns.items():
        speed, first, peak, idle = (statistics.median(r[k] for r in results) for k in results[0])
        ratios = [a["samples/s"] / b["samples/s"] for a, b in zip(results, others)]
        low, high = min(ratios), max(ratios)
        cells = [
            name,
            f"{speed:.0f}",
            f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
        ]
        cells += [f"{first:.1f} s", f"{peak:.0f} MB", *[f"{100 * idle:.1f} %"] * options.idle]
        print(f"| {' | '.join(cells)} |", flush=True)
    for name, reason in absent.items():
        print(f"| {name} | {reason} {'| ' * (len(heads) - 2)}|")


def cpu_name() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def parse_options() -> argparse.Namespace:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], help="[1 2]")
    add("--batch", type=int, default=64, help="samples per step and rank [64]")
    add("--rounds", type=int, default=5, help="turns of each contestant [5]")
    add("--steps", type=int, help="steps per turn [200; with --gpu 2000]")
    add("--gpu", action="store_true", help="train on GPUs, one per rank")
    add("--model", default="simple_convnet", help="or one of torchvision's [simple_convnet]")
    add("--dataset", choices=["mnist", "synthetic", "imagefolder"], default="mnist")
    add("--data-dir", default="data", help="directory of the imagefolder [data]")
    add("--size", type=int, default=224, help="pixels per side, except for MNIST [224]")
    add("--amp", choices=["bf16", "fp16"], default="", help="mixed precision [none]")
    add("--tuned", action="store_true", help="peers: normalized floats in memory, channels_last")
    add("--compile", action="store_true", help="use torch.compile for all")
    add("--workers", type=int, default=2, help="loader processes per rank [2]")
    add("--only", nargs="+", choices=NAMES, default=NAMES, help="[all that are installed]")
    add("--before", type=Path, help="another checkout to compare with")
    add("--idle", action="store_true", help="also measure how long the GPU runs no kernel")
    options = parser.parse_args()
    if (options.model == "simple_convnet") != (options.dataset == "mnist"):
        parser.error("simple_convnet needs mnist, torchvision's models need another --dataset")
    options.steps = options.steps or (2000 if options.gpu else 200)
    if options.steps < 20:
        parser.error("--steps should be at least 20")
    options.device, options.classes = "cuda" if options.gpu else "cpu", 1000
    if options.dataset == "imagefolder":
        options.classes = sum(path.is_dir() for path in Path(options.data_dir, "train").iterdir())
    options.names = [name for name in NAMES if name in options.only]
    options.absent, options.failed = {}, False  # name of a contestant without figures: why
    for package in ("lightning", "accelerate", "timm"):
        if importlib.util.find_spec(package):
            continue
        for name in (package, f"{package}+guard"):
            if name in options.names:
                text = f"Skipping {name}: pip install -r benchmarks/requirements.txt"
                print(text, file=sys.stderr)
                options.names.remove(name)
                options.absent[name] = "not installed"
    if options.before:
        options.names.insert(0, "before")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parse_options()
    import torch

    if options.gpu and torch.cuda.device_count() < max(options.ranks):
        sys.exit(f"speed.py: error: --gpu: there are {torch.cuda.device_count()} GPUs")
    machine = f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}, PyTorch {torch.__version__}"
    if options.gpu:
        machine = f"{torch.cuda.get_device_name(0)}, {machine}"
    print(machine)
    with tempfile.TemporaryDirectory() as directory:
        if options.dataset == "mnist":
            samples = contestants.needed(options.steps, options.batch, max(options.ranks))
            write_mnist(Path(directory), max(samples, 60_000))
            options.data_dir = directory
        for ranks in options.ranks:
            compare(options.names, ranks, options)
    if options.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
