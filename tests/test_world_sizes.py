"""Any number of ranks: the same samples, the same losses, the same gradients."""

import pytest
import torch
from harness import assert_same_state, train

BATCH = "--global-batch-size=32"  # four micro-batches of 8, for up to four ranks
STEPS = 7  # per epoch: 203 samples are six steps of 32 and one of 11


def samples_in_order(run, steps) -> list[int]:
    samples = run.samples()
    return [i for step in steps for micro in sorted(samples[step]) for i in samples[step][micro]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny):
    """One epoch, and the beginning of a second, on 1, 2, 3 and 4 ranks."""
    base = tmp_path_factory.mktemp("sizes")
    options = [*tiny, BATCH, "--epochs=2", "--stop-at-step=9"]
    return {n: train(base / str(n), n, *options, record=True) for n in (1, 2, 3, 4)}


def test_every_step_consumes_the_same_samples_on_any_number_of_ranks(runs):
    assert all(run.samples() == runs[1].samples() for run in runs.values())


def test_an_epoch_consumes_every_sample_once_and_the_next_in_another_order(runs):
    order = samples_in_order(runs[1], range(STEPS))
    assert sorted(order) == list(range(203))
    assert order != sorted(order)
    assert samples_in_order(runs[1], (7, 8)) != order[:64]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_agree(runs, ranks):
    ours, theirs = ([r["loss"] for r in runs[n].records("train")] for n in (ranks, 1))
    assert len(ours) == 9
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_resuming_on_other_numbers_of_ranks_loses_and_repeats_no_sample(tmp_path, tiny, runs):
    options = [*tiny, BATCH, "--epochs=2"]
    for ranks, step in ((4, 3), (2, 5), (3, 9)):
        run = train(tmp_path / "run", ranks, *options, f"--stop-at-step={step}", record=True)
    assert run.samples() == runs[1].samples()
    losses = [record["loss"] for record in run.records("train")]
    assert losses == pytest.approx([r["loss"] for r in runs[1].records("train")], abs=1e-5)


# Five micro-batches, which 2, 3 and 4 ranks cannot share evenly; three samples in the last step.
REPRODUCIBLE = ["--reproducible", "--global-batch-size=40", "--epochs=2"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("one") / "run", 1, *tiny, *REPRODUCIBLE, record=True)


def assert_same_bits(run, other) -> None:
    assert run.samples() == other.samples()
    for name in ("checkpoint_epoch_1", "checkpoint_epoch_2"):
        assert_same_state(run.checkpoint(name), other.checkpoint(name))
    kinds = {"train": ("step", "loss", "accuracy", "lr"), "epoch": ("test_loss", "test_accuracy")}
    for kind, names in kinds.items():
        ours, theirs = ([[r[n] for n in names] for r in x.records(kind)] for x in (run, other))
        assert ours == theirs


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_reproducible_ends_with_the_same_bits_on_any_number_of_ranks(
    tmp_path, tiny, one_rank, ranks
):
    assert_same_bits(train(tmp_path / "run", ranks, *tiny, *REPRODUCIBLE, record=True), one_rank)


def test_reproducible_ends_with_the_same_bits_when_the_number_of_ranks_changes(
    tmp_path, tiny, one_rank
):
    for ranks, step in ((5, 2), (2, 5), (3, 6), (1, 9), (4, 12)):
        options = [*tiny, *REPRODUCIBLE, f"--stop-at-step={step}"]
        run = train(tmp_path / "run", ranks, *options, record=True)
    assert_same_bits(run, one_rank)


def test_reproducible_works_with_loss_scaling_too(tmp_path, tiny):
    options = [*tiny, *REPRODUCIBLE, "--amp=fp16", "--stop-at-step=4"]
    one, three = (train(tmp_path / str(ranks), ranks, *options) for ranks in (1, 3))
    assert_same_state(one.checkpoint("checkpoint_step_4"), three.checkpoint("checkpoint_step_4"))


def test_the_global_batch_and_the_seed_of_the_checkpoint_override_the_options(tmp_path, tiny):
    options = [*tiny, "--epochs=1"]
    train(tmp_path / "run", 4, *options, "--stop-at-step=2", record=True)
    other = ["--global-batch-size=16", "--seed=1"]
    run = train(tmp_path / "run", 2, *options, *other, record=True)
    assert "WARNING: the global_batch_size of this run is 32, not 16\n" in run.err[0]
    assert "WARNING: the seed of this run is 42, not 1\n" in run.err[0]
    assert "Global batch 32 = 4 micro-batches of 8" in run.out[0]
    assert sorted(samples_in_order(run, range(STEPS))) == list(range(203))


def weights_after_one_step(directory, ranks, *options) -> dict[str, torch.Tensor]:
    """With a learning rate of 1 and nothing else, the first step subtracts the gradient."""
    plain = ["--lr=1", "--warmup-epochs=0", "--weight-decay=0", "--dropout=0"]
    run = train(directory, ranks, *options, *plain, "--stop-at-step=1", "--epochs=9")
    return run.checkpoint("checkpoint_step_1")["model"]


@pytest.fixture(scope="module")
def one_big_batch(tmp_path_factory, tiny):
    directory = tmp_path_factory.mktemp("big") / "run"
    return weights_after_one_step(directory, 1, *tiny, "--batch-size=24")


@pytest.mark.parametrize("ranks, batch", [(1, 8), (2, 8), (2, 12), (3, 6), (4, 4)])
def test_accumulated_gradients_equal_those_of_one_big_batch(
    tmp_path, tiny, one_big_batch, ranks, batch
):
    split = ["--global-batch-size=24", f"--batch-size={batch}"]
    small = weights_after_one_step(tmp_path / "small", ranks, *tiny, *split)
    for name, tensor in one_big_batch.items():
        torch.testing.assert_close(small[name], tensor, atol=1e-6, rtol=0, msg=name)


def test_an_epochs_short_last_step_has_the_exact_mean_gradient(tmp_path, tiny):
    # 203 = 2 x 100 + 3: three samples for four micro-batches, so that one rank has none.
    def train_epoch(name, ranks, batch):
        options = [f"--batch-size={batch}", "--global-batch-size=100", "--dropout=0", "--epochs=1"]
        return train(tmp_path / name, ranks, *tiny, *options, "--warmup-epochs=0")

    one, four = train_epoch("one", 1, 100), train_epoch("four", 4, 25)
    ours, theirs = (run.checkpoint("checkpoint_epoch_1")["model"] for run in (four, one))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=0, msg=name)
    assert four.records("train")[-1]["loss"] == pytest.approx(one.records("train")[-1]["loss"])


def test_evaluation_counts_every_test_sample_once_at_any_world_size(tmp_path, tiny):
    # With a learning rate of 0 the model does not change, so all results must be equal.
    still = [*tiny, "--lr=0", "--global-batch-size=24", "--epochs=1"]
    runs = [train(tmp_path / str(n), n, *still) for n in (1, 2, 3)]
    ends = [run.records("epoch")[0] for run in runs]
    assert all("of 103\n" in run.out[0] for run in runs)
    assert len({end["test_accuracy"] for end in ends}) == 1
    assert round(ends[0]["test_accuracy"] * 103, 6).is_integer()
    assert [end["test_loss"] for end in ends] == pytest.approx([ends[0]["test_loss"]] * 3)
