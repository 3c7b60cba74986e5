"""Whether the kernel has killed a process for its memory."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

REMEDY = "request more --mem, or use fewer --num-workers"
KILLED = f"the kernel killed a process because the job ran out of memory: {REMEDY}"


def oom_kills() -> int:
    """Grows when the kernel kills a process for its memory in this cgroup or Slurm step."""
    kills = 0
    with suppress(OSError, ValueError):  # a container may hide these files
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):  # v2 or v1
                for file in files_with_kills(Path("/sys/fs/cgroup", controllers, path[1:])):
                    found = re.findall(r"(?m)^oom_kill (\d+)", file.read_text())
                    kills += sum(map(int, found))
    return kills


def files_with_kills(group: Path):
    """Those of cgroup v2 or v1; the tasks of a step have cgroups of their own."""
    for parent in group.parents:
        if parent.name.startswith("step_"):  # v1 counts in each cgroup alone
            return [*parent.glob("memory.events"), *parent.glob("*/memory.oom_control")]
    return group.glob("memory.[eo]*")
