#!/usr/bin/env python3
"""How long train_distributed.py takes until its first step, by part.

    python benchmarks/startup.py                    # 1, 2, 8, 16, 32 ranks, five to ten minutes
    python benchmarks/startup.py --ranks 1 --rounds 3 -- --compile

Runs the trainer on the sample of MNIST until its first step, with the options after --, and prints
a table of medians over the rounds. Each part is the time of the slowest rank:

    interpreter   until Python runs the first line
    torch         import torch
    imports       all other imports
    rank check    the rank check of scripts/guard.py
    settings      configure_torch(): PyTorch imports torch._dynamo for it
    rendezvous    init_process_group()
    data          reading the data into memory
    model         building the model
    DDP           the first backward pass of DDP
    first step    forward pass, backward pass and update

With --compile, the first step compiles.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

from ranks import REPO, run_ranks

FUNCTIONS = {  # functions of the trainer: the part that their time belongs to
    "configure_torch": "settings",
    "setup_distributed": "rendezvous",
    "open_data": "data",
    "build_state": "model",
    "wrapped_loss": "DDP",
    "train_step": "first step",
}
PARTS = ["interpreter", "torch", "imports", "rank check", *FUNCTIONS.values()]
NAMES = [*PARTS, "all", "beyond torch"]


def rank(options: list[str]) -> None:
    """Run in each rank: print the seconds of each part."""
    began = float(os.environ["BEGAN"])
    seconds = {"interpreter": time.time() - began}

    def timed(function, part: str):
        def call(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
                sys.modules["torch"].cuda.synchronize()
            seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start
            if part == "first step":
                seconds["all"] = time.time() - began
                print(json.dumps(seconds), file=printed, flush=True)
            return result

        return call

    printed = sys.stdout
    sys.stdout = open(os.devnull, "w")
    sys.path[:0] = [str(REPO), str(REPO / "scripts")]
    timed(__import__, "torch")("torch")
    trainer = timed(__import__, "imports")("train_distributed")
    guard = timed(__import__, "imports")("guard")
    environment = guard.launch_environment(os.environ)
    store = timed(guard.check_ranks, "rank check")(environment, [])  # served by rank 0
    for name, part in FUNCTIONS.items():
        setattr(trainer, name, timed(getattr(trainer, name), part))
    trainer.main(argv=options)
    del store


def launch(ranks: int, gpu: bool, options: list[str]) -> dict[str, float]:
    """Seconds of each part in the slowest rank."""
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
    add("--gpu", action="store_true", help="on GPUs, one per rank; needs --ranks")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    add("options", nargs="*", help="options of the trainer, after --")
    args = parser.parse_args()
    if args.rank:
        return rank(args.options)
    turns: dict[int, list[dict]] = {ranks: [] for ranks in args.ranks}
    for _ in range(args.rounds):
        for ranks, results in turns.items():
            results.append(launch(ranks, args.gpu, args.options))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"| ranks | {' | '.join(NAMES)} |")
    print("| --- " * (len(NAMES) + 1) + "|")
    for ranks, results in turns.items():
        row = [statistics.median(result[name] for result in results) for name in NAMES]
        print(f"| {ranks} | {' | '.join(f'{seconds:.2f}' for seconds in row)} |", flush=True)


if __name__ == "__main__":
    main()
