"""docs/TROUBLESHOOTING.md knows every message of ours that a user can meet."""

import ast
import re

import pytest
from harness import REPO

PAGE = re.sub(r"\s+", " ", (REPO / "docs/TROUBLESHOOTING.md").read_text())
CALLS = {"UserError", "DataError", "warn", "give_up", "say", "fail", "exit"}


def text_of(node) -> str:
    """A string of the source, with a line break where a value goes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "\n"


def messages():
    trainer, tools = ["train_distributed.py"], ["supervise.py", "plan.py", "plot_metrics.py"]
    for name in [*trainer, *(f"scripts/{tool}" for tool in tools)]:
        for node in ast.walk(ast.parse((REPO / name).read_text())):
            called = isinstance(node, ast.Call) and node.args
            if called and ast.unparse(node.func).split(".")[-1] in CALLS:
                yield name, text_of(node.args[0]).replace(f"{name.split('/')[-1]}: error: ", "")
    for path in sorted([*REPO.glob("scripts/**/*.sh"), *REPO.glob("*.s*")]):
        for text in re.findall(r'\bfail "((?:[^"\\]|\\.)*)"', path.read_text()):
            yield path.name, re.sub(r"\$\(\([^)]*\)\)|\$\([^)]*\)|\$\{[^}]*\}|\$\w+", "\n", text)


@pytest.mark.parametrize(("file", "text"), sorted(set(messages())))
def test_the_page_knows_this_message(file, text):
    parts = (part.strip(" `'\":;,.()") for part in text.removeprefix("error: ").split("\n"))
    longest = max(parts, key=len)
    if len(longest) > 8:  # else it is a sentence put together of others
        assert longest[:40] in PAGE, f"{file}: {text!r}"


def test_there_are_many_entries_and_each_says_what_to_do():
    page = (REPO / "docs/TROUBLESHOOTING.md").read_text()
    entries = re.split(r"(?m)^### ", page.split("\n## Messages of this repository")[0])[1:]
    assert len(entries) >= 35
    for entry in entries:
        assert "**Cause**" in entry and "**Fix**" in entry, entry
