"""Metrics: sums over micro-batches and ranks, in which every sample counts once."""

import pytest
import tasks
from harness import train


@pytest.fixture(scope="module")
def still(tmp_path_factory, tiny):
    """An epoch on 1, 2, 3 and 4 ranks, with a learning rate of 0: all ends must be equal."""
    base = tmp_path_factory.mktemp("still")
    options = [*tiny, "--lr=0", "--global-batch-size=32", "--epochs=1"]
    return [train(base / str(n), n, *options) for n in (1, 2, 3, 4)]


def test_every_test_sample_counts_once_on_any_number_of_ranks(still):
    ends = [run.records("epoch")[0] for run in still]
    assert len({end["test_accuracy"] for end in ends}) == 1
    assert round(ends[0]["test_accuracy"] * 103, 6).is_integer()
    assert [end["test_loss"] for end in ends] == pytest.approx([ends[0]["test_loss"]] * 4)


def test_the_metrics_of_an_epoch_are_the_means_over_its_steps(still):
    for run in still:
        (epoch,) = run.records("epoch")
        steps = run.records("train")
        for name in ("loss", "accuracy"):
            assert epoch[name] == pytest.approx(sum(step[name] for step in steps) / len(steps))
        assert f"\nEpoch 1: loss {epoch['loss']:.5g}, accuracy " in run.out[0]


def test_test_metrics_are_those_of_the_saved_model_with_batch_norm_too(tmp_path, tiny):
    options = [*tiny, "--batch-size=16", "--global-batch-size=48", "--epochs=1"]
    three = train(tmp_path / "three", 3, *options, before=tasks.RESNET)
    saved = three.directory / "checkpoint_epoch_1.pt"
    options.append(f"--resume={saved}")
    one = train(tmp_path / "one", 1, *options, before=tasks.RESNET)  # only evaluates
    ours, theirs = (run.records("epoch")[0] for run in (three, one))
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)
    assert ours["test_accuracy"] == theirs["test_accuracy"]


def test_records_do_not_depend_on_when_the_ranks_exchange_them(tmp_path, tiny):
    """Exchanges are about a second apart; here, also after each step, and before each record."""
    options = [*tiny, "--epochs=1", "--log-every-steps=5"]
    usual = train(tmp_path / "usual", 2, *options)
    often = "import train_distributed; train_distributed.Exchange.SECONDS = 0"
    rarely = "import train_distributed; train_distributed.Exchange.SECONDS = 1000"
    for name, before in (("often", often), ("rarely", rarely)):
        run = train(tmp_path / name, 2, *options, before=before)
        for kind in ("train", "epoch"):
            for ours, theirs in zip(run.records(kind), usual.records(kind), strict=True):
                for timed in ("time", "samples_per_second", "data_wait", "seconds_left"):
                    ours.pop(timed, None)
                    theirs.pop(timed, None)
                assert ours == theirs
    assert [record["step"] for record in usual.records("train")] == [5, 10, 13]
