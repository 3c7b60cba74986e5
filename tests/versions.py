"""The trainer's and the guard's tests on other versions of Python and PyTorch.

    tests/run.sh --versions [3.10 3.12:2.8 ...]

Makes a virtual environment for each version of Python, with the PyTorch below or the one after the
colon (in ~/.cache/versions, or in $VERSIONS_DIR; 5 GB each), and runs the tests below there, and
scripts/test_distributed.sh. Exit code 1 if one fails or a Python is missing. It takes about 12
minutes per version.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PYTORCH = {"3.10": "2.6", "3.11": "2.7", "3.12": "2.8", "3.13": "2.10", "3.14": ""}  # "": newest
DEFAULT = "3.10", "3.14"  # the oldest and the newest
TEST_PACKAGES = "pytest", "pytest-timeout", "tensorboard", "datasets"
TESTS = {  # file: words in the names of its tests
    "test_setup.py": "spite_of_stale",
    "test_world_sizes.py": "every_step_has or resuming_on_other or ends_with_the_same_bits",
    "test_loss.py": "steps_are_those_of_a_loop",
    "test_resume.py": "stopped_and_resumed or uneven_ranks",
    "test_checkpoints.py": "newest_intact or second_process_waits",
    "test_options.py": "compile_changes or bf16 or activation_checkpointing_changes",
    "test_data.py": "image_files_resume",
    "faults/test_stop.py": "loader_workers_survive or signal_to_any_rank",
    "faults/test_kills.py": "crash_ends_the_workers",
    "test_examples.py": "test_examples",
    "test_guard.py": "test_a_hang or works_alone or script_for_torchrun_runs",
    "test_supervise.py": "request_ends_the_pause or ctrl_c",
    "test_doctor_findings.py": "old_pytorch or in_a_launch or after_the_ranks_have_met",
}


def find_python(version: str) -> str | None:
    """pyenv's, whose shims may not work, or python3.10 on the PATH."""
    found = sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    return found[-1] if found else shutil.which(f"python{version}")


def packages(pytorch: str) -> list[str]:
    """The packages of this PyTorch that requirements.txt would not choose."""
    if not pytorch:
        return []
    minor = int(pytorch.split(".")[1])
    return [f"torch==2.{minor}.*", f"torchvision==0.{minor + 15}.*"]


def make_environment(base: str, pytorch: str, directory: Path) -> Path:
    """The Python of an environment with the requirements."""
    python = directory / "bin/python"
    if not (directory / "complete").exists():
        subprocess.run([base, "-m", "venv", "--clear", directory], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        required = *packages(pytorch), "-r", REPO / "requirements.txt", *TEST_PACKAGES
        subprocess.run([*pip, *required], check=True)
        (directory / "complete").touch()
    return python


def run_tests(python: Path) -> bool:
    """Whether all passed."""
    path = f"{python.parent}:{os.environ['PATH']}"
    run = {"cwd": REPO, "env": os.environ | {"PYTHON": str(python), "PATH": path}}
    command = [python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]
    files = [f"tests/{file}" for file in TESTS]
    tests = subprocess.run([*command, *files, "-k", " or ".join(TESTS.values())], **run)
    smoke = subprocess.run(["scripts/test_distributed.sh", "2"], **run)
    return tests.returncode == smoke.returncode == 0


def main() -> None:
    root = Path(os.environ.get("VERSIONS_DIR") or Path.home() / ".cache/versions")
    results = {}
    for word in sys.argv[1:] or DEFAULT:
        version, _, pytorch = word.partition(":")
        base = find_python(version)
        if base and version in PYTORCH:
            directory = root / word.replace(":", "-")  # a colon would divide PATH
            directory.mkdir(parents=True, exist_ok=True)
            python = make_environment(base, pytorch or PYTORCH[version], directory)
            ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
            subprocess.run([python, "-c", ask], check=True)
            results[word] = "passed" if run_tests(python) else "failed"
        else:
            results[word] = f"not installed, or none of {', '.join(PYTORCH)}"
    for word, result in results.items():
        print(f"{word}: {result}")
    sys.exit(set(results.values()) != {"passed"})


if __name__ == "__main__":
    main()
