"""What scripts/doctor.py has found, as text, and compared with its page in docs/."""

import re

from harness import REPO

DOCTOR = REPO / "scripts/doctor.py"


def found(findings: list[dict], level: str) -> list[str]:
    """Lines of that level. The page must show one like each of them."""
    some = [finding for finding in findings if finding["level"] == level]
    for finding in some:
        assert without_values(finding["observed"]) in PAGE, finding
    return [f"{f['where']}: {f['check']}: {f['observed']}" for f in some]


def without_values(text: str) -> str:
    """Without numbers, hashes, paths, and what PyTorch or the kernel say."""
    text = re.sub(r"[(][^)]*[)]", "", text)
    return re.sub(r"/\S+/\S+|\b[0-9a-f]{8}\b|\d+([.]\d+)*", "N", text)


PAGE = "\n".join(map(without_values, (REPO / "docs/DOCTOR.md").read_text().splitlines()))
