"""Stop anywhere, resume anywhere: the run ends as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from harness import REPO, TORCHRUN, assert_same_state, launch, train

EPOCHS = "--epochs=2"  # of 9 steps: 203 samples in global batches of 24
BATCH = "--global-batch-size=24"  # three micro-batches of 8
RANKS = 3  # with two, the order in which gradients are summed could not show


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, tiny):
    """Two epochs with augmentation and dropout, which are on by default."""
    directory = tmp_path_factory.mktemp("untouched") / "run"
    return train(directory, RANKS, *tiny, EPOCHS, BATCH)


def losses(run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.records("train")]


def assert_same_end(run, untouched) -> None:
    end = "checkpoint_epoch_2"
    assert_same_state(run.checkpoint(end), untouched.checkpoint(end))
    assert losses(run) == losses(untouched)
    for ours, theirs in zip(run.records("epoch"), untouched.records("epoch"), strict=True):
        for name in ("epoch", "step", "loss", "accuracy", "test_loss", "test_accuracy"):
            assert ours[name] == theirs[name]


def test_two_runs_with_the_same_seed_end_bitwise_equal(tmp_path, tiny, untouched):
    assert_same_end(train(tmp_path / "run", RANKS, *tiny, EPOCHS, BATCH), untouched)


def test_another_seed_ends_differently(tmp_path, tiny, untouched):
    other = train(tmp_path / "run", RANKS, *tiny, EPOCHS, BATCH, "--seed=43")
    assert losses(other) != losses(untouched)


@pytest.mark.parametrize("step", [1, 4, 8, 9, 10, 17])
@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_and_resumed_ends_bitwise_equal(tmp_path, tiny, untouched, step, workers):
    run = tmp_path / "run"
    stopped = train(run, RANKS, *tiny, EPOCHS, BATCH, f"--stop-at-step={step}", "--num-workers=1")
    again = "Stopped as asked; the same command without --stop-at-step goes on"
    assert again in stopped.out[0]
    resumed = train(run, RANKS, *tiny, EPOCHS, BATCH, f"--num-workers={workers}", record=True)
    assert min(resumed.samples()) == step, "training should go on at the step where it stopped"
    assert_same_end(resumed, untouched)


@pytest.mark.long  # six of these steps are tried above
def test_stopped_after_every_single_step_ends_bitwise_equal(tmp_path, tiny, untouched):
    for step in range(1, 19):
        run = train(tmp_path / "run", RANKS, *tiny, EPOCHS, BATCH, f"--stop-at-step={step}")
    assert_same_end(run, untouched)


def test_uneven_ranks_resume_bitwise_too(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--global-batch-size=48"]  # 1 or 2 micro-batches on 4 ranks
    untouched = train(tmp_path / "untouched", 4, *options)
    train(tmp_path / "run", 4, *options, "--stop-at-step=2")
    resumed = train(tmp_path / "run", 4, *options)
    end = "checkpoint_epoch_1"
    assert_same_state(resumed.checkpoint(end), untouched.checkpoint(end))


def test_an_epoch_whose_evaluation_was_cut_off_is_saved_and_evaluated_later(
    tmp_path, tiny, untouched
):
    cut = "import os, train_distributed; train_distributed.evaluate = lambda *_: os._exit(9)"
    options = [*tiny, EPOCHS, BATCH]
    for epoch in (1, 2):
        assert launch(tmp_path / "run", RANKS, *options, before=cut).codes == [9] * RANKS
        assert (tmp_path / "run" / f"checkpoint_epoch_{epoch}.pt").exists()
        train(tmp_path / "run", RANKS, *options, f"--stop-at-step={9 * epoch}")
    run = train(tmp_path / "run", RANKS, *options)
    assert "Nothing to do" in run.out[0]
    assert_same_end(run, untouched)


def test_stop_between_two_records_does_not_show_in_the_metrics(tmp_path, tiny):
    options = [*tiny, EPOCHS, BATCH, "--log-every-steps=5"]
    untouched = train(tmp_path / "untouched", 1, *options)
    train(tmp_path / "run", 1, *options, "--stop-at-step=7")
    assert_same_end(train(tmp_path / "run", 1, *options), untouched)


def once_it_trains(directory, *pauses, press):
    """For launch(during=...): press(process) for all processes after each of the pauses."""

    def interrupt(processes):
        while not (directory / "status.json").exists():  # written once it listens for signals
            time.sleep(0.01)
        for pause in pauses:
            time.sleep(pause)
            for process in processes:
                press(process)

    return interrupt


def ctrl_c(process) -> None:
    with suppress(ProcessLookupError):  # it may have ended since the last one
        os.kill(process.pid, signal.SIGINT)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, tiny, untouched):
    run, options = tmp_path / "run", [*tiny, BATCH, EPOCHS]
    one = once_it_trains(
        run, 0.05, press=lambda process: pressed or pressed.append(ctrl_c(process))
    )
    pressed: list = []
    stopped = train(run, RANKS, *options, during=one, record=True)
    assert "Stopped as asked; the same command goes on" in stopped.out[0]
    assert {len(micros) for micros in stopped.samples().values()} == {3}, "all, the same step"
    assert_same_end(train(run, RANKS, *options), untouched)


def test_a_signal_to_the_whole_process_group_leaves_the_loader_its_workers(tmp_path, tiny):
    command = [sys.executable, REPO / "train_distributed.py", *tiny, "--num-workers=2"]
    command += ["--epochs=500", f"--checkpoint-dir={tmp_path / 'run'}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **streams) as process:
        while not process.stdout.readline().startswith("  step 30:"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "Stopped as asked" in out
    assert list((tmp_path / "run").glob("checkpoint_*.pt"))


def test_workers_whose_torchrun_was_killed_save_and_end(tmp_path, tiny):
    command = [*TORCHRUN, REPO / "train_distributed.py", *tiny, "--epochs=2000"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command.append(f"--checkpoint-dir={tmp_path / 'run'}")
    with subprocess.Popen(command, env=env, **streams) as torchrun:
        while not torchrun.stdout.readline().startswith("  step 10:"):
            assert torchrun.poll() is None
        torchrun.kill()
        text, _ = torchrun.communicate(timeout=60)  # until the last worker has closed its output
    assert "Stopped as asked" in text
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")


def test_a_rank_that_lost_the_others_says_so_and_lets_the_first_to_fail_exit_first(tmp_path, tiny):
    ended = {}

    def kill_rank_one(processes):
        once_it_trains(tmp_path / "run", 0.1, press=lambda process: None)(processes)
        processes[1].kill()
        processes[1].join()
        killed = time.monotonic()
        processes[0].join(60)
        ended["after"] = time.monotonic() - killed

    result = launch(tmp_path / "run", 2, *tiny, "--epochs=2000", during=kill_rank_one)
    assert result.codes == [1, -signal.SIGKILL]
    lost = r"train_distributed.py: rank 0 on \S+ lost the others \(.+\)\n"
    assert re.fullmatch(lost, result.err[0]), result.err[0]
    assert ended["after"] > 2.5


def test_a_crash_ends_the_loaders_workers_too(tmp_path, tiny):
    crash = "import train_distributed; train_distributed.learning_rate = None"
    result = launch(tmp_path / "run", 1, *tiny, "--num-workers=2", before=crash, timeout=30)
    assert result.codes == [1] and "TypeError" in result.err[0]


def test_a_stop_need_not_wait_for_the_next_record(tmp_path, tiny):
    run = tmp_path / "run"
    slow = [*tiny, "--epochs=1", "--model=resnet18", "--image-size=64", "--log-every-steps=1000"]
    look = "import train_distributed; train_distributed.LOOK_SECONDS = 0.1"
    train(run, 1, *slow, before=look, during=once_it_trains(run, 1, press=ctrl_c))
    assert json.loads((run / "status.json").read_text())["global_step"] < 26


def test_ctrl_c_saves_even_if_a_launcher_passes_it_on_again(tmp_path, tiny):
    run = tmp_path / "run"
    twice = once_it_trains(run, 0.1, 0.05, press=ctrl_c)
    stopped = train(run, 1, *tiny, "--epochs=500", during=twice)
    assert "Stopped as asked" in stopped.out[0]
    assert stopped.err[0] == "Stopping, and saving; a second Ctrl-C ends it at once\n"
    assert list(run.glob("checkpoint_*.pt"))


def test_a_second_ctrl_c_ends_at_once(tmp_path, tiny):
    run = tmp_path / "run"
    long = (
        "import time, train_distributed; train_distributed.train_step = lambda *_: time.sleep(60)"
    )
    pressed = once_it_trains(run, 0.1, 1.2, press=ctrl_c)
    result = launch(run, 1, *tiny, "--epochs=1", before=long, during=pressed)
    assert result.codes == [-signal.SIGINT]
