#!/usr/bin/env python3
"""Run one rank of any PyTorch training script, and report why a launch fails or hangs.

    python scripts/guard.py SCRIPT [ARGUMENT ...]     like `python SCRIPT`; -m MODULE works too
    python scripts/guard.py --free-port [FIRST]       print a free port on this host
    python scripts/guard.py --hosts                   print the hosts of this job, rank 0's first

The launchers put guard.py in front of the script, which needs no changes. guard.py
- sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in an srun step,
  so that a script written for torchrun also runs there;
- checks before the script starts that all ranks are present, belong to the same job, and run the
  same script and PyTorch version;
- on a machine without GPUs, binds each rank to its share of the cores, and makes malloc keep freed
  memory, which speeds up training on CPUs;
- detects hangs: if a rank waits for others for HANG_TIMEOUT seconds without an optimizer step,
  all ranks print their stacks and exit, and the error names the ranks at fault;
- names a slow rank: one that is late in each step, so that the others wait for it;
- records why the first rank failed, for scripts/supervise.py and torchrun.

Environment:
    RANK_TIMEOUT  seconds to wait for all ranks to start                     [300]
    HANG_TIMEOUT  seconds without progress; 0: hangs are not detected. By default,
                  9/10 of the timeout of the default process group: 540 s with NCCL,
                  1,620 s with gloo, or of init_process_group(timeout=...)  []
    SLOW_RANK_INTERVAL  seconds between two comparisons of the ranks' arrivals at their
                  collectives; 0: slow ranks are not named                  [60]
    GUARD         0: only set the variables and run the script               [1]
    FAILURE_FILE  where the first rank to fail writes {cause, reason, ...}   []
    EVENTS_FILE   where a line {time, event, text, ...} is added for a slow rank, and
                  for a GPU that has failed                                  []
Exit code: the script's; 2 if the rank check fails; 1 after a hang.
"""

from __future__ import annotations

import bisect
import ctypes
import faulthandler
import fcntl
import functools
import hashlib
import json
import math
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
from collections import Counter, deque
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

HOST = socket.gethostname()
ENDED = "has ended"
LOOPBACK = re.compile(r"(::ffff:)?127\.|::1$")  # IPv4 and IPv6
POLL = 5  # seconds between checks for a hang that another rank has found
NCCL_TIMEOUT = 600  # seconds that PyTorch gives a collective of NCCL; gloo: 1,800
LOST_RANK = re.compile(  # in an error of gloo or NCCL: another rank has failed
    "connection (was likely )?(closed|reset)|read error|broken pipe|remote process exited|"
    "was aborted",
    re.I,
)
DUPLICATE_GPU = re.compile(r"Duplicate GPU detected : rank (\d+) and rank (\d+)")  # by NCCL
GPU_ERROR = re.compile("CUDA|cuDNN|CUBLAS|NCCL|HIP error")
LOST_GPU = re.compile("Unable to determine the device handle|GPU is lost|GPU requires reset", re.I)
RECOVERY_ACTIONS = ("Reset", "Reboot", "Drain and Reset")  # of nvidia-smi, for a defective GPU
DRIVER_SECONDS = 5  # for an answer about a GPU that may be defective
READ_AT_IMPORT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_LOGS")  # by PyTorch
MAX_RANKS = 1_000_000
NAMES = 20  # names of collectives in a note, before and after the first incomplete one
PAUSE = 0.1  # seconds between two requests of a rank that waits for a key in the store
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal to send when the parent process ends
M_TRIM_THRESHOLD = -1  # <malloc.h>
M_MMAP_MAX = -4
RECORDERS = ["nccl", "nccl2", "nccl-lazy", "xccl", "gloo"]  # PyTorch's, from 2.15 on
MAX_COMPARED = 512  # ranks: rank 0 would wait too long for the notes and clocks of more
WARM_UP_STEPS = 10  # optimizer steps that are not compared
SLOW_SHARE = 0.05  # a slow rank delays the others by at least this share of a step
MAX_STEPS = 64  # of each rank that are compared in an interval, at most
STEPS_IN_A_ROW = 8  # these are chosen in runs of this length
MIN_STEPS = 20  # fewer are kept until the next interval; a quarter needs several
MAX_COLLECTIVES = 5  # of each step that are compared, at most
PINGS = 8  # exchanged with rank 0 to compare the clocks of two hosts
SIOCGIFADDR = 0x8915  # <linux/sockios.h>: asks for the IPv4 address of a network interface
WAITING_CODE = re.compile(  # of PyTorch: where the main thread waits for other ranks
    r"/torch/(distributed/(distributed_c10d|rendezvous|device_mesh|utils)|nn/parallel/\w+)\.py$"
)


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--hosts":
        print_answer(" ".join(hosts_of_job(os.environ)))
    elif arguments[0] == "--free-port":
        if arguments[1:]:
            first = whole_number("--free-port", arguments[1], 1, 65535)
        else:
            first = port_of_job(os.environ)
        print_answer(str(free_port(first)))
    else:
        run_as_rank(arguments)


def print_answer(text: str) -> None:
    """Print the last line on stdout. A wrapper or a sitecustomize.py may have printed others."""
    sys.stdout.flush()
    with suppress(BrokenPipeError):  # the launcher has stopped
        os.write(1, f"{text}\n".encode())


def run_as_rank(arguments: list[str]) -> None:
    """Check all ranks, run the script, and report its error."""
    world = launch_environment(os.environ)
    configure_process(world)
    keep_freed_memory()
    own_pid = os.getpid()
    watch = None
    if os.environ.get("GUARD") != "0" and world["WORLD_SIZE"] > 1:
        store, infos = check_ranks(world, arguments)
        watch = HangWatch(world["RANK"], store, infos)
    signals = log_signals()
    error = None
    try:
        run(arguments)
    except BaseException as raised:
        has_succeeded = isinstance(raised, SystemExit) and raised.code in (0, None)
        if not has_succeeded:
            error = raised
    is_fork = os.getpid() != own_pid  # a child of the script's own os.fork() reports nothing
    if watch and not is_fork:
        watch.end(error)
    if error:
        if not is_fork:
            report_error(error, world["RANK"], watch, signals)
        if not isinstance(error, Exception):  # SystemExit or KeyboardInterrupt
            raise error
        traceback = without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)


# ------------------------------------------------------------------------- launch environment


def launch_environment(env) -> dict[str, int]:
    """Set any of torchrun's variables that are missing. Returns the numeric ones.

    Values come from torchrun, else from the srun step, else from the defaults for one process. In
    a step of several tasks, RANK and WORLD_SIZE may be left over in the shell that sbatch exports.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if env.get(name)]
    has_tasks = env.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "TORCHELASTIC_RUN_ID" not in env
    if is_srun_step(env) and (has_tasks or len(given) < 2):
        env.update(ranks_of_step(env))
    elif len(given) == 1:
        fail(f"only {given[0]} is set of RANK and WORLD_SIZE: unset it, or set both")
    elif not given:
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    size = whole_number("WORLD_SIZE", env["WORLD_SIZE"], 1, MAX_RANKS)
    rank = whole_number("RANK", env["RANK"], 0, size - 1)
    local_rank = whole_number("LOCAL_RANK", env.get("LOCAL_RANK") or "0", 0, size - 1)
    local_size = env.get("LOCAL_WORLD_SIZE") or str(local_rank + 1)
    local_size = whole_number("LOCAL_WORLD_SIZE", local_size, local_rank + 1, MAX_RANKS)
    if not env.get("MASTER_ADDR"):
        env["MASTER_ADDR"] = hosts_of_job(env)[0] if is_srun_step(env) else "localhost"
    if not env.get("MASTER_PORT"):
        port = port_of_job(env)
        if size == 1:  # several ranks must all derive the same port
            port = free_port(port)
        env["MASTER_PORT"] = str(port)
    world = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_PORT": whole_number("MASTER_PORT", env["MASTER_PORT"], 1, 65535),
    }
    for name, value in world.items():
        env[name] = str(value)
    return world


def whole_number(name: str, text: str, low: int, high: int) -> int:
    """The value of an environment variable."""
    with suppress(ValueError):
        value = int(text)
        if low <= value <= high:
            return value
    fail(f"{name} is {text!r}, not a number from {low} to {high}: correct or unset it")


def ranks_of_step(env) -> dict[str, str]:
    """torchrun's variables for this task of an srun step."""
    tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "")  # 4(x2) or 4,3
    return {
        "RANK": env.get("SLURM_PROCID", ""),
        "LOCAL_RANK": env.get("SLURM_LOCALID", ""),
        "WORLD_SIZE": env.get("SLURM_STEP_NUM_TASKS", ""),
        "LOCAL_WORLD_SIZE": re.match(r"\d*", tasks_per_node)[0],
    }


def is_srun_step(env) -> bool:
    """Whether this is a task of an srun step.

    SLURM_PROCID is not enough: a batch script and `srun --pty bash` have it too. They have no step
    id, a reserved one (4294967291, which Slurm 26.05 prints as -5), or a terminal.
    """
    step = whole_number("SLURM_STEP_ID", env.get("SLURM_STEP_ID") or "-1", -16, 2**32)
    is_numbered = 0 <= step < 2**32 - 16
    has_terminal = "SLURM_PTY_PORT" in env and os.isatty(0)
    return is_numbered and not has_terminal


def hosts_of_job(env) -> list[str]:
    """The job's hosts, rank 0's first. scontrol expands lists such as rack[01-02]-n[1-4]."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            return subprocess.check_output(command, text=True).split()
        except (OSError, subprocess.CalledProcessError) as error:
            fail(f"`{' '.join(command)}` failed ({error}): set MASTER_ADDR")
    with suppress(OSError, KeyError):
        slots = Path(env["PBS_NODEFILE"]).read_text().split()  # a host once per slot
        return list(dict.fromkeys(slots))
    return ["localhost"]


def port_of_job(env) -> int:
    """A port that differs between jobs, their steps and their attempts.

    It is below 32768, where Linux's range of ephemeral ports starts.
    """
    job = env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or ""
    digits = re.match(r"\d*", job)[0]  # PBS: 17.server
    if not digits:
        return 15000 + int.from_bytes(os.urandom(2), "big") % 15000
    if is_srun_step(env):
        number = int(env["SLURM_STEP_ID"])
    else:
        number = whole_number("ATTEMPT", env.get("ATTEMPT") or "1", 1, MAX_RANKS) - 1
    return 15000 + (16 * int(digits) + number) % 15000


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


# -------------------------------------------------------------------------------- cores and GPUs


def configure_process(world: dict[str, int]) -> None:
    """Give this rank its share of the node's cores; stop it if torchrun is killed."""
    if not hasattr(os, "sched_getaffinity") or world["WORLD_SIZE"] == 1:
        return
    local_rank = world["LOCAL_RANK"]
    allowed = sorted(os.sched_getaffinity(0))
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    share = allowed
    by_srun = os.environ.get("SLURM_CPU_BIND_TYPE") == "none"  # slurm_train_multinode.sh
    if by_torchrun or by_srun or len(allowed) == os.cpu_count():  # the rank is not bound yet
        ranks = world["LOCAL_WORLD_SIZE"]
        begin = len(allowed) * local_rank // ranks
        end = len(allowed) * (local_rank + 1) // ranks
        share = allowed[begin:end]
    if share and not has_gpu():
        os.sched_setaffinity(0, share)  # shared cores slow down CPU ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(share))))


def keep_freed_memory() -> None:
    """Without GPUs, make glibc keep freed memory, unless the user has set its malloc.

    It would return each large activation to the kernel and fault it in again in the next step,
    which is the largest single cost of a small network on a CPU.
    """
    libc = ctypes.CDLL(None)
    if has_gpu() or os.environ.get("GLIBC_TUNABLES") or not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_MMAP_MAX, 0)


def has_gpu() -> bool:
    for pattern in ("nvidia[0-9]*", "kfd", "dxg"):
        if any(Path("/dev").glob(pattern)):
            return True
    return False


def is_first_attempt() -> bool:
    """Whether scripts/supervise.py has not started this training before."""
    return os.environ.get("ATTEMPT") in (None, "", "1")


# --------------------------------------------------------------------------------- rank check


def check_ranks(world: dict[str, int], arguments: list[str]):
    """Wait for all ranks and compare them; if there is a problem, all exit. Collective: every rank.

    Returns (store, what the others need of each rank info). It uses a store with a timeout, because
    a collective would hang if a rank is missing.
    """
    rank = world["RANK"]
    timeout = seconds("RANK_TIMEOUT", 300)
    deadline = time.monotonic() + timeout
    info = rank_info(world, arguments)
    store = connect(world, timeout)
    check_job(store, rank, deadline)
    store.set(f"rank {rank}", json.dumps(info))
    if rank == 0:
        compare_ranks(store, world["WORLD_SIZE"], timeout, deadline)
    result = wait_for(store, "result", deadline + 5)
    if result is None:
        fail(f"rank {rank} on {HOST} waited {timeout:.0f} s for rank 0: see its log")
    problem, infos = json.loads(result)
    if problem and rank == 0:
        fail(problem)
    if problem:
        time.sleep(1)  # let rank 0 print first: the launcher kills all at the first exit
        sys.exit(2)
    choose_interface(infos, info)
    return store, infos


def check_job(store, rank: int, deadline: float) -> None:
    """Fail if the store belongs to another job."""
    job = os.environ.get("ATTEMPT_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if rank == 0:
        store.set("job", job)
    other = wait_for(store, "job", deadline)
    if other not in (None, job):
        fail(f"job {job} has reached MASTER_PORT of job {other}: set another MASTER_PORT", "port")


def compare_ranks(store, size: int, timeout: float, deadline: float) -> None:
    """Rank 0: wait for the rank infos; put the problem found, and the infos, into the store."""
    infos = []
    for rank in range(size):
        text = wait_for(store, f"rank {rank}", deadline)
        infos.append(json.loads(text) if text else None)
    problem = find_problem(infos, timeout)
    shared = []
    if not problem:
        log_topology(infos)
        names = ("host", "pid", "address", "clock")
        shared = [{name: info[name] for name in names} for info in infos]
    store.set("result", json.dumps([problem, shared]))


def seconds(name: str, default: float | None) -> float | None:
    """The value of an environment variable in seconds, at most three years."""
    text = os.environ.get(name)
    if not text:
        return default
    with suppress(ValueError):
        value = float(text)
        if 0 <= value <= 1e8:  # false for nan
            return value
    fail(f"{name} is {text!r}, not a number of seconds")


def rank_info(world: dict[str, int], arguments: list[str]) -> dict:
    """The facts about this rank that rank 0 compares."""
    import torch

    same = {"PyTorch": torch.__version__, "scripts/guard.py": digest(Path(__file__))}
    paths = {Path(argument.split("=")[-1]) for argument in arguments}  # FILE or --option=FILE
    for path in sorted(paths):
        found = digest(path)
        if found:
            same[f"file {path}"] = found
    return {
        "host": HOST,
        "pid": os.getpid(),
        "address": address_towards(os.environ["MASTER_ADDR"]),
        "clock": clock_id(),
        "same": same,
    }


def digest(path: Path) -> str:
    """A short hash of a script or configuration file; "" for anything else.

    Not of .json: many scripts write their results to such a file on rank 0's node only.
    """
    with suppress(OSError):
        if path.suffix in (".py", ".yaml", ".yml", ".toml") and path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return ""


def connect(world: dict[str, int], timeout: float):
    """Call open_store(); exit with an error message if that fails."""
    address = os.environ["MASTER_ADDR"]
    port = world["MASTER_PORT"]
    resolve(address, port, min(30, timeout))
    unreachable = f"rank {world['RANK']} on {HOST} cannot reach {address}:{port}"
    remedy = "did rank 0 start, is MASTER_PORT free, does a firewall block it?"
    timer = threading.Timer(
        timeout + 10, end_unanswered, [address, port, f"{unreachable}: {remedy}"]
    )
    timer.daemon = True
    timer.start()
    try:
        return open_store(world, timeout)
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        fail(f"{unreachable} ({text}): {remedy}", "port")
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


def end_unanswered(address: str, port: int, unreachable: str) -> None:
    """End this process, which still waits for the store: another program may listen there."""
    text = unreachable
    with suppress(OSError):
        socket.create_connection((address, port), 5).close()
        text = f"{address}:{port} is not a PyTorch store: set another MASTER_PORT"
    end_now(text)


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
    """The value of a key in the store; None if it is not set before the deadline.

    store.wait() would need no pauses, but prints warnings when its time is over.
    """
    while not store.check([key]):
        rest = deadline - time.monotonic()
        if rest < 0:
            return None
        time.sleep(min(PAUSE, rest))
    return store.get(key).decode()


def find_problem(infos: list[dict | None], timeout: float) -> str:
    """The first problem found with the ranks, as a sentence; "" if there is none."""
    missing = [rank for rank, info in enumerate(infos) if info is None]
    if missing:
        hosts = ranks_by_host(infos)
        started = [f"{format_ranges(ranks)} on {host}" for host, ranks in hosts.items()]
        return (
            f"ranks {format_ranges(missing)} of {len(infos)} did not start within {timeout:.0f} s: "
            f"see their logs, or raise RANK_TIMEOUT (ranks that started: {', '.join(started)})"
        )
    return next(find_differences(infos), "")


def find_differences(infos: list[dict | None]):
    """Yield a sentence for each difference in software."""
    facts = {fact for info in infos if info for fact in info["same"]}
    for fact in sorted(facts):
        values = [info["same"].get(fact, "missing") if info else None for info in infos]
        for value in dict.fromkeys(values):
            if value in (None, values[0]):
                continue
            ranks = [rank for rank, other in enumerate(values) if other == value]
            plural = "s" if len(ranks) > 1 else ""
            hosts = dict.fromkeys(infos[rank]["host"] for rank in ranks)
            who = f"rank{plural} {format_ranges(ranks)} on {', '.join(hosts)}"
            yield f"{fact} differs: {value} for {who}, {values[0]} for rank 0"


def ranks_by_host(infos: list[dict | None]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        if info:
            hosts.setdefault(info["host"], []).append(rank)
    return hosts


def format_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5" """
    known = set(numbers)
    firsts = [number for number in numbers if number - 1 not in known]
    lasts = [number for number in numbers if number + 1 not in known]
    ranges = []
    for first, last in zip(firsts, lasts):
        ranges.append(f"{first}-{last}" if first < last else str(first))
    return ",".join(ranges)


def log_topology(infos: list[dict]) -> None:
    for host, ranks in ranks_by_host(infos).items():
        plural = "s" if len(ranks) > 1 else ""
        print(f"guard.py: rank{plural} {format_ranges(ranks)} on {host}", flush=True)


def address_towards(host: str) -> str:
    """This machine's address on the route to the host. Sends no packet."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                own_address = probe.getsockname()[0]
                return own_address.replace("::ffff:", "")
    return "127.0.0.1"


def choose_interface(infos: list[dict], info: dict) -> None:
    """Set GLOO_SOCKET_IFNAME if the host name resolves to a loopback address.

    Gloo listens on the address of the host name. If that is 127.0.1.1, as on Debian, no other host
    can reach it.
    """
    others = [other["address"] for other in infos if other["host"] != HOST]
    if not others:
        return
    with suppress(OSError):
        first_result = socket.getaddrinfo(HOST, None)[0]
        if not LOOPBACK.match(first_result[4][0]):
            return
    targets = [address for address in others if not LOOPBACK.match(address)]
    target = targets[0] if targets else os.environ["MASTER_ADDR"]
    address = address_towards(target)
    if LOOPBACK.match(address):
        return
    name = interfaces().get(address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interfaces() -> dict[str, str]:
    """{address: name of its network interface}"""
    names = {}
    for _, name in socket.if_nameindex():
        with socket.socket() as probe, suppress(OSError):  # an interface without an IPv4 address
            reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            address = socket.inet_ntoa(reply[20:24])
            names[address] = name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            words = line.split()
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
            names[address] = words[-1]
    return names


# ----------------------------------------------------------------------------- hang detection


class HangWatch:
    """Prints this rank's stacks and exits once any rank has waited in a collective for too long.

    Progress is a step of any optimizer in the process, or a collective that starts or ends
    according to PyTorch's Flight Recorder. The waiting rank notifies the others through the store.
    Each rank writes its position to the store, where rank 0 collects them. At fault are the ranks
    that do not answer, and those that have not enqueued the first incomplete collective; the others
    may be far ahead of it.
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
        self.found = threading.Event()  # a hang, on another rank
        self.over = threading.Event()  # the script has ended
        self.is_reporting = threading.Event()
        # poll() has its own thread: a store call never returns if the store's server is stopped.
        targets = [self.watch, self.poll]
        interval = seconds("SLOW_RANK_INTERVAL", 60)
        if interval and self.size <= MAX_COMPARED:
            slow_ranks = SlowRankWatch(rank, self.size, store, infos, self.step_ends, self.over)
            targets.append(functools.partial(slow_ranks.watch, max(1, interval)))
        self.threads = []
        for target in targets:
            thread = threading.Thread(target=target, daemon=True)
            self.threads.append(thread)
        for thread in self.threads:
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
            progress = (self.steps, counters())
            if progress != previous:
                since = time.monotonic()
            is_late = time.monotonic() - since > self.timeout()
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
                    print(text, file=sys.stderr, flush=True)

    def timeout(self) -> float:
        """Seconds without progress that are a hang: earlier than PyTorch's own limit."""
        if self.fixed_timeout is None:
            return 0.9 * timeout_of_process_group()
        return self.fixed_timeout or math.inf

    def on_step(self, *_) -> None:
        self.steps += 1
        if self.steps >= WARM_UP_STEPS:
            self.step_ends.append(time.time_ns())

    def poll(self) -> None:
        """Check regularly whether another rank has found a hang."""
        with suppress(Exception):  # the store has ended; another call would only print warnings
            while not self.over.wait(POLL):
                if self.store.check(["hang"]):
                    self.found.set()

    def exit_all(self) -> None:
        """Print the stacks, exchange positions, report the hang and exit."""
        self.is_reporting.set()
        print(f"guard.py: rank {self.rank} on {HOST}: all stacks", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        own_note = {
            "steps": self.steps,
            "limit": self.timeout(),
            "waits": waits_for(),
            "groups": positions(),
        }
        no_store = {0: "does not answer"}  # rank 0, or its torchrun, is the store's server
        without_store = threading.Timer(30, self.report, [{self.rank: own_note}, no_store])
        without_store.start()
        try:
            notes, silent = self.exchange_notes(own_note)
        except Exception:
            notes = {self.rank: own_note}
            silent = no_store
        without_store.cancel()
        self.report(notes, silent)

    def exchange_notes(self, own_note: dict) -> tuple[dict[int, dict], dict[int, str]]:
        """(notes of the ranks that answer, why the others have none).

        Rank 0 collects the notes and reports the hang; elsewhere, there are none. If rank 0 does
        not answer, rank 1 does so, and so on.
        """
        self.store.set(f"note {self.rank}", json.dumps(own_note))
        self.store.set("hang", "1")
        deadline = time.monotonic() + POLL + 3
        if self.rank > 0:
            # Rank 0 may have found the hang up to POLL seconds later.
            result = wait_for(self.store, "silent", deadline + POLL + 3 + self.rank)
            if result is not None:
                return {}, {int(rank): state for rank, state in json.loads(result).items()}
        notes, silent = self.collect_notes(deadline)
        self.store.set("silent", json.dumps(silent))
        return notes, silent

    def collect_notes(self, deadline: float) -> tuple[dict[int, dict], dict[int, str]]:
        ended = self.ended()
        notes = {}
        silent = {}
        for rank in range(self.size):
            if rank in ended:
                silent[rank] = ENDED
                continue
            text = wait_for(self.store, f"note {rank}", deadline)
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
            text = self.verdict(notes, silent)
            write_failure("hang", text, self.rank, silent_hosts=self.silent_hosts)
            print(f"guard.py: error: {text}", file=sys.stderr, flush=True)
        time.sleep(1)  # let that rank print before the launcher kills it
        for rank, state in silent.items():
            info = self.infos[rank]
            if state != ENDED and info["host"] == HOST and is_sibling(info["pid"]):
                with suppress(OSError):
                    os.kill(info["pid"], signal.SIGKILL)  # it cannot exit on its own
        os._exit(1)

    def verdict(self, notes: dict[int, dict], silent: dict[int, str]) -> str:
        """The error message. notes: what the ranks that answer wrote; silent: the other ranks."""
        usual, states = find_fault(notes)
        at_fault = dict(silent)
        for rank, state in states.items():
            at_fault[rank] = f"is {state}, {notes[rank]['steps']} steps done"
        hosts = [info["host"] for info in self.infos]
        limits = [note["limit"] for note in notes.values() if note["waits"]]
        limit = f"no progress for {min(limits, default=0):.0f} s (HANG_TIMEOUT)"
        if at_fault:
            names = [f"rank {rank} on {hosts[rank]} {at_fault[rank]}" for rank in sorted(at_fault)]
            return f"hang: {'; '.join(names)}; the others are {usual}; {limit}"
        idle = ranks_not_started(notes)
        if idle:
            gpus = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in idle)
            usual += f", not started by the GPU of {gpus}"
        return f"hang: all ranks are {usual}; {limit}: check the network and the GPUs"

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
        text = Path("/proc", str(pid), "stat").read_text()
        fields = text.rpartition(")")[2].split()  # from the third one on, see proc(5)
        return int(fields[1]) == os.getppid()
    return False


def enable_flight_recorder() -> None:
    """Set what PyTorch reads when it creates the first process group; before 2.11, it is off."""
    name = "TORCH_FR_BUFFER_SIZE" if records_gloo() else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    os.environ.setdefault(name, "2000")


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
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame:
        if frame.f_code.co_name == "init_process_group":
            timeout = frame.f_locals.get("timeout")
            if isinstance(timeout, timedelta):
                return timeout.total_seconds()
        frame = frame.f_back
    return NCCL_TIMEOUT


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
    for _, trace in flight_recorder(entries=True):
        for entry in trace.get("entries", []):
            if not is_done(entry):
                return name_of_entry(entry)
    return function_of_torch_distributed()


def function_of_torch_distributed() -> str:
    """The function in which the main thread waits, as in NCCL's initialization; "" elsewhere."""
    frame = sys._current_frames()[threading.main_thread().ident]
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


# -------------------------------------------------------------------------------- slow ranks


class SlowRankWatch:
    """Rank 0 names the ranks that arrive late at the collectives, so that the others wait for them.

    All ranks have the same step time, because each collective waits for the last rank: the slow
    rank is the one that waits least. PyTorch's Flight Recorder has the time at which a rank created
    each collective. In each interval, each rank writes these times to the store, for a few
    collectives of up to MAX_STEPS optimizer steps. Rank 0 names a rank if it is late in two
    intervals in a row, by at least SLOW_SHARE of a step and by more than the error of the clocks.
    """

    def __init__(self, rank: int, size: int, store, infos: list[dict], step_ends,
                 over: threading.Event):  # fmt: skip
        self.rank = rank
        self.size = size
        self.store = store
        self.infos = infos  # see check_ranks()
        self.step_ends = step_ends  # of this rank's optimizer steps, in nanoseconds since 1970
        self.over = over
        # For each rank, the first rank with the same clock. It compares this clock with rank 0's.
        first_ranks: dict[str, int] = {}
        for other, info in enumerate(infos):
            first_ranks.setdefault(info["clock"], other)
        self.clock_ranks = [first_ranks[info["clock"]] for info in infos]
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


# --------------------------------------------------------------------------------- the script


def run(arguments: list[str]) -> None:
    """Run `SCRIPT ...` or `-m MODULE ...` in this process, as Python itself would.

    SCRIPT is a file, or a directory or a zip file with a __main__.py.
    """
    import zipfile  # only here: it takes time, and a launcher starts this file several times

    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(arguments[0])
    if Path(script, "__main__.py").exists() or zipfile.is_zipfile(script):
        sys.argv = arguments
        del sys.path[0]  # run_path() inserts the directory or the zip file
        runpy.run_path(script, run_name="__main__")
        return
    try:
        # dont_inherit: not with the `from __future__ import annotations` of this file
        code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    except OSError as error:
        fail(f"cannot read {arguments[0]}: {error.strerror}")
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def without_own_frames(traceback):
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


# ------------------------------------------------------------------------------------ failures


def log_signals() -> int:
    """The read end of a pipe that receives the number of each signal that the script handles.

    If the script calls signal.set_wakeup_fd() itself, as an asyncio loop does, it receives none.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def received(number: int, signals: int) -> bool:
    """Whether the script has handled this signal. signals: what log_signals() has returned."""
    with suppress(BlockingIOError):  # none
        return number in os.read(signals, 65536)
    return False


def report_error(
    error: BaseException, rank: int, watch: HangWatch | None, signals: int | None = None
) -> None:
    """Record why this rank failed, unless it failed only because another rank did.

    signals: what log_signals() has returned.
    """
    if has_lost_rank(error):
        end_if_asked(error, rank, signals)
        wait_for_lost_rank(rank, watch)
        return
    shared = DUPLICATE_GPU.search(str(error))
    if shared:
        first, second = sorted(map(int, shared.groups()))
        fail(
            f"ranks {first} and {second} on {HOST} use the same GPU (Duplicate GPU detected): "
            "start one rank per GPU (NPROC_PER_NODE), or request more GPUs; the script must call "
            "torch.cuda.set_device(LOCAL_RANK)"
        )
    cause, reason = cause_and_reason(error)
    write_failure(cause, reason, rank)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:  # torchrun prints its content at the end
        facts = {"py_callstack": reason, "timestamp": str(int(time.time()))}
        content = {"message": {"message": reason, "extraInfo": facts}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(content))
    if cause == "exception" and GPU_ERROR.search(reason):
        report_gpu(rank, reason)


def report_gpu(rank: int, reason: str) -> None:
    """If the driver says that a GPU has failed, tell scripts/supervise.py: evidence against HOST.

    The error alone is no evidence: most CUDA errors are the script's own fault.
    """
    fault = failed_gpu(reason)
    if fault:
        text = f"a GPU of {HOST} has failed (nvidia-smi: {fault})"
        print(f"guard.py: {text}", file=sys.stderr, flush=True)
        write_event("gpu_failed", text, ranks=[rank], host=HOST)


def failed_gpu(reason: str) -> str:
    """What nvidia-smi says is wrong with a GPU of this host; "" if nothing, or if it cannot tell.

    After Xid 79 ("fallen off the bus") it no longer finds the GPU; after other Xid errors it may
    recommend an action, which older versions do not know. Memory errors count only if this error is
    one (reason): the driver has counted since it was loaded, and the GPU may be usable again.
    """
    for line in query_gpus("gpu_recovery_action"):
        index, _, action = line.partition(", ")
        if LOST_GPU.search(line):
            return line
        if action in RECOVERY_ACTIONS:
            return f"GPU {index}: recovery action: {action}"
    if re.search("ECC|uncorrectable", reason):
        for line in query_gpus("ecc.errors.uncorrected.volatile.total"):
            index, _, errors = line.partition(", ")
            if errors.isdigit() and int(errors) > 0:
                return f"GPU {index}: {errors} uncorrected memory errors"
    return ""


def query_gpus(field: str) -> list[str]:
    """nvidia-smi's lines "INDEX, VALUE", or its error message; [] without an answer."""
    command = ["nvidia-smi", f"--query-gpu=index,{field}", "--format=csv,noheader,nounits"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        query = subprocess.Popen(command, text=True, **pipes)
    except OSError:
        return []
    try:
        output, _ = query.communicate(timeout=DRIVER_SECONDS)
    except subprocess.TimeoutExpired:
        query.kill()  # without waiting for its end: a broken driver may prevent it
        return []
    return output.splitlines()


def has_lost_rank(error: BaseException) -> bool:
    """Whether this rank failed only because another rank has.

    NCCL's other errors are this rank's: no memory, no usable network, a defective GPU.
    """
    text = str(error)
    is_distributed = type(error).__name__.startswith("Dist")  # DistBackendError, DistNetworkError
    is_distributed = is_distributed or "gloo/transport" in text or "NCCL" in text
    return is_distributed and bool(LOST_RANK.search(text))


def message_of(error: BaseException) -> str:
    """The message of an error; of one of NCCL in one line, up to NCCL's line "Last error"."""
    text = str(error)
    last_error = re.search(r"last error:\s*.+", text, re.I)
    if last_error:
        return " ".join(text[: last_error.end()].split())
    return text


def end_if_asked(error: BaseException, rank: int, signals: int | None) -> None:
    """Say that another rank has failed; if the launcher has sent SIGTERM, end as by SIGTERM.

    The script has handled it only now, because it was waiting for the others. If each rank that
    waits for another one took seconds to end, eight ranks would take 15 s.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    text = message_of(error).split("] ", 1)[-1].split(". This is")[0]
    text = f"guard.py: rank {rank} on {HOST}: another rank exited ({text})"
    print(text, file=sys.stderr, flush=True)
    if signals is not None and received(signal.SIGTERM, signals):
        with suppress(OSError):
            sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)


def wait_for_lost_rank(rank: int, watch: HangWatch | None) -> None:
    """Another rank has failed. Launchers report the first rank that exits: let it exit first."""
    time.sleep(1)  # time for a rank whose script has ended to report that
    ended = watch.ended_ranks() if watch else ""
    if ended:
        text = f"rank {rank} on {HOST} waits for {ended}, where the script has ended: all ranks"
        text += " must take part in the same collectives"
        write_failure("exception", text, rank)
        print(f"guard.py: {text}", file=sys.stderr, flush=True)
    time.sleep(2)


def cause_and_reason(error: BaseException) -> tuple[str, str]:
    """For FAILURE_FILE. A script that exits with `raise SystemExit(2) from error` may set the cause
    as an attribute of that error.
    """
    if not isinstance(error, SystemExit):
        reason = f"{type(error).__name__}: {message_of(error)}"
        if re.search("OutOfMemory|out of memory|MemoryError|t allocate memory", reason):
            return "out of memory", reason
        return "exception", reason
    default = "configuration" if error.code == 2 else "exception"
    root = error.__cause__
    if root:
        return getattr(root, "cause", default), str(root)
    return getattr(error, "cause", default), f"exit code {error.code}"


def write_failure(cause: str, reason: str, rank: int, host: str = HOST, **more) -> None:
    """Write FAILURE_FILE for scripts/supervise.py, if no other rank has done so."""
    file = os.environ.get("FAILURE_FILE")
    if file:
        facts = {"cause": cause, "reason": reason, "rank": rank, "host": host, **more}
        with suppress(OSError), open(file, "x") as first:
            json.dump(facts, first)


def write_event(event: str, text: str, **facts) -> None:
    """Add a line to EVENTS_FILE for scripts/supervise.py."""
    file = os.environ.get("EVENTS_FILE")
    if file:
        record = {"time": time.time(), "event": event, "text": text, **facts}
        with suppress(OSError), open(file, "a") as events:
            events.write(json.dumps(record) + "\n")


def fail(text: str, cause: str = "configuration") -> None:
    """Print a user error and exit with code 2."""
    print(f"guard.py: error: {text}", file=sys.stderr, flush=True)
    write_failure(cause, text, own_rank())
    sys.exit(2)


def own_rank() -> int:
    """$RANK; 0 if it is not a number."""
    with suppress(ValueError):
        return int(os.environ.get("RANK", ""))
    return 0


def end_now(text: str) -> None:
    """Like fail(), but works from another thread while the main thread hangs."""
    with suppress(SystemExit):
        fail(text, "port")
    os._exit(2)


if __name__ == "__main__":
    main()
