"""docs/TROUBLESHOOTING.md: the ten common errors, and the form of each entry."""

import re

from harness import REPO
from pages import without_code

PAGE = (REPO / "docs/TROUBLESHOOTING.md").read_text()
COMMON = [
    "Connection timeout: unable to initialize distributed",
    "Cannot connect to master node",
    "Address already in use",
    "Hang without a message",
    "NCCL error: NCCL initialization failed",
    "CUDA out of memory",
    "ModuleNotFoundError: No module named",
    "Failed to activate conda environment",
    "Wrong LOCAL_RANK, rank mismatch",
    "Duplicate GPU detected",
]


def sections(text: str, level: str) -> dict[str, str]:
    """{heading: text below it}"""
    parts = re.split(rf"(?m)^{level} (.+)$", text)[1:]
    return dict(zip(parts[::2], parts[1::2]))


GROUPS = sections(without_code(PAGE), "##")


def test_the_ten_common_errors_come_first_with_commands_to_paste():
    first = next(name for name in GROUPS if name != "How to use this page")
    assert first == "Ten common errors"
    entries = sections(sections(PAGE, "##")[first], "###")
    assert list(entries) == COMMON
    for name, text in entries.items():
        assert re.findall(r"(?m)^- \*\*(\w+)\*\*: ", text) == ["Cause", "Check", "Fix"], name
        assert "```bash\n" in text, name


def test_each_entry_says_the_cause_and_what_to_do():
    entries = [entry for group in GROUPS.values() for entry in sections(group, "###").items()]
    assert len(entries) > 100
    for name, text in entries:
        words = re.findall(r"(?m)^- \*\*(\w+)\*\*: ", text)
        assert words in (["Cause", "Check", "Fix"], ["Cause", "Fix"]), name


def test_the_list_of_groups_is_complete():
    groups = [name for name in GROUPS if name != "How to use this page"]
    listed = re.findall(r"\[([^]]+)\]\(#", PAGE.partition("\nGroups: ")[2].partition("\n\n")[0])
    assert listed == groups
