"""Stop anywhere, resume anywhere: the run ends as if nothing had happened."""

import os
import signal
import time

import pytest
from harness import assert_same_state, launch, train

EPOCHS = "--epochs=2"  # of 9 steps: --batch-size 8 on 3 ranks' worth of micro-batches
BATCH = "--global-batch-size=24"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, tiny):
    """Two epochs with augmentation and dropout, which are on by default."""
    directory = tmp_path_factory.mktemp("untouched") / "run"
    return train(directory, 2, *tiny, EPOCHS, BATCH, "--record-samples")


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
    assert_same_end(train(tmp_path / "run", 2, *tiny, EPOCHS, BATCH), untouched)


def test_another_seed_ends_differently(tmp_path, tiny, untouched):
    other = train(tmp_path / "run", 2, *tiny, EPOCHS, BATCH, "--seed=43")
    assert losses(other) != losses(untouched)


@pytest.mark.parametrize("step", [1, 4, 8, 9, 10, 17])
@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_and_resumed_ends_bitwise_equal(tmp_path, tiny, untouched, step, workers):
    run = tmp_path / "run"
    stopped = train(run, 2, *tiny, EPOCHS, BATCH, f"--stop-at-step={step}", "--num-workers=1")
    assert "Stopped as asked" in stopped.out[0]
    resumed = train(run, 2, *tiny, EPOCHS, BATCH, f"--num-workers={workers}", "--record-samples")
    assert min(resumed.samples()) == step, "training should go on at the step where it stopped"
    assert_same_end(resumed, untouched)


def test_stopped_after_every_single_step_ends_bitwise_equal(tmp_path, tiny, untouched):
    for step in range(1, 19):
        run = train(tmp_path / "run", 2, *tiny, EPOCHS, BATCH, f"--stop-at-step={step}")
    assert_same_end(run, untouched)


def test_stop_between_two_records_does_not_show_in_the_metrics(tmp_path, tiny):
    options = [*tiny, EPOCHS, BATCH, "--log-every-steps=5"]
    untouched = train(tmp_path / "untouched", 1, *options)
    train(tmp_path / "run", 1, *options, "--stop-at-step=7")
    assert_same_end(train(tmp_path / "run", 1, *options), untouched)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, tiny, untouched):
    def interrupt(processes):
        while not list((tmp_path / "run").glob("metrics.jsonl")):
            time.sleep(0.01)
        time.sleep(0.1)
        processes[1].terminate()

    options = [*tiny, BATCH, "--record-samples"]
    stopped = train(tmp_path / "run", 2, *options, "--epochs=2", during=interrupt)
    assert "Stopped as asked" in stopped.out[0]
    steps = stopped.samples()
    assert all(len(steps[step]) == 3 for step in steps), "both ranks should end after the same step"
    assert_same_end(train(tmp_path / "run", 2, *options, EPOCHS), untouched)


def press_ctrl_c(directory, *pauses):
    def interrupt(processes):
        while not (directory / "status.json").exists():  # written once it listens for signals
            time.sleep(0.01)
        for pause in pauses:
            time.sleep(pause)
            for process in processes:
                os.kill(process.pid, signal.SIGINT)

    return interrupt


def test_ctrl_c_saves_even_if_a_launcher_passes_it_on_again(tmp_path, tiny):
    run = tmp_path / "run"
    stopped = train(run, 1, *tiny, "--epochs=500", during=press_ctrl_c(run, 0.1, 0.05))
    assert "Stopped as asked" in stopped.out[0]
    assert list(run.glob("checkpoint_*.pt"))


def test_a_second_ctrl_c_ends_at_once(tmp_path, tiny):
    run = tmp_path / "run"
    slow = [*tiny, "--epochs=1", "--model=resnet50", "--image-size=96", "--log-every-steps=1000"]
    result = launch(run, 1, *slow, during=press_ctrl_c(run, 0.1, 1.2))
    assert result.codes == [-signal.SIGINT]
