"""The commands of docs/LAUNCH.md print what it shows; all launchers train to the same weights."""

import os
import re
import shlex
import shutil
import sys

import pytest
from harness import (
    REPO,
    assert_same_state,
    copy_repository,
    newest_in,
    train,
    wait_until,
    write_program,
)
from pages import blocks, commands, difference

SECTION = re.compile(r"(?ms)^## (.*?)$(.*?)(?=^## |\Z)")
BLOCK = re.compile(r"(?ms)^```console\n(.*?)^```$")
COMMAND = re.compile(r"(?m)^(\w+)\$ (.*)\n((?:(?!\w+\$ ).*\n)*)")
GUIDE = (REPO / "docs/LAUNCH.md").read_text()
SECTIONS = {m[1]: m[2] for m in SECTION.finditer(GUIDE) if BLOCK.search(m[2])}
EVERY_DAY = ["Slurm directives"]  # the others train


@pytest.fixture(scope="module")
def train_dir(tmp_path_factory):
    """A repository with the .venv that quickstart.sh makes."""
    copy = copy_repository(tmp_path_factory.mktemp("guide") / "train")
    write_program(copy / ".venv/bin/python", f'exec {sys.executable} "$@"')
    return copy


def sections():
    for title in SECTIONS:
        yield pytest.param(title, marks=() if title in EVERY_DAY else pytest.mark.long)


@pytest.mark.parametrize("title", list(sections()))
def test_the_guide_shows_what_is_printed(cluster, train_dir, title):
    """Jobs have other numbers. They are waited for."""
    shutil.rmtree(train_dir / "checkpoints", ignore_errors=True)
    jobs = {}
    for block in BLOCK.findall(SECTIONS[title]):
        for host, command, shown in COMMAND.findall(block):
            for number, job in jobs.items():
                command = command.replace(number, job)
            _, output = cluster.on(host, "bash", "-c", command, cwd=train_dir, PYTHON="")
            if submitted := re.match(r"Submitted batch job (\d+)", output):
                jobs[re.search(r"\d+", shown)[0]] = submitted[1]
                cluster.end_of_job(submitted[1])
            output = output.replace(str(train_dir), "/shared/train")
            assert difference(shown, output) == "", output


CONFIG = "configs/default_config.yaml"


@pytest.fixture(scope="session")
def of_two_ranks(tmp_path_factory, options):
    run = train(tmp_path_factory.mktemp("two") / "run", 2, *options)
    return run.newest()


@pytest.mark.parametrize(
    "launcher",
    [
        "run_distributed.slurm",
        "scripts/ssh/launch_pdsh_multinode.sh",
        pytest.param("scripts/ssh/launch_torchrun_multinode.sh", marks=pytest.mark.long),
        "scripts/ssh/launch_multinode.sh",
    ],
)
def test_each_launcher_trains_to_the_same_weights(
    cluster, repo, tmp_path, options, of_two_ranks, launcher
):
    """The others: test_ssh.py, test_pbs.py, test_survival.py (slurm_train_multinode.sh)."""
    more = [*options, f"--checkpoint-dir={tmp_path / 'run'}"]
    threads = {"OMP_NUM_THREADS": "1"}  # as in train(); with two, sums are rounded otherwise
    if launcher == "run_distributed.slurm":
        words = ["--nodes=2", "--gpus-per-node=1", launcher, CONFIG, *more]
        code, text = cluster.sbatch(repo, *words, **threads)
    elif "pdsh" in launcher:
        words = [launcher, CONFIG, "1", "node[01-02]", *more]
        code, text = cluster.on("login", *words, cwd=repo, **threads)
    else:
        first, second = ([launcher, CONFIG, "1", "2", rank, "node01", *more] for rank in "01")
        other = cluster.start("node02", *second, cwd=repo, **threads)
        code, text = cluster.on("node01", *first, cwd=repo, **threads)
        other.communicate(timeout=60)
    assert code == 0, text
    assert_same_state(newest_in(tmp_path / "run"), of_two_ranks)


# Commands of "Monitoring" in README.md that do not run here, and why.
NOT_MONITORED = {
    "sacct": "needs Slurm's accounting",
    "plot_metrics": "tests/test_docs.py runs it",
}


def test_the_readme_shows_how_to_monitor_a_job(cluster, train_dir):
    """With a stand-in for nvidia-smi."""
    write_program(train_dir / "bin/nvidia-smi", "echo NVIDIA-SMI on $(hostname)")
    env = {"PATH": f"{train_dir}/bin:{os.environ['PATH']}", "PYTHON": ""}

    def on_login(command: str) -> str:
        code, output = cluster.on("login", "bash", "-c", command, cwd=train_dir, **env)
        assert code == 0, output
        return output

    (train_dir / "watched.py").write_text(
        "import time\nprint('step 20: loss', flush=True)\ntime.sleep(1000)\n"
    )
    variables = "TRAIN_SCRIPT=watched.py GUARD=0"
    submit = f"{variables} sbatch --parsable --nodes=2 --gpus-per-node=1 slurm_train_multinode.sh"
    job = on_login(submit).strip()
    log = train_dir / f"logs/slurm-{job}.out"
    wait_until(lambda: log.exists() and "step 20" in log.read_text(), "no step")
    page = (REPO / "README.md").read_text().split("## Monitoring")[1]
    printed = ""
    for command in commands(blocks(page)[0][1]):
        if any(name in command for name in NOT_MONITORED):
            continue
        command = command.replace("JOBID", job).replace("tail -F", "tail -n 100")
        if "--pty" in command:
            command = f"script -qec {shlex.quote(command)} /dev/null"
        printed += on_login(command)
    on_login(f"scancel {job}")
    cluster.end_of_job(job)
    assert re.search(rf"\b{job} +all +train ", printed), printed  # squeue
    assert "step 20: loss" in printed  # tail
    assert all(f"NVIDIA-SMI on {node}" in printed for node in ("node01", "node02"))  # srun
