"""Detects ranks that wait for each other for ever, and finds the one at fault: for guard.py."""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from datetime import timedelta

from report import HOST, has_gpu, parent_of, ranks_by_host, say, seconds, wait_for, write_failure

ENDED = "has ended"
POLL = 5  # seconds between checks for a hang that another rank has found
QUIET_SECONDS = 30  # without progress, at most, before the recorder is asked for a limit
EARLY_SECONDS = 60  # without a step, at least, before the warning
COMPILING_CODE = re.compile(  # is on the stack only while it compiles
    r"/torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile|codecache))\.py$"
    r"|/triton/compiler/"
)
NCCL_TIMEOUT = 600  # seconds that PyTorch gives a collective of NCCL; gloo: 1,800
READ_AT_IMPORT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_LOGS")  # by PyTorch
NAMES = 20  # names of collectives in a note, before and after the first incomplete one
RECORDERS = ["nccl", "nccl2", "nccl-lazy", "xccl", "gloo"]  # PyTorch's, from 2.15 on
WARM_UP_STEPS = 10  # optimizer steps that are not compared
WAITING_CODE = re.compile(  # of PyTorch: where the main thread waits for other ranks
    r"/torch/(distributed/(distributed_c10d|rendezvous|device_mesh|utils)|nn/parallel/\w+)\.py$"
)


class HangWatch:
    """Prints this rank's stacks and exits once any rank has waited in a collective for too long.

    Much earlier, it warns once. Progress is a step of any optimizer in the process, a collective
    that starts or ends according to PyTorch's Flight Recorder, or a compilation on any rank. The
    waiting rank notifies the others through the store. Each rank writes its position to the store,
    where rank 0 collects them. At fault are the ranks that do not answer, and those that have not
    enqueued the first incomplete collective; the others may be far ahead of it.
    """

    silent_hosts: list[str] | tuple = ()  # of ranks that did not answer, as far as it is certain

    def __init__(self, rank: int, store, infos: list[dict]):
        enable_flight_recorder()
        self.rank = rank
        self.store = store
        self.infos = infos  # see check_ranks()
        self.size = int(os.environ["WORLD_SIZE"])
        self.fixed_timeout = seconds("HANG_TIMEOUT", None)
        if self.fixed_timeout == 0:
            if rank == 0:
                print("guard.py: HANG_TIMEOUT is 0: hangs are not detected", flush=True)
        elif not records_gloo() and not has_gpu():
            self.fixed_timeout = 0
            if rank == 0:
                print("guard.py: hangs on CPUs are detected from PyTorch 2.8 on", flush=True)
        self.settings = {name: os.environ.get(name) for name in READ_AT_IMPORT}
        self.steps = 0
        self.step_ends = deque(maxlen=2000)  # nanoseconds since 1970
        self.quiet = 0.0  # seconds since the last progress
        self.compilations = 0  # how often a rank was seen compiling, the same on all ranks
        self.has_warned = False
        self.found = threading.Event()  # a hang, on another rank
        self.over = threading.Event()  # the script has ended
        self.is_reporting = threading.Event()
        # poll() has its own thread: a store call never returns if the store's server is stopped.
        self.threads: list[threading.Thread] = []
        self.start_thread(self.watch)
        self.start_thread(self.poll)

    def start_thread(self, target) -> None:
        """Its target must return soon after self.over is set."""
        thread = threading.Thread(target=target, daemon=True)
        self.threads.append(thread)
        thread.start()

    def watch(self) -> None:
        is_hooked = False
        progress = None
        since = time.monotonic()
        while not self.over.wait(1):
            self.warn_of_late_settings()
            if not is_hooked and "torch.optim" in sys.modules:
                from torch.optim.optimizer import register_optimizer_step_post_hook

                register_optimizer_step_post_hook(self.on_step)
                is_hooked = True
            previous = progress
            progress = (self.steps, self.compilations, counters())
            if progress != previous:
                since = time.monotonic()
            self.quiet = time.monotonic() - since
            is_late = self.quiet > self.timeout()
            if self.found.is_set() or (is_late and waits_for()):
                self.exit_all()

    def warn_of_late_settings(self) -> None:
        """If the script sets what PyTorch has read: rank_info() has imported it before."""
        for name, before in list(self.settings.items()):
            if os.environ.get(name) != before:
                del self.settings[name]
                text = f"guard.py: WARNING: the script sets {name} too late, because guard.py has"
                text += " imported PyTorch: set it before the launch, or set GUARD=0"
                if self.rank == 0:
                    say(text)

    def timeout(self) -> float:
        """Seconds without progress that are a hang: earlier than PyTorch's own limit."""
        if self.fixed_timeout is not None:
            return self.fixed_timeout or math.inf
        usual = timeout_of_process_group()
        if self.quiet < min(QUIET_SECONDS, 0.9 * usual):  # to read the recorder takes time
            return 0.9 * usual
        limits = [entry["timeout_ms"] / 1000 for entry in pending() if entry.get("timeout_ms")]
        return 0.9 * min(limits, default=usual)

    def on_step(self, *_) -> None:
        self.steps += 1
        if self.steps >= WARM_UP_STEPS:
            self.step_ends.append(time.time_ns())

    def poll(self) -> None:
        """Check regularly whether another rank has found a hang, compiles, or wants to warn."""
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not self.over.wait(POLL):
                if self.store.check(["hang"]):
                    self.found.set()
                self.compilations = self.store.add("compilations", int(is_compiling()))
                if not self.has_warned and (self.is_early() or self.store.check(["warning"])):
                    self.has_warned = True
                    self.warn()

    def is_early(self) -> bool:
        """Whether this rank waits for much longer than a step usually takes."""
        ends = list(self.step_ends)
        if len(ends) < 2:
            return False
        usual = (ends[-1] - ends[0]) / 1e9 / (len(ends) - 1)
        if self.quiet < max(EARLY_SECONDS, 10 * usual):
            return False
        has_time = self.quiet < self.timeout() - 30  # else, the end is near
        return has_time and bool(waits_for())

    def warn(self) -> None:
        """Print what the error would say; the run goes on."""
        limit = self.timeout()
        notes, silent = self.exchange_notes("warning", self.own_note())
        if notes:
            text = f"no step for {self.quiet:.0f} s: {where_ranks_are(notes, silent, self.infos)}"
            if math.isfinite(limit):
                text += f"; the run ends at {limit:.0f} s (HANG_TIMEOUT)"
            say(f"guard.py: WARNING: {text}")

    def own_note(self) -> dict:
        """Where this rank is."""
        waits = waits_for()
        limit = self.timeout()
        return {"steps": self.steps, "limit": limit, "waits": waits, "groups": positions()}

    def exit_all(self) -> None:
        """Print the stacks, exchange positions, report the hang and exit."""
        self.is_reporting.set()
        say(f"guard.py: rank {self.rank} on {HOST}: all stacks")
        faulthandler.dump_traceback(file=2, all_threads=True)
        own_note = self.own_note()
        no_store = {0: "does not answer"}  # rank 0, or its torchrun, is the store's server
        without_store = threading.Timer(30, self.report, [{self.rank: own_note}, no_store])
        without_store.start()
        try:
            notes, silent = self.exchange_notes("hang", own_note)
        except Exception:
            notes = {self.rank: own_note}
            silent = no_store
        without_store.cancel()
        self.report(notes, silent)

    def exchange_notes(self, kind: str, own_note: dict) -> tuple[dict[int, dict], dict[int, str]]:
        """(notes of the ranks that answer, why the others have none).

        Rank 0 collects the notes and reports the hang; elsewhere, there are none. If rank 0 does
        not answer, rank 1 does so, and so on. kind: hang or warning.
        """
        self.store.set(f"{kind} note {self.rank}", json.dumps(own_note))
        self.store.set(kind, "1")
        deadline = time.monotonic() + POLL + 3
        if self.rank > 0:
            # Rank 0 may have found the hang up to POLL seconds later.
            result = wait_for(self.store, f"{kind} silent", deadline + POLL + 3 + self.rank)
            if result is not None:
                return {}, {int(rank): state for rank, state in json.loads(result).items()}
        notes, silent = self.collect_notes(kind, deadline)
        self.store.set(f"{kind} silent", json.dumps(silent))
        return notes, silent

    def collect_notes(self, kind: str, deadline: float) -> tuple[dict[int, dict], dict[int, str]]:
        ended = self.ended()
        notes = {}
        silent = {}
        for rank in range(self.size):
            if rank in ended:
                silent[rank] = ENDED
                continue
            text = wait_for(self.store, f"{kind} note {rank}", deadline)
            if text:
                notes[rank] = json.loads(text)
            else:
                silent[rank] = "does not answer"
        hosts = {self.infos[rank]["host"] for rank in silent if rank not in ended}
        self.silent_hosts = sorted(hosts)
        return notes, silent

    def report(self, notes: dict[int, dict], silent: dict[int, str]) -> None:
        """Print the error, if this rank has notes; kill the silent ranks of this host, and exit."""
        if notes:
            limits = [note["limit"] for note in notes.values() if note["waits"]]
            limit = f"no progress for {min(limits, default=0):.0f} s (HANG_TIMEOUT)"
            text = f"hang: {where_ranks_are(notes, silent, self.infos)}; {limit}"
            write_failure("hang", text, self.rank, silent_hosts=self.silent_hosts)
            say(f"guard.py: error: {text}")
        time.sleep(1)  # let that rank print before the launcher kills it
        for rank, state in silent.items():
            info = self.infos[rank]
            if state != ENDED and info["host"] == HOST and is_sibling(info["pid"]):
                with suppress(OSError):
                    os.kill(info["pid"], signal.SIGKILL)  # it cannot exit on its own
        os._exit(1)

    def end(self, error: BaseException | None) -> None:
        """Call this when the script has ended."""
        self.over.set()
        for thread in self.threads:  # a thread in C++ code would abort Python's shutdown
            thread.join(2)
        if error:
            if self.is_reporting.is_set():  # the error is PyTorch's timeout of the same hang
                self.threads[0].join(25)
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
        if len(ranks_by_host(self.infos)) > 1:
            time.sleep(0.5)  # so that its torchrun exits last

    def ended(self) -> set[int]:
        """The ranks whose script has ended."""
        if not self.store.check(["ended"]):
            return set()
        return {int(rank) for rank in self.store.get("ended").split()}

    def ended_ranks(self) -> str:
        with suppress(Exception):  # the store has ended, too
            ranks = sorted(self.ended())
            return ", ".join(f"rank {rank} on {self.infos[rank]['host']}" for rank in ranks)
        return ""


def is_sibling(pid: int) -> bool:
    """Whether this is a process of the same launcher: the id comes from the store."""
    with suppress(OSError):
        return parent_of(pid) == os.getppid()
    return False


def enable_flight_recorder() -> None:
    """Set what PyTorch reads when it creates the first process group; before 2.11, it is off.

    With timing, NCCL's entries say which GPU has not started a collective, and how long each took.
    For `torchfrtrace`, NCCL's watchdog writes a file for each rank to LOG_DIR.
    """
    name = "TORCH_FR_BUFFER_SIZE" if records_gloo() else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    os.environ.setdefault(name, "2000")
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")
    run = os.environ.get("ATTEMPT_ID") or os.getppid()  # the same for the ranks of a node
    traces = f"{os.environ.get('LOG_DIR') or 'logs'}/nccl_trace_{run}_rank_"
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", traces)


def records_gloo() -> bool:
    """Whether PyTorch has a Flight Recorder for gloo: from 2.8 on."""
    return hasattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json")


def timeout_of_process_group() -> float:
    """Seconds after which PyTorch ends a collective of the default process group.

    While the main thread is in init_process_group(), the timeout that it was called with.
    """
    module = sys.modules.get("torch.distributed.distributed_c10d")
    with suppress(Exception):  # no group yet; one that is being created; a backend without options
        group = module.GroupMember.WORLD
        if group:
            backends = [group._get_backend(device) for device in group._device_types]
            return min(backend.options._timeout.total_seconds() for backend in backends)
    frame = frame_of_main_thread()
    while frame:
        if frame.f_code.co_name == "init_process_group":
            timeout = frame.f_locals.get("timeout")
            if isinstance(timeout, timedelta):
                return timeout.total_seconds()
        frame = frame.f_back
    return NCCL_TIMEOUT


def where_ranks_are(notes: dict[int, dict], silent: dict[int, str], infos: list[dict]) -> str:
    """Which ranks are at fault, and where the others wait.

    notes: what the ranks that answer wrote; silent: the other ranks; infos: see check_ranks().
    """
    usual, states = find_fault(notes)
    at_fault = dict(silent)
    for rank, state in states.items():
        at_fault[rank] = f"is {state}, {notes[rank]['steps']} steps done"
    hosts = [info["host"] for info in infos]
    if at_fault:
        names = [f"rank {rank} on {hosts[rank]} {at_fault[rank]}" for rank in sorted(at_fault)]
        return f"{'; '.join(names)}; the others are {usual}"
    idle = ranks_not_started(notes)
    if idle:
        gpus = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in idle)
        usual += f", not started by the GPU of {gpus}"
    return f"all ranks are {usual}: check the network and the GPUs"


def find_fault(notes: dict[int, dict]) -> tuple[str, dict[int, str]]:
    """(where the ranks wait, {rank at fault: where it is}), from the notes of the ranks."""
    groups = members_of_groups(notes)
    incomplete = incomplete_collectives(groups)
    late = {group: late_ranks(groups[group], number) for group, number in incomplete.items()}
    candidates = {rank for ranks in late.values() for rank in ranks}
    # A rank may be late because it waits for another rank in another process group.
    at_fault = {rank for rank in candidates if not notes[rank]["waits"]} or candidates
    for group, number in incomplete.items():
        states = {rank: state_in(notes[rank], group) for rank in late[group] if rank in at_fault}
        if states:
            return f"at {name_of(notes.values(), group, number)}", states
    for group, number in incomplete.items():
        usual, states = different_collectives(groups[group], number)
        if states:
            return usual, states
    for group, number in incomplete.items():
        return f"at {name_of(notes.values(), group, number)}", {}
    return ranks_outside(notes)


def members_of_groups(notes: dict[int, dict]) -> dict[str, dict[int, dict]]:
    """{process group: {rank: its position in the group}}, ranks in ascending order"""
    groups = {}
    for rank in sorted(notes):
        for group, member in notes[rank]["groups"].items():
            groups.setdefault(group, {})[rank] = member
    return groups


def incomplete_collectives(groups: dict[str, dict[int, dict]]) -> dict[str, int]:
    """{process group: number of the first collective that is not complete on all its ranks}"""
    numbers = {}
    for group in sorted(groups):
        members = groups[group].values()
        first = min(member["completed"] for member in members) + 1
        if any(member["enqueued"] >= first for member in members):
            numbers[group] = first
    return numbers


def late_ranks(members: dict[int, dict], number: int) -> list[int]:
    """The ranks of a process group that have not enqueued this collective."""
    return [rank for rank, member in members.items() if member["enqueued"] < number]


def different_collectives(members: dict[int, dict], number: int):
    """(usual state, {rank: state}) of the ranks of a group in another collective than most.

    The sizes may differ in a scatter, a gather or an all-to-all.
    """
    names = {}
    for rank, member in members.items():
        name = member["names"].get(str(number))
        if name:
            names[rank] = name
    kinds = {}
    for rank, name in names.items():
        has_equal_sizes = re.search("reduce|broadcast|backward", name)
        kinds[rank] = name if has_equal_sizes else name.split(" ")[0]
    usual = most_common(kinds.values(), "")
    states = {}
    for rank, kind in kinds.items():
        if kind != usual:
            states[rank] = f"at collective {number} ({names[rank]})"
    return f"at collective {number} ({usual})", states


def most_common(values, default: str) -> str:
    """The value that occurs most often, of several the first one; the default if there is none."""
    for value, _ in Counter(values).most_common(1):
        return value
    return default


def ranks_outside(notes: dict[int, dict]) -> tuple[str, dict[int, str]]:
    """Like find_fault(), where no collective has been recorded, as while NCCL is initialized."""
    functions = [note["waits"] for note in notes.values() if note["waits"]]
    usual = most_common(functions, "nowhere")
    states = {}
    for rank, note in notes.items():
        if not note["waits"]:
            states[rank] = "not in a function of torch.distributed"
    return f"in {usual}", states


def ranks_not_started(notes: dict[int, dict]) -> list[int]:
    """Ranks whose GPU has not started the collective that all have enqueued, if that is known."""
    groups = members_of_groups(notes)
    for group, number in incomplete_collectives(groups).items():
        members = groups[group]
        if any(member["started"] > 0 for member in members.values()):
            return [rank for rank, member in members.items() if member["started"] < number]
    return []


def name_of(notes, group: str, number: int) -> str:
    for note in notes:
        name = note["groups"].get(group, {}).get("names", {}).get(str(number))
        if name:
            return f"collective {number} ({name})"
    return f"collective {number} (unknown)"


def state_in(note: dict, group: str) -> str:
    """Where a rank is in the process group."""
    return f"at {name_of([note], group, note['groups'][group]['enqueued'])}"


def positions() -> dict[str, dict]:
    """{recorder and process group: this rank's position}, also of groups that it has not used."""
    groups = {}
    for recorder, trace in flight_recorder(entries=True):
        collectives = {name: [] for name in names_of_groups()}
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
    return f"{entry['profiling_name']} {entry['input_sizes']}".strip()


def names_of_groups() -> list[str]:
    module = sys.modules.get("torch.distributed.distributed_c10d")
    with suppress(AttributeError, RuntimeError):  # it is importing, or adding a group
        return list(module._world.pg_names.values())
    return []


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
    frame = frame_of_main_thread()
    while frame:
        if COMPILING_CODE.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def frame_of_main_thread():
    """Without garbage collection, with which this could deadlock before Python 3.11.9 and 3.12.3.

    https://github.com/python/cpython/issues/106883
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()[threading.main_thread().ident]
    finally:
        if is_enabled:
            gc.enable()


def function_of_torch_distributed() -> str:
    """The function in which the main thread waits, as in NCCL's initialization; "" elsewhere."""
    frame = frame_of_main_thread()
    name = ""
    if WAITING_CODE.search(frame.f_code.co_filename):
        while frame and "/torch/" in frame.f_code.co_filename:
            if WAITING_CODE.search(frame.f_code.co_filename):
                name = frame.f_code.co_name
            frame = frame.f_back
    return name


def counters() -> dict[str, dict]:
    """Numbers that change whenever a collective starts or ends; cheaper than positions()."""
    return {recorder: trace.get("pg_status") for recorder, trace in flight_recorder(entries=False)}


def flight_recorder(entries: bool):
    """Yield (recorder, its trace) for each Flight Recorder of PyTorch.

    "nccl-legacy" is the one of ProcessGroupNCCL ("nccl" before PyTorch 2.15, or with
    TORCH_DIST_USE_NCCL2=0). From PyTorch 2.15 on, each other backend has one with its own name.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if hasattr(c10d, "_dump_nccl_trace_json"):
        yield "nccl-legacy", json.loads(c10d._dump_nccl_trace_json(entries, False))
    if records_gloo():
        for name in names_of_recorders():
            try:
                text = c10d._dump_fr_trace_json(entries, False, name)
            except TypeError:  # PyTorch 2.8 to 2.14: one recorder, without a name
                yield "gloo", json.loads(c10d._dump_fr_trace_json(entries, False))
                return
            yield name, json.loads(text)


def names_of_recorders() -> list[str]:
    """RECORDERS and those of the backends in use, such as "cpu:gloo,cuda:ucc"."""
    names = list(RECORDERS)
    module = sys.modules.get("torch.distributed.distributed_c10d")
    with suppress(AttributeError, RuntimeError):  # it is importing, or adding a group
        for backends, _ in list(module._world.pg_map.values()):
            for backend in backends.split(","):
                names.append(backend.split(":")[-1])
    return list(dict.fromkeys(names))
