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


MEASURED = {  # a benchmark with few rounds: rows of its table
    "speed.py --ranks 2 --rounds 1 --steps 40": [
        rf"{name} \| \d+ "
        for name in ("limit", "sums", "ours", "bare", "reproducible", "lightning", "timm\\+guard")
    ],
    "loader.py --files 128 --rounds 1 --workers 0 1": [
        r"decoding alone, the limit \| \d+ \| 1\.000 ",
        r"ours, 1 workers \| \d+ \| \d\.\d{3} ",
    ],
    "startup.py --ranks 2 --rounds 1": [r"2 \| [\d.| ]+ \|$"],
    "recovery.py --ranks=2 --rounds=1 --directory=DIRECTORY": [
        r"2 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$"
    ],
    "checkpoints.py --saves=2 --directory=DIRECTORY": [
        r"resnet18, 94 MB \| (\d+ ms \(.*\) \| ){2}\d"
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("command", MEASURED, ids=lambda command: command.split()[0])
def test_each_benchmark_prints_its_table_and_leaves_nothing(tmp_path, monkeypatch, command):
    monkeypatch.setenv("OF_THIS_TEST", str(tmp_path))
    script, *words = command.replace("DIRECTORY", str(tmp_path)).split()
    out = run(tmp_path, script, *words)
    for row in MEASURED[command]:
        assert re.search(rf"(?m)^\| {row}", out), out
    assert not processes_with("OF_THIS_TEST", tmp_path)


def on_gpu(tmp_path, *words: str, **env: str):
    """A rehearsal of on_gpu.sh on the CPU. Returns (the process, its report)."""
    command = [REPO / "benchmarks/on_gpu.sh", "--cpu", f"--output={tmp_path}/report.md", *words]
    env = os.environ | {"PYTHON": sys.executable, "MARK": str(tmp_path)} | env
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    return done, (tmp_path / "report.md").read_text()


@pytest.mark.long
def test_on_gpu_measures_every_part(tmp_path):
    done, report = on_gpu(tmp_path)
    assert done.returncode == 0, report
    rows = re.findall(r"^\| (.+) \| (.+) \|$", report.partition("\n###")[0], re.M)[2:]
    assert rows and not [title for title, result in rows if result.startswith("failed")], report
    assert re.search(
        r"^\| ours \|( [\d.() to]+ \|){2} [\d.]+ s \| \d+ MB \| [\d.]+ % \|$", report, re.M
    )
