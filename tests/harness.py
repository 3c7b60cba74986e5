"""Runs train_distributed.py as real processes, without importing torch in each of them.

A fork server imports torch and the trainer once. Every rank is a process forked from it, with its
own environment and standard streams, on gloo; no part of the trainer is replaced. Tests of the
command line (`python train_distributed.py`, torchrun) start new interpreters.
"""

import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.distributed import TCPStore

REPO = Path(__file__).resolve().parent.parent
sys.path.append(str(REPO / "scripts"))  # its files import one another
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PLAIN = [sys.executable, str(REPO / "train_distributed.py")]
LONG = os.environ.get("FAULTS") == "long"  # tests/run.sh --long
FOREVER = "--epochs=1000000"
BF16_PRODUCT = "import torch; a = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(a, a)"
BF16_PRODUCT = [sys.executable, "-c", BF16_PRODUCT]
OLD_PYTHONS = Path.home().glob(".pyenv/versions/3.[67].*/bin/python")  # if there are any
OLD_PYTHONS = sorted(map(str, OLD_PYTHONS))
LAUNCH_VARIABLES = re.compile(r"^(SLURM_|PBS_|TORCHELASTIC_|MASTER_|OMP_|WANDB_)|RANK$|WORLD_SIZE$")

# Records the samples of each (step, micro-batch) as the loader takes them from the sampler.
RECORD = """if True:
    import itertools, json, os
    from train_distributed import SampleStream

    def recorded(self, step, device, inner=SampleStream.micro_batches_from):
        rank = os.environ.get("RANK", "0")
        places = ((s, micro) for s in itertools.count(step) for micro in self.micro_batches)
        with open(f"{DIRECTORY}-samples{rank}.jsonl", "a") as file:
            for micro_batch, (s, micro) in zip(inner(self, step, device), places):
                ids = micro_batch.indices.tolist()
                print(json.dumps([s, micro, ids]), file=file, flush=True)
                yield micro_batch

    SampleStream.micro_batches_from = recorded
"""

# A task whose loss() also runs a statement once, in that call, on that rank.
FAULT_IN_LOSS = """if True:
    import os
    import train_distributed as trainer

    class Faulty(trainer.Task):
        calls = 0

        def loss(self, model, batch):
            loss, sums = super().loss(model, batch)
            self.calls += 1
            if self.calls == {call} and os.environ.get("RANK", "0") == "{rank}":
                {fault}
            return loss, sums

    task = Faulty()
"""

# A rank runs a statement before a step.
FAULT_IN_STEP = """if True:
    import os, time
    import torch
    import train_distributed as trainer

    def train_step(cfg, world, stream, state, *more, inner=trainer.train_step):
        if state.step == {step} and world.rank == {rank}:
            {fault}
        inner(cfg, world, stream, state, *more)

    trainer.train_step = train_step
"""

# One fsync takes some seconds after the process has received a signal.
SLOW_DISK = """if True:
    import os, signal, time

    received = []

    def slow_signal(number, handler, inner=signal.signal):
        def receive(*arguments):
            received.append(number)
            handler(*arguments)

        return inner(number, receive if callable(handler) else handler)

    def slow_fsync(file, inner=os.fsync):
        if received and None not in received:
            received.append(None)
            time.sleep({seconds})
        inner(file)

    signal.signal, os.fsync = slow_signal, slow_fsync
"""

# Replaces the trainer in tests of the launchers: takes some seconds to save to --to=DIRECTORY.
SLOW_TO_SAVE = """
import os, signal, sys, time
def save(*_):
    if os.environ["RANK"] in os.environ.get("FAILING", "").split():
        sys.exit(1)
    time.sleep(float(os.environ.get("SAVE_SECONDS", 8)))
    open(f"{sys.argv[-1][5:]}/saved{os.environ['RANK']}", "w").close()
    sys.exit()
signal.signal(getattr(signal, "SIG" + os.environ.get("STOP_SIGNAL", "TERM")), save)
os.write(1, b"ready\\n")
while True:
    time.sleep(1)
"""

os.environ.setdefault("RESTART_PAUSE", "0")  # supervise.py restarts at once

# The tests run on CPUs, also on a machine with GPUs. test_gpu.py makes its GPUs visible again.
HAS_NVIDIA_DRIVER = Path("/dev/nvidiactl").exists()
VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
if HAS_NVIDIA_DRIVER:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

context = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Once, before any test: it changes the environment, which threads of a test may read.

    Before Python 3.12.3, it does not inherit sys.path, and skips modules it cannot import.
    """
    context.set_forkserver_preload(["preload"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{REPO / 'tests'}:{REPO}"  # preload.py removes it
    multiprocessing.forkserver.ensure_running()
    del os.environ["PYTHONPATH"]
    if before is not None:
        os.environ["PYTHONPATH"] = before


@dataclass
class Result:
    """How a launch ended: exit codes by rank, what each rank printed, and the run directory."""

    codes: list[int]
    out: list[str]
    err: list[str]
    directory: Path

    def checkpoint(self, step: int | str) -> dict:
        """That of this step, or "best"."""
        name = step if step == "best" else f"checkpoint_step_{step}"
        path = self.directory / f"{name}.pt"
        return torch.load(path, map_location="cpu", weights_only=True)

    def saved(self) -> list[int]:
        """The steps of its checkpoints."""
        return [int(path.stem.rpartition("_")[2]) for path in saves_in(self.directory)]

    def newest(self) -> dict:
        return newest_in(self.directory)

    def status(self) -> dict:
        return json.loads((self.directory / "status.json").read_text())

    def records(self, kind: str) -> list[dict]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    def samples(self) -> dict[int, dict[int, list[int]]]:
        """{step: {micro-batch: sample ids}}, from all ranks; a step trained twice must agree."""
        steps: dict[int, dict[int, list[int]]] = {}
        for path in self.directory.parent.glob(f"{self.directory.name}-samples*.jsonl"):
            for line in path.read_text().splitlines():
                step, micro, ids = json.loads(line)
                assert steps.setdefault(step, {}).setdefault(micro, ids) == ids
        assert steps, "nothing was recorded"
        return steps


def saves_in(directory: Path) -> list[Path]:
    """Its checkpoints, by step."""
    paths = directory.glob("checkpoint_step_*.pt")
    return sorted(paths, key=lambda path: int(path.stem.rpartition("_")[2]))


def newest_in(directory: Path) -> dict:
    return torch.load(saves_in(directory)[-1], map_location="cpu", weights_only=True)


def write_mnist(root: Path, train: int, test: int) -> Path:
    """A small MNIST in torchvision's layout, from the first digits of the shipped sample."""
    for name, count in (("train", train), ("t10k", test)):
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            source = REPO / "data/mnist_sample/MNIST/raw" / f"{name}-{kind}-ubyte"
            content = source.read_bytes()
            head = content[:4] + count.to_bytes(4, "big") + content[8:header]
            target = root / "MNIST" / "raw" / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(head + content[header : header + count * size])
    return root


def write_images(root: Path) -> Path:
    """37 training and 11 validation JPEG files of various sizes in the classes a, b and c."""
    random = np.random.default_rng(0)
    for split, count in (("train", 37), ("val", 11)):
        for i in range(count):
            path = root / split / "abc"[i % 3] / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = (random.integers(40, 90), random.integers(40, 90), 3)
            Image.fromarray(random.integers(0, 256, shape, np.uint8)).save(path)
    return root


def copy_repository(to: Path) -> Path:
    """Like a fresh clone, but with uncommitted changes."""
    ignore = shutil.ignore_patterns(".git", ".venv", "runs", "logs", "__pycache__", "checkpoints")
    shutil.copytree(REPO, to, symlinks=True, ignore=ignore)
    (to / "logs").mkdir()
    return to


def write_program(path: Path, text: str) -> Path:
    """An executable shell script, given without its first line; makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def load(path: Path):
    """Import the file as a module with the same name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def processes_with(name: str, value) -> dict[int, str]:
    """{pid: command line} of the processes with NAME=VALUE in their environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended in the meantime
            if f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
    return found


def processes_by_kind(name: str, value) -> dict[str, list[int]]:
    """Ids of the processes of a supervised training that have NAME=VALUE in their environment.

    A worker is a child of a rank. A rank stays one after its torchrun has been killed.
    """
    lines = processes_with(name, value)
    found: dict[str, list[int]] = {}
    for pid, line in lines.items():
        if "supervise.py" in line:
            kind = "supervisor"
        elif line.startswith("tee"):
            kind = "log"
        elif "cluster_train.sh" in line or "run_torchrun.py" in line:
            kind = "launcher"
        elif "torch.distributed.run" in line:
            kind = "agent"
        elif "guard.py" not in line:
            kind = "other"
        elif is_rank(lines.get(parent_of(pid), "")):
            kind = "worker"
        else:
            kind = f"rank {rank_of(pid)}"
        found.setdefault(kind, []).append(pid)
    return found


def is_rank(line: str) -> bool:
    return "guard.py" in line and "torch.distributed.run" not in line


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def rank_of(pid: int) -> str:
    with suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                return variable[5:].decode()
    return "?"


@contextmanager
def running(command: list, **options):
    """A process in a session of its own. In the end, it and its children are killed."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def steps_of(directory: Path) -> int:
    """The number of records written, which is the step if --log-every-steps=1."""
    path = directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for_step(directory: Path, step: int) -> None:
    wait_until(lambda: steps_of(directory) >= step, f"no step {step} in {directory}")


def wait_until(condition, otherwise: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise} after {seconds} s"
        time.sleep(0.02)


def signal_all(processes, number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def bf16_settings(command: list[str]) -> dict[str, str] | None:
    """Variables that let a command use bf16 on this CPU; None if nothing helps.

    Some virtual machines list AMX but trap it: the process is killed by SIGILL.
    """
    for settings in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}):
        if subprocess.run(command, env=os.environ | settings, capture_output=True).returncode == 0:
            return settings
    return None


def _rank(argv: list[str], env: dict[str, str], log: str, before: str, task) -> None:
    assert "preload" in sys.modules, "each rank would import torch"
    for number, name in ((1, f"{log}.out"), (2, f"{log}.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in list(os.environ):
        if LAUNCH_VARIABLES.search(name):
            del os.environ[name]
    os.environ.update(env)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # the default before Python 3.14
    scope = {"argv": argv}
    exec(before, scope)
    sys.argv = argv
    if argv[0].endswith("guard.py"):
        sys.path[0] = str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")
    else:
        import train_distributed

        train_distributed.main(scope.get("task") or (task and task()), argv[1:])


def run_ranks(
    ranks: int,
    *command: str,
    env=lambda rank: {},
    before: str = "",
    task=None,
    during=None,
    timeout: float = 240,
    directory: Path | None = None,
) -> Result:
    """Run the trainer or guard.py on `ranks` ranks, which start and end as under torchrun.

    env(rank) returns variables in addition to torchrun's; None removes a variable. `before` is
    Python code that each rank executes first. The trainer trains a task of the class `task`, or
    the `task` that this code sets. during(processes) is called while they run.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent
    logs, processes = tempfile.mkdtemp(prefix="ranks-"), []
    for rank in range(ranks):
        variables = {
            **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "OMP_NUM_THREADS": 1},
            **{"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0},
            **env(rank),
        }
        variables = {name: str(value) for name, value in variables.items() if value is not None}
        arguments = list(map(str, command)), variables, f"{logs}/{rank}", before, task
        process = context.Process(target=_rank, args=arguments)
        process.start()
        processes.append(process)
    try:
        if during:
            during(processes)
        join_like_torchrun(processes, time.monotonic() + timeout)
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    out = [Path(f"{logs}/{rank}.out").read_text() for rank in range(ranks)]
    err = [Path(f"{logs}/{rank}.err").read_text() for rank in range(ranks)]
    shutil.rmtree(logs)
    assert not late, f"ranks {late} still ran after {timeout} s\n" + "\n".join(out + err)
    return Result([process.exitcode for process in processes], out, err, directory)


# As printed by `env` under Slurm 22.05 with two nodes.
BATCH_SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_NODEID": "0"}
SRUN_STEP = {
    **{"SLURM_JOB_ID": "17", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "2"},
    **{"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    **{"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[01-02]"},
}
NO_LAUNCHER = dict.fromkeys(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    ]
)


def launch(
    directory: Path, ranks: int, *options: str, env: dict | None = None, record=False, **more
) -> Result:
    """run_ranks() for the trainer with this run directory. A single rank runs without a launcher.

    With record, Result.samples() returns the samples consumed (needs a loader without workers,
    which would read ahead).
    """
    variables = (NO_LAUNCHER if ranks == 1 else {}) | (env or {})
    if record:
        more["before"] = f"DIRECTORY = {str(directory)!r}\n{RECORD}\n" + more.get("before", "")
    command = [PLAIN[1], f"--checkpoint-dir={directory}", *options]
    return run_ranks(ranks, *command, env=lambda rank: variables, directory=directory, **more)


def join_like_torchrun(processes, deadline: float) -> None:
    """Wait for all; if one fails, send SIGTERM to the others."""
    while alive := [process for process in processes if process.is_alive()]:
        if time.monotonic() > deadline:
            return
        if any(process.exitcode for process in processes):
            time.sleep(0.5)
            signal_all(alive, signal.SIGTERM)
            for process in alive:
                process.join(max(0, deadline - time.monotonic()))
        multiprocessing.connection.wait([process.sentinel for process in alive], 1)


def train(directory: Path, ranks: int, *options: str, **more) -> Result:
    """launch() for a training run that should succeed."""
    result = launch(directory, ranks, *options, **more)
    printed = "\n".join(result.out + result.err)
    assert result.codes == [0] * ranks, f"exit codes {result.codes}\n{printed}"
    return result


def assert_same_state(a: dict, b: dict) -> None:
    """Check that weights, optimizer and step of two checkpoints are identical, bit for bit."""
    assert a["step"] == b["step"]
    assert a["model"].keys() == b["model"].keys()
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), f"{name} differs"
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    for index, values in a["optimizer"]["state"].items():
        for name, value in values.items():
            other = b["optimizer"]["state"][index][name]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), f"{name} differs"
