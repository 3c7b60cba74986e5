"""Each process of a supervised training is killed or stopped at a random moment.

Afterwards nothing is left, the recorded cause is right, no saved step is lost, and the final
weights are those of an undisturbed training, bit for bit. With --long, each case runs 20 times,
which takes two hours; REPEATS=3 runs it three times. With -s, pytest prints a line for each.
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

import pytest
import torch
from harness import LONG, REPO, processes_by_kind, steps_of, wait_for_step, wait_until

REPEATS = int(os.environ.get("REPEATS", 20 if LONG else 1))
STEPS = 150  # of the whole training
OPTIONS = ["--image-size=32", "--batch-size=4", "--global-batch-size=8", "--epochs=30"]
OPTIONS += ["--num-workers=1", "--checkpoint-every-steps=3", "--log-every-steps=1"]
HANG_TIMEOUT = 8  # seconds
# A stopped rank or worker stays so; the others go on after some seconds, as after `fg`.
STOPPED_SECONDS = {"supervisor": 4, "launcher": 4, "log": 4, "agent": 4}

# What attempts.jsonl may say of the disturbed attempt. "finished": it did not matter.
CAUSES = {
    ("supervisor", "SIGKILL"): {"killed"},
    ("launcher", "SIGKILL"): {"killed", "stopped"},
    ("log", "SIGKILL"): {"finished"},
    ("agent", "SIGKILL"): {"killed", "stopped"},
    ("rank 0", "SIGKILL"): {"killed"},
    ("rank 1", "SIGKILL"): {"killed"},
    ("worker", "SIGKILL"): {"exception", "killed"},
    ("supervisor", "SIGSTOP"): {"finished"},
    ("launcher", "SIGSTOP"): {"finished"},
    ("log", "SIGSTOP"): {"finished"},
    ("agent", "SIGSTOP"): {"finished"},
    ("rank 0", "SIGSTOP"): {"hang"},
    ("rank 1", "SIGSTOP"): {"hang"},
    ("worker", "SIGSTOP"): {"hang"},
}
IN_CI = [("rank 1", "SIGSTOP")]


class Training:
    """A supervised training on two ranks."""

    def __init__(self, directory: Path, images: Path):
        self.run = directory / "run"
        self.log = directory / "log"
        self.command = [REPO / "scripts/supervise.py", REPO / "scripts/ssh/launch_singlenode.sh"]
        self.command += [REPO / "configs/default_config.yaml", "2", *OPTIONS]
        self.command += ["--dataset=imagefolder", f"--data-dir={images}"]
        self.command += [f"--checkpoint-dir={self.run}"]
        self.env = os.environ | {
            "RUN_OF_TEST": str(self.run),
            "PYTHON": sys.executable,
            "LOG_DIR": str(directory / "logs"),
            "OMP_NUM_THREADS": "1",
            "HANG_TIMEOUT": str(HANG_TIMEOUT),
        }

    def start(self) -> subprocess.Popen:
        streams = dict.fromkeys(("stdout", "stderr"), self.log.open("a"))
        return subprocess.Popen(
            self.command, env=self.env, cwd=REPO, start_new_session=True, **streams
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
        path = self.run / "checkpoint_epoch_30.pt"
        return torch.load(path, weights_only=True)["model"]

    def kill_all(self) -> None:
        for pids in self.members().values():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, images) -> dict:
    training = Training(tmp_path_factory.mktemp("undisturbed"), images)
    assert training.start().wait(timeout=300) == 0, training.log.read_text()[-2000:]
    return training.weights()


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*case, marks=() if case in IN_CI else pytest.mark.long, id=" ".join(case))
        for case in CAUSES
    ],
)
def test_a_process_that_is_killed_or_stopped_leaves_nothing_and_costs_nothing_saved(
    tmp_path, images, undisturbed, kind, name, repeat
):
    draw = random.Random(f"{kind} {name} {repeat}")
    training = Training(tmp_path, images)
    process = training.start()
    try:
        wait_for_step(training.run, draw.randrange(6, STEPS // 2))
        time.sleep(draw.random() / 10)
        saved = training.saved_step()
        wait_until(lambda: kind in training.members(), f"no {kind}")
        (victim, *_) = sorted(training.members()[kind])
        os.kill(victim, getattr(signal, name))
        step = steps_of(training.run)
        if name == "SIGSTOP" and kind in STOPPED_SECONDS:
            time.sleep(STOPPED_SECONDS[kind])
            os.kill(victim, signal.SIGCONT)
        code = process.wait(timeout=200)
        if kind == "supervisor" and name == "SIGKILL":
            wait_until(training.nothing_is_left, "the training goes on", 60)
            again = training.start()  # as its user would
            code = again.wait(timeout=200)
        assert code == 0, training.log.read_text()[-3000:]
        wait_until(training.nothing_is_left, "something still runs", 60)
    finally:
        training.kill_all()
        process.wait()
    attempts = training.attempts()
    causes = [attempt["cause"] for attempt in attempts]
    resumed = attempts[-1]["start_step"]
    print(f"{kind}, {name} after step {step}: {causes}, resumed at {resumed}, saved were {saved}")
    assert causes[0] in CAUSES[kind, name], attempts
    assert causes[-1] == "finished"
    assert resumed >= saved or len(attempts) == 1
    weights = training.weights()
    for key, value in undisturbed.items():
        assert torch.equal(weights[key], value), key
