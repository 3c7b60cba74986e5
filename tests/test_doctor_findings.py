"""The doctor on this machine, without a cluster; GPUs are simulated."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from findings import DOCTOR, found
from gpus import gpu, nvidia_smi
from harness import LAUNCH_VARIABLES, REPO, free_port

sys.path.append(str(REPO / "scripts"))

import checks  # noqa: E402
import doctor  # noqa: E402
import guard  # noqa: E402

ENV = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.search(name)}


def run(*arguments, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, DOCTOR, *map(str, arguments)]
    return subprocess.run(command, env=ENV | env, capture_output=True, text=True, cwd=REPO)


AWS = "NET/AWS Libfabric/GDRDMA"
ECC_ERRORS = "ecc.errors.uncorrected.volatile.total"
USED = {"memory.used": "17012", "power.limit": "350.00", ECC_ERRORS: "2"}


@pytest.fixture
def gpu_findings(tmp_path, monkeypatch):
    """gpu_findings(gpus, ..., seen=number): what checks.gpus() finds; PyTorch sees that many."""

    def gpu_findings(gpus, seen: int = 0, **more) -> list[str]:
        monkeypatch.setenv("PATH", nvidia_smi(tmp_path, gpus, **more))
        monkeypatch.setattr(checks, "SMI_SECONDS", 1)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        findings = list(map(str, checks.gpus()))
        return [" ".join(text.split()) for text in findings]

    return gpu_findings


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
    monkeypatch.setattr(torch, "__version__", version)
    (finding,) = checks.software()
    assert (finding.level, finding.check) == (level, "PyTorch")


@pytest.mark.parametrize("threads", ["64", "1", ""])
def test_more_threads_than_cores(monkeypatch, threads):
    """As in a PBS job, where OMP_NUM_THREADS is NCPUS."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(checks, "count_cores", lambda: 64)
    findings = list(map(str, checks.cores()))
    warned = "WARN cores             4 x OMP_NUM_THREADS=64 threads on 64 cores: unset it: "
    assert (warned in findings[0]) == (threads == "64") and len(findings) == 1 + (threads == "64")
    text = f"this process may use 64 of {os.cpu_count()} cores"
    assert text in findings[-1] and "OMP_NUM_THREADS" not in findings[-1]


def test_a_left_over_process_and_a_gpu_with_memory_errors(tmp_path):
    path = nvidia_smi(tmp_path, [gpu(0, **USED)], processes={"GPU-0": 4711})
    result = run("--json", PATH=path)
    assert result.returncode == 2, result.stderr
    findings = json.loads(result.stdout)
    warnings = found(findings, "WARN")
    assert warnings[:2] == [
        ": GPU memory: 17012 of 143771 MiB of GPU 0 are in use by process 4711",
        ": GPU power: the power of GPU 0 is limited to 350.00 of 700.00 W",
    ]
    assert "sees 0 of 1 GPUs, driver 999.1" in warnings[2]
    assert found(findings, "FAIL") == [": GPU memory: GPU 0 has 2 uncorrected memory errors"]


def test_one_of_eight_gpus_is_named(gpu_findings):
    eight = [gpu(index) for index in range(8)]
    assert gpu_findings(eight, seen=8) == [
        f"OK GPUs 8 x NVIDIA H200, CUDA {torch.version.cuda or 'none'}, driver 999.1"
    ]
    eight[5] |= {ECC_ERRORS: "2"}
    first, last = gpu_findings(eight, seen=8)
    assert first.startswith("FAIL GPU memory GPU 5 has 2 uncorrected memory errors: exclude the")
    assert last.startswith("OK GPUs 8 x ")


def test_a_gpu_that_has_fallen_off_the_bus_is_named(gpu_findings):
    """After Xid 79: nvidia-smi prints this for each value of that GPU, or fails."""
    lost = gpu(3, **{ECC_ERRORS: "[GPU is lost]", "memory.used": "[GPU is lost]"})
    first, last = gpu_findings([gpu(0), gpu(1), gpu(2), lost], seen=3)
    assert first.startswith("FAIL GPUs GPU 3 has failed ([GPU is lost]): exclude the node, and ")
    assert last.startswith("WARN GPUs PyTorch ") and "sees 3 of 4 GPUs" in last
    error = "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error"
    (only,) = gpu_findings(4, fails=error)
    assert only == f"WARN GPUs nvidia-smi: {error}: ask the administrators"


def test_an_nvidia_smi_that_hangs_delays_the_doctor_only_for_a_moment(gpu_findings):
    (only,) = gpu_findings(8, hangs=True)
    assert only == "WARN GPUs nvidia-smi does not answer within 1 s: ask the administrators"


def test_hidden_gpus_are_not_missed(gpu_findings, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(guard, "has_gpu", lambda: True)
    assert gpu_findings(8) == ["OK GPUs none: uses the CPU"]


def test_gpus_of_other_jobs_are_not_checked(tmp_path):
    path = nvidia_smi(tmp_path, [gpu(0, **USED)])
    result = run("--json", PATH=path, CUDA_VISIBLE_DEVICES="GPU-777")
    assert [f for f in json.loads(result.stdout) if f["check"] in ("GPU memory", "GPU power")] == []


def test_the_transport_is_read_from_the_log_of_nccl():
    log = (
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/3/GDRDMA\n"
        "n1:1:2 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct\n"
    )
    assert doctor.nccl_links(log) == ["NET/IB/GDRDMA", "P2P/CUMEM", "SHM/direct"]


@pytest.mark.parametrize(
    ("line", "link"),
    [
        ("Channel 02/0 : 8[0] -> 1[1] [receive] via NET/IB/0/GDRDMA/Shared", "NET/IB/GDRDMA"),
        ("Channel 02/0 : 0[0] -> 9[1] [send] via NET/IB/0(1)/GDRDMA", "NET/IB/GDRDMA"),
        ("Channel 02/0 : 0[0] -> 9[1] [send] via NET/IB/0(1)", "NET/IB"),
        ("Channel 03/0 : 1[1] -> 2[0] [send] via NET/Socket/0", "NET/Socket"),
        ("Channel 03/0 : 1[1] -> 2[0] [send] via NET/AWS Libfabric/0/GDRDMA", AWS),
        ("Channel 03/0 : 1[1] -> 2[0] via P2P/direct pointer/read", "P2P/direct pointer"),
        ("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP/GDRDMA"),
        ("NVLS comm 0x5612 headRank 0 nHeads 8 nvlsRanks 8 buffSize 1048576", "NVLS"),
    ],
)
def test_each_transport_of_nccl_is_named(line, link):
    """Lines in the form of NCCL 2.30."""
    assert doctor.nccl_links(f"n1:1:2 [0] NCCL INFO {line}\nn1:1:2 [0] NCCL INFO x\n") == [link]


def test_nvls_that_is_not_used_is_not_named():
    available = "NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)\n"
    assert doctor.nccl_links(available) == []


def test_missing_packages_are_named_and_the_other_checks_run():
    command = [sys.executable, "-S", DOCTOR]  # without its site-packages
    result = subprocess.run(command, env=ENV, capture_output=True, text=True, cwd=REPO)
    assert result.returncode == 2 and not result.stderr
    assert f"FAIL packages          {sys.executable} has no torch, torchvision" in result.stdout
    assert "OK   disk" in result.stdout


def test_the_config_names_the_data_and_the_command_line_overrides_it(tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("dataset: imagefolder\ndata_dir: /absent\n# dataset: mnist\nepochs: 3\n")
    result = run("--json", "--config", config)
    (line,) = [f["observed"] for f in json.loads(result.stdout) if f["level"] == "FAIL"]
    assert "--dataset imagefolder needs /absent/train, which does not exist" in line
    result = run("--json", "--config", config, "--dataset=mnist_sample")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "absent.yaml"], "cannot read --config absent.yaml: [Errno 2] No such file"),
        (["configs/default_config.yaml"], "configs/default_config.yaml is not an option outside"),
        (["--conf=x.yaml"], "--conf=x.yaml is not an option outside of a launch: see --help"),
    ],
)
def test_without_a_launch_it_refuses_unknown_options(words, message):
    result = run(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"doctor.py: error: {guard.HOST}: {message}")
    assert result.stderr.count("\n") == 1


FAR = {"milliseconds": 40.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "OK : TCP from each node to each other node"),
        ({"ab": FAR, "ba": FAR}, "WARN a and b: 40 ms round trip"),
        (dict.fromkeys(["ab", "ba", "bc", "cb"], FAR), "WARN b: 40 ms round trip to each of the"),
        ({"ab": {"milliseconds": 50.0}, "bc": FAR}, "WARN a and b: 50 ms round trip"),
        ({"ca": {"error": "refused"}}, "FAIL c: cannot connect to a: refused"),
    ],
)
def test_what_the_connections_of_three_nodes_mean(changes, expected):
    """changes: of a healthy network; "ab" is from a to b."""
    reached = {}
    for sender in range(3):
        results = {}
        for receiver in {0, 1, 2} - {sender}:
            link = "abc"[sender] + "abc"[receiver]
            results[str(receiver)] = changes.get(link, {"milliseconds": 0.1})
        reached[sender] = results
    (finding,) = doctor.network_findings(reached, {0: "a", 1: "b", 2: "c"})
    assert f"{finding.level} {finding.where}: {finding.observed}".startswith(expected)


def test_in_a_launch_a_warning_is_no_failure_and_any_option_is_accepted():
    where = ["--nnodes=1", "--node-rank=0", "--nproc-per-node=2", "--master-addr=localhost"]
    words = [*where, f"--master-port={free_port()}", "--json", "--epochs=3", "--my-own-option"]
    result = run(*words, NCCL_P2P_DISABLE="1")
    assert result.returncode == 0, result.stderr
    findings = json.loads(result.stdout)
    assert any("NCCL_P2P_DISABLE" in line for line in found(findings, "WARN"))
    (measured,) = [f["data"] for f in findings if f["check"] == "all_reduce"]
    assert (measured["ranks"], measured["local"]) == (2, 2)
    assert list(measured["seconds"]) == ["all 8192", "all 4194304"]


def rank_of_two(rank: int, port: int, code: str) -> subprocess.Popen:
    """One of two ranks; the code may change the doctor's time limits."""
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    code = f"import sys; sys.path.append({str(REPO / 'scripts')!r}); import doctor; {code}"
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=ENV | env, stdout=subprocess.PIPE, text=True, cwd=REPO)


def test_what_a_library_prints_in_a_launch_is_no_part_of_the_report():
    noise = "import os; cores = doctor.checks.cores; "  # gloo of PyTorch 2.8: "[Gloo] Rank 0 is"
    noise += "doctor.checks.cores = lambda: os.write(1, b'[Gloo] Rank') and cores(); "
    launch = "os.environ['WORLD_SIZE'] = '1'; sys.argv.append('--json'); doctor.main()"
    output, _ = rank_of_two(0, free_port(), noise + launch).communicate(timeout=60)
    assert json.loads(output)[-1]["level"]


def test_a_rank_that_stops_after_the_ranks_have_met_is_named():
    port = free_port()
    code = "doctor.REDUCE_SECONDS = 2; doctor.main()"
    first = rank_of_two(0, port, code)
    stop = "doctor.Rank.check_all_reduce = lambda self: doctor.os._exit(9); doctor.main()"
    second = rank_of_two(1, port, stop)
    output, _ = first.communicate(timeout=60)
    second.communicate()
    assert first.returncode == 2
    assert re.search(r"(?m)^FAIL all_reduce +rank 0: .*; rank 1: no answer: ", output), output


def test_another_program_on_the_master_port_is_named(tmp_path):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        code = "doctor.MEET_SECONDS = 2; import os; rank = doctor.Rank(doctor.parse([])[0], "
        code += "doctor.guard.launch_environment(os.environ)); rank.info = {}; "
        code += f"rank.notes = doctor.Path({str(tmp_path)!r}); rank.meet(); "
        code += "print(rank.findings[0], flush=True); os._exit(0)"
        output, _ = rank_of_two(1, port, code).communicate(timeout=60)
    assert f"cannot open the store at localhost:{port}: another program answers there" in output
