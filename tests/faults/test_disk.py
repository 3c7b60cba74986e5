"""Full and read-only disks: the error is named, training goes on, no saved file is lost."""

import subprocess

import pytest
from harness import assert_same_state, launch, train

STATE = 10_000_000  # bytes, roughly, of a checkpoint here


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny):
    options = [*tiny, "--epochs=1", "--checkpoint-every-steps=3", "--keep=100"]
    return train(tmp_path_factory.mktemp("straight") / "run", 2, *options)


def test_a_full_disk_is_named_training_goes_on_and_the_end_is_the_same(tiny, small_disk, straight):
    """Full for one save; two or three of these fit."""
    options = [*tiny, "--epochs=1", "--checkpoint-every-steps=3", "--keep=100"]
    small_disk(4 * STATE)
    filler, run_directory = small_disk.path / "filler", small_disk.path / "run"
    filler.write_bytes(bytes(int(1.2 * STATE)))  # leaves room for two checkpoints
    # The disk has room again before the fourth checkpoint and the final one.
    free = f"""if True:
    import os
    import train_distributed

    def train_step(cfg, world, *more, inner=train_distributed.train_step):
        inner(cfg, world, *more)
        step = more[-2]
        if step == 10 and world.rank == 0:
            os.unlink({str(filler)!r})

    train_distributed.train_step = train_step
    """
    run = train(run_directory, 2, *options, before=free)
    (warning,) = run.err[0].splitlines()
    begin = f"WARNING: cannot write {run_directory}/checkpoint_step_9.pt; is the disk full? ("
    assert warning.startswith(begin)
    assert warning.endswith("No space left on device)")
    assert run.checkpoints() == {
        *("checkpoint_step_3", "checkpoint_step_6", "checkpoint_step_12", "checkpoint_epoch_1")
    }
    assert not list(run_directory.glob(".*.tmp"))
    for name in ("checkpoint_step_6", "checkpoint_step_12", "checkpoint_epoch_1"):
        assert_same_state(run.checkpoint(name), straight.checkpoint(name))
    ours, theirs = ([r["loss"] for r in x.records("train")] for x in (run, straight))
    assert ours == theirs


def test_a_disk_that_stays_full_ends_the_run_and_the_checkpoint_before_remains(tiny, small_disk):
    small_disk(int(1.5 * STATE))
    more = ["--epochs=1000", "--checkpoint-every-steps=2"]
    run = launch(small_disk.path / "run", 2, *tiny, *more)
    assert run.codes[0] == 2
    warning, error = [line for line in run.err[0].splitlines() if "checkpoint" in line]
    assert warning.endswith("No space left on device)")
    assert "error: " in error and error.endswith("No space left on device)")
    assert run.checkpoints() == {"checkpoint_step_2"}
    assert not list(run.directory.glob(".*.tmp"))
    small_disk(10 * STATE)
    again = train(small_disk.path / "run", 2, *tiny, *more[:1], "--stop-at-step=9")
    assert f"Resuming from {run.directory}/checkpoint_step_2.pt at step 2" in again.out[0]


def test_a_read_only_directory_is_named_before_anything_starts(tiny, small_disk):
    run = train(small_disk.path / "run", 1, *tiny, "--epochs=1")
    subprocess.run(["mount", "-o", "remount,ro", small_disk.path], check=True)
    result = launch(run.directory, 2, *tiny, "--epochs=2")
    assert result.codes[0] == 2 and result.err[1] == ""
    expected = f"error: cannot write to or lock --checkpoint-dir {run.directory} ("
    assert expected in result.err[0] and result.err[0].count("\n") == 1
    assert "Read-only file system" in result.err[0]
    assert run.status()["state"] == "finished"
