"""The doctor on the real cluster. test_doctor_findings.py has more faults, without a cluster."""

import re
import shlex
from pathlib import Path

import pytest

RUN, SRUN = "run_distributed.slurm", "slurm_train_multinode.sh"
CONFIG = "configs/default_config.yaml"


def job(cluster, repo, run, script, **env):
    """The doctor as a job on two nodes: (exit code, its output)."""
    flags = ["--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    words = [f"--output={run}.out", script, CONFIG, f"--checkpoint-dir={run}"]
    return cluster.sbatch(repo, *flags, *words, TRAIN_SCRIPT="scripts/doctor.py", **env)


def lines(text: str, level: str) -> list[str]:
    """The findings of that level, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.startswith(level)]


@pytest.fixture
def inject(cluster):
    """inject(command, undo): run the command on node02; undo it when the test ends."""
    undoings = []

    def on_node02(command: str) -> None:
        code, text = cluster.on("node02", "bash", "-c", command)
        assert code == 0, text

    def inject(command: str, undo: str) -> None:
        undoings.append(undo)
        on_node02(command)

    yield inject
    for undo in reversed(undoings):
        on_node02(undo)


def replaced(path: Path, content: str) -> tuple[str, str]:
    """(command, undo) that replaces the content of a file, with a bind mount."""
    copy = shlex.quote(f"/run/{path.name}")
    path = shlex.quote(str(path))
    return f"cat > {copy} <<'END' && mount --bind {copy} {path}\n{content}\nEND", f"umount {path}"


def test_a_healthy_cluster_gets_no_warning(cluster, repo, tmp_path):
    code, text = job(cluster, repo, tmp_path / "run", RUN)
    assert code == 0, text
    assert lines(text, "WARN") == lines(text, "FAIL") == [], text
    for check in ("run directory", "network"):
        assert re.search(f"(?m)^OK   {check} ", text), text
    speed = r"4 ranks: 8 KiB in \d+ us, 4 MiB at \d+\.\d\d GB/s \(bus\)"
    assert re.search(f"(?m)^OK   all_reduce +{speed}$", text), text


@pytest.mark.long
def test_many_faults_of_one_node_are_reported_together(cluster, repo, tmp_path, inject):
    """node02 has its own run directory and a tiny /dev/shm.

    Its host name is a loopback address, which is no fault: gloo gets another network interface.
    """
    run = tmp_path / "run"
    run.mkdir()
    inject(f"mount -t tmpfs tmpfs {run}", f"umount {run}")
    inject("mount -t tmpfs -o size=64m tmpfs /dev/shm", "umount /dev/shm")
    hosts = (cluster.directory / "etc-hosts").read_text()
    hosts = re.sub(r"(?m)^\S*10\.77\.0\.12 .*\n", "", hosts) + "127.0.1.1 node02"
    inject(*replaced(Path("/etc/hosts"), hosts))
    code, text = job(cluster, repo, run, SRUN)
    assert code == 2, text
    (warning,) = lines(text, "WARN")
    assert warning.startswith("WARN /dev/shm node02: "), text
    (failure,) = lines(text, "FAIL")
    assert failure.startswith("FAIL run directory rank 2 on node02, rank 3 on node02: "), text


@pytest.mark.long
def test_free_ports_between_nodes_are_blocked(cluster, repo, tmp_path, inject):
    """As on clusters that open only a few: the ranks connect, but gloo or NCCL then hangs.

    One launch per terminal: Slurm needs these ports, too.
    """
    rule = "tcp dport 32768-65535 tcp flags & (syn|ack) == syn ip saddr 10.77.0.11 drop"
    chain = "add chain ip t c { type filter hook input priority 0; }"
    rules = f"add table ip t; {chain}; add rule ip t c {rule}"
    inject(f"nft {shlex.quote(rules)}", "nft flush ruleset")
    nodes = []
    for rank, host in enumerate(["node01", "node02"]):
        words = ["scripts/cluster_train.sh", CONFIG, 2, rank, "node01", 29400]
        env = {"TRAIN_SCRIPT": "scripts/doctor.py", "NPROC_PER_NODE": "1"}
        nodes.append(cluster.start(host, *words, f"--checkpoint-dir={tmp_path}", cwd=repo, **env))
    text, _ = [node.communicate(timeout=120)[0] for node in nodes]
    assert nodes[0].returncode == 2, text
    where = "rank 0 on node01"
    assert re.search(f"(?m)^FAIL network +{where}: cannot connect to node02: timed out", text), text
