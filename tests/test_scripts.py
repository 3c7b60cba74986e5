"""The quickstart, the plots, and the --help of every shell script."""

import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
from harness import REPO, copy_repository, train

SHELL_SCRIPTS = sorted(
    path
    for pattern in ("*.sh", "*.slurm")
    for path in REPO.rglob(pattern)
    if ".venv" not in path.parts and not path.is_symlink() and path.name != "site.sh"
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
    assert "Starting distributed training on 2 processes (2 per node)" in first.stdout
    accuracy = float(re.search(r"Test Accuracy: ([\d.]+)% of 2000", first.stdout)[1])
    assert accuracy > 80
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoint_epoch_1.pt").exists() and (tmp_path / "metrics.jsonl").exists()
    assert "Next:\n" in first.stdout
    again = run(quickstart, "--epochs=1", **env)
    assert again.returncode == 0 and "Nothing to do: " in again.stdout
    assert "Installing" not in again.stdout
    typo = run(quickstart, "--epoch=1", **env)
    assert typo.returncode == 2
    assert "did you mean --epochs?" in typo.stderr and typo.stderr.count("\n") == 1


def torch_index(directory, version: str) -> str:
    """A package index with a torch and a torchvision of that version, which are empty."""
    for name in ("torch", "torchvision"):
        (directory / name).mkdir(parents=True)
        file = f"{name}-{version}-py3-none-any.whl"
        (directory / name / "index.html").write_text(f'<a href="{file}">{file}</a>')
        with zipfile.ZipFile(directory / name / file, "w") as wheel:
            info = f"{name}-{version}.dist-info"
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            wheel.writestr(f"{info}/WHEEL", tags)
            wheel.writestr(f"{info}/RECORD", "")
    return directory.as_uri()


@pytest.mark.long
def test_torch_index_chooses_the_build_of_pytorch(tmp_path):
    """With a real pip and small indexes of our own; download.pytorch.org has gigabytes."""
    copy = copy_repository(tmp_path / "repo")
    (copy / "requirements.txt").write_text("torch>=2.4  # comment\ntorchvision>=0.19\n")
    only = {"VENV": tmp_path / "venv", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
    index = {v: torch_index(tmp_path / v, f"99.{n}+{v}") for n, v in enumerate(["cpu", "cu126"])}

    def install(**env) -> str:
        result = run(copy / "scripts/quickstart.sh", "--install-only", **only, **env)
        assert result.returncode == 0, result.stderr
        (info,) = (tmp_path / "venv").rglob("torch-*.dist-info")
        return info.name.removeprefix("torch-").removesuffix(".dist-info")

    assert install(TORCH_INDEX=index["cu126"]) == "99.1+cu126"
    assert install(TORCH_INDEX=index["cpu"]) == "99.0+cpu"  # although it is older
    assert install() == "99.0+cpu"
    missing = run(copy / "scripts/quickstart.sh", **only, TORCH_INDEX="file:///absent")
    assert missing.returncode == 2
    text = "quickstart.sh: error: pip could not install PyTorch from TORCH_INDEX=file:///absent: "
    assert text in missing.stderr


def test_quickstart_without_a_suitable_python(tmp_path):
    result = run(REPO / "scripts/quickstart.sh", VENV=tmp_path / "venv", PYTHON="python2")
    assert result.returncode == 2
    assert result.stderr == (
        "quickstart.sh: error: PYTHON=python2 is not Python 3.10 or newer: load a module, or set "
        "PYTHON\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_plots_compare_runs(tmp_path, tiny):
    runs = [train(tmp_path / name, 1, *tiny, "--epochs=1").directory for name in "ab"]
    plot = [sys.executable, REPO / "scripts/plot_metrics.py"]
    result = run(*plot, *runs, "-o", tmp_path / "both.png")
    assert (result.returncode, result.stdout) == (0, f"Wrote {tmp_path}/both.png\n"), result.stderr
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    result = run(*plot, runs[0], tmp_path / "absent")
    assert result.returncode == 1
    assert result.stderr == (
        f"plot_metrics.py: error: {tmp_path}/absent is not a run directory "
        "(No such file or directory)\n"
    )


def test_a_run_with_one_record_is_visible(tmp_path):
    from matplotlib import image

    record = {"kind": "train", "step": 20, "loss": 1.5, "accuracy": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    assert run(sys.executable, REPO / "scripts/plot_metrics.py", tmp_path).returncode == 0
    pixels = image.imread(tmp_path / "metrics.png")[150:350, 900:1130, :3]  # no legend, no axis
    assert (pixels.max(2) - pixels.min(2)).max() > 0.2, "the point is not drawn"


def test_an_unknown_version_is_a_user_error(tmp_path):
    result = run(REPO / "tests/run.sh", "--versions", "3.9", VERSIONS_DIR=tmp_path / "versions")
    text = "3.9 is not 3.10, 3.11, 3.12, 3.13, 3.14, or one of them with a PyTorch: 3.12:2.8"
    assert (result.returncode, result.stderr) == (1, f"versions.py: error: {text}\n")
    assert list(tmp_path.iterdir()) == []


# These functions run before a script has found the repository, so they cannot be sourced.
@pytest.mark.parametrize(("function", "copies"), [("find_repository", 3), ("exec_command", 2)])
def test_slurm_scripts_hold_the_same_copy_of_a_function(function, copies):
    scripts = ["run_distributed.slurm", "slurm_train_multinode.sh", "slurm_train_single_node.sh"]
    block = re.compile(rf"{function}\(\) {{\n.*?\n}}\n", re.DOTALL)
    blocks = [found for name in scripts for found in block.findall((REPO / name).read_text())]
    assert len(blocks) == copies and len(set(blocks)) == 1


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
