"""A full disk: the error is named, training goes on, no saved file is lost.

../test_checkpoints.py has failed saves that end the run.
"""

from harness import FAULT_IN_STEP, assert_same_state, train

STATE = 10_000_000  # bytes, roughly, of a checkpoint here


def test_a_full_disk_is_named_training_goes_on_and_the_end_is_the_same(tiny, small_disk, tmp_path):
    """Full for one save; two or three of these fit."""
    options = [*tiny, "--epochs=1", "--checkpoint-every-steps=3", "--keep=100"]
    small_disk(4 * STATE)
    filler, run_directory = small_disk.path / "filler", small_disk.path / "run"
    filler.write_bytes(bytes(int(1.2 * STATE)))  # leaves room for two checkpoints
    # The disk has room again before the fourth checkpoint and the final one.
    free = FAULT_IN_STEP.format(step=11, rank=0, fault=f"os.unlink({str(filler)!r})")
    straight = train(tmp_path / "straight", 2, *options)
    run = train(run_directory, 2, *options, before=free)
    (warning,) = [line for line in run.out[0].splitlines() if line.startswith("WARNING: ")]
    assert "checkpoint_step_9.pt" in warning and "No space left on device" in warning
    assert run.saved() == [3, 6, 12, 13]
    assert {path.suffix for path in run_directory.glob(".*")} == set()
    for step in (6, 12, 13):
        assert_same_state(run.checkpoint(step), straight.checkpoint(step))
    ours, theirs = ([r["loss"] for r in x.records("train")] for x in (run, straight))
    assert ours == theirs
