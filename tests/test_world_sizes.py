"""However many ranks share the work: the same samples, the same losses, the same gradient."""

import pytest
import torch
from harness import train

BATCH = "--global-batch-size=32"  # four micro-batches of 8, for up to four ranks
STEPS = 7  # 203 samples: six steps of 32, one of 11


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny):
    """One epoch, and the beginning of a second, at 1, 2, 3 and 4 ranks."""
    base = tmp_path_factory.mktemp("sizes")
    options = [*tiny, BATCH, "--dropout=0", "--epochs=2", "--stop-at-step=9"]
    return {n: train(base / str(n), n, *options, record=True) for n in (1, 2, 3, 4)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_step_consumes_the_same_samples(runs, ranks):
    assert runs[ranks].samples() == runs[1].samples()


def test_an_epoch_consumes_every_sample_once_and_the_next_in_another_order(runs):
    steps = runs[1].samples()
    order = [
        i for step in range(STEPS) for micro in sorted(steps[step]) for i in steps[step][micro]
    ]
    assert sorted(order) == list(range(203))
    assert order != sorted(order)
    assert [i for step in (7, 8) for micro in range(4) for i in steps[step][micro]] != order[:64]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_agree(runs, ranks):
    ours, theirs = ([r["loss"] for r in runs[n].records("train")] for n in (ranks, 1))
    assert len(ours) == 9
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_resuming_on_other_numbers_of_ranks_loses_and_repeats_no_sample(tmp_path, tiny, runs):
    options = [*tiny, BATCH, "--dropout=0", "--epochs=2"]
    for ranks, step in ((4, 3), (2, 5), (3, 9)):
        run = train(tmp_path / "run", ranks, *options, f"--stop-at-step={step}", record=True)
    assert run.samples() == runs[1].samples()
    losses = [record["loss"] for record in run.records("train")]
    assert losses == pytest.approx([r["loss"] for r in runs[1].records("train")], abs=1e-5)


def test_the_global_batch_of_the_checkpoint_wins(tmp_path, tiny):
    options = [*tiny, "--epochs=1"]
    train(tmp_path / "run", 4, *options, "--stop-at-step=2", record=True)
    other = ["--global-batch-size=16", "--seed=1"]
    run = train(tmp_path / "run", 2, *options, *other, record=True)
    assert "WARNING: the global_batch_size of this run is 32 (from " in run.err[0]
    assert "WARNING: the seed of this run is 42 (from " in run.err[0]
    assert "Global batch 32 = 4 micro-batches of 8, 2 on each of 2 ranks" in run.out[0]
    assert sorted(i for step in run.samples().values() for m in step.values() for i in m) == list(
        range(203)
    )


def test_override_changes_the_global_batch_in_another_directory(tmp_path, tiny):
    train(tmp_path / "run", 2, *tiny, BATCH, "--epochs=1")
    more = [*tiny, "--epochs=2", "--global-batch-size=48"]
    file = tmp_path / "run" / "checkpoint_epoch_1.pt"
    override = ["--override", f"--resume={file}", "--stop-at-step=7"]
    first = train(tmp_path / "other", 2, *more, *override, record=True)
    assert (
        "the same command without --resume and --override and --stop-at-step goes on"
        in first.out[0]
    )
    run = train(tmp_path / "other", 2, *more, record=True)
    assert min(run.samples()) == 5, "203 samples are five steps of 48"
    assert sorted(i for s in run.samples().values() for m in s.values() for i in m) == list(
        range(203)
    )


def weights_after_one_step(directory, ranks, *options) -> dict[str, torch.Tensor]:
    """With a learning rate of 1 and nothing else, a step subtracts the gradient."""
    plain = ["--lr=1", "--warmup-epochs=0", "--momentum=0", "--weight-decay=0", "--dropout=0"]
    run = train(directory, ranks, *options, *plain, "--stop-at-step=1", "--epochs=9")
    return run.checkpoint("checkpoint_step_1")["model"]


@pytest.mark.parametrize(
    ("ranks", "batch"), [(1, 8), (2, 8), (2, 12), (3, 6), (4, 4)], ids=lambda n: str(n)
)
def test_accumulated_gradients_equal_those_of_one_big_batch(tmp_path, tiny, ranks, batch):
    big = weights_after_one_step(tmp_path / "big", 1, *tiny, "--batch-size=24")
    split = ["--global-batch-size=24", f"--batch-size={batch}"]
    small = weights_after_one_step(tmp_path / "small", ranks, *tiny, *split)
    for name, tensor in big.items():
        torch.testing.assert_close(small[name], tensor, atol=1e-6, rtol=0, msg=name)


def test_an_epochs_short_last_step_has_the_exact_mean_gradient(tmp_path, tiny):
    # 203 = 2 x 100 + 3: three samples over four micro-batches, so that one rank has none.
    def last_step(directory, ranks, batch):
        options = [f"--batch-size={batch}", "--global-batch-size=100", "--dropout=0", "--epochs=1"]
        return train(
            directory, ranks, *tiny, *options, "--warmup-epochs=0", "--lr-schedule=constant"
        )

    one, four = last_step(tmp_path / "one", 1, 100), last_step(tmp_path / "four", 4, 25)
    ours, theirs = (run.checkpoint("checkpoint_epoch_1")["model"] for run in (four, one))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0, msg=name)
    assert four.records("train")[-1]["loss"] == pytest.approx(one.records("train")[-1]["loss"])


def test_evaluation_counts_every_test_sample_once_at_any_world_size(tmp_path, tiny):
    # Without a learning rate the model stays as it is, so all must find exactly the same.
    still = [*tiny, "--lr=0", "--global-batch-size=24", "--epochs=1"]
    ends = [train(tmp_path / str(n), n, *still).records("epoch")[0] for n in (1, 2, 3)]
    assert len({end["test_accuracy"] for end in ends}) == 1
    assert round(ends[0]["test_accuracy"] * 103, 6).is_integer()
    assert [end["test_loss"] for end in ends] == pytest.approx([ends[0]["test_loss"]] * 3)


def test_evaluation_says_how_many_samples_it_counted(tmp_path, tiny):
    run = train(tmp_path / "run", 3, *tiny, "--epochs=1")
    assert "of 103 |" in run.out[0]
