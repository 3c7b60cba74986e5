"""The doctor on this machine: what needs no cluster, played where it needs a GPU."""

import json
import os
import re
import subprocess
import sys

import pytest
from harness import REPO, load

DOCTOR = REPO / "scripts/doctor.py"


def told(findings, level):
    """Lines, of which the doctor's page shows the like."""
    some = [finding for finding in findings if finding["level"] == level]
    for finding in some:
        assert folded(finding["observed"]) in PAGE, finding
    return [f"{f['where']}: {f['check']}: {f['observed']}" for f in some]


def folded(text: str) -> str:
    """Without numbers, hashes, paths, and what torch or the kernel say."""
    text = re.sub(r"[(][^)]*[)]|: no answer.*", "", text.split("; expected")[0])
    return re.sub(r"/\S+/\S+|\b[0-9a-f]{8}\b|\d+([.]\d+)*", "N", text)


PAGE = "\n".join(map(folded, (REPO / "docs/DOCTOR.md").read_text().splitlines()))


SMI = """#!/bin/sh
# Stands in for the real one where there is no GPU: its answers are of that form.
case "$*" in
  *compute-apps*) echo "4711, GPU-5d3f2a, 17012" ;;
  *query-gpu*) echo "0, GPU-5d3f2a, 143771, 126700, 2, 350.00, 700.00, 570.86" ;;
esac
"""


def test_a_left_over_process_and_a_sick_gpu(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, DOCTOR, "--json"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, cwd=REPO)
    assert result.returncode == 2, result.stderr
    findings = json.loads(result.stdout)
    assert told(findings, "WARN")[:2] == [
        ": GPU processes: process 4711 (unknown) holds 17012 MiB on GPU-5d3f2a",
        ": GPU power: GPU 0 is capped at 350.00 of 700.00 W",
    ]
    assert "sees none of the GPUs here, driver 570.86" in told(findings, "WARN")[2]
    assert told(findings, "FAIL") == [": GPU memory: GPU 0 has 2 uncorrected memory errors"]


def test_two_ranks_on_one_device():
    """Simulated: the cards that ranks on a GPU would hand in."""
    compare_cards = load(DOCTOR).compare_cards
    card = {"host": "n1", "same": {"PyTorch": "2.15"}, "uuid": "GPU-1"}
    (finding,) = [f for f in compare_cards({0: card, 1: card}) if f.level == "FAIL"]
    assert (finding.where, finding.observed) == ("n1", "ranks 0, 1 share GPU-1")


def test_nccl_s_own_words_tell_the_transport():
    log = (
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
        "n1:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/3/GDRDMA\n"
        "n1:1:2 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct\n"
    )
    assert load(DOCTOR).nccl_links(log) == ["NET/IB/GDRDMA", "P2P/CUMEM", "SHM/direct"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--config", "absent.yaml"],
            "cannot read --config absent.yaml: No such file or directory",
        ),
        (["configs/default_config.yaml"], "configs/default_config.yaml is no option of mine alone"),
        (["--conf=x.yaml"], "--conf=x.yaml is no option of mine alone"),
    ],
)
def test_alone_it_refuses_what_it_would_not_look_at(words, said):
    command = [sys.executable, DOCTOR, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"doctor.py: error: {said}") and result.stderr.count("\n") == 1
