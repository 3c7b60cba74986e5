"""What people expect of a trainer in use, and what public bug reports of others have broken."""

import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tasks
import torch
from harness import REPO, assert_same_state, launch, train, wait_until
from PIL import Image
from tasks import QUICK, small, task_of
from test_bad_input import refuse, refuse_here

import train_distributed
from examples.imagenet import Images, image_folders
from train_distributed import Task, UserError, load_model, parse_config


def test_a_record_says_what_people_look_for(tmp_path):
    run = train(tmp_path / "run", 2, *QUICK, "--epochs=2", "--log-every-steps=1", **small())
    steps = run.records("train")
    first = steps[0]
    assert 0 <= first["data_wait"] <= 1 and first["seconds_left"] > 0 and first["gradient_norm"] > 0
    assert steps[-1]["seconds_left"] == run.status()["seconds_left"] == 0
    assert " left, ends about " in run.out[0] and "epoch 1.00, " in run.out[0]
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
    assert run.checkpoint("best")["state"]["step"] == 6  # the third evaluation, of epoch 2
    assert run.status()["state"] == "finished" and run.status()["global_step"] == 12
    assert "no better score in 3 evaluations" in run.status()["reason"]
    assert run.checkpoints() == {"checkpoint_epoch_4"}
    assert load_model(run.directory / "best.pt", named_task("Mine")).weight.shape == (1, 4)


def test_patience_without_a_test_set_is_refused(tmp_path, capfd):
    untested = task_of("def data(self, cfg): return [torch.ones(4)] * 32, None")
    message = refuse_here(capfd, tmp_path / "run", *QUICK, "--patience=3", task=untested)
    assert message.startswith("--patience: there is no test set")


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
    best = run.newest()["state"]["best_score"]
    assert best == whole.newest()["state"]["best_score"] > -math.inf
    assert_same_state(run.checkpoint("best"), whole.checkpoint("best"))
    worse = small("def report(self, sums): return {'loss': 1e9}")
    train(tmp_path / "run", 2, *options, "--epochs=7", **worse)
    assert_same_state(run.checkpoint("best"), whole.checkpoint("best"))


def test_a_task_can_end_the_training_after_an_evaluation_which_may_be_its_best(tmp_path):
    good = "def after_evaluation(self, values): return values['loss'] < 1e9"
    run = train(tmp_path / "run", 2, *QUICK, "--epochs=5", **small(good))
    assert run.status()["state"] == "finished" and run.status()["global_step"] == 3
    assert_same_state(run.checkpoint("best"), run.newest())


def test_a_metric_that_is_nan_is_never_the_best_and_null_in_the_records(tmp_path):
    report = "def report(self, sums): return {'loss': np.nan}"
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=2", **small(report))
    assert run.newest()["state"]["best_score"] == -math.inf
    assert not (run.directory / "best.pt").exists()
    text = (run.directory / "metrics.jsonl").read_text()
    assert "NaN" not in text and run.records("epoch")[0]["loss"] is None


def test_best_is_kept_in_the_directory_in_which_a_run_goes_on(tmp_path):
    """Although the directory in which it began has a better one."""
    first = train(tmp_path / "first", 1, *QUICK, "--epochs=2", **small())
    checkpoint = first.directory / "checkpoint_epoch_2.pt"
    resume = [f"--resume={checkpoint}", "--epochs=3"]
    worse = small("def report(self, sums): return {'loss': 1e9}")
    second = train(tmp_path / "second", 1, *QUICK, *resume, **worse)
    assert second.checkpoint("best")["state"]["step"] == 12


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
    assert run.codes == [0] and "cannot keep the best checkpoint" in run.err[0]
    assert run.checkpoint("best")["state"]["step"] == 12


def test_a_task_without_the_metric_of_best_is_told_so(tmp_path):
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=1", **small("best = 'f1'"))
    assert "Task.best" in run.out[0]
    assert not (run.directory / "best.pt").exists()


def test_what_ran_is_recorded_and_a_change_is_reported(tmp_path):
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=1", **small())
    code = run.newest()["code"]
    assert "train_distributed.py " in code and f"Code: {code}\n" in run.out[0]
    assert (run.directory / "config.yaml").read_text().startswith(f"# {code}\n")
    changed = "import train_distributed; train_distributed.code_version = lambda: 'other'\n"
    before = {"before": changed + small()["before"]}
    again = train(tmp_path / "run", 1, *QUICK, "--epochs=2", **before)
    assert f"Changed since the checkpoint: code {code} -> other\n" in again.out[0]


def test_numbers_of_numpy_are_saved_and_resumed(tmp_path):
    methods = """
def optimizer(self, cfg, model):
    rates = np.geomspace(0.01, 0.1, 2)
    pairs = zip(rates, model.parameters())
    return torch.optim.SGD([{"params": [p], "lr": rate} for rate, p in pairs], momentum=0.9)

def lr_factor(self, cfg, step, total_steps):
    return np.cos(step / total_steps)

def report(self, sums):
    return {"loss": torch.tensor(sums["loss"] / sums["count"]), "one": np.float32(1)}
"""
    options = [*QUICK, "--epochs=2"]
    whole = train(tmp_path / "whole", 1, *options, **small(methods))
    train(tmp_path / "run", 1, *options, "--stop-at-step=4", **small(methods))
    run = train(tmp_path / "run", 1, *options, **small(methods))
    assert_same_state(run.newest(), whole.newest())
    assert run.records("epoch")[-1]["test_one"] == 1.0


def test_ranks_that_see_different_data_are_reported(tmp_path):
    fewer = """
def data(self, cfg):
    train_set, test_set = super().data(cfg)
    if os.environ["RANK"] == "1":
        train_set.tensors = [tensor[:40] for tensor in train_set.tensors]
    return train_set, test_set
"""
    message = refuse(tmp_path / "run", *QUICK, ranks=2, **small(fewer))
    assert "rank 1 " in message and "[40, 16]" in message and "[48, 16]" in message
    names = "def data(self, cfg): self.spec = {'r': os.environ['RANK']}; return super().data(cfg)"
    assert "Task.spec" in refuse(tmp_path / "run", *QUICK, ranks=2, **small(names))


REPLACED_OUTPUT = """
import sys

class Lines:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self.stream.write(text)

    def flush(self):
        self.stream.flush()

sys.stdout, sys.stderr = Lines(sys.stdout), Lines(sys.stderr)
"""
FAILS = "import {0}\ndef fails(*_): raise OSError(38, 'Not implemented')\n{0}.{1} = fails\n"
# What there is: (code that makes it so, what is warned about).
SURROUNDINGS = {
    "output to an object that is no file": (REPLACED_OUTPUT, ""),
    "output that takes ASCII only": ("import sys; sys.stdout.reconfigure(encoding='ascii')\n", ""),
    "no locks of files": (FAILS.format("fcntl", "flock"), "Not implemented"),
    "no hard links": (FAILS.format("os", "link"), ""),
    # That of a Slurm job that has ended, in whose tmux the training is started.
    "a time limit that is over": ("import os; os.environ['SLURM_JOB_END_TIME'] = '9'\n", "is over"),
}


@pytest.mark.parametrize("found", SURROUNDINGS)
def test_training_works_in_surroundings_that_are_odd(tmp_path, found):
    code, warning = SURROUNDINGS[found]
    named = small("def report(self, sums): return super().report(sums) | {'\\u00e9': 2}")
    run = train(tmp_path / "run", 2, *QUICK, "--epochs=1", before=code + named["before"])
    assert run.status()["state"] == "finished" and run.checkpoint("best")["state"]["step"] == 3
    assert ("\\xe9 2" if "ASCII" in found else "\u00e9 2") in run.out[0]
    assert warning in run.err[0] if warning else run.err == ["", ""]


def test_home_and_variables_are_replaced_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    monkeypatch.setenv("SCRATCH", "/scratch")
    file = tmp_path / "options.yaml"
    file.write_text("data_dir: $SCRATCH/data\ncheckpoint_dir: ~/runs\n")
    cfg = parse_config([f"--config={file}", "--init=~/one.pt"])
    paths = (cfg.data_dir, cfg.checkpoint_dir, cfg.init)
    assert paths == ("/scratch/data", "/home/jane/runs", "/home/jane/one.pt")
    with pytest.raises(UserError, match="--data-dir: invalid path value: '.ABSENT/data'"):
        parse_config(["--data-dir=$ABSENT/data"])


def test_pictures_are_read_as_a_viewer_shows_them(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        gray = np.full((40, 40), 32768, np.uint16)
        Image.fromarray(gray).save(tmp_path / part / "a" / "gray.png")
        exif = Image.Exif()
        exif[0x0112] = 6  # turned by 90 degrees
        half = np.zeros((40, 40, 3), np.uint8)
        half[:20] = 255  # its upper half is the right one
        Image.fromarray(half).save(tmp_path / part / "a" / "turned.png", exif=exif)
    _, test_set = image_folders(tmp_path, 32)
    gray, turned = test_set[0][0], test_set[1][0]
    assert gray.float().mean() == 128
    assert turned[0, 16, 28] == 255 and turned[0, 16, 4] == 0
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "val" / "b").mkdir()
    for folder in ("train/.ipynb_checkpoints", "val/b"):
        Image.fromarray(half).save(tmp_path / folder / "1.png")
    with pytest.raises(UserError, match=".ipynb_checkpoints"):
        image_folders(tmp_path, 32)


def test_a_picture_that_is_too_large_is_named(tmp_path, monkeypatch):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(np.zeros((40, 40), np.uint8)).save(tmp_path / part / "a" / "large.png")
    options = [f"--data-dir={tmp_path}", "--batch-size=1"]
    small_limit = "from PIL import Image; Image.MAX_IMAGE_PIXELS = 100"
    more = {"before": small_limit, "task": tasks.Photos}
    message = refuse(tmp_path / "run", *options, "--num-workers=1", **more)
    assert "train/a/large.png" in message


def test_models_of_torchvision_that_may_return_more_than_logits_train():
    task = Images()
    cfg = parse_config(["--synthetic", "--model=googlenet"], task)
    task.spec = {"classes": ["a", "b"]}
    model = task.model(cfg)
    images = torch.zeros(2, 3, 224, 224, dtype=torch.uint8)
    loss, _ = task.loss(model, [images, torch.tensor([0, 1])])
    assert loss.isfinite()
    for model, hint in (("fcn_resnet50", "fcn_resnet50 is not"), ("resnet_50", "did you mean")):
        cfg.model = model
        with pytest.raises(UserError, match=hint):
            task.model(cfg)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_cannot_be_stacked_are_a_user_error(tmp_path, workers):
    ragged = """
def data(self, cfg):
    samples = [(torch.zeros(1 + i % 3), 0) for i in range(32)]
    return samples, None
"""
    message = refuse(tmp_path / "run", *QUICK, f"--num-workers={workers}", **small(ragged))
    assert "collate_fn" in message


def test_a_long_tmpdir_is_refused_before_workers_hang(tmp_path):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    listed = "def data(self, cfg): return [(torch.ones(4), torch.ones(1))] * 32, None"
    before = f"import tempfile; tempfile.tempdir = {str(long)!r}\n" + small(listed)["before"]
    message = refuse(tmp_path / "run", *QUICK, "--num-workers=1", before=before)
    assert "TMPDIR" in message


def test_without_the_environment_one_sentence_says_so(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError(\"No module named 'numpy'\")\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, REPO / "train_distributed.py", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "numpy" in done.stderr and "activate the environment" in done.stderr


def change_weight(content):
    content["model"]["weight"][0, 0] += 1


def flip_one_bit_of_the_optimizer(content):
    content["optimizer"]["state"][0]["momentum_buffer"].view(torch.int32)[0, 0] ^= 1 << 29


@pytest.mark.parametrize("damage", [change_weight, flip_one_bit_of_the_optimizer])
def test_a_damaged_tensor_is_not_used(tmp_path, damage):
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=1", **small())
    path = run.directory / "checkpoint_epoch_1.pt"
    content = torch.load(path)
    damage(content)
    torch.save(content, path)
    cfg = parse_config([f"--init={path}", f"--checkpoint-dir={run.directory}"])
    resumed_elsewhere = parse_config([f"--resume={path}", f"--checkpoint-dir={tmp_path}"])
    for use in (
        lambda: load_model(path, named_task("Mine")),
        lambda: parse_config([f"--evaluate={path}"]),
        lambda: train_distributed.load_initial_weights(cfg, torch.nn.Linear(4, 1)),
        lambda: train_distributed.find_checkpoint(cfg),  # it does not start over
        lambda: train_distributed.find_checkpoint(resumed_elsewhere),
    ):
        with pytest.raises(UserError, match="damaged|no intact"):
            use()


def test_the_optimizer_of_a_run_is_not_given_to_other_parameters(tmp_path):
    layers = """
def model(self, cfg):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    if "FROZEN" in os.environ:
        model[0].requires_grad_(False)
    return model
"""
    train(tmp_path / "run", 1, *QUICK, "--epochs=1", **small(layers))
    options = [*QUICK, "--epochs=2"]
    run = launch(tmp_path / "run", 1, *options, env={"FROZEN": "1"}, **small(layers))
    assert "doesn't match the size of optimizer's group" in run.err[0]


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


@pytest.mark.parametrize("options", ["static_graph=True", "find_unused_parameters=True"])
def test_a_task_chooses_how_ddp_wraps_its_loss(tmp_path, options):
    methods = f"""
def model(self, cfg):
    model = torch.nn.Linear(4, 1)
    model.unused = torch.nn.Parameter(torch.ones(3))
    return model

def wrap(self, loss):
    return torch.nn.parallel.DistributedDataParallel(loss, {options})
"""
    run = train(tmp_path / "run", 2, *QUICK, "--epochs=1", "--optimizer=adamw", **small(methods))
    assert run.newest()["model"]["unused"].tolist() == pytest.approx([1, 1, 1], abs=1e-2)


def test_newest_means_the_step_not_the_time_of_the_file(tmp_path):
    """The clock was set back."""
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=2", "--keep=2", **small())
    for epoch in (1, 2):
        os.utime(run.directory / f"checkpoint_epoch_{epoch}.pt", (2e9 - epoch, 2e9 - epoch))
    run = train(tmp_path / "run", 1, *QUICK, "--epochs=3", "--keep=2", **small())
    assert "checkpoint_epoch_2.pt at step 12" in run.out[0]
    assert "checkpoint_epoch_3" in run.checkpoints()


def test_a_copy_of_the_file_outside_of_a_repository_has_no_commit(tmp_path, monkeypatch):
    copy = tmp_path / "copy.py"
    copy.write_bytes((REPO / "train_distributed.py").read_bytes())
    for module in (train_distributed, sys.modules["__main__"]):
        monkeypatch.setattr(module, "__file__", str(copy))
    assert re.fullmatch(r"copy.py \w{8}", train_distributed.code_version())


COMPLEX = """
def model(self, cfg):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.complex64))
    return model

def loss(self, model, batch):
    x, y = batch
    outputs = x.to(torch.complex64) @ model.weight
    return (outputs - 1j * y).abs().square().mean(), {}
"""


@pytest.mark.parametrize("options", [[], ["--reproducible"]], ids=["ddp", "reproducible"])
def test_complex_weights_train_alike_on_any_number_of_ranks(tmp_path, options):
    """The outputs should be imaginary: a gradient without its imaginary part learns nothing."""
    options = [*QUICK, "--global-batch-size=16", "--epochs=20", "--lr=0.1", *options]
    one = train(tmp_path / "one", 1, *options, **small(COMPLEX))
    two = train(tmp_path / "two", 2, *options, **small(COMPLEX))
    assert one.records("epoch")[-1]["test_loss"] < 1e-2
    assert torch.allclose(one.newest()["model"]["weight"], two.newest()["model"]["weight"])


# A dead file server, for example.
STUCK = """
def data(self, cfg):
    class Stuck(list):
        def __getitem__(self, index):
            import time
            with open(f"{cfg.checkpoint_dir}/reader", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(1000)

    samples = Stuck([0] * 64)
    if "WHERE" == "data":
        samples[0]
    return samples, None
"""


def test_reading_that_never_returns_ends_with_the_stacks_and_all_processes(tmp_path):
    """In data(), for a sample, and for a sample in a loader worker; all at the same time."""

    def run(where: str):
        options = [*QUICK, f"--num-workers={int(where == 'worker')}", "--hang-timeout=15"]
        return launch(tmp_path / where, 2, *options, **small(STUCK.replace("WHERE", where)))

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(run, ["data", "sample", "worker"]))
    stuck_in = ["in __getitem__", "in __getitem__", "dataloader.py"]
    for result, place in zip(results, stuck_in, strict=True):
        assert result.codes == [1, 1] and place in result.err[0], result.directory
        reader = Path("/proc") / (result.directory / "reader").read_text()
        wait_until(lambda reader=reader: not reader.exists(), "it still reads", seconds=20)
