"""Repeated SIGKILL at random moments: each sample is used once, and the final model is the same."""

import dataclasses
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from harness import (
    FOREVER,
    LONG,
    RECORD,
    REPO,
    assert_same_state,
    launch,
    processes_by_kind,
    running,
    train,
    wait_until,
)

import train_distributed

# ---------------------------------------------------------------------------------- inside a save


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
        while trial % 2 and not any(run.glob(".checkpoint_*.pt.tmp")):
            assert time.time() < began + 60
        os.kill(processes[0].pid, signal.SIGKILL)

    options = [*tiny, FOREVER, "--checkpoint-every-steps=1"]
    for trial in range(200 if LONG else 4):
        result = launch(run, 1, *options, during=kill)
        assert result.codes == [-signal.SIGKILL], result.err
        inside += any(run.glob(".checkpoint_*.pt.tmp"))
        path = train_distributed.find_checkpoint(cfg)
        step = train_distributed.load_checkpoint(path)["state"]["step"]
        print(f"trial {trial}: step {step}")
        assert step >= newest
        newest = step
    print(f"{inside} of the kills left a half-written file")
    assert inside


# ------------------------------------------------------------------------------ at random moments

OPTIONS = ["--reproducible", "--global-batch-size=40", "--checkpoint-every-steps=3"]


def draw_sizes(draw: random.Random, most: int):
    """An endless series of numbers of ranks; each differs from the one before."""
    size = 0
    while True:
        size = draw.choice([n for n in range(1, most + 1) if n != size])
        yield size


def losses(run) -> dict[int, float]:
    """The last record of a step counts."""
    return {record["step"]: record["loss"] for record in run.records("train")}


RECORDING = f"""import os, sys
sys.path.insert(0, {str(REPO)!r})
DIRECTORY = os.environ["RECORD_TO"]
{RECORD}
import train_distributed
train_distributed.main()
"""

LAUNCH = """#!/usr/bin/env bash
set -euo pipefail
sizes=({sizes})
export NPROC_PER_NODE="${{sizes[ATTEMPT - 1]}}"
exec {repo}/scripts/cluster_train.sh "$@"
"""


class Campaign:
    """Trains under supervise.py, and kills its processes: ranks, torchrun, the launcher."""

    def __init__(self, directory: Path, sizes: list[int], options: list[str]):
        self.run, self.log = directory / "run", directory / "log"
        self.killed = ""  # the owner of the run directory at the last kill
        script, launcher = directory / "record.py", directory / "launch.sh"
        script.write_text(RECORDING)
        launcher.write_text(LAUNCH.format(sizes=" ".join(map(str, sizes)), repo=REPO))
        launcher.chmod(0o755)
        self.env = os.environ | {
            "TRAIN_SCRIPT": str(script),
            "RECORD_TO": str(self.run),
            "PYTHON": sys.executable,
            "MAX_RESTARTS": "100",
            "OMP_NUM_THREADS": "1",
            "LOG_DIR": str(directory / "logs"),
        }
        config = REPO / "configs/default_config.yaml"
        options = [config, *options, f"--checkpoint-dir={self.run}"]
        self.command = [REPO / "scripts/supervise.py", launcher, *options]

    def members(self) -> dict[str, list[int]]:
        """What may be killed: pids by kind."""
        found: dict[str, list[int]] = {"rank": [], "agent": [], "launcher": []}
        for kind, pids in processes_by_kind("RECORD_TO", self.run).items():
            name = kind.partition(" ")[0]  # of "rank 0"
            if name in found:
                found[name] += pids
        return found

    def start(self, kills: int, draw: random.Random) -> None:
        """Run to the end of the training."""
        streams = dict.fromkeys(("stdout", "stderr"), self.log.open("w"))
        with running(self.command, env=self.env, cwd=REPO, **streams) as process:
            for number in range(kills):
                wait_until(lambda: self.trains(process), "no new steps", 300)
                time.sleep(draw.random())
                kind = draw.choice(["rank", "rank", "agent", "launcher"])
                if victims := self.members()[kind]:
                    self.killed = (self.run / "lock").read_text()
                    victim = draw.choice(sorted(victims))
                    print(f"kill {number}: {kind} {victim}")
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
            assert process.wait(timeout=900) == 0, self.log.read_text()[-3000:]
        wait_until(lambda: not any(self.members().values()), "something still runs", 20)

    def trains(self, process) -> bool:
        """Whether a process that was not killed yet has saved: so each kill hits a training."""
        assert process.poll() is None, self.log.read_text()[-3000:]
        with suppress(OSError, ValueError):
            lock, file = self.run / "lock", self.run / "status.json"
            status = json.loads(file.read_text())
            is_new = lock.read_text() not in ("", self.killed)
            is_of_it = file.stat().st_mtime > lock.stat().st_mtime
            return is_new and is_of_it and status["saved_step"] > status["start_step"]
        return False


def test_a_supervised_training_killed_anywhere_ends_as_if_nothing_had_happened(tmp_path, tiny):
    """Each attempt has another number of ranks than the one before."""
    draw = random.Random("--reproducible")
    kills, epochs = (20, 80) if LONG else (1, 12)  # epochs of about 5 steps
    sizes = [size for size, _ in zip(draw_sizes(draw, 5 if LONG else 2), range(3 * kills + 10))]
    print(f"ranks by attempt: {sizes}")
    options = [*tiny, *OPTIONS, f"--epochs={epochs}"]
    campaign = Campaign(tmp_path, sizes, options)
    campaign.start(kills, draw)

    lines = (campaign.run / "attempts.jsonl").read_text().splitlines()
    attempts = [json.loads(line) for line in lines]
    print(json.dumps(attempts, indent=1))
    assert attempts[-1]["cause"] == "finished" and len(attempts) >= max(2, kills)
    assert {attempt["cause"] for attempt in attempts[:-1]} <= {"killed", "stopped"}

    straight = train(tmp_path / "straight", 2, *options, record=True, timeout=600)
    run = dataclasses.replace(straight, directory=campaign.run)
    assert run.samples() == straight.samples()  # none lost, none used in another step
    assert losses(run) == losses(straight)
    assert_same_state(run.newest(), straight.newest())
