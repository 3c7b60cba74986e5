"""scripts/hosts.py: which hosts train, and where rank 0 listens."""

import os
import socket
import subprocess
import sys

import hosts
import pytest
from harness import REPO

PROGRAM = REPO / "scripts/hosts.py"
FOUR = ["n1", "n2", "n3", "n4"]


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """As Slurm's, for two names."""
    program = tmp_path / "scontrol"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  "show hostnames n[3-4]") echo n3; echo n4 ;;\n'
        '  "show hostnames rack[1-2]") echo rack1; echo rack2 ;;\n'
        "  *) exit 1 ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("scontrol")
def test_the_hosts_of_a_job_come_from_slurm_or_pbs(tmp_path):
    assert hosts.hosts_of_job({"SLURM_JOB_NODELIST": "rack[1-2]"}) == ["rack1", "rack2"]
    slots = tmp_path / "nodes"
    slots.write_text("b\nb\na\na\n")
    assert hosts.hosts_of_job({"PBS_NODEFILE": str(slots)}) == ["b", "a"]
    assert hosts.hosts_of_job({}) == ["localhost"]
    env = {**os.environ, "PBS_NODEFILE": str(slots)}
    assert subprocess.check_output([sys.executable, PROGRAM, "--hosts"], env=env) == b"b a\n"


@pytest.mark.parametrize(
    ("nnodes", "excluded", "chosen"),
    [
        ("", "", FOUR),
        ("", "n2", ["n1", "n3", "n4"]),
        ("2", "", ["n1", "n2"]),
        ("2", "n1", ["n2", "n3"]),
        ("2", "n1,n9, n2.cluster", ["n3", "n4"]),
        ("2", "n[3-4]", ["n1", "n2"]),
        ("4", "", FOUR),
        ("2:4", "n4", ["n1", "n2", "n3"]),
        ("1:3", "", ["n1", "n2", "n3"]),
        ("1:1", "", ["n1"]),
    ],
)
@pytest.mark.usefixtures("scontrol")
def test_the_first_hosts_that_are_not_excluded_train(capsys, nnodes, excluded, chosen):
    assert hosts.choose_hosts(FOUR, {"NNODES": nnodes, "EXCLUDED_NODES": excluded}) == chosen
    has_unknown = "n9" in excluded
    assert ("EXCLUDED_NODES" in capsys.readouterr().err) == has_unknown


@pytest.mark.parametrize(
    "nnodes", ["8", "0", "3:2", "2:8", "0:2", "-1", ":2", "2:", "two", "2:3:4"]
)
def test_nnodes_that_the_job_does_not_have_are_refused(nnodes):
    with pytest.raises(ValueError, match=f"NNODES is '{nnodes}', not a number from 1 to 4"):
        hosts.choose_hosts(FOUR, {"NNODES": nnodes})


@pytest.mark.parametrize(
    ("nnodes", "excluded"), [("3", "n1,n2"), ("3:4", "n1,n2"), ("", "n1,n2,n3,n4")]
)
@pytest.mark.usefixtures("scontrol")
def test_more_excluded_nodes_than_can_be_spared_are_refused(nnodes, excluded):
    with pytest.raises(ValueError, match="EXCLUDED_NODES is"):
        hosts.choose_hosts(FOUR, {"NNODES": nnodes, "EXCLUDED_NODES": excluded})


def test_a_range_is_refused_where_slurm_does_not_expand_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="write each name of n"):
        hosts.choose_hosts(FOUR, {"EXCLUDED_NODES": "n[3-4]"})


def test_a_host_is_found_without_its_domain_if_no_other_has_its_name():
    names = ["gpu1.rack1", "gpu1.rack2", "gpu2.rack1"]
    assert hosts.name_among(names, "gpu1.rack2") == "gpu1.rack2"
    assert hosts.name_among(names, "gpu2") == "gpu2.rack1"
    assert hosts.name_among(names, "gpu1") is None
    assert hosts.name_among(names, "gpu3") is None


def test_the_master_is_the_first_host_unless_it_is_set(monkeypatch):
    monkeypatch.setattr(hosts, "HOST", "n1.cluster")
    env = {"SLURM_JOB_ID": "17", "ATTEMPT_ID": "17.1"}
    master, port = hosts.choose_master(env, FOUR)
    assert (master, int(port) // 15000) == ("n1", 1)
    assert hosts.choose_master({**env, "MASTER_ADDR": "ib1"}, FOUR)[0] == "ib1"
    assert hosts.choose_master({**env, "MASTER_PORT": "29400"}, FOUR)[1] == "29400"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_hosts_that_are_connected_with_a_port_are_known(family):
    """127.0.0.2 stands for another host; with IPv6, PyTorch's store gets its address mapped."""
    both = family == socket.AF_INET6
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # this host itself
            assert hosts.peers_of(port) == set()
            other = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
            assert hosts.peers_of(port) == {"127.0.0.2"}
            other.close()
            server.accept()[0].close()
    assert hosts.addresses_of("127.0.0.2") == {"127.0.0.2"}
    assert hosts.addresses_of("absent.invalid") == set()


def test_each_job_step_and_attempt_has_a_port():
    job = {"SLURM_JOB_ID": "17"}
    assert hosts.port_of_job(job) == hosts.port_of_job(job)
    others = [
        job,
        {"PBS_JOBID": "18"},
        {**job, "SLURM_STEP_ID": "3"},
        {**job, "ATTEMPT_ID": "17.2"},
    ]
    assert len({hosts.port_of_job(env) for env in others}) == 4


def test_the_next_port_is_used_if_the_first_is_taken(capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        first = hosts.free_port(20000)
        taken.close()
    with socket.socket() as taken:
        taken.bind(("", first))
        taken.listen()
        assert hosts.free_port(first) > first
    assert f"port {first} is in use" in capsys.readouterr().err
    printed = subprocess.check_output([sys.executable, PROGRAM, "--free-port"])
    assert 15000 <= int(printed) < 32768
