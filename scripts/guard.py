#!/usr/bin/env python3
"""Run one rank of any PyTorch training script, and report why a launch fails or hangs.

    python scripts/guard.py SCRIPT [ARGUMENT ...]     like `python SCRIPT`; -m MODULE works too
    python scripts/guard.py --free-port [FIRST]       print a free port on this host
    python scripts/guard.py --hosts                   print the hosts of this job, rank 0's first

The launchers put guard.py in front of the script, which needs no changes. guard.py
- sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in an srun step,
  so that a script written for torchrun also runs there;
- checks before the script starts that all ranks are present, belong to the same job, run the same
  script and PyTorch version, and have a GPU each;
- binds each rank to its share of the cores, or to those of the NUMA node of its GPU;
- detects hangs: if a rank waits in a collective for HANG_TIMEOUT seconds without an optimizer
  step, all ranks print their stacks and exit, and the error names the ranks at fault;
- records why the first rank failed, for scripts/supervise.py and torchrun.

Environment:
    RANK_TIMEOUT  seconds to wait for all ranks to start                     [300]
    HANG_TIMEOUT  seconds without progress; NCCL's own limit is 600          [540]
    NUMA_BINDING  0: do not bind a rank to the cores near its GPU            [1]
    GUARD         0: only set the variables and run the script               [1]
    FAILURE_FILE  where the first rank to fail writes {cause, reason, ...}   []
Exit code: the script's; 2 if the rank check fails; 1 after a hang.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import hashlib
import json
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

HOST = socket.gethostname()
LOOPBACK = re.compile(r"(::ffff:)?127\.|::1$")  # IPv4 and IPv6
PCI = Path("/sys/bus/pci/devices")
POLL = 5  # seconds between checks for a hang that another rank has found


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if arguments else 2)
    if arguments[0] in ("--free-port", "--hosts"):
        if arguments[0] == "--hosts":
            text = "\n".join(hosts_of_job(os.environ))
        else:
            text = free_port(int(arguments[1]) if arguments[1:] else port_of_job(os.environ))
        with suppress(BrokenPipeError):  # the launcher has stopped
            os.write(1, f"{text}\n".encode())
        return
    world = launch_environment(os.environ)
    configure_process(world)
    watch = None
    if os.environ.get("GUARD") != "0" and world["WORLD_SIZE"] > 1:
        watch = HangWatch(world["RANK"], *check_ranks(world, arguments))
    error = None
    try:
        run(arguments)
    except BaseException as raised:
        if not isinstance(raised, SystemExit) or raised.code not in (0, None):
            error = raised
    if watch:
        watch.end(error)
    if error:
        report_error(error, world["RANK"], watch)
        if not isinstance(error, Exception):  # SystemExit or KeyboardInterrupt
            raise error
        traceback = without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)


# ------------------------------------------------------------------------- launch environment


def launch_environment(env) -> dict[str, int]:
    """Set any of torchrun's variables that are missing. Returns the numeric ones.

    Values come from torchrun, else from the srun step, else from the defaults for one process.
    """
    if "RANK" not in env or "WORLD_SIZE" not in env:
        values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        if is_srun_step(env):
            names = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"
            names = *names, "SLURM_STEP_TASKS_PER_NODE"  # 4(x2) or 4,3
            values = {name: re.match(r"\d+", env[slurm])[0] for name, slurm in zip(values, names)}
        env.update({name: str(value) for name, value in values.items()})
    if not env.get("MASTER_ADDR"):
        env["MASTER_ADDR"] = hosts_of_job(env)[0] if is_srun_step(env) else "localhost"
    if not env.get("MASTER_PORT"):
        alone = env["WORLD_SIZE"] == "1"
        env["MASTER_PORT"] = str(free_port(port_of_job(env)) if alone else port_of_job(env))
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"
    try:
        return {name: int(env.get(name, 1)) for name in names}
    except ValueError as error:
        fail(f"{', '.join(names)} should be numbers ({error}): the launcher sets them")


def is_srun_step(env) -> bool:
    """Whether this is a task of an srun step.

    SLURM_PROCID is not enough: a batch script and `srun --pty bash` have it too. They have no step
    id, a reserved one (4294967291, which Slurm 26.05 prints as -5), or a terminal.
    """
    step = int(env.get("SLURM_STEP_ID", -1))
    return 0 <= step < 2**32 - 16 and not ("SLURM_PTY_PORT" in env and os.isatty(0))


def hosts_of_job(env) -> list[str]:
    """The job's hosts, rank 0's first. scontrol expands lists such as rack[01-02]-n[1-4]."""
    if nodes := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST"):
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            return subprocess.check_output(command, text=True).split()
        except (OSError, subprocess.CalledProcessError) as error:
            fail(f"`{' '.join(command)}` failed ({error}): set MASTER_ADDR")
    with suppress(OSError, KeyError):  # PBS lists a host once per slot
        return list(dict.fromkeys(Path(env["PBS_NODEFILE"]).read_text().split()))
    return ["localhost"]


def port_of_job(env) -> int:
    """A port that differs between jobs, their steps and their attempts.

    It is below 32768, where Linux's range of ephemeral ports starts.
    """
    job = re.match(r"\d*", env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "")[0]
    if not job:
        return 15000 + int.from_bytes(os.urandom(2), "big") % 15000
    number = int(env["SLURM_STEP_ID"]) if is_srun_step(env) else int(env.get("ATTEMPT") or 1) - 1
    return 15000 + (16 * int(job) + number) % 15000


def free_port(first: int) -> int:
    """The first port from `first` on that is free on this host."""
    for port in range(first, 32768):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("", port))
                return port
        print(f"guard.py: port {port} is in use on {HOST}; trying the next one", file=sys.stderr)
    fail(f"no free port from {first} on")


def configure_process(world: dict[str, int]) -> None:
    """Give this rank its share of the node's cores; stop it if torchrun is killed."""
    if not hasattr(os, "sched_getaffinity") or world["WORLD_SIZE"] == 1:
        return
    names, local_rank = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), world["LOCAL_RANK"]
    if names[0].startswith("MIG-") and local_rank < len(names):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank]  # CUDA would take the first one
    cores, ranks = sorted(os.sched_getaffinity(0)), world["LOCAL_WORLD_SIZE"]
    near = cores_near_gpu(local_rank).intersection(cores)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun binds no cores; srun does
    if by_torchrun:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if by_torchrun or len(cores) == os.cpu_count():
        ends = (len(cores) * r // ranks for r in (local_rank, local_rank + 1))
        cores = cores[slice(*ends)]
    if cores and not has_gpu():
        os.sched_setaffinity(0, cores)  # shared cores slow down CPU ranks
    elif near and len(near) >= len(cores):  # not if they are fewer than its share
        os.sched_setaffinity(0, near)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores))))


def cores_near_gpu(local_rank: int) -> set[int]:
    """The cores of the NUMA node of this rank's GPU; empty if unknown."""
    if os.environ.get("NUMA_BINDING") == "0" or not has_gpu():
        return set()
    query = ["nvidia-smi", f"--id={gpu_of(local_rank)}", "--query-gpu=pci.bus_id"]
    query += ["--format=csv,noheader"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        output = subprocess.check_output(query, text=True, timeout=30, stderr=subprocess.DEVNULL)
        device = output.strip().lower()[-12:]  # sysfs has a domain of four digits, not eight
        ranges = (PCI / device / "local_cpulist").read_text().strip().split(",")  # 0-15,64-79
        ends = (list(map(int, part.split("-"))) for part in ranges)
        return {core for end in ends for core in range(end[0], end[-1] + 1)}
    return set()


def has_gpu() -> bool:
    return any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "kfd", "dxg"))


# --------------------------------------------------------------------------------- rank check


def check_ranks(world: dict[str, int], arguments: list[str]):
    """Wait for all ranks and compare them; if there is a problem, all exit. Collective: every rank.

    Returns (store, rank info of each rank). It uses a store with a timeout, because a collective
    would hang if a rank is missing.
    """
    rank, size = world["RANK"], world["WORLD_SIZE"]
    timeout = seconds("RANK_TIMEOUT", 300)
    deadline = time.monotonic() + timeout
    info = rank_info(world, arguments)
    store = connect(world, timeout)
    job = os.environ.get("ATTEMPT_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if rank == 0:
        store.set("job", job)
    if (other := wait_for(store, "job", deadline)) not in (None, job):
        fail(f"job {job} has reached MASTER_PORT of job {other}: set another MASTER_PORT", "port")
    store.set(f"rank {rank}", json.dumps(info))
    if rank == 0:
        found = [wait_for(store, f"rank {r}", deadline) for r in range(size)]
        infos = [json.loads(text) if text else None for text in found]
        problem = find_problem(infos, timeout)
        store.set("problem", problem)
        store.set("infos", json.dumps(infos))
        if not problem:
            log_topology(infos)
    problem = wait_for(store, "problem", deadline + 5)
    if problem is None:
        fail(f"rank {rank} on {HOST} waited {timeout:.0f} s for rank 0: see its log")
    if problem:
        time.sleep(rank > 0)  # let rank 0 print first: the launcher kills all at the first exit
        fail(problem) if rank == 0 else sys.exit(2)
    infos = json.loads(store.get("infos"))
    choose_interface(infos, info)
    return store, infos


def seconds(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name) or default)
    except ValueError:
        fail(f"{name} is {os.environ[name]!r}, not a number of seconds")


def rank_info(world: dict[str, int], arguments: list[str]) -> dict:
    """The facts about this rank that rank 0 compares."""
    import torch

    files = {name: digest(name) for name in sorted({Path(a.split("=")[-1]) for a in arguments})}
    files = {f"file {name}": found for name, found in files.items() if found}
    guard = {"scripts/guard.py": digest(Path(__file__))}
    return {
        "host": HOST,
        "pid": os.getpid(),
        "address": address_towards(os.environ["MASTER_ADDR"]),
        "gpu": gpu_of(world["LOCAL_RANK"]),
        "same": {"PyTorch": torch.__version__, **guard, **files},
    }


def digest(path: Path) -> str:
    """A short hash of a script or configuration file; "" for anything else."""
    with suppress(OSError):
        if path.suffix in (".py", ".yaml", ".yml", ".json", ".toml") and path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return ""


def gpu_of(local_rank: int) -> str:
    """The UUID of the GPU that this rank will use; "" if there is none or it is unknown."""
    gpus = visible_gpus()
    if len(gpus) < 2:  # srun --gpus-per-task=1, for example
        return "".join(gpus)
    return gpus[local_rank] if local_rank < len(gpus) else "none"


@functools.lru_cache(maxsize=None)  # noqa: UP033 (Python 3.8)
def visible_gpus() -> list[str]:
    """The UUIDs of this process's GPUs, in device order; [] if they are unknown.

    Calls nvidia-smi: calling CUDA would initialize it, and a script cannot fork after that.
    """
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = output.stdout.split()
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        names = visible.split(",")
        gpus = [gpus[int(n)] if n.isdigit() and int(n) < len(gpus) else n for n in names]
    return gpus


def connect(world: dict[str, int], timeout: float):
    """Call open_store(); exit with an error message if that fails."""
    address, port, rank = os.environ["MASTER_ADDR"], world["MASTER_PORT"], world["RANK"]
    resolve(address, port, min(30, timeout))
    timer = threading.Timer(timeout + 10, end_now, [f"{address}:{port} is not a PyTorch store"])
    timer.daemon = True
    timer.start()
    try:
        return open_store(world, timeout)
    except Exception as error:  # DistError, or RuntimeError in older versions
        text = str(error).strip().split("\n")[0]
        remedy = "did rank 0 start, is MASTER_PORT free, does a firewall block it?"
        fail(f"rank {rank} on {HOST} cannot reach {address}:{port} ({text}): {remedy}", "port")
    finally:
        timer.cancel()


def open_store(world: dict[str, int], timeout: float):
    """A client of the store on MASTER_ADDR, whose server is torchrun's agent or rank 0.

    multi_tenant: the script's own init_process_group() uses the same server. Hangs if another
    program listens on that port.
    """
    import torch.distributed as dist

    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        world["MASTER_PORT"],
        is_master=world["RANK"] == 0 and not by_agent,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"guard {restart}", store)


def resolve(address: str, port: int, patience: float) -> None:
    """Fail if the name cannot be resolved: PyTorch would retry for minutes."""
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(address, port)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline - 1 or isinstance(error, UnicodeError):
                fail(f"MASTER_ADDR {address} is unknown on {HOST}: set it to rank 0's address")
        time.sleep(1)


def wait_for(store, key: str, deadline: float) -> str | None:
    """The value of a key in the store; None if it is not set before the deadline."""
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return store.get(key).decode()


def find_problem(infos: list[dict | None], timeout: float) -> str:
    """The first problem found with the ranks, as a sentence; "" if there is none."""
    hosts = ranks_by_host(infos)
    where = ", ".join(f"{format_ranges(ranks)} on {host}" for host, ranks in hosts.items())
    if missing := [rank for rank, info in enumerate(infos) if info is None]:
        return (
            f"ranks {format_ranges(missing)} of {len(infos)} did not start within {timeout:.0f} s: "
            f"see their logs (ranks that started: {where})"
        )
    return next(find_differences(infos), "")


def find_differences(infos: list[dict | None]):
    """Yield a sentence for each difference in software and each shared GPU."""
    for what in sorted({what for info in infos if info for what in info["same"]}):
        values = [info and info["same"].get(what, "missing") for info in infos]
        for value in dict.fromkeys(values):
            if value not in (None, values[0]):
                ranks = [rank for rank, other in enumerate(values) if other == value]
                hosts = ", ".join(dict.fromkeys(infos[rank]["host"] for rank in ranks))
                who = f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)} on {hosts}"
                yield f"{what} differs: {value} for {who}, {values[0]} for rank 0"
    for host, ranks in ranks_by_host(infos).items():
        gpus = {infos[rank]["gpu"] for rank in ranks}
        if "none" in gpus or (gpus != {""} and len(gpus) < len(ranks)):
            yield (
                f"Duplicate GPU detected: on {host}, ranks {format_ranges(ranks)} share "
                f"{len(gpus - {'none'})} visible GPUs: start as many processes as there are GPUs "
                "(or set GUARD=0 if this is intended)"
            )


def ranks_by_host(infos: list[dict | None]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        if info:
            hosts.setdefault(info["host"], []).append(rank)
    return hosts


def format_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5" """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends))


def log_topology(infos: list[dict]) -> None:
    for host, ranks in ranks_by_host(infos).items():
        plural = "s" * (len(ranks) > 1)
        print(f"guard.py: rank{plural} {format_ranges(ranks)} on {host}", flush=True)


def address_towards(host: str) -> str:
    """This machine's address on the route to the host. Sends no packet."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return probe.getsockname()[0].replace("::ffff:", "")
    return "127.0.0.1"


def choose_interface(infos: list[dict], info: dict) -> None:
    """Set GLOO_SOCKET_IFNAME if the host name resolves to a loopback address.

    Gloo listens on the address of the host name. If that is 127.0.1.1, as on Debian, no other host
    can reach it.
    """
    others = [other["address"] for other in infos if other["host"] != HOST]
    with suppress(OSError):
        if not others or not LOOPBACK.match(socket.getaddrinfo(HOST, None)[0][4][0]):
            return
    target = next((a for a in others if not LOOPBACK.match(a)), os.environ["MASTER_ADDR"])
    address = address_towards(target)
    if name := not LOOPBACK.match(address) and interfaces().get(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interfaces() -> dict[str, str]:
    """{address: name of its network interface}"""
    names = {}
    for _, name in socket.if_nameindex():
        with socket.socket() as probe, suppress(OSError):  # an interface without an IPv4 address
            found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            names[socket.inet_ntoa(found[20:24])] = name
    with suppress(OSError):
        for words in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
            names[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))] = words[-1]
    return names


# ----------------------------------------------------------------------------- hang detection


class HangWatch:
    """Prints this rank's stacks and exits once any rank has waited in a collective for too long.

    Progress is a step of any optimizer in the process, or a collective that starts or ends
    according to PyTorch's Flight Recorder. The waiting rank notifies the others through the store.
    Each rank writes its position to the store; ranks that are behind or do not answer are at fault.
    """

    def __init__(self, rank: int, store, infos: list[dict]):
        from torch import __version__ as version

        # Before PyTorch 2.11, the Flight Recorder is off by default.
        name = "TORCH_FR_BUFFER_SIZE" if version >= "2.8" else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        os.environ.setdefault(name, "2000")
        self.rank, self.store, self.infos = rank, store, infos
        self.timeout = seconds("HANG_TIMEOUT", 540)
        self.steps = 0
        self.found, self.over = threading.Event(), threading.Event()
        # poll() has its own thread: a store call never returns if the store's server is stopped.
        self.threads = [threading.Thread(target=t, daemon=True) for t in (self.watch, self.poll)]
        for thread in self.threads:
            thread.start()

    def watch(self) -> None:
        hooked, seen, since = False, None, time.monotonic()
        while not self.over.wait(1):
            if not hooked and "torch.optim" in sys.modules:
                from torch.optim.optimizer import register_optimizer_step_post_hook

                register_optimizer_step_post_hook(self.on_step)
                hooked = True
            now = self.steps, collectives()
            if now != seen:
                seen, since = now, time.monotonic()
            waits = any(begun > ended for begun, ended in now[1].values())
            if self.found.is_set() or (waits and time.monotonic() - since > self.timeout):
                self.exit_all()

    def on_step(self, *_) -> None:
        self.steps += 1

    def poll(self) -> None:
        """Check regularly whether another rank has found a hang."""
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not self.over.wait(POLL):
                if self.store.check(["hang"]):
                    self.found.set()

    def exit_all(self) -> None:
        """Print the stacks, exchange positions; the lowest rank that answers reports the hang."""
        print(f"guard.py: rank {self.rank} on {HOST}: all stacks", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        notes = {self.rank: {"steps": self.steps, **last_collective()}}
        without_store = threading.Timer(20, self.report, [dict(notes), {0: "does not answer"}])
        without_store.start()
        silent = {}
        try:
            self.store.set(f"note {self.rank}", json.dumps(notes[self.rank]))
            self.store.set("hang", "1")
            deadline = time.monotonic() + POLL + 3
            for rank in range(len(self.infos)):
                if self.store.check([f"ended {rank}"]):
                    silent[rank] = "has ended"
                elif text := wait_for(self.store, f"note {rank}", deadline):
                    notes[rank] = json.loads(text)
                else:
                    silent[rank] = "does not answer"
        except Exception:
            silent = {0: "does not answer"}
        without_store.cancel()
        self.report(notes, silent)

    def report(self, notes: dict[int, dict], silent: dict[int, str]) -> None:
        if self.rank == min(notes):
            text = self.verdict(notes, silent)
            write_failure("hang", text, self.rank)
            print(f"guard.py: error: {text}", file=sys.stderr, flush=True)
        time.sleep(1)  # let that rank print before the launcher kills it
        for rank in silent:
            if self.infos[rank]["host"] == HOST:
                with suppress(OSError):
                    os.kill(self.infos[rank]["pid"], signal.SIGKILL)  # it cannot exit on its own
        os._exit(1)

    def verdict(self, notes: dict[int, dict], silent: dict[int, str]) -> str:
        """The error message. notes: positions of the ranks that answer; silent: the others."""
        states = [f"at collective {n['number']} ({n['name']})" for n in notes.values()]
        furthest = max(note["number"] for note in notes.values())
        ahead = [s for s, n in zip(states, notes.values()) if n["number"] == furthest]
        usual = max(ahead, key=ahead.count)
        at_fault = dict(silent)
        for (rank, note), state in zip(notes.items(), states):
            if state != usual:
                at_fault[rank] = f"is {state}, {note['steps']} steps done"
        if not at_fault:
            return f"hang: all ranks are {usual}: check the network"
        names = (f"rank {r} on {self.infos[r]['host']} {at_fault[r]}" for r in sorted(at_fault))
        return f"hang: {'; '.join(names)}; the others are {usual}"

    def end(self, error: BaseException | None) -> None:
        """Call this when the script has ended."""
        self.over.set()
        for thread in self.threads:  # a thread in C++ code would abort Python's shutdown
            thread.join(2)
        if not error:
            time.sleep(0.2)  # so would gloo's threads (pytorch/pytorch#179291)
            with suppress(Exception):
                self.store.set(f"ended {self.rank}", "")
                if self.rank:
                    return
                for rank in range(len(self.infos)):  # this rank or its torchrun is the server
                    wait_for(self.store, f"ended {rank}", time.monotonic() + 2)
                if len(ranks_by_host(self.infos)) > 1:
                    time.sleep(0.5)  # so that its torchrun exits last

    def ended_ranks(self) -> str:
        with suppress(Exception):  # the store has ended, too
            ranks = [r for r in range(len(self.infos)) if self.store.check([f"ended {r}"])]
            return ", ".join(f"rank {r} on {self.infos[r]['host']}" for r in ranks)
        return ""


def collectives() -> dict[str, tuple[int, int]]:
    """{process group: (collectives started, completed)}; {} before the first group exists."""
    counts = {}
    for backend, trace in flight_recorder(False):
        for group, status in trace.get("pg_status", {}).items():
            names = "last_enqueued_collective", "last_completed_collective"
            counts[f"{backend} {group}"] = tuple(int(status[name]) for name in names)
    return counts


def last_collective() -> dict:
    """Number and name of the last collective that this rank has started."""
    found = [{"number": 0, "name": "none"}]
    for _, trace in flight_recorder(True):
        for entry in trace.get("entries", [])[-1:]:
            name = f"{entry['profiling_name']} {entry['input_sizes']}".strip()
            found.append({"number": entry["collective_seq_id"], "name": name})
    return max(found, key=lambda collective: collective["number"])


def flight_recorder(entries: bool):
    """Yield (backend, PyTorch's Flight Recorder trace) for each backend in use."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if hasattr(c10d, "_dump_nccl_trace_json"):
        yield "nccl", json.loads(c10d._dump_nccl_trace_json(entries, False))
    if hasattr(c10d, "_dump_fr_trace_json"):
        yield "gloo", json.loads(c10d._dump_fr_trace_json(entries, False))
    elif c10d:
        with suppress(AttributeError, KeyError, RuntimeError):  # it is importing, or adding a group
            yield "gloo", trace_of_main_thread()


def trace_of_main_thread() -> dict:
    """Like a trace, for PyTorch < 2.8, where gloo has no Flight Recorder.

    It has a counter of the collectives started. The last one is taken for incomplete while the main
    thread is in a function of torch.distributed, of DDP, or in a backward pass.
    """
    code = sys._current_frames()[threading.main_thread().ident].f_code
    inside = bool(re.search(r"/torch/(distributed|autograd|nn/parallel)/", code.co_filename))
    groups = sys.modules["torch.distributed.distributed_c10d"]._world.pg_map
    status, number, name = {}, 0, code.co_name if inside else "complete"
    for group in groups:
        number = group._get_sequence_number_for_group()
        names = "last_enqueued_collective", "last_completed_collective"
        status[str(len(status))] = dict(zip(names, (number, number - inside)))
    name = "backward" if "/autograd/" in code.co_filename else name
    last = {"collective_seq_id": number, "profiling_name": f"gloo:{name}", "input_sizes": ""}
    return {"pg_status": status, "entries": [last]}


# ------------------------------------------------------------------------------------ failures


def run(arguments: list[str]) -> None:
    """Run `SCRIPT ...` or `-m MODULE ...` in this process, as Python itself would."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(arguments[0])
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
    except OSError as error:
        fail(f"cannot read {arguments[0]}: {error.strerror}")
    sys.argv, sys.path[0] = arguments, str(Path(script).resolve().parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def report_error(error: BaseException, rank: int, watch: HangWatch | None) -> None:
    """Record why this rank failed, unless it failed only because another rank did."""
    if "gloo/transport" in str(error) or type(error).__name__ == "DistBackendError":
        # Another rank has failed. Launchers report the first rank that exits: let it exit first.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        text = str(error).split("] ", 1)[-1].split(". This is")[0]
        print(f"guard.py: rank {rank} on {HOST}: another rank exited ({text})", file=sys.stderr)
        time.sleep(1)  # time for a rank whose script has ended to report that
        if ended := watch.ended_ranks() if watch else "":
            text = f"rank {rank} on {HOST} waits for {ended}, where the script has ended: all ranks"
            text += " must take part in the same collectives"
            write_failure("exception", text, rank)
            print(f"guard.py: {text}", file=sys.stderr, flush=True)
        time.sleep(2)
        return
    if isinstance(error, SystemExit):
        root = error.__cause__ or error
        cause = getattr(root, "cause", "configuration" if error.code == 2 else "exception")
        reason = str(root) if error.__cause__ else f"exit code {error.code}"
    else:
        reason = f"{type(error).__name__}: {error}"
        memory = re.search("OutOfMemory|MemoryError|t allocate memory", reason)
        cause = "out of memory" if memory else "exception"
    write_failure(cause, reason, rank)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints its content at the end
        facts = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": reason, "extraInfo": facts}}))


def write_failure(cause: str, reason: str, rank: int) -> None:
    """Write FAILURE_FILE for scripts/supervise.py, if no other rank has done so."""
    if file := os.environ.get("FAILURE_FILE"):
        facts = {"cause": cause, "reason": reason, "rank": rank, "host": HOST}
        with suppress(OSError), open(file, "x") as first:
            json.dump(facts, first)


def without_own_frames(traceback):
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def fail(text: str, cause: str = "configuration") -> None:
    """Print a user error and exit with code 2."""
    print(f"guard.py: error: {text}", file=sys.stderr, flush=True)
    write_failure(cause, text, int(os.environ.get("RANK", 0)))
    sys.exit(2)


def end_now(text: str) -> None:
    """Like fail(), but works from another thread while the main thread hangs."""
    with suppress(SystemExit):
        fail(text, "port")
    os._exit(2)


if __name__ == "__main__":
    main()
