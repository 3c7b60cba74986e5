"""scripts/doctor.py on this machine: GPUs are simulated, and two nodes are two ranks."""

import os
import re
import subprocess
import sys

import doctor
import node_check
import pytest
import report
from gpus import gpu, nvidia_smi
from harness import LAUNCH_VARIABLES, REPO, run_ranks

DOCTOR = REPO / "scripts/doctor.py"
ENV = {name: value for name, value in os.environ.items() if not LAUNCH_VARIABLES.search(name)}


def run(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, DOCTOR, *words]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, cwd=REPO)


def problems(text: str) -> list[str]:
    """The lines with a warning or a failure, with single spaces."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if line.startswith(("WARN", "FAIL"))]


# ---- one machine


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.5.1+cu121", "FAIL"),
        ("2.6.0", "OK"),
        ("2.10.0", "OK"),
        ("2.15.0a0+git5ca7", "OK"),
    ],
)
def test_an_old_pytorch(monkeypatch, version, level):
    monkeypatch.setattr(node_check, "torch_build", lambda: {"__version__": version})
    (finding,) = node_check.software()
    assert (finding.level, finding.check) == (level, "PyTorch")


def test_a_full_disk(small_disk):
    small_disk(8 << 20)
    first, _ = node_check.disks(str(small_disk.path / "run"))
    assert (first.level, first.check) == ("FAIL", "disk")


@pytest.mark.parametrize("words", [["--nothing"], ["--config", "absent.yaml"]])
def test_wrong_arguments_are_one_error(words):
    result = run(*words)
    assert result.returncode == 2 and words[-1] in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        ("--config my.yaml", "/scratch/my run"),
        ("--config=my.yaml --checkpoint-dir=/", "/"),
        ("--config null.yaml", "checkpoints"),
        ("", "checkpoints"),
    ],
)
def test_the_config_names_the_run_directory_and_the_command_line_overrides_it(
    tmp_path, monkeypatch, words, directory
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["doctor.py", *words.split()])
    (tmp_path / "my.yaml").write_text('checkpoint_dir: "/scratch/my run"  # or none\nepochs: 3\n')
    (tmp_path / "null.yaml").write_text("checkpoint_dir: null\n")
    assert doctor.parse().checkpoint_dir == directory


# ---- GPUs

ECC_ERRORS = "ecc.errors.uncorrected.volatile.total"
USED = {"memory.used": "17012", ECC_ERRORS: "2"}


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
    lines = gpu_findings(eight)
    assert lines[0].startswith("FAIL GPUs GPU 3 has failed ([GPU is lost]): exclude the node, ")
    assert lines[1].startswith("FAIL GPUs GPU 5 has failed (2 uncorrected memory errors): ")
    assert "17012 of 143771 MiB of GPU 5 are in use: see nvidia-smi" in lines[2]
    assert lines[3].startswith("OK GPUs 8 x NVIDIA H200, driver 999.1")


def test_a_pytorch_that_cannot_use_the_gpus_is_a_warning(gpu_findings):
    (only,) = gpu_findings(2, cuda=None)
    assert "PyTorch 2.14.1 is built for CPUs, and there are 2 x NVIDIA H200" in only
    assert "TORCH_INDEX=cu126 scripts/quickstart.sh" in only


def test_an_nvidia_smi_that_fails_or_hangs_is_a_warning(gpu_findings, monkeypatch):
    error = "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error"
    (only,) = gpu_findings(4, fails=error)
    assert only.startswith(f"WARN gpus the check failed (RuntimeError: nvidia-smi: {error}")
    assert gpu_findings(1, fails="No devices were found") == ["OK GPUs none: uses the CPU"]
    monkeypatch.setattr(node_check, "SMI_SECONDS", 1)
    (only,) = gpu_findings(8, hangs=True)
    assert "RuntimeError: nvidia-smi does not answer within 1 s" in only


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_missed(gpu_findings, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_findings(8) == ["OK GPUs none: uses the CPU"]


@pytest.mark.parametrize("visible", ["0,1", "GPU-0,GPU-1"])
def test_gpus_of_other_jobs_are_not_checked(gpu_findings, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (only,) = gpu_findings([gpu(0), gpu(1), gpu(2, **USED)])
    assert only.startswith("OK GPUs 2 x NVIDIA H200")


# ---- a launch


def test_in_a_launch_a_warning_is_no_failure_and_any_option_is_accepted(tmp_path):
    words = [REPO / "scripts/guard.py", DOCTOR, f"--checkpoint-dir={tmp_path}"]
    result = run_ranks(2, *words, "--epochs=3", env=lambda rank: {"NCCL_P2P_DISABLE": 1})
    assert result.codes == [0, 0], result.err
    assert "WARN environment" in str(problems(result.out[0])), result.out
    speed = r"2 ranks: 8 KiB in \d+ us, 4 MiB at \d+\.\d\d GB/s \(bus\)"
    assert re.search(f"(?m)^OK   all_reduce +{speed}$", result.out[0]), result.out
    assert "OK   run directory" in result.out[0] and os.listdir(tmp_path) == []


BEFORE = f"""
import sys
sys.path.append({str(REPO / "scripts")!r})
sys.argv = argv
import doctor, node_check, os, time
rank = int(os.environ["RANK"])
doctor.HOST = f"node0{{rank + 1}}"
node_check.check_machine = lambda run_directory: []
CODE
doctor.main()
"""


@pytest.fixture
def nodes(tmp_path):
    """nodes(code) -> the problems that the first of two nodes finds, after this code on both."""

    def nodes(code: str) -> list[str]:
        words = [str(DOCTOR), f"--checkpoint-dir={tmp_path}"]
        failure = tmp_path / "failure"
        env = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "FAILURE_FILE": failure}
        before = BEFORE.replace("CODE", code)
        result = run_ranks(2, *words, env=lambda rank: env, before=before)
        assert result.out[0], result.err
        found = problems(result.out[0])
        has_failed = any(line.startswith("FAIL") for line in found)
        assert has_failed == (result.codes[0] == 2) == failure.exists()
        return found

    return nodes


def test_the_faults_of_one_node_are_named(nodes):
    code = """if rank == 1:
        # the run directory is not shared
        doctor.Path.exists = lambda path: ".mark_" not in path.name
        doctor.Rank.listen = lambda self: 1
    """
    found = nodes(code)
    starts = [
        "FAIL network rank 0 on node01: cannot connect to node02: [Errno 111] Connection refused",
        "FAIL run directory rank 1 on node02: ",
    ]
    assert len(found) == len(starts), found
    assert all(line.startswith(start) for line, start in zip(found, starts)), found


def test_a_rank_that_stops_after_the_ranks_have_met_is_named(nodes):
    code = """find_mark = doctor.Rank.find_mark
def find_mark_and_shorten(self):
    self.limit = 2  # for the all_reduce; the checks before it may be slow
    return find_mark(self)
doctor.Rank.find_mark = find_mark_and_shorten
if rank == 1:
    doctor.Rank.all_reduce = lambda self: os._exit(0)
"""
    first, second = nodes(code)
    assert first.startswith("FAIL all_reduce rank 0 on node01: ")
    assert second.startswith("FAIL all_reduce rank 1 on node02: no answer: ")
