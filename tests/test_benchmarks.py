"""The benchmarks still run: a few steps of each, no opinion on their figures."""

import os
import re
import subprocess
import sys

import pytest
from harness import REPO


def run(tmp_path, script: str, *words: str) -> str:
    command = [sys.executable, REPO / "benchmarks" / script, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_speed_compares_with_the_limit(tmp_path):
    out = run(tmp_path, "speed.py", *"--ranks 1 --rounds 1 --steps 40 --only limit ours".split())
    assert re.search(r"^\| limit \| \d+ \| 1\.000 ", out, re.M), out
    assert re.search(r"^\| ours \| \d+ \| \d\.\d{3} ", out, re.M), out
    assert (tmp_path / "speed.png").stat().st_size > 5000


@pytest.mark.long
def test_speed_runs_everybody_on_two_processes(tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    out = run(tmp_path, "speed.py", *"--ranks 2 --rounds 1 --steps 40".split())
    names = re.findall(r"^\| (\w+) \| \d+ ", out, re.M)
    peers = ["template", "examples", "lightning", "accelerate"]
    assert names == ["limit", "waits", "sums", "ours", *peers]


@pytest.mark.long
def test_speed_takes_other_networks_and_data(tmp_path):
    words = (
        "--ranks 1 --rounds 1 --steps 40 --model resnet18 --dataset synthetic --size 32 --batch 8"
    )
    out = run(tmp_path, "speed.py", *words.split(), *"--amp --only limit ours template".split())
    assert re.findall(r"^\| (\w+) \| \d+ ", out, re.M) == ["limit", "ours", "template"]


@pytest.mark.long
def test_loader_sets_itself_beside_bare_decoding(tmp_path):
    out = run(tmp_path, "loader.py", *"--files 128 --rounds 1 --workers 0 1".split())
    assert re.search(r"^\| bare decoding, the limit \| \d+ \| 1\.000 ", out, re.M), out
    assert re.search(r"^\| ours, 1 workers \| \d+ \| \d\.\d{3} ", out, re.M), out


@pytest.mark.long
def test_startup_adds_up(tmp_path):
    out = run(tmp_path, "startup.py", "--ranks", "1", "2", "--rounds", "1")
    for ranks in (1, 2):
        row = re.search(rf"^\| {ranks} \| (.*) \|$", out, re.M)[1]
        *parts, whole, _beyond = map(float, row.split(" | "))
        assert 0.7 * whole < sum(parts) < 1.1 * whole


@pytest.mark.long
def test_checkpoints_are_written_in_both_ways(tmp_path):
    out = run(tmp_path, "checkpoints.py", "--saves=2", f"--directory={tmp_path}")
    assert "resnet18: 94 MB" in out and "stall, async / at once" in out


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_scaling_sets_predictions_beside_measurements(tmp_path):
    out = run(tmp_path, "scaling.py", *"--mbits 200 --hosts 3 --processes 2".split())
    assert out.count("| 200 Mbit/s |") == 6 and "one host: median error" in out
    assert (tmp_path / "scaling.png").stat().st_size > 5000
