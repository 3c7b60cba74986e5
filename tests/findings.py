"""Findings of scripts/doctor.py as text; each must have an example in docs/DOCTOR.md."""

import re

from harness import REPO

DOCTOR = REPO / "scripts/doctor.py"


def found(findings: list[dict], level: str) -> list[str]:
    """The findings of that level as lines. Fails if docs/DOCTOR.md shows no such finding."""
    some = [finding for finding in findings if finding["level"] == level]
    for finding in some:
        assert without_values(finding["observed"]) in PAGE, finding
    return [f"{f['where']}: {f['check']}: {f['observed']}" for f in some]


def without_values(text: str) -> str:
    """Without numbers, hashes, paths, and messages of PyTorch or the kernel."""
    text = re.sub(r"[(][^)]*[)]", "", text)
    return re.sub(r"/\S+/\S+|\b[0-9a-f]{8}\b|\d+([.]\d+)*", "N", text)


PAGE = "\n".join(map(without_values, (REPO / "docs/DOCTOR.md").read_text().splitlines()))
