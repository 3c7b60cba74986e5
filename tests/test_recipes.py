"""Programs of others, started with the lines of docs/RECIPES.md on two ranks.

They train, leave no process, and guard.py does not warn; with --long, they are stopped and resume.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import REPO, copy_repository, processes_with, running, wait_until, write_images
from pages import commands_of, run_command, section

PAGE = (REPO / "docs/RECIPES.md").read_text()
VERSIONS = (REPO / "docs/recipes/requirements.txt").read_text()


class Recipe(NamedTuple):
    module: str  # of the package that it needs
    under_way: str  # what it prints while it trains
    code: int  # of the launcher, after a stop
    resumes: str  # what it prints when it resumes: a step or an epoch after the first
    end: str  # what it prints at the end
    more: str = ""  # options, for a small run on CPUs


FEW_IMAGES = "--model test_resnet --image-size 32 --batch-size 4 --epochs 20"
BEGIN, FROM = "from step 0", "from step [1-9]"
RECIPES = {
    "Hugging Face Trainer": Recipe("transformers", BEGIN, 0, FROM, "at step 600", "--use_cpu"),
    "Lightning": Recipe("lightning", BEGIN, 0, FROM, "at step 1000"),
    "Accelerate": Recipe("accelerate", BEGIN, 0, FROM, "at step 2500"),
    "timm": Recipe("timm", "epoch 1: ", 143, "from epoch [1-9]", "epoch 19: ", FEW_IMAGES),
    "Hydra": Recipe("hydra", BEGIN, 0, FROM, "at step 1000"),
    "Muon": Recipe("torch", "step 20", 0, r"at step [1-9]\d*, to step", "Finished at step"),
}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("MARK", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    yield copy_repository(tmp_path / "train")
    assert processes_with("MARK", tmp_path) == {}


def lines_of(heading: str) -> list[str]:
    """[for one machine, for Slurm]"""
    return commands_of(section(PAGE, heading))


def require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        (pin,) = re.findall(rf"(?m)^{module}\S*==\S+", VERSIONS)
        pytest.skip(f"NOT INSTALLED: pip install {pin}")


def run_to_the_end(command: str, clone: Path) -> str:
    done = run_command(command, clone)
    assert done.returncode == 0, done.stdout
    assert "guard.py: WARNING" not in done.stdout
    return done.stdout


def run_and_stop(command: str, under_way: str, clone: Path) -> tuple[int, str]:
    """Returns the exit code of the launcher after SIGTERM, and what was printed."""
    log = clone / "stopped.log"
    with log.open("w") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        with running(["bash", "-c", command], cwd=clone, **streams) as process:
            wait_until(
                lambda: re.search(under_way, log.read_text()) or process.poll() is not None,
                log,
                600,
            )
            process.terminate()
            code = process.wait(300)
    return code, log.read_text()


@pytest.mark.long
@pytest.mark.parametrize("heading", RECIPES)
def test_a_program_trains_stops_and_resumes(heading, clone):
    recipe = RECIPES[heading]
    require(recipe.module)
    images = write_images(clone / "images")
    command = lines_of(heading)[0].replace("DIR", f"{images}/train") + f" {recipe.more}"
    code, text = run_and_stop(command, recipe.under_way, clone)
    assert code == recipe.code, text
    assert not re.search(recipe.end, text) and "guard.py: WARNING" not in text, text
    text = run_to_the_end(command, clone)
    assert re.search(recipe.resumes, text) and re.search(recipe.end, text), text


def test_a_program_that_starts_its_own_ranks(clone):
    text = run_to_the_end(lines_of("Programs that start their own ranks")[0], clone)
    assert "2 ranks: loss" in text
