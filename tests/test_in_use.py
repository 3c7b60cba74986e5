"""What people expect of a trainer in use, and what public bug reports of others have broken."""

import numpy as np
import pytest
import torch
from harness import assert_same_state, launch, train
from PIL import Image
from tasks import QUICK, small, task_of
from test_bad_input import refuse_here

from examples.imagenet import Images, read_image
from train_distributed import Task, UserError, load_model, parse_config


def test_a_record_says_what_people_look_for(tmp_path):
    run = train(tmp_path / "run", 2, *QUICK, "--epochs=2", "--log-every-steps=1", **small())
    steps = run.records("train")
    first = steps[0]
    assert 0 <= first["data_wait"] <= 1 and first["seconds_left"] > 0 and first["gradient_norm"] > 0
    assert steps[-1]["seconds_left"] == 0
    for number, epoch in enumerate(run.records("epoch")):  # of its own steps
        losses = [step["loss"] for step in steps[3 * number : 3 * number + 3]]
        assert epoch["loss"] == pytest.approx(np.mean(losses))


GETS_BETTER_ONCE = """
best = "score"
best_is_lowest = False
calls = 0

def loss(self, model, batch):
    return super().loss(model, batch)[0], {"tested": not model.training}

def report(self, sums):
    values = super().report(sums)
    if sums["tested"]:
        self.calls += 1
        values["score"] = [5, 4, 6, 3, 2, 1, 0][self.calls - 1]
    return values
"""


def test_the_best_checkpoint_is_kept_and_patience_ends_the_training(tmp_path):
    options = [*QUICK, "--epochs=9", "--eval-every-steps=4", "--keep=1", "--patience=3"]
    run = train(tmp_path / "run", 2, *options, **small(GETS_BETTER_ONCE))
    assert [record["step"] for record in run.records("evaluation")] == [4, 8]
    assert run.checkpoint("best")["step"] == 6  # the third evaluation, of epoch 2
    assert run.status()["state"] == "finished" and run.status()["global_step"] == 12
    assert "no better score in 3 evaluations" in run.status()["reason"]
    assert run.saved() == [12]
    assert load_model(run.directory / "best.pt", named_task("Mine")).weight.shape == (1, 4)


def test_patience_without_a_test_set_is_refused(tmp_path, capfd):
    untested = task_of("def data(self, cfg): return [torch.ones(4)] * 32, None")
    assert "--patience" in refuse_here(
        capfd, tmp_path / "run", *QUICK, "--patience=3", task=untested
    )


def named_task(name: str):
    class Loaded(Task):
        def model(self, cfg):
            return torch.nn.Linear(4, 1)

    Loaded.__name__ = name
    return Loaded()


def test_a_resumed_run_still_knows_its_best_evaluation(tmp_path):
    """And evaluates a step again whose evaluation was not saved."""
    options = [*QUICK, "--epochs=6", "--patience=9", "--lr=0.01"]
    whole = train(tmp_path / "whole", 2, *options, **small())
    for stop in (2, 3, 5, 18):
        run = train(tmp_path / "run", 2, *options, f"--stop-at-step={stop}", **small())
    assert_same_state(run.newest(), whole.newest())
    assert run.newest()["best"] == whole.newest()["best"] != {}
    assert_same_state(run.checkpoint("best"), whole.checkpoint("best"))
    worse = small("def report(self, sums): return {'loss': 1e9}")
    train(tmp_path / "run", 2, *options, "--epochs=7", **worse)
    assert_same_state(run.checkpoint("best"), whole.checkpoint("best"))


def test_a_metric_that_is_nan_is_never_the_best_and_null_in_the_records(tmp_path):
    report = "def report(self, sums): return {'loss': np.nan}"
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=2", **small(report))
    assert not (run.directory / "best.pt").exists()
    text = (run.directory / "metrics.jsonl").read_text()
    assert "NaN" not in text and run.records("epoch")[0]["loss"] is None


def test_a_best_of_another_metric_is_not_compared(tmp_path):
    """Or every later score may be worse than one of another scale."""
    train(tmp_path / "run", 1, *QUICK, "--epochs=1", **small("best_is_lowest = True"))
    other = small(
        "best = 'skill'\nbest_is_lowest = False\n"
        "def report(self, sums): return super().report(sums) | {'skill': self.step - 100}"
    )
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=2", **other)
    assert run.checkpoint("best")["step"] == 12


FAILS_ONCE = """
from pathlib import Path
replace = Path.replace

def fails_once(path, target):
    if target.name == "best.pt":
        Path.replace = replace
        raise OSError(5, "Input/output error")
    return replace(path, target)

Path.replace = fails_once
"""


def test_a_checkpoint_that_could_not_be_kept_is_not_the_best(tmp_path):
    worse = """
loss_now = 0

def report(self, sums):
    self.loss_now += 1
    return {"loss": self.loss_now}
"""
    before = FAILS_ONCE + small(worse)["before"]
    run = launch(tmp_path / "run", 1, *QUICK, "--epochs=2", before=before)
    assert run.codes == [0] and "cannot keep the best checkpoint" in run.out[0]
    assert run.checkpoint("best")["step"] == 12


def test_a_task_without_the_metric_of_best_is_told_so(tmp_path):
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=1", **small("best = 'f1'"))
    assert "Task.best" in run.out[0]
    assert not (run.directory / "best.pt").exists()


def test_ranks_that_see_different_data_are_reported(tmp_path):
    fewer = """
def data(self, cfg):
    train_set, test_set = super().data(cfg)
    if os.environ["RANK"] == "1":
        train_set.tensors = [tensor[:40] for tensor in train_set.tensors]
    return train_set, test_set
"""
    run = launch(tmp_path / "run", 2, *QUICK, **small(fewer))
    assert run.codes[0] == 2 and "rank 1 " in run.err[0] and "[40, 16" in run.err[0]


FAILS = "import {0}\ndef fails(*_): raise OSError(38, 'Not implemented')\n{0}.{1} = fails\n"
# What there is: (code that makes it so, what is warned about).
SURROUNDINGS = {
    "output that nobody reads": ("import os; os.dup2(os.pipe()[1], 1)\n", ""),
    "no locks of files": (FAILS.format("fcntl", "flock"), "Not implemented"),
    "no hard links": (FAILS.format("os", "link"), ""),
    # That of a Slurm job that has ended, in whose tmux the training is started.
    "a time limit that is over": ("import os; os.environ['SLURM_JOB_END_TIME'] = '9'\n", ""),
    "a rank left over": ("import os; os.environ['RANK'] = '1'\n", ""),
}


@pytest.mark.parametrize("found", SURROUNDINGS)
def test_training_works_in_surroundings_that_are_odd(tmp_path, found):
    code, warning = SURROUNDINGS[found]
    if "nobody" in found:  # more lines than a pipe takes, and SIGTERM still counts
        code += "import fcntl; fcntl.fcntl(1, 1031, 4096)\n"
    options = [*QUICK, "--epochs=12", "--log-every-steps=1"]
    run = train(tmp_path / "run", 1, *options, before=code + small()["before"])
    assert run.status()["state"] == "finished" and run.checkpoint("best")["step"] > 0
    assert warning in run.out[0] and run.err == [""]


def test_a_picture_is_turned_as_a_viewer_shows_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # by 90 degrees
    half = np.zeros((40, 40, 3), np.uint8)
    half[:20] = 255  # its upper half is the right one
    Image.fromarray(half).save(tmp_path / "turned.png", exif=exif)
    turned = np.asarray(read_image(tmp_path / "turned.png"))
    assert (turned[:, 20:] == 255).all() and (turned[:, :20] == 0).all()


def test_models_of_torchvision_that_may_return_more_than_logits_train():
    task = Images()
    cfg = parse_config(["--synthetic", "--model=googlenet"], task)
    task.spec = {"classes": ["a", "b"]}
    model = task.model(cfg)
    images = torch.zeros(2, 3, 224, 224, dtype=torch.uint8)
    loss, _ = task.loss(model, [images, torch.tensor([0, 1])])
    assert loss.isfinite()
    for model, hint in (
        ("fcn_resnet50", "fcn_resnet50 is not"),
        ("resnet_50", "resnet_50 is not in torchvision"),
    ):
        cfg.model = model
        with pytest.raises(UserError, match=hint):
            task.model(cfg)


def test_random_numbers_of_an_evaluation_depend_on_the_sample_alone(tmp_path):
    drawn = """
def data(self, cfg):
    train_set, test_set = super().data(cfg)
    return list(zip(*train_set.tensors)), list(zip(*test_set.tensors))

def loss(self, model, batch):
    loss, _ = super().loss(model, batch)
    return loss, {"drawn": torch.rand(()) * (not model.training)}

def report(self, sums):
    return super().report(sums) | {"drawn": sums["drawn"]}
"""
    drawn_by = set()
    for ranks, workers in ((1, 0), (1, 1), (3, 0)):
        options = [*QUICK, "--batch-size=2", "--global-batch-size=6", "--epochs=1"]
        options += [f"--num-workers={workers}"]
        run = train(tmp_path / f"{ranks}{workers}", ranks, *options, **small(drawn))
        drawn_by.add(round(run.records("epoch")[0]["test_drawn"], 5))
    assert len(drawn_by) == 1


def test_a_task_chooses_how_ddp_wraps_its_loss(tmp_path):
    methods = """
def model(self, cfg):
    model = torch.nn.Linear(4, 1)
    model.unused = torch.nn.Parameter(torch.ones(3))
    return model

def wrap(self, loss):
    return torch.nn.parallel.DistributedDataParallel(loss, static_graph=True)
"""
    run = train(tmp_path / "run", 2, *QUICK, "--epochs=1", "--optimizer=adamw", **small(methods))
    assert run.newest()["model"]["unused"].tolist() == pytest.approx([1, 1, 1], abs=1e-2)


COMPLEX = """
def optimizer(self, cfg, model):
    return torch.optim.SGD(model.parameters(), cfg.lr, momentum=0.9)

def model(self, cfg):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.complex64))
    return model

def loss(self, model, batch):
    x, y = batch
    outputs = x.to(torch.complex64) @ model.weight
    return (outputs - 1j * y).abs().square().mean(), {}
"""


def test_complex_weights_train_alike_on_any_number_of_ranks_or_are_refused(tmp_path, capfd):
    """The outputs should be imaginary: a gradient without its imaginary part learns nothing."""
    options = [*QUICK, "--global-batch-size=16", "--epochs=20", "--lr=0.1"]
    one = train(tmp_path / "one", 1, *options, **small(COMPLEX))
    two = train(tmp_path / "two", 2, *options, **small(COMPLEX))
    assert one.records("epoch")[-1]["test_loss"] < 1e-2
    assert torch.allclose(one.newest()["model"]["weight"], two.newest()["model"]["weight"])
    task = task_of(COMPLEX)
    assert "complex" in refuse_here(capfd, tmp_path / "no", *options, "--reproducible", task=task)
