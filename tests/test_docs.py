"""The links of all pages, and the commands of README.md, run in order in a fresh copy."""

import os
import re
import subprocess
import sys
from operator import attrgetter

import pytest
from harness import LONG, REPO, copy_repository, write_program
from pages import anchors, blocks, broken_links, commands, difference, links, slug, without_code

import train_distributed

# Not those of .venv and .pytest_cache.
PAGES = sorted(p for p in REPO.rglob("*.md") if "/." not in f"/{p.relative_to(REPO)}")
# Commands of README.md that do not run here, and why.
NOT_HERE = {
    r"git clone": "downloads this repository",
    r"python3 -m venv|source .venv|pip install": "tests/run.sh has installed the requirements",
    r"--dataset mnist ": "downloads MNIST",
    r"squeue|tail -F|sacct|srun|watch": "tests/cluster/test_guide.py runs them",
    r"tests/run.sh": "is this test",
}
if not LONG:
    NOT_HERE["quickstart.sh"] = ".ci/run begins with it"
    NOT_HERE["runs/one"] = "other tests run the same every day"
WARNINGS_ALLOWED = {"python scripts/doctor.py": 1}  # its exit code if it has found anything


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_to_files_and_headings(path):
    assert broken_links(path) == []


@pytest.mark.parametrize("name", ["TROUBLESHOOTING.md", "MESSAGES.md"])
def test_the_pages_of_errors_have_links_and_no_two_headings_alike(name):
    page = (REPO / "docs" / name).read_text()
    titles = re.findall(r"(?m)^#+ (.+)$", without_code(page))
    assert len({slug(title) for title in titles}) == len(titles)
    assert len(links(page)) > 20


def test_anchors_are_those_of_github():
    text = "# A `b_c`: d, e -4\n```\n# no heading\n```\n## `/dev/shm/nccl-` (x)\n## a\n## A\n"
    assert anchors(text) == ["a-b_c-d-e--4", "devshmnccl--x", "a", "a-1"]


def test_a_broken_link_and_another_output_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n[a](#a-page) [b](#a-pag) [c](absent.md) [d](https://example.org)\n")
    assert broken_links(page) == ["#a-pag", "absent.md"]
    assert difference("a 1\n...\nd\n", "a 23\nb\nc\nd\n") == ""
    assert "+c" in difference("a 1\nd\n", "a 23\nc\nd\n")
    assert "-d" in difference("a 1\n...\nd\n", "a 23\n")
    assert difference("a\nb\n", "b\na\n")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository with a .venv that has the requirements."""
    copy = copy_repository(tmp_path_factory.mktemp("readme") / "train")
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)  # for `git apply`
    modules = {"python": "", "pip": "-m pip", "torchrun": "-m torch.distributed.run"}
    for name, module in modules.items():
        write_program(copy / ".venv/bin" / name, f'exec {sys.executable} {module} "$@"')
    (copy / ".venv/installed-requirements.txt").write_text((copy / "requirements.txt").read_text())
    return copy


def run(command: str, clone) -> str:
    """What the command prints in the clone, which the pages call /home/me/train."""
    path = f"{clone}/.venv/bin:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=clone,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, WARNINGS_ALLOWED.get(command)), done.stdout
    return done.stdout.replace(str(clone), "/home/me/train")


def test_the_commands_of_the_readme_print_what_it_shows(clone):
    page = [*blocks((REPO / "README.md").read_text()), ("", "")]
    ran = 0
    for (language, block), (kind, shown) in zip(page, page[1:]):
        output, here = "", False
        for command in commands(block) if language == "bash" else ():
            here = not any(re.search(pattern, command) for pattern in NOT_HERE)
            if here:
                output += run(command, clone)
                ran += 1
        if kind == "text" and here:
            assert difference(shown, output) == "", output
    assert ran >= 4


def test_the_task_of_the_readme_learns(clone):
    (code,) = [
        text for language, text in blocks((REPO / "README.md").read_text()) if language == "python"
    ]
    (clone / "my_train.py").write_text(code)
    out = run("python my_train.py --checkpoint-dir runs/readme", clone)
    accuracy = re.findall(r"Test Accuracy: ([\d.]+)%", out)[-1]
    assert float(accuracy) > 90, out


def test_the_example_of_a_model_and_data_of_your_own(clone):
    page = blocks((REPO / "docs/MAKE_IT_YOURS.md").read_text())
    (clone / "my_train.py").write_text(page[0][1])
    *others, last = commands(page[1][1])
    for command in others if LONG else ():
        run(command, clone)
    assert difference(page[2][1], run(last, clone)) == ""


def test_every_launcher_has_the_same_five_headings():
    guide = (REPO / "docs/LAUNCH_GUIDE.md").read_text()
    launchers = re.findall(r"(?m)^\| \[.*?\]\(#(.*?)\)", guide)
    titles = re.findall(r"(?m)^##+ (.*)$", guide)
    slugs = [slug(title) for title in titles]
    five = ["Requirements", "Command", "Output", "Environment variables", "Stop and resume"]
    for launcher in launchers:
        place = slugs.index(launcher)
        assert titles[place + 1 : place + 6] == five, launcher
    assert len(launchers) >= 10


def test_the_functions_in_the_life_of_a_step_exist():
    page = (REPO / "docs/LIFE_OF_A_STEP.md").read_text()
    names = set(re.findall(r"`([\w.]+)\(\)`", page)) - {"no_sync"}  # DDP's
    assert len(names) > 15
    for name in names:
        attrgetter(name)(train_distributed)
