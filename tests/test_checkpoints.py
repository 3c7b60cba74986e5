"""Damaged checkpoints are named and skipped; nothing that was saved is lost."""

import fcntl
import os
import shutil

import pytest
import torch
from harness import (
    FOREVER,
    assert_same_state,
    launch,
    train,
    wait_for_step,
    wait_until,
)
from tasks import small
from test_bad_input import refuse_here

import train_distributed as trainer


def damage(path):
    """Flip a bit in a weight: PyTorch loads the file without an error."""
    content = bytearray(path.read_bytes())
    weight = torch.load(path)["model"]["network.fc1.weight"].numpy().tobytes()
    content[content.index(weight) + 1000] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("straight") / "run", 2, *tiny, "--epochs=3")


def test_the_newest_intact_checkpoint_is_used_and_the_run_ends_the_same(tmp_path, tiny, straight):
    """The highest step, whatever the clock of the file system says.

    faults/test_damage.py tries other kinds of damage.
    """
    options = [*tiny, "--epochs=3", "--checkpoint-every-steps=6", "--keep=9"]
    result = train(tmp_path / "run", 2, *options, "--stop-at-step=24")
    run = result.directory
    for step in result.saved():
        os.utime(run / f"checkpoint_step_{step}.pt", (2e9 - step, 2e9 - step))
    damage(run / "checkpoint_step_24.pt")
    cut_off = run / "checkpoint_step_18.pt"
    cut_off.write_bytes(cut_off.read_bytes()[:-1000])
    result = train(run, 2, *options)
    lines = [line for line in result.out[0].splitlines() if line.startswith("WARNING: ")]
    for line, step in zip(lines, (24, 18), strict=True):
        assert f"checkpoint_step_{step}.pt" in line
        assert (run / f"checkpoint_step_{step}.pt.damaged").exists()
    assert result.status()["start_step"] == 13
    assert_same_state(result.newest(), straight.newest())


def test_best_alone_is_resumed_and_checkpoints_of_before_do_not_start_again(tmp_path, capfd):
    options = ["--batch-size=8", "--epochs=1"]
    run = train(tmp_path / "run", 1, *options, **small())
    best = run.checkpoint("best")
    newest = run.directory / "checkpoint_step_6.pt"
    newest.unlink()
    again = train(tmp_path / "run", 1, *options, "--total-steps=7", **small())
    assert again.status()["start_step"] == best["step"] == 6
    (tmp_path / "old").mkdir()
    (run.directory / "checkpoint_step_7.pt").rename(tmp_path / "old/checkpoint_epoch_1.pt")
    refuse_here(capfd, tmp_path / "old", "--batch-size=8")
    assert not list((tmp_path / "old").glob("checkpoint_step_*"))


def test_a_copy_of_a_checkpoint_under_another_name_is_left_alone(tmp_path):
    options = ["--batch-size=8", "--checkpoint-every-steps=3", "--keep=1"]
    run = train(tmp_path / "run", 1, *options, "--stop-at-step=3", **small())
    copy = run.directory / "checkpoint_step_3_good.pt"
    shutil.copy(run.directory / "checkpoint_step_3.pt", copy)
    train(tmp_path / "run", 1, *options, "--stop-at-step=5", **small())
    names = {path.name for path in run.directory.glob("checkpoint_*")}
    assert names == {"checkpoint_step_5.pt", copy.name}


@pytest.mark.parametrize("way", ["file", "clock"])
def test_a_file_save_or_the_clock_saves_and_training_continues(tmp_path, tiny, way):
    run = tmp_path / "run"

    def save_then_stop(processes):
        wait_for_step(run, 5)
        if way == "file":
            (run / "SAVE").touch()
            wait_until(lambda: not (run / "SAVE").exists(), "nothing was saved")
        wait_until(lambda: any(run.glob("checkpoint_step_*.pt")), "nothing was saved")
        (run / "STOP").touch()

    options = [FOREVER, "--keep=99"] + ["--save-minutes=0.001"] * (way == "clock")
    result = train(run, 2, *tiny, *options, "--eval-every-epochs=0", during=save_then_stop)
    first, *_, last = result.saved()
    assert first < last == result.status()["saved_step"]
    assert result.status()["reason"] == "STOP file"


FAILING_DISK = """if True:
    import os
    failures = [1] * {count}

    def fsync(file, inner=os.fsync):
        name = os.readlink(f"/proc/self/fd/{{file}}")
        if failures and os.path.getsize(name) > 100_000:  # a checkpoint
            failures.pop()
            raise OSError(28, "No space left on device")
        inner(file)

    os.fsync = fsync
"""


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_save_is_a_warning_once_and_an_error_the_second_time(tmp_path, tiny, failures):
    """A request to stop that could not be honored is not forgotten."""
    options = [*tiny, "--checkpoint-every-steps=5", "--keep=1"]
    train(tmp_path / "run", 1, *options, "--stop-at-step=5")
    before = FAILING_DISK.format(count=failures)
    run = launch(tmp_path / "run", 1, *options, "--stop-at-step=18", before=before)
    (warning,) = [line for line in run.out[0].splitlines() if line.startswith("WARNING: ")]
    assert "No space left on device" in warning
    if failures == 1:
        assert (run.codes, run.err[0], run.saved()) == ([0], "", [18])
    else:
        (error,) = run.err[0].splitlines()
        assert (run.codes, run.saved()) == ([2], [5])
        assert ": error: " in error and "No space left on device" in error
        (run.directory / "STOP").touch()
        again = launch(tmp_path / "run", 1, *options, before=FAILING_DISK.format(count=9))
        assert again.codes == [2] and (run.directory / "STOP").exists()
    assert {path.suffix for path in run.directory.glob(".*")} == set(), "a temporary file is left"


def test_a_full_disk_is_found_before_the_first_step(tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(trainer.UserError, match="No space left"):
        trainer.lock_directory(trainer.parse_config([f"--checkpoint-dir={tmp_path}"]))
    trainer.write_text(tmp_path / "config.yaml", "epochs: 1")  # of less importance
    assert "WARNING: cannot write" in capfd.readouterr().out


RUINED = """
def model(self, cfg):
    model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
    model.mask = torch.nn.Buffer(torch.full((2, 2), float("-inf")).triu(1))
    model.unused = torch.nn.Parameter(torch.ones(3))
    return model

def loss(self, model, batch):
    if self.step == 7:
        model.{}.data.view(-1)[0] = float("{}")
    return super().loss(model, batch)
"""


@pytest.mark.parametrize(
    ("name", "value"), [("unused", "inf"), ("unused", "nan"), ("[1].running_mean", "nan")]
)
def test_weights_and_buffers_that_are_not_finite_are_never_saved(tmp_path, name, value):
    """But a mask that is made of -inf."""
    code = RUINED.format(name, value).replace("model.[", "model[")
    options = ["--batch-size=8", "--checkpoint-every-steps=5", "--epochs=3"]
    run = launch(tmp_path / "run", 1, *options, **small(code))
    assert run.codes == [2] and run.saved()[-1] < 8
    assert "not finite" in run.err[0] and name.strip("[1].") in run.err[0]
    assert run.status()["state"] == "failed"


def test_a_second_process_waits_for_the_lock_and_then_names_its_owner(tmp_path, monkeypatch, capfd):
    """A node that has died may hold it for two minutes: exit code 1, after which others retry."""
    cfg = trainer.parse_config([f"--checkpoint-dir={tmp_path}"])
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    with open(tmp_path / "lock", "w+") as owner:
        owner.write("process 1 on node7")
        owner.flush()
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as ended:
            trainer.lock_directory(cfg)
        assert "node7" in str(ended.value) and ended.value.code not in (0, 2)
        assert 100 < sum(pauses) < 200
    trainer.lock_directory(cfg)  # it is free
    assert str(os.getpid()) in (tmp_path / "lock").read_text()
