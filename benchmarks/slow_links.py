#!/usr/bin/env python3
"""Compare ways to exchange gradients over slow links: bytes, samples per second, accuracy.

    sudo "$(which python)" benchmarks/slow_links.py            # Markdown tables; 20 minutes
    sudo "$(which python)" benchmarks/slow_links.py --mbits 100 --rounds 1 --seeds

Two hosts, which are network namespaces of this machine, have one rank each. `tc` (token bucket
filter) limits their links to --mbits; 0 is no limit. The network is SimpleConvNet: 4.8 MB of
gradients per step. The ways alternate in the same two processes:

    plain         DistributedDataParallel
    bf16, fp16    gradients rounded to 16 bits
    powersgd N    PowerSGD: matrices of rank N, with error feedback
    local N       no exchange of gradients; every N steps, the weights are averaged

bf16 and "local N" are those of the recipe slow_links, fp16 and powersgd are in this file. The
accuracies are those after whole trainings on two ranks without limits, one for each seed.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ranks import MALLOC, REPO, load_trainer, run_ranks
from scaling import hosts

WAYS = ["plain", "bf16", "fp16", "powersgd 1", "powersgd 2", "powersgd 4", "local 4", "local 8"]
BATCH = 64  # samples per rank and step
SKIPPED = 4  # steps before the measurement


def register_powersgd(ddp, rank: int) -> None:
    """Vogels et al. 2019, arXiv:1905.13727. The first two passes, wrap_ddp()'s, are not compressed.

    Without wait(), gloo's messages of two buckets could be exchanged in a different order by rank.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def hook(state, bucket):
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    state = powerSGD_hook.PowerSGDState(None, rank, 2, orthogonalization_epsilon=1e-8)
    ddp.register_comm_hook(state, hook)


def sent_bytes() -> int:
    """By this host so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == "eth0:")


def train_once(trainer, world, way: str, words: list[str]) -> tuple[float, float]:
    """Returns the means of a step, after the first ones: seconds, and bytes sent by this host."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    name, _, number = way.partition(" ")
    train_step = trainer.train_step
    usual_class = trainer.DistributedDataParallel
    seconds = []
    sent = []

    def timed_step(*arguments) -> None:
        began = time.perf_counter()
        sent_before = sent_bytes()
        train_step(*arguments)
        seconds.append(time.perf_counter() - began)
        sent.append(sent_bytes() - sent_before)

    class WithHook(usual_class):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if name == "fp16":
                self.register_comm_hook(None, default_hooks.fp16_compress_hook)
            elif name == "powersgd":
                register_powersgd(self, int(number))

    if name == "bf16":
        words = [*words, "--bf16-gradients"]
    elif name == "local":
        words = [*words, f"--average-every={number}"]
    trainer.train_step = timed_step
    trainer.DistributedDataParallel = WithHook
    try:
        trainer.train(trainer.Task(), trainer.parse_config(words), world)
    finally:
        trainer.train_step = train_step
        trainer.DistributedDataParallel = usual_class
    # Steps that average the weights take longer: means, not medians.
    return statistics.mean(seconds[SKIPPED:]), statistics.mean(sent[SKIPPED:])


def worker(trainings: list[tuple[str, str]], directory: str) -> None:
    """Run in each rank: print a JSON line for each of the trainings, (way, options)."""
    copy = Path(directory, f"rank{os.environ['RANK']}")
    trainer = load_trainer(copy, "slow_links")
    stdout = sys.stdout
    sys.stdout = sys.stderr
    (copy / "data").symlink_to(REPO / "data")
    world = trainer.setup_distributed(trainer.parse_config([]))
    for number, (way, words) in enumerate(trainings):
        path = Path(directory, str(number))
        words = [*words.split(), f"--checkpoint-dir={path}"]
        result = {"way": way}
        result["seconds"], result["sent"] = train_once(trainer, world, way, words)
        if world.rank == 0:  # the last record is that of an epoch, if the training is complete
            result |= json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
            print(json.dumps(result), file=stdout, flush=True)
    time.sleep(0.2)  # as in the trainer: gloo's threads may need Python once more
    trainer.dist.destroy_process_group()


def train(trainings: list[tuple[str, str]], places=None, **env: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as directory:
        words = [__file__, "--worker", json.dumps([trainings, directory])]
        out = run_ranks(words, 2, places, **MALLOC, OMP_NUM_THREADS="1", **env)
    lines = [line for line in out[0].splitlines() if line.startswith("{")]  # gloo writes others
    return [json.loads(line) for line in lines]


def show(values: list[float], digits: int) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def compare_speed(ways: list[str], mbits: float, rounds: int, steps: int) -> None:
    words = f"--batch-size {BATCH} --epochs 99 --log-every-steps 1 --stop-at-step {steps}"
    order = [way for n in range(rounds) for way in (ways if n % 2 else ways[::-1])]
    env = {"MASTER_ADDR": "10.111.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise c10d warns that host names are unknown
    with hosts(2, mbits) as names:
        places = [["ip", "netns", "exec", name] for name in names]
        results = train([(way, words) for way in order], places, **env)
    links = f"{mbits:g} Mbit/s" if mbits else "no limit"
    print(f"\n| {links} | sent per step | samples/s | / {ways[0]} |")
    print("| --- | --- | --- | --- |")
    speeds = {w: [2 * BATCH / r["seconds"] for r in results if r["way"] == w] for w in ways}
    for way in ways:
        ratios = [a / b for a, b in zip(speeds[way], speeds[ways[0]])]
        sent = statistics.median(r["sent"] for r in results if r["way"] == way)
        speed = f"{sent / 1e6:.2f} MB | {statistics.median(speeds[way]):.0f}"
        print(f"| {way} | {speed} | {show(ratios, 2)} |", flush=True)


def compare_accuracy(ways: list[str], seeds: list[int], epochs: int) -> None:
    words = f"--batch-size {BATCH} --epochs {epochs} --seed"
    results = train([(way, f"{words} {seed}") for seed in seeds for way in ways])
    print(f"\n| {epochs} epochs, {len(seeds)} seeds | training loss | test loss | test accuracy |")
    print("| --- | --- | --- | --- |")
    for way in ways:
        mine = [r for r in results if r["way"] == way]
        losses = [show([r[key] for r in mine], 3) for key in ("loss", "test_loss")]
        accuracy = show([100 * r["test_accuracy"] for r in mine], 2)
        print(f"| {way} | {' | '.join(losses)} | {accuracy} % |", flush=True)


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--mbits", type=float, nargs="*", default=[100, 1000, 0], help="link speeds [100 1000 0]")
    add("--rounds", type=int, default=3, help="trainings of each way per link speed [3]")
    add("--steps", type=int, default=20, help="steps of each [20]")
    add("--seeds", type=int, nargs="*", default=[1, 2, 3], help="for the accuracies [1 2 3]")
    add("--epochs", type=int, default=3, help="for the accuracies [3]")
    add("--ways", nargs="+", choices=WAYS, default=WAYS, help="[all]")
    add("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(*json.loads(options.worker))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the namespaces
    if options.mbits and os.geteuid():
        sys.exit("slow_links.py: error: namespaces need root: use sudo, or --mbits without values")
    for mbits in options.mbits:
        compare_speed(options.ways, mbits, options.rounds, options.steps)
    if options.seeds:
        compare_accuracy(options.ways, options.seeds, options.epochs)


if __name__ == "__main__":
    main()
