#!/usr/bin/env python3
"""How long training stands still for a checkpoint, written at once and in the background.

    python benchmarks/checkpoints.py                     # ResNet-18 with SGD: 94 MB; two minutes
    python benchmarks/checkpoints.py --model resnet50 --directory /scratch

Both kinds take turns within one run; between saves the run trains, as it would. Prints medians and
quartiles of the seconds for which save() holds up the loop, of the seconds until the checkpoint
is complete, and what steps cost meanwhile.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_distributed as trainer  # noqa: E402


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--model", default="resnet18", help="[resnet18]")
    add("--saves", type=int, default=12, help="of each kind [12]")
    add("--directory", default=tempfile.gettempdir(), help="where to save [/tmp]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measure(options, directory)


def endless(loader):
    while True:
        yield from loader


def measure(options, directory: str) -> None:
    words = "--dataset synthetic --synthetic-samples 1024 --image-size 32 --batch-size 4 "
    words += f"--model {options.model} --keep 2 --checkpoint-dir {directory}"
    cfg = trainer.parse_config(words.split())
    world = trainer.setup_distributed(cfg)
    claim, stop = trainer.Claim(cfg, world), trainer.StopWishes(cfg, world)
    trainer.tune(cfg, world)
    claim.make()
    run = trainer.build_run(cfg, world, claim, stop)
    run.ddp = trainer.wrap_ddp(run)
    run.model.train()
    sums, batches, step = trainer.Sums(world.device), endless(run.train_loader), 0
    finished, write = 0.0, trainer.Saver.write

    def timed_write(*arguments):
        nonlocal finished
        write(*arguments)
        finished = time.perf_counter()

    trainer.Saver.write = timed_write

    def now() -> float:
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def train(steps: int) -> float:
        nonlocal step
        began = now()
        for _ in range(steps):
            trainer.train_step(run, batches, step % 256, step, sums)
            step += 1
        return (now() - began) / steps

    alone = [train(5) for _ in range(5)][1:]
    stalls: dict[bool, list[float]] = {False: [], True: []}
    whole: dict[bool, list[float]] = {False: [], True: []}
    during = []
    for number in range(2 * (options.saves + 1)):
        cfg.async_checkpoint = number % 2 == 1
        began = now()
        run.saver.save(run, trainer.Progress(step), f"checkpoint_step_{step}", last=False)
        stalls[cfg.async_checkpoint].append(now() - began)
        if cfg.async_checkpoint:
            during.append(train(1))
            while run.saver.thread.is_alive():
                during.append(train(1))
            run.saver.wait()
        whole[cfg.async_checkpoint].append(finished - began)
        alone.append(train(3))
    size = next(Path(directory).glob("*.pt")).stat().st_size
    print(f"{options.model}: {size / 1e6:.0f} MB; a step {1e3 * statistics.median(alone):.0f} ms, "
          f"while a checkpoint is written {1e3 * statistics.median(during):.0f} ms")  # fmt: skip
    for kind, name in ((False, "at once"), (True, "--async-checkpoint")):
        low, middle, high = statistics.quantiles(stalls[kind][1:], n=4)  # the first warms up
        print(f"{name}: training stands still for {1e3 * middle:.0f} ms (quartiles {1e3 * low:.0f} "
              f"to {1e3 * high:.0f}), on disk after "
              f"{1e3 * statistics.median(whole[kind][1:]):.0f} ms")  # fmt: skip
    ratios = [b / a for a, b in zip(stalls[False][1:], stalls[True][1:])]
    print(f"stall, async / at once: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
