"""All ranks must hold the same weights: a difference ends the run before anything is saved."""

import random

import pytest
import torch
from harness import FAULT_IN_STEP, launch

from train_distributed import UserError, check_replicas

FLIP_A_BIT = "next(state.model.parameters()).data.view(-1).view(torch.int32)[7] ^= 1"


def test_a_rank_whose_weights_changed_is_named_and_nothing_is_saved(tmp_path, tiny):
    options = [*tiny, "--stop-at-step=9", "--checkpoint-every-steps=3"]
    before = FAULT_IN_STEP.format(step=5, rank=1, fault=FLIP_A_BIT)
    result = launch(tmp_path / "run", 3, *options, before=before)
    assert result.codes[0] == 2 and result.saved() == [3]
    assert "on the ranks [1]" in result.err[0] and "Traceback" not in "".join(result.err)


DTYPES = ["float32", "bfloat16", "float64", "complex64", "float8_e4m3fn", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bit_of_a_weight_counts(monkeypatch, dtype):
    """Of any type and layout. The second rank's is compared with the first one's."""
    weight = torch.ones(5, 3, 3, 3).to(memory_format=torch.channels_last)  # an odd number
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(weight.to(getattr(torch, dtype)), requires_grad=False)
    seen = []
    monkeypatch.setattr("train_distributed.gather", lambda digest: seen.append(digest) or seen)
    check_replicas(model)
    weight_bytes = model.weight.data.permute(0, 2, 3, 1).view(torch.uint8).view(-1)
    draw = random.Random(1)
    for _ in range(50):
        place, bit = draw.randrange(len(weight_bytes)), 1 << draw.randrange(8)
        weight_bytes[place] ^= bit
        del seen[1:]
        with pytest.raises(UserError, match="different weights"):
            check_replicas(model)
        weight_bytes[place] ^= bit
