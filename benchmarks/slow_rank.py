#!/usr/bin/env python3
"""Does guard.py name the slow rank? Kinds of slowness, and trainings without a slow rank.

    python benchmarks/slow_rank.py                     # a table, recall and precision; 17 minutes
    python benchmarks/slow_rank.py --rounds 5
    python benchmarks/slow_rank.py --only disk healthy --shares 0.1
    python benchmarks/slow_rank.py --dump              # the time of a dump of the Flight Recorder

Each training runs an ordinary script with DDP and gloo under scripts/guard.py, which compares the
ranks every 30 steps. A step takes 100 ms (--step), and a slow rank takes 10, 20 or 50 % of that
more. Most of a step is sleep, so that two cores are enough; on a busy machine, use longer steps. A
training counts as right if the ranks named are exactly the slow ones.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks import REPO, run_ranks

INTERVAL = 30  # steps between two comparisons
WORKERS = 2  # of the kind "loader workers"
STEPS = 200  # of a training
SLOW = {  # what is slow: the ranks that should be named
    "forward": [1],
    "forward, rank 0": [0],
    "forward, of 2 ranks": [1],
    "forward, one of two hosts": [2, 3],  # two ranks of four
    "backward": [1],
    "optimizer": [1],
    "loader": [1],
    "loader workers": [1],
    "disk": [1],
    "CPU": [1],  # a busy loop
    "CPU quota": [1],  # SIGSTOP and SIGCONT
    "buffers and loss exchanged": [1],  # in forward; other collectives before and after
}
NOT_SLOW = {
    "healthy": "no extra time",
    "all ranks": "the same extra time on all ranks",
    "by turns": "another rank in each step",
    "by turns, 2 ranks": "another rank in each step",
    "at random": "a random rank in each step",
    "jitter": "random extra time on all ranks",
    "pauses": "rank 0 pauses for ten steps every 30 steps, as for a checkpoint",
    "warm-up": "rank 1, in the first ten steps only",
}


# Kinds whose extra time is in another place than after the forward pass.
ELSEWHERE = {"backward", "optimizer", "loader", "loader workers", "disk", "CPU quota"}


def ranks_of(kind: str) -> int:
    if kind == "forward, one of two hosts":
        return 4
    return 2 if "2 ranks" in kind else 3


# ---------------------------------------------------------------------------- the training script


def work(kind: str, seconds: float) -> None:
    """Stands in for computation. A SIGSTOP would not delay the end of one long sleep."""
    sleeps = 60 if kind == "CPU quota" else 1
    for _ in range(sleeps):
        time.sleep(seconds / sleeps)


def extra_seconds(kind: str, extra: float, rank: int, size: int, step: int) -> float:
    """By how much a rank is slower in this step."""
    if kind in SLOW:
        return extra if rank in SLOW[kind] else 0.0
    if kind == "all ranks":
        return extra
    if kind.startswith("by turns"):
        return extra if rank == step % size else 0.0
    if kind == "at random":
        return extra if rank == random.Random(step).randrange(size) else 0.0
    if kind == "jitter":
        return random.expovariate(1 / extra)
    if kind == "warm-up":
        return extra if rank == 1 and step < 10 else 0.0
    return 0.0


def read_slowly(seconds: float) -> None:
    """A file on a slow disk."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"0" * 4096)
        file.seek(0)
        time.sleep(seconds)
        file.read()


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def batches(kind: str, extra: float, rank: int, worker_seconds):
    """An endless loader. worker_seconds: a shared number, for a loader worker and a batch."""
    import torch

    slow = rank in SLOW.get(kind, ())

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1_000_000

        def __getitem__(self, index):
            if kind == "loader" and slow:
                time.sleep(extra)
            elif kind == "disk" and slow:
                read_slowly(extra)
            elif kind == "loader workers" and slow:
                time.sleep(worker_seconds.value)
            return torch.randn(10)

    workers = WORKERS if kind == "loader workers" and slow else 0
    return iter(torch.utils.data.DataLoader(Data(), num_workers=workers))


def train(kind: str, step_seconds: float, extra: float) -> None:
    """Run in each rank, under guard.py."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = dist.get_world_size()
    exchanges = kind == "buffers and loss exchanged"
    middle = torch.nn.BatchNorm1d(10) if exchanges else torch.nn.LayerNorm(10)
    layers = [torch.nn.Linear(10, 10), middle, torch.nn.Linear(10, 10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    seconds = 0.0
    place = kind.split(",")[0]
    if place == "backward":
        model.module[1].weight.register_hook(lambda gradient: time.sleep(seconds))
    model.module[0].register_forward_hook(lambda *_: work(kind, step_seconds))
    stopper = None
    if kind == "CPU quota" and rank in SLOW[kind]:
        words = [sys.executable, __file__, "--stop", os.getpid()]
        words += ["--step", step_seconds, "--shares", extra / step_seconds]
        stopper = subprocess.Popen(list(map(str, words)))
    worker_seconds = multiprocessing.Value("d", 0.0)
    loader = batches(kind, extra, rank, worker_seconds)
    time.sleep(1)  # until guard.py counts the optimizer's steps
    step = 0
    ends = []
    while step < STEPS:
        ends.append(time.perf_counter())
        if step == 10:  # from now on, the workers are slower than the steps
            usual = statistics.median(end - begin for begin, end in zip(ends, ends[1:]))
            worker_seconds.value = WORKERS * (usual + extra)
        seconds = extra_seconds(kind, extra, rank, size, step)
        data = torch.cat([next(loader), torch.randn(3, 10)])
        optimizer.zero_grad()
        loss = model(data).square().mean()
        if place == "CPU":
            spin(seconds)
        elif place not in ELSEWHERE:
            time.sleep(seconds)
        loss.backward()
        if exchanges:
            dist.all_reduce(loss.detach())
        optimizer.step()
        if place == "optimizer":
            time.sleep(seconds)
        if kind == "pauses" and rank == 0 and step % 30 == 29:
            time.sleep(10 * step_seconds)
        step += 1
    if stopper:
        stopper.kill()
    dist.destroy_process_group()
    os._exit(0)  # without waiting for loader workers that sleep


def stop_and_continue(process: int, step_seconds: float, share: float) -> None:
    """Let a process run for the time of a step and stop it for a share of that, again and again.

    The process kills this one.
    """
    while True:
        time.sleep(step_seconds)
        os.kill(process, signal.SIGSTOP)
        time.sleep(step_seconds * share)
        os.kill(process, signal.SIGCONT)


# --------------------------------------------------------------------------------- the benchmark


def named_ranks(kind: str, step_seconds: float, share: float) -> list[int]:
    """Run a training; returns the ranks that guard.py names."""
    with tempfile.TemporaryDirectory() as directory:
        events = Path(directory, "events")
        env = {"SLOW_RANK_INTERVAL": str(INTERVAL * step_seconds), "EVENTS_FILE": str(events)}
        env["CUDA_VISIBLE_DEVICES"] = ""
        words = [REPO / "scripts/guard.py", __file__, "--train", kind]
        words += ["--step", step_seconds, "--shares", share]
        run_ranks(words, ranks_of(kind), **env)
        lines = events.read_text().splitlines() if events.exists() else []
    named = set()
    for line in lines:
        event = json.loads(line)
        print(f"  {event['text']}", file=sys.stderr)
        named.update(event["ranks"])
    return sorted(named)


def compare(kinds: list[str], step_seconds: float, shares: list[float], rounds: int) -> None:
    recalled = 0
    slow = 0
    named_in = 0
    false_alarms = 0
    print(f"| slow | {' | '.join(f'{share:.0%} of a step' for share in shares)} |")
    print("| --- " * (1 + len(shares)) + "|")
    for kind in kinds:
        cells = []
        for share in shares:
            right = 0
            for _ in range(rounds):
                expected = SLOW.get(kind, [])
                named = named_ranks(kind, step_seconds, share)
                print(f"{kind}, {share:.0%}: {named}, expected {expected}", file=sys.stderr)
                right += named == expected
                slow += bool(expected)
                recalled += bool(expected) and named == expected
                named_in += bool(named)
                false_alarms += not set(named) <= set(expected)
            cells.append(f"{right} of {rounds} right")
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
    if slow:
        print(f"\nrecall {recalled} of {slow}")
    if named_in:
        print(f"precision {recalled} of {named_in}")
    print(f"false alarms {false_alarms} of {rounds * len(kinds) * len(shares)} trainings")


def measure_dump() -> None:
    """The time that a rank needs for its arrivals, with a full recorder, and their size."""
    sys.path.insert(0, str(REPO / "scripts"))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_PORT": "0", "TORCH_FR_BUFFER_SIZE": "2000"}
    import guard
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ends = []
    for number in range(2100):
        dist.all_reduce(torch.ones(1))
        if number % 5 == 4:  # a step has five collectives
            ends.append(time.time_ns())
    seconds = []
    cpu_seconds = []
    for _ in range(21):
        began = time.perf_counter()
        cpu_began = time.process_time()
        note = guard.arrivals(ends, 1)
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
        time.sleep(0.1)
    for name, values in (("elapsed", seconds), ("CPU", cpu_seconds)):
        values.sort()
        middle = 1000 * values[10]
        print(f"{name}: {middle:.0f} ms ({1000 * values[0]:.0f} to {1000 * values[-1]:.0f})")
    print(f"{len(json.dumps(note))} bytes in the store")
    dist.destroy_process_group()


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    kinds = [*SLOW, *NOT_SLOW]
    add("--only", nargs="+", choices=kinds, default=kinds, metavar="KIND", help="[all]")
    add("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.5], help="[0.1 0.2 0.5]")
    add("--step", type=float, default=0.1, help="seconds of a step [0.1]")
    add("--rounds", type=int, default=1, help="trainings of each kind and share [1]")
    add("--dump", action="store_true", help="measure a dump instead")
    add("--train", help=argparse.SUPPRESS)
    add("--stop", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.step, options.step * options.shares[0])
    elif options.stop:
        stop_and_continue(options.stop, options.step, options.shares[0])
    elif options.dump:
        measure_dump()
    else:
        compare(options.only, options.step, options.shares, options.rounds)


if __name__ == "__main__":
    main()
