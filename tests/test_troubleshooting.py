"""docs/TROUBLESHOOTING.md knows every message of ours that a user can meet."""

import ast
import re

import pytest
from harness import REPO

PAGE = re.sub(r"\s+", " ", (REPO / "docs/TROUBLESHOOTING.md").read_text())
TOOLS = "guard preflight doctor supervise plan plot_metrics ssh/launch".split()  # checks: DOCTOR.md
PYTHON = [REPO / "train_distributed.py", *(REPO / f"scripts/{tool}.py" for tool in TOOLS)]
CALLS = {"UserError", "trainer.UserError", "ValueError", "explain", "fail", "end_now", "refuse"}
CALLS |= {"preflight.refuse", "say", "log", "sys.exit", "print"}


def text_of(node) -> str:
    """A string of the source, with a line break where a value goes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "\n"


def in_python(path):
    """Arguments of CALLS, and sentences that are put together before: in `text`, or returned."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in CALLS:
            text = text_of(node.args[0])
            # What the trainer logs and the tools print is mostly not about something wrong.
            quiet = path == PYTHON[0] or ast.unparse(node.func) == "print"
            if not quiet or ast.unparse(node.func) not in ("log", "print"):
                yield text
            elif re.search("WARNING|error: |guard.py: ", text):
                yield text
        elif isinstance(node, ast.Return | ast.Yield) and path.stem in ("guard", "supervise"):
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            yield from (text for text in map(text_of, parts) if " " in text)
        elif isinstance(node, ast.Assign | ast.AugAssign) and path.stem in ("guard", "preflight"):
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if ast.unparse(target) == "text":
                yield text_of(node.value)


def messages():
    for path in PYTHON:
        yield from ((path.name, text) for text in in_python(path))
    scripts = [*REPO.glob("scripts/**/*.sh"), *REPO.glob("*.s*"), REPO / "scripts/ssh/launch.py"]
    for path in sorted(scripts):
        for word, text in re.findall(r'\b(fail|echo) "((?:[^"\\]|\\.)*)"', path.read_text()):
            if word == "fail" or "error: " in text:
                values = r"\$\(\([^)]*\)\)|\$\([^)]*\)|\$\{[^}]*\}|\$\w+"
                yield path.name, re.sub(values, "\n", text)


@pytest.mark.parametrize(("file", "text"), sorted(set(messages())))
def test_the_page_knows_this_message(file, text):
    text = re.sub(r"^(\w+\.\w+: )?(error: |WARNING: )?", "", text)
    parts = (part.strip(" `'\":;,.()") for part in text.split("\n"))
    longest = max(parts, key=len)
    if len(longest) > 8:  # else it is a sentence put together of others
        assert longest[:40] in PAGE, f"{file}: {text!r}"


def test_there_are_many_entries_and_each_says_what_to_do():
    page = (REPO / "docs/TROUBLESHOOTING.md").read_text()
    entries = re.split(r"(?m)^### ", page.split("\n## Messages of this repository")[0])[1:]
    assert len(entries) >= 35
    for entry in entries:
        assert "**Cause**" in entry and "**Fix**" in entry, entry
