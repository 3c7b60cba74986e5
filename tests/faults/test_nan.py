"""Gradients that are not finite: all ranks skip the step; too many end the run."""

import pytest
import torch
from harness import assert_same_state, launch, train

# In some steps, the loss of one rank's last micro-batch is NaN.
BROKEN = """if True:
    import os
    import train_distributed

    def compute_loss(run, *arguments, inner=train_distributed.compute_loss):
        loss_sum, logits, labels = inner(run, *arguments)
        if os.environ.get("RANK", "0") == "{rank}" and run.global_step + 1 in {steps}:
            loss_sum = loss_sum * float("nan")
        return loss_sum, logits, labels

    train_distributed.compute_loss = compute_loss
"""


@pytest.mark.parametrize("optimizer, mode", [("sgd", "--reproducible"), ("adamw", "--amp=off")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_skip_a_step_with_nan_on_one_rank(tmp_path, tiny, ranks, optimizer, mode):
    options = [*tiny, "--epochs=1", f"--optimizer={optimizer}", mode, "--keep=100"]
    ends = []
    for rank in {0, ranks - 1}:
        before = BROKEN.format(rank=rank, steps=[5])
        more = [*options, "--checkpoint-every-steps=1", "--stop-at-step=7"]
        run = train(tmp_path / f"run{rank}", ranks, *more, before=before)
        states = [run.checkpoint(f"checkpoint_step_{step}") for step in (4, 5, 6)]
        assert states[1]["global_step"] == 5
        assert_same_state(states[0], states[1] | {"global_step": 4})
        weights = [state["model"] for state in states]
        assert any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
        ends.append(run.checkpoint("checkpoint_step_7"))
        assert all(value.isfinite().all() for value in ends[-1]["model"].values())
        assert (
            run.records("train")[4]["loss"] == 0
            if ranks == 1
            else 0 < run.records("train")[4]["loss"]
        )
    assert_same_state(ends[0], ends[-1])  # it does not matter where the NaN was


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_first_step_with_nan_leaves_the_momentum_at_zero(tmp_path, tiny, ranks):
    options = [*tiny, "--epochs=1", "--checkpoint-every-steps=1", "--stop-at-step=3", "--keep=9"]
    run = train(tmp_path / "run", ranks, *options, before=BROKEN.format(rank=0, steps=[1]))
    state = run.checkpoint("checkpoint_step_1")["optimizer"]["state"]
    assert not any(values["momentum_buffer"].any() for values in state.values())
    model = run.checkpoint("checkpoint_step_3")["model"]
    assert all(weights.abs().max() < 1 for weights in model.values())


def test_nan_for_too_long_ends_the_run_and_what_was_saved_is_finite(tmp_path, tiny):
    more = ["--epochs=9", "--checkpoint-every-steps=2", "--keep=100"]
    before = BROKEN.format(rank=1, steps=list(range(7, 100)))
    run = launch(tmp_path / "run", 2, *tiny, *more, before=before)
    assert run.codes[0] == 2
    assert "error: gradients are often not finite: lower --lr or set " in run.err[0]
    assert "Traceback" not in run.err[0] and run.err[1] == ""
    for name in run.checkpoints():
        assert all(value.isfinite().all() for value in run.checkpoint(name)["model"].values())


def test_a_learning_rate_that_explodes_is_named_and_no_good_checkpoint_is_lost(tmp_path, tiny):
    train(tmp_path / "run", 2, *tiny, "--epochs=1")
    options = [*tiny, "--epochs=50", "--lr=1e18", "--warmup-epochs=0"]
    run = launch(tmp_path / "run", 2, *options)
    assert run.codes[0] == 2 and "lower --lr" in run.err[0] and "Traceback" not in run.err[0]
    assert run.checkpoints() == {"checkpoint_epoch_1"}
    assert all(v.isfinite().all() for v in run.checkpoint("checkpoint_epoch_1")["model"].values())


POISON = """if True:
    import train_distributed

    def train_step(run, *arguments, inner=train_distributed.train_step):
        inner(run, *arguments)
        if run.global_step == 6:
            next(run.model.parameters()).data[0] = float("inf")

    train_distributed.train_step = train_step
"""


def test_weights_that_are_not_finite_are_never_saved(tmp_path, tiny):
    options = [*tiny, "--epochs=2", "--checkpoint-every-steps=3"]
    run = launch(tmp_path / "run", 1, *options, before=POISON)
    assert run.codes == [2]
    error = "error: checkpoint_step_6 not saved: the weights are not finite; lower --lr\n"
    assert error in run.err[0]
    assert run.checkpoints() == {"checkpoint_step_3"}
