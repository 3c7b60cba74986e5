"""Whether the kernel has killed a process for its memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

REMEDY = "request more --mem, or use fewer --num-workers"
KILLED = f"the kernel killed a process because the job ran out of memory: {REMEDY}"


def oom_kills() -> int:
    """How often the kernel has killed a process for its memory in this cgroup or Slurm step."""
    kills = 0
    with suppress(OSError, ValueError):  # a container may hide these files
        for group in own_cgroups():
            for file in files_with_kills(group):
                if file.exists():
                    kills += numbers_in(file).get("oom_kill", 0)
    return kills


def files_with_kills(group: Path) -> list[Path]:
    """Those of cgroup v2 or v1; the tasks of a step have cgroups of their own."""
    for parent in group.parents:
        if parent.name.startswith("step_"):  # v1 counts in each cgroup alone
            return [parent / "memory.events", *parent.glob("*/memory.oom_control")]
    return [group / "memory.events", group / "memory.oom_control"]


def own_cgroups():
    """Yield the directory of each cgroup of this process that may limit its memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # v2 or v1
            yield Path("/sys/fs/cgroup", controllers, path[1:])


def numbers_in(file: Path) -> dict[str, int]:
    """{first word: second word} of each line."""
    numbers = {}
    for line in file.read_text().splitlines():
        name, value, *_ = line.split()
        numbers[name] = int(value)
    return numbers
