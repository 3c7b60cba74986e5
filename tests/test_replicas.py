"""All ranks must hold the same weights: a difference ends the run before anything is saved."""

import random

import pytest
import torch
from harness import launch

from train_distributed import SimpleConvNet, weights_digest

# A bit of one rank's weights changes after this number of steps.
FLIP = """
import os, torch, train_distributed as trainer
def train_step(run, batches, sums, inner=trainer.train_step):
    inner(run, batches, sums)
    if run.state.step + 1 == {step} and os.environ.get("RANK") == "{rank}":
        weight = next(run.learner.model.parameters())
        weight.data.view(-1).view(torch.int32)[7] ^= 1
trainer.train_step = train_step
"""
OPTIONS = ["--stop-at-step=9", "--checkpoint-every-steps=3", "--epochs=2"]


def test_a_rank_whose_weights_changed_is_named_and_nothing_is_saved(tmp_path, tiny):
    options = [*tiny, *OPTIONS, "--log-every-steps=2"]
    result = launch(tmp_path / "run", 3, *options, before=FLIP.format(step=5, rank=1))
    assert result.codes[0] == 2
    text = "rank 1: other weights than the other ranks; after step 4 they were equal, "
    assert text in result.err[0]
    assert "after step 6 no longer" in result.err[0]
    assert "Traceback" not in "".join(result.err)
    assert result.checkpoints() == {"checkpoint_step_3"}


def test_of_two_ranks_none_is_named(tmp_path, tiny):
    result = launch(tmp_path / "run", 2, *tiny, *OPTIONS, before=FLIP.format(step=2, rank=1))
    text = "error: the ranks have different weights; after step 1 they were equal"
    assert text in result.err[0]


def test_every_changed_bit_changes_the_digest():
    """One hundred bits of the weights, of any position and value."""
    model = SimpleConvNet(1, 28, 10, 0.0)
    digest = weights_digest(model)
    draw = random.Random(1)
    for _ in range(100):
        parameter = draw.choice(list(model.parameters()))
        integers = parameter.data.view(-1).view(torch.int32)
        index = draw.randrange(integers.numel())
        bit = draw.randrange(32)
        flip = -(2**31) if bit == 31 else 1 << bit
        integers[index] ^= flip
        assert weights_digest(model) != digest
        integers[index] ^= flip
        assert weights_digest(model) == digest


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float64", "complex64", "complex128", "float8_e4m3fn"]
)
def test_weights_of_any_type_have_a_digest(dtype):
    model = torch.nn.Module()
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    model.weight = torch.nn.Parameter(weight.to(getattr(torch, dtype)))
    model.scale = torch.nn.Parameter(torch.tensor(1.5))
    digest = weights_digest(model)
    model.weight.data[1, 2, 1, 1] = 8
    assert weights_digest(model) != digest


def test_weights_that_are_no_plain_tensors_are_not_compared():
    class Quantized(torch.Tensor):
        pass

    model = torch.nn.Linear(2, 2)
    model.quantized = torch.nn.Parameter(torch.ones(3).as_subclass(Quantized))
    assert weights_digest(model) == 0
