#!/usr/bin/env python3
"""How long training stands still when a rank is killed under scripts/supervise.py, by part.

    python benchmarks/recovery.py                          # 2 and 8 ranks, by torchrun
    python benchmarks/recovery.py --before DIRECTORY       # alternates with another checkout
    python benchmarks/recovery.py -- LAUNCH_COMMAND        # by any launcher

Trains on the sample of MNIST, saves every 20 steps, and sends SIGKILL to the last rank that runs on
this machine. Prints the medians over the rounds of the seconds until

    detected    the launcher or another rank prints that something has failed
    ended       all processes have ended, and supervise.py knows the cause
    restarted   supervise.py starts the next attempt
    prepared    the launcher has checked the node, and starts torchrun or srun
    started     the last rank on this machine starts; torchrun has imported PyTorch
    checked     all ranks have imported PyTorch, and have passed the rank check
    imported    rank 0 has imported the rest
    joined      the process group exists
    loaded      the checkpoint is loaded
    step        the first step is complete

each from the previous one on. With --unsaved, nothing is saved before the crash, which then counts
as a crash without progress. A command after -- is what scripts/supervise.py would start, for
example `scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 4 node01 node02`, or, in an
allocation of Slurm, `bash slurm_train_multinode.sh`; --ranks then only names the row, and all nodes
must see --directory.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ranks import REPO

PARTS = ["detected", "ended", "restarted", "prepared", "started", "checked", "imported", "joined"]
PARTS += ["loaded", "step"]
PATIENCE = 120  # seconds for an attempt to reach its first steps
SAVE_STEPS = 20
OPTIONS = ["--batch-size=8", "--epochs=1000", "--log-every-steps=1"]


class Training:
    """A training under supervise.py, the times of its output lines, and its files."""

    def __init__(self, checkout: Path, command: list[str], directory: Path):
        self.directory = directory / "run"
        self.lines: list[tuple[float, str]] = []
        env = {name: text for name, text in os.environ.items() if name != "STATUS_FILE"}
        env |= {"LOG_DIR": str(directory), "PYTHON": sys.executable}
        words = [sys.executable, "scripts/supervise.py", *command]
        self.process = subprocess.Popen(
            [*words, f"--checkpoint-dir={self.directory}"],
            cwd=checkout,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.time(), line))

    def wait_for(self, condition):
        """The value of the condition, as soon as it is true."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            value = condition()
            if value:
                return value
            time.sleep(0.02)
        output = "".join(line for _, line in self.lines)
        self.stop()
        sys.exit(f"error: the training did not go on within {PATIENCE} s:\n{output}")

    def stop(self) -> None:
        """Ask it to stop; if it does not, kill it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.reader.join()

    def records(self, name: str) -> list[dict]:
        """The lines of a file in the run directory; [] if there is none, or it is incomplete."""
        with contextlib.suppress(OSError, ValueError):
            return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]
        return []

    def attempt(self, number: int) -> dict | None:
        attempts = self.records("attempts.jsonl")
        return attempts[number] if len(attempts) > number else None

    def first_record(self, since: float, step: int = 1) -> dict | None:
        """The first record of a step from this one on, written after this time."""
        for record in self.records("metrics.jsonl"):
            if record["kind"] == "train" and record["step"] >= step and record["time"] > since:
                return record
        return None

    def times_of_lines(self, pattern: str, since: float) -> list[float]:
        """When the lines with this pattern were printed."""
        return [when for when, line in self.lines if when > since and re.search(pattern, line)]


def ranks_of(attempt: str) -> dict[int, int]:
    """{rank: process id} of the ranks of an attempt that run on this machine."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            words = (process / "cmdline").read_bytes().split(b"\0")
            scripts = [word for word in words[1:3] if word.endswith(b"guard.py")]
            if not scripts:
                continue
            env = dict(re.findall(rb"([^=\0]+)=([^\0]*)", (process / "environ").read_bytes()))
            rank = env.get(b"RANK") or env.get(b"SLURM_PROCID")
            if rank and env.get(b"ATTEMPT_ID") == attempt.encode():
                found[int(rank)] = int(process.name)
    return found


def start_of(pid: int) -> float:
    """When a process started, in seconds since 1970."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def measure(checkout: Path, command: list[str], parent: str | None, unsaved: bool) -> dict:
    """Kill a rank of a training; the seconds of each part until it has made the next step."""
    options = OPTIONS if unsaved else [*OPTIONS, f"--checkpoint-every-steps={SAVE_STEPS}"]
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        training = Training(checkout, [*command, *options], Path(directory))
        try:
            return times_of_recovery(training)
        finally:
            training.stop()


def times_of_recovery(training: Training) -> dict:
    first = training.wait_for(lambda: training.attempt(0))
    training.wait_for(lambda: training.first_record(0, step=SAVE_STEPS + 5))
    ranks = ranks_of(first["attempt"])
    killed = time.time()
    os.kill(ranks[max(ranks)], signal.SIGKILL)

    second = training.wait_for(lambda: training.attempt(1))
    record = training.wait_for(lambda: training.first_record(second["start"]))
    pids = ranks_of(second["attempt"]).values()
    status = json.loads((training.directory / "status.json").read_text())
    start = second["start"]
    times = {
        "detected": training.times_of_lines("", since=killed)[0],
        "ended": training.attempt(0)["end"],
        "restarted": start,
        "prepared": training.times_of_lines(r"^\$ ", since=start)[-1],  # after launch.py's own
        "started": max(start_of(pid) for pid in pids),
        "checked": training.times_of_lines("guard.py: ranks? [0-9]", since=start)[-1],
        "imported": training.times_of_lines("Starting distributed training", since=start)[0],
        "joined": (training.directory / "lock").stat().st_mtime,
        "loaded": status["began"],
        "step": record["time"],
    }
    parts = {"all": times["step"] - killed}
    before = killed
    for name in PARTS:
        parts[name] = times[name] - before
        before = times[name]
    return parts


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 8], help="[2 8]")
    add("--rounds", type=int, default=3, help="[3]")
    add("--before", type=Path, help="another checkout of this repository, to compare with")
    add("--unsaved", action="store_true", help="no checkpoint before the crash")
    add("--directory", help="for the run directories; all nodes see it [that of temporary files]")
    add("command", nargs="*", help="a launch command, after --")
    args = parser.parse_args()
    checkouts = {"now": REPO}
    if args.before:
        checkouts = {"before": args.before.resolve(), "now": REPO}
    launch = ["scripts/ssh/launch_singlenode.sh", "configs/default_config.yaml"]
    results: dict[tuple, list[dict]] = {}
    for _ in range(args.rounds):
        for ranks in args.ranks[:1] if args.command else args.ranks:
            for name, checkout in checkouts.items():
                command = args.command or [*launch, str(ranks)]
                parts = measure(checkout, command, args.directory, args.unsaved)
                results.setdefault((ranks, name), []).append(parts)
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    names = [*PARTS, "all"]
    print(f"| ranks | checkout | {' | '.join(names)} |")
    print("| --- " * (len(names) + 2) + "|")
    for (ranks, checkout), turns in results.items():
        medians = [statistics.median(turn[name] for turn in turns) for name in names]
        print(f"| {ranks} | {checkout} | {' | '.join(f'{value:.2f}' for value in medians)} |")
    for (ranks, checkout), turns in results.items():
        totals = ", ".join(f"{turn['all']:.2f}" for turn in turns)
        print(f"all, {ranks} ranks, {checkout}: {totals}")


if __name__ == "__main__":
    main()
