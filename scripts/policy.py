"""What follows an attempt: decided from what attempts left behind. No file, no process, no clock.

supervise.py asks decide(), and does what it says. TABLE is also in docs/RELIABILITY.md. Needs only
Python 3.8.
"""

import re
import signal
from collections import Counter
from typing import NamedTuple

PAUSES = (1, 1, 3, 9, 30)  # times RESTART_PAUSE: after 0, 1, ... attempts without progress
STRIKES = 2  # pieces of evidence against a host that make it suspect
END = "the end of the job's time"
BY_SCHEDULER = {END, "preempted", "SIGTERM", "SIGUSR1", "SIGUSR2"}
CLEAN = (0, -1, -2, -10, -12, -15)  # codes after a stop; of SIGHUP, SIGINT, USR1, USR2, SIGTERM
CODES = {  # of COMMAND, without a report. 126 and 127 of a shell: it cannot be executed
    2: "configuration",
    126: "configuration",
    127: "configuration",
    255: "node lost",
}
AGAIN = ("restart", "leave out")
PROVEN = ("step", "file")  # kinds of progress
PROGRESS = (*PROVEN, "time")
STARTS = (  # of the job, in a row without such progress
    (PROGRESS, 3, "no new step was saved"),
    (PROVEN, 10, "nothing has shown progress: set PROGRESS_FILE"),
)


class Report(NamedTuple):
    """How a host failed."""

    cause: str
    reason: str
    host: str
    hosts: list = []  # at fault, if that can be said
    rank: int = None  # None: before there were ranks
    time: float = 0.0


class Attempt(NamedTuple):
    """What an attempt left behind, and what followed. The attempt log has all of it."""

    hosts: list  # that trained
    exit_code: int  # of COMMAND; -N: signal N has ended it
    reports: list = []
    defective: list = []  # hosts, as their driver says
    requests: dict = {}  # to stop: {a signal, STOP, MAX_DURATION, scancel, END, ...: time}
    of_ranks: str = ""  # a signal that only they got
    state: str = ""  # as the training says
    stopped_by: str = ""  # the same
    start_step: int = 0
    end_step: int = 0
    saved_step: int = None  # None: it writes no STATUS_FILE
    progress: str = ""
    restarts: int = 0  # of the job
    start: float = 0.0
    end: float = float("inf")
    next: str = ""  # the action that followed
    # Only for the attempt log:
    attempt: str = ""  # JOB.NUMBER
    world_size: int = 0
    code: str = ""  # the commit
    events: list = []


class Limits(NamedTuple):
    hosts: list  # of the allocation, without EXCLUDED_NODES
    spares: int = 0  # how many of them can be left out
    max_restarts: int = 10
    restart_pause: float = 10
    can_requeue: bool = False


class Decision(NamedTuple):
    cause: str
    reason: str
    suspects: tuple  # hosts left out of what follows
    action: str
    pause: float  # seconds before a restart
    sentence: str


class Row(NamedTuple):
    """How an attempt ended, and what follows: the first action that is possible."""

    evidence: str
    first: str
    then: tuple = ()  # tried in this order; once a host is suspect, without `first`
    gives_up: str = ""


SCHEDULER = "a stop by the scheduler"
REPEATS = "the same error on two hosts"
TABLE = {
    "success": Row("exit code 0; the status is `finished`, or there is none", "finish"),
    "a stop by you": Row(
        "Ctrl-C, SIGHUP, a file STOP, `--stop-at-step`, `DEADLINE`, `MAX_DURATION`, scancel; also "
        "between two attempts, or when a job that was submitted before starts",
        "stop",
    ),
    SCHEDULER: Row(
        "SIGTERM, SIGUSR1, SIGUSR2, a preemption or the end of the job's time; then any end",
        "requeue",
        ("stop",),
        "after 3 starts of the job in a row without progress, those preempted not counted",
    ),
    "a user error": Row(
        "without progress: exit code 2, 126 or 127 on the first host or on several; NaN", "give up"
    ),
    REPEATS: Row(
        "the same words of the same rank after the same saved step: neither host is suspect",
        "restart",
        (),
        "after 5 attempts in a row without progress",
    ),
    "a bad node": Row(
        "a node, or up to half of them, cannot be reached, or never came while the others waited; "
        "one node alone has no mount, Python or package, or does not answer in a hang; its driver "
        "reports a failed GPU",
        "restart",
        ("leave out", "requeue", "restart"),
        "after 5 attempts in a row without progress in each of 3 starts",
    ),
    "a crash": Row(
        "any other end. The host of the first rank to fail may be bad",
        "restart",
        ("leave out", "restart", "requeue"),
        "after 5 attempts in a row without progress in each of 3 starts",
    ),
}


def decide(attempt, history, limits):
    """history: the earlier attempts of the job, also of its earlier starts."""
    past = [*history, attempt]
    asked = stops(attempt)
    cause, reason = cause_of(attempt, asked)
    shown = {host for host, _ in evidence(attempt)}
    struck = strikes(past)
    suspects = [host for host, count in Counter(struck).items() if count >= STRIKES]
    spared = [host for host in suspects if host in limits.hosts][: limits.spares]
    row = TABLE[row_of(cause, attempt, asked, shown, struck)]
    crashes = idle(past, PROGRESS, "leave out").count(attempt.restarts)
    why = obstacles(past, asked, limits, crashes)
    if not shown.intersection(spared):
        why["leave out"] = ""

    is_suspect = row.first == "restart" and shown.intersection(suspects)
    actions = row.then if is_suspect else (row.first, *row.then)
    why_not = ""
    for action in (*actions, "give up"):
        if action not in why:
            break
        why_not = why[action] or why_not
    pause = PAUSES[crashes if action == "restart" else 0] * limits.restart_pause
    left_out = tuple(suspects if action == "requeue" else spared)

    what = f"{cause}: {reason}"
    by = ", ".join(asked) or "--stop-at-step"
    number = [earlier.restarts for earlier in past].count(attempt.restarts)
    sentence = f"{what}. Restart {number} in {pause:.0f} s"
    if action == "finish":
        sentence = cause
    elif action == "stop":
        sentence = f"stopped ({by})" if cause == "stopped" else f"{what}; stopped ({by})"
    elif action == "requeue":
        sentence = f"{what}. The job is requeued"
    elif action == "give up":
        sentence = f"error: {what}. Giving up: {why_not or 'a restart would not help'}"
    if left_out:
        sentence += f", without {', '.join(left_out)}"
    if attempt.saved_step is not None and action in (*AGAIN, "requeue"):
        sentence += f", from step {attempt.saved_step}"
    return Decision(cause, reason, left_out, action, pause, sentence)


def stops(attempt):
    """The requests to stop, also those that only the ranks know."""
    if attempt.requests:
        return list(attempt.requests)
    is_clean = attempt.exit_code in CLEAN and not attempt.reports
    if attempt.of_ranks and is_clean:  # with a report, srun has sent it: a rank had failed
        return [attempt.of_ranks]
    asked_by = (attempt.stopped_by, attempt.of_ranks)  # another rank may only see STOP_FILE
    is_orphan = "SIGTERM" in asked_by and attempt.exit_code in (-9, 255)
    if attempt.state == "stopped" and not is_orphan:  # of a launcher that was lost
        return attempt.stopped_by.split(", ")  # "" after --stop-at-step
    return []


def cause_of(attempt, asked):
    """(cause, reason)"""
    code = attempt.exit_code
    first, _ = told(attempt)
    if attempt.state == "finished":
        return "finished", ""
    if asked and (attempt.state == "stopped" or (code in CLEAN and not first)):
        return "stopped", ", ".join(asked)
    if first:
        where = first.host if first.rank is None else f"rank {first.rank} on {first.host}"
        return first.cause, f"{where}: {first.reason}"
    if code == 0 and attempt.state:
        return "killed", f"exit code 0, but the status is {attempt.state} (`set -o pipefail`?)"
    if code == 0:
        return "ended", "exit code 0, and no status"
    if code == -9:
        return "killed", "by SIGKILL: out of memory (see dmesg), or it did not stop in time"
    if code < 0:
        return "killed", f"by signal {-code}: {signal.strsignal(-code)}"
    return CODES.get(code, "killed"), f"exit code {code}, and no report: see the errors above"


def row_of(cause, attempt, asked, shown, struck):
    """The row of TABLE."""
    if cause in ("finished", "ended"):
        return "success"
    if asked:
        return SCHEDULER if BY_SCHEDULER.issuperset(asked) else "a stop by you"
    if cause in ("configuration", "NaN") and not shown and not attempt.progress:
        return "a user error"
    if shown and not shown.intersection(struck):
        return REPEATS
    is_of_node = cause in ("node lost", "hang", "configuration") or attempt.defective
    return "a bad node" if is_of_node else "a crash"


def obstacles(past, asked, limits, crashes):
    """{action that is impossible: why, or "" if there is nothing to report}"""
    why = {}
    if crashes >= len(PAUSES):
        why["restart"] = f"{crashes} attempts without progress"
    failures = idle(past, PROVEN).count(past[-1].restarts)
    if not asked and (failures > limits.max_restarts or limits.max_restarts == 0):
        reached = f"MAX_RESTARTS={limits.max_restarts} is reached"
        why = dict.fromkeys((*AGAIN, "requeue"), reached)
    if not limits.can_requeue:
        why["requeue"] = ""
        return why
    for kinds, most, text in STARTS:
        if len(set(idle(past, kinds))) >= most:
            why["requeue"] = f"in {most} starts of this job in a row, {text}"
            if BY_SCHEDULER.issuperset(asked):
                why["stop"] = ""  # its exit code would be 0
    return why


def idle(past, kinds, reset=""):
    """The starts of the last attempts in a row without such progress, but not of those preempted.

    reset: an action that ends the row, too.
    """
    found = []
    for attempt in reversed(past):
        if attempt.progress in kinds or (reset and attempt.next == reset):
            break
        if END in attempt.requests or not attempt.requests:
            found.append(attempt.restarts)
    return found


# ---------------------------------------------------------------------------------- evidence


def told(attempt):
    """(the earliest report or None, the hosts at fault)"""
    if not attempt.reports:
        return None, []
    first = min(attempt.reports, key=lambda report: report.time)
    named = set()
    for report in attempt.reports:
        if words(report) == words(first):
            named.update(report.hosts)
    hosts = [host for host in attempt.hosts if host in named]
    most = 1
    if first.cause == "node lost":
        most = max(1, len(attempt.hosts) // 2)
    is_of_user = first.cause == "configuration" and attempt.hosts[0] in hosts  # it checks it all
    if len(hosts) > most or is_of_user:
        hosts = []
    return first, hosts


def words(report):
    """Its cause and reason without numbers and names of hosts."""
    own = [word for word in report.reason.split() if word.strip(":,.") != report.host]
    return report.cause, re.sub(r"\bon \S+|0x\w+|\d+", "", " ".join(own))


def evidence(attempt):
    """Pairs of a host and what it has shown: its own name if no other host can show the same."""
    found = [(host, host) for host in attempt.hosts if host in attempt.defective] * STRIKES
    was_asked = any(time <= attempt.end for time in attempt.requests.values())
    if was_asked:
        return found
    first, hosts = told(attempt)
    for host in hosts:
        place = (words(first), first.rank, attempt.saved_step)
        found.append((host, host if first.cause == "node lost" else place))
    return found


def strikes(past):
    """The hosts of all evidence, without what has been the same on a second host."""
    found = [piece for attempt in past for piece in evidence(attempt)]
    shown = [what for _, what in set(found)]  # once by each host
    return [host for host, what in found if shown.count(what) == 1]
