"""Gradients that are not finite: the step is left out on all ranks alike; too many end the run."""

import json

import pytest
import torch
from harness import assert_same_state, launch, train

# At the micro-batch that is the fifth on this rank, the images of one rank are NaN.
BROKEN = """if True:
    import os
    import torch
    import train_distributed

    def prepare(*arguments, inner=train_distributed.prepare, calls=[]):
        calls.append(1)
        images = inner(*arguments)
        if os.environ.get("RANK", "0") == "WHERE" and len(calls) in (STEPS):
            images = images * float("nan")
        return images

    train_distributed.prepare = prepare
"""


def broken(rank: int, *steps: int) -> str:
    return BROKEN.replace("WHERE", str(rank)).replace(
        "STEPS", "".join(f"{step}," for step in steps)
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_with_nan_on_one_rank_is_left_out_on_all(tmp_path, tiny, ranks, optimizer):
    options = [*tiny, "--epochs=1", f"--optimizer={optimizer}", "--keep=0"]
    ends = []
    for rank in {0, ranks - 1}:
        directory = tmp_path / f"run{rank}"
        before = {"before": broken(rank, 5)}
        run = train(directory, ranks, *options, "--checkpoint-every-steps=1", **before)
        assert "left out 1 step before step 5: NaN or infinite gradients" in run.err[0]
        was, then = (run.checkpoint(f"checkpoint_step_{step}") for step in (4, 6))
        assert not (directory / "checkpoint_step_5.pt").exists()  # not while it is unclear
        assert any(not torch.equal(was["model"][n], then["model"][n]) for n in was["model"])
        ends.append(run.checkpoint("checkpoint_epoch_1"))
        assert all(value.isfinite().all() for value in ends[-1]["model"].values())
        record = run.records("train")[4]
        assert record["loss"] is None if ranks == 1 else record["loss"] > 0  # of the others
    assert_same_state(ends[0], ends[-1])  # it does not matter where the NaN was


def test_nan_for_too_long_ends_the_run_before_it_saves(tmp_path, tiny):
    more = ["--epochs=2", "--checkpoint-every-steps=2", "--max-bad-steps=3"]
    run = launch(tmp_path / "run", 2, *tiny, *more, before=broken(1, *range(7, 100)))
    assert run.codes[0] == 2
    assert "3 steps in a row up to step 9 had NaN or infinite gradients: lower --lr" in run.err[0]
    assert "Traceback" not in run.err[0]
    steps = {
        json.loads(file.read_text())["step"] for file in run.directory.glob("checkpoint_*.json")
    }
    assert max(steps) == 6
    assert all(v.isfinite().all() for v in run.checkpoint("checkpoint_step_6")["model"].values())


def test_a_learning_rate_that_explodes_is_told_and_no_good_checkpoint_is_lost(tmp_path, tiny):
    train(tmp_path / "run", 2, *tiny, "--epochs=1")
    file = tmp_path / "failure"
    options = [*tiny, "--epochs=50", "--lr=1e18", "--warmup-epochs=0", "--lr-schedule=constant"]
    run = launch(tmp_path / "run", 2, *options, env={"FAILURE_FILE": str(file)})
    assert run.codes[0] == 2
    assert json.loads(file.read_text())["cause"] == "NaN"
    assert all(v.isfinite().all() for v in run.checkpoint("checkpoint_epoch_1")["model"].values())
    assert not (run.directory / "checkpoint_epoch_2.pt").exists()


POISON = """if True:
    import train_distributed

    def train_step(run, batches, step, global_step, *more, inner=train_distributed.train_step):
        waited = inner(run, batches, step, global_step, *more)
        if global_step + 1 == 6:
            run.model.fc2.bias.data[0] = float("inf")
        return waited

    train_distributed.train_step = train_step
"""


def test_weights_that_are_not_finite_are_never_saved(tmp_path, tiny):
    options = [*tiny, "--epochs=2", "--checkpoint-every-steps=3"]
    run = launch(tmp_path / "run", 1, *options, before=POISON)
    assert run.codes == [2]
    told = "error: at step 6 the weights are not finite: not saved. Lower --lr?"
    assert told in run.err[0]
    assert {path.stem for path in run.directory.glob("*.pt")} == {"checkpoint_step_3"}
