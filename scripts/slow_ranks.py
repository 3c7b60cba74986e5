"""Reports a rank that is late in each step, so that the others wait for it: for guard.py."""

from __future__ import annotations

import bisect
import functools
import json
import os
import statistics
import time
from contextlib import suppress

from hang import HangWatch, flight_recorder, is_done
from report import say, seconds, write_event

SLOW_SHARE = 0.05  # the others wait for a slow rank for at least this share of a step
MIN_STEPS = 20  # of each rank are compared, at least


def start(watch: HangWatch) -> None:
    """Compare the ranks in a thread of their own, every SLOW_RANK_INTERVAL seconds.

    Unless it is set, NCCL's collectives have no times: see enable_flight_recorder().
    """
    interval = seconds("SLOW_RANK_INTERVAL", 60)
    if interval:
        watch.start_thread(SlowRankWatch(watch, max(1, interval)).run)


class SlowRankWatch:
    """Rank 0 names the ranks that arrive late at the collectives, so that the others wait for them.

    All ranks have the same step time, because each collective waits for the last rank: the slow
    rank is the one that waits least. In each interval, each rank writes to the store when it
    arrived in its last steps, by its own clock (see arrivals_in_steps()). Rank 0 names a rank once,
    if it is late in two intervals in a row.
    """

    def __init__(self, watch: HangWatch, interval: float):
        self.watch = watch
        self.interval = interval
        self.steps: list[dict] = []  # of this rank, since its last note
        self.last_end = 0  # of its steps
        # of rank 0
        self.late: set[int] = set()  # in the last comparison
        self.named: set[int] = set()

    def run(self) -> None:
        """Compare the ranks at each multiple of the interval: at the same time on all hosts."""
        store = self.watch.store
        over = self.watch.over
        keys = [f"arrivals {rank}" for rank in range(self.watch.size)]
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not over.wait(self.interval - time.time() % self.interval):
                note = self.own_note()
                if note:
                    store.set(keys[self.watch.rank], json.dumps(note))
                if self.watch.rank > 0 or not note:
                    continue
                if not over.wait(self.interval / 4) and store.check(keys):
                    self.compare([json.loads(text) for text in store.multi_get(keys)])
                    for key in keys:
                        store.delete_key(key)  # each note is compared once

    def own_note(self) -> dict | None:
        """This rank's arrivals in the steps since the last note; None if there are too few.

        {"step_seconds": the usual time of a step; "arrivals": the usual arrival at each place in a
        step, in seconds}
        """
        for step in arrivals_in_steps(list(self.watch.step_times)):
            if step["end"] > self.last_end:
                self.last_end = step["end"]
                self.steps.append(step)
        if len(self.steps) < MIN_STEPS:
            return None
        steps = self.steps
        self.steps = []
        places = zip(*(step["arrivals"] for step in steps))
        return {
            "step_seconds": typical([step["seconds"] for step in steps]),
            "arrivals": [typical(values) for values in places],
        }

    def compare(self, notes: list[dict]) -> None:
        """Rank 0: report the slow ranks that are new. notes: of each rank, see own_note()."""
        step_seconds = max(note["step_seconds"] for note in notes)  # hosts may run ahead
        for arrivals in zip(*(note["arrivals"] for note in notes)):
            late, wait = find_slow_ranks(arrivals, SLOW_SHARE * step_seconds)
            if late:  # later in a step, those that waited here arrive late
                break
        again = late & self.late
        self.late = late
        if again - self.named:
            self.named |= again
            self.report(sorted(again), min(wait, step_seconds), step_seconds)

    def report(self, ranks: list[int], wait_seconds: float, step_seconds: float) -> None:
        hosts = [self.watch.infos[rank]["host"] for rank in ranks]
        names = [f"rank {rank} on {host}" for rank, host in zip(ranks, hosts)]
        text = f"of {1000 * step_seconds:.0f} ms per step, the others wait"
        text += f" {1000 * wait_seconds:.0f} ms for {', '.join(names)}"
        say(f"guard.py: WARNING: {text}")
        write_event("slow_rank", text, ranks=ranks, hosts=hosts)


def find_slow_ranks(arrivals: list[float], threshold: float) -> tuple[set[int], float]:
    """(the ranks for which the others wait longer than the threshold, for how long).

    arrivals: of each rank. A step would be shorter by as much without these ranks.
    """
    median = statistics.median_low(arrivals)
    late = {rank for rank, time in enumerate(arrivals) if time - median > threshold}
    others = [time for rank, time in enumerate(arrivals) if rank not in late]
    wait = max(arrivals) - max(others)
    return (late, wait) if wait > threshold else (set(), 0.0)


def typical(values: list[float]) -> float:
    """Their mean without the largest and the smallest tenth, such as a pause for a checkpoint."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return statistics.fmean(ordered[tenth : len(ordered) - tenth])


@functools.cache
def say_that_there_are_no_times() -> None:
    """Once, to a user who has asked for them."""
    if os.environ.get("SLOW_RANK_INTERVAL") and os.environ.get("RANK") == "0":
        say("guard.py: slow ranks are not named: PyTorch records no times of these collectives")


def arrivals_in_steps(step_times: list[int]) -> list[dict]:
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
    entries = collectives_of_all_ranks()
    has_durations = any("duration_ms" in entry for entry in entries)
    is_gloo = all(entry["profiling_name"].startswith("gloo:") for entry in entries)
    if not has_durations and not is_gloo:
        say_that_there_are_no_times()
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


def collectives_of_all_ranks() -> list[dict]:
    """The Flight Recorder's entries for the default process group, without those of two ranks."""
    traces = [trace for _, trace in flight_recorder(entries=True)]
    entries = [entry for trace in traces for entry in trace.get("entries", [])]
    return [
        entry
        for entry in entries
        if entry["process_group"][1] == "default_pg" and not entry.get("is_p2p")
    ]
