"""Runs train_distributed.py as real processes, without paying for `import torch` each time.

A fork server imports torch and the trainer once. Every rank is then a process of its own, forked
from it, with its own environment and standard streams, over gloo; nothing of the trainer is
replaced. Tests of the command line (`python train_distributed.py`, torchrun) start from scratch.
"""

import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LONG = os.environ.get("FAULTS") == "long"  # the whole of the fault suite: tests/run.sh --long
SHARED_MNIST = REPO.parent / "shared" / "data"
LAUNCH_VARIABLES = re.compile(r"^(SLURM_|PBS_|TORCHELASTIC_|MASTER_|OMP_|WANDB_)|RANK$|WORLD_SIZE$")

# Writes down the sample ids of each (step, micro-batch) as the loader takes them from the sampler.
RECORD = """if True:
    import json
    from train_distributed import MicroBatchSampler

    def recorded(self, inner=MicroBatchSampler.__iter__):
        batches = inner(self)
        with open(RECORDS, "a") as file:
            for step in range(self.first_step, self.steps_per_epoch):
                for micro in self.mine:
                    keys, (begin, end) = next(batches), self.bounds(step, micro)
                    ids = [key % self.samples for key in keys][: end - begin]
                    record = [self.epoch * self.steps_per_epoch + step, micro, ids]
                    print(json.dumps(record), file=file, flush=True)
                    yield keys

    MicroBatchSampler.__iter__ = recorded
"""

# The disk of a process takes some seconds, once, after it was asked to stop.
SLOW_DISK = """if True:
    import os, signal, time

    heard = []

    def listen(number, handler, listen=signal.signal):
        def hear(*arguments):
            heard.append(number)
            handler(*arguments)

        return listen(number, hear if callable(handler) else handler)

    def write(file, fsync=os.fsync):
        if heard and None not in heard:
            heard.append(None)
            time.sleep({seconds})
        fsync(file)

    signal.signal, os.fsync = listen, write
"""

# For the launchers in place of the trainer: it saves for a while, into --to=DIRECTORY.
SLOW_TO_SAVE = """
import os, signal, sys, time
def save(*_):
    if os.environ["RANK"] in os.environ.get("FAILING", "").split():
        sys.exit(1)
    time.sleep(float(os.environ.get("SAVE_SECONDS", 8)))
    open(f"{sys.argv[-1][5:]}/saved{os.environ['RANK']}", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
while True:
    time.sleep(1)
"""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["train_distributed"])


@dataclass
class Result:
    """How a launch ended: exit codes by rank, what each rank printed, and the run directory."""

    codes: list[int]
    out: list[str]
    err: list[str]
    directory: Path

    def checkpoint(self, name: str) -> dict:
        return torch.load(self.directory / f"{name}.pt", weights_only=True)

    def records(self, kind: str) -> list[dict]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    def samples(self) -> dict[int, dict[int, list[int]]]:
        """{step: {micro-batch: sample ids}}, from all ranks; a step trained twice must agree."""
        steps: dict[int, dict[int, list[int]]] = {}
        for path in self.directory.parent.glob(f"{self.directory.name}-samples*.jsonl"):
            for line in path.read_text().splitlines():
                step, micro, ids = json.loads(line)
                if not ids:
                    continue  # it borrowed one, with weight 0
                assert steps.setdefault(step, {}).setdefault(micro, ids) == ids
        assert steps, "nothing was recorded"
        return steps


def write_mnist(root: Path, train: int, test: int) -> Path:
    """A small MNIST in torchvision's layout, made of the first digits of the shipped sample."""
    for name, count in (("train", train), ("t10k", test)):
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            source = REPO / "data/mnist_sample/MNIST/raw" / f"{name}-{kind}-ubyte"
            content = source.read_bytes()
            head = content[:4] + count.to_bytes(4, "big") + content[8:header]
            target = root / "MNIST" / "raw" / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(head + content[header : header + count * size])
    return root


def copy_repository(to: Path) -> Path:
    """As a fresh clone would be, with what is not committed yet."""
    ignore = shutil.ignore_patterns(".git", ".venv", "runs", "logs", "__pycache__", "checkpoints")
    return shutil.copytree(REPO, to, symlinks=True, ignore=ignore)


def load(path: Path):
    """The module in that file, under its name there."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def processes_with(name: str, value) -> dict[int, str]:
    """{pid: command line} of this machine's processes that have NAME=VALUE in their environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended in the meantime
            if f"{name}={value}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().decode()
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(argv: list[str], env: dict[str, str], log: str, before: str | None) -> None:
    for number, name in ((1, f"{log}.out"), (2, f"{log}.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for name in list(os.environ):
        if LAUNCH_VARIABLES.search(name):
            del os.environ[name]
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for the loader's workers, as by default
    import train_distributed

    if before:
        exec(
            before, {"argv": argv}
        )  # only for what cannot be had here, such as a download server's address
    sys.exit(train_distributed.main(argv))


def launch(
    directory: Path,
    ranks: int,
    *options: str,
    env: dict[str, str] | None = None,
    rank_env=lambda rank: {},
    before: str | None = None,
    timeout: float = 120,
    during=None,
    record: bool = False,
) -> Result:
    """Train with so many ranks, as torchrun would start them. `during(processes)` may interfere.

    With record, Result.samples() tells what they consumed (if the loader has no workers, which
    read ahead).
    """
    port = free_port()
    logs = tempfile.mkdtemp(prefix="launch-")
    processes = []
    for rank in range(ranks):
        variables = {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            variables |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            variables |= {"MASTER_PORT": str(port)}
        variables |= env or {}
        variables |= rank_env(rank)
        argv = [f"--checkpoint-dir={directory}", *map(str, options)]
        records = f"{directory}-samples{rank}.jsonl"
        prelude = f"RECORDS = {records!r}\n{RECORD}" if record else before
        process = context.Process(target=_rank, args=(argv, variables, f"{logs}/{rank}", prelude))
        process.start()
        processes.append(process)
    try:
        if during:
            during(processes)
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
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


def train(directory: Path, ranks: int, *options: str, **more) -> Result:
    """launch() for a training that should succeed."""
    result = launch(directory, ranks, *options, **more)
    assert result.codes == [0] * ranks, "\n".join(result.out + result.err)
    return result


def assert_same_state(a: dict, b: dict) -> None:
    """Weights, optimizer and position of two checkpoints are the same, bit for bit."""
    assert a["global_step"] == b["global_step"]
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), f"{name} differs"
    for index, values in a["optimizer"]["state"].items():
        for name, value in values.items():
            other = b["optimizer"]["state"][index][name]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), f"{name} differs"
