#!/usr/bin/env python3
"""What surviving costs: a step with all of it against the same step without, in turns.

    python benchmarks/overhead.py
    torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py

All of it: the look for NaN, the timing of each rank, the watchdog with its thread,
the agreement on stopping and the sign of life in status.json. Without: the same model,
data and update, and the sums that metrics need anyway. Between them: all but the look for NaN,
which is one pass over the gradients. Blocks of 20 steps with a record at the end take turns;
prints medians, and the median ratio within a turn with its standard error.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_distributed as trainer  # noqa: E402

BLOCK, TURNS = 20, 300
KINDS = ("none", "all but the look for NaN", "all")


def plain_update(run) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)


class NoTimer:
    def begin(self) -> None: ...

    def end(self) -> None: ...

    def read(self) -> float:
        return 0.0


def block(run, step: int, kind: str) -> float:
    """Seconds for a block of steps, with its record at the end."""
    sums, batches = trainer.Sums(run.world.device), iter(run.train_loader)
    timer, update, guarded = run.timer, trainer.update, kind != "none"
    if not guarded:
        run.timer = NoTimer()
    if kind != "all":
        trainer.update = plain_update
    lookout = trainer.Lookout(run, step)
    began = time.perf_counter()
    for n in range(BLOCK):
        trainer.train_step(run, batches, n, step + n, sums)
        if guarded:
            run.watch.progress(step + n)
    if guarded:
        lookout.look(step + BLOCK, sums)
        if run.bad_steps:
            trainer.look_for_bad_steps(run, trainer.Progress(step))
        if time.monotonic() > run.claim.told + trainer.LOOK_SECONDS:
            run.claim.tell("running", step)
    else:
        sums.over_all_ranks(run.world)
    seconds = time.perf_counter() - began
    run.timer, trainer.update = timer, update
    return seconds


def main() -> None:
    own = os.environ.get("MASTER_PORT", os.getpid())  # the same on all ranks of a launch
    directory = Path(tempfile.gettempdir(), f"overhead-{own}")
    directory.mkdir(exist_ok=True)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    batch_size = 24 // ranks  # about 15 ms on two cores
    words = [f"--checkpoint-dir={directory}", f"--batch-size={batch_size}", "--epochs=1000"]
    cfg = trainer.parse_config(words)
    world = trainer.setup_distributed(cfg)
    claim, stop = trainer.Claim(cfg, world), trainer.StopWishes(cfg, world)
    trainer.tune(cfg, world)
    if world.rank == 0:
        claim.make()
    run = trainer.build_run(cfg, world, claim, stop)
    run.ddp = trainer.wrap_ddp(run)
    run.model.train()
    run.watch.start()
    seconds, step = {kind: [] for kind in KINDS}, 0
    for turn in range(TURNS + 2):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            seconds[kind].append(block(run, step, kind))
            step += BLOCK
    run.watch.due = float("inf")
    if world.rank == 0:
        none = seconds["none"][2:]  # the first ones warm up
        print(f"{world.world_size} rank(s): step {1e3 * statistics.median(none) / BLOCK:.2f} ms")
        for kind in KINDS[1:]:
            ratios = [guarded / plain for guarded, plain in zip(seconds[kind][2:], none)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            error = 0.93 * (high - low) / TURNS**0.5  # of the median, were the ratios normal
            print(f"{kind} / none: {middle:.4f} +- {error:.4f} (quartiles {low:.4f} to {high:.4f})")
        shutil.rmtree(directory)
    if world.world_size > 1:
        trainer.dist.barrier()
        trainer.dist.destroy_process_group()


if __name__ == "__main__":
    main()
