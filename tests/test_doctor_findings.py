"""scripts/doctor.py on this machine: GPUs are simulated, and two nodes are two ranks."""

import json
import os
import re
import socket
import subprocess
import sys

import doctor
import guard
import node_check
import pytest
import report
from gpus import gpu, nvidia_smi
from harness import LAUNCH_VARIABLES, REPO, free_port, run_ranks

DOCTOR = REPO / "scripts/doctor.py"
ENV = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.search(name)}
TITLES = ("level", "check", "where", "observed")


def run(*arguments, python=(), **env) -> subprocess.CompletedProcess:
    command = [sys.executable, *python, DOCTOR, *map(str, arguments)]
    return subprocess.run(command, env=ENV | env, capture_output=True, text=True, cwd=REPO)


def problems(findings: list[dict]) -> list[str]:
    lines = [" ".join(finding[title] for title in TITLES) for finding in findings]
    return [line for line in lines if not line.startswith("OK")]


@pytest.fixture
def diagnose(monkeypatch, capfd):
    """diagnose(argument, ...) -> (exit code, findings), without starting a process."""

    def diagnose(*arguments):
        monkeypatch.setattr(sys, "argv", ["doctor.py", "--json", *map(str, arguments)])
        code = doctor.main()
        return code, json.loads(capfd.readouterr().out)

    for name in os.environ.keys() - ENV.keys():
        monkeypatch.delenv(name)
    return diagnose


# ---- one machine


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.5.1+cu121", "FAIL"),
        ("2.6.0", "WARN"),  # CVE-2026-24747
        ("2.10.0", "OK"),
        ("2.15.0a0+git5ca7", "OK"),
    ],
)
def test_an_old_pytorch(monkeypatch, version, level):
    monkeypatch.setattr(node_check, "torch_build", lambda: {"__version__": version})
    (finding,) = node_check.software()
    assert (finding.level, finding.check) == (level, "PyTorch")


@pytest.mark.parametrize(("threads", "warned"), [("64", True), ("1", False), ("", False)])
def test_more_threads_than_cores(monkeypatch, threads, warned):
    """As in a PBS job, where OMP_NUM_THREADS is NCPUS."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(node_check, "count_cores", lambda: 64)
    text = " ".join(map(str, node_check.cores()))
    assert ("4 x OMP_NUM_THREADS=64 threads on 64 cores" in text) == warned


def test_one_core_for_a_rank_where_there_are_more(monkeypatch):
    """As srun without --cpus-per-task may give."""
    monkeypatch.setattr(node_check.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(node_check, "count_cores", lambda: 1)
    (finding,) = node_check.cores()
    assert finding.level == "WARN" and "1 of 8 cores" in finding.observed


def test_a_host_name_that_other_nodes_cannot_use(monkeypatch):
    monkeypatch.setattr(node_check, "HOST", "localhost")
    assert [finding.level for finding in node_check.host_name()] == ["OK"]  # one node
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (finding,) = node_check.host_name()
    assert finding.level == "WARN" and "GLOO_SOCKET_IFNAME" in finding.remedy


def test_a_tmpdir_too_long_for_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(node_check.tempfile, "tempdir", str(long))
    _, second = node_check.disks(str(tmp_path))
    assert second.level == "FAIL" and "TMPDIR" in second.remedy


def test_a_full_disk(small_disk):
    small_disk(8 << 20)
    first, _ = node_check.disks(str(small_disk.path / "run"))
    assert (first.level, first.check) == ("FAIL", "disk")


def test_missing_packages_are_named_and_the_other_checks_run():
    result = run(python=["-S"])  # without its site-packages
    assert result.returncode == 2 and not result.stderr
    assert f"FAIL packages          {sys.executable} has no torch, torchvision" in result.stdout
    assert "OK   disk" in result.stdout


def test_the_config_names_the_run_directory_and_the_command_line_overrides_it(diagnose, tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text(f"checkpoint_dir: {tmp_path}/run\n# checkpoint_dir: other\nepochs: 3\n")
    _, findings = diagnose("--config", config)
    assert f"run directory {tmp_path}: " in str(findings)
    _, findings = diagnose("--config", config, "--checkpoint-dir=/")
    assert "run directory /: " in str(findings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "absent.yaml"], "cannot read --config absent.yaml: [Errno 2] No such file"),
        (["--conf=x.yaml"], "--conf=x.yaml is not an option outside of a launch: see --help"),
    ],
)
def test_without_a_launch_it_refuses_unknown_options(words, message):
    result = run(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"doctor.py: error: {guard.HOST}: {message}")
    assert result.stderr.count("\n") == 1


# ---- GPUs

ECC_ERRORS = "ecc.errors.uncorrected.volatile.total"
USED = {"memory.used": "17012", "power.limit": "350.00", ECC_ERRORS: "2"}


@pytest.fixture
def gpu_findings(tmp_path, monkeypatch):
    """gpu_findings(gpus, ..., cuda=of PyTorch): what node_check.gpus() finds."""

    def gpu_findings(gpus, cuda: str | None = "13.0", **more) -> list[str]:
        build = {"__version__": "2.14.1", "cuda": cuda}
        monkeypatch.setattr(node_check, "torch_build", lambda: build)
        monkeypatch.setattr(report, "has_gpu", lambda: True)
        monkeypatch.setenv("PATH", nvidia_smi(tmp_path, gpus, **more))
        findings = node_check.attempt(node_check.gpus)
        return [" ".join(str(finding).split()) for finding in findings]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpu_findings


def test_gpus_that_have_failed_or_are_in_use_are_named(gpu_findings):
    eight = [gpu(index) for index in range(8)]
    (only,) = gpu_findings(eight)
    assert only.startswith("OK GPUs 8 x NVIDIA H200, ")
    eight[3] |= {ECC_ERRORS: "[GPU is lost]", "memory.used": "[GPU is lost]"}  # after Xid 79
    eight[5] |= USED
    lines = gpu_findings(eight, processes={"GPU-5": 4711})
    assert lines[0].startswith("FAIL GPUs GPU 3 has failed ([GPU is lost]): exclude the node, ")
    assert lines[1].startswith("FAIL GPUs GPU 5 has 2 uncorrected memory errors: ")
    assert "17012 of 143771 MiB of GPU 5 are in use by process 4711" in lines[2]
    assert "the power of GPU 5 is limited to 350.00 of 700.00 W" in lines[3]
    assert lines[4].startswith("OK GPUs 8 x NVIDIA H200, driver 999.1")


def test_a_pytorch_that_cannot_use_the_gpus_is_a_warning(gpu_findings):
    (only,) = gpu_findings(2, cuda=None)
    assert "PyTorch 2.14.1 is built for CPUs, and there are 2 x NVIDIA H200" in only
    old = [gpu(0, driver_version="570.86.10")]
    (only,) = gpu_findings(old, cuda="13.2")
    assert "for CUDA 13.2 needs driver 580 (or NVIDIA's cuda-compat), not 570.86.10: " in only
    assert "TORCH_INDEX=cu126 scripts/quickstart.sh" in only
    (only,) = gpu_findings(old, cuda="12.6")
    assert only.startswith("OK GPUs 1 x")


def test_an_nvidia_smi_that_fails_or_hangs_is_a_warning(gpu_findings, monkeypatch):
    error = "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error"
    (only,) = gpu_findings(4, fails=error)
    assert only.startswith(f"WARN gpus the check failed (RuntimeError: nvidia-smi: {error}")
    monkeypatch.setattr(node_check, "SMI_SECONDS", 1)
    (only,) = gpu_findings(8, hangs=True)
    assert "RuntimeError: nvidia-smi does not answer within 1 s" in only
    assert gpu_findings(1, fails="No devices were found") == ["OK GPUs none: uses the CPU"]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_missed(gpu_findings, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_findings(8) == ["OK GPUs none: uses the CPU"]


@pytest.mark.parametrize("visible", ["0,1", "GPU-0,GPU-1"])
def test_gpus_of_other_jobs_are_not_checked(gpu_findings, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (only,) = gpu_findings([gpu(0), gpu(1), gpu(2, **USED)])
    assert only.startswith("OK GPUs 2 x NVIDIA H200")


@pytest.mark.parametrize(
    ("line", "link"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P/CUMEM"),
        ("Channel 01 : 0[0] -> 1[1] via SHM/direct/direct", "SHM/direct"),
        ("Channel 02/0 : 8[0] -> 1[1] [receive] via NET/IB/0/GDRDMA/Shared", "NET/IB/GDRDMA"),
        ("Channel 02/0 : 0[0] -> 9[1] [send] via NET/IB/0(1)", "NET/IB"),
        ("Channel 03/0 : 1[1] -> 2[0] [send] via NET/Socket/0", "NET/Socket"),
        ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP/GDRDMA"),
        ("NVLS comm 0x5612 headRank 0 nHeads 8 nvlsRanks 8 buffSize 1048576", "NVLS"),
    ],
)
def test_each_transport_of_nccl_is_named(line, link):
    """Lines in the form of NCCL 2.30."""
    assert doctor.nccl_links(f"n1:1:2 [0] NCCL INFO {line}\nn1:1:2 [0] NCCL INFO x\n") == [link]


# ---- a launch


def test_in_a_launch_a_warning_is_no_failure_and_any_option_is_accepted(tmp_path):
    """As cluster_train.sh starts it."""
    where = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=2", "--master-addr=localhost"]
    words = [f"--master-port={free_port()}", f"--checkpoint-dir={tmp_path}", "--json"]
    result = run(*where, *words, "--epochs=3", "--my-own-option", NCCL_P2P_DISABLE="1")
    assert result.returncode == 0, result.stderr
    findings = json.loads(result.stdout)
    assert any("NCCL_P2P_DISABLE" in line for line in problems(findings))
    (speed,) = [f["observed"] for f in findings if f["check"] == "all_reduce"]
    assert re.fullmatch(r"2 ranks: 8 KiB in \d+ us, 4 MiB at \d+\.\d\d GB/s \(bus\)", speed)


BEFORE = f"""
import sys
sys.path.append({str(REPO / "scripts")!r})
sys.argv = argv
import doctor, guard, node_check, os, time, torch
rank = int(os.environ["RANK"])
doctor.HOST = guard.HOST = f"node0{{rank + 1}}"
node_check.check_machine = lambda run_directory: []
CODE
doctor.main()
"""


@pytest.fixture
def nodes(tmp_path):
    """nodes(code) -> the problems that the first of two nodes finds, after this code on both."""

    def nodes(code: str, count: int = 2, **variables) -> list[str]:
        env = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1} | variables
        words = [str(DOCTOR), "--json", f"--checkpoint-dir={tmp_path}"]
        before = BEFORE.replace("CODE", code)
        result = run_ranks(count, *words, env=lambda rank: env, before=before)
        assert result.out[0], result.err
        return problems(json.loads(result.out[0]))

    return nodes


def test_two_healthy_nodes_of_which_a_library_prints_something(nodes):
    assert nodes("node_check.check_machine = lambda directory: os.write(1, b'[Gloo]') and []") == []


def test_the_faults_of_one_node_are_named(nodes):
    code = """if rank == 1:
        torch.__version__ = type(torch.__version__)("2.9.1")
        doctor.appears = lambda file: False  # the run directory is not shared
        doctor.Rank.start_server = lambda self, infos: ("127.0.0.1", 1)
        torch.Tensor.__matmul__ = lambda left, right: torch.matmul(left, right) + 1e-9
    """
    found = nodes(code)
    starts = [
        "FAIL same everywhere  PyTorch differs: 2.9.1 for rank 1 on node02, ",
        "FAIL network node01 cannot connect to node02: [Errno 111] Connection refused",
        "FAIL matrix product  rank 1 on node02 computes other bits than rank 0 on node01",
        "FAIL run directory node02 ",
    ]
    assert len(found) == len(starts), found
    assert all(line.startswith(start) for line, start in zip(found, starts)), found


def test_ranks_that_are_missing_are_named(nodes):
    assert nodes("doctor.MEET_SECONDS = 1", 1, WORLD_SIZE=3) == [
        "FAIL ranks  1-2 of 3 did not answer within 1 s; the others are on node01",
    ]


def test_a_rank_that_stops_after_the_ranks_have_met_is_named(nodes):
    code = """doctor.REDUCE_SECONDS = 2
if rank == 1:
    doctor.Rank.check_all_reduce = lambda self: os._exit(0)
"""
    (line,) = nodes(code)
    assert line.startswith("FAIL all_reduce  rank 0: ") and "; rank 1: no answer" in line


def test_another_program_on_the_master_port_is_named(nodes):
    code = """doctor.MEET_SECONDS = 1
doctor.Rank.report_alone = lambda self: doctor.print_findings(self.findings, True)
"""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        where = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": None}
        (line,) = nodes(code, 1, RANK=1, WORLD_SIZE=2, **where)
    assert f"connecting to the store of rank 0 at 127.0.0.1:{port}: TimeoutError" in line


def test_the_rank_whose_gpu_differs_from_most_of_its_model_is_named():
    names = [f"rank {rank}" for rank in range(6)]
    products = {rank: {"model": "H100", "bits": "abab"} for rank in range(4)}
    products |= {rank: {"model": "A100", "bits": "cdcd"} for rank in (4, 5)}
    findings = doctor.product_findings(products, names)
    assert [finding.level for finding in findings] == ["OK", "OK"]
    products[0] = {"model": "H100", "bits": "other"}
    products[5] = {"error": "RuntimeError: CUDA error"}
    wrong = [f.observed for f in doctor.product_findings(products, names) if f.level == "FAIL"]
    assert wrong[0] == "rank 5 cannot multiply matrices: RuntimeError: CUDA error"
    assert wrong[1] == "rank 0 computes other bits than rank 1"
    assert len(wrong) == 2


def test_a_long_way_to_a_node_is_named():
    names = {0: "a", 1: "b"}
    reached = {0: [("b", 0.1, "")], 1: [("a", 40.0, "")]}
    (far,) = doctor.network_findings(reached, names)
    assert far.level == "WARN" and "in 40.00 ms or less: check the route from b to a" in str(far)
    (missing,) = doctor.network_findings(reached | {1: None}, names)
    assert (missing.level, missing.where) == ("FAIL", "b")
