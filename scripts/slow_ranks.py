"""Names a rank that is late in each step, so that the others wait for it: for guard.py."""

from __future__ import annotations

import bisect
import functools
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from hang import HangWatch, flight_recorder
from report import HOST, seconds, write_event

MAX_COMPARED = 512  # ranks: rank 0 would wait too long for the notes and clocks of more
SLOW_SHARE = 0.05  # a slow rank delays the others by at least this share of a step
MAX_STEPS = 64  # of each rank that are compared in an interval, at most
STEPS_IN_A_ROW = 8  # these are chosen in runs of this length
MIN_STEPS = 20  # fewer are kept until the next interval; a quarter needs several
MAX_COLLECTIVES = 5  # of each step that are compared, at most
PINGS = 8  # exchanged with rank 0 to compare the clocks of two hosts


def start(watch: HangWatch) -> None:
    """Compare the ranks in a thread of their own, every SLOW_RANK_INTERVAL seconds."""
    interval = seconds("SLOW_RANK_INTERVAL", 60)
    if interval and watch.size <= MAX_COMPARED:
        slow_ranks = SlowRankWatch(watch)
        watch.start_thread(functools.partial(slow_ranks.watch, max(1, interval)))


class SlowRankWatch:
    """Rank 0 names the ranks that arrive late at the collectives, so that the others wait for them.

    All ranks have the same step time, because each collective waits for the last rank: the slow
    rank is the one that waits least. PyTorch's Flight Recorder has the time at which a rank created
    each collective. In each interval, each rank writes these times to the store, for a few
    collectives of up to MAX_STEPS optimizer steps. Rank 0 names a rank if it is late in two
    intervals in a row, by at least SLOW_SHARE of a step and by more than the error of the clocks.
    """

    def __init__(self, watch: HangWatch):
        self.rank = watch.rank
        self.size = watch.size
        self.store = watch.store
        self.infos = watch.infos
        self.step_ends = watch.step_ends  # of this rank's steps, in nanoseconds since 1970
        self.over = watch.over
        # For each rank, the first rank with the same clock. It compares this clock with rank 0's.
        first_ranks: dict[str, int] = {}
        for other, info in enumerate(self.infos):
            first_ranks.setdefault(info["clock"], other)
        self.clock_ranks = [first_ranks[info["clock"]] for info in self.infos]
        # of rank 0
        self.compared = 0  # number of the first collective of the last step that was compared
        self.steps: list[list[list[float]]] = []  # to be compared: see find_slow_ranks()
        self.late: set[int] = set()  # in the last comparison
        self.named: set[int] = set()

    def watch(self, interval: float) -> None:
        """Compare the ranks at each multiple of the interval: at the same time on all hosts."""
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not self.over.wait(interval - time.time() % interval):
                # Half an interval more, so that no step is left out between two notes.
                step_ends = recent_steps(list(self.step_ends), 1.5 * interval)
                note = arrivals(step_ends, self.size)
                deadline = time.monotonic() + interval / 4
                if self.rank == 0:
                    self.answer_pings(deadline)
                    self.over.wait(min(2, interval / 4))  # the other ranks write their notes
                    self.compare(note)
                    continue
                if self.clock_ranks[self.rank] == self.rank:
                    note["clock"] = self.compare_clock(deadline)
                self.store.set(f"arrivals {self.rank}", json.dumps(note))

    # ------------------------------------------------------------------------ clocks

    def answer_pings(self, deadline: float) -> None:
        """Rank 0: write the times at which the pings of each clock's first rank arrive."""
        for rank in sorted(set(self.clock_ranks) - {0}):
            for _ in range(PINGS):
                ping = self.take(f"ping {rank}", deadline)
                received = time.time()
                if ping is None:
                    break
                self.store.set(f"pong {rank}", json.dumps([ping, received, time.time()]))

    def compare_clock(self, deadline: float) -> list[float] | None:
        """[seconds that rank 0's clock is ahead of this one, their error]; None if unknown.

        As in NTP (RFC 5905, section 8); the exchange with the shortest round trip counts.
        """
        self.store.delete_key(f"pong {self.rank}")  # of an earlier interval
        best = None
        for number in range(PINGS):
            sent = time.time()
            ping = f"{sent} {number}"
            self.store.set(f"ping {self.rank}", ping)
            pong = self.take(f"pong {self.rank}", deadline)
            received = time.time()
            if pong is None:
                break
            answered_ping, arrived, answered = json.loads(pong)
            ahead = (arrived - sent + answered - received) / 2
            error = (received - sent - (answered - arrived)) / 2
            if answered_ping == ping and (best is None or error < best[1]):
                best = [ahead, error]
        return best

    def take(self, key: str, deadline: float) -> str | None:
        """Remove the key from the store; its value, or None if it is not set in time."""
        pause = 0.0005
        while not self.store.check([key]):
            if time.monotonic() > deadline or self.over.wait(pause):
                return None
            pause = min(0.05, 1.1 * pause)  # the other rank may be late by seconds
        value = self.store.get(key).decode()
        self.store.delete_key(key)
        return value

    # -------------------------------------------------------------------- comparison

    def compare(self, own_note: dict) -> None:
        """Rank 0: read the notes of the other ranks; report the slow ranks that are new."""
        notes = [own_note]
        for rank in range(1, self.size):
            if not self.store.check([f"arrivals {rank}"]):
                return
            notes.append(json.loads(self.store.get(f"arrivals {rank}")))
        own_note["clock"] = [0.0, 0.0]
        clocks = [notes[rank].get("clock") for rank in self.clock_ranks]
        if None in clocks:
            return
        self.add_steps(notes, [ahead for ahead, _ in clocks])
        if len(self.steps) < MIN_STEPS:
            return
        steps = self.steps
        self.steps = []
        step_seconds = own_note["step_seconds"]
        error = max(error for _, error in clocks)
        late = find_slow_ranks(steps, max(SLOW_SHARE * step_seconds, error))
        again = late & self.late
        self.named &= late | self.late
        self.late = late
        if again - self.named:
            self.named |= again
            self.report(sorted(again), steps, step_seconds)

    def add_steps(self, notes: list[dict], clocks: list[float]) -> None:
        """Keep the steps that all ranks have in their notes, if they have not been compared yet."""
        groups = {note["group"] for note in notes}
        if len(groups) > 1:
            return
        common = set(notes[0]["steps"]).intersection(*(note["steps"] for note in notes))
        for first in sorted(common, key=int):
            rows = [note["steps"][first] for note in notes]
            numbers = {tuple(number for number, _ in row) for row in rows}
            if int(first) <= self.compared or len(numbers) > 1:
                continue
            self.compared = int(first)
            collectives = []
            for index in range(len(rows[0])):
                times = [row[index][1] / 1e9 + ahead for row, ahead in zip(rows, clocks)]
                collectives.append(times)
            self.steps.append(collectives)

    def report(self, ranks: list[int], steps: list, step_seconds: float) -> None:
        seconds_late, seconds_saved = delay(steps, set(ranks))
        hosts = [self.infos[rank]["host"] for rank in ranks]
        names = [f"rank {rank} on {host}" for rank, host in zip(ranks, hosts)]
        verb = "arrives" if len(ranks) == 1 else "arrive"
        share = seconds_saved / step_seconds
        text = f"{', '.join(names)} {verb} {1000 * seconds_late:.0f} ms after the others "
        text += f"(step {1000 * step_seconds:.0f} ms): the run could be {share:.0%} faster"
        print(f"guard.py: WARNING: {text}", file=sys.stderr, flush=True)
        write_event(
            "slow_rank",
            text,
            ranks=ranks,
            hosts=hosts,
            seconds_late=seconds_late,
            step_seconds=step_seconds,
        )


def clock_id() -> str:
    """The same for processes that read the same clock."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{HOST} {boot}"


def recent_steps(step_ends: list[int], seconds: float) -> list[int]:
    """Those of the last seconds, but at least five, for steps that take minutes."""
    since = time.time_ns() - int(1e9 * seconds)
    count = sum(end > since for end in step_ends)
    return step_ends[-max(5, count) :]


def arrivals(step_ends: list[int], size: int) -> dict:
    """When this rank created collectives in its last optimizer steps, which end at step_ends.

    {"group": the process group; "step_seconds": the usual time of a step; "steps": {number of its
    first collective: [[number, nanoseconds since 1970], ...]}}. The numbers are the same on all
    ranks, and so is the choice among more than MAX_STEPS steps: runs of STEPS_IN_A_ROW, because
    every fourth step, for example, may wait for the same loader worker.
    """
    if not step_ends:
        return {"group": "", "step_seconds": 0.0, "steps": {}}
    group, times = collectives_of_all_ranks(size)
    steps: dict[int, list[int]] = {}  # {index in step_ends: collectives}
    for number in sorted(times):
        index = bisect.bisect_left(step_ends, times[number])
        steps.setdefault(index, []).append(number)
    # The recorder may not have the start of the first one; the last one has not ended.
    complete = [index for index in sorted(steps)[1:] if index < len(step_ends)]
    note = {"group": group, "step_seconds": 0.0, "steps": {}}
    if len(complete) < 2:
        return note
    ends = [step_ends[index] for index in complete]
    note["step_seconds"] = typical([later - end for end, later in zip(ends, ends[1:])]) / 1e9
    usual_length = middle([len(steps[index]) for index in complete])
    stride = 1
    while len(complete) > MAX_STEPS * stride:
        stride *= 2
    for index in complete:
        numbers = steps[index]
        if numbers[0] // usual_length // STEPS_IN_A_ROW % stride == 0:
            chosen = evenly_spaced(numbers, MAX_COLLECTIVES)
            note["steps"][str(numbers[0])] = [[number, times[number]] for number in chosen]
    return note


def collectives_of_all_ranks(size: int) -> tuple[str, dict[int, int]]:
    """(process group of all ranks with most collectives, {number: nanoseconds since 1970})

    Empty if the recorder has no times: with gloo, before PyTorch 2.8.
    """
    names = groups_of_size(size)
    groups: dict[str, dict[int, int]] = {}
    for recorder, trace in flight_recorder(entries=True):
        for entry in trace.get("entries", []):
            name = entry["process_group"][0]
            if name in names and "time_created_ns" in entry and not entry.get("is_p2p"):
                times = groups.setdefault(f"{recorder} {name}", {})
                times.setdefault(entry["collective_seq_id"], entry["time_created_ns"])
    group = max(groups, key=lambda name: (len(groups[name]), name), default="")
    return group, groups.get(group, {})


def groups_of_size(size: int) -> list[str]:
    """The names of the process groups with this number of ranks."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    with suppress(AttributeError, KeyError, RuntimeError):  # it is importing, or adding a group
        ranks = module._world.pg_group_ranks
        groups = list(module._world.pg_names.items())
        return [name for group, name in groups if len(ranks[group]) == size]
    return []


def find_slow_ranks(steps: list[list[list[float]]], threshold: float) -> set[int]:
    """The ranks without which each step would be shorter by more than the threshold, in seconds.

    steps: for each step and each of its collectives, when each rank arrived, in seconds. Compares
    collectives in the same place of different steps. A rank must be late in each quarter of the
    steps, so that ranks that are slow by turns are not named.
    """
    length = middle([len(step) for step in steps])
    steps = [step for step in steps if len(step) == length]
    late = set()
    for place in range(length):
        rows = [lateness(step[place]) for step in steps]
        quarters = []
        for quarter in range(4):
            first = len(rows) * quarter // 4
            end = len(rows) * (quarter + 1) // 4
            quarters.append(rows[first:end])
        for rank in range(len(rows[0])):
            means = [typical([row[rank] for row in part]) for part in quarters if part]
            if min(means) > threshold:
                late.add(rank)
    _, seconds_saved = delay(steps, late)
    return late if seconds_saved > threshold else set()


def delay(steps: list[list[list[float]]], late: set[int]) -> tuple[float, float]:
    """(how late these ranks usually are, after the median of the others; how much later than the
    last of the others): in seconds, at the collective where the second one is the largest.
    """
    others = set(range(len(steps[0][0]))) - late
    if not late or not others:
        return 0.0, 0.0
    length = middle([len(step) for step in steps])
    delays = []
    for place in range(length):
        after_median = []
        after_last = []
        for step in steps:
            if len(step) == length:
                last = max(step[place][rank] for rank in late)
                times = [step[place][rank] for rank in others]
                after_median.append(last - middle(times))
                after_last.append(last - max(times))
        delays.append((typical(after_last), typical(after_median)))
    seconds_saved, seconds_late = max(delays)
    return seconds_late, seconds_saved


def lateness(times: list[float]) -> list[float]:
    """For each rank, the seconds by which it is later than the median of the others."""
    order = sorted(range(len(times)), key=times.__getitem__)
    result = [0.0] * len(times)
    for place, rank in enumerate(order):
        lower = (len(times) - 2) // 2  # the middle of the others, without this rank
        upper = (len(times) - 1) // 2
        lower += lower >= place
        upper += upper >= place
        median = (times[order[lower]] + times[order[upper]]) / 2
        result[rank] = times[rank] - median
    return result


def typical(values: list[float]) -> float:
    """Their winsorized mean: the largest and the smallest tenth count as much as the next value.

    A pause for a checkpoint has no effect then.
    """
    ordered = sorted(values)
    dropped = -(-len(values) // 10) if len(values) > 2 else 0
    low = ordered[dropped]
    high = ordered[-1 - dropped]
    return sum(min(max(value, low), high) for value in values) / len(values)


def middle(values: list):
    """The median, or the smaller one of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def evenly_spaced(values: list[int], count: int) -> list[int]:
    """At most `count` of the values, with the first and the last."""
    if len(values) <= count:
        return values
    return [values[index * (len(values) - 1) // (count - 1)] for index in range(count)]
