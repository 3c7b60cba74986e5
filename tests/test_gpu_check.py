"""scripts/check_gpu.py: what rank 0 concludes from the results of all GPUs.

accelerator/test_faulty_gpus.py has results of simulated GPUs.
"""

import json
import subprocess

import pytest
from gpus import gpu, nvidia_smi
from harness import REPO, load, run_ranks

check_gpu = load(REPO / "scripts/check_gpu.py")
guard = load(REPO / "scripts/guard.py")


def job(*nodes: str, model="H100") -> list[dict]:
    """Rank infos: for each node, a letter per GPU for the bits that it computes; -: unstable."""
    infos = []
    for number, letters in enumerate(nodes, 1):
        for index, letter in enumerate(letters):
            digest = letter.replace("-", "")
            result = {"model": model, "digest": digest, "seconds": [0.002, 0.001], "index": index}
            infos.append({"host": f"n0{number}", "gpu": f"GPU-{index}", "gpu_check": result})
    return infos


OTHER = "other bits than other GPUs of the same model: "
UNSTABLE = "other bits each time for the same product: "


@pytest.mark.parametrize(
    ("nodes", "failures", "warnings"),
    [
        (["aaaa", "aaaa"], [], []),
        (["aaaa", "aaba"], [f"GPU 2 of n02 computed {OTHER}"], []),
        (["aaba"], [f"GPU 2 of n01 computed {OTHER}"], []),
        (["ab"], [f"GPUs 0, 1 of n01 computed {OTHER}"], []),
        (["ab", "aa"], [f"GPU 1 of n01 computed {OTHER}"], []),
        (["ab", "bb", "aa"], [f"GPUs 0, 1 of n01 computed {OTHER}"], ["GPUs 0, 1 of n02 co"]),
        (["a", "a", "b"], [f"GPU 0 of n03 computed {OTHER}"], []),
        (["a", "b"], [], [f"GPU 0 of n02 computed {OTHER}compare the drivers and libraries"]),
        (["aa", "bb"], [], [f"GPUs 0, 1 of n02 computed {OTHER}compare the drivers"]),
        (["aaaa", "bbbb", "aaaa"], [], [f"GPUs 0, 1, 2, 3 of n02 computed {OTHER}compare the"]),
        (["aa", "a-"], [f"GPU 1 of n02 computed {UNSTABLE}"], []),
        (["--"], [f"GPUs 0, 1 of n01 computed {UNSTABLE}"], []),
        (["ab", "aa", "-a"], [f"GPU 0 of n03 computed {UNSTABLE}", "GPU 1 of n01 co"], []),
        (["a"], [], []),
    ],
)
def test_a_gpu_with_other_bits_is_named_if_it_is_certain_that_it_has_failed(
    nodes, failures, warnings
):
    problems = check_gpu.compare(job(*nodes))
    for is_failure, expected in ((True, failures), (False, warnings)):
        texts = [problem.text for problem in problems if problem.is_failure == is_failure]
        assert len(texts) == len(expected), texts
        assert all(text.startswith(start) for text, start in zip(texts, expected)), texts


def test_only_gpus_of_the_same_model_are_compared():
    assert check_gpu.compare(job("aaa") + job("bbb", model="A100")) == []
    slow = job("bbb", model="A100")
    for info in slow:
        info["gpu_check"]["seconds"] = [0.02, 0.01]
    assert check_gpu.compare(job("aaa") + slow) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([0.0027, 0.001], "GPU 3 of n01 is 35% slower than other GPUs of the same model: see its"),
        ([0.002, 0.002], "GPU 3 of n01 is 100% slower than"),
        ([0.0022, 0.0011], ""),
        ([0.001, 0.0005], ""),
    ],
)
def test_a_gpu_that_is_more_than_15_percent_slower_is_a_warning(seconds, text):
    infos = job("aaaa", "aaaa")
    infos[3]["gpu_check"]["seconds"] = seconds
    problems = check_gpu.compare(infos)
    assert len(problems) == bool(text)
    assert not text or (problems[0].text.startswith(text) and not problems[0].is_failure)


def test_of_two_gpus_the_slower_one_is_named():
    infos = job("aa")
    infos[0]["gpu_check"]["seconds"] = [0.003, 0.001]
    (problem,) = check_gpu.compare(infos)
    assert problem.text.startswith("GPU 0 of n01 is 50% slower")


def test_gpus_that_could_not_be_checked_are_named_once():
    infos = job("aaaa")
    for info in infos[:2]:
        info["gpu_check"] = {
            "not_checked": "RuntimeError: no memory",
            "index": info["gpu_check"]["index"],
        }
    infos.append({"host": "n02", "gpu": ""})  # a rank without a GPU
    (problem,) = check_gpu.compare(infos)
    start = "GPUs 0, 1 of n01 could not be checked (RuntimeError: no memory): "
    assert problem.text == f"{start}the training starts anyway"
    assert not problem.is_failure


@pytest.mark.parametrize(
    ("command", "error"),
    [("exec sleep 1000", "no result within 1 s"), ("exit 9", "exit code 9"), ("echo hello", None)],
)
def test_a_check_that_hangs_or_crashes_has_no_result(command, error):
    pipe = subprocess.PIPE
    command = ["bash", "-c", command]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        result = guard.result_of(process, {"LOCAL_RANK": 3}, 1)
    assert result == ({"not_checked": error, "index": 3} if error else {})


def test_on_a_machine_without_gpus_it_does_not_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    run = run_ranks(2, REPO / "scripts/guard.py", script)
    assert run.codes == [0, 0] and run.err == ["", ""]


def test_if_pytorch_finds_no_gpu_the_training_starts(tmp_path):
    """nvidia-smi is a stand-in."""
    path = nvidia_smi(tmp_path, [gpu(0), gpu(1)])
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    env = {"PATH": path, "CUDA_VISIBLE_DEVICES": "0,1"}
    run = run_ranks(2, REPO / "scripts/guard.py", script, env=lambda rank: env)
    assert run.codes == [0, 0] and run.err == ["", ""]


ECC_ERROR = "CUDA error: uncorrectable ECC error encountered"
OTHER_ERROR = "CUDA error: device-side assert triggered"
ECC = {"ecc.errors.uncorrected.volatile.total": "2"}
RESET = {"gpu_recovery_action": "Reset"}
XID_79 = "Unable to determine the device handle for GPU0: 0000:3B:00.0: Unknown Error"
UNKNOWN = {"ecc.errors.uncorrected.volatile.total": "[N/A]", "gpu_recovery_action": "[N/A]"}
NO_PERMISSION = {"gpu_recovery_action": "[Insufficient Permissions]"}


@pytest.mark.parametrize(
    ("error", "facts", "fails", "fault"),
    [
        (ECC_ERROR, ECC, "", "2 uncorrected memory errors"),
        (OTHER_ERROR, RESET, "", "recovery action: Reset"),
        (OTHER_ERROR, {}, XID_79, XID_79),
        # No evidence: the script's own fault, or something that the driver does not know.
        (OTHER_ERROR, {}, "", ""),
        (OTHER_ERROR, ECC, "", ""),  # an old memory error
        (ECC_ERROR, UNKNOWN, "", ""),
        (OTHER_ERROR, NO_PERMISSION, "", ""),
        (OTHER_ERROR, {}, "Failed to initialize NVML: Unknown Error", ""),  # of a container
        ("CUDA out of memory", RESET, "", ""),
        ("index 7 is out of bounds", RESET, "", ""),
    ],
)
def test_after_a_cuda_error_a_fault_of_the_gpu_is_reported(tmp_path, error, facts, fails, fault):
    """nvidia-smi is a stand-in; it fails only once the script runs."""
    path = nvidia_smi(tmp_path, 2)
    events = tmp_path / "events"
    state = tmp_path / "bin/nvidia-smi.json"
    script = tmp_path / "script.py"
    script.write_text(f"""
import json, os
if os.environ["RANK"] == "1":
    state = json.load(open({str(state)!r}))
    state["gpus"][1].update({facts!r})
    state["fails"] = {fails!r}
    json.dump(state, open({str(state)!r}, "w"))
    raise RuntimeError({error!r})
""")
    env = {"PATH": path, "CUDA_VISIBLE_DEVICES": "0,1", "EVENTS_FILE": events}
    env["GPU_CHECK"] = "0"
    run = run_ranks(2, REPO / "scripts/guard.py", script, env=lambda rank: env)
    assert run.codes[1] == 1
    assert ("has failed" in run.err[1]) == bool(fault), run.err[1]
    if fault:
        event = json.loads(events.read_text())  # one line
        assert event["event"] == "gpu_check_failed" and event["host"] == guard.HOST
        assert event["ranks"] == [1] and event["gpu"] == "GPU-1"
        assert event["text"] == f"GPU-1 of {guard.HOST} has failed (nvidia-smi: {fault})"
    else:
        assert not events.exists()


def test_a_driver_that_does_not_answer_is_no_evidence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, 1, hangs=True))
    monkeypatch.setattr(guard, "DRIVER_SECONDS", 0.2)
    assert guard.ask_driver("GPU-0", ECC_ERROR) == ""
