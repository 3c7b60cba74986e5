"""What the launchers do with signals and with host names. On real nodes: tests/cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from harness import REPO, SLOW_TO_SAVE, copy_repository, processes_with


class Node:
    """cluster_train.sh with two ranks that take some seconds to save."""

    def __init__(self, directory, seconds, *before):
        self.script = directory / "slow_to_save.py"
        self.script.write_text(SLOW_TO_SAVE)
        words = ["scripts/cluster_train.sh", "configs/default_config.yaml"]
        more = {"PYTHON": sys.executable, "NPROC_PER_NODE": "2", "LOG_DIR": str(directory)}
        more |= {"SAVE_SECONDS": str(seconds), "TRAIN_SCRIPT": str(self.script)}
        self.process = subprocess.Popen(
            [*before, *words, f"--to={directory}"],
            env=os.environ | more,
            cwd=REPO,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_ranks(self) -> None:
        for _ in range(2):
            while self.process.stdout.readline() != "ready\n":
                assert self.process.poll() is None

    def members(self) -> list[int]:
        return [*processes_with("TRAIN_SCRIPT", self.script)]

    def signal_all(self, number) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def node(tmp_path):
    """Starts a Node and waits until its ranks listen for signals."""
    with ExitStack() as at_end:

        def start(*arguments) -> Node:
            node = Node(tmp_path, *arguments)
            at_end.callback(node.end)
            node.wait_for_ranks()
            return node

        yield start


def saved(directory) -> list[str]:
    return sorted(path.name for path in directory.glob("saved*"))


# torchrun's own limit is 30 s.
@pytest.mark.parametrize("seconds", [3, pytest.param(35, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.long)])
def test_all_ranks_save_when_slurm_signals_all_processes_of_a_node(tmp_path, node, name, seconds):
    """SIGTERM it sends twice within a moment, when it ends a job."""
    node = node(seconds)
    for number in (getattr(signal, name), signal.SIGCONT, getattr(signal, name)):
        node.signal_all(number)
        time.sleep(0.2)
    node.process.wait(timeout=90)
    assert saved(tmp_path) == ["saved0", "saved1"]


def test_sigint_after_sigterm_ends_a_node_at_once(tmp_path, node):
    node = node(30)
    node.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    node.process.send_signal(signal.SIGINT)
    node.process.wait(timeout=25)
    assert not saved(tmp_path)


def test_a_second_ctrl_c_through_supervise_ends_a_node_at_once(tmp_path, node):
    node = node(999, "scripts/supervise.py")
    for _ in range(2):
        node.process.send_signal(signal.SIGINT)
        time.sleep(1.5)
    assert node.process.wait(timeout=30) == 1
    assert not node.members() and not saved(tmp_path)


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch canary", "$(touch canary)", "a;touch canary"]
)
def test_a_host_name_is_not_executed(tmp_path, host):
    copy = copy_repository(tmp_path / "repo")
    command = ["scripts/ssh/launch_torchrun_auto.sh", "configs/default_config.yaml", "2", "a", host]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert not list(copy.rglob("canary"))


def test_a_login_host_without_ssh_is_told(tmp_path):
    for tool in Path("/usr/bin").iterdir():
        if tool.name not in ("ssh", "pdsh"):
            (tmp_path / tool.name).symlink_to(tool)
    for launcher in ("launch_torchrun_auto.sh", "launch_pdsh_multinode.sh"):
        command = [REPO / "scripts/ssh" / launcher, "configs/default_config.yaml", "2", "a", "b"]
        env = {"PATH": str(tmp_path), "LOG_DIR": str(tmp_path / "logs")}
        result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=env)
        assert result.returncode == 2 and "is not installed here" in result.stderr, result.stderr
        assert len(result.stderr.splitlines()) == 1


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(MEMORY / "tasks", os.W_OK), reason="needs memory cgroups (v1)")
def test_a_process_that_the_kernel_kills_for_its_memory_is_named(tmp_path):
    script, failure = tmp_path / "my_train.py", tmp_path / "failure"
    script.write_text("words = []\nwhile True:\n    words.append(b'x' * 10**7)\n")
    group = MEMORY / f"test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("700M")
        env = {"TRAIN_SCRIPT": str(script), "FAILURE_FILE": str(failure), "GUARD": "0"}
        result = subprocess.run(
            ["bash", "-c", f"echo $$ >{group}/tasks; exec scripts/cluster_train.sh"],
            env=os.environ | env | {"PYTHON": sys.executable, "LOG_DIR": str(tmp_path)},
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        group.rmdir()
    assert result.returncode > 0
    assert "error: " in result.stdout and "the node ran out of memory\n" in result.stdout
    assert json.loads(failure.read_text())["cause"] == "out of memory"


def test_workers_run_in_a_container(tmp_path):
    """Apptainer itself is in no package registry: a script stands in for it."""
    apptainer, script = tmp_path / "apptainer", tmp_path / "my_train.py"
    words = '"$1 $2 $3 $4 $5 $6" == "exec --nv --bind $PWD /shared/my image.sif python3"'
    apptainer.write_text(f'#!/bin/bash\n[[ {words} ]] && exec {sys.executable} "${{@:7}}"\n')
    apptainer.chmod(0o755)
    script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "APPTAINER_IMAGE": "/shared/my image.sif"}
    env |= {"TRAIN_SCRIPT": str(script), "GUARD": "0", "LOG_DIR": str(tmp_path)}
    command = [REPO / "scripts/ssh/launch_singlenode.sh", "configs/default_config.yaml", "2"]
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"rank 0", "rank 1"} < {*result.stdout.splitlines()}
