"""docs/TROUBLESHOOTING.md: the ten common errors, the form of each entry, and the index."""

import re

from harness import REPO
from pages import slug, without_code

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
del GROUPS["How to use this page"]
INDEX = GROUPS.pop("Index")
ENTRIES = {name: text for group in GROUPS.values() for name, text in sections(group, "###").items()}


def test_the_ten_common_errors_come_first_with_commands_to_paste():
    first = next(iter(GROUPS))
    assert first == "Ten common errors"
    entries = sections(sections(PAGE, "##")[first], "###")
    assert list(entries) == COMMON
    for name, text in entries.items():
        assert re.findall(r"(?m)^- \*\*(\w+)\*\*: ", text) == ["Cause", "Check", "Fix"], name
        assert "```bash\n" in text, name


def test_each_entry_says_the_cause_and_what_to_do():
    assert len(ENTRIES) > 70
    for name, text in ENTRIES.items():
        words = re.findall(r"(?m)^- \*\*(\w+)\*\*: ", text)
        assert words in (["Cause", "Check", "Fix"], ["Cause", "Fix"]), name


def test_the_index_has_a_text_for_each_entry_in_the_row_of_its_group():
    rows = re.findall(r"(?m)^\| \[([^]]+)\]\(#(.+?)\) \| (.+) \|$", INDEX)
    assert [name for name, _, _ in rows] == list(GROUPS)
    texts = []
    for name, anchor, cell in rows:
        assert anchor == slug(name)
        targets = re.findall(r"\]\(#(.+?)\)", cell)
        entries = [slug(title) for title in sections(GROUPS[name], "###")]
        assert list(dict.fromkeys(targets)) == entries, name
        texts += re.findall(r"\[([^]]+)\]\(", cell)
    assert len(set(texts)) == len(texts) > 140


def test_the_index_has_words_of_each_heading_that_is_an_error():
    links = re.findall(r"\[`([^`]+)`\]\(#(.+?)\)", INDEX)
    for name in ENTRIES:
        heading = " ".join(re.findall(r"`([^`]+)`", name))
        words = [text for text, anchor in links if anchor == slug(name)]
        assert not heading or any(text in heading for text in words), name
