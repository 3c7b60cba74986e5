"""The links of all pages, and the commands of README.md and AGENTS.md, run in a fresh copy."""

import json
import os
import re
import shutil
import socket
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from harness import (
    LONG,
    REPO,
    copy_repository,
    run_ranks,
    write_program,
)
from pages import (
    blocks,
    broken_links,
    commands,
    commands_of,
    difference,
    run_command,
    section,
)

# Not those of .venv and .pytest_cache.
PAGES = sorted(p for p in REPO.rglob("*.md") if "/." not in f"/{p.relative_to(REPO)}")
# Commands of README.md that do not run here, and why. Those of other pages have tests of their own.
NOT_HERE = {
    r"python3 -m venv|source .venv|pip install": "tests/run.sh has installed the requirements",
    r"--dataset mnist ": "downloads MNIST",
    r"squeue|tail -F|sacct|srun": "tests/cluster/test_guide.py runs them",
    r"tests/run.sh": "is this test",
}
if not LONG:
    NOT_HERE["quickstart.sh"] = ".ci/run begins with it"
    NOT_HERE["runs/one|runs/two"] = "other tests run the same every day"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_to_files_and_headings(path):
    assert broken_links(path) == []


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return copy_with_venv(tmp_path_factory.mktemp("readme") / "train")


def copy_with_venv(directory: Path) -> Path:
    """A copy of the repository with a .venv that has the requirements."""
    copy = copy_repository(directory)
    modules = {"python": "", "pip": "-m pip", "torchrun": "-m torch.distributed.run"}
    for name, module in modules.items():
        write_program(copy / ".venv/bin" / name, f'exec {sys.executable} {module} "$@"')
    (copy / ".venv/installed-requirements.txt").write_text((copy / "requirements.txt").read_text())
    return copy


def run(command: str, clone) -> str:
    """What the command prints in the clone, which the pages call /home/me/train."""
    path = f"{clone}/.venv/bin:{os.environ['PATH']}"
    done = run_command(command, clone, PATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
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
    assert ran >= 2


def test_the_task_of_the_readme_learns(clone):
    (code,) = [
        text for language, text in blocks((REPO / "README.md").read_text()) if language == "python"
    ]
    (clone / "my_train.py").write_text(code)
    out = run("python my_train.py --checkpoint-dir runs/readme", clone)
    accuracy = re.findall(r"test_accuracy ([\d.]+)", out)[-1]
    assert float(accuracy) > 0.9, out


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_each_program_in_a_command_is_there(path):
    ours = (
        r"\b(?:scripts|examples|benchmarks|tests|docs)/[\w/]+\.(?:py|sh)\b|\w+\.slurm|train_\w+\.py"
    )
    for command in commands_of(path.read_text()):
        assert [name for name in re.findall(ours, command) if not (REPO / name).is_file()] == []


def test_the_best_of_a_sweep_is_found_as_the_guide_says(tmp_path):
    found = commands_of((REPO / "docs/LAUNCH.md").read_text())
    (command,) = [line for line in found if line.startswith("grep -o")]
    for name, value in (("a", 0.9), ("b", 0.97), ("c", 0.08)):
        file = tmp_path / "runs" / name / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"kind": "epoch", "test_accuracy": value}) + "\n")
    assert run(command, tmp_path) == 'runs/b/metrics.jsonl:"test_accuracy": 0.97\n'


@pytest.mark.long
def test_the_checks_of_troubleshooting_run(clone, monkeypatch):
    """As on the node of rank 0, while it listens."""
    programs = ("getent ", "timeout ", "ss ", "NCCL_DEBUG=WARN ", "grep ")
    found = commands_of((REPO / "docs/TROUBLESHOOTING.md").read_text())
    (clone / "logs").mkdir(exist_ok=True)
    (clone / "logs/node_n01.log").write_text("RuntimeError: the first error\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        printed = ""
        for command in found:
            if command.startswith(programs):
                printed += run(command.replace(":29500", f":{port}"), clone)
    expected = ["node_n01.log:1:RuntimeError: the first error", "open\n", f"127.0.0.1:{port} "]
    for text in [*expected, "runs/nccl\n"]:
        assert text in printed, text


@pytest.mark.long
def test_a_run_is_replayed_as_the_guide_says(clone):
    page = (REPO / "docs/RELIABILITY.md").read_text()
    page = blocks(section(page, "Find where two runs differ"))
    code = "".join(text for language, text in page if language == "bash")
    printed = [run(command, clone) for command in commands(code)]
    assert len(printed) == 3
    assert "2 records, up to the train record of step 20\nEqual: " in printed[-1]


MY_SCRIPT = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model, epochs, crash_in = torch.nn.Linear(4, 2), 4, int(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_one_epoch(epoch):
    if epoch == crash_in:
        raise RuntimeError("a crash")
    torch.manual_seed(epoch)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


"""


def run_script(directory: Path, ranks: int, *words) -> str:
    """What a script prints that guard.py runs in this directory; exit codes, if one is not 0."""
    before = f"import os; os.chdir({str(directory)!r})"
    done = run_ranks(ranks, REPO / "scripts/guard.py", *words, before=before)
    return "\n".join([*done.out, *done.err]) + (
        f"exit codes {done.codes}" if any(done.codes) else ""
    )


def test_twelve_lines_make_a_script_resume_after_each_epoch(tmp_path):
    page = section((REPO / "docs/MAKE_IT_YOURS.md").read_text(), "Your own script")
    (code,) = [text for language, text in blocks(page) if language == "python"]
    lines = textwrap.dedent(code).splitlines()
    assert len(lines) - len(["train_one_epoch(epoch)"]) == 12
    script = tmp_path / "mine.py"
    script.write_text(MY_SCRIPT + "\n".join([*lines, 'print("end", first_epoch)\n']))
    assert "a crash" in run_script(tmp_path, 1, script, 2)
    assert "end 2" in run_script(tmp_path, 1, script, 9)  # goes on where it was
    resumed = torch.load(tmp_path / "my_checkpoint.pt", weights_only=True)
    (tmp_path / "my_checkpoint.pt").unlink()
    assert "end 0" in run_script(tmp_path, 1, script, 9)
    whole = torch.load(tmp_path / "my_checkpoint.pt", weights_only=True)
    assert torch.equal(resumed["model"]["weight"], whole["model"]["weight"])


@pytest.mark.long
def test_the_listed_images_of_the_guide_and_its_optimizer_train(clone, images):
    """Both classes of the page in one."""
    python = [text for _, text in blocks((REPO / "docs/MAKE_IT_YOURS.md").read_text())]
    (data,) = [text for text in python if "class ListedImages" in text]
    (methods,) = [text for text in python if "NAdam" in text]
    before, _, after = data.partition('if __name__ == "__main__":')
    methods = "import torch\n\n\n" + methods.replace("(Task)", "(MyTask)")
    (clone / "my_train.py").write_text(f'{before}{methods}\nif __name__ == "__main__":{after}')
    for part, name in (("train", "train.csv"), ("val", "test.csv")):
        files = sorted(images.glob(f"{part}/*/*"))[:12]
        rows = [f"{file},{number % 2}" for number, file in enumerate(files)]
        (clone / name).write_text("\n".join(rows) + "\n")
    found = commands_of((REPO / "docs/MAKE_IT_YOURS.md").read_text())
    (command,) = [line for line in found if line.endswith("runs/listed")]
    command += " --batch-size 4 --epochs 1 --log-every-steps 1 --num-workers 1"
    assert "Finished at step 3 of 3" in run(command, clone)
    checkpoint = torch.load(clone / "runs/listed/checkpoint_step_3.pt", weights_only=True)
    assert checkpoint["spec"]["classes"] == ["cat", "dog"]


def test_the_fsdp_recipe_resumes_with_the_same_losses_under_guard(tmp_path):
    recipe = REPO / "docs/recipes/fsdp.py"
    printed = run_script(tmp_path, 2, recipe)
    losses = re.findall("step [34]0: loss .*", printed)
    assert len(losses) == 2 and "WARNING" not in printed, printed
    shutil.rmtree(tmp_path / "runs/fsdp/40")
    (tmp_path / "runs/fsdp/30/.metadata").unlink()  # as if it had been killed in this save
    again = run_script(tmp_path, 2, recipe)
    assert re.findall("step .*", again) == losses, again


# Commands of AGENTS.md that take long, or run these tests.
NOT_QUICK = r"-m pytest|test_distributed\.sh|tests/run\.sh"


def test_the_quick_commands_of_the_agents_page_run(tmp_path):
    copy = copy_with_venv(tmp_path / "train")
    ran = 0
    for command in commands(blocks((REPO / "AGENTS.md").read_text())[0][1]):
        if not re.search(NOT_QUICK, command):
            run(command, copy)
            ran += 1
    assert ran >= 4
