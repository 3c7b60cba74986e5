#!/usr/bin/env python3
"""What fault tolerance costs per step, in the trainer itself and in scripts/guard.py.

    python benchmarks/overhead.py                   # 1 and 2 ranks, five minutes
    python benchmarks/overhead.py --ranks 2 --turns 30
    python benchmarks/overhead.py --gpu --ranks 1 -- --model resnet50 --dataset synthetic

The options after -- are the trainer's. The trainer: blocks of 20 steps with fault tolerance
(GradScaler skips steps whose gradients are not finite; Coordinator.agree() exchanges the stop flag
and the digests of the weights, and restarts the hang timer) alternate with blocks without it, and
with blocks without agree() only: same model, data, update and sum of the metrics. The output has
the median ratios of neighboring blocks with their standard errors.

guard.py: the time of its optimizer hook and the CPU time of its threads, as a share of a step of 15
ms. It only watches launches of two or more ranks.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

from ranks import REPO, repeated, run_ranks

BLOCK = 20  # steps
STEP = 0.015  # seconds
KINDS = ("with", "without", "scaler only")


def rank(turns: int, directory: str, more: list[str]) -> None:
    """Run in each rank, under scripts/guard.py: print the figures as JSON."""
    sys.path.insert(0, str(REPO))
    import torch

    import train_distributed as trainer

    batch_size = 24 // int(os.environ["WORLD_SIZE"])  # about 15 ms on two cores
    words = [f"--checkpoint-dir={directory}", f"--batch-size={batch_size}", "--epochs=1000"]
    words += more
    task = trainer.Task()
    cfg = trainer.parse_config(words)
    trainer.configure_torch(cfg)
    world = trainer.setup_distributed(cfg)
    run = trainer.open_run(task, cfg, world)
    run.state.epoch_sums = dict.fromkeys(task.sums, 0)
    run.learner.model.train()
    batches = repeated(run.train_loader)
    usual_scaler = run.learner.scaler
    no_scaler = torch.amp.GradScaler(world.device.type, enabled=False)

    def block(kind: str) -> float:
        """Seconds per step of a block, including the sum of the metrics at its end."""
        sums = trainer.ExactSums(task.sums, world.device)
        run.learner.scaler = no_scaler if kind == "without" else usual_scaler
        began = time.perf_counter()
        for _ in range(BLOCK):
            trainer.train_step(run, batches, sums)
            run.state.step += 1
        if kind == "with":
            run.coordinator.agree(run.state, sums, run.learner)
        else:
            sums.all_reduce(world)
        return (time.perf_counter() - began) / BLOCK

    began = time.perf_counter()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(turns + 2):
        for kind in KINDS if turn % 2 else reversed(KINDS):
            seconds[kind].append(block(kind))
    without = seconds["without"][2:]  # skip the warm-up
    found = {"step": statistics.median(without), "rank": world.rank}
    for kind in ("with", "scaler only"):
        ratios = [a / b for a, b in zip(seconds[kind][2:], without)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = 0.93 * (high - low) / turns**0.5  # standard error of a normal median
        found[kind] = middle, error
    found |= guard_cost(run.learner.optimizer, time.perf_counter() - began)
    print(json.dumps(found))
    trainer.on_rank_0(world, bool)  # wait for the others
    if world.world_size > 1:
        trainer.dist.destroy_process_group()


def guard_cost(optimizer, seconds: float) -> dict[str, float]:
    """Seconds per call of guard.py's hook, and CPU seconds of its threads per second."""
    found = {"hook": 0.0, "threads": 0.0}
    for hook in sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.values():
        began = time.perf_counter()
        for _ in range(10_000):
            hook(optimizer, (), {})
        found["hook"] += (time.perf_counter() - began) / 10_000
        for thread in hook.__self__.threads:
            clock = time.pthread_getcpuclockid(thread.ident)
            found["threads"] += time.clock_gettime(clock) / seconds
    return found


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2], help="[1 2]")
    add("--turns", type=int, default=300, help="pairs of blocks, with and without [300]")
    add("--gpu", action="store_true", help="on GPUs, one per rank")
    add("--rank", help=argparse.SUPPRESS)
    add("options", nargs="*", help="options of the trainer, after --")
    options = parser.parse_args()
    if options.rank:
        return rank(options.turns, options.rank, options.options)
    env = {} if options.gpu else {"CUDA_VISIBLE_DEVICES": ""}
    guard = REPO / "scripts/guard.py"
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as directory:
            words = [guard, __file__, f"--turns={options.turns}", f"--rank={directory}"]
            words += ["--", *options.options]
            outputs = run_ranks(words, ranks, **env)
        of_rank = [json.loads(out.splitlines()[-1]) for out in outputs]
        found = of_rank[0]
        ratio, error = found["with"]
        print(f"{ranks} rank(s): step {1e3 * found['step']:.2f} ms; with fault tolerance "
              f"{ratio:.4f} +- {error:.4f} times as long")  # fmt: skip
        ratio, error = found["scaler only"]
        print(f"  without agree(): {ratio:.4f} +- {error:.4f} times as long")
        hook, threads = (max(each[name] for each in of_rank) for name in ("hook", "threads"))
        print(f"  guard.py: hook {1e6 * hook:.2f} us per step, threads {1e6 * threads:.0f} us per "
              f"second: {100 * (hook / STEP + threads):.3f} % of a step of 15 ms")  # fmt: skip


if __name__ == "__main__":
    main()
