"""scripts/guard.py with scripts that were not written for it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import NO_LAUNCHER, REPO, TORCHRUN, free_port, load, run_ranks, wait_until

GUARD = REPO / "scripts/guard.py"
RECORDS_GLOO = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")  # not before PyTorch 2.8
HOST = os.uname().nodename
guard = load(GUARD)

# As in PyTorch's tutorial; a test may replace `# HERE` by a fault.
DDP_SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(torch.nn.Linear(10, 5))
    loss_fn = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step in range(20):
        # HERE
        optimizer.zero_grad()
        outputs = model(torch.randn(20, 10))
        loss_fn(outputs, torch.randn(20, 5)).backward()
        optimizer.step()
    print(f"rank {rank} of {dist.get_world_size()} ends\\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

ACCELERATE_SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(10, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
data = torch.utils.data.DataLoader(torch.randn(80, 10), batch_size=20)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
print(f"rank {accelerator.process_index} of {accelerator.num_processes} ends\\n", end="")
"""

LIGHTNING_SCRIPT = """
import lightning, torch


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 5)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


if __name__ == "__main__":
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **off)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(80, 10), batch_size=20))
    print(f"rank {trainer.global_rank} of {trainer.world_size} ends\\n", end="", flush=True)
"""

WORKERS_SCRIPT = """
import torch
import torch.distributed as dist


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * index


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for method in ("fork", "spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=4, num_workers=1, multiprocessing_context=method
        )
        print(f"{method} {[batch.tolist() for batch in loader]}\\n", end="", flush=True)
        dist.barrier()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} ends\\n", end="", flush=True)
    dist.destroy_process_group()
"""

# ------------------------------------------------------------ the script runs as without guard.py

SCRIPTS = {
    "ddp": DDP_SCRIPT,
    "accelerate": ACCELERATE_SCRIPT,
    "lightning": LIGHTNING_SCRIPT,
    "loader workers": WORKERS_SCRIPT,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unmodified_script_runs_under_torchrun(tmp_path, name):
    script = tmp_path / "my_train.py"
    script.write_text(SCRIPTS[name])
    command = [*TORCHRUN, GUARD, script]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HANG_TIMEOUT": "60"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("guard.py: ranks 0-1 on ") == 1
    for rank in (0, 1):
        assert f"rank {rank} of 2 ends\n" in result.stdout
    if name == "loader workers":
        for method in ("fork", "spawn", "forkserver"):
            assert result.stdout.count(f"{method} [[0, 1, 4, 9]]\n") == 2


PRINT_SELF = """
import __main__, sys
print(__name__, __file__, __builtins__ is not None, sys.argv, sys.path[0], __main__.__file__)
print(__doc__, __package__, __main__ is sys.modules["__main__"], vars(__main__)["sys"] is sys)
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
    "its own name, file and arguments": PRINT_SELF,
    "exit 0": "import sys\nsys.exit()",
    "exit code": "raise SystemExit(3)",
    "exit with a text": "raise SystemExit('not today')",
    "exception": "def f():\n    raise ValueError('no')\n\nf()",
    "chained exceptions": "try:\n    1 / 0\nexcept Exception as e:\n    raise OSError('x') from e",
    "exception while handling one": "try:\n    {}['a']\nexcept KeyError:\n    1 / 0",
    "syntax error": "print('never')\nfor",
    "killed by itself": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "exit handlers": "import atexit\natexit.register(print, 'at exit')\nprint(undefined)",
    "a neighbour": "import neighbour\nprint(neighbour.VALUE)",
    "pickle and multiprocessing": PICKLE,
    "warning": "import warnings\nwarnings.warn('careful')",
}


def assert_runs_as_without_it(directory, *command) -> None:
    with_it, without = (
        subprocess.run([sys.executable, *more, *command], cwd=directory, capture_output=True)
        for more in ([GUARD], [])
    )
    assert (with_it.returncode, with_it.stdout) == (without.returncode, without.stdout)
    errors = [which.stderr.decode().splitlines() for which in (with_it, without)]
    # With -m, a traceback begins with frames of Python itself.
    errors = [[line for line in lines if "<frozen runpy>" not in line] for lines in errors]
    assert errors[0] == errors[1]


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_process_prints_and_exits_as_without_it(tmp_path, name):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/my_script.py").write_text(SINGLE[name])
    (tmp_path / "src/neighbour.py").write_text("VALUE = 7")
    assert_runs_as_without_it(tmp_path, tmp_path / "src/my_script.py", "--an-option", "a word")


def test_a_script_given_by_a_relative_path_runs_as_without_it(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/my_script.py").write_text(f"{PRINT_SELF}\n1 / 0")
    assert_runs_as_without_it(tmp_path, "src/my_script.py", "--an-option")


@pytest.mark.parametrize("ending", ["print('end')", "raise ValueError('no')", "exit(4)"])
def test_a_module_with_relative_imports_runs_as_without_it(tmp_path, ending):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/neighbour.py").write_text("VALUE = 7")
    text = "import sys\nfrom .neighbour import VALUE\nprint(__name__, __package__, sys.argv, VALUE)"
    (tmp_path / "package/train.py").write_text(f"{text}\n{ending}")
    assert_runs_as_without_it(tmp_path, "-m", "package.train", "--an-option")


def test_a_script_that_does_not_exist_is_named(tmp_path):
    result = subprocess.run([sys.executable, GUARD, "absent.py"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "guard.py: error: cannot read absent.py: No such file or directory\n"


# ------------------------------------------------------------------------------ launch environment

# As printed by `env` under Slurm 22.05 with two nodes.
BATCH_SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_NODEID": "0"}
INTERACTIVE = BATCH_SHELL | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
STEP = {
    **{"SLURM_JOB_ID": "17", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "2"},
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "node01"},
    **{"SLURM_STEP_NODELIST": "node[01-02]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
}
BY_TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
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
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, (3, 1, 4, 3)),
        (BATCH_SHELL, ALONE),
        (BATCH_SHELL | {"SLURM_STEP_ID": "-5"}, ALONE),
        (INTERACTIVE, ALONE),
        (INTERACTIVE | {"SLURM_PTY_PORT": "41555"}, ALONE),
    ],
    ids=[
        "none",
        "torchrun",
        "srun",
        "torchrun in srun",
        "uneven",
        "sbatch",
        "sbatch of Slurm 26.05",
        "salloc",
        "salloc pty",
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


def test_each_step_and_each_job_gets_a_port_of_its_own():
    def port(**more) -> int:
        return guard.launch_environment(STEP | more)["MASTER_PORT"]

    assert port() == port() and 15000 <= port() < 30000
    assert len({port(), port(SLURM_STEP_ID="3"), port(SLURM_JOB_ID="18")}) == 3
    assert port(MASTER_PORT="29400") == 29400
    batch = {"SLURM_JOB_ID": "17"}
    assert guard.port_of_job(batch) != guard.port_of_job(batch | {"ATTEMPT": "2"})


def test_a_variable_that_is_not_a_number_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        guard.launch_environment(BY_TORCHRUN | {"MASTER_PORT": "many"})
    assert "MASTER_PORT should be numbers" in capsys.readouterr().err


def test_the_hosts_of_a_job_come_from_slurm_or_pbs(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames rack[1-2]" ] && echo rack1 rack2')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert guard.hosts_of_job({"SLURM_JOB_NODELIST": "rack[1-2]"}) == ["rack1", "rack2"]
    slots = tmp_path / "nodes"
    slots.write_text("b\nb\na\na\n")
    assert guard.hosts_of_job({"PBS_NODEFILE": str(slots)}) == ["b", "a"]
    assert guard.hosts_of_job({}) == ["localhost"]
    command = [sys.executable, GUARD, "--hosts"]
    env = {**os.environ, "PBS_NODEFILE": str(slots)}
    assert subprocess.check_output(command, text=True, env=env) == "b\na\n"


def test_the_next_port_is_used_if_the_first_is_taken():
    with socket.socket() as taken:
        taken.bind(("", 0))
        first = guard.free_port(20000)
        taken.close()
    with socket.socket() as taken:
        taken.bind(("", first))
        taken.listen()
        command = [sys.executable, GUARD, "--free-port", str(first)]
        result = subprocess.run(command, capture_output=True, text=True)
    assert int(result.stdout) > first
    assert f"guard.py: port {first} is in use on {HOST}; trying the next one" in result.stderr


@pytest.mark.parametrize("option", ["--hosts", "--free-port"])
def test_the_launchers_questions_are_answered_on_python_3_8(option):
    """Without what Python 3.9 has added to functools. A real 3.8 is used if pyenv has one."""
    code = "import functools, runpy, sys; del functools.cache; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    commands = [[sys.executable, "-c", code, GUARD, option]]
    commands += [[p, GUARD, option] for p in Path.home().glob(".pyenv/versions/3.8.*/bin/python")]
    for command in commands:
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")


# ----------------------------------------------------------------------------- ranks of a training


def write(directory, fault: str = "pass", name: str = "my_train.py"):
    directory.mkdir(exist_ok=True)
    script = directory / name
    script.write_text(DDP_SCRIPT.replace("# HERE", fault))
    return script


def run(count, script, *arguments, env=None, **more):
    """Run the script with guard.py on that number of ranks."""
    variables = {"RANK_TIMEOUT": "30", "HANG_TIMEOUT": "30"}

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


def refused(result, *others: int) -> str:
    """What rank 0 prints; the others only exit."""
    assert result.codes[0] == 2, "\n".join(result.out + result.err)
    assert set(result.codes) <= {2, -signal.SIGTERM}
    assert result.err[0].startswith("guard.py: error: ") and result.err[0].count("\n") == 1
    assert not any(result.err[1:]) and "ends" not in "".join(result.out)
    return result.err[0].removeprefix("guard.py: error: ").rstrip("\n")


# -------------------------------------------------------------------------------------- rank check


def test_a_script_for_torchrun_runs_in_an_srun_step(tmp_path):
    result = run(3, write(tmp_path), env=srun(3))
    assert result.codes == [0, 0, 0], result.err
    assert result.out[0].startswith(f"guard.py: ranks 0-2 on {HOST}\n")
    assert [out.splitlines()[-1] for out in result.out] == [f"rank {r} of 3 ends" for r in range(3)]


def test_ranks_that_do_not_start_are_named(tmp_path):
    result = run(3, write(tmp_path), env={"WORLD_SIZE": "5", "RANK_TIMEOUT": "3"})
    text = "ranks 3-4 of 5 did not start within 3 s: see their logs (ranks that started: 0-2 on "
    assert refused(result).startswith(text + HOST)


def test_a_rank_zero_that_does_not_start_is_named(tmp_path):
    others = {"WORLD_SIZE": 3, "RANK_TIMEOUT": "3"}
    result = run(2, write(tmp_path), env=lambda rank: others | {"RANK": rank + 1})
    assert result.codes[0] == 2  # with torchrun, which serves the store
    assert f"error: rank 1 on {HOST} waited 3 s for rank 0: see its log\n" in result.err[0]

    def env(rank) -> dict:
        return srun(3, RANK_TIMEOUT="3")(rank + 1)

    began = time.monotonic()
    result = run(1, write(tmp_path), env=env)  # with srun, where rank 0 would serve it
    assert result.codes == [2] and time.monotonic() - began < 60
    assert f"error: rank 1 on {HOST} cannot reach 127.0.0.1:" in result.err[0]
    assert "did rank 0 start" in result.err[0]


def test_a_rank_with_another_pytorch_is_named(tmp_path):
    other = "import os, torch\nif os.environ['RANK'] == '1': torch.__version__ = '2.4.1'"
    text = refused(run(3, write(tmp_path), before=other))
    assert text.startswith(f"PyTorch differs: 2.4.1 for rank 1 on {HOST}, 2.")


def test_a_rank_with_another_script_or_config_file_is_named(tmp_path):
    for directory in "ab":
        write(tmp_path / directory)
        (tmp_path / directory / "c.yaml").write_text("epochs: 1")
    go = f"import os\nos.chdir({str(tmp_path)!r} + '/' + 'aab'[int(os.environ['RANK'])])"
    (tmp_path / "b/c.yaml").write_text("epochs: 2")
    text = refused(run(3, "my_train.py", "--config=c.yaml", before=go))
    assert text.startswith("file c.yaml differs: ") and f"for rank 2 on {HOST}, " in text
    write(tmp_path / "b", fault="print(step)")
    text = refused(run(3, "my_train.py", before=go))
    assert text.startswith("file my_train.py differs: ") and f"for rank 2 on {HOST}, " in text


def test_a_process_of_another_job_is_refused_and_the_job_continues(tmp_path):
    def env(rank) -> dict:
        stray = {"ATTEMPT_ID": "8.1", "WORLD_SIZE": 3}
        return stray if rank == 2 else {"ATTEMPT_ID": "7.1", "WORLD_SIZE": 2}

    result = run(3, write(tmp_path, fault="time.sleep(0.1)"), env=env)
    assert result.codes[2] == 2
    assert "error: job 8.1 has reached MASTER_PORT of job 7.1: set another" in result.err[2]
    assert "another" not in result.err[0] + result.err[1]


SMI = """#!/bin/sh
# Stands in for nvidia-smi where there is no GPU.
[ "$1" = --query-gpu=uuid ] && printf '%s\\n' {gpus}
"""


def gpus(tmp_path, *uuids: str) -> dict[str, str]:
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    smi.write_text(SMI.format(gpus=" ".join(uuids)))
    smi.chmod(0o755)
    return {"PATH": f"{smi.parent}:{os.environ['PATH']}"}


def test_ranks_that_share_a_gpu_are_named(tmp_path):
    script = write(tmp_path)
    text = f"Duplicate GPU detected: on {HOST}, ranks 0-2 share 2 visible GPUs: start as many "
    two = gpus(tmp_path, "GPU-a", "GPU-b")
    assert refused(run(3, script, env=two)).startswith(text)
    one = two | {"CUDA_VISIBLE_DEVICES": "1"}
    assert "ranks 0-1 share 1 visible GPUs" in refused(run(2, script, env=one))
    assert run(2, script, env=two).codes == [0, 0]
    by_task = srun(2)  # as with srun --gpus-per-task=1: each sees another one
    own = run(2, script, env=lambda rank: by_task(rank) | two | {"CUDA_VISIBLE_DEVICES": rank})
    assert own.codes == [0, 0], own.err


CORES = sorted(os.sched_getaffinity(0))
HALVES = CORES[: len(CORES) // 2], CORES[len(CORES) // 2 :]

NUMA = """if True:
    import os, sys
    from pathlib import Path
    sys.path.insert(0, {scripts!r})
    import guard
    os.sched_setaffinity(0, {mask})
    guard.PCI, guard.has_gpu = Path({pci!r}), lambda: True
    rank, ranks = {rank}, {ranks}
    world = dict(LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks, WORLD_SIZE=2)
    guard.configure_process(world)
    print(sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("rank", "env", "mask", "ranks", "expected"),
    [
        (0, {}, CORES, 2, HALVES[1]),
        (1, {}, CORES, 2, HALVES[0]),
        (0, {"CUDA_VISIBLE_DEVICES": "1,0"}, CORES, 2, HALVES[0]),
        (0, {"NUMA_BINDING": "0"}, CORES, 2, CORES),
        (0, {}, HALVES[0], 2, HALVES[0]),  # the scheduler has bound it elsewhere
        (0, {}, CORES, 1, CORES),  # half the cores are less than its share
        (0, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, CORES, 2, CORES),  # unknown to nvidia-smi
    ],
)
def test_a_rank_is_bound_to_the_cores_near_its_gpu(tmp_path, rank, env, mask, ranks, expected):
    """Stand-ins for nvidia-smi and for sysfs: GPU 0 is near the second half of the cores."""
    (smi := tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *query-gpu=uuid*) printf "GPU-a\\nGPU-b\\n" ;;\n'
        "*id=GPU-a*) echo 00000000:3B:00.0 ;; *id=GPU-b*) echo 00000000:D8:00.0 ;; "
        "*) echo No devices were found; exit 6 ;; esac\n"
    )
    smi.chmod(0o755)
    near = {"d8": f"{HALVES[0][0]}-{HALVES[0][-1]}", "3b": ",".join(map(str, HALVES[1]))}
    for device, cores in near.items():
        (tmp_path / f"0000:{device}:00.0").mkdir()
        (tmp_path / f"0000:{device}:00.0/local_cpulist").write_text(f"{cores}\n")
    code = NUMA.format(
        scripts=str(GUARD.parent), mask=mask, pci=str(tmp_path), rank=rank, ranks=ranks
    )
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCHELASTIC_RUN_ID": "x"} | env
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    share = len(mask) // ranks
    assert result.stdout.startswith(f"{expected} "), result.stderr
    assert int(result.stdout.split()[-1]) in (share, share + 1)


def test_a_rank_sees_one_mig_device_because_cuda_uses_only_the_first():
    code = f"import os, sys; sys.path.insert(0, {str(GUARD.parent)!r}); import guard\n"
    code += "guard.configure_process(dict(LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, WORLD_SIZE=2))\n"
    code += "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.stdout == "MIG-b\n", result.stderr


def info(host="node01", gpu="", **same) -> dict:
    return {"host": host, "gpu": gpu, "same": {"PyTorch": "2.15.0"} | same}


def test_a_problem_is_a_sentence_with_ranks_and_hosts():
    good = [info(), info(), info("node02"), info("node02")]
    assert guard.find_problem(good, 300) == ""
    assert guard.find_problem([*good[:2], None, None], 300) == (
        "ranks 2-3 of 4 did not start within 300 s: see their logs "
        "(ranks that started: 0-1 on node01)"
    )
    old = info("node02", PyTorch="2.4.1")
    assert guard.find_problem([*good[:2], old, old], 300) == (
        "PyTorch differs: 2.4.1 for ranks 2-3 on node02, 2.15.0 for rank 0"
    )
    shared = [info(gpu="A"), info(gpu="B"), info("node02", gpu="A"), info("node02", gpu="A")]
    text = "Duplicate GPU detected: on node02, ranks 2-3 share 1 visible GPUs"
    assert guard.find_problem(shared, 300).startswith(text)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "no..host"])
def test_an_unknown_master_is_named(tmp_path, name):
    env = {"MASTER_ADDR": name, "RANK_TIMEOUT": "3"}
    text = refused(run(1, write(tmp_path), env=env | {"WORLD_SIZE": 2}))
    assert text == f"MASTER_ADDR {name} is unknown on {HOST}: set it to rank 0's address"


def test_a_port_that_another_program_uses_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = srun(2, MASTER_PORT=port, RANK_TIMEOUT="1", FAILURE_FILE=tmp_path / "failure")
        result = run(1, write(tmp_path), env=env)
        assert "EADDRINUSE" in refused(result) and "is MASTER_PORT free" in result.err[0]
        result = run(1, write(tmp_path), env=lambda rank: env(1))
        assert f"error: 127.0.0.1:{port} is not a PyTorch store\n" in result.err[0]
    assert json.loads((tmp_path / "failure").read_text())["cause"] == "port"


def test_guard_0_sets_the_variables_and_runs_the_script_unchecked(tmp_path):
    same_gpu = gpus(tmp_path, "GPU-a")
    result = run(2, write(tmp_path), env=srun(2, GUARD="0", **same_gpu))
    assert result.codes == [0, 0], result.err
    assert result.out == ["rank 0 of 2 ends\n", "rank 1 of 2 ends\n"]


# ------------------------------------------------------------------------------------ hang verdict


@pytest.mark.parametrize(
    ("stopped", "by"),
    [(1, "torchrun"), pytest.param(0, "srun", marks=pytest.mark.long)],  # rank 0 serves the store
)
def test_a_hang_names_a_stopped_rank_and_leaves_nothing_running(tmp_path, stopped, by):
    failure = tmp_path / "failure"
    more = {"HANG_TIMEOUT": "3", "FAILURE_FILE": failure}

    def during(processes):
        wait_until((tmp_path / "trains").exists, "no training")
        os.kill(processes[stopped].pid, signal.SIGSTOP)

    result = run(
        3,
        write(tmp_path, fault="time.sleep(0.2); step == 2 and open('trains', 'w').close()"),
        env=lambda rank: (srun(3)(rank) if by == "srun" else {}) | more,
        before=f"import os; os.chdir({str(tmp_path)!r})",
        during=during,
    )
    assert result.codes[stopped] == -signal.SIGKILL
    assert all(result.codes)
    text = f"error: hang: rank {stopped} on {HOST} does not answer; the others are at "
    first = 0 if stopped else 1
    what = "all_reduce [[55]]" if RECORDS_GLOO else "(gloo:backward)"
    assert text in result.err[first] and what in result.err[first]
    others = [result.err[rank] for rank in range(3) if rank != stopped]
    assert all("all stacks\n" in err and "my_train.py" in err for err in others)
    written = json.loads(failure.read_text())
    assert written["cause"] == "hang" and f"rank {stopped} on {HOST}" in written["reason"]


FAULTS = {
    "busy elsewhere": (
        "if rank == 1 and step == 5: time.sleep(1000)",
        "hang: rank 1 on {host} is at collective ",
    ),
    "in another collective": (
        "if rank == 1 and step == 5: dist.broadcast(torch.ones(7), 0)",
        "hang: rank 1 on {host} is at collective ",
    ),
    "out of the loop": (
        "if rank == 1 and step == 5: break",
        "waits for rank 1 on {host}, where the script has ended",
    ),
}


PYTORCH_2_8 = """if True:
    import torch
    def two_arguments(entries, active, dump=torch._C._distributed_c10d._dump_fr_trace_json):
        return dump(entries, active)
    torch._C._distributed_c10d._dump_fr_trace_json = two_arguments
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hang_names_the_rank_at_fault(tmp_path, fault):
    code, expected = FAULTS[fault]
    env = {"HANG_TIMEOUT": "3", "FAILURE_FILE": tmp_path / "failure"}
    before = PYTORCH_2_8 if fault == "in another collective" and RECORDS_GLOO else ""
    result = run(3, write(tmp_path, fault=code), env=env, before=before)
    text = "\n".join(result.err)
    assert expected.format(host=HOST) in text, text
    assert result.codes[0] and result.codes[2]
    assert bool(result.codes[1]) == (fault != "out of the loop")
    failure = json.loads((tmp_path / "failure").read_text())
    assert failure["cause"] == ("exception" if fault == "out of the loop" else "hang")
    assert expected.format(host=HOST) in failure["reason"]
    assert "in main" in result.err[1] or fault == "out of the loop"  # its stacks


OLD_PYTORCH = """if True:
    import torch
    vars(torch._C._distributed_c10d).pop("_dump_fr_trace_json", None)
"""


def test_a_hang_names_the_rank_at_fault_without_a_flight_recorder(tmp_path):
    """As with an older PyTorch."""
    code, _ = FAULTS["busy elsewhere"]
    more = {"env": {"HANG_TIMEOUT": "3"}, "before": OLD_PYTORCH}
    result = run(3, write(tmp_path, fault=code), **more)
    found = re.search(
        rf"error: hang: rank 1 on {HOST} is at collective (\d+) \(gloo:complete\), \d+ steps done; "
        r"the others are at collective (\d+) \(gloo:backward\)\n",
        "\n".join(result.err),
    )
    assert found and int(found[1]) == int(found[2]) - 1, result.err
    assert all(result.codes)


@pytest.mark.parametrize("before", ["", OLD_PYTORCH], ids=["", "older PyTorch"])
def test_a_rank_that_works_alone_is_not_a_hang_while_nobody_waits(tmp_path, before):
    """Rank 0 evaluates for longer than HANG_TIMEOUT; the others poll a file meanwhile."""
    alone = """if step == 5:
            dist.barrier()
            if rank == 0:
                time.sleep(6)
                open("evaluated", "w").close()
            while not os.path.exists("evaluated"):
                time.sleep(0.1)
"""
    go = f"import os; os.chdir({str(tmp_path)!r})"
    result = run(3, write(tmp_path, fault=alone), env={"HANG_TIMEOUT": "3"}, before=before + go)
    assert result.codes == [0, 0, 0], result.err
    assert all("ends" in out for out in result.out)


# ---------------------------------------------------------------------------------------- failures

ENDS = {
    "raise RuntimeError('no')": ("exception", "RuntimeError: no"),
    "raise MemoryError": ("out of memory", "MemoryError: "),
    'raise RuntimeError("can\'t allocate memory")': ("out of memory", "can't allocate memory"),
    "class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('Tried to allocate')": (
        "out of memory",
        "OutOfMemoryError: Tried to allocate",
    ),
    "raise SystemExit(3)": ("exception", "exit code 3"),
    "raise SystemExit(2)": ("configuration", "exit code 2"),
    "e = ValueError('lower it'); e.cause = 'NaN'; raise SystemExit(2) from e": ("NaN", "lower it"),
    "raise SystemExit(2) from ModuleNotFoundError('wandb')": ("configuration", "wandb"),
    "raise SystemExit(0)": None,
    "print('end')": None,
}


@pytest.mark.parametrize("code", ENDS)
def test_the_failure_file_says_why_the_script_failed(tmp_path, code):
    (tmp_path / "my_train.py").write_text(code)
    failure = tmp_path / "failure"
    env = os.environ | {"FAILURE_FILE": str(failure)}
    command = [sys.executable, GUARD, tmp_path / "my_train.py"]
    subprocess.run(command, env=env, capture_output=True)
    if ENDS[code] is None:
        assert not failure.exists()
        return
    cause, reason = ENDS[code]
    written = json.loads(failure.read_text())
    assert (written["cause"], written["rank"], written["host"]) == (cause, 0, HOST)
    assert reason in written["reason"]


def test_the_first_failure_is_kept_and_a_rank_that_lost_another_exits_later(tmp_path):
    fault = "if rank == 1 and step == 5: raise OSError('the disk is gone')"
    failure, times = tmp_path / "failure", {}

    def during(processes):
        for rank in (1, 0):
            processes[rank].join(60)
            times[rank] = time.monotonic()

    result = run(2, write(tmp_path, fault), env={"FAILURE_FILE": failure}, during=during)
    assert result.codes == [1, 1] and times[0] - times[1] > 2
    assert result.err[1].endswith("OSError: the disk is gone\n")
    assert f"guard.py: rank 0 on {HOST}: another rank exited (" in result.err[0]
    written = json.loads(failure.read_text())
    assert (written["cause"], written["rank"]) == ("exception", 1)
    assert written["reason"] == "OSError: the disk is gone"


def test_the_last_lines_of_torchrun_repeat_what_is_wrong(tmp_path):
    command = [*TORCHRUN, GUARD, REPO / "train_distributed.py", "--dropuot=0"]
    failure = tmp_path / "failure"
    env = os.environ | {"OMP_NUM_THREADS": "1", "FAILURE_FILE": str(failure)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert result.returncode == 1
    error = "unrecognized arguments: --dropuot=0, did you mean --dropout?"
    lines = result.stderr.splitlines()
    assert lines.count(f"train_distributed.py: error: {error}") == 1
    assert lines[-2].endswith(error)
    assert json.loads(failure.read_text())["cause"] == "configuration"
