"""scripts/node_check.py: what it refuses, and what it warns of."""

import errno
import json
import os
import socket
import subprocess
import sys

import guard
import node_check
import pytest
from harness import LAUNCH_VARIABLES, REPO, free_port

NODE_CHECK = REPO / "scripts/node_check.py"
CONFIG = "configs/default_config.yaml"
ENV = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.search(name)}


@pytest.fixture
def check(tmp_path):
    """check(argument, ...) -> (exit code, stdout, stderr); a refusal is also in FAILURE_FILE."""

    def check(*arguments, python=(), **env):
        failure = tmp_path / "failure.json"
        failure.unlink(missing_ok=True)
        command = [sys.executable, *python, NODE_CHECK, *map(str, arguments)]
        env = ENV | {"FAILURE_FILE": str(failure)} | env
        result = subprocess.run(command, env=env, capture_output=True, text=True, cwd=REPO)
        assert failure.exists() == (result.returncode == 2)
        if failure.exists():
            facts = json.loads(failure.read_text())
            error = f"node_check.py: error: {facts['host']}: {facts['reason']}\n"
            assert result.stderr == error and result.stdout == ""
        return result.returncode, result.stdout, result.stderr

    return check


@pytest.fixture
def no_torch(tmp_path) -> dict[str, str]:
    """A PyTorch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('PyTorch was imported')\n")
    return {"PYTHONPATH": str(tmp_path)}


def where(rank: int, address: str, port: int, nodes: int = 2) -> list[str]:
    words = f"--nnodes {nodes} --node-rank {rank} --master-addr {address} --master-port {port}"
    return words.split()


def test_a_node_without_gpus_passes_and_pytorch_is_not_imported(check, no_torch):
    words = [*where(0, "localhost", free_port(), nodes=1), "--nproc-per-node=2"]
    words += ["train_distributed.py", "--config", CONFIG, "--epochs=2"]
    assert check(*words, **no_torch) == (0, "0\n", "")


def test_missing_packages(check):
    code, _, error = check("train_distributed.py", python=["-S"])  # without its site-packages
    assert code == 2
    assert f"{sys.executable} has no torch, torchvision, yaml: pip install -r" in error
    code, _, error = check("my_train.py", python=["-S"], GUARD="0")
    assert code == 0 and "WARNING" in error and "has no torch: pip install -r" in error


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ("--checkpoint-dir runs/gloo", False),
        ("--distributed-backend gloo --checkpoint-dir runs/nccl", True),
        ("--backend=gloo", True),
        ("--backend gloo --backend nccl", False),
    ],
)
def test_the_backend_comes_from_an_option_not_from_a_path(monkeypatch, options, accepted):
    """For two ranks on one GPU, which nccl refuses."""
    refusals = []
    monkeypatch.setattr(node_check, "refuse", refusals.append)
    node_check.check_backend(options, 2, 1)
    assert (refusals == []) == accepted
    if refusals:
        assert refusals[0].startswith("2 ranks for nccl, but 1 visible GPUs: request GPUs")


def test_an_old_python():
    """Simulated: there is none here."""
    code = "import runpy, sys; sys.version_info = (3, 8, 10); sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, NODE_CHECK, "x.py"]
    env = ENV | {"PYTHONPATH": str(REPO / "scripts")}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert "is not Python 3.10 or newer" in result.stderr and result.stderr.count("\n") == 1


def test_an_unknown_master(check):
    code, _, error = check(*where(1, "no-such-host.invalid", 29400), "x.py")
    assert code == 2 and "master no-such-host.invalid is unknown here (" in error
    assert "set MASTER_ADDR" in error


@pytest.mark.parametrize("master", ["127.0.0.1", "::1"])
def test_a_port_in_use_on_the_master(check, tmp_path, master):
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.create_server((master, 0), family=family) as server:
        port = server.getsockname()[1]
        code, _, error = check(*where(0, master, port), "x.py")
        assert code == 2
        assert f"port {port} is in use here, on the master: set another MASTER_PORT" in error
        assert json.loads((tmp_path / "failure.json").read_text())["cause"] == "port"
    assert check(*where(0, master, port), "x.py") == (0, "0\n", "")


def test_a_master_that_is_another_host(check):
    code, _, error = check(*where(0, "192.0.2.1", 29400), "x.py")  # an address for examples
    assert code == 2 and "node rank 0 is here, but master 192.0.2.1 (192.0.2.1) is not" in error


@pytest.mark.parametrize("master", ["127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_a_master_address_that_means_the_local_host_on_every_node(check, master):
    code, _, error = check(*where(1, master, 29400), "x.py")
    assert code == 2 and f"resolves to {master}, which is this node itself" in error


@pytest.fixture
def check_addresses(monkeypatch, capfd):
    """check_addresses(name, its addresses, rank, nodes): passes with this master."""

    def check_addresses(name: str, addresses: list[str], rank: int, nodes: int) -> None:
        def resolve(host, port, *more, real=socket.getaddrinfo, **options):
            hosts = addresses if host == name else [host]
            return [info for host in hosts for info in real(host, port, *more, **options)]

        words = where(rank, name, free_port(), nodes)
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(sys, "argv", ["node_check.py", *words, "x.py"])
        node_check.main()
        assert capfd.readouterr() == ("0\n", "")

    return check_addresses


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_several_addresses_of_the_master_is_enough(check_addresses, rank):
    """Simulated: a name with an address that nothing answers, and one of this host."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))
        here = probe.getsockname()[0]
    check_addresses("master", ["fe80::1", "127.0.0.1", here], rank, 2)


def test_a_kernel_without_ipv6(monkeypatch, check_addresses):
    class Socket(socket.socket):
        def __init__(self, family=socket.AF_INET, *more, **options):
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *more, **options)

    monkeypatch.setattr(socket, "socket", Socket)
    check_addresses("localhost", ["::1", "127.0.0.1"], 0, 1)


def test_guard_0_turns_a_refusal_into_a_warning(check):
    words = [*where(1, "localhost", 29400), "--nproc-per-node=2", "x.py", "--backend=nccl"]
    code, out, error = check(*words, GUARD="0")
    assert (code, out) == (0, "0\n")
    lines = error.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"node_check.py: WARNING: {guard.HOST}: ") for line in lines)
    assert "2 ranks for nccl, but 0 visible" in lines[0] and "this node itself" in lines[1]


def test_harmful_variables_are_warnings(check):
    names = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo"}
    code, out, error = check("x.py", **names)
    assert (code, out) == (0, "0\n")
    starts = [f"node_check.py: WARNING: {guard.HOST}: {name}={names[name]}" for name in names]
    lines = error.splitlines()
    assert len(lines) == 3 and all(map(str.startswith, lines, starts)), lines
    assert check("x.py", NCCL_P2P_DISABLE="0")[2] == ""
    (line,) = check("x.py", FAILURE_FILE="/absent/logs/failure")[2].splitlines()
    assert "/absent/logs is not here" in line and "set LOG_DIR to a directory" in line


@pytest.mark.parametrize("free", [0.5, 2.0])
def test_a_tiny_dev_shm_is_a_warning(monkeypatch, free):
    """Simulated here; the cluster tests have a real one."""
    usage = type("usage", (), {"free": free * node_check.GIB, "total": 4 * node_check.GIB})
    monkeypatch.setattr(node_check.shutil, "disk_usage", lambda path: usage)
    (finding,) = node_check.shared_memory()
    assert finding.level == ("WARN" if free < 1 else "OK")
