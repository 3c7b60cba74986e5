"""The memory of a node: a warning when it is nearly used up, and whom the kernel has killed."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from report import HOST, parent_of, rank_of, say

REMEDY = "request more --mem, or use fewer --num-workers"
KILLED = f"the kernel killed a process because the job ran out of memory: {REMEDY}"
SHARE = 0.9  # of the limit
SECONDS = 10  # between two looks
CGROUP_FILES = {  # by controllers: of the limit, of what is in use; the cache in memory.stat
    "": ("memory.max", "memory.current", "inactive_file"),  # cgroup v2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # v1
}


def watch(over: threading.Event) -> None:
    """Return after the warning, or when the script is over."""
    with suppress(Exception):  # a container may hide these files
        watch_until(over)


def watch_until(over: threading.Event) -> None:
    first: dict[int, int] = {}  # what the processes used when they were first seen
    while not over.wait(SECONDS):
        sizes = sizes_of_ranks()
        for process, size in sizes.items():
            first.setdefault(process, size)
        used, limit = usage()
        if used > SHARE * limit and sizes:
            grown = max(sizes, key=lambda process: sizes[process] - first[process])
            gib = 1 << 30
            text = f"{used / gib:.1f} of {limit / gib:.1f} GiB of memory are in use on {HOST}; "
            text += f"{name_of(grown)} grew most, from {first[grown] / gib:.1f} to "
            text += f"{sizes[grown] / gib:.1f} GiB: {REMEDY}"
            say(f"guard.py: WARNING: {text}")
            return


def usage() -> tuple[int, int]:
    """(bytes in use, limit) of the machine, or of the cgroup of this process that is fullest."""
    facts = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value, *_ = line.split()
        facts[name] = 1024 * int(value)
    fullest = (facts["MemTotal:"] - facts["MemAvailable:"], facts["MemTotal:"])
    for controllers, path in own_cgroups():
        limit_file, used_file, cache_name = CGROUP_FILES[controllers]
        group = Path("/sys/fs/cgroup", controllers, path[1:])
        for directory in [group, *group.parents]:
            with suppress(OSError, ValueError):  # no limit: "max"
                limit = int((directory / limit_file).read_text())
                lines = (directory / "memory.stat").read_text().splitlines()
                cache = int(dict(map(str.split, lines))[cache_name])  # freed when needed
                used = int((directory / used_file).read_text()) - cache
                fullest = max(fullest, (used, limit), key=lambda one: one[0] / one[1])
    return fullest


def oom_kills() -> int:
    """How often the kernel has killed a process for its memory in this cgroup or Slurm step."""
    kills = 0
    with suppress(OSError, ValueError):  # a container may hide these files
        for controllers, path in own_cgroups():
            for file in files_with_kills(controllers, path):
                facts = dict(map(str.split, file.read_text().splitlines()))
                kills += int(facts.get("oom_kill", 0))
    return kills


def own_cgroups():
    """Yield (controllers, path) of each cgroup of this process that may limit its memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in CGROUP_FILES:
            yield controllers, path


def files_with_kills(controllers: str, path: str) -> list[Path]:
    """Those of cgroup v2 or v1; the tasks of a step have cgroups of their own."""
    step = re.match("(.*/step_[^/]+)/", path)
    directory = Path("/sys/fs/cgroup", controllers, (step[1] if step else path)[1:])
    files = [directory / "memory.events", directory / "memory.oom_control"]
    if step:  # v1 counts in each cgroup alone
        files += directory.glob("*/memory.oom_control")
    return [file for file in files if file.exists()]


def sizes_of_ranks() -> dict[int, int]:
    """{process: resident bytes} of the ranks of this node and their loader workers."""
    sizes = {}
    parents = {}
    for directory in Path("/proc").glob("[0-9]*"):
        process = int(directory.name)
        with suppress(OSError, IndexError):  # it has just ended
            parents[process] = parent_of(process)
            pages = int((directory / "statm").read_text().split()[1])
            sizes[process] = pages * os.sysconf("SC_PAGE_SIZE")
    ranks = {process for process, parent in parents.items() if parent == os.getppid()}
    return {p: size for p, size in sizes.items() if p in ranks or parents[p] in ranks}


def name_of(process: int) -> str:
    """For example: rank 3 or its worker (process 4711)."""
    rank = rank_of(process)
    return f"rank {rank} or its worker (process {process})" if rank else f"process {process}"
