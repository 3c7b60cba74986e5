"""Retired words: every file uses the usual terms for a thing, and headings name their content."""

import re
import subprocess

import pytest
from harness import REPO

# Pattern: (the usual term, a sentence with the retired one). Case does not matter. Words that also
# have an ordinary use, such as "sums of gradients" or "network card", are not here.
WORDS = {
    r"roll[- ]calls?": ("rank check", "The roll call failed."),
    r"rank cards?|(its|their|whose) cards?|cards? of": ("rank info", "Each rank sends its card."),
    r"claims? (file|of)|claimed|(its|their|whose) claims?": (
        "run lock",
        "It writes its claim to the run directory.",
    ),
    r"signs? of life": ("heartbeat", "The last sign of life is an hour old."),
    r"supersed\w+": ("replaced by a newer attempt", "The attempt was superseded."),
    r"wish|wishes|wished": ("stop flag", "Ranks exchange their wishes."),
    r"heard": ("received", "A signal was heard."),
    r"lookouts?": ("sync interval", "The lookout is every 5 s."),
    r"savers?": ("checkpoint writer", "The saver is a thread."),
    r"pace": ("throughput", "The pace is 570 samples/s."),
    r"last words": ("error report", "It writes its last words."),
    r"end on all ranks|ends on all ranks": ("exit all ranks", "The run ends on all ranks."),
    r"ledgers?": ("attempt log", "The ledger has a line per attempt."),
    r"made up(?! of)": ("added afterwards", "The line is made up by the next attempt."),
    r"in vain": ("without progress", "Three attempts in vain."),
    r"nonces?": ("attempt id", "Each attempt has a nonce."),
    r"lineages?": ("job id", "The lineage of the job."),
    r"planted": ("injected", "The fault was planted."),
    r"passed over": ("skipped", "A damaged checkpoint is passed over."),
    r"somebody": ("another rank", "Somebody has gone."),
    r"said no": ("failed", "Slurm said no."),
    r"rides?|riding": ("is part of", "The wish rides along with the sums."),
    r"go(es)? one road": ("work alike", "All go one road."),
    r"given up, that would": ("a restart would not help", "Given up, that would happen again."),
    r"once mended": ("after fixing it", "Once mended, to go on: run it."),
    r"saved is it": ("it is saved", "Saved is it either way."),
    r"complete or not there": ("written atomically", "Every file is complete or not there."),
    r"layer[- ]beneath": ("cluster_train.sh", "See [below](#the-layer-beneath)."),
    r"holds[- ]for[- ]all": ("common options", "What holds for all."),
}
# Names of functions, and what they are called now.
FUNCTIONS = {
    "tell": "report_error",
    "give_up": "abort",
    "announce": "log_topology",
    "spans": "format_ranges",
    "mix": "derive_seed",
    "tune": "configure_torch",
    "mine": "local_micro_batches",
    "chosen": "checkpoint_path",
    "look": "poll",
    "roll_call": "check_ranks",
    "claim": "lock",
}
# Headings of Markdown files that do not name their content.
HEADINGS = r"it (?:stops|ends)|.*\b(?:doubts?|trouble)"


def find_words(text: str) -> list[str]:
    """The retired words of a text, each with the usual term."""
    text = re.sub(r"\s*\n[\s#]*", " ", text)  # a phrase may continue on the next line
    text = text.replace("_", " ")  # in names of variables, too
    return [
        f"{found[0]!r} (write: {usual})"
        for pattern, (usual, _) in WORDS.items()
        for found in re.finditer(rf"\b({pattern})\b", text, re.IGNORECASE)
    ]


def find_functions(text: str) -> list[str]:
    """The calls and definitions of functions with retired names, each with the usual name."""
    found = re.findall(rf"(?<![\w.-])({'|'.join(FUNCTIONS)})\(", text)
    return [f"{name}() (write: {FUNCTIONS[name]}())" for name in found]


def find_headings(text: str) -> list[str]:
    """Headings that do not name their content: of Markdown, or bold at the start of a line."""
    return re.findall(rf"(?mi)^(?:#+ |\*\*)(?:{HEADINGS})\b", text)


def text_files() -> list[str]:
    """The text files that git tracks, without this one; none outside of a git checkout."""
    command = ["git", "-C", REPO, "ls-files"]
    names = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    files = [name for name in names if (REPO / name).is_file() and not (REPO / name).is_symlink()]
    files = [name for name in files if b"\0" not in (REPO / name).read_bytes()]
    return [name for name in files if name != "tests/test_language.py" and "LICENSE" not in name]


@pytest.mark.parametrize("name", text_files())
def test_no_retired_word_is_used(name):
    text = (REPO / name).read_text()
    found = find_words(text) + find_functions(text)
    found += find_headings(text) if name.endswith(".md") else []
    assert not found, f"{name}: " + "; ".join(found)


@pytest.mark.skipif(not (REPO / ".git").exists(), reason="needs a git checkout")
def test_all_kinds_of_files_are_read():
    kinds = {name.rpartition(".")[2] for name in text_files()}
    assert {"py", "sh", "slurm", "md", "yaml", "patch"} <= kinds


@pytest.mark.parametrize(("pattern", "sentence"), [(p, s) for p, (_, s) in WORDS.items()])
def test_a_retired_word_is_found_also_across_lines_and_in_names(pattern, sentence):
    found = find_words(sentence)
    assert any(re.fullmatch(pattern, text.split("'")[1], re.IGNORECASE) for text in found)
    for other in (sentence.replace(" ", "\n    # "), sentence.replace(" ", "_"), sentence.upper()):
        assert len(find_words(other)) == len(found), other


def test_functions_and_headings_are_found_and_ordinary_text_is_not():
    assert find_functions("def give_up(error):") == ["give_up() (write: abort())"]
    assert find_functions("x = spans([0, 1])") and not find_functions("torch.mix(a); retell(b)")
    for line in ("## It stops", "**It stops** when", "### In doubt", "## Trouble", "**It ends**"):
        assert find_headings(f"text\n{line}\ntext"), line
    assert not find_headings("## Troubleshooting\nIt stops when **all** have saved.")
    ordinary = "sums of gradients; network card; link speed; paced; reclaimed; overrides"
    assert not find_words(ordinary)
