"""The Slurm launchers on a real Slurm of two nodes: who runs where, and what they end with."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import LAUNCH_VARIABLES, REPO, assert_same_state, train

HERE = Path(__file__).resolve().parent
TOOLS = ["slurmctld", "slurmd", "munged", "sshd", "pdsh", "ip", "nsenter"]


@pytest.fixture(scope="module")
def on():
    """A cluster of two nodes with four GPU slots each; a function that runs a command on a host."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing or os.geteuid():
        reason = "needs root and, of Debian, " + ", ".join(missing) + ": tests/run.sh --cluster"
        assert os.environ.get("CLUSTER_TESTS") != "required", reason
        pytest.skip(reason)
    env = {k: v for k, v in os.environ.items() if not LAUNCH_VARIABLES.search(k)}
    env |= {"CLUSTER": f"/tmp/cluster-{os.getpid()}", "PYTHON": sys.executable}
    up = subprocess.run([HERE / "up.sh", "2", "4"], env=env, capture_output=True, text=True)
    assert up.returncode == 0, up.stdout + up.stderr

    def run(host, *command, cwd=REPO, **more) -> subprocess.CompletedProcess:
        command = [HERE / "on.sh", host, *command]
        return subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env=env | more,
            capture_output=True,
            text=True,
            timeout=240,
        )

    yield run
    subprocess.run([HERE / "down.sh"], env=env, check=True)
    assert not Path(env["CLUSTER"]).exists()


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A copy of the repository, in a directory with a space in its name."""
    copy = tmp_path_factory.mktemp("cluster") / "my repo"
    ignore = shutil.ignore_patterns(".git", ".venv", "runs", "logs", "__pycache__", "data")
    shutil.copytree(REPO, copy, symlinks=True, ignore=ignore)
    return copy


@pytest.fixture(scope="module")
def options(tiny):
    return [*tiny, "--epochs=1", "--global-batch-size=48"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory, options):
    """What four ranks on one machine end with, without any launcher."""
    run = train(tmp_path_factory.mktemp("expected") / "run", 4, *options)
    return run.checkpoint("checkpoint_epoch_1")


def submit(on, cwd, *words, **env) -> str:
    """sbatch, wait for the end of the job; its output."""
    result = on("login", "sbatch", "--wait", "--parsable", *words, cwd=cwd, **env)
    output = Path(cwd) / f"slurm-{result.stdout.split(';')[0].strip()}.out"
    text = output.read_text() if output.exists() else ""
    assert result.returncode == 0, result.stderr + text
    return text


def check(text: str, run: Path, shape: str, ranks: dict[str, str], expected: dict) -> None:
    assert f"Starting distributed training on 4 processes ({shape})" in text, text
    assert dict(re.findall(r"(?m)^  (\w+): ranks? ([\d,-]+) on CPU$", text)) == ranks, text
    state = torch.load(run / "checkpoint_epoch_1.pt", weights_only=True)
    assert_same_state(state, expected)


LAUNCHERS = ["run_distributed.slurm", "slurm_train_multinode.sh", "scripts/slurm/slurm_train.sh"]
TWO_BY_TWO = ["--nodes=2", "--gpus-per-node=2"]
TWO_NODES = ("2 nodes x 2", {"node01": "0-1", "node02": "2-3"})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_nodes_of_two(on, repo, tmp_path, options, expected, launcher):
    run = f"--checkpoint-dir={tmp_path / 'run'}"
    text = submit(on, repo, *TWO_BY_TWO, launcher, "configs/default_config.yaml", *options, run)
    assert "Master node: node01" in text
    check(text, tmp_path / "run", *TWO_NODES, expected)


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes=1", "run_distributed.slurm"],
        ["slurm_train_single_node.sh"],
        ["scripts/slurm/slurm_train_single_node.sh"],
    ],
    ids=lambda words: words[-1],
)
def test_one_node_of_four_as_shipped(on, repo, tmp_path, options, expected, words):
    text = submit(on, repo, *words, *options, f"--checkpoint-dir={tmp_path / 'run'}")
    check(
        text, tmp_path / "run", "1 node x 4", {text.split("Master node: ")[1][:6]: "0-3"}, expected
    )


@pytest.mark.parametrize("launcher", LAUNCHERS[:2])
@pytest.mark.parametrize(
    "left", [["--ntasks-per-node=2", "--gpus-per-task=1"], ["--ntasks-per-node=3", "-c1"]], ids=str
)
def test_directives_left_over_from_another_script_do_no_harm(
    on, repo, tmp_path, options, expected, launcher, left
):
    run = f"--checkpoint-dir={tmp_path / 'run'}"
    text = submit(on, repo, *TWO_BY_TWO, *left, launcher, *options, run)
    check(text, tmp_path / "run", *TWO_NODES, expected)


@pytest.mark.parametrize("launcher", LAUNCHERS[:2])
def test_submitted_from_another_directory(on, repo, tmp_path, options, expected, launcher):
    run = f"--checkpoint-dir={tmp_path / 'run'}"
    text = submit(on, tmp_path, *TWO_BY_TWO, repo / launcher, *options, run)
    check(text, tmp_path / "run", *TWO_NODES, expected)


def test_submitted_as_a_copy(on, repo, tmp_path, options, expected):
    copy, run = tmp_path / "my.slurm", f"--checkpoint-dir={tmp_path / 'run'}"
    shutil.copy(repo / "run_distributed.slurm", copy)
    words = [*TWO_BY_TWO, copy, *options, run]
    check(submit(on, repo, *words), tmp_path / "run", *TWO_NODES, expected)
    lost = on("login", "sbatch", "--wait", "--parsable", *words, cwd=tmp_path)
    text = (tmp_path / f"slurm-{lost.stdout.strip()}.out").read_text()
    assert lost.returncode == 2
    assert text == (
        f"run_distributed.slurm: error: no train_distributed.py in {tmp_path}: submit from the "
        "repository, or set REPO_ROOT\n"
    )
    assert "Finished" not in text
    again = submit(on, tmp_path, *words, REPO_ROOT=str(repo))
    assert "Nothing to do" in again


def test_dry_run_prints_the_command_and_runs_nothing(on, repo):
    for launcher in LAUNCHERS[:2]:
        text = submit(on, repo, *TWO_BY_TWO, launcher, "--lr=0.1", DRY_RUN="1")
        assert text.startswith("$ srun --nodes=2 ") and text.rstrip().endswith(" --lr=0.1")
        assert text.count("\n") == 1


def test_two_jobs_on_one_node_at_once_do_not_meet(on, repo, tmp_path, options):
    jobs = []
    for name in "ab":
        words = ["--nodes=1", "--gpus-per-node=2", "--nodelist=node01"]
        words.append(repo / "run_distributed.slurm")
        run = f"--checkpoint-dir={tmp_path / name}"
        jobs.append(
            on(
                "login",
                "sbatch",
                "--parsable",
                *words,
                *options,
                run,
                cwd=tmp_path,
                REPO_ROOT=str(repo),
            )
        )
    for job in jobs:
        assert job.returncode == 0, job.stderr
        wait = ["srun", "--nodes=1", f"--dependency=afterany:{job.stdout.strip()}", "true"]
        waited = on("login", *wait)
        assert waited.returncode == 0, waited.stderr
    for name, job in zip("ab", jobs, strict=True):
        output = (tmp_path / f"slurm-{job.stdout.strip()}.out").read_text()
        assert (tmp_path / name / "checkpoint_epoch_1.pt").exists(), output


def test_plain_python_in_a_batch_job_is_one_process(on, repo, tmp_path, options):
    script = tmp_path / "plain.sh"
    command = f"{sys.executable} train_distributed.py {' '.join(options)} --stop-at-step=1"
    script.write_text(f"#!/bin/bash\n{command} --checkpoint-dir={tmp_path / 'run'}\n")
    text = submit(on, repo, "--nodes=2", "--ntasks-per-node=2", script)
    assert "Starting distributed training on 1 process (1 node x 1)" in text


def test_one_gpu_per_task_and_a_rank_that_is_missing(on, repo, tmp_path, options):
    step = ["srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-task=1", sys.executable]
    step += ["train_distributed.py", *options, f"--checkpoint-dir={tmp_path / 'run'}"]
    result = on("login", *step, "--stop-at-step=1", cwd=repo)
    assert result.returncode == 0, result.stderr
    assert "Starting distributed training on 2 processes (2 nodes x 1)" in result.stdout
    result = on("login", *step, "--nodes=3", cwd=repo)
    assert "error: --nodes 3, but this job runs on 2: node01, node02" in result.stderr


def test_a_config_that_is_missing_is_named(on, repo):
    for launcher in LAUNCHERS[:2]:
        words = [*TWO_BY_TWO, "--wait", "--parsable", launcher, "absent.yaml"]
        result = on("login", "sbatch", *words, cwd=repo)
        text = (repo / f"slurm-{result.stdout.strip()}.out").read_text()
        assert result.returncode != 0
        assert f"there is no config absent.yaml in {repo}" in text
