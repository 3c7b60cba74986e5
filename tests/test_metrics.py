"""Sums over micro-batches and ranks are exact: any values, any order, any number of ranks."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from harness import train

from train_distributed import ExactSums, World, describe, floats

CPU = torch.device("cpu")
UNIT = Fraction(2) ** ExactSums.LOWEST


def total_of(values, ranks: int) -> Fraction:
    """The sum of the values as ExactSums of some ranks adds them."""
    totals = []
    for rank in range(ranks):
        sums = ExactSums(["loss", "count"], CPU)
        for value in values[rank::ranks]:
            sums.add({"loss": value, "count": 1})
        totals.append(sums.all_reduce(World())[0])
    assert sum(total["count"] for total in totals) * UNIT == len(values)
    return sum(total["loss"] for total in totals) * UNIT


def draw_value(draw: random.Random):
    """A number or a tensor, float32 or float64, from 2**-100 to 2**100."""
    number = draw.uniform(-1, 1) * 2.0 ** draw.randint(-100, 100)
    kind = draw.choice(["float", "float32", "float64"])
    if kind == "float":
        return number
    return torch.tensor(number, dtype=getattr(torch, kind))


@pytest.mark.parametrize("seed", range(6))
def test_sums_of_hugely_different_values_are_exact_in_any_order_on_any_number_of_ranks(seed):
    draw = random.Random(seed)
    values = [draw_value(draw) for _ in range(700)]  # more than are kept before they are split
    expected = sum(Fraction(float(value)) for value in values)
    for ranks in (1, 2, 3):
        draw.shuffle(values)
        assert total_of(values, ranks) == expected
    assert floats({"loss": int(expected / UNIT)})["loss"] == float(expected)


def test_a_naive_sum_of_such_values_is_not_exact():
    """Otherwise the test above would show nothing."""
    values = [1.0, 2.0**80, 1.0, -(2.0**80)]
    assert sum(values) == 0 and total_of(values, 1) == 2


def test_integers_and_bfloat16_are_added_exactly():
    values = [torch.tensor(value) for value in (7, 2**40, 2**52 + 1)]
    values = [*values, torch.tensor(0.40625, dtype=torch.bfloat16), 3]
    assert total_of(values, 2) == 7 + 2**40 + 2**52 + 1 + Fraction(0.40625) + 3


def test_values_that_are_not_finite_count_as_0_and_are_reported(capsys):
    huge = [np.inf, -np.inf, np.nan, 2.0**160, -1.5 * 2.0**170]
    values = [torch.tensor(value, dtype=torch.float64) for value in huge]
    assert total_of([*values, torch.tensor(2.0**159, dtype=torch.float64)], 1) == 2**159
    error = capsys.readouterr().err
    assert error == "WARNING: 5 values of loss were not finite and count as 0\n"


SCALED = """if True:
    import train_distributed as trainer

    class Scaled(trainer.Task):
        def losses(self, model, batch):
            values = super().losses(model, batch)
            return values | {{"loss": values["loss"] * 0 + {scale} * len(batch[1])}}

    task = Scaled()
"""


@pytest.mark.parametrize(("scale", "text"), [(1.5e11, "1.5e+11"), (2.5e-30, "2.5e-30")])
def test_a_large_and_a_tiny_loss_are_reported(tmp_path, tiny, scale, text):
    before = SCALED.format(scale=scale)
    run = train(tmp_path / "run", 2, *tiny, "--epochs=1", "--batch-size=64", before=before)
    assert f"  step 1: loss {text}, " in run.out[0]
    assert f"Epoch 1 - Avg Loss: {text}, " in run.out[0] and f", Test Loss: {text}, " in run.out[0]
    (epoch,) = run.records("epoch")
    assert (epoch["loss"], epoch["test_loss"]) == pytest.approx((scale, scale), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss": 0.0904621, "accuracy": 0.97431}, "Loss: 0.090462, Accuracy: 97.43%"),
        ({"loss": 0.0}, "Loss: 0.000000"),
        ({"loss": 1234567.0, "top_5_accuracy": 1.0}, "Loss: 1.23457e+06, Top 5 Accuracy: 100.00%"),
        ({"loss": float("nan")}, "Loss: nan"),
    ],
)
def test_metrics_are_printed_for_people(values, expected):
    assert describe(values) == expected
