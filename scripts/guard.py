#!/usr/bin/env python3
"""Run one rank of any PyTorch training script, and report why a launch fails or hangs.

    python scripts/guard.py SCRIPT [ARGUMENT ...]     like `python SCRIPT`; -m MODULE works too
    python scripts/guard.py --free-port [FIRST]       print a free port on this host
    python scripts/guard.py --hosts                   print the hosts of this job, rank 0's first

The launchers put guard.py in front of the script, which needs no changes. guard.py
- sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in an srun step,
  so that a script written for torchrun also runs there;
- in an srun step, checks each node: see node_check.py (cluster_train.sh does it for torchrun);
- checks before the script starts that all ranks are present, belong to the same job, and run the
  same script and PyTorch version;
- on a machine without GPUs, binds each rank to its share of the cores, and makes malloc keep freed
  memory, which speeds up training on CPUs;
- detects hangs: if a rank waits for others for HANG_TIMEOUT seconds without progress,
  all ranks print their stacks and exit, and the error reports the ranks at fault;
- reports a slow rank: one that is late in each step, so that the others wait for it;
- avoids a hang of loader workers with older releases of Python 3.10 and 3.11;
- warns when a node's memory is nearly used up, and says which process grew most;
- prints all stacks of a rank that gets SIGQUIT, which goes on;
- records why the first rank failed, for scripts/supervise.py and torchrun.

Environment:
    SHARE_GPU     1: several ranks on one GPU, to debug: slow                []
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

import memory
import node_check
import slow_ranks
from hang import HangWatch
from report import (
    HOST,
    LOOPBACK,
    end_now,
    fail,
    format_ranges,
    has_gpu,
    print_answer,
    ranks_by_host,
    say,
    seconds,
    wait_for,
    whole_number,
    write_event,
    write_failure,
)

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
MAX_RANKS = 1_000_000
OWN_MODULES = ("hang", "memory", "node_check", "report", "slow_ranks")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal to send when the parent process ends
M_TRIM_THRESHOLD = -1  # <malloc.h>
M_MMAP_MAX = -4
KEPT_BYTES = 384 << 20  # of freed memory; if more is free, all of it is returned
SIOCGIFADDR = 0x8915  # <linux/sockios.h>: asks for the IPv4 address of a network interface


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


def run_as_rank(arguments: list[str]) -> None:
    """Check all ranks, run the script, and report its error."""
    world = launch_environment(os.environ)
    faulthandler.register(signal.SIGQUIT, chain=False)  # prints all stacks; the run goes on
    configure_process(world)
    share_gpu(world)
    keep_freed_memory()
    os.register_at_fork(before=wait_for_new_threads)
    own_pid = os.getpid()
    watch = None
    is_guarded = os.environ.get("GUARD") != "0"
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # cluster_train.sh has checked the node
    if is_guarded and is_srun_step(os.environ) and not by_torchrun and world["LOCAL_RANK"] == 0:
        node_check.check_launch(arguments[0], arguments[1:], ranks=1)  # a task may see one GPU
    if is_guarded and world["WORLD_SIZE"] > 1:
        store, infos = check_ranks(world, arguments)
        watch = HangWatch(world["RANK"], store, infos)
        slow_ranks.start(watch)
        if world["LOCAL_RANK"] == 0:
            watch.start_thread(functools.partial(memory.watch, watch.over))
    signals = log_signals()
    oom_kills = memory.oom_kills()
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
            if memory.oom_kills() > oom_kills and has_lost_rank(error):
                write_failure("out of memory", memory.KILLED, None)
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
        say(f"guard.py: port {port} is in use on {HOST}; trying the next one")
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


def share_gpu(world: dict[str, int]) -> None:
    """SHARE_GPU=1: NCCL takes each rank for a host of its own, and allows several on one GPU."""
    if os.environ.get("SHARE_GPU") != "1":
        return
    if 0 < node_check.count_gpus() < world["LOCAL_WORLD_SIZE"]:
        os.environ.setdefault("NCCL_HOSTID", f"{HOST}-{world['LOCAL_RANK']}")
        if world["RANK"] == 0:
            text = "SHARE_GPU=1: ranks share GPUs and exchange over sockets: speed means nothing"
            say(f"guard.py: WARNING: {text}")


def wait_for_new_threads() -> None:
    """Before a fork: wait for threads of gloo that are just entering Python. Has no other effect.

    Up to Python 3.10.14 and in early releases of 3.11, the child, such as a loader worker, would
    hang on a lock of theirs: https://github.com/python/cpython/issues/112275
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(0), None)  # takes the same lock


def keep_freed_memory() -> None:
    """Without GPUs, make glibc keep up to KEPT_BYTES, unless the user has set its malloc.

    It would return each large activation to the kernel and fault it in again in the next step,
    which is the largest single cost of a small network on a CPU.
    """
    libc = ctypes.CDLL(None)
    if has_gpu() or os.environ.get("GLIBC_TUNABLES") or not hasattr(libc, "mallopt"):
        return
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    libc.mallopt(M_MMAP_MAX, 0)


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
        names = ("host", "pid", "address")
        shared = [{name: info[name] for name in names} for info in infos]
    store.set("result", json.dumps([problem, shared]))


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
    return next(find_differences(infos, "same"), "")


def find_differences(infos: list[dict | None], group: str):
    """Yield a sentence for each difference in a group of facts, such as "same"."""
    facts = {fact for info in infos if info for fact in info[group]}
    for fact in sorted(facts):
        values = [info[group].get(fact, "missing") if info else None for info in infos]
        for value in dict.fromkeys(values):
            if value in (None, values[0]):
                continue
            ranks = [rank for rank, other in enumerate(values) if other == value]
            plural = "s" if len(ranks) > 1 else ""
            hosts = dict.fromkeys(infos[rank]["host"] for rank in ranks)
            who = f"rank{plural} {format_ranges(ranks)} on {', '.join(hosts)}"
            yield f"{fact} differs: {value} for {who}, {values[0]} for rank 0"


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


# --------------------------------------------------------------------------------- the script


def run(arguments: list[str]) -> None:
    """Run `SCRIPT ...` or `-m MODULE ...` in this process, as Python itself would.

    SCRIPT is a file, or a directory or a zip file with a __main__.py.
    """
    import zipfile  # only here: it takes time, and a launcher starts this file several times

    for name in OWN_MODULES:  # the script may have modules with these names
        sys.modules.pop(name, None)

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
            "start one rank per GPU (NPROC_PER_NODE), or request more GPUs, or set SHARE_GPU=1 to "
            "debug; the script must call torch.cuda.set_device(LOCAL_RANK)"
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
        say(f"guard.py: {text}")
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
    say(text)
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
        say(f"guard.py: {text}")
    time.sleep(2)


def cause_and_reason(error: BaseException) -> tuple[str, str]:
    """For FAILURE_FILE. A script that exits with `raise SystemExit(2) from error` may set the cause
    as an attribute of that error.
    """
    if not isinstance(error, SystemExit):
        reason = f"{type(error).__name__}: {message_of(error)}"
        if re.search("OutOfMemory|out of memory|MemoryError|t allocate memory", reason):
            if os.environ.get("SHARE_GPU") == "1":
                reason += " (SHARE_GPU=1: the ranks share its memory: use a smaller --batch-size)"
            return "out of memory", reason
        return "exception", reason
    default = "configuration" if error.code == 2 else "exception"
    root = error.__cause__
    if root:
        return getattr(root, "cause", default), str(root)
    return getattr(error, "cause", default), f"exit code {error.code}"


if __name__ == "__main__":
    main()
