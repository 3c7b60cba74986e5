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

    def train_step(run, *arguments, inner=train_distributed.train_step):
        inner(run, *arguments)
        if run.state.step == 10 and run.world.rank == 0:
            os.unlink({str(filler)!r})

    train_distributed.train_step = train_step
    """
    run = train(run_directory, 2, *options, before=free)
    warnings = [line for line in run.err[0].splitlines() if "No space left on device" in line]
    assert len(warnings) == 1 and "; is the disk full? (" in warnings[0]
    assert warnings[0].endswith("No space left on device); training continues")
    assert f"cannot write {run_directory}/checkpoint_step_9.pt" in warnings[0]
    assert run.checkpoints() == {
        *("checkpoint_step_3", "checkpoint_step_6", "checkpoint_step_12", "checkpoint_epoch_1")
    }
    assert not list(run_directory.glob(".*.tmp"))
    for name in ("checkpoint_step_6", "checkpoint_step_12", "checkpoint_epoch_1"):
        assert_same_state(run.checkpoint(name), straight.checkpoint(name))
    ours, theirs = ([r["loss"] for r in x.records("train")] for x in (run, straight))
    assert ours == theirs


def test_a_disk_that_stays_full_ends_the_run_after_three_saves(tiny, small_disk):
    small_disk(int(1.5 * STATE))
    more = ["--epochs=1000", "--checkpoint-every-steps=2"]
    run = launch(small_disk.path / "run", 2, *tiny, *more)
    assert run.codes[0] == 2
    last = [line for line in run.err[0].splitlines() if "error: " in line][-1]
    assert "No space left on device" in last and "is the disk full?" in last
    assert run.err[0].count("training continues") == 2
    assert not list(run.directory.glob(".*.tmp"))
    small_disk(10 * STATE)
    again = train(small_disk.path / "run", 2, *tiny, *more[:1], "--stop-at-step=9")
    assert f"Resuming from {run.directory}/checkpoint_step_2.pt" in again.out[0]


def test_metrics_of_a_full_disk_are_written_later(tmp_path, tiny, small_disk):
    small_disk(30_000_000)
    options = [*tiny, "--epochs=1"]
    filler = small_disk.path / "filler"
    full = f"""if True:
    import errno, os
    import train_distributed

    def write(self, kind, step, values, inner=train_distributed.MetricsWriter.record):
        if step == 1:  # no page of the file yet that has room for a line
            with open({str(filler)!r}, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC
        if step == 24:
            os.unlink({str(filler)!r})
        inner(self, kind, step, values)

    train_distributed.MetricsWriter.record = write
    """
    run = train(small_disk.path / "run", 1, *options, before=full)
    assert "cannot write metrics yet: [Errno 28] No space left on device" in run.err[0]
    assert [record["step"] for record in run.records("train")] == list(range(1, 27))
    assert len(run.records("epoch")) == 1


def test_a_read_only_directory_is_named_before_anything_starts(tiny, small_disk):
    run = train(small_disk.path / "run", 1, *tiny, "--epochs=1")
    subprocess.run(["mount", "-o", "remount,ro", small_disk.path], check=True)
    result = launch(run.directory, 2, *tiny, "--epochs=2")
    assert result.codes[0] == 2 and result.err[1] == ""
    expected = (
        f"error: cannot write to or lock --checkpoint-dir {run.directory}: choose another one ("
    )
    assert expected in result.err[0] and result.err[0].count("\n") == 1
    assert "Read-only file system" in result.err[0]
    assert run.status()["state"] == "finished"
