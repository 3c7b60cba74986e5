#!/usr/bin/env python3
"""How long training stands still when a rank is killed under scripts/supervise.py.

    python benchmarks/recovery.py                          # 2 and 8 ranks, by torchrun
    python benchmarks/recovery.py -- LAUNCH_COMMAND        # by any launcher

Trains on the sample of MNIST, saves every 20 steps, and sends SIGKILL to the last rank that runs on
this machine. Prints the medians over the rounds of the seconds until supervise.py restarts the
training, and from there to the end of the first step. A command after -- is what supervise.py
would start, for example `scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 4 n01 n02`
or, in an allocation of Slurm, `bash slurm_train_multinode.sh`; --ranks then only names the row, and
all nodes must see --directory.
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

PATIENCE = 120  # seconds for an attempt to reach its first steps
SAVE_STEPS = 20
OPTIONS = ["--batch-size=8", "--epochs=1000", "--log-every-steps=1"]
OPTIONS += [f"--checkpoint-every-steps={SAVE_STEPS}"]


class Training:
    """A training under supervise.py, the times of its output lines, and its files."""

    def __init__(self, command: list[str], directory: Path):
        self.directory = directory / "run"
        self.lines: list[tuple[float, str]] = []
        env = {name: text for name, text in os.environ.items() if name != "STATUS_FILE"}
        env |= {"LOG_DIR": str(directory), "PYTHON": sys.executable, "RESTART_PAUSE": "0"}
        words = [sys.executable, "scripts/supervise.py", *command]
        self.process = subprocess.Popen(
            [*words, f"--checkpoint-dir={self.directory}"],
            cwd=REPO,
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

    def first_record(self, since: float, step: int = 1) -> dict | None:
        """The first record of a step from this one on, written after this time."""
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is incomplete
            for line in (self.directory / "metrics.jsonl").read_text().splitlines():
                record = json.loads(line)
                if record["kind"] == "train" and record["step"] >= step and record["time"] > since:
                    return record
        return None

    def time_of_restart(self) -> float | None:
        return next((when for when, line in self.lines if "Restart 1 in" in line), None)

    def last_rank(self) -> int:
        """The process id of the last rank on this machine."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                words = (process / "cmdline").read_bytes().split(b"\0")
                is_rank = any(word.endswith(b"guard.py") for word in words[1:3])
                if is_rank and f"--checkpoint-dir={self.directory}".encode() in words:
                    environment = (process / "environ").read_bytes()
                    rank = re.search(rb"(?:^|\0)(?:RANK|SLURM_PROCID)=(\d+)", environment)
                    found[int(rank[1])] = int(process.name)
        return found[max(found)]


def measure(command: list[str], parent: str | None) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        training = Training([*command, *OPTIONS], Path(directory))
        try:
            return times_of_recovery(training)
        finally:
            training.stop()


def times_of_recovery(training: Training) -> tuple[float, float]:
    """Seconds from the kill to the restart, and from there to the end of the first step."""
    training.wait_for(lambda: training.first_record(0, step=SAVE_STEPS + 5))
    killed = time.time()
    os.kill(training.last_rank(), signal.SIGKILL)
    restarted = training.wait_for(training.time_of_restart)
    record = training.wait_for(lambda: training.first_record(restarted))
    return restarted - killed, record["time"] - restarted


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 8], help="[2 8]")
    add("--rounds", type=int, default=3, help="[3]")
    add("--directory", help="for the run directories; all nodes see it [that of temporary files]")
    add("command", nargs="*", help="a launch command, after --")
    args = parser.parse_args()
    launch = ["scripts/ssh/launch_singlenode.sh", "configs/default_config.yaml"]
    results: dict[int, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for ranks in args.ranks[:1] if args.command else args.ranks:
            command = args.command or [*launch, str(ranks)]
            results.setdefault(ranks, []).append(measure(command, args.directory))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("| ranks | to the restart | to the first step | all |")
    print("| --- | --- | --- | --- |")
    for ranks, turns in results.items():
        restart = statistics.median(before for before, _ in turns)
        step = statistics.median(after for _, after in turns)
        both = statistics.median(before + after for before, after in turns)
        print(f"| {ranks} | {restart:.1f} | {step:.1f} | {both:.1f} |")


if __name__ == "__main__":
    main()
