"""Each message of docs/MESSAGES.md is printed by a program of its section.

An entry is a code span in the first column of a table: words of a message, with `...` for each
value between them.
"""

import ast
import functools
import re

import pytest
from harness import REPO

PAGE = (REPO / "docs/MESSAGES.md").read_text()
SPAN = re.compile(r"`([^`]+)`")


def strings_of_python(code: str) -> str:
    """Its strings in order, joined; an f-string is cut only where its values are."""
    texts = []

    def visit(node):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.FormattedValue):
            texts.append("…")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            texts.append(node.value.decode())
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(code))
    return "".join(texts)


def strings_of_bash(code: str) -> str:
    """Without comments; the parts of a message on several lines become one line."""
    code = re.sub(r"(?m)^\s*#.*\n", "", code)
    code = re.sub(r'" \\\n\s*"', " ", code)
    return code.replace("\\`", "`")


@functools.cache
def strings_of_programs(pattern: str) -> str:
    """Those of all files whose name matches, at the top level and below scripts/."""
    texts = []
    for path in sorted([*REPO.glob(pattern), *REPO.glob(f"scripts/**/{pattern}")]):
        read = strings_of_python if path.suffix == ".py" else strings_of_bash
        texts.append(read(path.read_text()))
    assert texts, pattern
    return "\n".join(texts)


def entries(page: str) -> list[tuple[str, str]]:
    """(the programs of a section, as in its heading; the words of a message)"""
    found, programs = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            programs = line
        elif line.startswith("| `"):
            cell = re.split(r"(?<!\\)\|", line)[1]
            found += [(programs, text) for text in SPAN.findall(cell)]
    return found


def is_printed(programs: str, message: str) -> bool:
    names = re.findall(r"[\w*]+\.(?:py|sh|slurm)\b", programs)
    printed = "\n".join(strings_of_programs(name) for name in names)
    return all(part.strip() in printed for part in message.split("..."))


@pytest.mark.parametrize(("programs", "message"), entries(PAGE))
def test_a_program_of_the_section_prints_it(programs, message):
    assert is_printed(programs, message)


def test_the_page_has_a_section_for_each_kind_of_program():
    assert len({programs for programs, _ in entries(PAGE)}) == 10
    assert len(entries(PAGE)) > 120


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ("## guard.py", "the moon is ...: wait"),
        ("## guard.py", "submit this script with sbatch"),  # of another program
        ("## supervise.py", "a chain of jobs"),  # only in a comment or a page
        ("## cluster_train.sh", "this host is not one in"),
    ],
)
def test_a_message_that_nothing_prints_is_found(programs, message):
    assert not is_printed(programs, message)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ('fail(f"no port {n} on {host}")', "no port … on …"),
        ('fail(f"no port {n}: " "set another")', "no port …: set another"),
        ("fail(f\"rank{'s' * (n > 1)} {n} \" + 'missing')", "rank…s …missing"),
    ],
)
def test_strings_are_read_from_python(code, message):
    text = strings_of_python(code)
    assert all(part.strip() in text for part in message.split("…"))


def test_strings_are_read_from_bash():
    code = '# fail "a comment"\nfail "no \\`$X\\`: set" \\\n  "it"\n'
    text = strings_of_bash(code)
    assert "no `$X`: set it" in text and "comment" not in text
