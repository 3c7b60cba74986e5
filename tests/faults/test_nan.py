"""Numbers that are not finite. ../test_loss.py and ../test_checkpoints.py have the plain cases."""

import pytest
import torch
from harness import assert_same_state, train
from tasks import QUICK, small

# In the fourth step, the gradients of one rank overflow, although its loss is finite.
OVERFLOW = """
def loss(self, model, batch):
    loss, _ = super().loss(model, batch)
    if self.step == 3 and model.training and os.environ["RANK"] == "1":
        loss.register_hook(lambda gradient: gradient * float("inf"))
    return 1e-4 * loss, {}  # small enough for the first scale
"""


@pytest.mark.parametrize("mode", [[], ["--reproducible"]], ids=["plain", "reproducible"])
def test_with_fp16_all_ranks_skip_a_step_whose_gradient_overflows_on_one_rank(tmp_path, mode):
    options = [*QUICK, *mode, "--amp=fp16", "--checkpoint-every-steps=1", "--keep=9"]
    run = train(tmp_path / "run", 2, *options, "--stop-at-step=5", **small(OVERFLOW))
    third, fourth, fifth = (run.checkpoint(step) for step in (3, 4, 5))
    assert_same_state(third, fourth | {"step": 3})
    assert fourth["scaler"]["scale"] == third["scaler"]["scale"] / 2
    for name, weight in fifth["model"].items():
        assert weight.isfinite().all() and not torch.equal(weight, fourth["model"][name])
