"""Reports a rank that is late in each step, so that the others wait for it: for guard.py."""

from __future__ import annotations

import bisect
import functools
import json
import sys
import time
from collections import deque
from contextlib import suppress

from hang import HangWatch, flight_recorder, is_done
from report import say, seconds, write_event

MAX_COMPARED = 512  # ranks: rank 0 reads a note of each one
SLOW_SHARE = 0.05  # the others wait for a slow rank for at least this share of a step
MIN_STEPS = 20  # of each rank are compared, at least: a quarter of them needs several
WARM_UP_STEPS = 10  # optimizer steps that are not compared


def start(watch: HangWatch) -> None:
    """Compare the ranks in a thread of their own, every SLOW_RANK_INTERVAL seconds."""
    interval = seconds("SLOW_RANK_INTERVAL", 60)
    if interval and watch.size <= MAX_COMPARED:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        slow_ranks = SlowRankWatch(watch)
        register_optimizer_step_pre_hook(slow_ranks.on_step)
        watch.start_thread(functools.partial(slow_ranks.watch, max(1, interval)))


class SlowRankWatch:
    """Rank 0 names the ranks that arrive late at the collectives, so that the others wait for them.

    All ranks have the same step time, because each collective waits for the last rank: the slow
    rank is the one that waits least. In each interval, each rank writes to the store when it
    arrived in its last steps, by its own clock (see arrivals_in_steps()). Rank 0 names a rank if
    it is late in two intervals in a row, and the others wait for at least SLOW_SHARE of a step.
    """

    def __init__(self, watch: HangWatch):
        self.rank = watch.rank
        self.size = watch.size
        self.store = watch.store
        self.infos = watch.infos
        self.over = watch.over
        self.step_count = 0
        self.step_times = deque(maxlen=2000)  # when optimizer.step() began, nanoseconds since 1970
        self.steps: list[dict] = []  # of this rank, to be compared
        # of rank 0
        self.late: set[int] = set()  # in the last comparison
        self.named: set[int] = set()

    def on_step(self, *_) -> None:
        self.step_count += 1
        if self.step_count > WARM_UP_STEPS:
            self.step_times.append(time.time_ns())

    def watch(self, interval: float) -> None:
        """Compare the ranks at each multiple of the interval: at the same time on all hosts."""
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not self.over.wait(interval - time.time() % interval):
                note = self.own_note()
                if not note:
                    continue
                if self.rank > 0:
                    self.store.set(f"arrivals {self.rank}", json.dumps(note))
                    continue
                notes = self.other_notes(time.monotonic() + interval / 4)
                if notes:
                    self.compare([note, *notes])

    def own_note(self) -> dict | None:
        """This rank's arrivals in the steps since the last note, and in MIN_STEPS at least.

        {"step_seconds": the usual time of a step; "arrivals": for each place in a step, the usual
        arrival in each quarter of the steps, in seconds}. None if there is no new step.
        """
        last_end = self.steps[-1]["end"] if self.steps else 0
        steps = arrivals_in_steps(list(self.step_times), self.size)
        new_steps = [step for step in steps if step["end"] > last_end]
        self.steps += new_steps
        self.steps = self.steps[-max(MIN_STEPS, len(new_steps)) :]
        if not new_steps or len(self.steps) < MIN_STEPS:
            return None
        places = zip(*(step["arrivals"] for step in self.steps))
        return {
            "step_seconds": typical([step["seconds"] for step in self.steps]),
            "arrivals": [typical_in_quarters(values) for values in places],
        }

    def other_notes(self, deadline: float) -> list[dict] | None:
        """Rank 0: remove the notes of the other ranks from the store; None if one is missing."""
        keys = [f"arrivals {rank}" for rank in range(1, self.size)]
        while not self.store.check(keys):
            if time.monotonic() > deadline or self.over.wait(0.5):
                return None
        notes = []
        for key in keys:
            notes.append(json.loads(self.store.get(key)))
            self.store.delete_key(key)
        return notes

    def compare(self, notes: list[dict]) -> None:
        """Rank 0: report the slow ranks that are new. notes: of each rank, see own_note()."""
        numbers_of_places = {len(note["arrivals"]) for note in notes}
        if len(numbers_of_places) > 1:  # TORCH_NCCL_ENABLE_TIMING is not set on all ranks
            return
        step_seconds = max(note["step_seconds"] for note in notes)  # hosts may run ahead
        threshold = SLOW_SHARE * step_seconds
        places = list(zip(*(note["arrivals"] for note in notes)))
        late, place = find_slow_ranks(places, threshold)
        again = late & self.late
        self.named &= late | self.late
        self.late = late
        wait = min(waiting_time(place, again), step_seconds)
        if again - self.named and wait > threshold:
            self.named |= again
            self.report(sorted(again), wait, step_seconds)

    def report(self, ranks: list[int], wait_seconds: float, step_seconds: float) -> None:
        hosts = [self.infos[rank]["host"] for rank in ranks]
        names = [f"rank {rank} on {host}" for rank, host in zip(ranks, hosts)]
        text = f"of {1000 * step_seconds:.0f} ms per step, the others wait"
        text += f" {1000 * wait_seconds:.0f} ms for {', '.join(names)}"
        say(f"guard.py: WARNING: {text}")
        write_event(
            "slow_rank",
            text,
            ranks=ranks,
            hosts=hosts,
            wait_seconds=wait_seconds,
            step_seconds=step_seconds,
        )


# ------------------------------------------------------------------------------ each rank


def arrivals_in_steps(step_times: list[int], size: int) -> list[dict]:
    """When this rank arrived at the collectives of its steps; optimizer.step() began at step_times.

    For each step: {"end": nanoseconds since 1970; "seconds": its length; "arrivals": [...]}, in
    seconds. All ranks leave a collective at about the same time, so an arrival is counted

    - with NCCL and TORCH_NCCL_ENABLE_TIMING=1, backwards from that time: PyTorch's Flight Recorder
      has the duration of each collective on the GPU, and the last rank has the shortest ones;
    - with gloo, from the last optimizer.step(), before which the ranks left a collective, to the
      creation of the first and of the last collective.

    Creation times of different ranks are not compared: their difference grows with each step if
    collectives are asynchronous. With NCCL and without durations, there is no result: a host may
    wait for its GPU anywhere.
    """
    entries = collectives_of_all_ranks(size)
    has_durations = any("duration_ms" in entry for entry in entries)
    is_gloo = all(entry["profiling_name"].startswith("gloo:") for entry in entries)
    if not has_durations and not is_gloo:
        return []
    steps: dict[int, list[dict]] = {}  # {index in step_times: collectives before that time}
    for entry in entries:
        index = bisect.bisect_left(step_times, entry["time_created_ns"])
        steps.setdefault(index, []).append(entry)
    steps.pop(len(step_times), None)  # has not ended
    result = []
    indices = sorted(steps)
    for previous, index in zip(indices, indices[1:]):
        if not all(is_done(entry) for entry in steps[index]):
            break
        start = step_times[previous]
        end = step_times[index]
        if has_durations:
            durations = [entry.get("duration_ms", 0) for entry in steps[index]]
            arrivals = [-sum(durations) / 1e3]
        else:
            times = [entry["time_created_ns"] for entry in steps[index]]
            arrivals = [(min(times) - start) / 1e9, (max(times) - start) / 1e9]
        result.append({"end": end, "seconds": (end - start) / 1e9, "arrivals": arrivals})
    return result


def collectives_of_all_ranks(size: int) -> list[dict]:
    """The entries of the recorder for process groups of all ranks.

    Empty if the recorder has no times: with gloo, before PyTorch 2.8.
    """
    names = groups_of_size(size)
    result = []
    for _, trace in flight_recorder(entries=True):
        for entry in trace.get("entries", []):
            is_collective = "time_created_ns" in entry and not entry.get("is_p2p")
            if is_collective and entry["process_group"][0] in names:
                result.append(entry)
    return result


def groups_of_size(size: int) -> list[str]:
    """The names of the process groups with this number of ranks."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    with suppress(AttributeError, KeyError, RuntimeError):  # it is importing, or adding a group
        ranks = module._world.pg_group_ranks
        groups = list(module._world.pg_names.items())
        return [name for group, name in groups if len(ranks[group]) == size]
    return []


def typical_in_quarters(values: list[float]) -> list[float]:
    """The typical value in each quarter of at least four values."""
    bounds = [len(values) * quarter // 4 for quarter in range(5)]
    return [typical(values[first:end]) for first, end in zip(bounds, bounds[1:])]


def typical(values: list[float]) -> float:
    """Their winsorized mean: the largest and the smallest tenth count as much as the next value.

    A pause for a checkpoint has no effect then.
    """
    ordered = sorted(values)
    dropped = -(-len(values) // 10) if len(values) > 2 else 0
    low = ordered[dropped]
    high = ordered[-1 - dropped]
    return sum(min(max(value, low), high) for value in values) / len(values)


# ------------------------------------------------------------------------- all ranks


def find_slow_ranks(places: list[list[list[float]]], threshold: float) -> tuple[set[int], list]:
    """(the ranks for which the others wait longer than the threshold, the place where they do).

    places: for each place in a step and each rank, its arrivals in each quarter of the steps, in
    seconds. A rank must be late in each quarter, so that ranks that are slow by turns are not
    named. A later place counts only if the others wait longer there by the threshold: the ranks
    that waited at an earlier place arrive late at the later one.
    """
    late: set[int] = set()
    place = places[0]
    for arrivals in places:
        ranks = late_ranks(arrivals, threshold)
        if waiting_time(arrivals, ranks) > waiting_time(place, late) + threshold:
            late = ranks
            place = arrivals
    return late, place


def late_ranks(arrivals: list[list[float]], threshold: float) -> set[int]:
    """The ranks that are later than the median by the threshold, in each quarter."""
    late = set(range(len(arrivals)))
    for quarter in zip(*arrivals):
        median = sorted(quarter)[(len(quarter) - 1) // 2]  # or the smaller one in the middle
        late &= {rank for rank, time in enumerate(quarter) if time - median > threshold}
    return late


def waiting_time(arrivals: list[list[float]], ranks: set[int]) -> float:
    """The mean time from the arrival of the last of the other ranks to that of the last of these.

    A step would be shorter by as much without these ranks. 0 if there are none.
    """
    if not ranks:
        return 0.0
    waits = []
    for quarter in zip(*arrivals):
        others = [time for rank, time in enumerate(quarter) if rank not in ranks]
        waits.append(max(quarter) - max(others))
    return sum(waits) / len(waits)
