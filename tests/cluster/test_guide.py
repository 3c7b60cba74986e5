"""The commands of docs/LAUNCH.md, in order: they print what it shows, line by line.

REWRITE_GUIDE=1 puts what they print into the guide.
"""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from harness import (
    REPO,
    assert_same_state,
    copy_repository,
    torch,
    train,
    wait_until,
    write_program,
)
from hosts import HERE, down_at_exit
from pages import blocks, commands, commands_of, difference

REWRITE = "REWRITE_GUIDE" in os.environ
GUIDE = REPO / "docs" / "LAUNCH.md"
SECTION = re.compile(r"(?ms)^## (.*?)$(.*?)(?=^## |\Z)")
BLOCK = re.compile(r"(?ms)^```console\n(.*?)^```$")
FILE = re.compile(r"(?ms)^`(configs/\w+\.yaml)`:\n\n```yaml\n(.*?)^```$")  # a file to create
COMMAND = re.compile(r"(?m)^(\w+)\$ (.*)\n((?:(?!\w+\$ ).*\n)*)")
BROKEN = re.compile(r"Traceback|No such file or directory\n|Unknown host")
SECTIONS = {m[1]: m[2] for m in SECTION.finditer(GUIDE.read_text()) if BLOCK.search(m[2])}


@pytest.fixture(scope="module")
def train_dir(tmp_path_factory):
    """A repository with the .venv that quickstart.sh makes, and qsub, which is simulated."""
    copy = copy_repository(tmp_path_factory.mktemp("guide") / "train")
    write_program(copy / ".venv/bin/python", f'exec {sys.executable} "$@"')
    qsub = f'exec {sys.executable} {HERE}/pbs.py qsub node01,node02 1 "$@"'
    write_program(copy / "bin/qsub", qsub)
    return copy


def has_losses_of(told: str, output: str) -> bool:
    """Whether the losses and accuracies are in the output. CPUs of other models round otherwise."""
    both = (re.findall(r"(?:[Ll]oss:?|Accuracy:) (\d+\.\d+)", text) for text in (told, output))
    expected, found = ([float(number) for number in numbers] for numbers in both)
    return all(any(n == pytest.approx(f, rel=1e-3) for f in found) for n in expected)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What four ranks end an epoch with, without any launcher."""
    directory = tmp_path_factory.mktemp("expected") / "run"
    config = REPO / "configs/default_config.yaml"
    return train(directory, 4, f"--config={config}", "--epochs=1").checkpoint("checkpoint_epoch_1")


@pytest.fixture
def run(cluster, train_dir):
    """run(host, command): what it prints, under the names of the guide. A job is waited for."""
    jobs, background = {}, []
    other = f"{cluster.directory}-guide"  # the cluster that the guide itself makes
    down_at_exit(Path(other))
    env = {"PATH": f"{train_dir}/bin:{os.environ['PATH']}", "PYTHON": ""}

    def run(host: str, command: str, expected: str) -> str:
        for told, job in jobs.items():
            command = command.replace(told, job)
        where = {"CLUSTER": other} if host == "laptop" else {}
        host = "" if host == "laptop" else host
        words = ["bash", "-c", command.removesuffix(" &")]
        if command.endswith(" &"):
            background.append(cluster.start(host, *words, cwd=train_dir, **env, **where))
            return ""
        _, output = cluster.on(host, *words, cwd=train_dir, **env, **where)
        if job := re.search(r"^(?:Submitted batch job )?(\d+)(?:\.server)?$", output.strip()):
            told = re.search(r"\d+", expected) or re.search(r"\d+", str(len(jobs) + 1))
            jobs[told[0]] = job[1]
            output = output.replace(job[1], told[0])
            if "Submitted" in output:
                cluster.end_of_job(job[1])
        return output.replace(str(train_dir), "/shared/train").replace(other, "/tmp/cluster")

    yield run
    for process in background:
        assert process.wait(30) == 0
        process.communicate()


EVERY_DAY = ["Slurm directives"]  # the others train for long
NO_TRAINING = ["Slurm directives"]


def sections():
    for title in SECTIONS:
        yield pytest.param(title, marks=() if title in EVERY_DAY else pytest.mark.long)


@pytest.mark.parametrize("title", list(sections()))
def test_the_guide_shows_what_is_printed_and_all_end_with_the_same_weights(
    run, train_dir, title, request
):
    checkpoints = train_dir / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    for name, text in FILE.findall(SECTIONS[title]):
        (train_dir / name).write_text(text)
    for block in BLOCK.findall(SECTIONS[title]):
        new = ""
        for host, command, told in COMMAND.findall(block):
            output = run(host, command, told)
            assert not BROKEN.search(output), output
            differs = difference(told, output)
            differs = differs or "losses" * (not has_losses_of(told, output))
            assert not differs or REWRITE, f"{differs}\n{output}"
            new += f"{host}$ {command}\n{output if differs or told.strip() == '...' else told}"
        if REWRITE:
            GUIDE.write_text(GUIDE.read_text().replace(block, new))
    if title not in NO_TRAINING:
        state = torch.load(checkpoints / "checkpoint_epoch_1.pt", weights_only=True)
        assert_same_state(state, request.getfixturevalue("expected"))


CONFIG = "configs/default_config.yaml"


@pytest.fixture(scope="session")
def of_two_ranks(tmp_path_factory, options):
    run = train(tmp_path_factory.mktemp("two") / "run", 2, *options)
    return run.checkpoint("checkpoint_epoch_1")


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
    state = torch.load(tmp_path / "run/checkpoint_epoch_1.pt", weights_only=True)
    assert_same_state(state, of_two_ranks)


# Commands of "Monitoring" in README.md that do not run here, and why.
NOT_MONITORED = {
    "sacct": "needs Slurm's accounting",
    "watch": "never ends",
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
    assert printed.count("NVIDIA-SMI on node01") == 2 and "NVIDIA-SMI on node02" in printed  # srun


@pytest.mark.long
def test_the_checks_of_troubleshooting_run_on_two_nodes(cluster, train_dir):
    """In an allocation; the nodes have neither PyTorch in their python3 nor nvidia-smi."""
    page = (REPO / "docs/TROUBLESHOOTING.md").read_text()
    printed = ""
    for command in commands_of(page):
        if command.startswith(("srun ", "ssh HOST")):
            words = ["--nodes=2", "--ntasks-per-node=2", "bash", "-c"]
            command = command.replace("HOST", "node02")
            _, output = cluster.on("login", "salloc", *words, command, cwd=train_dir)
            printed += output
    ranks = [f"RANK={rank} LOCAL_RANK={rank % 2} of 4 on node0{rank // 2 + 1}" for rank in range(4)]
    for text in [*ranks, "node01\n", "node02\n", "CUDA_VISIBLE_DEVICES=", "/python3\n"]:
        assert text in printed, printed
