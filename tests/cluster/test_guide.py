"""The commands of docs/LAUNCH_GUIDE.md, run: they print what the guide says.

REWRITE_GUIDE=1 puts what they print into the guide.
"""

import os
import re
import shutil
import sys

import pytest
from harness import REPO, assert_same_state, copy_repository, torch, train
from hosts import HERE

REWRITE = "REWRITE_GUIDE" in os.environ
GUIDE = REPO / "docs" / "LAUNCH_GUIDE.md"
SECTION = re.compile(r"(?ms)^## (.*?)$(.*?)(?=^## |\Z)")
BLOCK = re.compile(r"(?ms)^```console\n(.*?)^```$")
COMMAND = re.compile(r"(?m)^(\w+)\$ (.*)\n((?:(?!\w+\$ ).*\n)*)")
BROKEN = re.compile(r"Traceback|No such file or directory\n|Unknown host")
SECTIONS = {m[1]: m[2] for m in SECTION.finditer(GUIDE.read_text()) if BLOCK.search(m[2])}


@pytest.fixture(scope="module")
def train_dir(tmp_path_factory):
    """A repository with the .venv that quickstart.sh makes, and qsub, which is simulated."""
    copy = copy_repository(tmp_path_factory.mktemp("guide") / "train")
    qsub = f'{sys.executable} {HERE}/pbs.py qsub node01,node02 1 "$@"'
    for path, command in ((".venv/bin/python", f'{sys.executable} "$@"'), ("bin/qsub", qsub)):
        (copy / path).parent.mkdir(parents=True)
        (copy / path).write_text(f"#!/bin/sh\nexec {command}\n")
        (copy / path).chmod(0o755)
    return copy


def folded(text: str) -> list[str]:
    """Its lines, with # for what differs from run to run and machine to machine."""
    varies = r"(?<=goodput ).*|\d+(\.\d+)+|\d{4,}|\d+(?= samples/s)|\+c\w+(?=,)"
    return [re.sub(varies, "#", line) for line in text.splitlines()]


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


# What these do is tested elsewhere too; that the page shows it as it is can wait for a long run.
CAN_WAIT = ["Slurm, one node, without torchrun", "pdsh", "By hand", "PBS", "The layer beneath"]
CAN_WAIT += ["By hand, with torch.distributed.launch", "The smoke check", "Slurm without torchrun"]
CAN_WAIT += ["Slurm with torchrun"]


def sections():
    for title in SECTIONS:
        yield pytest.param(title, marks=pytest.mark.long if title in CAN_WAIT else ())


@pytest.mark.parametrize("title", list(sections()))
def test_the_guide_shows_what_is_printed_and_all_end_with_the_same_weights(
    run, train_dir, expected, title
):
    checkpoints = train_dir / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    for block in BLOCK.findall(SECTIONS[title]):
        new = ""
        for host, command, told in COMMAND.findall(block):
            output = run(host, command, told)
            assert not BROKEN.search(output), output
            same = {*folded(told)} - {"..."} <= {*folded(output)}
            assert same or REWRITE, output
            new += f"{host}$ {command}\n{told if same and told.strip() != '...' else output}"
        if REWRITE:
            GUIDE.write_text(GUIDE.read_text().replace(block, new))
    if title not in ("The smoke check", "A cluster to try on"):
        state = torch.load(checkpoints / "checkpoint_epoch_1.pt", weights_only=True)
        assert_same_state(state, expected)
