"""Whoever asks to stop, on whichever rank: all ranks leave after the same step, saved."""

import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, suppress

import pytest
import torch
from harness import (
    LONG,
    REPO,
    SLOW_DISK,
    SLOW_TO_SAVE,
    TORCHRUN,
    assert_same_state,
    launch,
    processes_with,
    train,
)

FOREVER = "--epochs=1000000"
SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"]


def steps_of(directory) -> int:
    path = directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_step(directory, step: int) -> None:
    deadline = time.monotonic() + 60
    while steps_of(directory) < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("trial", range(100 if LONG else 6))
def test_a_signal_to_any_rank_stops_all_after_the_same_step(tmp_path, tiny, trial):
    draw = random.Random(trial)
    ranks = draw.choice([2, 3, 4])
    rank, number = draw.randrange(ranks), draw.choice(SIGNALS)
    print(f"trial {trial}: {number} to rank {rank} of {ranks}")

    def during(processes):
        wait_for_step(tmp_path / "run", draw.randrange(1, 20))
        time.sleep(draw.random() / 5)
        os.kill(processes[rank].pid, getattr(signal, number))

    run = launch(tmp_path / "run", ranks, *tiny, FOREVER, during=during, record=True)
    assert run.codes == [0] * ranks, "\n".join(run.err)
    status = json.loads((run.directory / "status.json").read_text())
    assert status["state"] == "stopped" and status["reason"] == number
    samples, step = run.samples(), status["global_step"]
    assert max(samples) == step - 1  # nobody began another
    assert all(len(micros) == ranks for micros in samples.values())  # nobody left out the last
    saved = run.checkpoint(max(run.directory.glob("*.pt"), key=os.path.getmtime).stem)
    assert saved["progress"]["global_step"] == step


def test_all_wait_for_the_last_save(tmp_path, tiny):
    """srun, for one, may end a rank that saves when others have gone."""

    def during(processes):
        wait_for_step(tmp_path / "run", 3)
        os.kill(processes[0].pid, signal.SIGTERM)
        processes[1].join(60)
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert status["state"] == "stopped"

    slow = SLOW_DISK.format(seconds=3)
    run = launch(tmp_path / "run", 2, *tiny, FOREVER, during=during, before=slow)
    assert run.codes == [0, 0], run.err


@pytest.mark.parametrize("way", ["STOP", "STOP_FILE", "DEADLINE", "--max-duration"])
def test_a_file_or_the_clock_stops_the_run(tmp_path, tiny, way):
    stop_file, began = tmp_path / "node-local", time.time()
    env, options = {"STOP_FILE": str(stop_file)}, []
    if way == "DEADLINE":
        env["DEADLINE"] = str(began + 6)
    if way == "--max-duration":
        options = ["--max-duration=2"]

    def during(_processes):
        wait_for_step(tmp_path / "run", 3)
        if way.startswith("STOP"):
            (stop_file if way == "STOP_FILE" else tmp_path / "run" / "STOP").touch()

    run = train(tmp_path / "run", 2, *tiny, FOREVER, *options, env=env, during=during, timeout=30)
    status = json.loads((run.directory / "status.json").read_text())
    names = {"DEADLINE": "time limit", "--max-duration": "max-duration"}
    assert (status["state"], status["reason"]) == ("stopped", names.get(way, way))
    if way == "DEADLINE":
        assert began + 4 < status["time"] < began + 6  # it leaves itself a tenth to save
    assert "the same command goes on" in run.out[0]
    stop_file.unlink(missing_ok=True)
    again = train(
        tmp_path / "run", 2, *tiny, FOREVER, f"--stop-at-step={status['global_step'] + 1}"
    )
    assert "Resuming from" in again.out[0]  # what has stopped it once does not stop it again


STOP_IN_EVALUATION = """if True:
    import os, signal
    import train_distributed

    def evaluate(run, progress, inner=train_distributed.evaluate):
        if run.world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return inner(run, progress)

    train_distributed.evaluate = evaluate
"""


def test_a_stop_during_evaluation_cuts_it_off_and_it_is_made_up_for(tmp_path, tiny):
    run = train(tmp_path / "run", 2, *tiny, "--epochs=2", before=STOP_IN_EVALUATION)
    status = json.loads((run.directory / "status.json").read_text())
    assert (status["state"], status["global_step"]) == ("stopped", 13)
    assert not run.records("epoch")
    run = train(tmp_path / "run", 2, *tiny, "--epochs=2")
    straight = train(tmp_path / "straight", 2, *tiny, "--epochs=2")
    told = [[r["test_loss"], r["step"]] for r in run.records("epoch")]
    assert told == [[r["test_loss"], r["step"]] for r in straight.records("epoch")]
    end = "checkpoint_epoch_2"
    assert_same_state(run.checkpoint(end), straight.checkpoint(end))


PLAIN = [sys.executable, "train_distributed.py"]


@pytest.mark.parametrize("command", [PLAIN, [*TORCHRUN, "train_distributed.py"]])
@pytest.mark.parametrize("way", ["Ctrl-C beside a tee", "a closed terminal"])
def test_it_saves_though_nobody_reads_it_any_more(tmp_path, tiny, command, way):
    terminal, other_end = pty.openpty() if way == "a closed terminal" else os.pipe()
    process = subprocess.Popen(
        [*command, *tiny, FOREVER, f"--checkpoint-dir={tmp_path}"],
        **dict.fromkeys(("stdin", "stdout", "stderr"), other_end),
        cwd=REPO,
        start_new_session=True,
        preexec_fn=lambda: way == "a closed terminal" and fcntl.ioctl(0, termios.TIOCSCTTY),
    )
    os.close(other_end)
    try:
        while steps_of(tmp_path) < 5:
            os.read(terminal, 4096)
        os.close(terminal)  # the kernel sends SIGHUP, if it is one
        if way != "a closed terminal":
            os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "stopped"
    newest = max(tmp_path.glob("*.pt"), key=os.path.getmtime)
    saved = torch.load(newest, weights_only=True)
    assert saved["progress"]["global_step"] == status["global_step"]


def test_a_full_disk_under_the_log_stops_nothing(tmp_path, tiny):
    with open("/dev/full", "w") as full:
        command = [*PLAIN, *tiny, "--epochs=1", f"--checkpoint-dir={tmp_path}"]
        assert subprocess.run(command, cwd=REPO, stdout=full, stderr=full).returncode == 0
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"


def test_nohup_is_heeded(tmp_path, tiny):
    command = [*PLAIN, *tiny, FOREVER, f"--checkpoint-dir={tmp_path}"]
    process = subprocess.Popen(["nohup", *command], cwd=REPO, stdout=subprocess.DEVNULL)
    try:
        wait_for_step(tmp_path, 3)
        process.send_signal(signal.SIGHUP)
        wait_for_step(tmp_path, 300)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "SIGTERM"


def test_a_deadline_that_is_no_time_is_told(tmp_path, tiny):
    result = launch(tmp_path / "run", 1, *tiny, env={"DEADLINE": "noon"})
    assert result.codes == [2]
    assert "error: DEADLINE is 'noon', not a time in seconds since 1970" in result.err[0]


class Node:
    """cluster_train.sh with two ranks that take some seconds to save."""

    def __init__(self, directory, seconds, *before):
        self.script = directory / "slow_to_save.py"
        self.script.write_text(SLOW_TO_SAVE)
        words = ["scripts/cluster_train.sh", "configs/default_config.yaml"]
        more = {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "RUN_DIR": str(directory)}
        more |= {"SAVE_SECONDS": str(seconds), "TRAIN_SCRIPT": str(self.script)}
        self.process = subprocess.Popen(
            [*before, *words, f"--to={directory}"],
            env=os.environ | more,
            cwd=REPO,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_ranks(self) -> None:
        for _ in range(2):
            while self.process.stdout.readline() != "ready\n":
                assert self.process.poll() is None

    def members(self) -> list[int]:
        return [*processes_with("TRAIN_SCRIPT", self.script)]

    def tell_all(self, number) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        self.tell_all(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def node(tmp_path):
    """Starts a Node whose ranks listen."""
    with ExitStack() as at_end:

        def start(*arguments) -> Node:
            node = Node(tmp_path, *arguments)
            at_end.callback(node.end)
            node.wait_for_ranks()
            return node

        yield start


def saved(directory) -> list[str]:
    return sorted(path.name for path in directory.glob("saved*"))


# torchrun's own limit is 30 s.
@pytest.mark.parametrize("seconds", [3, pytest.param(35, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_slurm_may_signal_all_processes_of_a_node(tmp_path, node, name, seconds):
    """SIGTERM it sends twice in a moment, when it ends a job."""
    node = node(seconds)
    for number in (getattr(signal, name), signal.SIGCONT, getattr(signal, name)):
        node.tell_all(number)
        time.sleep(0.2)
    node.process.wait(timeout=60)
    assert saved(tmp_path) == ["saved0", "saved1"]


def test_sigint_after_sigterm_ends_a_node_at_once(tmp_path, node):
    node = node(3)
    node.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    node.process.send_signal(signal.SIGINT)
    node.process.wait(timeout=30)
    assert not saved(tmp_path)


def test_a_second_ctrl_c_through_supervise_ends_a_node_at_once(tmp_path, node):
    node = node(999, "scripts/supervise.py")
    for _ in range(2):
        node.process.send_signal(signal.SIGINT)
        time.sleep(1.5)
    assert node.process.wait(timeout=30) == 1
    assert not node.members() and not saved(tmp_path)
