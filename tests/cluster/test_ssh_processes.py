"""Each process of a supervised training on two hosts, started by ssh, is killed or stopped at a
random moment: as in faults/test_processes.py.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from disturbed import REPEATS, Training, disturb
from harness import is_rank, parent_of
from machines import HERE

# What attempts.jsonl may say of the disturbed attempt. "finished": it did not matter.
CAUSES = {
    ("supervisor", "SIGKILL"): {"finished"},  # it could not write a line
    ("launcher", "SIGKILL"): {"killed"},
    ("connect", "SIGKILL"): {"node lost"},
    ("ssh", "SIGKILL"): {"killed"},
    ("sshd", "SIGKILL"): {"node lost"},
    ("node.py", "SIGKILL"): {"node lost"},
    ("keeper", "SIGKILL"): {"node lost"},
    ("script", "SIGKILL"): {"killed"},
    ("agent", "SIGKILL"): {"killed"},
    ("rank", "SIGKILL"): {"killed"},
    ("worker", "SIGKILL"): {"exception", "killed"},
    ("launcher", "SIGSTOP"): {"finished"},
    ("connect", "SIGSTOP"): {"finished"},
    ("ssh", "SIGSTOP"): {"finished"},
    ("sshd", "SIGSTOP"): {"finished"},
    ("node.py", "SIGSTOP"): {"finished"},
    ("keeper", "SIGSTOP"): {"finished"},
    ("agent", "SIGSTOP"): {"finished"},
    ("rank", "SIGSTOP"): {"hang"},
    ("worker", "SIGSTOP"): {"hang"},
}


def kind_of(host: str, pid: int, line: str) -> str:
    """On node02, and on the launcher's host what belongs to node02; "" for the rest."""
    if host == "login":
        if "supervise.py" in line:
            return "supervisor"
        if line.startswith("bash -c") and " connect " in line:
            return "connect" if " node02 " in line else ""
        if "launch.py" in line:
            return "launcher"
        return "ssh" if line.startswith("ssh ") and " node02 " in line else ""
    if host != "node02":
        return ""
    if line.startswith("sshd"):
        return "sshd"
    if "ssh/node.py" in line:
        return "keeper" if "node.py" in line_of(parent_of(pid)) else "node.py"
    if "cluster_train.sh" in line or "run_torchrun.py" in line:
        return "script"
    if "torch.distributed.run" in line:
        return "agent"
    if "guard.py" in line:
        return "worker" if is_rank(line_of(parent_of(pid))) else "rank"
    return ""


def line_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


class SshTraining(Training):
    """One rank on each of two hosts."""

    def __init__(self, directory: Path, images: Path, cluster, repo: Path):
        super().__init__(directory, images)
        self.cluster = cluster
        self.cwd = repo
        self.command = [HERE / "on.sh", "login", "scripts/supervise.py"]
        self.command += ["scripts/ssh/launch_torchrun_auto.sh", "configs/default_config.yaml", "1"]
        self.command += ["node01", "node02"]
        self.env = {**self.env, **cluster.env}

    def members(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for process in self.cluster.processes():
            with suppress(OSError):  # it has just ended
                kind = kind_of(process.host, process.pid, process.line)
                found.setdefault(kind, []).append(process.pid)
        return found


@pytest.mark.long
@pytest.mark.parametrize("kind, name", CAUSES)
@pytest.mark.parametrize("repeat", range(REPEATS))
def test_a_process_that_is_killed_or_stopped_leaves_nothing_and_costs_nothing_saved(
    tmp_path, images, undisturbed, cluster, repo, kind, name, repeat
):
    training = SshTraining(tmp_path, images, cluster, repo)
    seed = f"ssh {kind} {name} {repeat}"
    disturb(training, kind, name, seed, CAUSES[kind, name], undisturbed)
