"""Every kind of stop request, on any rank: all ranks save and exit after the same step.

../test_resume.py has a stop during an evaluation.
"""

import json
import math
import os
import random
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import tasks
from harness import (
    FAULT_IN_STEP,
    FOREVER,
    LONG,
    PLAIN,
    REPO,
    SLOW_DISK,
    running,
    signal_all,
    steps_of,
    train,
    wait_for_step,
    wait_until,
)

import train_distributed

long = pytest.mark.long
SIGNALS = ["SIGTERM", "SIGUSR1"]
SIGNALS += [pytest.param(name, marks=long) for name in ("SIGINT", "SIGUSR2", "SIGHUP")]


@pytest.mark.parametrize("trial", range(20 if LONG else 1))
@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_to_any_rank_stops_all_after_the_same_step(tmp_path, tiny, name, trial):
    draw = random.Random(f"{name} {trial}")
    ranks = draw.choice([2, 3, 4])
    rank = draw.randrange(ranks)
    print(f"{name} to rank {rank} of {ranks}")

    def during(processes):
        wait_for_step(tmp_path / "run", draw.randrange(1, 20))
        time.sleep(draw.random() / 5)
        os.kill(processes[rank].pid, getattr(signal, name))

    run = train(tmp_path / "run", ranks, *tiny, FOREVER, during=during, record=True)
    status = run.status()
    assert (status["state"], status["reason"]) == ("stopped", name)
    samples, step = run.samples(), status["global_step"]
    assert max(samples) == step - 1  # no rank began another step
    for micros in samples.values():  # all ranks finished the last step
        assert sum(map(len, micros.values())) == 8 * ranks
    assert run.newest()["step"] == step == status["saved_step"]


def test_no_rank_exits_before_the_last_save(tmp_path, tiny):
    """A launcher may end all ranks when one has exited."""

    def during(processes):
        wait_for_step(tmp_path / "run", 3)
        os.kill(processes[0].pid, signal.SIGTERM)
        processes[1].join(60)
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert status["state"] == "stopped"

    # Each fsync, because the status is written after the checkpoint.
    slow = SLOW_DISK.format(seconds=1.5).replace(" and None not in received", "")
    assert "if received:" in slow
    train(tmp_path / "run", 2, *tiny, FOREVER, during=during, before=slow)


# The clock of rank 0 reaches the time limit in step 4.
AHEAD = "time.time = lambda clock=time.time: clock() + 1000"
CLOCK_AHEAD = FAULT_IN_STEP.format(step=3, rank=0, fault=AHEAD)
CLOCK_AHEAD += "os.environ['DEADLINE'] = str(time.time() + 1000)"
# STOP_FILE may be on the disk of the first node.
ON_RANK_0 = "import os\nif os.environ['RANK'] == '0': os.environ['STOP_FILE'] = {!r}"


@pytest.mark.parametrize("way", ["STOP", "STOP_FILE", "DEADLINE"])
def test_a_file_or_the_clock_stops_the_run(tmp_path, tiny, way):
    file = tmp_path / ("run/STOP" if way == "STOP" else "node-local")

    def during(_processes):
        wait_for_step(tmp_path / "run", 3)
        if way != "DEADLINE":
            file.touch()

    before = {"STOP": "", "STOP_FILE": ON_RANK_0.format(str(file)), "DEADLINE": CLOCK_AHEAD}[way]
    run = train(tmp_path / "run", 2, *tiny, FOREVER, during=during, before=before)
    status = run.status()
    reason = "time limit" if way == "DEADLINE" else "STOP file"
    assert (status["state"], status["reason"]) == ("stopped", reason)
    if way == "STOP":
        goal = f"--stop-at-step={status['global_step'] + 1}"
        again = train(tmp_path / "run", 2, *tiny, FOREVER, goal)
        assert again.status()["reason"] == ""  # an old request does not stop it


@pytest.mark.parametrize("name, reserve", [("DEADLINE", 10), ("SLURM_JOB_END_TIME", 120)])
def test_a_tenth_of_the_time_but_no_more_than_two_minutes_is_left_to_save(
    tmp_path, monkeypatch, name, reserve
):
    end = time.time() + (100 if reserve == 10 else 1e6)
    for variable in ("DEADLINE", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, str(end))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep the handlers of this process
    run = SimpleNamespace(path=tmp_path, next_save=math.inf)
    requests = train_distributed.Requests(run)
    for left, seconds_per_step, expected in (
        (reserve + 2, 0.1, False),
        (reserve - 2, 0.1, True),
        (reserve + 20, 30, True),  # the next step would end too late
    ):
        monkeypatch.setattr(time, "time", lambda left=left: end - left)
        _, _, *stops = requests.poll(seconds_per_step)
        assert dict(zip(train_distributed.STOP_REASONS, stops))["time limit"] == expected


def test_it_saves_even_if_its_output_is_closed(tmp_path, tiny):
    """As by Ctrl-C, which also ends the `tee` that reads it."""
    pipe, run = tmp_path / "pipe", tmp_path / "run"
    os.mkfifo(pipe)

    def during(processes):
        with open(pipe):
            wait_for_step(run, 5)
        signal_all(processes, signal.SIGINT)

    before = f"import os; os.dup2(os.open({str(pipe)!r}, os.O_WRONLY), 1); os.dup2(1, 2)"
    status = train(run, 2, *tiny, FOREVER, before=before, during=during).status()
    assert (status["state"], status["saved_step"]) == ("stopped", status["global_step"])


@long
def test_nohup_keeps_a_closed_terminal_from_stopping_it(tmp_path, tiny):
    command = [*PLAIN, *tiny, FOREVER, f"--checkpoint-dir={tmp_path}"]
    with running(["nohup", *command], cwd=REPO, stdout=subprocess.DEVNULL) as process:
        wait_for_step(tmp_path, 3)
        process.send_signal(signal.SIGHUP)
        wait_for_step(tmp_path, steps_of(tmp_path) + 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "SIGTERM"


def test_loader_workers_survive_a_signal_to_the_whole_process_group(tmp_path, images):
    def during(processes):
        wait_for_step(tmp_path / "run", 15)
        os.killpg(processes[0].pid, signal.SIGTERM)

    options = [f"--data-dir={images}", "--image-size=32", "--batch-size=4", "--num-workers=2"]
    options += ["--log-every-steps=1", FOREVER]
    own_group = {"before": "import os; os.setpgid(0, 0)", "task": tasks.Photos}
    run = train(tmp_path / "run", 1, *options, during=during, **own_group)
    assert run.err == [""] and "Stopped at step " in run.out[0] and run.saved()


def test_a_stop_does_not_wait_for_the_next_record(tmp_path, tiny):
    run = tmp_path / "run"

    def during(processes):
        wait_until((run / "status.json").exists, "no status.json")
        signal_all(processes, signal.SIGINT)

    stopped = train(run, 1, *tiny, FOREVER, "--log-every-steps=50000", during=during)
    assert stopped.status()["global_step"] < 50000
