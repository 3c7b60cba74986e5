"""A run that is stopped and resumed at any step ends with the same weights."""

import os
import signal
import time
from pathlib import Path

import pytest
from harness import assert_same_state, launch, train, wait_until

from train_distributed import Task

OPTIONS = ["--epochs=2", "--global-batch-size=24"]  # 9 and 8 steps, each of three micro-batches
RANKS = 3  # with two, the order of adding gradients would make no difference
END = 17


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, tiny):
    """Two epochs, with dropout, which is on by default."""
    return train(tmp_path_factory.mktemp("untouched") / "run", RANKS, *tiny, *OPTIONS)


def assert_same_end(run, untouched) -> None:
    assert_same_state(run.checkpoint(END), untouched.checkpoint(END))
    losses = [[(r["step"], r["loss"]) for r in x.records("train")] for x in (run, untouched)]
    assert losses[0] == losses[1]
    ours, theirs = ({r["epoch"]: r for r in x.records("epoch")} for x in (run, untouched))
    assert ours.keys() == theirs.keys()
    for epoch, record in theirs.items():  # the last record counts
        for name in ("step", "loss", "accuracy", "test_loss", "test_accuracy"):
            assert ours[epoch][name] == record[name]


@pytest.mark.parametrize("step", [4, 9])  # in an epoch; at its end
def test_stopped_and_resumed_ends_bitwise_equal(tmp_path, tiny, untouched, step):
    options = [*tiny, *OPTIONS]
    stopped = train(tmp_path / "run", RANKS, *options, f"--stop-at-step={step}")
    assert stopped.status()["state"] == "stopped"
    resumed = train(tmp_path / "run", RANKS, *options, record=True)
    assert min(resumed.samples()) == step == resumed.status()["start_step"]
    assert_same_end(resumed, untouched)


def test_uneven_ranks_resume_bitwise_too(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--global-batch-size=48"]  # 1 or 2 micro-batches on 4 ranks
    untouched = train(tmp_path / "untouched", 4, *options)
    train(tmp_path / "run", 4, *options, "--stop-at-step=2")
    assert_same_state(train(tmp_path / "run", 4, *options).newest(), untouched.newest())


def test_an_epoch_whose_evaluation_crashed_is_evaluated_later(tmp_path, tiny, untouched):
    cut = "import os, train_distributed; train_distributed.evaluate = lambda *_: os._exit(9)"
    crashed = launch(tmp_path / "run", RANKS, *tiny, *OPTIONS, before=cut)
    assert crashed.codes == [9] * RANKS and crashed.saved() == [9]
    assert_same_end(train(tmp_path / "run", RANKS, *tiny, *OPTIONS), untouched)


class Slow(Task):
    def loss(self, model, batch):
        if not model.training:
            Path(self.cfg.checkpoint_dir, "evaluating").touch()
            time.sleep(0.3)
        return super().loss(model, batch)


Slow.__name__ = "Task"


def test_a_stop_in_an_evaluation_does_not_show_in_the_end(tmp_path, tiny, untouched):
    def stop(processes):
        wait_until((tmp_path / "run/evaluating").exists, "no evaluation")
        os.kill(processes[1].pid, signal.SIGUSR1)

    stopped = train(tmp_path / "run", RANKS, *tiny, *OPTIONS, task=Slow, during=stop)
    status = stopped.status()
    assert (status["state"], status["reason"]) == ("stopped", "SIGUSR1")
    assert 9 <= status["saved_step"] == status["global_step"] < END
    assert_same_end(train(tmp_path / "run", RANKS, *tiny, *OPTIONS), untouched)


def test_a_stop_between_two_records_does_not_show_in_the_metrics(tmp_path, tiny):
    options = [*tiny, *OPTIONS, "--log-every-steps=5"]
    untouched = train(tmp_path / "untouched", 1, *options)
    train(tmp_path / "run", 1, *options, "--stop-at-step=7")
    assert_same_end(train(tmp_path / "run", 1, *options), untouched)
