#!/usr/bin/env python3
"""How long a checkpoint stalls training, with and without the recipe async_checkpoint.

    python benchmarks/checkpoints.py                     # ResNet-18 with SGD: 94 MB; two minutes
    python benchmarks/checkpoints.py --model resnet50 --directory /scratch

The trainer and patched copies alternate; all train between saves. The output has medians (and
quartiles) over the saves: the duration of save(), the time until the checkpoint is on
disk, the duration of a step while it is written, as a multiple of the steps just before, and the
training time that the checkpoint costs: the stall, plus what these steps took longer.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ranks import MALLOC, load_trainer, repeated, run_ranks

RECIPE = "async_checkpoint"
STEPS = 5  # before each save


class Trainer:
    """A copy of train_distributed.py in its own directory, with or without the recipe."""

    def __init__(self, directory: Path, model: str, recipe: str):
        self.code = load_trainer(directory, recipe)
        options = "--dataset synthetic --image-size 32 --batch-size 4 --epochs 99 --keep 2 --model"
        words = [*options.split(), model, f"--checkpoint-dir={directory / 'run'}"]
        cfg = self.code.parse_config(words)
        task = self.code.Task()
        with contextlib.redirect_stdout(sys.stderr):
            world = self.code.setup_distributed(cfg)
            self.run = self.code.open_run(task, cfg, world)
        self.run.learner.model.train()
        self.sums = self.code.ExactSums(task.sums, world.device)
        self.batches = repeated(self.run.train_loader)
        self.saves: list[list[float]] = []  # for each: seconds, seconds, ratio, seconds

    def now(self) -> float:
        if self.run.world.device.type == "cuda":
            self.code.torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> float:
        """Train one step. Returns its duration in seconds."""
        began = self.now()
        self.code.train_step(self.run, self.batches, self.sums)
        self.run.state.step += 1
        return self.now() - began

    def save(self) -> None:
        """Save while training continues. Adds [stall, on disk, slowdown, cost] to self.saves."""
        alone = statistics.median(self.step() for _ in range(STEPS))
        saved_step = self.run.state.step
        began = self.now()
        self.run.writer.save(self.run.state, self.run.learner)
        stall = self.now() - began
        during = []  # seconds of each step while the checkpoint is written
        while self.run.writer.saved_step < saved_step:
            during.append(self.step())
        on_disk = self.now() - began
        slowdown = statistics.mean(during or [alone]) / alone
        cost = stall + sum(seconds - alone for seconds in during)
        self.saves.append([stall, on_disk, slowdown, cost])


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--model", default="resnet18", help="[resnet18]")
    add("--saves", type=int, default=12, help="saves of each [12]")
    add("--directory", default=tempfile.gettempdir(), help="where to save [/tmp]")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:  # start again, with the environment of a rank
        return print(run_ranks([__file__, *sys.argv[1:], "--rank"], 1, **MALLOC)[0], end="")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        trainers = [
            Trainer(Path(directory, f"trainer{number}"), options.model, recipe)
            for number, recipe in enumerate(["", RECIPE])
        ]
        for number in range(options.saves + 1):  # the first warms up
            for trainer in trainers if number % 2 else reversed(trainers):
                trainer.save()
        size = next(Path(directory).glob("trainer0/run/*.pt")).stat().st_size
    print(f"{options.model}: {size / 1e6:.0f} MB\n")
    print("| | training pauses for | on disk after | step while writing | training time lost |")
    print("| --- | --- | --- | --- | --- |")
    for trainer, name in zip(trainers, ["as it is", RECIPE]):
        cells = []
        for values, unit in zip(zip(*trainer.saves[1:]), (1e3, 1e3, 1, 1e3)):
            low, middle, high = (unit * quartile for quartile in statistics.quantiles(values, n=4))
            cells.append(f"{middle:.0f} ms ({low:.0f} to {high:.0f})" if unit > 1 else
                         f"x {middle:.2f} ({low:.2f} to {high:.2f})")  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |")
    ratios = [b[0] / a[0] for a, b in zip(trainers[0].saves[1:], trainers[1].saves[1:])]
    print(f"\nstall, {RECIPE} / as it is: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
