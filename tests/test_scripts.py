"""The quickstart, the plots, and the --help of every shell script."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from harness import REPO, load, running, write_program

SOURCED = ("common.sh", "environment.sh", "site.sh")
SHELL_SCRIPTS = sorted(
    path
    for pattern in ("*.sh", "*.slurm")
    for path in REPO.rglob(pattern)
    if ".venv" not in path.parts and not path.is_symlink() and path.name not in SOURCED
)


def run(*command, **env) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)


@pytest.mark.long  # .ci/run begins with it anyway
def test_quickstart_trains_resumes_and_reports_errors(tmp_path):
    # Use a proxy that does not exist: it must work without a network.
    env = {"VENV": sys.prefix, "RUN_DIR": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    quickstart = REPO / "scripts/quickstart.sh"
    first = run(quickstart, "--epochs=1", **env)
    assert first.returncode == 0, first.stderr
    assert "Starting distributed training on 2 x cpu (2 per node)" in first.stdout
    accuracy = float(re.search(r"test_accuracy ([\d.]+)", first.stdout)[1])
    assert accuracy > 0.8
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoint_epoch_1.pt").exists() and (tmp_path / "metrics.jsonl").exists()
    assert "Next:\n" in first.stdout
    again = run(quickstart, "--epochs=1", **env)
    assert again.returncode == 0 and " at step 47, to step 47\n" in again.stdout
    assert "Installing" not in again.stdout
    typo = run(quickstart, "--epoch=1", **env)
    assert typo.returncode == 2
    assert "did you mean --epochs?" in typo.stderr and typo.stderr.count("\n") == 1

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with running([quickstart, "--epochs=99"], env=os.environ | env, **streams) as stopped:
        for line in stopped.stdout:
            if line.startswith("  step "):
                os.killpg(stopped.pid, signal.SIGINT)  # Ctrl-C
                break
        out, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 130 and "To continue" in out and "Next:" not in out, out


def test_quickstart_without_a_suitable_python(tmp_path):
    result = run(REPO / "scripts/quickstart.sh", VENV=tmp_path / "venv", PYTHON="python2")
    assert result.returncode == 2
    assert result.stderr == (
        "quickstart.sh: error: PYTHON=python2 is not Python 3.10 or newer: load a module, or set "
        "PYTHON\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_quickstart_does_not_keep_a_torch_and_a_torchvision_that_do_not_fit(tmp_path):
    """Stand-ins for pip, whose variables are those of other environments, and for Python."""
    venv = tmp_path / "venv"
    log = tmp_path / "pip.txt"
    write_program(venv / "bin/pip", f'echo "$PIP_USER $PYTHONPATH$PIP_TARGET $*" >>{log}')
    for fits in (False, False, True, True):
        write_program(venv / "bin/python", "true" if fits else "echo no nms >&2; exit 1")
        env = {"VENV": venv, "TORCH_INDEX": "cpu", "PYTHONPATH": "/other", "PIP_TARGET": "/other"}
        env = {name: str(value) for name, value in env.items()}
        result = run(REPO / "scripts/quickstart.sh", "--install-only", PIP_USER="1", **env)
        assert result.returncode == (0 if fits else 2)
        assert fits or result.stderr.splitlines()[-1].startswith("quickstart.sh: error: torch and ")
    lines = log.read_text().splitlines()
    assert len(lines) == 9 and all(line.startswith("0  ") for line in lines), lines


@pytest.fixture
def drawn_panels(monkeypatch):
    """A function that draws runs and returns {title: (labels, scale of the y axis)}."""
    from matplotlib.figure import Figure

    script = load(REPO / "scripts/plot_metrics.py")
    panels = {}

    def savefig(figure, *_arguments, **_options) -> None:
        for axes in figure.axes:
            labels = [line.get_label() for line in axes.lines]
            panels[axes.get_title()] = (labels, axes.get_yscale())

    def draw(*directories) -> dict:
        panels.clear()
        runs = [script.Run(directory) for directory in directories]
        script.draw(runs, directories[0] / "metrics.png")
        return panels

    monkeypatch.setattr(Figure, "savefig", savefig)
    return draw


def write_run(directory, train: list[dict], epochs: list[dict]):
    """metrics.jsonl with these metrics, and what the trainer adds to them."""
    directory.mkdir()
    with (directory / "metrics.jsonl").open("w") as file:
        for step, values in enumerate(train):
            more = {"lr": 0.1, "samples_per_second": 9.0}
            record = {"kind": "train", "step": step, "time": 1.0, **values, **more}
            print(json.dumps(record), file=file)
        for epoch, values in enumerate(epochs):
            record = {"kind": "epoch", "step": epoch, "time": 1.0, "epoch": epoch, **values}
            print(json.dumps(record), file=file)
    return directory


def test_each_metric_of_a_run_has_a_panel_with_the_loss_first(tmp_path, drawn_panels):
    train_records = [{"iou": 0.1, "loss": 2.0}, {"iou": 0.2, "loss": 1.0}]
    epochs = [{"iou": 0.15, "loss": 1.5, "test_iou": 0.1, "test_loss": 3.0, "test_top5": 0.5}]
    run = write_run(tmp_path / "run", train_records, epochs)
    assert drawn_panels(run) == {
        "Loss": (["run training", "run test"], "log"),
        "Iou": (["run training", "run test"], "linear"),
        "Top5": (["run test"], "linear"),
    }
    assert list(drawn_panels(run))[0] == "Loss"


def test_the_last_record_of_a_step_counts(tmp_path):
    """A run that crashed after step 2 and went on from step 1."""
    script = load(REPO / "scripts/plot_metrics.py")
    run = write_run(tmp_path / "run", [{"loss": loss} for loss in (3.0, 2.0, 9.0)], [])
    again = {"kind": "train", "step": 1, "loss": 2.5}
    with (run / "metrics.jsonl").open("a") as file:
        print(json.dumps(again), json.dumps(again | {"step": 2}), sep="\n", file=file)
    assert script.Run(run).points("loss", "train") == [(0, 3.0), (1, 2.5), (2, 2.5)]


def test_a_record_of_a_single_step_is_no_point(tmp_path):
    """As at the end of an epoch of 141 steps, with --log-every-steps 20."""
    script = load(REPO / "scripts/plot_metrics.py")
    run = tmp_path / "run"
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as file:
        for step in (80, 100, 120, 140, 141, 160, 171):
            print(json.dumps({"kind": "train", "step": step, "loss": 1.0}), file=file)
    steps = [step for step, _ in script.Run(run).points("loss")]
    assert steps == [80, 100, 120, 140, 160, 171]


def test_runs_are_compared_and_user_errors_are_one_sentence(tmp_path, monkeypatch, capsys):
    script = load(REPO / "scripts/plot_metrics.py")
    runs = [write_run(tmp_path / name, [{"loss": 2.0}, {"loss": 1.0}], []) for name in "ab"]
    (tmp_path / "metrics.jsonl").write_text('{"kind": "tr')
    monkeypatch.setattr(sys, "argv", ["plot_metrics.py", *map(str, runs), f"-o{tmp_path}/2.png"])
    script.main()
    assert capsys.readouterr().out == f"Wrote {tmp_path}/2.png\n"
    assert (tmp_path / "2.png").read_bytes().startswith(b"\x89PNG")
    for words, message in (
        ([tmp_path], "metrics.jsonl has no records yet"),
        ([runs[0], tmp_path / "absent"], "[Errno 2] No such file or directory: "),
        ([runs[0], "-o", tmp_path / "absent/plot.png"], "[Errno 2] No such file or directory: "),
        ([runs[0], "-o", tmp_path / "plot.doc"], "Format 'doc' is not supported"),
    ):
        monkeypatch.setattr(sys, "argv", ["plot_metrics.py", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            script.main()
        last_line = capsys.readouterr().err.splitlines()[-1]
        assert last_line.startswith(f"plot_metrics.py: error: {message}") and ended.value.code == 2


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: str(path.relative_to(REPO)))
def test_help_is_the_header_and_its_environment_table_is_that_of_the_code(script):
    text = script.read_text()
    header = re.match(r"#!/usr/bin/env bash\n((?:#.*\n)+)", text)[1]
    printed = run("bash", script, "--help")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout.rstrip("\n") == re.sub(r"(?m)^# ?(?=|#SBATCH)", "", header).rstrip("\n")
    assert "Usage: " in header
    documented = dict(re.findall(r"(?m)^#   ([A-Z_]+) .*?(?:\[(.*)\])?$", header))
    defaults = dict(re.findall(r'(?m)^(?:export )?([A-Z_]+)="\$\{\1:-(.*)\}"$', text))
    assert documented.keys() == defaults.keys()
    for name, default in defaults.items():
        assert documented[name] == default or not default, f"{name} is documented otherwise"
