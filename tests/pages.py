"""The Markdown pages of this repository: their headings, links, commands and outputs."""

import difflib
import re
from pathlib import Path

BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each code block, in order."""
    return [(m[1], m[2]) for m in BLOCK.finditer(page)]


def commands(block: str) -> list[str]:
    """The commands of a block of bash, without comments; a backslash continues a line."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line))]


def masked(text: str) -> list[str]:
    """Its lines, with # for every number: sizes, times and versions differ between machines."""
    return [re.sub(r"\d+(\.\d+)*(\+c\w+)?", "#", line.rstrip()) for line in text.splitlines()]


def difference(shown: str, printed: str) -> str:
    """How the output differs from what the page shows, line by line; "" if it does not.

    `...` alone on a line of the page stands for any lines, also none. Numbers are not compared.
    """
    lines = masked(shown)
    pattern = "".join(r"(.*\n)*?" if s == "..." else re.escape(s) + "\n" for s in lines)
    output = masked(printed)
    if re.fullmatch(pattern, "".join(line + "\n" for line in output)):
        return ""
    return "\n".join(
        difflib.unified_diff(lines, output, "the page", "the output", lineterm="", n=1)
    )


def anchors(page: str) -> set[str]:
    """The ids that GitHub gives to the headings."""
    seen: dict[str, int] = {}
    found = set()
    for title in re.findall(r"(?m)^#{1,6} (.*)$", BLOCK.sub("", page)):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken_links(path: Path) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    text = BLOCK.sub("", path.read_text())
    text = re.sub(r"`[^`\n]*`", "", text)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    broken = []
    for link in links:
        file, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken
