"""A hang and a crash of the trainer without guard.py: a stack is printed, and all ranks exit."""

import tasks
from harness import FAULT_IN_STEP, FOREVER, launch

TIMEOUT = 12


def test_each_rank_prints_its_stacks_and_exits_if_one_is_busy_elsewhere(tmp_path, tiny):
    stuck = FAULT_IN_STEP.format(step=7, rank=1, fault="time.sleep(1000)")
    run = launch(tmp_path / "run", 3, *tiny, FOREVER, f"--hang-timeout={TIMEOUT}", before=stuck)
    assert run.codes == [1, 1, 1]
    assert f"no progress in {TIMEOUT} s (--hang-timeout)" in run.err[1]
    assert 'File "<string>", line 8 in train_step' in run.err[1]
    for rank in (0, 2):  # or the stack of an error, because another rank has exited
        assert "in train_step" in run.err[rank] or "in all_reduce" in run.err[rank]


def test_a_crash_ends_the_workers_of_a_loader_too(tmp_path, images):
    crash = "import tasks; tasks.Photos.loss = None"
    options = [f"--data-dir={images}", "--image-size=32"]
    options += ["--batch-size=4", "--num-workers=2"]
    result = launch(tmp_path / "run", 1, *options, before=crash, task=tasks.Photos, timeout=60)
    assert result.codes == [1] and "TypeError" in result.err[0]
