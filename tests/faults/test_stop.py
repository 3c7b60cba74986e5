"""Every kind of stop request, on any rank: all ranks save and exit after the same step."""

import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import termios
import time
from contextlib import suppress

import pytest
import torch
from harness import (
    FOREVER,
    LONG,
    PLAIN,
    REPO,
    SLOW_DISK,
    TORCHRUN,
    assert_same_state,
    launch,
    signal_all,
    steps_of,
    train,
    wait_for_step,
    wait_until,
)

import train_distributed

SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"]


@pytest.mark.parametrize("trial", range(100 if LONG else 4))
def test_a_signal_to_any_rank_stops_all_after_the_same_step(tmp_path, tiny, trial):
    draw = random.Random(trial)
    ranks = draw.choice([2, 3, 4])
    rank, number = draw.randrange(ranks), draw.choice(SIGNALS)
    print(f"trial {trial}: {number} to rank {rank} of {ranks}")

    def during(processes):
        wait_for_step(tmp_path / "run", draw.randrange(1, 20))
        time.sleep(draw.random() / 5)
        os.kill(processes[rank].pid, getattr(signal, number))

    run = train(tmp_path / "run", ranks, *tiny, FOREVER, during=during, record=True)
    status = run.status()
    assert (status["state"], status["reason"]) == ("stopped", number)
    samples, step = run.samples(), status["global_step"]
    assert max(samples) == step - 1  # no rank began another step
    steps_per_epoch = -(-203 // (8 * ranks))
    for number, micros in samples.items():  # all ranks finished the last step
        rest = 203 % (8 * ranks) if (number + 1) % steps_per_epoch == 0 else 0
        assert sum(map(len, micros.values())) == (rest or 8 * ranks)
    assert run.newest()["global_step"] == step == status["saved_step"]


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


@pytest.mark.parametrize("way", ["STOP", "STOP_FILE", "DEADLINE"])
def test_a_file_or_the_clock_stops_the_run(tmp_path, tiny, way):
    """STOP_FILE may be on the disk of one node, and the clock of one node may be ahead."""
    file = tmp_path / ("run/STOP" if way == "STOP" else "node-local")
    value = "str(time.time() + 6)" if way == "DEADLINE" else repr(str(file))
    setting = f"import os, time; os.environ['{way}'] = {value}"
    only_rank_1 = f"import os\nif os.environ['RANK'] == '1': {setting}"

    def during(_processes):
        wait_for_step(tmp_path / "run", 3)
        if way != "DEADLINE":
            file.touch()

    run = train(tmp_path / "run", 2, *tiny, FOREVER, during=during, before=only_rank_1)
    status = run.status()
    reason = "time limit" if way == "DEADLINE" else "STOP file"
    assert (status["state"], status["reason"]) == ("stopped", reason)
    assert f"Stopped at step {status['global_step']} of " in run.out[0]
    file.unlink(missing_ok=True)
    goal = f"--stop-at-step={status['global_step'] + 1}"
    again = train(tmp_path / "run", 2, *tiny, FOREVER, goal, env={"STOP_FILE": str(file)})
    assert "Resuming from" in again.out[0]  # an old stop request does not stop it


@pytest.mark.parametrize("name, reserve", [("DEADLINE", 10), ("SLURM_JOB_END_TIME", 120)])
def test_a_tenth_of_the_time_but_no_more_than_two_minutes_is_left_to_save(
    tmp_path, monkeypatch, name, reserve
):
    end = time.time() + (100 if reserve == 10 else 1e6)
    for variable in ("DEADLINE", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, str(end))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep the handlers of this process
    stop = train_distributed.StopFlag(tmp_path)
    for left, expected in ((reserve + 2, False), (reserve - 2, True)):
        monkeypatch.setattr(time, "time", lambda left=left: end - left)
        assert stop.poll() == expected
    assert stop.reason == "time limit"


def test_a_run_stopped_at_its_very_last_step_is_still_evaluated(tmp_path, tiny):
    at_the_end = f"""if True:
    import train_distributed

    def train_step(run, *arguments, inner=train_distributed.train_step):
        inner(run, *arguments)
        if run.state.step + 1 == run.coordinator.last_step:
            open({str(tmp_path / "run/STOP")!r}, "w").close()

    train_distributed.train_step = train_step
    """
    run = train(tmp_path / "run", 2, *tiny, "--epochs=1", before=at_the_end)
    assert run.status()["state"] == "finished"
    assert [record["epoch"] for record in run.records("epoch")] == [1]


STOP_IN_EVALUATION = """if True:
    import os, signal
    import train_distributed

    def evaluate_epoch(run, inner=train_distributed.evaluate_epoch):
        if run.world.rank == 1 and run.state.step == 13:
            os.kill(os.getpid(), signal.SIGUSR1)
        inner(run)

    train_distributed.evaluate_epoch = evaluate_epoch
"""


def test_a_stop_during_evaluation_ends_the_run_soon_after_it(tmp_path, tiny):
    options = [*tiny, "--epochs=2"]
    run = train(tmp_path / "run", 2, *options, before=STOP_IN_EVALUATION)
    status = run.status()
    assert status["state"] == "stopped" and 13 <= status["global_step"] < 26
    assert run.newest()["global_step"] == status["global_step"]
    run = train(tmp_path / "run", 2, *options)
    straight = train(tmp_path / "straight", 2, *options)
    ours, theirs = (
        [[r["test_loss"], r["step"]] for r in x.records("epoch")] for x in (run, straight)
    )
    assert ours == theirs
    end = "checkpoint_epoch_2"
    assert_same_state(run.checkpoint(end), straight.checkpoint(end))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(PLAIN, id="python", marks=pytest.mark.long),
        pytest.param([*TORCHRUN, PLAIN[-1]], id="torchrun"),
    ],
)
@pytest.mark.parametrize("way", ["Ctrl-C beside a tee", "a closed terminal"])
def test_it_saves_even_if_its_output_is_closed(tmp_path, tiny, command, way):
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
        os.close(terminal)  # if it is a terminal, the kernel sends SIGHUP
        if way != "a closed terminal":
            os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "stopped"
    newest = max(tmp_path.glob("*.pt"), key=os.path.getmtime)
    saved = torch.load(newest, weights_only=True)
    assert saved["global_step"] == status["global_step"]


def test_a_full_disk_under_the_log_does_not_stop_training(tmp_path, tiny):
    with open("/dev/full", "w") as full:
        command = [*PLAIN, *tiny, "--epochs=1", f"--checkpoint-dir={tmp_path}"]
        assert subprocess.run(command, cwd=REPO, stdout=full, stderr=full).returncode == 0
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"


def test_nohup_keeps_a_closed_terminal_from_stopping_it(tmp_path, tiny):
    command = [*PLAIN, *tiny, FOREVER, f"--checkpoint-dir={tmp_path}"]
    process = subprocess.Popen(["nohup", *command], cwd=REPO, stdout=subprocess.DEVNULL)
    try:
        wait_for_step(tmp_path, 3)
        process.send_signal(signal.SIGHUP)
        # Ranks exchange the stop flag at each of these steps, so it would stop at the first one.
        wait_for_step(tmp_path, steps_of(tmp_path) + 20)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "SIGTERM"


def test_loader_workers_survive_a_signal_to_the_whole_process_group(tmp_path, images):
    command = [*PLAIN, "--dataset=imagefolder", f"--data-dir={images}", "--image-size=32"]
    command += ["--batch-size=4", "--num-workers=2", "--log-every-steps=1", "--epochs=50000"]
    command += [f"--checkpoint-dir={tmp_path / 'run'}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **streams) as process:
        while not process.stdout.readline().startswith("  step 15:"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "\nStopped at step " in out
    assert list((tmp_path / "run").glob("checkpoint_*.pt"))


def test_ranks_whose_torchrun_was_killed_save_and_exit(tmp_path, tiny):
    """guard.py asks the kernel to send the ranks SIGTERM when torchrun dies."""
    script = [REPO / "scripts/guard.py", REPO / "train_distributed.py"]
    command = [*TORCHRUN, *script, *tiny, FOREVER, f"--checkpoint-dir={tmp_path / 'run'}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=env, **streams) as torchrun:
        while not torchrun.stdout.readline().startswith("  step 10:"):
            assert torchrun.poll() is None
        torchrun.kill()
        text, _ = torchrun.communicate(timeout=60)  # until the last rank has closed its output
    assert "\nStopped at step " in text
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")


def test_a_stop_does_not_wait_for_the_next_record(tmp_path, tiny):
    run = tmp_path / "run"
    slow = [*tiny, "--epochs=1", "--model=resnet18", "--image-size=64", "--log-every-steps=1000"]
    poll = "import train_distributed; train_distributed.SYNC_SECONDS = 0.1"

    def during(processes):
        wait_until((run / "status.json").exists, "no status.json")
        signal_all(processes, signal.SIGINT)

    stopped = train(run, 1, *slow, before=poll, during=during)
    assert stopped.status()["global_step"] < 26


def test_a_request_to_save_is_served_once_and_training_continues(tmp_path, tiny):
    run = tmp_path / "run"
    poll = "import train_distributed; train_distributed.SYNC_SECONDS = 0.1"

    def during(processes):
        wait_for_step(run, 5)
        (run / "SAVE").touch()
        wait_until(lambda: list(run.glob("checkpoint_step_*.pt")), "no checkpoint")
        wait_for_step(run, steps_of(run) + 30)
        assert not (run / "SAVE").exists() and len(list(run.glob("checkpoint_*.pt"))) == 1
        signal_all(processes, signal.SIGINT)

    train(run, 2, *tiny, "--batch-size=1", before=poll, during=during)  # 101 steps in an epoch


@pytest.mark.parametrize("pause, code", [(0.05, 0), (1.5, 130)], ids=["at once", "later"])
def test_a_ctrl_c_forwarded_by_a_launcher_saves_and_a_second_one_kills(tmp_path, tiny, pause, code):
    run = tmp_path / "run"
    slow = "import time, train_distributed\ninner = train_distributed.train_step\n"
    slow += f"train_distributed.train_step = lambda *a: time.sleep({5 * pause}) or inner(*a)"

    def during(processes):
        wait_until((run / "status.json").exists, "no status.json")  # it handles signals
        signal_all(processes, signal.SIGINT)
        time.sleep(pause)
        signal_all(processes, signal.SIGINT)

    stopped = launch(run, 1, *tiny, FOREVER, during=during, before=slow)
    assert stopped.codes == [code]
    assert stopped.checkpoints() if code == 0 else not stopped.checkpoints()
    text = "\nstopping: ranks save and exit; press Ctrl-C again to kill them\n"
    assert stopped.err == [text]  # once
