#!/usr/bin/env python3
"""How long a checkpoint stalls training.

    python benchmarks/checkpoints.py                     # ResNet-18 with SGD: 94 MB; a minute
    python benchmarks/checkpoints.py --model resnet50 --directory /scratch

Trains on synthetic images and saves every five steps. The output has medians (and quartiles) over
the saves: the duration of a step, and that of a save, until the checkpoint is on disk. The first
save is not counted: the trainer then reads the file again.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ranks import MALLOC, REPO, run_ranks

STEPS = 5  # from one save to the next


def train(options) -> None:
    """Run in the rank: print the seconds of each step and save as JSON."""
    sys.path.insert(0, str(REPO))
    import train_distributed as trainer
    from examples.imagenet import Images

    seconds = {"step": [], "save": []}

    def timed(function, part: str):
        def call(*arguments):
            synchronize()
            began = time.perf_counter()
            function(*arguments)
            synchronize()
            seconds[part].append(time.perf_counter() - began)

        return call

    def synchronize() -> None:
        if trainer.torch.cuda.is_initialized():
            trainer.torch.cuda.synchronize()

    trainer.train_step = timed(trainer.train_step, "step")
    trainer.RunDirectory.save = timed(trainer.RunDirectory.save, "save")
    words = "--synthetic --image-size 32 --batch-size 4 --keep 2 --save-minutes 999".split()
    words += [f"--model={options.model}", f"--checkpoint-dir={options.directory}"]
    words += [f"--checkpoint-every-steps={STEPS}", f"--stop-at-step={STEPS * (options.saves + 1)}"]
    with contextlib.redirect_stdout(sys.stderr):
        trainer.main(Images(), words)
    print(json.dumps(seconds))


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--model", default="resnet18", help="[resnet18]")
    add("--saves", type=int, default=12, help="saves to measure [12]")
    add("--directory", default=tempfile.gettempdir(), help="where to save [/tmp]")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return train(options)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        words = [f"--model={options.model}", f"--saves={options.saves}", f"--directory={directory}"]
        out = run_ranks([__file__, "--rank", *words], 1, **MALLOC)[0]
        size = next(Path(directory).glob("*.pt")).stat().st_size
    seconds = json.loads(out)
    print("| checkpoint | step | training pauses for | speed |")
    print("| --- | --- | --- | --- |")
    cells = [f"{options.model}, {size / 1e6:.0f} MB"]
    for values in (seconds["step"][1:], seconds["save"][1:]):
        low, middle, high = (1e3 * quartile for quartile in statistics.quantiles(values, n=4))
        cells.append(f"{middle:.0f} ms ({low:.0f} to {high:.0f})")
    cells.append(f"{size / 1e6 / middle:.2f} GB/s")
    print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
