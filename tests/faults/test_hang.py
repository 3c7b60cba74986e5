"""A crash of the trainer without guard.py: all of its processes end."""

import tasks
from harness import launch


def test_a_crash_ends_the_workers_of_a_loader_too(tmp_path, images):
    crash = "import tasks; tasks.Photos.loss = None"
    options = [f"--data-dir={images}", "--image-size=32"]
    options += ["--batch-size=4", "--num-workers=2"]
    result = launch(tmp_path / "run", 1, *options, before=crash, task=tasks.Photos, timeout=60)
    assert result.codes == [1] and "TypeError" in result.err[0]
