"""The trainer's and the guard's tests on other versions of Python and PyTorch.

    tests/run.sh --versions [3.10 3.12:2.8 ...]

Makes a virtual environment for each version of Python, with the PyTorch below or the one after the
colon (in ~/.cache/versions, or in $VERSIONS_DIR; 5 GB each), runs the tests of each feature there,
and prints a table. Exit code 1 if a test fails or a Python is missing. It takes about 12 minutes
per version.
"""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PYTORCH = {"3.10": "2.6", "3.11": "2.7", "3.12": "2.8", "3.13": "2.10", "3.14": ""}  # "": newest
DEFAULT = "3.10", "3.14"  # the oldest and the newest
TEST_PACKAGES = "pytest", "pytest-timeout", "tensorboard", "datasets"
FEATURES = {  # feature: tests, by the beginnings of their names
    "training on 1, 2, 3 and 4 ranks": """test_setup.py::test_plain_python
        test_world_sizes.py::test_every_step test_loss.py::test_the_steps_are_those""",
    "exact resume": """test_resume.py::test_stopped_and_resumed test_resume.py::test_uneven_ranks
        test_checkpoints.py::test_the_newest_intact""",
    "resume on another number of ranks": """test_world_sizes.py::test_resuming_on_other
        test_world_sizes.py::test_reproducible_ends_with_the_same_bits_when""",
    "`--reproducible`": "test_world_sizes.py::test_reproducible_ends_with_the_same_bits_on",
    "`--compile`": "test_options.py::test_compile_changes",
    "`--amp bf16`": """test_options.py::test_bf16
        test_options.py::test_options_train_and_resume_bitwise[--amp=bf16]""",
    "`--activation-checkpointing`": "test_options.py::test_activation",
    "Image files, read by workers": """test_data.py::test_image_files_resume
        faults/test_stop.py::test_loader faults/test_hang.py::test_a_crash_ends""",
    "stop signals, run lock": """faults/test_stop.py::test_a_signal_to_any_rank
        test_checkpoints.py::test_a_second_process""",
    "examples": "test_examples.py::",
    "`guard.py`": """test_guard.py::test_a_hang test_guard.py::test_a_rank_that_works_alone
        test_guard.py::test_an_unmodified_script_runs_under_torchrun[ddp
        test_guard.py::test_the_last_lines""",
    "`supervise.py`": """test_supervise.py::test_crashes_with_progress
        test_supervise.py::test_ctrl_c""",
    "`doctor.py`": """test_doctor_findings.py::test_an_old_pytorch
        test_doctor_findings.py::test_in_a_launch test_doctor_findings.py::test_a_rank_that""",
    "`scripts/test_distributed.sh`": "",
}
PREFIXES = [name for names in FEATURES.values() for name in names.split()]
PLUGIN = f"""
def pytest_collection_modifyitems(items):
    prefixes = {PREFIXES!r}
    items[:] = [i for i in items if i.nodeid.removeprefix("tests/").startswith(tuple(prefixes))]
"""


def find_python(version: str) -> str | None:
    """$PYTHON3_10, python3.10 on the PATH, or pyenv's."""
    found = [os.environ.get(f"PYTHON{version.replace('.', '_')}"), shutil.which(f"python{version}")]
    found += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    command = "-c", f"import sys; sys.exit('{version}' != '%d.%d' % sys.version_info[:2])"
    for python in filter(None, found):
        if subprocess.run([python, *command], capture_output=True).returncode == 0:
            return python
    return None


def packages(pytorch: str) -> list[str]:
    """The packages of this PyTorch that requirements.txt would not choose."""
    if not pytorch:
        return []
    minor = int(pytorch.split(".")[1])
    return [f"torch==2.{minor}.*", f"torchvision==0.{minor + 15}.*"]


def make_environment(version: str, pytorch: str, directory: Path) -> Path | None:
    """The environment's Python; None if this Python is not on the machine."""
    python = directory / "bin/python"
    if not (directory / "complete").exists():
        if not (base := find_python(version)):
            return None
        subprocess.run([base, "-m", "venv", "--clear", directory], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        required = *packages(pytorch), "-r", REPO / "requirements.txt", *TEST_PACKAGES
        subprocess.run([*pip, *required], check=True)
        (directory / "complete").touch()
    return python


def run_tests(python: Path, directory: Path) -> dict[str, str]:
    """{feature: "12 passed", or what failed}"""
    (directory / "selection.py").write_text(PLUGIN)
    files = sorted({f"tests/{name.split('::')[0]}" for name in PREFIXES})
    path, report = f"{python.parent}:{os.environ['PATH']}", directory / "report.xml"
    env = os.environ | {"PYTHON": str(python), "PATH": path, "PYTHONPATH": str(directory)}
    command = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "selection"]
    with (directory / "tests.log").open("w") as log:
        run = {"cwd": REPO, "env": env, "stdout": log, "stderr": log}
        subprocess.run([*command, f"--junitxml={report}", *files], **run)
        smoke = subprocess.run(["scripts/test_distributed.sh", "2"], **run)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname").removeprefix("tests.").replace(".", "/")
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[f"{file}.py::{case.get('name')}"] = (kinds or ["passed"])[0]
    results = {}
    for feature, names in FEATURES.items():
        found = [kind for n, kind in outcomes.items() if n.startswith(tuple(names.split()))]
        counts = (f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found))
        results[feature] = ", ".join(counts) or "no tests"
    results["`scripts/test_distributed.sh`"] = "failed" if smoke.returncode else "passed"
    return results


def main() -> None:
    root = Path(os.environ.get("VERSIONS_DIR") or Path.home() / ".cache/versions")
    columns, wrong = {}, []
    known = rf"({'|'.join(map(re.escape, PYTORCH))})(:2\.\d+)?"
    if unknown := [word for word in sys.argv[1:] if not re.fullmatch(known, word)]:
        text = f"{unknown[0]} is not {', '.join(PYTORCH)}, or one of them with a PyTorch: 3.12:2.8"
        sys.exit(f"versions.py: error: {text}")
    for word in sys.argv[1:] or DEFAULT:
        version, _, pytorch = word.partition(":")
        directory = root / word.replace(":", "-")  # a colon would divide PATH
        directory.mkdir(parents=True, exist_ok=True)
        python = make_environment(version, pytorch or PYTORCH[version], directory)
        if not python:
            wrong.append(f"there is no Python {version}: set PYTHON{version.replace('.', '_')}")
            continue
        ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
        text = subprocess.check_output([python, "-c", ask], text=True)
        name = "Python {}, PyTorch {}".format(*text.split()).split("+")[0]
        columns[name] = run_tests(python, directory)
        failed = [f for f, text in columns[name].items() if re.search("fail|error|no tests", text)]
        wrong += [f"{name}: {feature}: see {directory}/tests.log" for feature in failed]
    rows = [["feature", *columns], ["---"] * (len(columns) + 1)]
    rows += [[feature, *(column[feature] for column in columns.values())] for feature in FEATURES]
    for row in rows:
        print(f"| {' | '.join(row)} |")
    for text in wrong:
        print(f"versions.py: error: {text}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
