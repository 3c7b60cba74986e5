#!/usr/bin/env python3
"""Run one rank of any PyTorch training script, and report why a launch fails or hangs.

    python scripts/guard.py SCRIPT [ARGUMENT ...]     like `python SCRIPT`; -m MODULE works too

The launchers put guard.py in front of the script, which needs no changes. guard.py
- sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in an srun step,
  so that a script written for torchrun also runs there;
- in an srun step, checks each node: see node_check.py (cluster_train.sh does it for torchrun);
- checks before the script starts that all ranks are present, and run the same script and PyTorch
  version;
- on a machine without GPUs, binds each rank to its share of the cores;
- detects hangs: if a rank waits for others for HANG_TIMEOUT seconds without progress,
  all ranks print their stacks and exit, and the error reports the ranks at fault;
- reports ranks that do not train one model together, such as with equal batches, or without DDP;
- avoids a hang of loader workers with older releases of Python 3.10 and 3.11;
- prints all stacks of a rank that gets SIGQUIT, which goes on;
- in an srun step, turns SIGUSR1 and SIGUSR2 into STOP_SIGNAL, unless the script handles them;
- prints what docs/TROUBLESHOOTING.md says about the error of the first rank that fails;
- records why the first rank failed, for scripts/supervise.py and cluster_train.sh.

Environment:
    SHARE_GPU     1: several ranks on one GPU, to debug: slow                []
    RANK_TIMEOUT  seconds to wait for all ranks to start                     [300]
    HANG_TIMEOUT  seconds without progress; 0: hangs are not detected. By default,
                  9/10 of the timeout of the default process group: 540 s with NCCL,
                  1,620 s with gloo, or of init_process_group(timeout=...)  []
    CHECK_FINITE  1: name the first step in which a gradient is not finite, its rank
                  and its layer                                             []
    CHECK_RESUME  1: an attempt notes what a later one compares, to know whether it goes on where
                  this one stopped; else, the directory of these notes [under supervise.py: 1]
    CHECK_TRAINING  0: not whether the ranks train one model together         [1]
    GUARD         check: nothing of this but the variables, the stop signals, the rank
                  check and the reason of a failure; 0: not the rank check either [1]
    FAILURE_FILE  where the first rank to fail writes {cause, reason, ...}   []
    EVENTS_FILE   where a line {time, event, text, ...} is added for a GPU that has failed,
                  and ranks that do not train one model                     []
    STOP_FILE     where a stop signal is named that supervise.py has not sent []
    STOP_SIGNAL   the signal after which the script saves and exits: TERM, USR1, USR2  [TERM]
Exit code: the script's; 2 if the rank check fails; 1 after a hang.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import explain
import memory
import node_check
from hang import HangWatch, line_in_script
from hosts import free_port, hosts_of_job, port_of_job
from processes import end_with_parent
from report import (
    HOST,
    end_now,
    fail,
    format_ranges,
    has_gpu,
    ranks_by,
    ranks_by_host,
    ranks_do,
    say,
    seconds,
    stop_signal,
    wait_for,
    whole_number,
    write_failure,
    write_stop,
)

LOST_RANK = re.compile(  # in an error of gloo or NCCL: another rank has failed
    "connection (was likely )?(closed|reset)|read error|broken pipe|remote process exited|"
    "was aborted",
    re.I,
)
OUT_OF_MEMORY = re.compile("OutOfMemory|out of memory|MemoryError|t allocate memory")
GPU_ERROR = re.compile("CUDA|cuDNN|CUBLAS|NCCL|HIP error")
MAX_RANKS = 1_000_000


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if arguments else 2)
    run_as_rank(arguments)


def run_as_rank(arguments: list[str]) -> None:
    """Check all ranks, run the script, and report its error."""
    forward_stop_signals()
    world = launch_environment(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ and world["WORLD_SIZE"] > 1:
        end_with_parent()
    share_gpu(world)
    guard = os.environ.get("GUARD") or "1"
    if guard not in ("0", "check", "1"):
        fail(f"GUARD is {guard!r}, not 0, check or 1")
    is_guarded = guard == "1"
    if is_guarded:
        configure_process(world)
    if guard != "0" and world["LOCAL_RANK"] == 0 and is_srun_step(os.environ):
        # As cluster_train.sh does it before torchrun; a task may see one GPU.
        node_check.check_launch(arguments[0], arguments[1:], ranks=1)
    watch = None
    if guard != "0" and world["WORLD_SIZE"] > 1:
        store = check_ranks(world, arguments)
        if is_guarded:
            watch = start_watch(world, store)
            announce_exec(world["RANK"])
    finite = None
    if watch or (is_guarded and os.environ.get("CHECK_FINITE") == "1"):
        import check_finite  # imports PyTorch

        finite = check_finite.FiniteCheck(world["RANK"])
    if is_guarded and os.environ.get("CHECK_RESUME", "0") != "0":
        note_steps()
    own_pid = os.getpid()
    oom_kills = memory.oom_kills()
    error = None
    try:
        run(arguments)
    except BaseException as raised:
        has_succeeded = isinstance(raised, SystemExit) and raised.code in (0, None)
        if not has_succeeded:
            error = raised
    is_rank = os.getpid() == own_pid  # else, a child of the script's own os.fork()
    if finite and is_rank:
        finite.end()
    if watch and is_rank:
        watch.end(error)
    if error and is_rank:
        if memory.oom_kills() > oom_kills and has_lost_rank(error):
            write_failure("out of memory", memory.KILLED)
        report_error(error, world["RANK"], watch)
    if error:
        print_traceback(error)
        if is_guarded and is_rank and not has_lost_rank(error):
            explain.explain(error, watch.store if watch else None)
        if isinstance(error, Exception):
            sys.exit(1)
        raise error


def start_watch(world: dict[str, int], store) -> HangWatch:
    """From now on, watch the ranks."""
    import check_training  # imports PyTorch, as check_ranks() does

    watch = HangWatch(world["RANK"], world["WORLD_SIZE"], store)
    if os.environ.get("CHECK_TRAINING") != "0":
        watch.start_thread(check_training.TrainingCheck(watch).run)
    return watch


def announce_exec(rank: int) -> None:
    """os.execv() and its relatives put another program in the place of this process: say so."""
    own_pid = os.getpid()

    def announce(event: str, _) -> None:
        if event == "os.exec" and os.getpid() == own_pid:  # not in a child
            text = f"rank {rank} becomes another program (os.exec), which is not watched"
            say(f"guard.py: WARNING: {text}")

    sys.addaudithook(announce)


def note_steps() -> None:
    """To find out whether a later attempt goes on where this one stops."""
    with suppress(ImportError, OSError):  # a script without PyTorch; the notes cannot be written
        import check_resume_notes

        check_resume_notes.start()


def print_traceback(error: BaseException) -> None:
    """As Python would, but without the frames of this file and of runpy."""
    if not isinstance(error, Exception):  # SystemExit or KeyboardInterrupt
        return
    own_files = (__file__, runpy.run_path.__code__.co_filename)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename in own_files:
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


# ------------------------------------------------------------------------------ stop signals


def forward_stop_signals() -> None:
    """In an srun step, turn SIGUSR1 and SIGUSR2 into STOP_SIGNAL, as run_torchrun.py does.

    srun ends its step at SIGTERM, but forwards these two. The script may replace these handlers.
    """
    if is_srun_step(os.environ):
        for number in {signal.SIGUSR1, signal.SIGUSR2} - {stop_signal()}:
            signal.signal(number, forward_stop)
    os.register_at_fork(after_in_child=forget_stop_signals)


def forward_stop(number: int, _frame) -> None:
    write_stop(number)  # first: the signal may end this process
    os.kill(os.getpid(), stop_signal())


def forget_stop_signals() -> None:
    """In a child, such as a loader worker: a signal to it is none to the rank."""
    with suppress(ValueError):  # not in the main thread
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is forward_stop:
                signal.signal(number, signal.SIG_IGN)


# ------------------------------------------------------------------------- launch environment


def launch_environment(env) -> dict[str, int]:
    """Set any of torchrun's variables that are missing. Returns the numeric ones.

    Values come from torchrun, else from the srun step, else from the defaults for one process. In
    a step of several tasks, RANK and WORLD_SIZE may be left over in the shell that sbatch exports.
    """
    has_tasks = env.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    is_set = bool(env.get("RANK") and env.get("WORLD_SIZE"))
    if is_srun_step(env) and (has_tasks or not is_set):
        tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "")  # 4(x2) or 4,3
        env["RANK"] = env.get("SLURM_PROCID", "")
        env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "")
        env["WORLD_SIZE"] = env.get("SLURM_STEP_NUM_TASKS", "")
        env["LOCAL_WORLD_SIZE"] = re.match(r"\d*", tasks_per_node)[0]
    elif not env.get("RANK") and not env.get("WORLD_SIZE"):
        if env.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
            remedy = "let it start one scripts/cluster_train.sh per node, with its arguments"
            fail(f"mpirun has started this without RANK and WORLD_SIZE: {remedy}")
        env.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    size = whole_number(env, "WORLD_SIZE", 1, MAX_RANKS)
    rank = whole_number(env, "RANK", 0, size - 1)
    local_rank = whole_number(env, "LOCAL_RANK", 0, size - 1, "0")
    least = local_rank + 1
    local_size = whole_number(env, "LOCAL_WORLD_SIZE", least, MAX_RANKS, str(least))
    if size == 1 and env.pop("TORCHELASTIC_USE_AGENT_STORE", None):
        env.pop("MASTER_PORT", None)  # torchrun's: ranks that the script starts make a store
    try:
        if not env.get("MASTER_ADDR"):
            env["MASTER_ADDR"] = hosts_of_job(env)[0] if is_srun_step(env) else "localhost"
        if not env.get("MASTER_PORT"):
            port = port_of_job(env)
            if size == 1:  # several ranks must all derive the same port
                port = free_port(port)
            env["MASTER_PORT"] = str(port)
    except ValueError as error:
        fail(str(error))
    world = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_PORT": whole_number(env, "MASTER_PORT", 1, 65535),
    }
    for name, value in world.items():
        env[name] = str(value)
    return world


def is_srun_step(env) -> bool:
    """Whether this is a task of an srun step, without torchrun.

    SLURM_PROCID is not enough: a batch script and `srun --pty bash` have it too. They have no step
    id, a reserved one (4294967291, which Slurm 26.05 prints as -5), or a terminal.
    """
    is_numbered = re.fullmatch(r"\d{1,9}", env.get("SLURM_STEP_ID", ""))
    has_terminal = "SLURM_PTY_PORT" in env and os.isatty(0)
    return bool(is_numbered) and not has_terminal and "TORCHELASTIC_RUN_ID" not in env


# -------------------------------------------------------------------------------- cores and GPUs


def configure_process(world: dict[str, int]) -> None:
    """What changes in this process beside the environment variables of the launch."""
    faulthandler.register(signal.SIGQUIT)  # prints all stacks; the run goes on
    os.register_at_fork(before=wait_for_new_threads)
    explain.remember_output()
    if hasattr(os, "sched_getaffinity") and world["WORLD_SIZE"] > 1:
        choose_cores(world)


def choose_cores(world: dict[str, int]) -> None:
    """On a machine without GPUs, give this rank its share of the node's cores, because shared ones
    are slow. A task that srun has bound has its share.
    """
    is_bound = is_srun_step(os.environ) and os.environ.get("SLURM_CPU_BIND_TYPE") != "none"
    cores = sorted(os.sched_getaffinity(0))
    count = len(cores) // world["LOCAL_WORLD_SIZE"]
    if count and not is_bound and not has_gpu():
        begin = count * world["LOCAL_RANK"]
        os.sched_setaffinity(0, cores[begin : begin + count])


def share_gpu(world: dict[str, int]) -> None:
    """SHARE_GPU=1: NCCL takes each rank for a host of its own, and allows several on one GPU."""
    if os.environ.get("SHARE_GPU") != "1":
        return
    if 0 < node_check.count_gpus() < world["LOCAL_WORLD_SIZE"]:
        os.environ.setdefault("NCCL_HOSTID", f"{HOST}-{world['LOCAL_RANK']}")


def wait_for_new_threads() -> None:
    """Before a fork: wait for threads of gloo that are just entering Python. Has no other effect.

    Up to Python 3.10.14 and in early releases of 3.11, the child, such as a loader worker, would
    hang on a lock of theirs: https://github.com/python/cpython/issues/112275
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(0), None)  # takes the same lock


# --------------------------------------------------------------------------------- rank check


def check_ranks(world: dict[str, int], arguments: list[str]):
    """Wait for all ranks and compare them; if there is a problem, all exit. Collective: every rank.

    Returns the store, which has a timeout: a collective would hang if a rank is missing. Only rank
    0 reads what all ranks write, and tells them whether there is a problem.
    """
    rank = world["RANK"]
    timeout = seconds("RANK_TIMEOUT", 300)
    deadline = time.monotonic() + timeout
    info = rank_info(arguments)
    store = connect(world, timeout)
    store.set(f"rank {rank}", json.dumps(info))
    if rank == 0:
        compare_ranks(store, world["WORLD_SIZE"], timeout, deadline)
    problems = wait_for(store, "problems", deadline + 5)
    if problems is None:
        text = f"rank {rank} on {HOST} waited {timeout:.0f} s for rank 0: see its log"
        fail(text, "node lost")
    if problems != "none":
        time.sleep(1)  # let rank 0 print first: the launcher kills all at the first exit
        sys.exit(2)
    return store


def compare_ranks(store, size: int, timeout: float, deadline: float) -> None:
    """Rank 0: wait for the rank infos; tell all whether there is a problem."""
    infos = []
    for rank in range(size):
        text = wait_for(store, f"rank {rank}", deadline)
        infos.append(json.loads(text) if text else None)
    problem = find_problem(infos, timeout)
    started = ranks_by_host(infos)
    store.set("problems", "some" if problem else "none")
    if None in infos:
        fail(problem, "node lost", started_hosts=list(started))
    if problem:
        fail(problem, hosts=odd_hosts(infos))
    for ranks in started.values():
        print(f"guard.py: {ranks_do(ranks, infos)}", flush=True)


def rank_info(arguments: list[str]) -> dict:
    """The facts about this rank that rank 0 compares.

    Among them are the script and configuration files, but not .json: many scripts write their
    results to such a file, on rank 0's node only.
    """
    import torch

    same = {"PyTorch": torch.__version__}
    for argument in arguments:
        path = Path(argument.split("=")[-1])  # FILE or --option=FILE
        if path.suffix in (".py", ".yaml", ".yml", ".toml"):
            with suppress(OSError):
                same[f"file {path}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return {"host": HOST, "same": same}


def connect(world: dict[str, int], timeout: float):
    """Call open_store(); exit with an error message if that fails or hangs."""
    address = f"{os.environ['MASTER_ADDR']}:{world['MASTER_PORT']}"
    unreachable = f"rank {world['RANK']} on {HOST} cannot reach {address}"
    remedy = "did rank 0 start, is MASTER_PORT free, does a firewall block it?"
    timer = threading.Timer(timeout + 10, end_now, [f"{unreachable}: {remedy}"])
    timer.daemon = True
    timer.start()
    try:
        return open_store(world, timeout)
    except Exception as error:
        fail(f"{unreachable} ({message_of(error)}): {remedy}", "port")
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
    job = os.environ.get("ATTEMPT_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore(f"guard {job} {restart}", store)  # not the ranks of another job


def find_problem(infos: list[dict | None], timeout: float) -> str:
    """The first problem found with the ranks, as a sentence; "" if there is none."""
    missing = [rank for rank, info in enumerate(infos) if info is None]
    if missing:
        started = [rank for rank, info in enumerate(infos) if info]
        return (
            f"ranks {format_ranges(missing)} of {len(infos)} did not start within {timeout:.0f} s: "
            f"see their logs, or raise RANK_TIMEOUT (started: {ranks_do(started, infos)})"
        )
    return next(find_differences(infos), "")


def find_differences(infos: list[dict | None]):
    """Yield a sentence for each fact that is not the same on all ranks."""
    known = {rank: info["same"] for rank, info in enumerate(infos) if info}
    facts = {fact for same in known.values() for fact in same}
    for fact in sorted(facts):
        ranks_with = ranks_by({rank: same.get(fact, "missing") for rank, same in known.items()})
        usual, *others = ranks_with  # usual: rank 0's value
        for value in others:
            who = ranks_do(ranks_with[value], infos)
            yield f"{fact} differs: {value} for {who}, {usual} for rank 0"


def odd_hosts(infos: list[dict]) -> list[str]:
    """Those that differ from most; none if there is no majority."""
    facts = {info["host"]: str(info["same"]) for info in infos}
    usual = max(ranks_by(facts).values(), key=len)
    return [host for host in facts if host not in usual and len(usual) > len(facts) / 2]


# --------------------------------------------------------------------------------- the script


def run(arguments: list[str]) -> None:
    """Run `SCRIPT ...` or `-m MODULE ...` in this process, as Python itself would."""
    for path in Path(__file__).parent.glob("*.py"):  # the script may have modules with these names
        sys.modules.pop(path.stem, None)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = os.path.abspath(arguments[0])
    if not os.path.exists(script):
        fail(f"there is no {arguments[0]} in {os.getcwd()}")
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)
    # Not run_path(): its __main__ is gone before the script's threads and atexit handlers run.
    # dont_inherit: not with the `from __future__ import annotations` of this file
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


# ------------------------------------------------------------------------------------ failures


def report_error(error: BaseException, rank: int, watch: HangWatch | None) -> None:
    """Record why this rank failed, unless it failed only because another rank did."""
    cause, reason = cause_and_reason(error)
    if has_lost_rank(error):
        wait_for_lost_rank(error, rank, watch)
    else:
        write_failure(cause, reason, rank)
    if cause == "exception" and GPU_ERROR.search(reason):
        node_check.report_gpu(reason)


def has_lost_rank(error: BaseException) -> bool:
    """Whether this rank failed only because another rank has.

    NCCL's other errors are this rank's: no memory, no usable network, a defective GPU.
    """
    text = str(error)
    is_distributed = type(error).__name__.startswith("Dist")  # DistBackendError, DistNetworkError
    is_distributed = is_distributed or "gloo/transport" in text or "NCCL" in text
    return is_distributed and bool(LOST_RANK.search(text))


def message_of(error: BaseException) -> str:
    """The message of an error in one line, without PyTorch's stack in C++."""
    text, _, _ = str(error).partition("Exception raised from ")
    return " ".join(text.split())


def wait_for_lost_rank(error: BaseException, rank: int, watch: HangWatch | None) -> None:
    """Another rank has failed. Launchers report the first rank that exits: let it exit first."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the script may handle it, and go on
    say(f"guard.py: rank {rank} on {HOST}: another rank exited ({message_of(error)})")
    time.sleep(1)  # time for a rank whose script has ended to report that
    ended = watch.ended_ranks() if watch else ""
    if ended:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        line = line_in_script(frames[::-1])
        text = (
            f"rank {rank} on {HOST} waits {line} for {ended}, where the script has ended: all ranks"
        )
        text += " must take part in the same collectives"
        write_failure("exception", text, rank, hosts=[])
        say(f"guard.py: {text}")
    time.sleep(1)


def cause_and_reason(error: BaseException) -> tuple[str, str]:
    """For FAILURE_FILE. A script that exits with `raise SystemExit(2) from error` may set the cause
    as an attribute of that error.
    """
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):  # the script's own words, such as of a lock: of no host
            return "exit", error.code
        default = "configuration" if error.code == 2 else "exception"
        root = error.__cause__ or f"exit code {error.code}"
        return getattr(root, "cause", default), str(root)
    reason = f"{type(error).__name__}: {message_of(error)}"
    return "out of memory" if OUT_OF_MEMORY.search(reason) else "exception", reason


if __name__ == "__main__":
    main()
