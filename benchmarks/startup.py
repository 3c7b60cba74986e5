#!/usr/bin/env python3
"""Where the time from the command to the first step goes, and how it grows with the processes.

    python benchmarks/startup.py                    # 1, 2, 8, 16, 32 processes, about 10 minutes
    python benchmarks/startup.py --ranks 1 --rounds 3 -- --compile

Starts train_distributed.py on the sample of MNIST until its first step, with the options after --,
and prints a table of medians over the rounds; the slowest process counts. The parts:

    interpreter   until Python runs its first line
    torch         import torch
    imports       everything else that is imported
    rendezvous    until all processes have met, and been compared
    data          read, in memory
    model         made, tried once
    DDP           its first two passes, on blank images
    first step    with the optimizer's, which imports a part of PyTorch of its own; compiles
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PARTS = ["interpreter", "torch", "imports", "rendezvous", "data", "model", "DDP", "first step"]


def rank(began: float, options: list[str]) -> None:
    """One process: prints the seconds of each part."""
    seconds = {"interpreter": time.time() - began}

    def since(last: float, name: str) -> float:
        now = time.perf_counter()
        seconds[name] = seconds.get(name, 0.0) + now - last
        return now

    last = time.perf_counter()
    import torch  # noqa: F401

    last = since(last, "torch")
    sys.path.insert(0, str(REPO))
    import train_distributed as trainer

    since(last, "imports")

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
        print(json.dumps(seconds), file=sys.__stderr__, flush=True)
        return waited

    trainer.train_step = first_step
    sys.stdout = sys.__stdout__ = open(os.devnull, "w")
    sys.exit(trainer.main(options))


def launch(ranks: int, options: list[str]) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = len(os.sched_getaffinity(0))
    env = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    with tempfile.TemporaryDirectory() as directory:
        words = ["--stop-at-step=1", "--batch-size=8", f"--checkpoint-dir={directory}", *options]
        processes = []
        for number in range(ranks):
            mine = {"RANK": str(number), "LOCAL_RANK": str(number)} if ranks > 1 else {}
            command = [sys.executable, __file__, "--began", str(time.time()), "--", *words]
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=env | mine, **streams))
        results = []
        for process in processes:
            _, err = process.communicate()
            lines = [line for line in err.splitlines() if line.startswith('{"interpreter"')]
            if process.returncode or not lines:
                sys.exit(f"startup.py: error: a process failed:\n{err}")
            results.append(json.loads(lines[0]))
    return {part: max(r.get(part, 0.0) for r in results) for part in [*PARTS, "all"]}


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 8, 16, 32], help="[1 2 8 16 32]")
    add("--rounds", type=int, default=3, help="[3]")
    add("--began", type=float, help=argparse.SUPPRESS)
    add("options", nargs="*", help="of the trainer, after --")
    args = parser.parse_args()
    if args.began:
        rank(args.began, args.options)
    turns: dict[int, list[dict]] = {ranks: [] for ranks in args.ranks}
    for _ in range(args.rounds):
        for ranks, results in turns.items():
            results.append(launch(ranks, args.options))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    names = [*PARTS, "all", "beyond torch"]
    print(f"| processes | {' | '.join(names)} |")
    print("| --- " * (len(names) + 1) + "|")
    for ranks, results in turns.items():
        for result in results:
            result["beyond torch"] = result["all"] - result["interpreter"] - result["torch"]
        row = [statistics.median(result[name] for result in results) for name in names]
        print(f"| {ranks} | {' | '.join(f'{seconds:.2f}' for seconds in row)} |", flush=True)


if __name__ == "__main__":
    main()
