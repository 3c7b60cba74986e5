"""A real cluster for the tests of the launchers: Slurm and sshd in namespaces of this machine."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from harness import REPO, assert_same_state, copy_repository, newest_in, train
from machines import HERE, PROBE, Cluster, why_not

skipped: list = []


def pytest_collection_modifyitems(config, items):
    if not (reason := why_not()):
        return
    if os.environ.get("CLUSTER_TESTS") == "required":
        raise pytest.UsageError(f"the cluster tests are required, but need {reason}")
    skipped[:] = [item for item in items if HERE in item.path.parents]
    items[:] = [item for item in items if HERE not in item.path.parents]
    config.hook.pytest_deselected(items=skipped)


def pytest_terminal_summary(terminalreporter):
    if skipped:  # one line, in red
        line = f"{len(skipped)} CLUSTER TESTS SKIPPED: they need {why_not()}"
        terminalreporter.write_line(f"{line}. To run them: tests/run.sh --cluster", red=True)
    here = HERE.relative_to(REPO).as_posix()
    done = [r for o in ("passed", "failed") for r in terminalreporter.getreports(o)]
    if ran := sum(report.nodeid.startswith(here) for report in done):
        terminalreporter.write_line(f"{ran} tests ran on a real cluster of Slurm and sshd")


@pytest.fixture
def probe(tmp_path) -> dict[str, str]:
    """Variables: run a script that prints its rank and host, without checks (they import torch)."""
    path = tmp_path / "my_train.py"
    path.write_text(PROBE)
    return {"TRAIN_SCRIPT": str(path), "GUARD": "0"}


def newer_slurm(directory: Path, suite: str) -> dict[str, str]:
    """For Cluster(): the Slurm of that Debian suite, downloaded to the directory."""
    script = [HERE / "newer_slurm.sh", directory, suite]
    done = subprocess.run(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return {"SLURM_ROOT": str(directory)}


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> dict[str, str]:
    """For Cluster(): this machine's Slurm, or that of the Debian suite in the variable SLURM."""
    suite = os.environ.get("SLURM")
    return newer_slurm(tmp_path_factory.mktemp("slurm"), suite) if suite else {}


@pytest.fixture(scope="session")
def cluster(slurm):
    """Two nodes, node01 and node02, with eight GPU slots each."""
    cluster = Cluster(Path(f"/tmp/cluster-{os.getpid()}"), 2, 8, **slurm)
    yield cluster
    cluster.down()


@pytest.fixture(autouse=True)
def nothing_left(cluster, request):
    """Every test ends with none of its processes on any host."""
    yield
    if request.session.exitstatus != pytest.ExitCode.INTERRUPTED:
        cluster.assert_nothing_left()


@pytest.fixture(scope="session")
def racks(slurm):
    """Four nodes rack01-n1 ... rack02-n2, of two GPU slots and as many cores as the machine has.

    Slurm binds tasks to cores, and tracks processes with cgroups where that is possible.
    """
    names = " ".join(f"rack{rack:02}-n{node}" for rack in (1, 2) for node in (1, 2))
    cgroup = os.access("/sys/fs/cgroup/freezer", os.W_OK)
    cluster = Cluster(
        Path(f"/tmp/racks-{os.getpid()}"),
        *(4, 2),
        NAMES=names,
        CPUS=str(os.cpu_count()),
        PROCTRACK="cgroup" if cgroup else "linuxproc",
        **slurm,
    )
    yield cluster
    cluster.down()


@pytest.fixture
def lossy(slurm):
    """Two nodes for one test; Slurm marks a node as down after 20 s without contact."""
    cluster = Cluster(Path(f"/tmp/lossy-{os.getpid()}"), 2, 8, SILENCE="20", **slurm)
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def repo(tmp_path_factory):
    """A copy of the repository, in a directory with a space in its name."""
    return copy_repository(tmp_path_factory.mktemp("cluster") / "my repo")


@pytest.fixture(scope="session")
def options(tiny):
    return [*tiny, "--epochs=1", "--global-batch-size=48"]


@pytest.fixture(scope="session")
def expected(tmp_path_factory, options):
    """The final state of four ranks on one machine, without a launcher."""
    run = train(tmp_path_factory.mktemp("expected") / "run", 4, *options)
    return run.newest()


@pytest.fixture
def check(expected):
    """check(output, run, hosts): four ranks trained on these hosts to the expected weights."""

    def check(text: str, run: Path, hosts: dict[str, str]) -> None:
        per_node = f"{4 // len(hosts)} per node"
        assert f"Starting distributed training on 4 x cpu ({per_node})" in text, text
        found = re.findall(r"(?m)^(?:\S+: )?guard.py: ranks? ([\d,-]+) on (\S+)$", text)
        assert {host: ranks for ranks, host in found} == hosts, text
        assert_same_state(newest_in(run), expected)

    return check
