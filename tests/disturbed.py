"""A supervised training of which a process is killed or stopped, for faults/test_processes.py and
cluster/test_ssh_processes.py.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from harness import REPO, newest_in, processes_by_kind, steps_of, wait_for_step, wait_until

REPEATS = int(os.environ.get("REPEATS", 1))
STEPS = 70  # of the whole training
OPTIONS = ["--image-size=32", "--batch-size=4", "--global-batch-size=8", "--epochs=15"]
OPTIONS += ["--num-workers=1", "--checkpoint-every-steps=3", "--log-every-steps=1"]
HANG_TIMEOUT = 20  # seconds
STOPPED_SECONDS = 4  # as after Ctrl-Z and `fg`


class Training:
    """A supervised training on two ranks."""

    cwd = REPO

    def __init__(self, directory: Path, images: Path):
        self.run = directory / "run"
        self.log = directory / "log"
        launcher = REPO / "scripts/ssh/launch_singlenode.sh"
        self.command = [REPO / "scripts/supervise.py", launcher]
        self.command += [REPO / "configs/default_config.yaml", "2"]
        self.options = [*OPTIONS, f"--data-dir={images}", f"--checkpoint-dir={self.run}"]
        self.env = os.environ | {
            "RUN_OF_TEST": str(self.run),
            "PYTHON": sys.executable,
            "TRAIN_SCRIPT": "tests/tasks.py",
            "LOG_DIR": str(directory / "logs"),
            "OMP_NUM_THREADS": "1",
            "HANG_TIMEOUT": str(HANG_TIMEOUT),
        }

    def start(self) -> subprocess.Popen:
        streams = dict.fromkeys(("stdout", "stderr"), self.log.open("a"))
        command = [*self.command, *self.options]
        return subprocess.Popen(
            command, env=self.env, cwd=self.cwd, start_new_session=True, **streams
        )

    def members(self) -> dict[str, list[int]]:
        return processes_by_kind("RUN_OF_TEST", self.run)

    def nothing_is_left(self) -> bool:
        return not self.members()

    def attempts(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "attempts.jsonl").open()]

    def saved_step(self) -> int:
        with suppress(OSError, ValueError):
            return json.loads((self.run / "status.json").read_text())["saved_step"]
        return 0

    def weights(self) -> dict:
        return newest_in(self.run)["model"]

    def kill_all(self) -> None:
        for pids in self.members().values():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def disturb(training: Training, kind: str, name: str, seed: str, expected: set, weights: dict):
    """Run the training; at a random moment, send the signal to its first process of this kind.

    Afterwards nothing may be left, the cause is one of the expected, no saved step is lost, and the
    final weights are these. If a hang is expected, no SIGCONT follows SIGSTOP.
    """
    draw = random.Random(seed)
    stays_stopped = expected == {"hang"}
    if not stays_stopped:  # not a hang, even on a busy machine
        training.env["HANG_TIMEOUT"] = "60"
    process = training.start()
    try:
        wait_for_step(training.run, draw.randrange(6, STEPS // 2))
        time.sleep(draw.random() / 10)
        saved = training.saved_step()
        wait_until(lambda: kind in training.members(), f"no {kind}")
        (victim, *_) = sorted(training.members()[kind])
        os.kill(victim, getattr(signal, name))
        step = steps_of(training.run)
        if name == "SIGSTOP" and not stays_stopped:
            time.sleep(STOPPED_SECONDS)
            os.kill(victim, signal.SIGCONT)
        code = process.wait()
        if kind == "supervisor" and name == "SIGKILL":
            wait_until(training.nothing_is_left, "the training goes on")
            again = training.start()  # as its user would
            code = again.wait()
        assert code == 0, training.log.read_text()[-3000:]
        wait_until(training.nothing_is_left, "something still runs")
    finally:
        training.kill_all()
        process.wait()
    attempts = training.attempts()
    causes = [attempt["cause"] for attempt in attempts]
    resumed = attempts[-1]["start_step"]
    print(f"{kind}, {name} after step {step}: {causes}, resumed at {resumed}, saved were {saved}")
    assert causes[0] in expected, attempts
    assert causes[-1] == "finished"
    assert resumed >= saved or len(attempts) == 1
    ours = training.weights()
    for key, value in weights.items():
        assert torch.equal(ours[key], value), key
