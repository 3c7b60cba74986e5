"""Gradients that are not finite: all ranks skip the step; too many end the run."""

import pytest
import torch
from harness import assert_same_state, launch, train

# In some steps, the loss of one rank's last micro-batch is NaN.
BROKEN = """if True:
    import os
    import train_distributed

    step = [0]

    def train_step(run, *arguments, inner=train_distributed.train_step):
        step[0] = run.state.step + 1
        inner(run, *arguments)
        step[0] = 0

    def losses(self, model, batch, inner=train_distributed.Task.losses):
        values = inner(self, model, batch)
        if os.environ.get("RANK", "0") == "{rank}" and step[0] in {steps}:
            values["loss"] = values["loss"] * float("nan")
        return values

    train_distributed.train_step = train_step
    train_distributed.Task.losses = losses
"""


@pytest.mark.parametrize(
    "ranks, optimizer, mode", [(3, "sgd", "--reproducible"), (1, "adamw", "--amp=off")]
)
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
        warnings = run.err[0].splitlines()
        assert "WARNING: 1 values of loss were not finite and count as 0" in warnings
        assert "WARNING: 1 steps skipped: their gradients were not finite" in warnings
        assert len(warnings) == 2
    assert_same_state(ends[0], ends[-1])  # it does not matter where the NaN was


def test_a_first_step_with_nan_leaves_the_momentum_at_zero(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--checkpoint-every-steps=1", "--stop-at-step=3", "--keep=9"]
    run = train(tmp_path / "run", 2, *options, before=BROKEN.format(rank=0, steps=[1]))
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
        if run.state.step == 5:
            next(run.learner.model.parameters()).data[0] = float("inf")

    train_distributed.train_step = train_step
"""


def test_weights_that_are_not_finite_are_never_saved(tmp_path, tiny):
    options = [*tiny, "--epochs=2", "--checkpoint-every-steps=3"]
    run = launch(tmp_path / "run", 1, *options, before=POISON)
    assert run.codes == [2]
    error = "error: checkpoint_step_6 not saved: the weights are not finite; lower --lr\n"
    assert error in run.err[0]
    assert run.checkpoints() == {"checkpoint_step_3"}


def test_rare_skipped_steps_do_not_end_a_run_however_many_there_are(tmp_path, tiny):
    before = BROKEN.format(rank=0, steps=list(range(2, 60, 2)))
    run = train(tmp_path / "run", 1, *tiny, "--stop-at-step=52", before=before)
    assert run.err[0].count("WARNING: 1 steps skipped: ") == 26


MASKED_MODEL = """if True:
    import torch
    import train_distributed as trainer

    class WithMask(trainer.Task):
        def model(self, cfg):
            model = super().model(cfg)
            model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
            model.register_module("extra", WithState())
            return model

    class WithState(torch.nn.Module):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            assert state == {"version": 3}

    task = WithMask()
"""


def test_a_model_with_an_infinite_mask_and_with_extra_state_is_saved_and_resumed(tmp_path, tiny):
    train(tmp_path / "run", 2, *tiny, "--stop-at-step=4", before=MASKED_MODEL)
    train(tmp_path / "run", 2, *tiny, "--stop-at-step=6", before=MASKED_MODEL)
