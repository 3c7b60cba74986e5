"""docs/ENVIRONMENT.md lists the variables that the code reads, and no others."""

import ast
import re

import pytest
from harness import REPO

SCRIPTS = [*REPO.glob("scripts/**/*.sh"), *REPO.glob("*.sh"), *REPO.glob("*.slurm")]
SCRIPTS = sorted(path for path in SCRIPTS if not path.is_symlink())
PYTHON = [REPO / "train_distributed.py", *sorted(REPO.glob("scripts/**/*.py"))]
CODE = "\n".join(path.read_text() for path in SCRIPTS + PYTHON)
READERS = ("seconds", "number")  # functions of guard.py and supervise.py
PAGE = (REPO / "docs/ENVIRONMENT.md").read_text()
(OF_THE_SCHEDULER,) = re.findall(r"(?s)Do not set them yourself: (.*?)\n\n", PAGE)
NAMES = re.findall(r"(?m)^\| `([A-Z_]+)` \|", PAGE) + re.findall(r"`([A-Z_]+)`", OF_THE_SCHEDULER)


def read_in_python(text: str):
    """What is read by name from os.environ, or from a dictionary `env` or `environment`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            place, names = node.func.value, node.args[:1] * (node.func.attr == "get")
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            place, names = node.value, [node.slice]
        elif isinstance(node, ast.Compare):
            place, names = node.comparators[0], [node.left]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            place, names = ast.Name("env"), node.args[:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "launch_variable":
            place, names = node.args[0], node.args[1:2]  # of train_distributed.py
        else:
            continue
        if ast.unparse(place) in ("os.environ", "env", "environment"):
            yield from (name.value for name in names if isinstance(name, ast.Constant))


def variables():
    for path in PYTHON:
        yield from ((name, path.name) for name in read_in_python(path.read_text()))
    for path in SCRIPTS:
        names = re.findall(r"\$\{([A-Z]\w*):?-", path.read_text())
        yield from ((name, path.name) for name in names)


@pytest.mark.parametrize(("name", "file"), sorted(set(variables())))
def test_a_variable_that_the_code_reads_is_on_the_page(name, file):
    assert name in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_of_the_page_is_in_the_code_and_there_once(name):
    assert NAMES.count(name) == 1
    assert re.search(rf"\b{name}\b", CODE)
