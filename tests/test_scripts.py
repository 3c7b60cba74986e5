"""The quickstart, and the --help of every shell script."""

import os
import re
import signal
import subprocess

import pytest
from harness import REPO, copy_repository, running, write_program

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


@pytest.fixture
def quickstart(tmp_path):
    """In a copy of the repository, without .venv."""
    return copy_repository(tmp_path / "repo") / "scripts/quickstart.sh"


def test_quickstart_that_is_interrupted_says_how_to_go_on(tmp_path, quickstart):
    """With a stand-in for pip."""
    write_program(tmp_path / "repo/.venv/bin/pip", "echo installs; exec sleep 60")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with running([quickstart], **streams) as process:
        next(line for line in process.stdout if line == "installs\n")
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "same command" in out and "error" not in out, out


def test_quickstart_without_a_suitable_python(tmp_path, quickstart):
    result = run(quickstart, PYTHON="python2")
    assert result.returncode == 2
    assert result.stderr == (
        "quickstart.sh: error: PYTHON=python2 is not Python 3.10 or newer: load a module, or set "
        "PYTHON\n"
    )
    assert not (tmp_path / "repo/.venv").exists()


def test_quickstart_does_not_keep_a_torch_and_a_torchvision_that_do_not_fit(tmp_path, quickstart):
    """Stand-ins for pip, whose variables are those of other environments, and for Python."""
    venv = tmp_path / "repo/.venv"
    log = tmp_path / "pip.txt"
    write_program(venv / "bin/pip", f'echo "$PIP_USER $PYTHONPATH$PIP_TARGET $*" >>{log}')
    for fits in (False, False, True, True):
        write_program(venv / "bin/python", "true" if fits else "echo no nms >&2; exit 1")
        env = {"TORCH_INDEX": "cpu", "PYTHONPATH": "/other", "PIP_TARGET": "/other"}
        result = run(quickstart, "--install-only", PIP_USER="1", **env)
        assert result.returncode == (0 if fits else 2)
        assert fits or result.stderr.splitlines()[-1].startswith("quickstart.sh: error: torch and ")
    lines = log.read_text().splitlines()
    assert len(lines) == 9 and all(line.startswith("0  ") for line in lines), lines


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
