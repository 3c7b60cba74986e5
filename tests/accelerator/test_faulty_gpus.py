"""The check of each GPU before the first attempt, on simulated accelerators with injected faults.

Each process of scripts/check_gpu.py gets an accelerator; nvidia-smi is a stand-in.
"""

import json
import re
import socket

import pytest
import simgpu
from gpus import nvidia_smi
from harness import REPO, run_ranks

GUARD = REPO / "scripts/guard.py"
HOST = socket.gethostname()
# PyTorch calls autoload() when it is imported. A fault is in the kernel of the matrix product.
PLUGIN = """
import os, sys, time

def autoload():
    sys.path.append({here!r})
    import simgpu
    import torch

    simgpu.enable({library!r}, 4, os.devnull)
    torch.simgpu.get_device_properties = properties
    fault = os.environ.get("FAULT")
    calls = []

    def product(left, right):
        calls.append(None)
        result = left.cpu() @ right.cpu()
        if fault == "slow":
            time.sleep(0.01)
        if fault == "bit" or (fault == "unstable" and len(calls) > 5):
            result[-1, -1] += 2.0**-8
        if fault == "error":
            raise RuntimeError("an illegal memory access was encountered")
        return result.to(left.device)

    global library
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", product, "PrivateUse1")

class properties:
    def __init__(self, device):
        self.name = "SimGPU"
        self.multi_processor_count = 7
"""


@pytest.fixture
def job(tmp_path, library):
    """job({rank: {variable: value}}): ranks of guard.py; returns the result and the events."""
    site = tmp_path / "site"
    info = site / "plugin-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nsimgpu = plugin:autoload\n")
    text = PLUGIN.format(here=str(simgpu.HERE), library=str(library))
    (site / "plugin.py").write_text(text)
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    events = tmp_path / "events.jsonl"
    failure = tmp_path / "failure.json"
    common = {
        "PATH": nvidia_smi(tmp_path, 4),
        "PYTHONPATH": str(site),
        "GPU_CHECK": "64",
        "EVENTS_FILE": str(events),
        "FAILURE_FILE": str(failure),
    }

    def job(variables: dict, ranks: int = 2):
        run = run_ranks(ranks, GUARD, script, env=lambda rank: common | variables.get(rank, {}))
        lines = events.read_text().splitlines() if events.exists() else []
        run.events = [json.loads(line) for line in lines]
        run.failure = json.loads(failure.read_text()) if failure.exists() else None
        return run

    return job


def test_a_gpu_with_a_wrong_bit_ends_the_launch_and_is_named(job):
    run = job({1: {"FAULT": "bit"}}, ranks=3)
    assert run.codes[0] == 2 and 0 not in run.codes
    text = f"GPU 1 of {HOST} computed other bits than other GPUs of the same model: leave out"
    assert f"guard.py: error: {text}" in run.err[0]
    (event,) = run.events
    assert event["event"] == "gpu_check_failed"
    assert (event["ranks"], event["host"], event["gpu"]) == ([1], HOST, "GPU-1")
    assert run.failure["cause"] == "configuration" and run.failure["rank"] == 1
    assert run.failure["reason"] == event["text"]
    assert "done" not in "".join(run.out)


def test_if_a_node_is_new_a_later_attempt_checks_too_and_finds_a_gpu_that_is_not_stable(job):
    variables = {"ATTEMPT": "2", "NEW_NODES": "n03"}
    run = job({0: variables, 1: {"FAULT": "unstable", **variables}})
    assert run.codes[0] == 2 and 0 not in run.codes
    assert f"GPU 1 of {HOST} computed other bits each time for the same product" in run.err[0]


def test_healthy_gpus_compute_the_same_bits_and_the_script_runs(job):
    run = job({})
    assert run.codes == [0, 0] and "bits" not in "".join(run.err)
    assert run.events == [] and run.failure is None


def test_a_slow_gpu_and_one_on_which_the_check_fails_are_warnings(job):
    run = job({1: {"FAULT": "slow"}, 2: {"FAULT": "error"}}, ranks=3)
    assert run.codes == [0, 0, 0]
    error = "could not be checked (RuntimeError: an illegal memory access was encountered)"
    assert f"guard.py: WARNING: GPU 2 of {HOST} {error}" in run.err[0]
    slower = rf"guard.py: WARNING: GPU 1 of {HOST} is \d+% slower than other GPUs of the same model"
    assert re.search(slower, run.err[0])
    assert run.events == []


@pytest.mark.parametrize("variables", [{"GPU_CHECK": "0"}, {"ATTEMPT": "2"}])
def test_it_is_skipped_on_request_and_after_the_first_attempt(job, variables):
    run = job({0: variables, 1: {"FAULT": "bit", **variables}})
    assert run.codes == [0, 0] and run.err == ["", ""]
