"""Detects ranks that wait for each other for ever, and finds the one at fault: for guard.py."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from datetime import timedelta

from processes import parent_of
from report import HOST, has_gpu, ranks_do, say, seconds, wait_for, write_failure

SILENT = "does not answer"
ENDED = "has ended"
NOT_STARTED = "which its GPU has not started"
LONGEST_TICK = 3  # seconds between two looks of a watch; in the rest, the process was suspended
POLL = 5  # seconds between checks for a hang that another rank has found
QUIET_SECONDS = 30  # without progress, at most, before the recorder is asked for a limit
COMPILING_CODE = re.compile(  # is on the stack only while it compiles
    r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile|codecache))\.py$"
    r"|/triton/compiler/"
)
NCCL_TIMEOUT = 600  # seconds that PyTorch gives a collective of NCCL; gloo: 1,800
NAMES = 20  # names of collectives in a note, before and after the first incomplete one
RECORDERS = ("nccl", "nccl2", "nccl-lazy", "xccl", "gloo")  # PyTorch's, from 2.15 on
EQUAL_SIZES = re.compile("reduce|broadcast|backward")  # collectives with the same on all ranks
WARM_UP_STEPS = 10  # optimizer steps whose times do not count
MAX_GROUPS = 4  # of ranks, whose lines the report names
OWN_DIRECTORY = os.path.dirname(os.path.realpath(__file__))
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|^<")
PYTORCH = re.compile(r"/torch/|/lib/python3[^/]*/(?!(site|dist)-packages/)|^<")
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

    def __init__(self, rank: int, size: int, store, peers: dict):
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        enable_flight_recorder()
        register_optimizer_step_pre_hook(self.on_step)
        self.rank = rank
        self.size = size
        self.store = store
        self.hosts = peers["hosts"]  # see peers_of()
        self.infos = RankInfos(store, peers["first"])
        self.fixed_timeout = seconds("HANG_TIMEOUT", None)
        self.steps = 0
        self.step_times = deque(maxlen=2000)  # when they began, nanoseconds since 1970
        self.quiet = 0.0  # seconds since the last progress
        self.compilations = 0  # how often a rank was seen compiling, the same on all ranks
        self.found = threading.Event()  # a hang
        self.over = threading.Event()  # the script has ended
        self.threads: list[threading.Thread] = []
        shows_progress = records_gloo() or has_gpu()
        if self.fixed_timeout != 0 and shows_progress:
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
        fixed = self.fixed_timeout or seconds("HANG_TIMEOUT", None)  # the script may set it
        if fixed:
            return fixed
        usual = timeout_of_process_group()
        if self.quiet < min(QUIET_SECONDS, 0.9 * usual):  # to read the recorder takes time
            return 0.9 * usual
        limits = [entry["timeout_ms"] / 1000 for entry in pending() if entry.get("timeout_ms")]
        return 0.9 * min(limits, default=usual)

    def on_step(self, *_) -> None:
        """Any optimizer's step() begins."""
        self.steps += 1
        if self.steps > WARM_UP_STEPS:
            self.step_times.append(time.time_ns())

    def poll(self) -> None:
        """Check regularly whether another rank has found a hang, or compiles."""
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not self.over.wait(POLL):
                if self.store.check(["hang"]):
                    self.found.set()
                self.compilations = self.store.add("compilations", int(is_compiling()))

    def own_note(self) -> dict:
        """Where this rank is."""
        return {
            "steps": self.steps,
            "quiet": self.quiet,
            "waits": waits_for(),
            "groups": positions(),
            "lines": lines_of_script(),
        }

    def exit_all(self) -> None:
        """Exchange positions, print the stacks, report the hang and exit."""
        note = self.own_note()
        no_store = {0: f"or its torchrun {SILENT}"}  # one of them is the store's server
        threading.Timer(30, self.report, [{self.rank: note}, no_store]).start()
        publishing = threading.Thread(target=self.publish, args=[note], daemon=True)
        publishing.start()
        publishing.join(POLL)  # before the stacks: to print them may take long
        say(f"guard.py: rank {self.rank} on {HOST}: all stacks")
        faulthandler.dump_traceback(file=2, all_threads=True)
        with suppress(Exception):  # the store has ended
            self.report(*self.exchange_notes())
        time.sleep(60)  # the timer reports

    def publish(self, note: dict) -> None:
        with suppress(Exception):  # the store has ended
            self.store.set(f"hang note {self.rank}", json.dumps(note))
            self.store.set("hang", "1")

    def exchange_notes(self) -> tuple[dict[int, dict], dict[int, str]]:
        """(notes of the ranks that answer, why the others have none).

        Rank 0 collects the notes; elsewhere, there are none, and only the silent ranks of this
        host. If rank 0 does not answer, rank 1 collects them, and so on.
        """
        deadline = time.monotonic() + POLL + 3
        if self.rank > 0:
            # Rank 0 may have found the hang up to POLL seconds later.
            if wait_for(self.store, "hang notes", deadline + POLL + 3 + self.rank) is not None:
                ranks = wait_for(self.store, f"hang silent {HOST}", 0) or "[]"
                return {}, dict.fromkeys(json.loads(ranks), SILENT)
        notes = {}
        silent = dict.fromkeys(self.ended(), ENDED)
        by_host = {}
        for rank in range(self.size):
            if rank in silent:
                continue
            text = wait_for(self.store, f"hang note {rank}", deadline)
            if text:
                notes[rank] = json.loads(text)
            else:
                silent[rank] = SILENT
                by_host.setdefault(self.infos[rank]["host"], []).append(rank)
        for host, ranks in by_host.items():
            self.store.set(f"hang silent {host}", json.dumps(ranks))
        self.store.set("hang notes", "1")
        return notes, silent

    def report(self, notes: dict[int, dict], silent: dict[int, str]) -> None:
        """Print the error, if this rank has notes; kill the silent ranks of this host, and exit."""
        if notes:
            quiet = max(note["quiet"] for note in notes.values())
            usual, at_fault = find_fault(notes)
            at_fault.update(silent)
            text = f"hang: {where_ranks_are(usual, at_fault, self.infos)}"
            text += f"; {lines_of_ranks(notes, at_fault)}"
            text += f"no progress for {quiet:.0f} s (HANG_TIMEOUT)"
            hosts = hosts_to_blame(at_fault, self.infos)
            write_failure("hang", text, self.rank, hosts=hosts)
            say(f"guard.py: error: {text}")
        time.sleep(1)  # let that rank print before the launcher kills it
        for rank, state in silent.items():
            if state != ENDED and self.infos[rank]["host"] == HOST:
                kill_sibling(self.infos[rank]["pid"])
        os._exit(1)

    def end(self, error: BaseException | None) -> None:
        """Call this when the script has ended."""
        if error and self.found.is_set():  # it is PyTorch's timeout of the same hang
            self.threads[0].join(25)
        self.over.set()
        for thread in self.threads:  # a thread in C++ code would abort Python's shutdown
            thread.join(2)
        if error:
            return
        time.sleep(0.2)  # so would gloo's threads (pytorch/pytorch#179291)
        with suppress(Exception):
            self.store.append("ended", f"{self.rank} ")
            if self.rank == 0:  # this rank or its torchrun is the store's server
                self.wait_for_others()

    def wait_for_others(self) -> None:
        """Wait until all have ended, at most 2 s and 5 s per 1,000 ranks."""
        deadline = time.monotonic() + 2 + self.size / 200
        while len(self.ended()) < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.hosts > 1:
            time.sleep(0.5)  # so that its torchrun exits last

    def ended(self) -> set[int]:
        """The ranks whose script has ended."""
        if not self.store.check(["ended"]):
            return set()
        return {int(rank) for rank in self.store.get("ended").split()}

    def ended_ranks(self) -> str:
        """For the first rank that asks, those whose script has ended."""
        with suppress(Exception):  # the store has ended, too
            ranks = sorted(self.ended())
            if ranks and self.store.add("ended ranks", 1) == 1:
                return ranks_do(ranks, [self.infos[rank]["host"] for rank in ranks], "")
        return ""


class RankInfos(dict):
    """{rank: see rank_info()}, read from the store once it is needed; that of rank 0 is known."""

    def __init__(self, store, first: dict):
        super().__init__({0: first})
        self.store = store

    def __missing__(self, rank: int) -> dict:
        self[rank] = json.loads(self.store.get(f"rank {rank}"))
        return self[rank]


def kill_sibling(process: int) -> None:
    """Kill a rank that cannot exit on its own. Only a child of our launcher: its id is stored."""
    with suppress(OSError):
        if parent_of(process) == os.getppid():
            os.kill(process, signal.SIGKILL)


def enable_flight_recorder() -> None:
    """Set what PyTorch reads when it creates the first process group; before 2.11, it is off.

    With timing, NCCL's entries say which GPU has not started a collective, and how long each took.
    It costs two events of CUDA per collective.
    """
    name = "TORCH_FR_BUFFER_SIZE" if records_gloo() else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    os.environ.setdefault(name, "2000")
    if seconds("SLOW_RANK_INTERVAL", 0):
        os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


def records_gloo() -> bool:
    """Whether PyTorch has a Flight Recorder for gloo: from 2.8 on."""
    return hasattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json")


def timeout_of_process_group() -> float:
    """Seconds after which PyTorch ends a collective of the default process group.

    While the main thread is in init_process_group(), the timeout that it was called with.
    """
    import torch.distributed as dist

    with suppress(Exception):  # no group yet; one that is being created; a backend without options
        group = dist.group.WORLD
        backends = [group._get_backend(device) for device in group._device_types]
        return min(backend.options._timeout.total_seconds() for backend in backends)
    for frame in frames_of_main_thread():
        if frame.f_code.co_name == "init_process_group":
            timeout = frame.f_locals.get("timeout")
            if isinstance(timeout, timedelta):
                return timeout.total_seconds()
    return NCCL_TIMEOUT


# ------------------------------------------------------------------------------------ verdict


def where_ranks_are(usual: str, at_fault: dict[int, str], infos) -> str:
    """Which ranks are at fault, and where the others wait. infos: {rank: see rank_info()}"""
    if not at_fault:
        return f"all ranks are {usual}: check the network and the GPUs"
    texts = []
    for state, ranks in ranks_by(at_fault).items():
        texts.append(ranks_do(ranks, [infos[rank]["host"] for rank in ranks], state))
    return f"{'; '.join(texts)}; the others are {usual}"


def hosts_to_blame(at_fault: dict[int, str], infos) -> list[str]:
    """Those of ranks that do not answer, and of GPUs that hang; others wait for their script."""
    states = at_fault.items()
    ranks = [rank for rank, state in states if state == SILENT or NOT_STARTED in state]
    return sorted({infos[rank]["host"] for rank in ranks})


def lines_of_ranks(notes: dict[int, dict], at_fault: dict[int, str]) -> str:
    """At which lines the ranks are, with a "; " after each group of them.

    First those at fault, then the smallest groups.
    """
    lines = {rank: note["lines"] for rank, note in notes.items() if note.get("lines")}
    groups = ranks_by({rank: own for rank, (own, _) in lines.items()})
    if len(groups) < 2:  # the script's own lines are the same: those of libraries may differ
        of_libraries = ranks_by({rank: outside for rank, (_, outside) in lines.items()})
        groups = of_libraries if len(of_libraries) > 1 else groups
    groups.pop("", None)
    order = sorted(groups, key=lambda line: (groups[line][0] not in at_fault, len(groups[line])))
    texts = [ranks_do(groups[line], [], f"is {line}") for line in order[:MAX_GROUPS]]
    more = sum(len(groups[line]) for line in order[MAX_GROUPS:])
    if more:
        texts.append(f"{more} ranks are elsewhere")
    return "".join(f"{text}; " for text in texts)


def ranks_by(values: dict[int, str]) -> dict[str, list[int]]:
    """{value: ranks}"""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def find_fault(notes: dict[int, dict]) -> tuple[str, dict[int, str]]:
    """(where the ranks wait, {rank at fault: where it is}), from the notes of the ranks."""
    usual, places = find_places(notes)
    states = {}
    for rank, place_of_rank in places.items():
        states[rank] = f"is {place_of_rank}, {notes[rank]['steps']} steps done"
    return usual, states


def find_places(notes: dict[int, dict]) -> tuple[str, dict[int, str]]:
    """The same, without the verb and the steps."""
    groups = stuck_groups(notes)
    if not groups:
        return ranks_outside(notes)
    late = []
    for group, (number, members) in groups.items():
        late += [(group, rank) for rank in members if members[rank]["enqueued"] < number]
    # A rank may be late because it waits for another rank in another process group.
    at_fault = [(group, rank) for group, rank in late if not notes[rank]["waits"]] or late
    if at_fault:
        first, _ = at_fault[0]
        number, members = groups[first]
        states = {}
        for group, rank in at_fault:
            if group == first:
                position = members[rank]
                states[rank] = place(position["enqueued"], [position])
        return place(number, members.values()), states
    for number, members in groups.values():
        usual, states = different_ranks(number, members)
        if states:
            break
    return usual, states


def ranks_outside(notes: dict[int, dict]) -> tuple[str, dict[int, str]]:
    """Like find_places(), where no collective has been recorded, as while NCCL is initialized."""
    functions = [note["waits"] for note in notes.values() if note["waits"]]
    outside = [rank for rank, note in notes.items() if not note["waits"]]
    states = dict.fromkeys(outside, "not in a function of torch.distributed")
    return f"in {statistics.mode(functions or ['nowhere'])}", states


def stuck_groups(notes: dict[int, dict]) -> dict[str, tuple[int, dict]]:
    """{process group: (number of its first incomplete collective, {rank: its position})}"""
    groups = {}
    for rank, note in notes.items():
        for group, position in note["groups"].items():
            groups.setdefault(group, {})[rank] = position
    stuck = {}
    for group, members in sorted(groups.items()):
        number = min(position["completed"] for position in members.values()) + 1
        if any(position["enqueued"] >= number for position in members.values()):
            stuck[group] = (number, members)
    return stuck


def different_ranks(number: int, members: dict[int, dict]) -> tuple[str, dict[int, str]]:
    """Like find_places(), of a group whose ranks have all enqueued this collective.

    At fault are ranks in another collective than most; else, those whose GPU has not started it.
    """
    usual = place(number, members.values())
    states = {}
    for rank, position in members.items():
        own_place = place(number, [position])
        if own_place != usual and str(number) in position["names"]:
            states[rank] = own_place
    if not states and any(position["started"] >= number for position in members.values()):
        waiting = [rank for rank in members if members[rank]["started"] < number]
        states = dict.fromkeys(waiting, f"{usual}, {NOT_STARTED}")
    return usual, states


def place(number: int, members) -> str:
    """Such as: at collective 24 (gloo:all_reduce [[11]]). Its name is that on most ranks."""
    key = str(number)
    names = [member["names"][key] for member in members if key in member["names"]]
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
    and the names of those around them. All collectives up to `completed` are complete.

    The recorder's own `last_completed_collective` counts otherwise, or is -1, for some backends.
    """
    numbers = [entry["collective_seq_id"] for entry in entries]
    open_numbers = [entry["collective_seq_id"] for entry in entries if not is_done(entry)]
    enqueued = max(numbers, default=0)
    completed = min(open_numbers, default=enqueued + 1) - 1
    names = {}
    for entry in entries:
        number = entry["collective_seq_id"]
        if abs(number - completed) <= NAMES or number == enqueued:
            names[str(number)] = name_of_entry(entry)
    started = -1
    if entries:
        status = statuses.get(str(entries[-1].get("pg_id")), {})
        started = int(status.get("last_started_collective", -1))
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


def lines_of_script() -> list[str]:
    """Where the main thread is: in the files of the script's own directory, and outside of PyTorch.

    "in FUNCTION() at FILE:LINE"; "" if it is nowhere there.
    """
    script = getattr(sys.modules["__main__"], "__file__", None) or "."
    directory = os.path.dirname(os.path.realpath(script))
    own = outside = ""
    for frame in frames_of_main_thread():
        file = os.path.realpath(frame.f_code.co_filename)
        if os.path.dirname(file) == OWN_DIRECTORY:
            continue
        if not outside and not PYTORCH.search(file):
            outside = line_of(frame, "/".join(file.split("/")[-2:]))
        if file.startswith(f"{directory}/") and not LIBRARY.search(file):
            own = line_of(frame, os.path.relpath(file, directory))
            break
    return [own or outside, outside]


def line_of(frame, file: str) -> str:
    name = frame.f_code.co_name
    function = "" if name == "<module>" else f"in {name}() "
    return f"{function}at {file}:{frame.f_lineno}"


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
    if records_gloo():
        try:
            for name in RECORDERS:
                yield name, json.loads(c10d._dump_fr_trace_json(entries, False, name))
        except TypeError:  # PyTorch 2.8 to 2.14: one recorder, without a name
            yield "gloo", json.loads(c10d._dump_fr_trace_json(entries, False))
