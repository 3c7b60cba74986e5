"""docs/TROUBLESHOOTING.md: the ten common errors, the form of each entry, and links that work."""

import re

import pytest
from harness import REPO

DOCS = REPO / "docs"
PAGE = (DOCS / "TROUBLESHOOTING.md").read_text()
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


def without_code(text: str) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", text)


def sections(text: str, level: str) -> dict[str, str]:
    """{heading: text below it}"""
    parts = re.split(rf"(?m)^{level} (.+)$", text)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def anchors(text: str) -> list[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", without_code(text))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(text: str) -> list[str]:
    """Targets in this repository."""
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_code(text))


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


@pytest.mark.parametrize("page", ["TROUBLESHOOTING.md", "MESSAGES.md"])
def test_links_lead_to_files_and_headings_that_exist(page):
    text = (DOCS / page).read_text()
    assert len(anchors(text)) == len(set(anchors(text)))
    assert len(links(text)) > 20
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = DOCS / (name or page)
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


def test_anchors_are_those_of_github():
    text = "# A `b_c`: d, e -4\n```\n# no heading\n```\n## `/dev/shm/nccl-` (x)\n"
    assert anchors(text) == ["a-b_c-d-e--4", "devshmnccl--x"]
