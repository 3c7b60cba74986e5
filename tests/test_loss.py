"""Task.loss(): what it returns is trained as a loop of one's own would, on any number of ranks."""

import pytest
import tasks
import torch
import torch.nn.functional as F
from harness import FAULT_IN_LOSS, launch, train

import train_distributed as trainer


class Masked(trainer.Task):
    """A loss over some of the samples, as over the tokens or pixels that are not masked."""

    items = 1  # of each sample

    def loss(self, model, batch):
        images, labels = batch
        valid = labels < 5
        logits = model(images)
        losses = F.cross_entropy(logits, labels, reduction="none") * valid
        correct = (logits.argmax(1) == labels) & valid
        count = valid.sum()
        sums = {"count": self.items * count, "correct": correct.sum()}
        return losses.sum() / count.clamp(min=1), sums


def mean_loss(logits, labels):
    return F.cross_entropy(logits, labels)


def mean_loss_of_some(logits, labels):
    valid = labels < 5
    return F.cross_entropy(logits[valid], labels[valid])


def trained_by_hand(options, run, loss_of) -> dict:
    """The weights that the loop of a tutorial ends with, if it gets the samples of this run."""
    cfg = trainer.parse_config(options)
    task = trainer.Task()
    train_set, _ = task.data(cfg)
    model = trainer.build_state(task, cfg, trainer.World()).model.train()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=cfg.weight_decay)
    rates = {record["step"]: record["lr"] for record in run.records("train")}
    for step, micro_batches in sorted(run.samples().items()):
        images, labels = train_set[[i for ids in micro_batches.values() for i in ids]]
        optimizer.param_groups[0]["lr"] = rates[step + 1]
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


BY_HAND = [(1, 8, None, mean_loss), (3, 6, None, mean_loss), (1, 24, Masked, mean_loss_of_some)]
BY_HAND += [(2, 12, Masked, mean_loss_of_some), (3, 6, Masked, mean_loss_of_some)]


@pytest.mark.parametrize(("ranks", "batch", "task", "loss_of"), BY_HAND)
def test_the_steps_are_those_of_a_loop_written_by_hand(tmp_path, tiny, ranks, batch, task, loss_of):
    options = [*tiny, f"--batch-size={batch}", "--global-batch-size=24", "--dropout=0"]
    options += ["--warmup-epochs=0", "--stop-at-step=3"]
    run = train(tmp_path / "run", ranks, *options, record=True, task=task)
    expected = trained_by_hand(options, run, loss_of)
    for name, weight in run.newest()["model"].items():
        torch.testing.assert_close(weight, expected[name], atol=2e-6, rtol=0, msg=name)


class Parts(trainer.Task):
    def loss(self, model, batch):
        assert isinstance(model, trainer.Normalized)
        loss, sums = super().loss(model, batch)
        # Not the forward pass of the model, but the weights of a part of it.
        return loss + 0.1 * model.network.conv1(batch[0] / 255).square().mean(), sums


def test_loss_gets_the_plain_model_on_any_number_of_ranks(tmp_path, tiny):
    options = [*tiny, "--global-batch-size=16", "--stop-at-step=3"]
    one, two = (train(tmp_path / str(n), n, *options, task=Parts) for n in (1, 2))
    for name, weight in one.newest()["model"].items():
        ours = two.newest()["model"][name]
        torch.testing.assert_close(ours, weight, atol=2e-6, rtol=0, msg=name)


NAN = "loss = loss * float('nan')"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, tiny, ranks):
    """It is not counted as 0. Nothing that it may have ruined is saved."""
    before = FAULT_IN_LOSS.format(call=6, rank=ranks - 1, fault=NAN)
    run = launch(tmp_path / "run", ranks, *tiny, "--checkpoint-every-steps=4", before=before)
    assert run.codes[0] == 2 and run.err[0].count("\n") == 1
    assert run.saved() == [4]
    status = run.status()
    assert status["state"] == "failed" and "the loss of the samples" in status["reason"]


def test_a_loss_that_is_not_finite_in_the_evaluation_is_null_in_the_record(tmp_path, tiny):
    before = FAULT_IN_LOSS.format(call=26 + 2, rank=0, fault=NAN)
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2", before=before)
    first, second = run.records("epoch")
    assert first["test_loss"] is None and second["test_loss"] > 0


class Frozen(tasks.ResNet):
    def model(self, cfg):
        model = super().model(cfg)
        part = model.network.layer1
        part[0].bn1 = torch.nn.BatchNorm2d(64, affine=False)
        part.requires_grad_(False)
        model.network.bn1.requires_grad_(False)
        return model


def test_frozen_batch_norm_keeps_its_statistics(tmp_path, tiny):
    """Also without parameters of its own."""
    options = [*tiny, "--stop-at-step=2"]
    model = train(tmp_path / "run", 2, *options, task=Frozen).newest()["model"]
    for name in ("bn1", "layer1.0.bn1", "layer1.0.bn2"):
        assert not model[f"network.{name}.running_mean"].any(), name
        assert model[f"network.{name}.num_batches_tracked"] == 0
    assert model["network.layer2.0.bn1.running_mean"].any()
    assert model["network.layer2.0.bn1.num_batches_tracked"] == 2
