#!/usr/bin/env python3
"""What guard.py and its neighbors share: how a rank reports an error, and reads the store.

    python3 scripts/report.py CAUSE REASON HOST     write FAILURE_FILE, as a shell script

Any Python from 3.6 on can run this file: cluster_train.sh may have failed before it finds another.
FAILURE_FILE is JSON: {"cause", "reason", "host": who writes; "time", "written": of the failure and
the file, seconds since 1970; "rank": if there is one; "hosts": those that may be at fault, if that
can be said; "started_hosts": the others are at fault}
"""

import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hosts import HOST

PROGRAM = Path(sys.argv[0]).name  # such as guard.py or supervise.py, which import this file
LOOPBACK = re.compile(r"(::ffff:)?127\.|::1$")  # IPv4 and IPv6
STOP_SIGNALS = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}
OWN_FAULTS = ("configuration", "exception", "killed", "out of memory")  # may be the host's
OTHERS_SECONDS = 3  # for the other hosts to find the same user error
STOP_SECONDS = 0.5  # that a slow disk may delay a stop
FIRST_PAUSE = 0.1  # seconds between two requests of a rank that waits for a key in the store
LAST_PAUSE = 5


def main():
    cause, reason, host = sys.argv[1:]
    write_failure(cause, reason, host=host)


def say(text):
    """Print to standard error. If that is closed, what guard.py does goes on."""
    with suppress(OSError, ValueError):  # its reader has ended; the script has closed it
        print(text, file=sys.stderr, flush=True)


def write_failure(cause, reason, rank=None, host=HOST, **more):
    """Write FAILURE_FILE for scripts/supervise.py, if no other rank has done so; and a file of this
    host, because the first to write need not be the first to fail.

    more: hosts or started_hosts, see above. After a user error, the first host waits for the
    others: one that a host alone has is not the user's.
    """
    file = os.environ.get("FAILURE_FILE")
    if not file:
        return
    facts = {"cause": cause, "reason": reason, "host": host, "time": time.time()}
    if rank is not None:
        facts["rank"] = rank
    if cause in OWN_FAULTS:
        facts["hosts"] = [host]
    facts.update(more, written=time.time())
    is_first = write_new(file, facts)
    if "STOP_FILE" in os.environ:  # under supervise.py
        write_new(f"{file}.{host}", facts)
        if is_first and cause == "configuration":
            time.sleep(OTHERS_SECONDS)


def write_new(file, facts):
    """Write JSON, unless the file, or a link, exists. Returns whether it was written."""
    try:
        with open(file, "x") as new:
            new.write(json.dumps(facts))
    except OSError:
        return False
    return True


def write_event(event, text, **facts):
    """Add a line to EVENTS_FILE for scripts/supervise.py."""
    record = {"time": time.time(), "event": event, "text": text, **facts}
    with suppress(OSError, KeyError), open(os.environ["EVENTS_FILE"], "a") as file:
        file.write(json.dumps(record) + "\n")


def write_stop(number):
    """Name the signal in STOP_FILE for scripts/supervise.py, unless it has asked for the stop.

    The stop does not wait for a disk that does not answer.
    """
    within(STOP_SECONDS, write_stop_now, number)


def write_stop_now(number):
    with suppress(OSError), open(os.environ.get("STOP_FILE", ""), "x") as file:
        file.write(signal.Signals(number).name)


def within(limit, function, *arguments):
    """What the function returns within so many seconds; None if it has raised, or goes on."""
    results = []

    def call():
        with suppress(Exception):
            results.append(function(*arguments))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit)
    return results[0] if results else None


def fail(text, cause="configuration", **more):
    """Print a user error and exit with code 2."""
    say(f"{PROGRAM}: error: {text}")
    write_failure(cause, text, own_rank(), **more)
    sys.exit(2)


def end_now(text):
    """Like fail(), but works from another thread while the main thread hangs."""
    with suppress(SystemExit):
        fail(text, "port")
    os._exit(2)


def own_rank():
    """$RANK; None if it is not a number."""
    with suppress(ValueError):
        return int(os.environ.get("RANK", ""))
    return None


def seconds(name, default):
    """The value of an environment variable in seconds, also since 1970."""
    text = os.environ.get(name)
    if not text:
        return default
    with suppress(ValueError):
        value = float(text)
        if 0 <= value <= 4e9:  # false for nan; PyTorch counts nanoseconds in 64 bits
            return value
    fail(f"{name} is {text!r}, not a number of seconds")


def whole_number(env, name, low, high, default=""):
    """The value of an environment variable."""
    text = env.get(name) or default
    with suppress(ValueError):
        value = int(text)
        if low <= value <= high:
            return value
    fail(f"{name} is {text!r}, not a number from {low} to {high}: correct or unset it")


def stop_signal():
    """The signal that makes the training save and exit: $STOP_SIGNAL."""
    name = os.environ.get("STOP_SIGNAL") or "TERM"
    if name not in STOP_SIGNALS:
        fail("STOP_SIGNAL is {!r}, not one of {}".format(name, ", ".join(STOP_SIGNALS)))
    return STOP_SIGNALS[name]


def stopped_exit_code():
    """$STOPPED_EXIT_CODE: that of a training that was stopped before its end."""
    return whole_number(os.environ, "STOPPED_EXIT_CODE", 0, 255, "0")


def has_gpu():
    for pattern in ("nvidia[0-9]*", "kfd", "dxg"):
        if any(Path("/dev").glob(pattern)):
            return True
    return False


def wait_for(store, key, deadline):
    """The value of a key in the store; None if it is not set before the deadline.

    Each pause is a tenth of the time waited so far: thousands of ranks may wait for one that never
    comes. store.wait() would need no pauses, but prints warnings when its time is over.
    """
    began = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        if now >= deadline:
            return None
        pause = min(max(FIRST_PAUSE, (now - began) / 10), LAST_PAUSE)
        time.sleep(min(pause, deadline - now))
    return store.get(key).decode()


PLURALS = {"is": "are", "does": "do", "has": "have"}


def ranks_by_host(infos):
    """{host: its ranks}; infos: of each rank, see rank_info() in guard.py, or None."""
    return ranks_by({rank: info["host"] for rank, info in enumerate(infos) if info})


def ranks_by(values):
    """{value: the ranks that have it}, from {rank: value}."""
    groups = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def ranks_do(ranks, infos, predicate=""):
    """For example: ranks 0-3 on node01, node02 are late. infos: with their hosts, or empty."""
    text = f"ranks {format_ranges(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    if infos:
        hosts = dict.fromkeys(infos[rank]["host"] for rank in ranks)
        text += f" on {', '.join(hosts)}"
    verb, _, rest = predicate.partition(" ")
    if len(ranks) > 1:
        verb = PLURALS.get(verb, verb)
    return f"{text} {verb} {rest}".strip()


def format_ranges(numbers):
    """[0, 1, 2, 5] -> "0-2,5" """
    known = set(numbers)
    firsts = [number for number in numbers if number - 1 not in known]
    lasts = [number for number in numbers if number + 1 not in known]
    ranges = []
    for first, last in zip(firsts, lasts):
        ranges.append(f"{first}-{last}" if first < last else str(first))
    return ",".join(ranges)


if __name__ == "__main__":
    main()
