"""scripts/slow_ranks.py: which rank is named, and how long the others wait for it."""

import json
import random
import re
import threading
from types import SimpleNamespace

import hang
import pytest
import slow_ranks
from test_guard import HOST, needs_recorder, run, write

SLOW_RANK = """step == 0 and time.sleep(1)  # until guard.py counts the optimizer's steps
        time.sleep(0.2 if rank == 1 else 0.02)
        is_named = torch.tensor(float(os.path.exists(os.environ["EVENTS_FILE"])))
        dist.all_reduce(is_named)
        if is_named:
            break
"""


@needs_recorder
def test_a_rank_that_is_late_in_each_step_is_named(tmp_path):
    script = write(tmp_path, fault=SLOW_RANK)
    script.write_text(script.read_text().replace("range(20)", "range(600)"))
    events = tmp_path / "events"
    result = run(3, script, env={"SLOW_RANK_INTERVAL": "5", "EVENTS_FILE": events})
    assert result.codes == [0, 0, 0], result.err
    assert "guard.py: WARNING: " not in result.err[1] + result.err[2]
    event = json.loads(events.read_text())  # one line
    assert event["event"] == "slow_rank" and event["ranks"] == [1] and event["hosts"] == [HOST]
    assert f"guard.py: WARNING: {event['text']}\n" in result.err[0]
    step_ms, wait_ms = times_in(event)
    assert 50 < wait_ms < step_ms and step_ms > 200, event


def times_in(event: dict) -> tuple[int, int]:
    """(the time of a step, how long the others wait for rank 1), in milliseconds"""
    text = rf"of (\d+) ms per step, the others wait (\d+) ms for rank 1 on {HOST}"
    step_ms, wait_ms = re.fullmatch(text, event["text"]).groups()
    return int(step_ms), int(wait_ms)


# -------------------------------------------------------------------------------- comparison


def arrivals_of(*seconds_of_ranks, count=40, jitter=0.0) -> list[float]:
    """The usual arrival of each rank: after its seconds, or those of step % length."""
    noise = random.Random(0)
    arrivals = []
    for seconds in seconds_of_ranks:
        pattern = seconds if isinstance(seconds, list) else [seconds]
        times = [pattern[step % len(pattern)] + noise.gauss(0, jitter) for step in range(count)]
        arrivals.append(slow_ranks.typical(times))
    return arrivals


def slow_at(*places) -> set[int]:
    """The ranks that are named; a step takes a second."""
    watch = watch_of(0, len(places[0]))
    for _ in range(2):
        watch.compare([note_of(*arrivals, step_seconds=1.0) for arrivals in zip(*places)])
    return watch.named


@pytest.mark.parametrize(
    ("seconds", "late"),
    [
        ([0, 0.1, 0], {1}),
        ([0.1, 0], {0}),
        ([0, 0, 0.1, 0.1], {2, 3}),  # one of two hosts
        ([0, [0, 0, 0, 0.4], 0], {1}),  # with three loader workers
        ([0, 0.04, 0], set()),
        ([0.1, 0.1, 0.1], set()),
        ([[0.1, 0], [0, 0.1]], set()),
        ([[0.1, 0, 0], [0, 0.1, 0], [0, 0, 0.1]], set()),
        ([0, [0.1] * 8 + [0] * 8, [0] * 8 + [0.1] * 8], set()),
        ([0, [9.0] + [0] * 15, 0], set()),  # a checkpoint
        ([0, 0, 0.04, 0.08], set()),  # without rank 3, the ranks would wait for rank 2
    ],
)
def test_a_rank_is_slow_if_it_delays_the_others(seconds, late):
    assert slow_at(arrivals_of(*seconds)) == late
    assert slow_at(arrivals_of(*seconds, jitter=0.005)) == late


def test_a_rank_that_waited_at_the_first_collective_is_not_slow_at_the_last():
    """DDP broadcasts the buffers of a model with BatchNorm before forward(), from rank 0."""
    first = arrivals_of(0.02, 0.06 + 0.1, 0.02, 0.02)
    last = arrivals_of(0.17, 0.18, 0.03, 0.03)  # rank 0 has waited for rank 1
    assert slow_at(first, last) == {1}
    assert slow_at(arrivals_of(0, 0, 0, 0), last) == {0, 1}


def watch_of(rank: int, size: int, store=None) -> slow_ranks.SlowRankWatch:
    watch = SimpleNamespace(rank=rank, size=size, store=store, step_times=[])
    watch.infos = [{"host": f"n{1 + rank}"} for rank in range(size)]
    watch.over = threading.Event()
    return slow_ranks.SlowRankWatch(watch, 1.5)


def note_of(*places: float, step_seconds=0.1) -> dict:
    return {"step_seconds": step_seconds, "arrivals": places}


def test_a_rank_is_named_once_when_it_is_late_twice_in_a_row(capsys):
    watch = watch_of(0, 3)
    printed = []
    for slow in [1, 2, 1, 1, 1, None, 1, 1, 2, 2]:
        watch.compare([note_of(0.06 if rank == slow else 0.02) for rank in range(3)])
        printed.append(capsys.readouterr().err)
    text = "guard.py: WARNING: of 100 ms per step, the others wait 40 ms for rank {} on n{}\n"
    named = {3: text.format(1, 2), 9: text.format(2, 3)}
    assert printed == [named.get(n, "") for n in range(10)]


def test_the_others_wait_for_at_most_a_step(capsys):
    watch = watch_of(0, 2)
    for _ in range(2):
        watch.compare([note_of(0.02), note_of(5)])
    text = "guard.py: WARNING: of 100 ms per step, the others wait 100 ms for rank 1 on n2\n"
    assert capsys.readouterr().err == text


# ------------------------------------------------------------------- times of a rank's steps

COLLECTIVES = 3  # of a step of the simulated ranks
LEAD = 10  # steps that a host may be ahead of its GPU
START = 1_700_000_000  # seconds since 1970


class Rank:
    """A rank of a simulated run: its Flight Recorder and its steps. Times in seconds."""

    def __init__(self, clock: float = 0.0):
        self.clock = clock  # is ahead by so much
        self.entries = []
        self.step_times = []

    def collective(self, time: float, name="gloo:all_reduce", duration=None, retired=True) -> None:
        """Add an entry as in the dump of PyTorch's Flight Recorder."""
        entry = {"process_group": ["0", "default_pg"], "is_p2p": False, "retired": retired}
        entry["profiling_name"] = name
        entry["state"] = "completed" if retired else "started"
        entry["time_created_ns"] = int(1e9 * (START + self.clock + time))
        if duration is not None and retired:
            entry["duration_ms"] = 1000 * duration
        self.entries.append(entry)

    def step(self, time: float) -> None:
        """optimizer.step() begins."""
        self.step_times.append(int(1e9 * (START + self.clock + time)))


def own_note(patch, watch: slow_ranks.SlowRankWatch, rank: Rank) -> dict | None:
    recorders = [("gloo", {"entries": rank.entries})]
    patch.setattr(slow_ranks, "flight_recorder", lambda entries: recorders)
    watch.watch.step_times = rank.step_times
    return watch.own_note()


def compare(patch, ranks: list[Rank]) -> None:
    """Compare the ranks twice."""
    watch = watch_of(0, len(ranks))
    for _ in range(2):
        notes = [own_note(patch, watch_of(0, len(ranks)), rank) for rank in ranks]
        watch.compare(notes)


def ranks_with_nccl(work: list[float], host_work: list[float], has_timing=True) -> list[Rank]:
    """Ranks whose hosts run ahead of their GPUs.

    A step of each GPU takes its seconds of work in COLLECTIVES parts, each followed by an
    all_reduce that starts when this GPU is ready, and ends 1 ms after the last one is. Each host
    needs its seconds for a step, and its clock differs by 5 s from that of the next host. When the
    recorder is read, the GPUs have not finished the last LEAD / 2 steps.
    """
    ranks = [Rank(clock=5.0 * number) for number in range(len(work))]
    hosts = [0.0] * len(work)
    gpu = 0.0  # all leave the last collective at the same time
    gpu_ends = []
    count = 80
    for step in range(count):
        is_done = step < count - LEAD / 2
        if step >= LEAD:
            hosts = [max(host, gpu_ends[step - LEAD]) for host in hosts]
        for place in range(COLLECTIVES):
            starts = [gpu + seconds / COLLECTIVES for seconds in work]
            gpu = max(starts) + 0.001
            for number, rank in enumerate(ranks):
                created = hosts[number] + host_work[number] * (place + 1) / (COLLECTIVES + 1)
                duration = gpu - starts[number] if has_timing else None
                rank.collective(created, "nccl:all_reduce", duration, is_done)
        gpu_ends.append(gpu)
        for number, rank in enumerate(ranks):
            hosts[number] += host_work[number]
            if step >= hang.WARM_UP_STEPS:
                rank.step(hosts[number])
    return ranks


HOST_WORK = [0.030, 0.005, 0.004, 0.010]  # the GPU's work hides that of rank 0's host


@pytest.mark.parametrize(
    ("work", "wait", "names"),
    [
        ([0.02, 0.04], 20, "rank 1 on n2"),
        ([0.02, 0.02, 0.04, 0.018], 20, "rank 2 on n3"),
        ([0.04, 0.02, 0.04, 0.021], 19, "rank 0 on n1, rank 2 on n3"),
        ([0.04, 0.04, 0.04], 0, None),
        ([0.04, 0.041, 0.0395], 0, None),
    ],
)
def test_the_durations_of_nccl_tell_which_gpu_is_slow(monkeypatch, capsys, work, wait, names):
    compare(monkeypatch, ranks_with_nccl(work, HOST_WORK))
    printed = capsys.readouterr().err
    if names is None:
        assert printed == ""
    else:
        text = rf"guard.py: WARNING: of 4\d ms per step, the others wait {wait} ms for {names}\n"
        assert re.fullmatch(text, printed), printed


def test_without_the_durations_of_nccl_there_is_nothing_to_compare(monkeypatch):
    """Rank 1's host is the fast one, but would look late: it waits for its GPU in each step."""
    for rank in ranks_with_nccl([0.04, 0.04], HOST_WORK, has_timing=False):
        assert own_note(monkeypatch, watch_of(0, 2), rank) is None


@pytest.mark.parametrize(
    ("work", "later", "waits", "is_named"),
    [
        ([0.02, 0.04], 0, True, True),
        ([0.02, 0.04], 0, False, True),  # rank 0 is 1.2 s ahead after 60 steps
        ([0.04, 0.04], 1, False, False),  # rank 1 began 1 s later
    ],
)
def test_ranks_that_run_ahead_with_gloo(monkeypatch, capsys, work, later, waits, is_named):
    times = [0.0, float(later)]
    ranks = [Rank(), Rank(clock=-5)]
    for _ in range(60):
        times = [time + seconds for time, seconds in zip(times, work)]
        for rank, time_created in zip(ranks, times):
            rank.collective(time_created)
        if waits:
            times = [max(times)] * 2
        for rank, time_left in zip(ranks, times):
            rank.step(time_left + 0.0001)
    compare(monkeypatch, ranks)
    text = "guard.py: WARNING: of 40 ms per step, the others wait 20 ms for rank 1 on n2\n"
    assert capsys.readouterr().err == (text if is_named else "")


@pytest.mark.parametrize("has_all_reduce", [False, True])
def test_a_rank_with_a_slow_optimizer_is_named(monkeypatch, capsys, has_all_reduce):
    """If the loss is averaged after each step, the others wait there, and not for the gradients."""
    optimizer = [0.01, 0.03]
    ranks = [Rank(), Rank()]
    now = 0.0
    for _ in range(60):
        times = [now + seconds for seconds in optimizer]
        if has_all_reduce:
            for rank, time_created in zip(ranks, times):
                rank.collective(time_created)
            times = [max(times)] * 2
        times = [time_left + 0.07 for time_left in times]
        for rank, time_created in zip(ranks, times):
            rank.collective(time_created)
        now = max(times)
        for rank in ranks:
            rank.step(now)
    compare(monkeypatch, ranks)
    text = "guard.py: WARNING: of 100 ms per step, the others wait 20 ms for rank 1 on n2\n"
    assert capsys.readouterr().err == text


def test_each_step_is_in_one_note(monkeypatch):
    """But for the first step: the recorder may not have all of it, or it is a warm-up."""
    watch = watch_of(0, 2)
    notes = []
    for steps in (1, 20, 21, 21, 30, 80):  # done since the start
        rank = Rank()
        for step in range(steps):
            rank.collective(step + 0.5)
            rank.step(step + 1)
        rank.collective(steps + 0.5)
        notes.append(own_note(monkeypatch, watch, rank))
    note = {"step_seconds": 1.0, "arrivals": [0.5, 0.5]}
    assert notes == [None, None, note, None, None, note]
