"""SIGKILL in saves, and a crash. test_processes.py kills each process of a supervised training."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import tasks
from harness import FOREVER, LONG, launch, wait_until

import train_distributed


def newest_save(run: Path) -> float:
    """The time of the newest save; 0 before the first."""
    with suppress(FileNotFoundError):  # the trainer deletes old ones
        return max((path.stat().st_mtime for path in run.glob("checkpoint_*.pt")), default=0.0)
    return 0.0


def test_a_kill_inside_a_save_never_costs_an_older_checkpoint(tmp_path, tiny):
    draw, newest, inside = random.Random(3), 0, 0
    run = tmp_path / "run"
    cfg = train_distributed.parse_config([f"--checkpoint-dir={run}"])

    def kill(processes):
        """At any moment, or, every second time, when there is a half-written file."""
        began = time.time()
        wait_until(lambda: newest_save(run) > began, "no checkpoint")
        time.sleep(draw.random() / 5)
        while trial % 2 and not any(run.glob(".unfinished")):
            assert time.time() < began + 60
        os.kill(processes[0].pid, signal.SIGKILL)

    options = [*tiny, FOREVER, "--checkpoint-every-steps=1"]
    for trial in range(200 if LONG else 40):
        result = launch(run, 1, *options, during=kill)
        assert result.codes == [-signal.SIGKILL], result.err
        inside += any(run.glob(".unfinished"))
        path = train_distributed.find_checkpoint(cfg)
        step = train_distributed.load_checkpoint(path)["step"]
        print(f"trial {trial}: step {step}")
        assert step >= newest
        newest = step
        if trial > 2 and inside and not LONG:
            break
    print(f"{inside} of the kills left a half-written file")
    assert inside


def test_a_crash_ends_the_workers_of_a_loader_too(tmp_path, images):
    crash = "import tasks; tasks.Photos.loss = None"
    options = [f"--data-dir={images}", "--image-size=32"]
    options += ["--batch-size=4", "--num-workers=2"]
    result = launch(tmp_path / "run", 1, *options, before=crash, task=tasks.Photos, timeout=60)
    assert result.codes == [1] and "TypeError" in result.err[0]
