#!/usr/bin/env python3
"""How much of the time is useful if a training is killed again and again? Intervals of checkpoints.

    python benchmarks/useful_time.py                      # 30 kills, about 11 minutes
    python benchmarks/useful_time.py --kills 5 --mean 20

The same training runs under scripts/supervise.py with different checkpoints, all at the same time:

    automatic    the trainer's default: as often as 1 % of the time allows
    every epoch  the default of Lightning's ModelCheckpoint, and what Accelerate's examples do
    500 steps    the default of Hugging Face's Trainer, which uses Accelerate
    5 steps      often

At random moments (exponentially distributed, --mean seconds apart), all are killed with SIGKILL;
supervise.py starts them again. Time is compressed by ten: the trainer waits 6 s instead of 60 for
its first automatic save, and at least 1 s instead of 10 between two. An epoch takes 1,000 steps.
The useful time is that of the steps which the final weights contain, at the median duration of a
step of all trainings. The rest is lost steps, saves and restarts.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ranks import REPO

INTERVALS = {
    "automatic": [],
    "every epoch": ["--checkpoint-every-steps=1000"],
    "500 steps": ["--checkpoint-every-steps=500"],
    "5 steps": ["--checkpoint-every-steps=5"],
}
OPTIONS = ["--dataset=synthetic", "--image-size=32", "--batch-size=4", "--epochs=1000"]
OPTIONS += ["--log-every-steps=20", "--num-workers=0"]


class Training:
    """A training that is started again whenever it has ended."""

    def __init__(self, directory: Path, options: list[str]):
        directory.mkdir()
        self.run = directory / "run"
        self.log = (directory / "log").open("w")
        self.command = [sys.executable, REPO / "scripts/supervise.py", sys.executable]
        self.command += [directory.parent / "train_distributed.py", *OPTIONS, *options]
        self.command += [f"--checkpoint-dir={self.run}"]
        self.process = None
        self.start()

    def start(self) -> None:
        """Start it, unless it runs. supervise.py ends after three crashes without progress."""
        if self.process is None or self.process.poll() is not None:
            env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            env |= {"MAX_RESTARTS": "1000"}
            streams = {"stdout": self.log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(self.command, env=env, **streams)

    def children(self) -> list[int]:
        pid = self.process.pid
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def kill(self) -> None:
        for pid in self.children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        """Save and stop. Returns the last step."""
        self.start()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.log.close()
        return json.loads((self.run / "status.json").read_text())["saved_step"]

    def step_seconds(self) -> list[float]:
        """Duration of a step in each interval of the log that a restart has not interrupted."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        speeds = [record["samples_per_second"] for record in records if record["kind"] == "train"]
        return [4 / speed for speed in speeds if speed > 0]


def compress_time(directory: Path) -> None:
    """Write a copy of the trainer whose automatic saves come ten times as early."""
    text = (REPO / "train_distributed.py").read_text()
    for name, seconds in (("FIRST_AUTO_SECONDS", 60), ("MIN_AUTO_SECONDS", 10)):
        before = f"{name} = {seconds}"
        if before not in text:
            sys.exit(f"useful_time.py: error: train_distributed.py has no line {before}")
        text = text.replace(before, f"{name} = {seconds // 10}")
    (directory / "train_distributed.py").write_text(text)


def measure(kills: int, mean: float, seed: int) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        compress_time(directory)
        began = time.monotonic()
        trainings = {}
        for interval, options in INTERVALS.items():
            place = directory / interval.replace(" ", "_")
            trainings[interval] = Training(place, options)
        try:
            for number in range(kills):
                time.sleep(draw.expovariate(1 / mean))
                for training in trainings.values():
                    training.kill()
                print(f"kill {number + 1} of {kills}", file=sys.stderr)
                time.sleep(1)
                for training in trainings.values():
                    training.start()
            time.sleep(draw.expovariate(1 / mean))
        finally:
            elapsed = time.monotonic() - began
            steps = {interval: training.stop() for interval, training in trainings.items()}
        durations = []
        for training in trainings.values():
            durations += training.step_seconds()
        step = statistics.median(durations)
    print(f"{kills} kills in {elapsed:.0f} s, steps of {1000 * step:.0f} ms\n")
    print("| checkpoints | steps in the final weights | useful time |")
    print("| --- | --- | --- |")
    for interval, count in steps.items():
        print(f"| {interval} | {count} | {100 * count * step / elapsed:.0f} % |")


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("--kills", type=int, default=30, help="[30]")
    parser.add_argument("--mean", type=float, default=20, help="seconds between two kills [20]")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments [0]")
    options = parser.parse_args()
    measure(options.kills, options.mean, options.seed)


if __name__ == "__main__":
    main()
