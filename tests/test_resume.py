"""A run that is stopped and resumed at any step ends with the same weights."""

import os
import signal
import time
from pathlib import Path

import pytest
from harness import assert_same_state, launch, train, wait_until

from train_distributed import Task

EPOCHS = "--epochs=2"  # of 9 and 8 steps: 406 samples in global batches of 24
BATCH = "--global-batch-size=24"  # three micro-batches of 8
RANKS = 3  # with two, the order of adding gradients would make no difference


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, tiny):
    """Two epochs, with dropout, which is on by default."""
    directory = tmp_path_factory.mktemp("untouched") / "run"
    return train(directory, RANKS, *tiny, EPOCHS, BATCH)


def losses(run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.records("train")]


def assert_same_end(run, untouched) -> None:
    end = "checkpoint_epoch_2"
    assert_same_state(run.checkpoint(end), untouched.checkpoint(end))
    assert losses(run) == losses(untouched)
    ours, theirs = ({r["epoch"]: r for r in x.records("epoch")} for x in (run, untouched))
    assert ours.keys() == theirs.keys()
    for epoch, record in theirs.items():  # the last record counts
        for name in ("step", "loss", "accuracy", "test_loss", "test_accuracy"):
            assert ours[epoch][name] == record[name]


@pytest.mark.parametrize("step", [4, 9])  # in an epoch; at its end
def test_stopped_and_resumed_ends_bitwise_equal(tmp_path, tiny, untouched, step):
    options = [*tiny, EPOCHS, BATCH]
    stopped = train(tmp_path / "run", RANKS, *options, f"--stop-at-step={step}")
    assert f"Stopped at step {step} of 17, saved in {tmp_path / 'run'}\n" in stopped.out[0]
    resumed = train(tmp_path / "run", RANKS, *options, record=True)
    assert min(resumed.samples()) == step, "training should resume at the step where it stopped"
    assert_same_end(resumed, untouched)


@pytest.mark.long  # two of these steps are tried above
def test_stopped_after_every_single_step_ends_bitwise_equal(tmp_path, tiny, untouched):
    for step in range(1, 18):
        run = train(tmp_path / "run", RANKS, *tiny, EPOCHS, BATCH, f"--stop-at-step={step}")
    assert_same_end(run, untouched)


def test_uneven_ranks_resume_bitwise_too(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--global-batch-size=48"]  # 1 or 2 micro-batches on 4 ranks
    untouched = train(tmp_path / "untouched", 4, *options)
    train(tmp_path / "run", 4, *options, "--stop-at-step=2")
    resumed = train(tmp_path / "run", 4, *options)
    assert_same_state(resumed.newest(), untouched.newest())


def test_an_epoch_whose_evaluation_crashed_is_evaluated_later(tmp_path, tiny, untouched):
    cut = "import os, train_distributed; train_distributed.evaluate = lambda *_: os._exit(9)"
    options = [*tiny, EPOCHS, BATCH]
    crashed = launch(tmp_path / "run", RANKS, *options, before=cut)
    assert crashed.codes == [9] * RANKS and crashed.checkpoints() == {"checkpoint_epoch_1"}
    run = train(tmp_path / "run", RANKS, *options)
    assert "Finished at step 17 of 17" in run.out[0]
    assert_same_end(run, untouched)


class Slow(Task):
    def loss(self, model, batch):
        if not model.training:
            Path(self.cfg.checkpoint_dir, "evaluating").touch()
            time.sleep(1)
        return super().loss(model, batch)


Slow.__name__ = "Task"


def test_a_stop_in_an_evaluation_gives_it_up_and_the_resumed_run_repeats_it(
    tmp_path, tiny, untouched
):
    """A time limit that falls into a long evaluation does not lose the requeue."""

    def stop(processes):
        wait_until((tmp_path / "run/evaluating").exists, "no evaluation")
        os.kill(processes[1].pid, signal.SIGUSR1)

    options = [*tiny, EPOCHS, BATCH]
    stopped = train(tmp_path / "run", RANKS, *options, task=Slow, during=stop)
    where = f"step 9 of 17 (SIGUSR1), saved in {tmp_path}/run"
    assert stopped.out[0].endswith(f"\nStopped at {where}\n")
    assert stopped.checkpoints() == {"checkpoint_epoch_1"} and not stopped.records("epoch")
    status = stopped.status()
    assert (status["state"], status["reason"], status["saved_step"]) == ("stopped", "SIGUSR1", 9)
    assert_same_end(train(tmp_path / "run", RANKS, *options), untouched)


def test_a_stop_between_two_records_does_not_show_in_the_metrics(tmp_path, tiny):
    options = [*tiny, EPOCHS, BATCH, "--log-every-steps=5"]
    untouched = train(tmp_path / "untouched", 1, *options)
    train(tmp_path / "run", 1, *options, "--stop-at-step=7")
    assert_same_end(train(tmp_path / "run", 1, *options), untouched)
