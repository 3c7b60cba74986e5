"""The processes of this host: for supervise.py, run_torchrun.py and guard.py.

Needs only Python 3.8. Without /proc, as on macOS, there are none.
"""

import ctypes
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# <linux/prctl.h>
PR_SET_PDEATHSIG = 1  # the signal to send when the parent process ends
PR_SET_CHILD_SUBREAPER = 36  # orphans among the descendants become children


def parent_of(process):
    """The id of its parent. OSError if it has ended."""
    text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    # PID (COMMAND) STATE PARENT ...; spaces and parentheses in the command
    state, parent, *_ = text.rpartition(")")[2].split()
    if state == "Z":
        raise ProcessLookupError
    return int(parent)


def alive():
    """{process: its parent} of all that are alive."""
    parents = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parents[int(directory.name)] = parent_of(directory.name)
    return parents


def descendants():
    """Those of this process."""
    parents = alive()
    found = []
    generation = [os.getpid()]
    while generation:
        generation = [process for process in parents if parents[process] in generation]
        found += generation
    return found


def kill_descendants(numbers=(signal.SIGTERM, signal.SIGKILL)):
    """Send each one of these signals, and in 8 seconds the next, until none is alive."""
    for number in numbers:
        asked = set()
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            found = descendants()
            if not found:
                return
            for process in set(found) - asked:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            asked.update(found)
            time.sleep(0.05)


def ranks_of_torchrun():
    """Those among the descendants, not their helpers: torchrun is the parent of a rank."""
    parents = {}
    for process in descendants():
        with suppress(OSError):  # it has just ended
            if "TORCHELASTIC_RUN_ID" in variables_of(process):
                parents[process] = parent_of(process)
    return [process for process, parent in parents.items() if parent not in parents]


def variables_of(process):
    """The environment that it was started with. OSError if it has ended."""
    text = Path(f"/proc/{process}/environ").read_text(errors="replace")
    return dict(line.partition("=")[::2] for line in text.split("\0"))


def handles(process, number):
    """Whether it has a handler for this signal. OSError if it has ended."""
    text = Path(f"/proc/{process}/status").read_text(errors="replace")
    handled = int(re.search(r"SigCgt:\s(\w+)", text)[1], 16)
    return handled >> (number - 1) & 1


def for_each_stop(handler):
    """Set the handler of the signals that ask for a stop; not of SIGHUP under nohup."""
    for number in STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def end_with_parent():
    """The kernel will send this process SIGTERM when its parent ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans():
    """Descendants of this process whose parent ends become its children: it can end them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
