#!/usr/bin/env python3
"""How long a checkpoint stalls training, with and without the recipe async_checkpoint.

    python benchmarks/checkpoints.py                     # ResNet-18 with SGD: 94 MB; two minutes
    python benchmarks/checkpoints.py --model resnet50 --directory /scratch

The trainer and a patched copy alternate; both train between saves. The output has the median and
quartiles of the duration of save_checkpoint(), the median time until the checkpoint is on disk, and
the duration of a step alone and while a checkpoint is written.
"""

import argparse
import contextlib
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ranks import MALLOC, REPO, apply_recipe, run_ranks


class Trainer:
    """A copy of train_distributed.py in its own directory, with or without the recipe."""

    def __init__(self, directory: Path, model: str, recipe: bool):
        directory.mkdir()
        file = directory / "train_distributed.py"
        file.write_bytes((REPO / file.name).read_bytes())
        if recipe:
            apply_recipe("async_checkpoint", directory)
        spec = importlib.util.spec_from_file_location(directory.name, file)
        self.code = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.code)
        options = "--dataset synthetic --image-size 32 --batch-size 4 --epochs 99 --keep 2 --model"
        words = [*options.split(), model, f"--checkpoint-dir={directory / 'run'}"]
        cfg = self.code.parse_config(words)
        run_directory = self.code.RunDirectory(Path(cfg.checkpoint_dir))
        run_directory.lock()
        with contextlib.redirect_stdout(sys.stderr):
            world = self.code.setup_distributed(cfg)
        self.run = self.code.Run(cfg, world, run_directory, {})
        self.run.model.train()
        self.metrics = self.code.Metrics(world.device)
        self.batches = (batch for _ in iter(int, 1) for batch in self.run.train_loader)
        self.stalls: list[float] = []  # seconds
        self.on_disk: list[float] = []

    def now(self) -> float:
        if self.run.world.device.type == "cuda":
            self.code.torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> float:
        """Train one step. Returns its duration in seconds."""
        began = self.now()
        step = self.run.global_step % self.run.sampler.steps_per_epoch
        self.code.train_step(self.run, self.batches, step, self.metrics)
        return self.now() - began

    def save(self) -> list[float]:
        """Save while training continues. Returns the seconds of each step until it is on disk."""
        goal, during, began = self.run.global_step, [], self.now()
        self.code.save_checkpoint(self.run, final=False)
        self.stalls.append(self.now() - began)
        while self.run.saved_step < goal:
            during.append(self.step())
        self.on_disk.append(self.now() - began)
        return during


def milliseconds(values: list[float]) -> str:
    return f"{1e3 * statistics.median(values):.0f} ms"


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--model", default="resnet18", help="[resnet18]")
    add("--saves", type=int, default=12, help="saves with and without the recipe [12]")
    add("--directory", default=tempfile.gettempdir(), help="where to save [/tmp]")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:  # start again, with the environment of a rank
        return print(run_ranks([__file__, *sys.argv[1:], "--rank"], 1, **MALLOC)[0], end="")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        at_once = Trainer(Path(directory, "at_once"), options.model, recipe=False)
        recipe = Trainer(Path(directory, "recipe"), options.model, recipe=True)
        alone, during = [], []
        for _ in range(options.saves + 1):
            for trainer in (at_once, recipe):
                alone += [trainer.step() for _ in range(3)]
                during += trainer.save()
        size = next(Path(directory).glob("recipe/run/*.pt")).stat().st_size
    print(f"{options.model}: {size / 1e6:.0f} MB; a step takes {milliseconds(alone[3:])}, while a "
          f"checkpoint is written {milliseconds(during or [0])}")  # fmt: skip
    for trainer, name in ((at_once, "as it is"), (recipe, "async_checkpoint")):
        low, _, high = statistics.quantiles(trainer.stalls[1:], n=4)  # the first warms up
        print(f"{name}: training stalls for {milliseconds(trainer.stalls[1:])} (quartiles "
              f"{1e3 * low:.0f} to {1e3 * high:.0f}), on disk after "
              f"{milliseconds(trainer.on_disk[1:])}")  # fmt: skip
    ratios = [b / a for a, b in zip(at_once.stalls[1:], recipe.stalls[1:])]
    print(f"stall, async_checkpoint / as it is: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
