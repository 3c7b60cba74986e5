#!/usr/bin/env python3
"""Where the time from the command to the first step goes, and how it grows with the processes.

    python benchmarks/startup.py                    # 1, 2, 8, 16, 32 processes, about 10 minutes
    python benchmarks/startup.py --ranks 1 --rounds 3 -- --compile

Starts train_distributed.py on the sample of MNIST until its first step, with the options after --,
and prints a table of medians over the rounds; of each part, the slowest process counts. The parts:

    interpreter   until Python runs its first line
    torch         import torch
    imports       everything else that is imported
    rendezvous    until all processes have met, and been compared
    data          read, in memory
    model         made, tried once
    DDP           its first two passes, on blank images
    first step    with the optimizer's, which imports a part of PyTorch of its own

With --compile, the first of these passes compiles: DDP's, on one process the first step's.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ranks import run_ranks

REPO = Path(__file__).resolve().parent.parent
PARTS = ["interpreter", "torch", "imports", "rendezvous", "data", "model", "DDP", "first step"]
NAMES = [*PARTS, "all", "beyond torch"]


def rank(options: list[str]) -> None:
    """One process: prints the seconds of each part."""
    began = float(os.environ["BEGAN"])
    seconds = {"interpreter": time.time() - began}

    def since(last: float, name: str) -> float:
        if "torch" in sys.modules and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[name] = seconds.get(name, 0.0) + now - last
        return now

    last = time.perf_counter()
    import torch

    last = since(last, "torch")
    sys.path.insert(0, str(REPO))
    import train_distributed as trainer

    since(last, "imports")
    printed = sys.stdout

    def timed(function, name: str):
        def work(*arguments):
            last = time.perf_counter()
            result = function(*arguments)
            since(last, name)
            return result

        return work

    for function, name in {
        "setup_distributed": "rendezvous",
        "get_datasets": "data",
        "place_model": "model",
        "wrap_ddp": "DDP",
    }.items():
        setattr(trainer, function, timed(getattr(trainer, function), name))
    step = trainer.train_step

    def first_step(*arguments):
        last = time.perf_counter()
        waited = step(*arguments)
        since(last, "first step")
        seconds["all"] = time.time() - began
        print(json.dumps(seconds), file=printed, flush=True)
        return waited

    trainer.train_step = first_step
    sys.stdout = open(os.devnull, "w")
    sys.exit(trainer.main(options))


def launch(ranks: int, gpu: bool, options: list[str]) -> dict[str, float]:
    """Seconds of each part, of the process that took longest for it."""
    env = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as directory:
        words = ["--stop-at-step=1", "--batch-size=8", f"--checkpoint-dir={directory}", *options]
        outputs = run_ranks([__file__, "--rank", "--", *words], ranks, **env)
    results = [json.loads(out.splitlines()[0]) for out in outputs]
    for result in results:
        result["beyond torch"] = result["all"] - result["interpreter"] - result["torch"]
    return {name: max(result.get(name, 0.0) for result in results) for name in NAMES}


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 8, 16, 32], help="[1 2 8 16 32]")
    add("--rounds", type=int, default=3, help="[3]")
    add("--gpu", action="store_true", help="on GPUs, one per process: give --ranks")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    add("options", nargs="*", help="of the trainer, after --")
    args = parser.parse_args()
    if args.rank:
        rank(args.options)
    turns: dict[int, list[dict]] = {ranks: [] for ranks in args.ranks}
    for _ in range(args.rounds):
        for ranks, results in turns.items():
            results.append(launch(ranks, args.gpu, args.options))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"| processes | {' | '.join(NAMES)} |")
    print("| --- " * (len(NAMES) + 1) + "|")
    for ranks, results in turns.items():
        row = [statistics.median(result[name] for result in results) for name in NAMES]
        print(f"| {ranks} | {' | '.join(f'{seconds:.2f}' for seconds in row)} |", flush=True)


if __name__ == "__main__":
    main()
