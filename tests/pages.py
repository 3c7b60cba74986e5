"""The Markdown pages of this repository: their headings, links, commands and outputs."""

import difflib
import os
import re
import subprocess
from pathlib import Path

BLOCK = re.compile(r"(?ms)^ *```(\w*)\n(.*?)^ *```$")  # indented ones are part of a list
# Indented lines that are not commands.
OUTPUT = re.compile(r"\w+\.py: |(User|Port|ProxyJump) |import sys|sys\.path")


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each code block, in order."""
    return [(m[1], m[2]) for m in BLOCK.finditer(page)]


def section(page: str, title: str) -> str:
    """The text below a heading of level 2, up to the next one."""
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(block: str) -> list[str]:
    """The commands of a block of bash, without comments; a backslash continues a line."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line))]


def commands_of(page: str) -> list[str]:
    """Its commands: in blocks of bash, after a prompt `$ `, and indented by four spaces.

    Without those after a prompt with a host, which cluster/test_guide.py runs.
    """
    page = re.sub(r"\\\n\s*", "", page)
    found = []
    for language, block in blocks(page):
        if language == "bash":
            found += [command.strip() for command in commands(block)]
        elif language == "":
            found += re.findall(r"(?m)^\$ (.*)", block)
    indented = re.findall(r"(?m)^ {4}(?=\S)(.*)$", without_code(page))
    return found + [line for line in commands("\n".join(indented)) if not OUTPUT.match(line)]


def masked(text: str) -> list[str]:
    """Its lines, with # for every number: sizes, times and versions differ between machines."""
    text = re.sub(r"(?m)^Code: .*", "Code: #", text)  # digests
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


def without_code(page: str) -> str:
    return BLOCK.sub("", page)


def slug(title: str) -> str:
    """The id that GitHub gives to the first heading with this title."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: str) -> list[str]:
    """The ids of all headings; GitHub numbers the second and later ones with the same title."""
    slugs = [slug(title) for title in re.findall(r"(?m)^#{1,6} (.*)$", without_code(page))]
    numbers = (slugs[:place].count(name) for place, name in enumerate(slugs))
    return [f"{name}-{number}" if number else name for name, number in zip(slugs, numbers)]


def links(page: str) -> list[str]:
    """The targets of its links within this repository."""
    text = re.sub(r"`[^`\n]*`", "", without_code(page))
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return [link for link in found if not re.match(r"\w+:", link)]


def broken_links(path: Path) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    broken = []
    for link in links(path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


def run_command(command: str, directory: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run it in bash until it ends; its output and errors are together, in stdout."""
    return subprocess.run(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=os.environ | variables,
    )
