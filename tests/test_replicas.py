"""All ranks must hold the same weights: a difference ends the run before anything is saved."""

import random

import pytest
import torch
from harness import FAULT_IN_STEP, launch

from train_distributed import SimpleConvNet, digests_of

FLIP_A_BIT = "next(loss_of.parameters()).data.view(-1).view(torch.int32)[7] ^= 1"


def test_a_rank_whose_weights_changed_is_named_and_nothing_is_saved(tmp_path, tiny):
    options = [*tiny, "--stop-at-step=9", "--checkpoint-every-steps=3"]
    before = FAULT_IN_STEP.format(step=5, rank=1, fault=FLIP_A_BIT)
    result = launch(tmp_path / "run", 3, *options, before=before)
    assert result.codes[0] == 2
    assert "error: different weights on the ranks [1]: a memory error, " in result.err[0]
    assert "Traceback" not in "".join(result.err)
    assert result.checkpoints() == {"checkpoint_step_3"}


def test_every_changed_bit_changes_the_digest():
    """Fifty bits of the weights, of any position and value."""
    parameters = list(SimpleConvNet(1, 28, 10, 0.0).parameters())
    before = digests_of(parameters)
    draw = random.Random(1)
    for _ in range(50):
        number = draw.randrange(len(parameters))
        integers = parameters[number].data.view(-1).view(torch.int32)
        index = draw.randrange(integers.numel())
        bit = draw.randrange(32)
        flip = -(2**31) if bit == 31 else 1 << bit
        integers[index] ^= flip
        changed = digests_of(parameters) != before
        assert changed.nonzero().flatten().tolist() == [number]
        integers[index] ^= flip


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float64", "complex64", "complex128", "float8_e4m3fn", "int64", "bool"]
)
def test_tensors_of_any_type_have_a_digest(dtype):
    weight = torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)
    weight = weight.to(getattr(torch, dtype))
    before = digests_of([weight, torch.tensor(1.5)])
    weight[1, 2, 1, 1] = 0
    assert (digests_of([weight, torch.tensor(1.5)]) == before).tolist() == [False, True]
