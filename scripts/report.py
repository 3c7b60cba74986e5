"""What guard.py and its neighbors share: how a rank reports an error, and reads the store."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from hosts import HOST

LOOPBACK = re.compile(r"(::ffff:)?127\.|::1$")  # IPv4 and IPv6
STOP_SIGNALS = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}
OTHERS_SECONDS = 3  # for the other hosts to find the same user error
PAUSE = 0.1  # seconds between two requests of a rank that waits for a key in the store


def say(text: str) -> None:
    """Print to standard error. If that is closed, what guard.py does goes on."""
    with suppress(OSError, ValueError):  # its reader has ended; the script has closed it
        print(text, file=sys.stderr, flush=True)


def write_failure(cause: str, reason: str, rank: int | None, host: str = HOST, **more) -> None:
    """Write FAILURE_FILE for scripts/supervise.py, if no other rank has done so.

    A user error is also written to a file of this host, and the first host waits for the others: an
    error that one host alone has is not the user's.
    """
    file = os.environ.get("FAILURE_FILE")
    if not file:
        return
    facts = {"cause": cause, "reason": reason, "host": host, **more}
    if rank is not None:
        facts["rank"] = rank
    is_first = write_new(file, facts)
    if cause == "configuration" and "ATTEMPT" in os.environ:
        write_new(f"{file}.{host}", facts)
        if is_first:
            time.sleep(OTHERS_SECONDS)


def write_new(file: str, facts: dict) -> bool:
    """Write JSON, unless the file exists. Returns whether it was written."""
    try:
        with open(file, "x") as new:
            json.dump(facts, new)
    except OSError:
        return False
    return True


def write_event(event: str, text: str, **facts) -> None:
    """Add a line to EVENTS_FILE for scripts/supervise.py."""
    file = os.environ.get("EVENTS_FILE")
    if file:
        record = {"time": time.time(), "event": event, "text": text, **facts}
        with suppress(OSError), open(file, "a") as events:
            events.write(json.dumps(record) + "\n")


def write_stop(number: int) -> None:
    """Name the signal in STOP_FILE for scripts/supervise.py, unless it has asked for the stop."""
    with suppress(OSError), open(os.environ.get("STOP_FILE", ""), "x") as file:
        file.write(signal.Signals(number).name)


def fail(text: str, cause: str = "configuration") -> None:
    """Print a user error and exit with code 2."""
    say(f"guard.py: error: {text}")
    write_failure(cause, text, own_rank())
    sys.exit(2)


def end_now(text: str) -> None:
    """Like fail(), but works from another thread while the main thread hangs."""
    with suppress(SystemExit):
        fail(text, "port")
    os._exit(2)


def own_rank() -> int:
    """$RANK; 0 if it is not a number."""
    with suppress(ValueError):
        return int(os.environ.get("RANK", ""))
    return 0


def seconds(name: str, default: float | None) -> float | None:
    """The value of an environment variable in seconds, at most three years."""
    text = os.environ.get(name)
    if not text:
        return default
    with suppress(ValueError):
        value = float(text)
        if 0 <= value <= 1e8:  # false for nan
            return value
    fail(f"{name} is {text!r}, not a number of seconds")


def whole_number(name: str, text: str, low: int, high: int) -> int:
    """The value of an environment variable."""
    with suppress(ValueError):
        value = int(text)
        if low <= value <= high:
            return value
    fail(f"{name} is {text!r}, not a number from {low} to {high}: correct or unset it")


def stop_signal() -> signal.Signals:
    """The signal that makes the training save and exit: $STOP_SIGNAL."""
    name = os.environ.get("STOP_SIGNAL") or "TERM"
    if name not in STOP_SIGNALS:
        fail(f"STOP_SIGNAL is {name!r}, not one of {', '.join(STOP_SIGNALS)}")
    return STOP_SIGNALS[name]


def has_gpu() -> bool:
    for pattern in ("nvidia[0-9]*", "kfd", "dxg"):
        if any(Path("/dev").glob(pattern)):
            return True
    return False


def wait_for(store, key: str, deadline: float) -> str | None:
    """The value of a key in the store; None if it is not set before the deadline.

    store.wait() would need no pauses, but prints warnings when its time is over.
    """
    while not store.check([key]):
        rest = deadline - time.monotonic()
        if rest < 0:
            return None
        time.sleep(min(PAUSE, rest))
    return store.get(key).decode()


def ranks_by_host(infos: list[dict | None]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        if info:
            hosts.setdefault(info["host"], []).append(rank)
    return hosts


def format_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5" """
    known = set(numbers)
    firsts = [number for number in numbers if number - 1 not in known]
    lasts = [number for number in numbers if number + 1 not in known]
    ranges = []
    for first, last in zip(firsts, lasts):
        ranges.append(f"{first}-{last}" if first < last else str(first))
    return ",".join(ranges)
