"""SIGKILL, anywhere, again and again: no sample lost or repeated, and the same model in the end."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from harness import LONG, RECORD, REPO, assert_same_state, launch, processes_with, train
from test_stop import FOREVER

import train_distributed

# ------------------------------------------------------------------------------- inside of a save


def newest_save(run: Path) -> float:
    """When that was."""
    with suppress(FileNotFoundError):  # deleted under our eyes
        return max((path.stat().st_mtime for path in run.glob("checkpoint_*.json")), default=0.0)
    return 0.0


def test_a_kill_inside_a_save_never_costs_an_older_checkpoint(tmp_path, tiny):
    draw, newest, inside = random.Random(3), 0, 0
    run = tmp_path / "run"
    cfg = train_distributed.parse_config([f"--checkpoint-dir={run}"])

    def kill(processes):
        """At any moment; most of the time goes into saving."""
        began, deadline = time.time(), time.monotonic() + 60
        while newest_save(run) < began:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(draw.random() / 5)
        os.kill(processes[0].pid, signal.SIGKILL)

    options = [*tiny, FOREVER, "--checkpoint-every-steps=1"]
    for trial in range(200 if LONG else 8):
        result = launch(run, 1, *options, during=kill)
        assert result.codes == [-signal.SIGKILL], result.err
        inside += any(run.glob(".*.tmp"))
        train_distributed.choose_checkpoint(cfg)
        chosen = train_distributed.choose_checkpoint(cfg)
        step = torch.load(chosen, weights_only=True)["progress"]["global_step"]
        print(f"trial {trial}: step {step}")
        assert step >= newest
        newest = step
    print(f"{inside} of the kills left a half-written file")
    assert inside


NAIVE = """
import sys, torch
state = {"model": torch.arange(2_400_000.0)}
while True:
    torch.save(state, sys.argv[1])
    print("saved", flush=True)
"""


def test_the_control_a_save_in_place_does_not_survive_kills(tmp_path):
    draw, broken, path = random.Random(4), 0, tmp_path / "naive.pt"
    for _ in range(5):
        saver = subprocess.Popen([sys.executable, "-c", NAIVE, path], stdout=subprocess.PIPE)
        saver.stdout.readline()
        time.sleep(draw.random() / 10)
        saver.kill()
        saver.wait()
        try:
            torch.load(path, weights_only=True)
        except Exception:
            broken += 1
    assert broken


# -------------------------------------------------------------------------- of a launch, at random

RECORDING = f"""import os, sys
sys.path.insert(0, {str(REPO)!r})
launch = f"{{os.environ['RUN_NONCE']}}-{{os.environ.get('RANK', 0)}}"
RECORDS = f"{{os.environ['RECORD_TO']}}-samples{{launch}}.jsonl"
{RECORD}
import train_distributed
sys.exit(train_distributed.main())
"""

LAUNCH = """#!/usr/bin/env bash
set -euo pipefail
sizes=({sizes})
export NPROC_PER_NODE="${{sizes[ATTEMPT - 1]}}"
exec {repo}/scripts/cluster_train.sh "$@"
"""


class Campaign:
    """Trains under supervise.py, and kills what it may until enough was killed."""

    def __init__(self, directory: Path, sizes: list[int], options: list[str]):
        self.run, self.sizes = directory / "run", sizes
        script, self.launcher = directory / "record.py", directory / "launch.sh"
        script.write_text(RECORDING)
        words = " ".join(map(str, sizes))
        self.launcher.write_text(LAUNCH.format(sizes=words, repo=REPO))
        self.launcher.chmod(0o755)
        self.env = os.environ | {
            "TRAIN_SCRIPT": str(script),
            "RECORD_TO": str(self.run),
            "PYTHON": sys.executable,
            "MAX_RESTARTS": "100",
            "OMP_NUM_THREADS": "1",
        }
        options = [*options, f"--checkpoint-dir={self.run}"]
        self.command = [REPO / "scripts/supervise.py", self.launcher, *options]

    def members(self) -> dict[str, list[int]]:
        """What may be killed: pids by kind."""
        found: dict[str, list[int]] = {"rank": [], "agent": [], "launcher": []}
        for pid, line in processes_with("RECORD_TO", self.run).items():
            if "torch.distributed.run" in line:
                found["agent"].append(pid)
            elif "record.py" in line:
                found["rank"].append(pid)
            elif "cluster_train.sh" in line and "tee" not in line:
                found["launcher"].append(pid)
        return found

    def start(self, kills: int, draw: random.Random) -> str:
        """To the end of the training; returns what was printed."""
        log = self.run.with_name("log")
        with log.open("w") as file:
            process = subprocess.Popen(
                self.command,
                env=self.env,
                cwd=REPO,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            for number in range(kills):
                self.wait_for_new_steps(process, number)
                time.sleep(draw.random())
                kind = draw.choice(["rank", "rank", "agent", "launcher"])
                victims = self.members()[kind]
                if victims:
                    victim = draw.choice(sorted(victims))
                    print(f"kill {number}: {kind} {victim}")
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
            assert process.wait(timeout=900) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
        deadline = time.monotonic() + 10
        while any(self.members().values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(self.members().values())
        return log.read_text()

    def wait_for_new_steps(self, process, number: int) -> None:
        """Of attempt number + 1, or a later one: so each kill meets a training."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, self.run.with_name("log").read_text()[-3000:]
            with suppress(OSError, ValueError, KeyError):
                status = json.loads((self.run / "status.json").read_text())
                attempt = int(status["job"].rsplit(".", 1)[1])
                if attempt > number and newest_save(self.run) > status["began"]:
                    return
            time.sleep(0.05)
        raise TimeoutError


KILLS, EPOCHS = (20, 60) if LONG else (2, 20)  # of 7 steps


@pytest.mark.parametrize("mode", ["--reproducible", pytest.param("plain", marks=pytest.mark.long)])
def test_a_training_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path, tiny, mode):
    """Another number of ranks at each attempt."""
    draw = random.Random(mode)
    all_sizes = {1, 2, 4} if mode == "--reproducible" else {1, 2, 3, 4}
    if not LONG:
        all_sizes = {1, 2}
    sizes = [draw.choice(sorted(all_sizes))]
    while len(sizes) < 3 * KILLS + 10:
        sizes.append(draw.choice(sorted(all_sizes - {sizes[-1]})))
    print(f"world sizes by attempt: {sizes}")
    more = ["--batch-size=8", "--global-batch-size=32", f"--epochs={EPOCHS}"]
    # So low a rate keeps rounding from growing: at 0.05, 1e-7 becomes 1e-1 within 50 steps.
    more += ["--checkpoint-every-steps=3", mode if mode.startswith("--") else "--lr=0.0001"]
    options = [*tiny, *more]
    campaign = Campaign(tmp_path, sizes, ["configs/default_config.yaml", *options])
    text = campaign.start(KILLS, draw)
    straight = train(tmp_path / "straight", 2, *options, record=True, timeout=600)

    ledger = [
        json.loads(line) for line in (campaign.run / "attempts.jsonl").read_text().splitlines()
    ]
    print(json.dumps(ledger, indent=1))
    assert ledger[-1]["cause"] == "finished" and len(ledger) >= KILLS
    assert {attempt["cause"] for attempt in ledger[:-1]} <= {"killed", "stopped"}
    assert re.search(r"goodput [\d.]+%: of \d+ s in \d+ attempts", text)

    import dataclasses

    run = dataclasses.replace(straight, directory=campaign.run)
    assert run.samples() == straight.samples()  # none lost, none used in another step
    (losses, expected) = (
        {record["step"]: record["loss"] for record in which.records("train")}
        for which in (run, straight)
    )
    assert losses.keys() == expected.keys()
    assert all(losses[step] == pytest.approx(expected[step], abs=1e-5) for step in expected)
    end = f"checkpoint_epoch_{EPOCHS}"
    if mode == "--reproducible":
        assert losses == expected
        assert_same_state(run.checkpoint(end), straight.checkpoint(end))
