"""scripts/guard.py with scripts that were not written for it."""

import gc
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import guard
import hang
import pytest
import report
import torch
import torch.distributed as dist
from gpus import gpu, nvidia_smi
from harness import BATCH_SHELL, NO_LAUNCHER, REPO, SRUN_STEP, Result, free_port, run_ranks, running

GUARD = REPO / "scripts/guard.py"
HOST = os.uname().nodename
needs_recorder = pytest.mark.skipif(not hang.has_recorder(), reason="needs PyTorch 2.8")

# A test may replace `# HERE` by a fault.
DDP_SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(20):
        # HERE
        optimizer.zero_grad()
        model(torch.randn(20, 10)).square().mean().backward()
        optimizer.step()
    print(f"rank {rank} of {dist.get_world_size()} ends\\n", end="", flush=True)
    dist.destroy_process_group()


main()
"""

# ------------------------------------------------------------ the script runs as without guard.py

SAVES_AT_THE_END = """
import pickle, threading, time

class State:
    pass

def save():
    time.sleep(0.5)  # until the last line has run
    print("saved", len(pickle.dumps(State())) > 0)

threading.Thread(target=save).start()
"""


PRINT_SELF = """
import __main__, sys
print(__name__, __file__, __builtins__ is not None, sys.argv, sys.path[0], __main__.__file__)
print(__doc__, __spec__, __main__ is sys.modules["__main__"], vars(__main__)["sys"] is sys)
"""
PICKLE = """
import multiprocessing, pickle

class Thing:
    pass

def square(n):
    return n * n

if __name__ == "__main__":
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(square, [1, 2, 3]))
"""
SINGLE = {
    "a thread that outlives the last line": SAVES_AT_THE_END,
    "its own name, file and arguments": PRINT_SELF,
    "exit 0": "import sys\nsys.exit()",
    "exit code": "raise SystemExit(3)",
    "exit with a text": "raise SystemExit('not today')",
    "exception": "def f():\n    raise ValueError('no')\n\nf()",
    "chained exceptions": "try:\n    1 / 0\nexcept Exception as e:\n    raise OSError('x') from e",
    "syntax error": "print('never')\nfor",
    "killed by itself": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "exit handlers": "import atexit\natexit.register(print, 'at exit')\nprint(undefined)",
    "a neighbour": "import neighbour\nprint(neighbour.VALUE)",
    "pickle and multiprocessing": PICKLE,
    "warning": "import warnings\nwarnings.warn('careful')",
    "annotations": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int = 0\n"
    "print(dataclasses.fields(A)[0].type)",
}


def assert_runs_as_without_it(directory, *command) -> None:
    with_it, without = (
        subprocess.run([sys.executable, *more, *command], cwd=directory, capture_output=True)
        for more in ([GUARD], [])
    )
    assert (with_it.returncode, with_it.stdout) == (without.returncode, without.stdout)
    errors = [which.stderr.decode().splitlines() for which in (with_it, without)]
    # Without it, a traceback of a module begins with frames of Python's runpy.py.
    errors = [[line for line in lines if not re.search("runpy|run_", line)] for lines in errors]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_process_prints_and_exits_as_without_it(tmp_path, name):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/my_script.py").write_text(SINGLE[name])
    (tmp_path / "src/neighbour.py").write_text("VALUE = 7")
    assert_runs_as_without_it(tmp_path, tmp_path / "src/my_script.py", "--an-option", "a word")


def test_modules_named_like_those_of_guard_are_the_script_s_own(tmp_path):
    names = [path.stem for path in (REPO / "scripts").glob("*.py")]
    for name in names:
        (tmp_path / f"{name}.py").write_text("VALUE = 7")
    lines = [f"import {name}; print({name}.VALUE)" for name in names]
    (tmp_path / "my_script.py").write_text("\n".join(lines))
    assert_runs_as_without_it(tmp_path, "my_script.py")


@pytest.mark.parametrize("ending", ["raise ValueError('no')", "exit(4)"])
def test_a_module_with_relative_imports_runs_as_without_it(tmp_path, ending):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/neighbour.py").write_text("VALUE = 7")
    text = "import sys\nfrom .neighbour import VALUE\nprint(__name__, __package__, sys.argv, VALUE)"
    (tmp_path / "package/train.py").write_text(f"{text}\n{ending}")
    assert_runs_as_without_it(tmp_path, "-m", "package.train", "--an-option")


def test_a_script_that_does_not_exist_is_named(tmp_path):
    command = [sys.executable, GUARD, "absent.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"guard.py: error: there is no absent.py in {tmp_path}\n"


FORK = """
import os, sys
child = os.fork()
if not child:
    {end}
_, status = os.waitpid(child, 0)
print("code", os.waitstatus_to_exitcode(status), flush=True)
os.{call}
"""


@pytest.mark.parametrize(
    ("end", "code", "call", "count"),
    [
        ("raise ValueError('no')", 1, "execv('/bin/true', ['true'])", 1),
        ("sys.exit(0)", 0, "execlp('/bin/true', 'true')", 1),
        ("os.execv('/bin/true', ['true'])", 0, "posix_spawn('/bin/true', ['true'], {})", 0),
    ],
)
def test_a_fork_is_not_taken_for_the_rank_and_a_program_in_its_place_is_not_watched(
    tmp_path, end, code, call, count
):
    (tmp_path / "my_train.py").write_text(FORK.replace("{end}", end).replace("{call}", call))
    failure = tmp_path / "failure"
    result = run(2, tmp_path / "my_train.py", env={"FAILURE_FILE": failure})
    assert result.codes == [0, 0], result.err
    assert all(f"code {code}\n" in out for out in result.out)
    assert not failure.exists()
    assert [text.count("which is not watched") for text in result.err] == [count, count]


# ------------------------------------------------------------------------------ launch environment

INTERACTIVE = BATCH_SHELL | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
STEP = SRUN_STEP | {"MASTER_ADDR": "node01"}
BY_TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
BY_TORCHRUN["TORCHELASTIC_RUN_ID"] = "none"
LEFT_OVER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE = (0, 0, 1, 1)


def ranks(env: dict[str, str]) -> tuple[int, ...]:
    """(rank, local rank, world size, ranks per node); checks that they are also set in env."""
    env = dict(env)
    world = guard.launch_environment(env)
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    assert [str(world[name]) for name in names] == [env[name] for name in names]
    return tuple(world[name] for name in names)


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, ALONE),
        (BY_TORCHRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, (5, 1, 8, 4)),
        (STEP, (3, 1, 4, 2)),
        (STEP | BY_TORCHRUN, (5, 1, 8, 4)),
        (STEP | LEFT_OVER, (3, 1, 4, 2)),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, (3, 1, 4, 3)),
        (BATCH_SHELL, ALONE),
        (BATCH_SHELL | {"SLURM_STEP_ID": "-5"}, ALONE),  # Slurm 26.05
        (dict.fromkeys(["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID"], ""), ALONE),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 1, 8, 2)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": ""}, (3, 0, 8, 1)),
        (INTERACTIVE, ALONE),
        (INTERACTIVE | {"SLURM_PTY_PORT": "41555"}, ALONE),
    ],
)
def test_ranks_come_from_torchrun_else_from_an_srun_step(env, expected):
    assert ranks(env) == expected


def test_a_shell_of_srun_pty_is_one_process_but_srun_within_it_is_not(monkeypatch):
    shell = STEP | {"SLURM_PTY_PORT": "43587"}
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    assert ranks(shell) == ALONE
    monkeypatch.setattr(os, "isatty", lambda fd: False)
    assert ranks(shell) == (3, 1, 4, 2)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (BY_TORCHRUN | {"MASTER_PORT": "many"}, "MASTER_PORT is 'many', not a number from 1 to"),
        (BY_TORCHRUN | {"RANK": "abc"}, "RANK is 'abc', not a number from 0 to 7"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK is '5', not a number from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a number from 1 to "),
        (BY_TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_WORLD_SIZE is '4', not a number from 5 to"),
        ({"RANK": "1"}, "WORLD_SIZE is '', not a number from 1 to"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started this without RANK"),
    ],
)
def test_a_launch_variable_that_is_wrong_is_named(monkeypatch, capsys, env, text):
    monkeypatch.setattr(report, "PROGRAM", "guard.py")  # else it is pytest
    with pytest.raises(SystemExit, match="2"):
        guard.launch_environment(dict(env))
    printed = capsys.readouterr().err
    assert printed.startswith(f"guard.py: error: {text}") and printed.count("\n") == 1


# ----------------------------------------------------------------------------- ranks of a training


def write(directory, fault: str = "pass"):
    directory.mkdir(exist_ok=True)
    script = directory / "my_train.py"
    script.write_text(DDP_SCRIPT.replace("# HERE", fault))
    return script


def run(count, script, *arguments, env=None, **more):
    """Run the script with guard.py on that number of ranks."""
    variables = {"RANK_TIMEOUT": "60", "HANG_TIMEOUT": "60"}

    def env_of(rank) -> dict:
        return variables | (env(rank) if callable(env) else env or {})

    return run_ranks(count, GUARD, script, *arguments, env=env_of, **more)


def srun(size: int, **more):
    """The environment of an srun step on this host, in which rank 0 serves the store."""
    port = free_port()

    def env(rank) -> dict:
        step = {"SLURM_JOB_ID": 17, "SLURM_STEP_ID": 2, "SLURM_STEP_NUM_TASKS": size}
        step |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_TASKS_PER_NODE": size}
        return NO_LAUNCHER | step | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more

    return env


def refused(result) -> str:
    """What rank 0 prints; the others only exit."""
    assert result.codes[0] == 2, "\n".join(result.out + result.err)
    assert set(result.codes) <= {2, -signal.SIGTERM}
    assert result.err[0].startswith("guard.py: error: ") and result.err[0].count("\n") == 1
    assert not any(result.err[1:]) and "ends" not in "".join(result.out)
    return result.err[0].removeprefix("guard.py: error: ").rstrip("\n")


# -------------------------------------------------------------------------------------- rank check


def test_a_rank_with_another_pytorch_is_named(tmp_path):
    other = "import os, torch\nif os.environ['RANK'] == '1': torch.__version__ = '2.6.0'"
    text = refused(run(3, write(tmp_path), before=other))
    assert text.startswith(f"PyTorch differs: 2.6.0 for rank 1 on {HOST}, 2.")


def test_scripts_and_config_files_are_compared_and_results_are_not(tmp_path, monkeypatch):
    infos = []
    for directory in (tmp_path / "a", tmp_path / "b"):
        write(directory)
        monkeypatch.chdir(directory)
        (directory / "c.yaml").write_text(f"name: {directory.name}")
        (directory / "results.json").write_text(directory.name)  # of the last run, on one node
        infos.append(guard.rank_info(["my_train.py", "--config=c.yaml", "--results=results.json"]))
    text = guard.find_problem(infos, 300)
    assert text.startswith("file c.yaml differs: ") and f"for rank 1 on {HOST}, " in text
    assert len(list(guard.find_differences(infos))) == 1


@pytest.mark.parametrize(
    ("variables", "cores", "bound"),
    [
        ({"TORCHELASTIC_RUN_ID": "r"}, 10, [[4, 5]]),
        ({"SLURM_STEP_ID": "0", "SLURM_CPU_BIND_TYPE": "none"}, 8, [[4, 5]]),  # our launcher
        ({"SLURM_STEP_ID": "0", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, 8, []),  # this task's
        ({"TORCHELASTIC_RUN_ID": "r"}, 3, []),
    ],
)
def test_a_rank_gets_its_share_of_the_cores_unless_srun_has_bound_it(
    monkeypatch, variables, cores, bound
):
    calls = []
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, share: calls.append(share))
    guard.choose_cores({"LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4})
    assert calls == ([] if report.has_gpu() else bound)


def info(host="node01", **same) -> dict:
    return {"host": host, "same": {"PyTorch": "2.15.0"} | same}


def test_a_problem_is_a_sentence_with_ranks_and_hosts():
    good = [info(), info(), info("node02"), info("node02")]
    assert guard.find_problem(good, 300) == ""
    assert guard.find_problem([*good[:2], None, None], 300) == (
        "ranks 2-3 of 4 did not start within 300 s: see their logs, or raise RANK_TIMEOUT "
        "(started: ranks 0-1 on node01)"
    )
    old = info("node02", PyTorch="2.6.0")
    assert guard.find_problem([*good[:2], old, old], 300) == (
        "PyTorch differs: 2.6.0 for ranks 2-3 on node02, 2.15.0 for rank 0"
    )


def test_a_host_is_odd_if_most_others_are_equal():
    old = info("node01", PyTorch="2.6.0")
    assert guard.odd_hosts([old, info("node02"), info("node03")]) == ["node01"]
    assert guard.odd_hosts([old, old, old, info("node02")]) == []  # two hosts: one of them
    assert guard.odd_hosts([info(), info("node02")]) == []


@pytest.mark.parametrize("python", ["python3.6", "python3.8", sys.executable])
def test_a_shell_script_writes_the_failure_file_whatever_characters_it_has(tmp_path, python):
    path = shutil.which(python)
    if not path or subprocess.run([path, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no {python} here")
    reason = 'module load "cuda/12.8" has failed: C:\\ \n ü'
    command = [path, REPO / "scripts/report.py", "configuration", reason, "n7"]
    for attempt in ({}, {"STOP_FILE": "/none"}):
        env = os.environ | {"FAILURE_FILE": str(tmp_path / "failure"), **attempt}
        subprocess.run(command, env=env, check=True)
    for name in ("failure", "failure.n7"):
        written = json.loads((tmp_path / name).read_text())
        assert abs(written.pop("time") - time.time()) < 60
        assert abs(written.pop("written") - time.time()) < 60
        expected = {"cause": "configuration", "reason": reason, "host": "n7", "hosts": ["n7"]}
        assert written == expected


def test_the_failure_file_is_never_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setenv("FAILURE_FILE", str(tmp_path / "failure"))
    monkeypatch.setenv("STOP_FILE", str(tmp_path / "stop"))
    for name in ("failure", "stop"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    report.write_failure("exception", "text")
    report.write_stop(signal.SIGTERM)
    report.write_event("training", "text")  # without EVENTS_FILE
    assert not (tmp_path / "precious").exists()


def test_a_stop_does_not_wait_for_a_slow_disk(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "stop")
    monkeypatch.setattr(report, "write_stop_now", lambda _: (tmp_path / "stop").write_text("x"))
    report.write_stop(signal.SIGTERM)  # would hang for ever
    (tmp_path / "stop").read_text()


def test_what_never_comes_is_asked_for_less_and_less(monkeypatch):
    clock = [0.0]
    times = []

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    store = SimpleNamespace(check=lambda _keys: times.append(clock[0]))
    assert report.wait_for(store, "key", 300) is None
    assert len(times) < 120 and times[5] < 1 and times[-1] == 300


UNCHANGED = """if step == 0 and os.environ["GUARD"] != "1":
            import faulthandler, signal, sys, threading
            assert not faulthandler.unregister(signal.SIGQUIT)
            assert threading.active_count() == 1 and "hang" not in sys.modules
            assert torch.save.__module__ == "torch.serialization"
"""


@pytest.mark.parametrize("value", ["0", "check", "1"])
def test_a_script_for_torchrun_runs_in_an_srun_step_and_guard_decides_what_is_changed(
    tmp_path, value
):
    result = run(2, write(tmp_path, UNCHANGED), env=srun(2, GUARD=value))
    assert result.codes == [0, 0], result.err
    assert result.out[0].startswith(f"guard.py: ranks 0-1 on {HOST}\n") == (value != "0")
    assert result.out[1] == "rank 1 of 2 ends\n"


# ---------------------------------------------------------------- launches that fail or hang

INIT_SCRIPT = """
import os, time
import torch.distributed as dist

if os.environ["RANK"] == "1":
    time.sleep(1000)
dist.init_process_group("gloo")
"""
WORKS_ALONE = """if step == 5:
            dist.barrier()
            if rank == 0:
                time.sleep(30)
                open("evaluated", "w").close()
            while not os.path.exists("evaluated"):
                time.sleep(0.1)
"""
OUTPUT_CLOSED = """if step == 5:
            read, write = os.pipe()
            os.close(read)
            os.dup2(write, 2)
            time.sleep(1000 if rank == 1 else 0)
"""
STOP = "step == 5 and rank == {} and os.kill(os.getpid(), 19)"  # SIGSTOP


class Launch(NamedTuple):
    """A launch of three ranks, if nothing else is said."""

    fault: str = "pass"
    script: str = DDP_SCRIPT
    ranks: tuple = (0, 1, 2)
    env: dict = {}


HANGS = {
    "busy": Launch("step == 5 and rank == 1 and time.sleep(1000)"),
    "rank 1 stopped": Launch(STOP.format(1)),
    "rank 0 and the store stopped": Launch(STOP.format(0), env={"MASTER_PORT": "by rank 0"}),
    "not initialized": Launch(script=INIT_SCRIPT),
    "works alone": Launch(WORKS_ALONE),
    "output closed": Launch(OUTPUT_CLOSED),
}
FAILURES = {
    "has ended": Launch("if step == 5 and rank == 1: break"),
    "not started": Launch(env={"WORLD_SIZE": 5, "RANK_TIMEOUT": 30}),
    "no rank 0": Launch(ranks=(1,), env={"RANK_TIMEOUT": 20}),
    "unknown master": Launch(ranks=(1,), env={"MASTER_ADDR": "a.invalid", "RANK_TIMEOUT": 20}),
    "port in use": Launch(ranks=(0, 1), env={"RANK_TIMEOUT": 20, "MASTER_PORT": "taken"}),
}
LAUNCHES = {**FAILURES, **(HANGS if hang.has_recorder() else {})}


@pytest.fixture(scope="module")
def launches(tmp_path_factory) -> dict[str, Result]:
    """How the launches have ended: at the same time, because a hang takes half a minute."""
    root = tmp_path_factory.mktemp("launches")
    members = []  # (launch, rank, its environment)
    taken = socket.create_server(("", 0))
    ports = {"taken": taken.getsockname()[1], "by rank 0": free_port()}
    servers = []
    for name, launch in LAUNCHES.items():
        directory = root / name
        directory.mkdir()
        script = launch.script.replace("# HERE", launch.fault)
        (directory / "my_train.py").write_text(script)
        servers.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        common = {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": servers[-1].port}
        common |= {"RANK_TIMEOUT": 90, "HANG_TIMEOUT": 20, "DIRECTORY": directory}
        common |= {"FAILURE_FILE": directory / "failure"} | launch.env
        if common["MASTER_PORT"] in ports:  # where rank 0 serves the store
            common["MASTER_PORT"] = ports[common["MASTER_PORT"]]
            common["TORCHELASTIC_USE_AGENT_STORE"] = None
        for rank in launch.ranks:
            members.append((name, rank, common | {"RANK": rank, "LOCAL_RANK": rank}))

    def join_all(processes):  # no rank is ended because one of another launch has failed
        is_stopped = [name.startswith(f"rank {rank}") for name, rank, _ in members]
        for process, stopped in sorted(zip(processes, is_stopped), key=lambda pair: pair[1]):
            if stopped:  # after the others have ended: as torchrun and srun do
                process.kill()
            process.join(120)

    before = "import os; os.chdir(os.environ['DIRECTORY'])"
    count = len(members)
    done = run_ranks(
        count, GUARD, "my_train.py", env=lambda n: members[n][2], before=before, during=join_all
    )
    taken.close()
    results = {name: Result([], [], [], root / name) for name in LAUNCHES}
    for number, (name, _, _) in enumerate(members):
        results[name].codes.append(done.codes[number])
        results[name].out.append(done.out[number])
        results[name].err.append(done.err[number])
    return results


def failure_of(result: Result) -> dict:
    return json.loads((result.directory / "failure").read_text())


def test_ranks_that_do_not_start_are_named(launches):
    assert refused(launches["not started"]).startswith("ranks 3-4 of 5 did not start within 30 s: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no rank 0", f"rank 1 on {HOST} waited 20 s for rank 0: see its log"),
        ("unknown master", f"rank 1 on {HOST} cannot reach a.invalid:"),
        ("port in use", f"rank 1 on {HOST} cannot reach 127.0.0.1:"),
    ],
)
def test_a_rank_that_does_not_reach_rank_zero_says_why(launches, name, text):
    result = launches[name]
    assert result.codes[-1] == 2
    last = result.err[-1].splitlines()[-1]  # PyTorch may print lines of its own before it
    assert last.startswith(f"guard.py: error: {text}"), result.err
    assert ("EADDRINUSE" in result.err[0]) == (name == "port in use")
    failure = failure_of(result)
    assert failure["cause"] == ("node lost" if name == "no rank 0" else "port")
    assert "hosts" not in failure  # no answer in time is no evidence


def test_a_rank_whose_script_has_ended_is_named_by_those_that_wait_for_it(launches):
    result = launches["has ended"]
    assert result.codes == [1, 0, 1], result.err
    text = failure_of(result)["reason"]
    line = rf"waits in main\(\) at my_train.py:\d+ for rank 1 on {HOST}, where the script has ended"
    assert re.search(line, text) and text in result.err[0] + result.err[2]


def test_a_rank_of_another_job_is_not_taken_for_one_of_this_job(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    world = {"MASTER_PORT": free_port(), "RANK": 0}
    stores = []
    for attempt in ("7.1", "7.1", "8.1"):
        monkeypatch.setenv("ATTEMPT_ID", attempt)
        stores.append(guard.open_store({**world, "RANK": len(stores)}, 5))
    stores[0].set("rank 0", "here")
    assert [store.check(["rank 0"]) for store in stores] == [True, True, False]


@needs_recorder
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("busy", "rank 1 on {host} is late; the others wait at collective "),
        ("not initialized", "rank 1 on {host} is not in a function of torch.distributed"),
        ("output closed", "rank 1 on {host} is late"),  # as after the end of `tee`
        ("rank 1 stopped", "rank 1 on {host} does not answer; the others wait at "),
        ("rank 0 and the store stopped", "rank 0 on {host} or its torchrun does not answer; the "),
    ],
)
def test_a_hang_names_the_rank_at_fault_and_leaves_nothing_running(launches, name, text):
    result = launches[name]
    stopped = [rank for rank in (0, 1) if name.startswith(f"rank {rank}")]
    assert result.codes == [-signal.SIGKILL if rank in stopped else 1 for rank in range(3)]
    written = failure_of(result)
    assert written["cause"] == "hang"
    assert written["reason"].startswith(f"hang: {text.format(host=HOST)}"), written
    for rank in {0, 1, 2} - set(stopped) if name != "output closed" else ():
        assert "all stacks\n" in result.err[rank] and "my_train.py" in result.err[rank]
    is_certain = stopped and "store" not in name
    assert written["hosts"] == ([HOST] if is_certain else [])
    if not stopped:
        assert "; rank 1 is " in written["reason"] and " at my_train.py:" in written["reason"]


@needs_recorder
def test_a_rank_that_works_alone_is_not_a_hang_while_nobody_waits(launches):
    """Rank 0 evaluates for longer than HANG_TIMEOUT; the others poll a file meanwhile."""
    result = launches["works alone"]
    assert result.codes == [0, 0, 0], result.err
    assert all("ends" in out for out in result.out)


# ---------------------------------------------------------- hang verdict: positions and recorders


def note(enqueued: int, completed: int, name="nccl2:all_reduce [[55]]", started=-1) -> dict:
    """What a rank writes to the store. It waits if a collective is incomplete."""
    waits = name if enqueued > completed else ""
    names = {str(completed + 1): name} if waits else {}
    group = {"enqueued": enqueued, "completed": completed, "started": started, "names": names}
    return {"quiet": 540, "waits": waits, "groups": {"nccl2 0": group}}


@pytest.fixture
def store():
    """A real store, whose server is in this process."""
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)


def watch_of(rank: int, size: int, store):
    """What a rank has after the rank check, without its threads: all are on this host."""
    watch = hang.HangWatch.__new__(hang.HangWatch)
    watch.rank = rank
    watch.size = size
    watch.store = store
    watch.infos = [{"host": HOST}] * size
    watch.quiet = 540.0
    return watch


@pytest.mark.parametrize("state", ["answers", "does not answer", "has ended"])
def test_one_rank_reports_the_notes_of_those_that_answer(store, monkeypatch, capsys, state):
    monkeypatch.setattr(hang, "POLL", -2)  # wait 1 s for the notes
    watches = [watch_of(rank, 4, store) for rank in range(4)]
    if state == "has ended":
        store.append("ended", "0 ")
    first = 0 if state == "answers" else 1
    with ThreadPoolExecutor() as pool:
        for watch in watches[first:]:
            watch.publish(watch.own_note())
        assert all(pool.map(lambda watch: watch.collect(), watches[first:]))
    (line,) = capsys.readouterr().err.splitlines()
    assert (f"rank 0 on {HOST} {state}; " in line) == bool(first)


def verdict(notes) -> str:
    usual, at_fault = hang.find_fault(dict(enumerate(notes)))
    return hang.where_ranks_are(usual, at_fault, [{"host": f"n{rank}"} for rank in range(9)])


AHEAD = [note(1040, 1000), note(1043, 1000), note(1000, 1000), note(1043, 1000)]
OTHER_NAME = note(11, 10, name="nccl2:broadcast [[7]]")
NOT_RECORDED = {"quiet": 540, "waits": "init_process_group", "groups": {}}


def chain() -> list[dict]:
    """Ranks 0 and 1, 1 and 2 share a group. Rank 2 is busy, so that 1 waits, so that 0 waits."""
    notes = [note(5, 4), note(4, 4), note(8, 8)]
    notes[1]["waits"] = "all_reduce"
    notes[1]["groups"]["nccl2 1"] = note(9, 8)["groups"]["nccl2 0"]
    notes[2]["groups"] = {"nccl2 1": notes[2]["groups"]["nccl2 0"]}
    return notes


def group_of_two() -> list[dict]:
    """In a group of ranks 1 and 2, the GPU of rank 1 has not started."""
    notes = [note(12, 12), note(12, 12), note(12, 12)]
    for rank in (1, 2):
        notes[rank]["groups"]["nccl2 1"] = note(5, 4, started=3 + rank)["groups"]["nccl2 0"]
        notes[rank]["waits"] = "all_reduce"
    return notes


AT_11 = "at collective 11 (nccl2:all_reduce [[55]])"


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        # The hosts of the others run ahead of their GPUs by different numbers of collectives.
        (AHEAD, "rank 2 on n2 is late; the others wait at collective 1001 (nccl2:all_reduce"),
        # The root of a broadcast completes it before the other ranks do.
        ([note(12, 11), note(11, 9), note(9, 9)], "rank 2 on n2 is late; the others wait at col"),
        ([note(41, 40), note(11, 10), note(11, 10)], f"all ranks wait {AT_11}: check the network"),
        ([note(20, 10), note(14, 10), note(11, 10)], f"all ranks wait {AT_11}: check the network"),
        (
            [note(20, 10, started=11), note(14, 10, started=10), note(11, 10, started=11)],
            f"rank 1 on n1 is {AT_11}, which its GPU has not started; the others wait {AT_11}",
        ),
        (
            [note(20, 10), note(11, 10), OTHER_NAME],
            f"rank 2 on n2 is at collective 11 (nccl2:broadcast [[7]]); the others wait {AT_11}",
        ),
        (chain(), "rank 2 on n2 is late; the others wait at collective 9 "),
        (group_of_two(), "rank 1 on n1 is at collective 5 (nccl2:all_reduce [[55]]), which its "),
        (
            [NOT_RECORDED, NOT_RECORDED | {"waits": ""}, NOT_RECORDED],
            "rank 1 on n1 is not in a function of torch.distributed; the others wait in init_",
        ),
        ([NOT_RECORDED, NOT_RECORDED], "all ranks wait in init_process_group: check the network"),
    ],
)
def test_the_verdict_names_the_rank_for_which_the_others_wait(notes, text):
    assert verdict(notes).startswith(text)


def test_other_sizes_in_a_gather_are_no_other_collective():
    entry = {"profiling_name": "nccl2:all_to_all"}
    assert hang.name_of_entry(entry | {"input_sizes": [[5]]}) == "nccl2:all_to_all"


def hosts_to_blame(notes, silent=()) -> list[str]:
    infos = [{"host": f"n{rank}"} for rank in range(4)]
    _, at_fault = hang.find_fault(dict(enumerate(notes)))
    return hang.hosts_to_blame(at_fault | dict(silent), infos)


def test_a_host_is_blamed_for_its_silence_or_its_gpu_and_not_for_its_script():
    at_work = [note(11, 10), note(10, 10), note(11, 10)]
    assert hosts_to_blame(at_work) == []
    assert hosts_to_blame(at_work, {3: "does not answer"}) == ["n3"]
    assert hosts_to_blame(at_work, {3: "has ended"}) == []
    assert hosts_to_blame([note(11, 10, started=11), note(11, 10, started=10)]) == ["n1"]


def lines(at_fault, *own) -> list[str]:
    return hang.lines_of_ranks({rank: {"line": line} for rank, line in enumerate(own)}, at_fault)


def test_ranks_are_grouped_by_the_lines_of_the_script_those_at_fault_first():
    save, validate = "in save() at train.py:120", "in validate() at train.py:88"
    expected = [f"rank 2 is {save}", f"ranks 0-1,3 are {validate}"]
    assert lines([2], validate, validate, save, validate) == expected
    assert lines([], validate, validate, save, validate) == expected  # the odd one
    assert lines([1], validate, save) == [f"rank 1 is {save}", f"rank 0 is {validate}"]
    assert lines([], "", save) == [f"rank 1 is {save}"]
    texts = lines([], *[f"at train.py:{rank % 8}" for rank in range(64)])
    assert len(texts) == 5 and texts[-1] == "others are elsewhere"


def test_the_line_is_the_innermost_one_of_the_script_s_own_directory(monkeypatch):
    """Not in a library, which may be in a virtual environment there; nor in guard.py's files."""
    files = [torch.__file__, "/run/.venv/lib/python3.11/site-packages/lightning/fit.py"]
    files += [hang.__file__, "/run/src/model.py", "/run/train.py", "<frozen runpy>"]
    codes = [SimpleNamespace(co_filename=file, co_name="forward") for file in files]
    frames = [SimpleNamespace(f_code=code, f_lineno=7) for code in codes]
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__="/run/train.py"))
    assert hang.line_in_script(frames) == "in forward() at src/model.py:7"
    del frames[3:5]
    assert hang.line_in_script(frames) == ""


@pytest.mark.parametrize("value, gpus, shared", [("1", 1, True), ("1", 2, False), ("0", 1, False)])
def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl(monkeypatch, value, gpus, shared):
    monkeypatch.setenv("SHARE_GPU", value)
    monkeypatch.setattr(guard.node_check, "count_gpus", lambda: gpus)
    ids = set()
    for rank in (0, 1):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        guard.share_gpu({"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2})
        ids.add(os.environ.get("NCCL_HOSTID"))
    assert ids == ({f"{HOST}-0", f"{HOST}-1"} if shared else {None})


def test_the_limit_is_that_of_the_group_in_which_the_rank_waits(monkeypatch):
    watch = object.__new__(hang.HangWatch)
    watch.fixed_timeout, watch.quiet = None, 60.0
    assert watch.timeout() == math.inf  # init_process_group() has a timeout and an error
    for timeout, limit in ((None, 1620), (timedelta(hours=2), 6480)):
        store = dist.HashStore()
        dist.init_process_group("gloo", timeout=timeout, rank=0, world_size=1, store=store)
        assert watch.timeout() == limit
        dist.destroy_process_group()
    monkeypatch.setattr(hang, "pending", lambda: [{"timeout_ms": 60_000}, {"timeout_ms": None}])
    assert watch.timeout() == 54
    watch.fixed_timeout = 30.0  # HANG_TIMEOUT
    assert watch.timeout() == 30


def test_compiling_is_seen_on_the_stack():
    seen = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda *_: seen.append(hang.is_compiling()))
    with suppress(Exception):  # a backend must return a function
        compiled(torch.ones(2))
    assert seen == [True]
    assert not hang.is_compiling()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_the_stack_of_the_main_thread_is_read(
    monkeypatch, is_enabled
):
    """With it, Python may deadlock: https://github.com/python/cpython/issues/106883"""
    seen = []
    frames = {threading.main_thread().ident: sys._getframe()}
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or frames)
    (gc.enable if is_enabled else gc.disable)()
    hang.is_compiling()
    after = gc.isenabled()
    gc.enable()
    assert (seen, after) == ([False], is_enabled)


@pytest.mark.parametrize("value", ["nan", "-1", "1e30", "soon"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(value, monkeypatch, capsys):
    monkeypatch.setenv("RANK_TIMEOUT", value)
    with pytest.raises(SystemExit, match="2"):
        report.seconds("RANK_TIMEOUT", 300)
    assert f"error: RANK_TIMEOUT is '{value}', not a number of seconds\n" in capsys.readouterr().err


def test_a_position_counts_from_the_entries_of_the_recorder():
    """As printed by PyTorch 2.15 for nccl2, whose pg_status counts from 0."""
    entry = {"pg_id": 0, "profiling_name": "nccl2:all_reduce", "input_sizes": [[55]]}
    entries = [entry | {"collective_seq_id": n, "retired": n <= 9} for n in range(1, 13)]
    entries = [each | {"state": "scheduled"} for each in entries]
    statuses = {"0": {"last_completed_collective": "8", "last_started_collective": "-1"}}
    expected = {"enqueued": 12, "completed": 9, "started": -1}
    expected["names"] = {"10": "nccl2:all_reduce [[55]]"}
    assert hang.position(entries, statuses) == expected
    assert hang.position([], {}) == {"enqueued": 0, "completed": 0, "started": -1, "names": {}}


@pytest.mark.parametrize(("quiet", "requests"), [(0, ["check"]), (7, ["check", "add"])])
def test_only_a_rank_without_progress_asks_whether_others_compile(quiet, requests):
    asked = []
    watch = object.__new__(hang.HangWatch)
    watch.quiet, watch.found = quiet, threading.Event()
    watch.over = SimpleNamespace(wait=lambda _seconds: bool(asked))
    watch.store = SimpleNamespace(
        check=lambda _: asked.append("check"), add=lambda *_: asked.append("add")
    )
    watch.poll()
    assert asked == requests


# ---------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("error", "cause", "reason"),
    [
        (RuntimeError("no\n  more"), "exception", "RuntimeError: no more"),
        (MemoryError(), "out of memory", "MemoryError: "),
        (OSError("can't allocate memory"), "out of memory", "OSError: can't allocate memory"),
        (SystemExit(3), "exception", "exit code 3"),
        (SystemExit(2), "configuration", "exit code 2"),
    ],
)
def test_an_error_has_a_cause_and_a_reason(error, cause, reason):
    assert guard.cause_and_reason(error) == (cause, reason)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("e = ValueError('lower it'); e.cause = 'NaN'; raise SystemExit(2) from e", "NaN"),
        ("raise SystemExit(2) from ModuleNotFoundError('lower it')", "configuration"),
        ("raise SystemExit('lower it')", "exit"),
        ("raise SystemExit(0)", None),
    ],
)
def test_a_script_may_say_why_it_exits(tmp_path, code, cause):
    (tmp_path / "my_train.py").write_text(code)
    failure = tmp_path / "failure"
    env = os.environ | {"FAILURE_FILE": str(failure)}
    subprocess.run([sys.executable, GUARD, tmp_path / "my_train.py"], env=env, capture_output=True)
    assert failure.exists() == bool(cause)
    if cause:
        expected = {"cause": cause, "reason": "lower it", "rank": 0, "host": HOST}
        assert json.loads(failure.read_text()).items() >= expected.items()


NCCL = "NCCL error in: /torch/NCCLUtils.cpp:77, {}\n{}: A call failed.\nLast error:\n{}\n"
NCCL += "Exception raised from create at ...\nframe #0"
NCCL_2 = "NCCL AllReduce failed: {} \nNCCL Last Error: {}\n"
GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:547] "
BACKEND, NETWORK, OTHER = "DistBackendError", "DistNetworkError", "RuntimeError"


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        (BACKEND, NCCL.format("remote process exited or", "ncclRemoteError", ""), ""),
        (BACKEND, NCCL.format("system error", "ncclSystemError", "Connection closed by peer"), ""),
        (BACKEND, "NCCL communicator was aborted on rank 1. ", ""),
        (BACKEND, "by key '0', but store->get('0') got error: Connection reset by peer", ""),
        (NETWORK, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote", ""),
        (OTHER, NCCL_2.format("remote process exited or there was a network error", "?"), ""),
        (OTHER, GLOO + "Connection closed by peer [127.0.0.1]:4711", ""),
        (OTHER, GLOO + "writev [127.0.0.1]:4711: Broken pipe", ""),
        (OTHER, GLOO + "Read error [10.0.0.1]:4711: No route to host", ""),
        (BACKEND, NCCL.format("system error", "ncclSystemError", "no interface"), "exception"),
        (BACKEND, NCCL.format("cuda error", "", "Cuda failure 2 'out of memory'"), "out of memory"),
        (OTHER, NCCL_2.format("internal error", "Cuda failure 719 'unspecified'"), "exception"),
        (OTHER, GLOO + "Timed out waiting 1800000ms", "exception"),
        (OTHER, "CUDA error: out of memory", "out of memory"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "exception"),  # script's
    ],
)
def test_a_lost_connection_is_the_failure_of_another_rank(name, text, cause):
    error = type(name, (Exception,), {})(text)
    assert guard.has_lost_rank(error) == (not cause)
    own_cause, reason = guard.cause_and_reason(error)
    assert cause in ("", own_cause) and "\n" not in reason and "raised from" not in reason
    assert "Last error" not in text or text.split("\n")[3] in reason


ECC_ERROR = "CUDA error: uncorrectable ECC error encountered"
OTHER_ERROR = "CUDA error: device-side assert triggered"
ECC = {"ecc.errors.uncorrected.volatile.total": "2"}
RESET = {"memory.used": "[GPU requires reset]"}
XID_79 = "Unable to determine the device handle for GPU0: 0000:3B:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("error", "facts", "smi", "fault"),
    [
        (ECC_ERROR, ECC, {}, "GPU 1 has failed (2 uncorrected memory errors)"),
        (OTHER_ERROR, RESET, {}, "GPU 1 has failed ([GPU requires reset])"),
        (OTHER_ERROR, {}, {"fails": XID_79}, XID_79),
        (OTHER_ERROR, {}, {"hangs": True}, "does not answer"),
        # No evidence: the script's own fault, or something that the driver does not know.
        (OTHER_ERROR, {}, {}, ""),
        (ECC_ERROR, {"ecc.errors.uncorrected.volatile.total": "[N/A]"}, {}, ""),
        (OTHER_ERROR, ECC, {}, ""),  # the driver may have counted it long ago
        (OTHER_ERROR, {}, {"fails": "Failed to initialize NVML: Unknown Error"}, ""),  # a container
        ("CUDA out of memory", RESET, {}, ""),
        ("index 7 is out of bounds", RESET, {}, ""),
    ],
)
def test_after_a_cuda_error_a_fault_of_a_gpu_is_reported(
    tmp_path, monkeypatch, error, facts, smi, fault
):
    """nvidia-smi is a stand-in."""
    events = tmp_path / "events"
    monkeypatch.setenv("EVENTS_FILE", str(events))
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, [gpu(0), gpu(1, **facts)], **smi))
    monkeypatch.setattr(guard.node_check, "SMI_SECONDS", 0.3 if "hangs" in smi else 10)
    monkeypatch.setattr(guard.node_check.report, "has_gpu", lambda: True)
    guard.report_error(RuntimeError(error), 3, None)
    assert events.exists() == bool(fault)
    if fault:
        event = json.loads(events.read_text())  # one line
        assert (event["event"], event["host"]) == ("gpu_failed", HOST)
        assert fault in event["text"]


def test_the_first_failure_is_kept_and_a_rank_that_lost_another_exits_later(tmp_path):
    failure, pipe = tmp_path / "failure", tmp_path / "pipe"
    os.mkfifo(pipe)
    fault = f"""if rank == 1 and step == 5: raise OSError('the disk is gone')
        if step == 5: time.sleep = lambda _: open({str(pipe)!r}).close()  # ends with a writer"""

    def during(processes):
        processes[1].join(60)
        assert processes[0].is_alive()
        writer = os.open(pipe, os.O_RDWR)
        processes[0].join(60)
        os.close(writer)

    result = run(2, write(tmp_path, fault), env={"FAILURE_FILE": failure}, during=during)
    assert result.codes == [1, 1]
    assert result.err[1].endswith("OSError: the disk is gone\n")
    assert f"guard.py: rank 0 on {HOST}: another rank exited (" in result.err[0]
    written = json.loads(failure.read_text())
    assert (written["cause"], written["rank"]) == ("exception", 1)
    assert written["reason"] == "OSError: the disk is gone"


def test_a_rank_that_the_kernel_kills_for_its_memory_is_reported_by_the_others(
    tmp_path, memory_cgroup
):
    """The cgroups are those of two tasks of a Slurm step."""
    (memory_cgroup / "memory.limit_in_bytes").write_text("2G")
    tasks = [memory_cgroup / f"step_0/task_{rank}" for rank in range(2)]
    for task in tasks:
        task.mkdir(parents=True)
    fault = "words = [b'x' * 10**7 for _ in range(500)] if rank == 1 and step == 5 else []"
    failure = tmp_path / "failure"

    def env(rank) -> dict:
        return {"FAILURE_FILE": failure, "GROUP": tasks[rank]}

    before = "import os; open(os.environ['GROUP'] + '/cgroup.procs', 'w').write('0')"  # itself
    result = run(2, write(tmp_path, fault), env=env, before=before)
    assert result.codes[1] == -signal.SIGKILL
    written = json.loads(failure.read_text())
    assert written["cause"] == "out of memory" and "rank" not in written


# ------------------------------------------------------------------------------ stop signals

STOPPED = """
import os, signal, sys, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1000)
print(child, flush=True)
while not received:
    time.sleep(0.01)
os.kill(child, signal.SIGUSR2)  # ignored
time.sleep(1)
os.kill(child, signal.SIGKILL)
print(os.waitpid(child, 0)[1], flush=True)
"""


def test_in_an_srun_step_sigusr2_becomes_the_stop_signal_and_is_recorded(tmp_path):
    """supervise.py sends it through srun, which would end the step at SIGTERM."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "GUARD": "0"}
    step |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    step |= {"STOP_FILE": str(tmp_path / "stop"), "MASTER_ADDR": "localhost"}
    (tmp_path / "stopped.py").write_text(STOPPED)
    command = [sys.executable, GUARD, tmp_path / "stopped.py"]
    env = os.environ | step
    with running(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert not (tmp_path / "stop").exists()
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "9\n"
        assert process.wait(timeout=60) == 0
        process.stdout.close()
    assert (tmp_path / "stop").read_text() == "SIGUSR2"


@pytest.mark.parametrize(("ticks", "is_hang"), [([1, 1, 1000, 1], False), ([1] * 12, True)])
def test_the_time_in_which_all_ranks_were_suspended_is_no_hang(monkeypatch, ticks, is_hang):
    """After SIGCONT, the first tick of the watch has taken as long as the suspension."""
    clock = [0]

    def wait(_seconds):
        clock[0] += ticks[0] if ticks else 0
        return not ticks or not ticks.pop(0)

    watch = object.__new__(hang.HangWatch)
    watch.over, watch.found = SimpleNamespace(wait=wait), threading.Event()
    watch.steps = watch.compilations = watch.quiet = 0
    watch.timeout, watch.exit_all = lambda: 10, lambda: None
    monkeypatch.setattr(hang, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(hang, "counters", lambda: {})
    monkeypatch.setattr(hang, "waits_for", lambda: "gloo:all_reduce")
    watch.watch()
    assert watch.found.is_set() == is_hang
