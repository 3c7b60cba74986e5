"""What docs/TROUBLESHOOTING.md says about the error that ends a script: for guard.py.

The page is the data. The headings of its entries have messages in backquotes, in which ... stands
for any text of a line, and each entry begins with the remedy.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

from report import say

PAGE = Path(__file__).resolve().parent.parent / "docs/TROUBLESHOOTING.md"
ENTRY = re.compile(r"(?ms)^### (.+?)\n\s*(.+?\.)\s")  # a heading, and the first sentence below it
MESSAGE = re.compile("`(.+?)`")
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
printed = deque(maxlen=20)  # what the script has printed last


def remember_output() -> None:
    """It may be the only message: a script that ends with sys.exit(1) has printed the error."""
    for stream in (sys.stdout, sys.stderr):
        if stream:  # None: closed
            stream.write = remember(stream.write)


def remember(write):
    def write_and_remember(text):
        printed.append(text)
        return write(text)

    return write_and_remember


def explain(error: BaseException, store) -> None:
    """Print the remedy for an error, if the page has one and no other rank has failed before.

    store: None if there is only one rank.
    """
    if isinstance(error, KeyboardInterrupt):
        return
    with suppress(Exception):  # there is no page; the store has ended with its rank
        is_first = store is None or store.add("failed", 1) == 1
        found = find(PAGE.read_text(), [*texts_of(error), "".join(printed)])
        if is_first and found:
            heading, remedy = found
            say(f"guard.py: docs/TROUBLESHOOTING.md, {heading}: {remedy}")


def texts_of(error: BaseException | None):
    """Yield the text of an error with its causes; then of those that were being handled."""
    context = None
    text = ""
    while error:
        text += f"{type(error).__name__}: {error}\n"
        context = error.__context__
        error = error.__cause__
    if text:
        yield text
        yield from texts_of(context)


def find(page: str, texts: list[str]) -> tuple[str, str] | None:
    """(the beginning of a heading, remedy) for the first text that has a message of the page."""
    for text in texts:
        found = []
        for heading, remedy in ENTRY.findall(page):
            for message in MESSAGE.findall(heading):
                pattern = ".*".join(map(re.escape, message.split("...")))
                if re.search(pattern, text):
                    found.append((len(message), heading, remedy))
        if found:
            _, heading, remedy = max(found)  # the longest message is the most specific one
            beginning = re.split("(?<=`), |: (?=`)", heading)[0]
            return beginning, " ".join(LINK.sub(r"\1", remedy).split())
    return None
