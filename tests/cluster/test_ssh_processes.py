"""Each process of a supervised training on two hosts, started by ssh, is killed or stopped at a
random moment: as in faults/test_processes.py. With --long, each case runs 20 times.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from disturbed import HANG_TIMEOUT, OPTIONS, REPEATS, Training, assert_same_weights, disturb
from harness import is_rank, parent_of
from hosts import HERE

# What attempts.jsonl may say of the disturbed attempt. "finished": it did not matter.
CAUSES = {
    ("supervisor", "SIGKILL"): {"killed"},
    ("launcher", "SIGKILL"): {"killed", "stopped"},
    ("connect", "SIGKILL"): {"killed", "stopped", "node lost"},
    ("ssh", "SIGKILL"): {"killed", "stopped", "node lost"},
    ("sshd", "SIGKILL"): {"killed", "stopped", "node lost"},
    ("node.py", "SIGKILL"): {"killed"},
    ("reaper", "SIGKILL"): {"finished"},
    ("script", "SIGKILL"): {"killed"},
    ("agent", "SIGKILL"): {"killed"},
    ("rank", "SIGKILL"): {"killed"},
    ("worker", "SIGKILL"): {"exception", "killed"},
    ("launcher", "SIGSTOP"): {"finished"},
    ("connect", "SIGSTOP"): {"finished"},
    ("ssh", "SIGSTOP"): {"finished"},
    ("sshd", "SIGSTOP"): {"finished"},
    ("node.py", "SIGSTOP"): {"finished"},
    ("reaper", "SIGSTOP"): {"finished"},
    ("agent", "SIGSTOP"): {"finished"},
    ("rank", "SIGSTOP"): {"hang"},
    ("worker", "SIGSTOP"): {"hang"},
}
IN_CI = [("sshd", "SIGKILL")]


def kind_of(host: str, pid: int, line: str) -> str:
    """On node02, and on the launcher's host what belongs to node02; "" for the rest."""
    if host == "login":
        if "supervise.py" in line:
            return "supervisor"
        if "launch.py --connect" in line:
            return "connect" if " node02 " in line else ""
        if "launch.py" in line:
            return "launcher"
        return "ssh" if line.startswith("ssh ") and " node02 " in line else ""
    if host != "node02":
        return ""
    if line.startswith("sshd"):
        return "sshd"
    if "ssh/node.py" in line:
        return "reaper" if os.getsid(pid) == pid else "node.py"
    if "torch.distributed.run" in line:
        return "agent"
    if "guard.py" in line:
        parent = Path(f"/proc/{parent_of(pid)}/cmdline").read_bytes().decode()
        return "worker" if is_rank(parent) else "rank"
    return "script" if "cluster_train.sh" in line else ""


class SshTraining(Training):
    """One rank on each of two hosts."""

    def __init__(self, directory: Path, images: Path, cluster, repo: Path):
        super().__init__(directory, images)
        self.cluster = cluster
        self.repo = repo
        launcher = ["scripts/ssh/launch_torchrun_auto.sh", "configs/default_config.yaml", "1"]
        self.command = ["scripts/supervise.py", *launcher, "node01", "node02", *OPTIONS]
        self.command += ["--dataset=imagefolder", f"--data-dir={images}"]
        self.command += [f"--checkpoint-dir={self.run}"]
        self.env = cluster.env | {
            "PYTHON": sys.executable,
            "LOG_DIR": str(directory / "logs"),
            "OMP_NUM_THREADS": "1",
            "HANG_TIMEOUT": str(HANG_TIMEOUT),
        }

    def start(self) -> subprocess.Popen:
        streams = dict.fromkeys(("stdout", "stderr"), self.log.open("a"))
        command = [HERE / "on.sh", "login", *self.command]
        return subprocess.Popen(
            command, env=self.env, cwd=self.repo, start_new_session=True, **streams
        )

    def members(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for process in self.cluster.processes():
            with suppress(OSError):  # it has just ended
                kind = kind_of(process.host, process.pid, process.line)
                found.setdefault(kind, []).append(process.pid)
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, images) -> dict:
    training = Training(tmp_path_factory.mktemp("undisturbed"), images)
    assert training.start().wait(timeout=300) == 0, training.log.read_text()[-2000:]
    return training.weights()


@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*case, marks=() if case in IN_CI else pytest.mark.long, id=" ".join(case))
        for case in CAUSES
    ],
)
def test_a_process_that_is_killed_or_stopped_leaves_nothing_and_costs_nothing_saved(
    tmp_path, images, undisturbed, cluster, repo, kind, name, repeat
):
    training = SshTraining(tmp_path, images, cluster, repo)
    stays_stopped = kind in ("rank", "worker")
    attempts = disturb(training, kind, name, f"ssh {kind} {name} {repeat}", stays_stopped)
    assert attempts[0]["cause"] in CAUSES[kind, name], attempts
    assert_same_weights(training.weights(), undisturbed)
