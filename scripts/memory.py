"""The memory of a node: a warning when it is nearly used up, and whom the kernel has killed."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from report import HOST, say

REMEDY = "request more --mem, or use fewer --num-workers"
KILLED = f"the kernel killed a process because the job ran out of memory: {REMEDY}"
SHARE = 0.9  # of the limit
SECONDS = 10  # between two looks
GIB = 1 << 30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")  # the last one is in memory.stat


def watch(over: threading.Event) -> None:
    """Return after the warning, or when the script is over."""
    with suppress(Exception):  # a container may hide these files
        while not over.wait(SECONDS):
            used, limit = usage()
            if used > SHARE * limit:
                text = f"{used / GIB:.1f} of {limit / GIB:.1f} GiB of memory are in use on {HOST}"
                say(f"guard.py: WARNING: {text}: {REMEDY}")
                return


def usage() -> tuple[int, int]:
    """(bytes in use, limit) of the machine, or of the cgroup of this process that is fullest."""
    machine = numbers_in(Path("/proc/meminfo"))
    limit = 1024 * machine["MemTotal:"]
    used = limit - 1024 * machine["MemAvailable:"]
    for own_cgroup in own_cgroups():
        for group in [own_cgroup, *own_cgroup.parents]:
            limit_file, used_file, cache = V2 if (group / V2[0]).exists() else V1
            with suppress(OSError, ValueError):  # no limit: "max"
                limit_here = int((group / limit_file).read_text())
                used_here = int((group / used_file).read_text())
                used_here -= numbers_in(group / "memory.stat")[cache]  # freed when needed
                if used_here / limit_here > used / limit:
                    used = used_here
                    limit = limit_here
    return used, limit


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
