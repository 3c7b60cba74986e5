"""Detects ranks that wait for each other for ever, and finds the one at fault: for guard.py."""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import re
import statistics
import sys
import threading
import time
import traceback
from contextlib import suppress

from processes import kill_descendants
from report import (
    HOST,
    ranks_by,
    ranks_do,
    say,
    seconds,
    wait_for,
    within,
    write_failure,
)

SILENT = "does not answer"
ENDED = "has ended"
NOT_STARTED = "which its GPU has not started"
LONGEST_TICK = 3  # seconds between two looks of a watch; in the rest, the process was suspended
POLL = 5  # seconds between checks for a hang that another rank has found
QUIET_SECONDS = 30  # without progress, before the recorder is asked for a limit
STORE_SECONDS = 40  # for all ranks to answer
COMPILING_CODE = re.compile(  # is on the stack only while it compiles
    r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile|codecache))\.py$"
    r"|/triton/compiler/"
)
NCCL_TIMEOUT = 600  # seconds that PyTorch gives a collective of NCCL; gloo: 1,800
RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE"  # PyTorch reads it when it creates a process group
RECORDERS = ("nccl", "nccl2", "nccl-lazy", "xccl", "gloo")  # PyTorch's, from 2.15 on
EQUAL_SIZES = re.compile("reduce|broadcast|backward")  # collectives with the same on all ranks
MAX_GROUPS = 4  # of ranks, whose lines the report names
OWN_DIRECTORY = os.path.dirname(os.path.realpath(__file__))
ELSEWHERE = re.compile(r"^\.\./|(site|dist)-packages/|/lib/python3|<")  # libraries
WAITING_CODE = re.compile(  # of PyTorch: where the main thread waits for other ranks
    r"/torch/(distributed/(distributed_c10d|rendezvous|device_mesh|utils)|nn/parallel/\w+)\.py$"
)


class HangWatch:
    """Prints this rank's stacks and exits once any rank has waited in a collective for too long.

    Progress is a step of any optimizer in the process, a collective
    that starts or ends according to PyTorch's Flight Recorder, or a compilation on any rank. The
    waiting rank notifies the others through the store. Each rank writes its position to the store,
    where rank 0 collects them. At fault are the ranks that do not answer, and those that have not
    enqueued the first incomplete collective; the others may be far ahead of it.
    """

    def __init__(self, rank: int, size: int, store):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        os.environ.setdefault(RECORDER_SIZE, "2000")  # else, before PyTorch 2.11, there is none
        register_optimizer_step_pre_hook(self.on_step)
        self.rank = rank
        self.size = size
        self.store = store
        self.infos = RankInfos(store)
        self.fixed_timeout = seconds("HANG_TIMEOUT", None)
        self.steps = 0
        self.quiet = 0.0  # seconds since the last progress
        self.compilations = 0  # how often a rank was seen compiling, the same on all ranks
        self.found = threading.Event()  # a hang
        self.over = threading.Event()  # the script has ended
        self.threads: list[threading.Thread] = []
        if self.fixed_timeout != 0 and has_recorder():
            # Two threads: a store call never returns if the store's server is stopped.
            self.start_thread(self.watch)
            self.start_thread(self.poll)

    def start_thread(self, target) -> None:
        """Its target must return soon after self.over is set."""
        thread = threading.Thread(target=target, daemon=True)
        self.threads.append(thread)
        thread.start()

    def watch(self) -> None:
        progress = None
        woke_up = time.monotonic()
        while not self.over.wait(1):
            previous = progress
            progress = (self.steps, self.compilations, counters())
            seconds_awake = min(time.monotonic() - woke_up, LONGEST_TICK)
            woke_up = time.monotonic()
            self.quiet = 0.0 if progress != previous else self.quiet + seconds_awake
            if self.quiet > self.timeout() and waits_for():
                self.found.set()
            if self.found.is_set():
                self.exit_all()

    def timeout(self) -> float:
        """Seconds without progress that are a hang: earlier than PyTorch's own limit."""
        if self.fixed_timeout:
            return self.fixed_timeout
        if self.quiet < QUIET_SECONDS:  # to read the recorder takes time
            return math.inf
        limits = [entry["timeout_ms"] / 1000 for entry in pending() if entry.get("timeout_ms")]
        return 0.9 * min(limits, default=timeout_of_process_group())

    def on_step(self, *_) -> None:
        """Any optimizer's step() begins."""
        self.steps += 1

    def poll(self) -> None:
        """Check regularly whether another rank has found a hang, or compiles. Only a rank without
        progress asks for the second.
        """
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not self.over.wait(POLL):
                if self.store.check(["hang"]):
                    self.found.set()
                if self.quiet:
                    self.compilations = self.store.add("compilations", int(is_compiling()))

    def own_note(self) -> dict:
        """Where this rank is."""
        return {
            "quiet": self.quiet,
            "waits": waits_for(),
            "groups": positions(),
            "line": line_in_script(frames_of_main_thread()),
        }

    def exit_all(self) -> None:
        """Store where this rank is, print the stacks, report the hang and exit."""
        note = self.own_note()
        within(POLL, self.publish, note)  # before the stacks: to print them may take long
        say(f"guard.py: rank {self.rank} on {HOST}: all stacks")
        faulthandler.dump_traceback(file=2, all_threads=True)
        if not within(STORE_SECONDS, self.collect):  # the server of the store
            self.report({self.rank: note}, {0: f"or its torchrun {SILENT}"})
        kill_descendants()  # a loader worker may hang, too
        if self.rank == 0:
            time.sleep(3)  # it may be the server: the others must have read that there is a report
        os._exit(1)

    def publish(self, note: dict) -> None:
        self.store.set(f"hang note {self.rank}", json.dumps(note))
        self.store.set("hang", "1")

    def collect(self) -> bool:
        """The first rank to call this reports the hang; the others wait until it has."""
        deadline = time.monotonic() + POLL + 3
        if self.store.add("hang collectors", 1) > 1:
            wait_for(self.store, "hang reported", deadline + POLL + 3)
            return True
        notes = {}
        states = dict.fromkeys(self.ended(), ENDED)
        for rank in set(range(self.size)) - states.keys():
            text = wait_for(self.store, f"hang note {rank}", deadline)
            if text:
                notes[rank] = json.loads(text)
            else:
                states[rank] = SILENT
        self.report(notes, states)
        self.store.set("hang reported", "1")
        return True

    def report(self, notes: dict[int, dict], states: dict[int, str]) -> None:
        """notes: of the ranks that answer; states: why the others have none."""
        usual, at_fault = find_fault(notes)
        at_fault |= states
        texts = [where_ranks_are(usual, at_fault, self.infos), *lines_of_ranks(notes, at_fault)]
        quiet = max(note["quiet"] for note in notes.values())
        texts.append(f"no progress for {quiet:.0f} s (HANG_TIMEOUT)")
        text = f"hang: {'; '.join(texts)}"
        write_failure("hang", text, self.rank, hosts=hosts_to_blame(at_fault, self.infos))
        say(f"guard.py: error: {text}")

    def end(self, error: BaseException | None) -> None:
        """Call this when the script has ended."""
        if error and self.found.is_set():  # it is PyTorch's timeout of the same hang
            self.threads[0].join(STORE_SECONDS + 10)
        self.over.set()
        for thread in self.threads:  # a thread in C++ code would abort Python's shutdown
            thread.join(2)
        if error:
            return
        time.sleep(0.2)  # so would gloo's threads (pytorch/pytorch#179291)
        with suppress(Exception):
            self.store.append("ended", f"{self.rank} ")
            if self.rank == 0:  # this rank or its torchrun is the store's server
                deadline = time.monotonic() + 2 + self.size / 200
                while len(self.ended()) < self.size and time.monotonic() < deadline:
                    time.sleep(0.05)
                time.sleep(0.5)  # so that its torchrun exits last

    def ended(self) -> set[int]:
        """The ranks whose script has ended."""
        if not self.store.check(["ended"]):
            return set()
        return {int(rank) for rank in self.store.get("ended").split()}

    def ended_ranks(self) -> str:
        """Those whose script has ended, for the first rank that asks."""
        with suppress(Exception):  # the store has ended, too
            ranks = sorted(self.ended())
            if ranks and self.store.add("ended ranks", 1) == 1:
                return ranks_do(ranks, self.infos)
        return ""


class RankInfos(dict):
    """{rank: see rank_info()}, read from the store once it is needed; that of rank 0 now: it may be
    the one that does not answer then.
    """

    def __init__(self, store):
        self.store = store
        self[0]

    def __missing__(self, rank: int) -> dict:
        self[rank] = json.loads(self.store.get(f"rank {rank}"))
        return self[rank]


def has_recorder() -> bool:
    """Whether PyTorch has a Flight Recorder for all backends: from 2.8 on."""
    return hasattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json")


def timeout_of_process_group() -> float:
    """Seconds after which PyTorch ends a collective of the default process group.

    Without limit before there is one: init_process_group() has a timeout and an error of its own.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return math.inf
    with suppress(Exception):  # a backend without options
        group = dist.group.WORLD
        backends = [group._get_backend(device) for device in group._device_types]
        return min(backend.options._timeout.total_seconds() for backend in backends)
    return NCCL_TIMEOUT


# ------------------------------------------------------------------------------------ verdict


def where_ranks_are(usual: str, states: dict[int, str], infos) -> str:
    """Which ranks are at fault, and where the others wait. infos: {rank: see rank_info()}"""
    if not states:
        return f"all ranks wait {usual}: check the network and the GPUs"
    texts = []
    for state, ranks in ranks_by(states).items():
        texts.append(ranks_do(ranks, infos, state))
    return f"{'; '.join(texts)}; the others wait {usual}"


def hosts_to_blame(states: dict[int, str], infos) -> list[str]:
    """Those of ranks that do not answer, and of GPUs that hang; others wait for their script."""
    ranks = [rank for rank, state in states.items() if state == SILENT or NOT_STARTED in state]
    return sorted({infos[rank]["host"] for rank in ranks})


def lines_of_ranks(notes: dict[int, dict], at_fault) -> list[str]:
    """At which lines the ranks are, a text per group: first those at fault, then the smallest."""
    groups = ranks_by({rank: note["line"] for rank, note in notes.items() if note.get("line")})
    order = sorted(groups, key=lambda line: (groups[line][0] not in at_fault, len(groups[line])))
    texts = [ranks_do(groups[line], {}, f"is {line}") for line in order[:MAX_GROUPS]]
    if len(order) > MAX_GROUPS:
        texts.append("others are elsewhere")
    return texts


def find_fault(notes: dict[int, dict]) -> tuple[str, dict[int, str]]:
    """(where the ranks wait, {rank at fault: what it does}), from the notes of the ranks."""
    stuck = stuck_groups(notes)
    late = []
    for number, members in stuck:
        late += [(rank, number, members) for rank in members if members[rank]["enqueued"] < number]
    # A rank may be late because it waits for another rank in another process group.
    late = [each for each in late if not notes[each[0]]["waits"]] or late
    if late:
        _, number, members = late[0]
        states = {rank: "is late" for rank, _, group in late if group is members}
        return place(number, members), states
    for number, members in stuck:
        states = different_ranks(number, members)
        if states:
            return place(number, members), states
    if stuck:
        return place(*stuck[0]), {}
    # No collective has been recorded, as while NCCL is initialized.
    functions = [note["waits"] for note in notes.values() if note["waits"]]
    outside = [rank for rank, note in notes.items() if not note["waits"]]
    states = dict.fromkeys(outside, "is not in a function of torch.distributed")
    return f"in {statistics.mode(functions or ['nowhere'])}", states


def stuck_groups(notes: dict[int, dict]) -> list[tuple[int, dict]]:
    """(number of its first incomplete collective, {rank: its position}) of process groups"""
    groups = {}
    for rank, note in notes.items():
        for group, position in note["groups"].items():
            groups.setdefault(group, {})[rank] = position
    stuck = []
    for _, members in sorted(groups.items()):
        number = min(position["completed"] for position in members.values()) + 1
        if any(position["enqueued"] >= number for position in members.values()):
            stuck.append((number, members))
    return stuck


def different_ranks(number: int, members: dict[int, dict]) -> dict[int, str]:
    """{rank: what it does} of a group whose ranks have all enqueued this collective.

    At fault are ranks in another collective than most; else, those whose GPU has not started it.
    """
    states = {}
    for rank, position in members.items():
        own_place = place(number, {rank: position})
        if str(number) in position["names"] and own_place != place(number, members):
            states[rank] = f"is {own_place}"
    if not states and any(position["started"] >= number for position in members.values()):
        waiting = [rank for rank in members if members[rank]["started"] < number]
        states = dict.fromkeys(waiting, f"is {place(number, members)}, {NOT_STARTED}")
    return states


def place(number: int, members: dict[int, dict]) -> str:
    """Such as: at collective 24 (gloo:all_reduce [[11]]). Its name is that on most ranks."""
    key = str(number)
    names = [each["names"][key] for each in members.values() if key in each["names"]]
    return f"at collective {number} ({statistics.mode(names or ['unknown'])})"


# ----------------------------------------------------------------------------- Flight Recorder


def positions() -> dict[str, dict]:
    """{recorder and process group: this rank's position}, also of groups that it has not used."""
    from torch.distributed.distributed_c10d import _world

    groups = {}
    for recorder, trace in flight_recorder(entries=True):
        collectives = {name: [] for name in list(_world.pg_names.values())}
        for entry in trace.get("entries", []):
            if not entry.get("is_p2p"):
                name = entry["process_group"][0]
                collectives.setdefault(name, []).append(entry)
        for name, entries in collectives.items():
            groups[f"{recorder} {name}"] = position(entries, trace.get("pg_status", {}))
    return groups


def position(entries: list[dict], statuses: dict) -> dict:
    """The numbers of the last collective enqueued, completed and started by the GPU (-1: unknown),
    and the name of the first one that is not complete. All up to `completed` are.

    The recorder's own `last_completed_collective` counts otherwise, or is -1, for some backends.
    """
    enqueued = max((entry["collective_seq_id"] for entry in entries), default=0)
    waiting = [entry for entry in entries if not is_done(entry)]
    completed = waiting[0]["collective_seq_id"] - 1 if waiting else enqueued
    started = -1
    if entries:
        status = statuses.get(str(entries[-1].get("pg_id")), {})
        started = int(status.get("last_started_collective", -1))
    names = {str(completed + 1): name_of_entry(entry) for entry in waiting[:1]}
    return {"enqueued": enqueued, "completed": completed, "started": started, "names": names}


def is_done(entry: dict) -> bool:
    """Gloo's entries are retired but never "completed"; those of NCCL may be "completed" first."""
    return entry["retired"] or entry["state"] == "completed"


def name_of_entry(entry: dict) -> str:
    """With its sizes, if they are the same on all ranks."""
    name = entry["profiling_name"]
    return f"{name} {entry['input_sizes']}" if EQUAL_SIZES.search(name) else name


def waits_for() -> str:
    """What this rank waits for: a collective, or another function of torch.distributed; or ""."""
    for entry in pending():
        return name_of_entry(entry)
    return function_of_torch_distributed()


def pending() -> list[dict]:
    """The Flight Recorder's entries of the collectives that are not complete."""
    traces = [trace for _, trace in flight_recorder(entries=True)]
    return [entry for trace in traces for entry in trace.get("entries", []) if not is_done(entry)]


def is_compiling() -> bool:
    """Whether torch.compile or Triton compiles in the main thread: that may take many minutes."""
    files = [frame.f_code.co_filename for frame in frames_of_main_thread()]
    return any(COMPILING_CODE.search(file) for file in files)


def function_of_torch_distributed() -> str:
    """The function in which the main thread waits, as in NCCL's initialization; "" elsewhere."""
    name = ""
    for frame in frames_of_main_thread():
        if not WAITING_CODE.search(frame.f_code.co_filename):
            break
        name = frame.f_code.co_name
    return name


def line_in_script(frames: list) -> str:
    """Where they are in the files of the script's own directory: "in FUNCTION() at FILE:LINE"; ""
    if they are nowhere there. frames: the innermost one first
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or "."
    directory = os.path.dirname(os.path.realpath(script))
    for frame in frames:
        path = os.path.realpath(frame.f_code.co_filename)
        file = os.path.relpath(path, directory)
        if os.path.dirname(path) != OWN_DIRECTORY and not ELSEWHERE.search(file):
            name = frame.f_code.co_name
            function = "" if name == "<module>" else f"in {name}() "
            return f"{function}at {file}:{frame.f_lineno}"
    return ""


def frames_of_main_thread() -> list:
    """The innermost one first.

    Without garbage collection, with which this could deadlock before Python 3.11.9 and 3.12.3:
    https://github.com/python/cpython/issues/106883
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames()[threading.main_thread().ident]
    finally:
        if is_enabled:
            gc.enable()
    return [frame for frame, _ in traceback.walk_stack(frame)]


def counters() -> dict[str, dict]:
    """Numbers that change whenever a collective starts or ends; cheaper than positions()."""
    return {recorder: trace.get("pg_status") for recorder, trace in flight_recorder(entries=False)}


def flight_recorder(entries: bool):
    """Yield (recorder, its trace) for each Flight Recorder of PyTorch.

    "nccl-legacy" is the one of ProcessGroupNCCL ("nccl" before PyTorch 2.15, or with
    TORCH_DIST_USE_NCCL2=0). From PyTorch 2.15 on, each other backend has one with its own name.
    """
    c10d = sys.modules["torch._C._distributed_c10d"]
    if hasattr(c10d, "_dump_nccl_trace_json"):
        yield "nccl-legacy", json.loads(c10d._dump_nccl_trace_json(entries, False))
    try:
        for name in RECORDERS:
            yield name, json.loads(c10d._dump_fr_trace_json(entries, False, name))
    except TypeError:  # PyTorch 2.8 to 2.14: one recorder, without a name
        yield "gloo", json.loads(c10d._dump_fr_trace_json(entries, False))
