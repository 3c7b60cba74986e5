"""The benchmarks run: a few steps of each (--long), without a check of the figures."""

import math
import os
import re
import runpy
import subprocess
import sys

import pytest
from harness import REPO, load, processes_with

BENCHMARKS = sorted(REPO.glob("benchmarks/*.py"))
COMMANDS = [path for path in BENCHMARKS if path.stem not in ("contestants", "ranks")]


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_the_help_is_printed(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "show this help" in capsys.readouterr().out


def test_idle_share_counts_the_time_between_overlapping_kernels_once():
    idle_share = load(REPO / "benchmarks/contestants.py").idle_share
    assert idle_share([(30, 40), (0, 10), (5, 20), (6, 7)]) == 10 / 40
    assert idle_share([(0, 10), (10, 20)]) == 0
    assert math.isnan(idle_share([]))  # without permission to profile the GPU


def run(tmp_path, script: str, *words: str) -> str:
    command = [sys.executable, REPO / "benchmarks" / script, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_speed_runs_all_contestants_on_two_ranks(tmp_path):
    out = run(tmp_path, "speed.py", *"--ranks 2 --rounds 1 --steps 40".split())
    names = re.findall(r"^\| (\S+) \| \d+ ", out, re.M)
    peers = ["template", "examples", "lightning", "accelerate", "timm"]
    expected = ["limit", "sums", "ours", "bare", "reproducible", *peers]
    assert names == expected + [f"{peer}+guard" for peer in peers]


@pytest.mark.long
def test_loader_is_compared_with_decoding_alone(tmp_path):
    out = run(tmp_path, "loader.py", *"--files 128 --rounds 1 --workers 0 1".split())
    assert re.search(r"^\| decoding alone, the limit \| \d+ \| 1\.000 ", out, re.M), out
    assert re.search(r"^\| ours, 1 workers \| \d+ \| \d\.\d{3} ", out, re.M), out


@pytest.mark.long
def test_the_parts_of_the_startup_add_up(tmp_path):
    out = run(tmp_path, "startup.py", "--ranks", "1", "2", "--rounds", "1")
    for ranks in (1, 2):
        row = re.search(rf"^\| {ranks} \| (.*) \|$", out, re.M)[1]
        *parts, whole, _beyond = map(float, row.split(" | "))
        assert 0.7 * whole < sum(parts) < 1.1 * whole


@pytest.mark.long
def test_recovery_is_measured_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_RECOVERY", str(tmp_path))
    out = run(tmp_path, "recovery.py", "--ranks=2", "--rounds=1", f"--directory={tmp_path}")
    row = re.search(r"^\| 2 \| (.*) \|$", out, re.M)[1]
    restart, step, both = map(float, row.split(" | "))
    assert restart > 0 and step > 0 and restart + step == pytest.approx(both, abs=0.11)
    assert not list(tmp_path.iterdir()) and not processes_with("OF_RECOVERY", tmp_path)


@pytest.mark.long
def test_checkpoints_are_measured(tmp_path):
    out = run(tmp_path, "checkpoints.py", "--saves=2", f"--directory={tmp_path}")
    times = r"\d+ ms \(\d+ to \d+\)"
    assert re.search(rf"^\| resnet18, 94 MB \| {times} \| {times} \| \d\.\d\d GB/s \|$", out, re.M)


ON_GPU = [REPO / "benchmarks/on_gpu.sh", "--cpu"]


def on_gpu(tmp_path, *words: str, **env: str):
    """A rehearsal of on_gpu.sh on the CPU. Returns (the process, its report)."""
    command = [*ON_GPU, f"--output={tmp_path}/report.md", *words]
    env = os.environ | {"PYTHON": sys.executable, "MARK": str(tmp_path)} | env
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    return done, (tmp_path / "report.md").read_text()


@pytest.mark.long
def test_on_gpu_goes_on_after_a_part_that_fails_or_cannot_be_measured(tmp_path):
    words = ["--only", "resnet50-8", "tests", "doctor"]
    done, report = on_gpu(tmp_path, *words, PYTEST_ADDOPTS="--absent")
    assert done.returncode == 1, done.stderr
    title = "Tests that need a GPU (fp16, bf16, NCCL)"
    assert f"| {title} | failed (exit code 4) " in report
    assert "images, 8 rank(s) | not measured (needs 8 GPUs) |" in report
    assert re.search(r"^\| The machine \| measured in \d+ s \|$", report, re.M), report
    assert "unrecognized arguments: --absent" in (tmp_path / "report.md.log").read_text()


@pytest.mark.long
def test_on_gpu_measures_every_part(tmp_path):
    done, report = on_gpu(tmp_path)
    assert done.returncode == 0, report
    rows = re.findall(r"^\| (.+) \| (.+) \|$", report.partition("\n###")[0], re.M)[2:]
    assert rows and not [title for title, result in rows if result.startswith("failed")], report
    assert re.search(
        r"^\| ours \|( [\d.() to]+ \|){2} [\d.]+ s \| \d+ MB \| [\d.]+ % \|$", report, re.M
    )
