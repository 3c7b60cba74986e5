"""Any number of ranks: the same samples, the same losses, the same gradients."""

import pytest
import torch
from harness import assert_same_state, train, write_mnist

import train_distributed
from train_distributed import MicroBatchSampler, World

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


def micro_batches(samples, batch, per_step, ranks, step) -> list[train_distributed.MicroBatch]:
    """Those of all ranks, without fillers."""
    words = [f"--batch-size={batch}", f"--global-batch-size={batch * per_step}"]
    cfg = train_distributed.parse_config(words)
    found = []
    for rank in range(ranks):
        sampler = MicroBatchSampler(samples, cfg, World(rank, ranks))
        local = sampler.local_micro_batches(step)
        assert local, "every rank needs a micro-batch"
        found += [micro for micro in local if not micro.is_filler]
    return found


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_micro_batches_depend_on_no_number_of_ranks_and_none_has_a_single_sample(batch):
    for samples in range(2, 50):
        for per_step in (1, 2, 5):
            cfg = train_distributed.parse_config(
                [f"--batch-size={batch}", f"--global-batch-size={batch * per_step}"]
            )
            sampler = MicroBatchSampler(samples, cfg, World())
            steps = [
                micro_batches(samples, batch, per_step, 1, step)
                for step in range(sampler.steps_per_epoch)
            ]
            covered = [i for step in steps for m in step for i in range(m.begin, m.end)]
            assert covered == list(range(samples))
            sizes = [micro.samples for step in steps for micro in step]
            assert max(sizes) <= max(batch, 3) and (batch == 1 or min(sizes) > 1), (samples, sizes)
            for ranks in range(2, per_step + 1):
                for step, micros in enumerate(steps):
                    assert micro_batches(samples, batch, per_step, ranks, step) == micros


def test_batch_norm_trains_when_the_last_step_is_short(tmp_path):
    """The last step of 60 = 2 x 28 + 4 samples has one micro-batch: on two ranks, for rank 1."""
    root = write_mnist(tmp_path / "data", train=60, test=20)
    options = ["--dataset=mnist", f"--data-dir={root}", "--model=resnet18", "--image-size=32"]
    options += ["--batch-size=4", "--global-batch-size=28", "--epochs=1", "--lr=0.001"]
    options += ["--checkpoint-every-steps=1", "--keep=9", "--log-every-steps=1"]
    one, two = (train(tmp_path / str(n), n, *options, record=True) for n in (1, 2))
    assert one.samples() == two.samples() and len(one.samples()[2]) == 1
    losses = [[record["loss"] for record in run.records("train")] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and len(losses[0]) == 3
    before, after = (two.checkpoint(f"checkpoint_{n}")["model"] for n in ("step_2", "epoch_1"))
    statistics = [name for name in before if "running" in name or "tracked" in name]
    assert len(statistics) == 60 and before["bn1.num_batches_tracked"] == 2 * 3
    for name in statistics:  # rank 0 only computed what it borrowed from rank 1
        assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["fc.bias"], after["fc.bias"])


FROZEN = """if True:
    import train_distributed as trainer

    class Frozen(trainer.Task):
        def model(self, cfg):
            model = super().model(cfg)
            model.bn1.requires_grad_(False)
            return model

    task = Frozen()
"""


def test_frozen_batch_norm_keeps_its_statistics(tmp_path, tiny):
    options = [*tiny, "--model=resnet18", "--image-size=32", "--stop-at-step=2"]
    model = train(tmp_path / "run", 2, *options, before=FROZEN).newest()["model"]
    assert not model["bn1.running_mean"].any() and model["bn1.num_batches_tracked"] == 0
    assert model["layer1.0.bn1.running_mean"].any()
    assert model["layer1.0.bn1.num_batches_tracked"] == 2


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


@pytest.mark.parametrize("ranks", [2, 3])
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


def weights_after_one_step(directory, ranks, *options, **more) -> dict[str, torch.Tensor]:
    """With a learning rate of 1 and nothing else, the first step subtracts the gradient."""
    plain = ["--lr=1", "--warmup-epochs=0", "--weight-decay=0", "--dropout=0"]
    run = train(directory, ranks, *options, *plain, "--stop-at-step=1", "--epochs=9", **more)
    return run.checkpoint("checkpoint_step_1")["model"]


@pytest.fixture(scope="module")
def one_big_batch(tmp_path_factory, tiny):
    directory = tmp_path_factory.mktemp("big") / "run"
    return weights_after_one_step(directory, 1, *tiny, "--batch-size=24")


@pytest.mark.parametrize("ranks, batch", [(1, 8), (2, 12), (3, 6)])
def test_accumulated_gradients_equal_those_of_one_big_batch(
    tmp_path, tiny, one_big_batch, ranks, batch
):
    split = ["--global-batch-size=24", f"--batch-size={batch}"]
    small = weights_after_one_step(tmp_path / "small", ranks, *tiny, *split)
    for name, tensor in one_big_batch.items():
        torch.testing.assert_close(small[name], tensor, atol=1e-6, rtol=0, msg=name)


# A loss over some of the samples, as over the tokens or pixels that are not masked.
MASKED = """if True:
    import torch
    import torch.nn.functional as F
    import train_distributed as trainer

    class Masked(trainer.Task):
        def losses(self, model, batch):
            images, labels = batch
            valid = labels < {limit}
            logits = self.predict(model, images)
            losses = F.cross_entropy(logits, labels, reduction="none") * valid
            correct = (logits.argmax(1) == labels) & valid
            return {{"loss": losses.sum(), "count": valid.sum(), "correct": correct.sum()}}

    task = Masked()
"""
HALF = MASKED.format(limit=5)
# The same, for a single big batch, without a count on the device: its own mean.
MEAN = (
    HALF
    + """
    class Mean(Masked):
        def losses(self, model, batch):
            sums = super().losses(model, batch)
            samples = len(batch[1])
            return sums | {"loss": sums["loss"] / sums["count"] * samples, "count": samples}

    task = Mean()
"""
)


@pytest.fixture(scope="module")
def masked_big_batch(tmp_path_factory, tiny):
    directory = tmp_path_factory.mktemp("masked") / "run"
    return weights_after_one_step(directory, 1, *tiny, "--batch-size=24", before=MEAN)


@pytest.mark.parametrize("ranks, batch", [(1, 8), (3, 6)])
def test_the_gradient_is_the_mean_over_items_counted_on_the_device(
    tmp_path, tiny, masked_big_batch, one_big_batch, ranks, batch
):
    split = ["--global-batch-size=24", f"--batch-size={batch}"]
    small = weights_after_one_step(tmp_path / "small", ranks, *tiny, *split, before=HALF)
    for name, tensor in masked_big_batch.items():
        torch.testing.assert_close(small[name], tensor, atol=1e-6, rtol=0, msg=name)
    assert not torch.allclose(masked_big_batch["fc2.bias"], one_big_batch["fc2.bias"], atol=1e-4)


def test_items_counted_on_the_device_resume_reproducibly(tmp_path, tiny):
    options = [*tiny, "--global-batch-size=24", "--epochs=1", "--reproducible"]
    end = "checkpoint_epoch_1"
    untouched = train(tmp_path / "untouched", 3, *options, before=HALF)
    train(tmp_path / "run", 3, *options, "--stop-at-step=5", before=HALF)
    resumed = train(tmp_path / "run", 1, *options, before=HALF)
    assert_same_state(resumed.checkpoint(end), untouched.checkpoint(end))
    losses = [[r["loss"] for r in run.records("train")] for run in (resumed, untouched)]
    assert losses[0] == losses[1] and len(losses[0]) == 9


def test_a_step_without_items_changes_nothing(tmp_path, tiny):
    nothing = MASKED.format(limit=0) + "    Masked.report = lambda self, sums: dict(sums)\n"
    plain = ["--weight-decay=0", "--stop-at-step=2", "--checkpoint-every-steps=1"]
    run = train(tmp_path / "run", 2, *tiny, *plain, before=nothing)
    one, two = (run.checkpoint(f"checkpoint_step_{step}")["model"] for step in (1, 2))
    assert all(torch.equal(one[name], two[name]) and one[name].any() for name in one)
    assert [record["count"] for record in run.records("train")] == [0, 0]
    assert run.err[0] == "", "no gradient is not a gradient that is not finite"


def test_an_epochs_short_last_step_has_the_exact_mean_gradient(tmp_path, tiny):
    # 203 = 2 x 100 + 3: one micro-batch of three samples, so that three of four ranks have none.
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


def test_steps_without_items_are_recorded_without_metrics(tmp_path, tiny):
    options = [*tiny, "--stop-at-step=2"]
    run = train(tmp_path / "run", 2, *options, before=MASKED.format(limit=0))
    assert "  step 1: no items, " in run.out[0]
    assert [record["lr"] > 0 for record in run.records("train")] == [True, True]


def test_a_sum_of_gradients_that_is_too_large_to_be_exact_is_not_finite():
    model = torch.nn.Linear(1, 1, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    learner = train_distributed.Learner(
        model, torch.optim.SGD(model.parameters()), scaler, model, []
    )
    for micro_batches, finite in ((4, True), (5, False)):
        exact = train_distributed.ExactGradients(learner)
        for _ in range(micro_batches):
            model.weight.grad = torch.full((1, 1), 2000.0)
            exact.add_micro_batch()
        exact.write_gradients(train_distributed.World())
        assert model.weight.grad.isfinite().all() == finite
