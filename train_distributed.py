#!/usr/bin/env python3
"""Train an image classifier with PyTorch DistributedDataParallel (DDP), in one file.

    python train_distributed.py                                     # one process: a laptop, one GPU
    torchrun --standalone --nproc-per-node 4 train_distributed.py   # one machine with four GPUs
    srun -n 4 python scripts/guard.py train_distributed.py          # Slurm: one task for each GPU

A rank is one process with one GPU. Every rank must call each function marked "collective", or the
other ranks hang. A step consumes --global-batch-size samples, in micro-batches of --batch-size that
are divided among the ranks. The samples of a micro-batch, their augmentation and the dropout mask
depend only on the step and on its index: any number of ranks, and resumed runs, see the same ones.

To adapt it, change get_datasets(), build_model() and, if needed, compute_loss(). To save and stop:
Ctrl-C; SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 to any rank; a file STOP in --checkpoint-dir, or the
file $STOP_FILE; the time $DEADLINE (seconds since 1970). To save and continue: SIGURG, a file SAVE.
To resume, run the same command. Exit code: 0 finished or saved; 2 user error; 130 second Ctrl-C.
"""

import argparse
import difflib
import faulthandler
import fcntl
import functools
import importlib
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import zipfile
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import yaml
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, default_convert


class UserError(Exception):
    """Something the user can fix: printed as one sentence, without a traceback."""

    def __init__(self, text: str, cause: str = "configuration"):
        super().__init__(" ".join(text.split("UserError: ")[-1].split()))  # no worker's traceback
        self.cause = cause  # for scripts/supervise.py: after "disk", a restart may help


@contextmanager
def explain(what: str, *errors: type[Exception]):
    """Turn errors of files and libraries into a UserError that says what failed."""
    try:
        yield
    except errors as error:
        raise UserError(f"{what} ({type(error).__name__}: {error})") from None


# ------------------------------------------------------------------------------------ OPTIONS
def build_parser() -> argparse.ArgumentParser:
    """The options, one per line. They are also the keys of a config file, with _ instead of -."""
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="train_distributed.py", description=__doc__, **style)
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--config", metavar="FILE", help="YAML file of options; the command line overrides it")
    add("--checkpoint-dir", "--save-dir", default="checkpoints", help="run directory [checkpoints]")
    add("--resume", default="auto", help="auto, none, or a FILE.pt for a new directory [auto]")
    add("--epochs", type=positive_int, default=5, help="passes over the training data [5]")
    add("--stop-at-step", type=positive_int, help="save and exit at this step; same schedule")
    add("--seed", type=int, default=42, help="random seed [42]")
    add("--deterministic", action=switch, default=False, help="repeatable kernels, slower on GPU")
    add("--reproducible", action=switch, default=False, help="same weights on any number of ranks")
    datasets = ["mnist_sample", "mnist", "imagefolder", "synthetic"]
    add("--dataset", choices=datasets, default="mnist_sample", help="[mnist_sample]")
    add("--data-dir", default="data", help="where the data is, or is downloaded to [data]")
    add("--image-size", type=positive_int, help="pixels per side [28 for MNIST, else 224]")
    add("--num-workers", type=int, default=8, help="loader workers per rank, for images [8]")
    add("--model", default="simple_convnet", help="[simple_convnet] or a torchvision classifier")
    add("--dropout", type=float, default=0.25, help="dropout of simple_convnet [0.25]")
    add("--batch-size", type=positive_int, default=64, help="micro-batch: samples per forward [64]")
    add("--global-batch-size", type=positive_int, help="samples per step [batch size x ranks]")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="[sgd]")
    add("--lr", type=float, default=0.05, help="peak learning rate [0.05]")
    add("--warmup-epochs", type=float, default=0.2, help="epochs of linear warm-up [0.2]")
    add("--weight-decay", type=float, default=1e-4, help="[0.0001]")
    add("--clip-grad-norm", type=float, default=0.0, help="clip gradients to this norm; 0: off [0]")
    add("--amp", choices=["off", "bf16", "fp16"], default="off", help="mixed precision [off]")
    add("--compile", action=switch, default=False, help="torch.compile the model")
    add("--activation-checkpointing", action=switch, default=False, help="recompute ResNet blocks")
    add("--log-every-steps", type=positive_int, default=20, help="steps between records [20]")
    add("--tensorboard", action=switch, default=False, help="also write TensorBoard files")
    add("--wandb", action=switch, default=False, help="also log to W&B (WANDB_MODE=offline works)")
    add("--checkpoint-every-steps", type=positive_int, help="also save every N steps [off]")
    add("--keep", type=positive_int, default=3, help="newest checkpoints to keep [3]")
    add("--distributed-backend", choices=["nccl", "gloo"], help="[nccl or xccl on GPUs, else gloo]")
    add("--nodes", type=positive_int, help="fail unless there are this many nodes")
    add("--gpus-per-node", type=positive_int, help="fail unless a node has this many ranks")
    add("--hang-timeout", type=positive_int, default=600, help="seconds without progress [600]")
    return parser


def positive_int(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is not a positive integer")


def parse_config(argv: list[str], parser: argparse.ArgumentParser | None = None):
    """The options. The command line overrides the file --config, which overrides the defaults."""
    parser, words = parser or build_parser(), []

    def fail(message: str) -> None:
        unknown = message.partition("unrecognized arguments: ")[2].split("=")[0]
        near = difflib.get_close_matches(unknown, parser._option_string_actions, n=1)
        where = f"{file}: " if words else ""  # the command line comes first, without the file
        raise UserError(where + message + "".join(f", did you mean {name}?" for name in near))

    parser.error = fail
    if file := parser.parse_args(argv).config:
        with explain(f"cannot read {file}: it needs lines like `epochs: 5`", Exception):
            # BaseLoader returns only strings, lists and dicts: `amp: off` stays "off".
            options = yaml.load(Path(file).read_text(encoding="utf-8"), yaml.BaseLoader)
            for key, value in dict(options or {}).items():
                flag = key.replace("_", "-")
                switches = {"true": [f"--{flag}"], "false": [f"--no-{flag}"], "": [], "null": []}
                words += switches.get(str(value).lower(), [f"--{flag}={value}"])
    return parser.parse_args(words + argv)


# -------------------------------------------------------------------------------- DISTRIBUTED
class World(NamedTuple):
    """The rank of this process and its device. The defaults describe a single process."""

    rank: int = 0  # 0 .. world_size - 1
    world_size: int = 1
    device: torch.device = torch.device("cpu")


@explain("cannot join the other ranks; is a GPU or MASTER_ADDR missing?", ValueError)
def setup_distributed(cfg: argparse.Namespace) -> World:
    """Join all ranks into one process group. Collective."""
    rank, local_rank, world_size, per_node = launch_environment(os.environ)
    accelerator = getattr(torch, "accelerator", torch.cuda)  # PyTorch < 2.6: only CUDA
    no_collectives = world_size > 1 and torch.backends.mps.is_available()  # on the GPU of a Mac
    gpus = 0 if no_collectives or not accelerator.is_available() else accelerator.device_count()
    nodes, device = world_size // per_node, torch.device("cpu")
    if (cfg.nodes or nodes, cfg.gpus_per_node or per_node) != (nodes, per_node):
        raise UserError(f"--nodes or --gpus-per-node: this launch has {nodes} x {per_node} ranks")
    if gpus:  # with one GPU per Slurm task, each rank sees one GPU, number 0
        device = torch.device(local_rank % gpus)  # cuda (NVIDIA, AMD), xpu (Intel) or mps
        getattr(accelerator, "set_device_index", torch.cuda.set_device)(device)  # not also GPU 0
    backend = cfg.distributed_backend or {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")
    if rank == 0:
        noun = "GPU" + "s" * (world_size > 1) if gpus else "process" + "es" * (world_size > 1)
        log(f"Starting distributed training on {world_size} {noun} ({per_node} per node)")
        log(f"Master node: {socket.gethostname()}; PyTorch {torch.__version__}, {backend}")
    if world_size > 1:
        timeout, bound = timedelta(seconds=cfg.hang_timeout), None if backend == "gloo" else device
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
    return World(rank, world_size, device)


def launch_environment(env) -> tuple[int, int, int, int]:
    """(rank, local rank, world size, ranks per node): torchrun's, else Slurm's, else 0, 0, 1, 1."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        # Plain srun. It also needs MASTER_ADDR and MASTER_PORT: scripts/guard.py sets them.
        slurm = "PROCID", "LOCALID", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE"  # like 4(x2) or 4,3
        env.update(zip(names, (env[f"SLURM_{s}"].split("(")[0].split(",")[0] for s in slurm)))
    return tuple(int(env.get(name, default)) for name, default in names.items())


def on_rank_0(world: World, function, *arguments):
    """Call a function on rank 0; return its result or raise its error on all ranks. Collective."""
    try:
        outcome = [function(*arguments) if world.rank == 0 else None]
    except (UserError, ModuleNotFoundError) as error:
        outcome = [error]
    if world.world_size > 1:
        dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        time.sleep(2 if world.rank else 0)  # let rank 0 print it first: launchers kill the rest
        raise SystemExit(2) if world.rank else outcome[0]
    return outcome[0]


def log(text: str, stream=None) -> None:
    """Print a line. If the output cannot be written, discard it and continue training."""
    try:
        print(text, file=stream, flush=True)
    except OSError:  # a closed terminal, a `tee` killed by Ctrl-C, a full disk under the log
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


# -------------------------------------------------------------------------------------- MODEL
class SimpleConvNet(nn.Sequential):
    """Two convolutions, two linear layers: [b, channels, size, size] -> logits [b, classes]."""

    def __init__(self, channels: int, size: int, classes: int, dropout: float):
        super().__init__(
            *(nn.Conv2d(channels, 32, kernel_size=3), nn.ReLU()),  # [b, 32, size - 2, size - 2]
            *(nn.Conv2d(32, 64, kernel_size=3), nn.ReLU()),  # [b, 64, size - 4, size - 4]
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout)),  # [b, 9216] for 28 pixels
            *(nn.Linear(64 * ((size - 4) // 2) ** 2, 128), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(128, classes),
        )


def build_model(cfg: argparse.Namespace, spec: "DataSpec") -> nn.Module:
    """The model: images [b, channels, size, size] -> logits [b, classes]. Yours goes here."""
    if cfg.model == "simple_convnet":
        return SimpleConvNet(spec.channels, spec.size, spec.classes, cfg.dropout)
    models = importlib.import_module("torchvision.models")
    if cfg.model not in models.list_models(models):
        raise UserError(f"--model {cfg.model} is not a classifier in torchvision.models")
    return models.get_model(cfg.model, num_classes=spec.classes)


def build_optimizer(cfg: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    options = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "fused": True}  # fused is faster
    if cfg.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **options)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9, **options)
    # Fused SGD would not initialize the momentum in a first step that GradScaler skips.
    sgd.state.update({p: {"momentum_buffer": torch.zeros_like(p)} for p in model.parameters()})
    return sgd


def learning_rate(cfg: argparse.Namespace, step: int, steps_per_epoch: int) -> float:
    """A function of the step alone: linear warm-up, then a cosine down to 0."""
    warmup = round(cfg.warmup_epochs * steps_per_epoch)
    done = max(0, step - warmup) / max(1, cfg.epochs * steps_per_epoch - warmup)
    return cfg.lr * min(1, (step + 1) / (warmup + 1)) * (1 + math.cos(math.pi * done)) / 2


# --------------------------------------------------------------------------------------- DATA
class DataSpec(NamedTuple):
    """What the model and the training loop must know about a data set."""

    channels: int  # of the model's input
    size: int  # pixels per side of the model's input
    classes: int
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # per channel, for pixels from 0 to 1;
    std: tuple[float, ...] = (0.229, 0.224, 0.225)  # the defaults are those of ImageNet


def get_datasets(cfg: argparse.Namespace) -> tuple[Dataset, Dataset, DataSpec]:
    """(training set, test set, their DataSpec) of --dataset. Yours goes here."""
    size = cfg.image_size or 224
    if cfg.dataset == "synthetic":  # for benchmarks, and to try things without data
        generator = torch.Generator().manual_seed(cfg.seed)
        images = torch.randint(256, (1280, 3, size, size), generator=generator, dtype=torch.uint8)
        data = InMemoryImages(images, torch.randint(1000, (1280,), generator=generator))
        return data, InMemoryImages(*data[:256]), DataSpec(3, size, 1000)
    shipped = cfg.dataset == "mnist_sample"  # with this file
    root = Path(__file__).with_name("data") / "mnist_sample" if shipped else Path(cfg.data_dir)
    with explain(f"cannot read --dataset {cfg.dataset}; is it in {root}?", OSError, RuntimeError):
        if cfg.dataset == "imagefolder":  # DATA_DIR/train/CLASS/*.jpg, DATA_DIR/val/CLASS/*.jpg
            tv = importlib.import_module("torchvision")  # only here, because it takes time
            crop = tv.transforms.RandomResizedCrop(size), tv.transforms.RandomHorizontalFlip()
            plain = tv.transforms.Resize(size * 8 // 7), tv.transforms.CenterCrop(size)
            both = [tv.transforms.Compose([*t, tv.transforms.PILToTensor()]) for t in (crop, plain)]
            train, val = map(tv.datasets.ImageFolder, (root / "train", root / "val"), both)
            if train.classes != val.classes:
                raise UserError(f"{train.root} and {val.root} have different classes")
            return train, val, DataSpec(3, size, len(train.classes))
        if not shipped:
            importlib.import_module("torchvision").datasets.MNIST(root, download=True)
        size, channels = cfg.image_size or 28, 1 if cfg.model == "simple_convnet" else 3
        sets = (read_mnist(root / "MNIST/raw", part, channels, size) for part in ("train", "t10k"))
        return *sets, DataSpec(channels, size, 10, (0.1307,), (0.3081,))


def read_mnist(directory: Path, part: str, channels: int, size: int) -> "InMemoryImages":
    """Files of MNIST (a header, then bytes), resized to uint8 [n, channels, size, size]."""
    files = (f"{directory}/{part}-{name}-ubyte" for name in ("images-idx3", "labels-idx1"))
    images, labels = (torch.from_file(f, size=os.path.getsize(f), dtype=torch.uint8) for f in files)
    images, labels = images[16:].view(len(labels) - 8, 1, 28, 28), labels[8:].long()
    if size != 28:
        images = nn.functional.interpolate(images.float(), size, mode="bilinear", antialias=True)
    return InMemoryImages(images.round().byte().expand(-1, channels, -1, -1), labels)


class InMemoryImages(TensorDataset):
    """uint8 [n, c, h, w] and labels int64 [n]. Gathers a whole micro-batch in one operation."""

    def __getitems__(self, keys: list[int]) -> list[torch.Tensor]:
        """keys (see MicroBatchSampler) -> [uint8 [b, c, h, w], int64 [b]]"""
        rows = (torch.tensor(keys) % len(self)).to(self.tensors[0].device, non_blocking=True)
        return [tensor[rows] for tensor in self.tensors]


class SeededDataset(Dataset):
    """A data set of (image, label). It seeds torch only: do not augment with random or numpy."""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: int):
        epoch, index = divmod(key, len(self.dataset))  # see MicroBatchSampler
        torch.default_generator.manual_seed(derive_seed(self.seed, "augmentation", epoch, index))
        name = getattr(self.dataset, "samples", range(index + 1))[index]
        with explain(f"cannot read sample {name}: replace or remove it", OSError):
            return self.dataset[index]


def derive_seed(*parts) -> int:
    """A 63-bit seed from numbers and words; neighboring numbers give unrelated seeds."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class MicroBatchSampler:
    """The micro-batches of this rank. It replaces DistributedSampler.

    Each step takes the next G samples of the epoch's permutation, the last step the rest: every
    sample is used once. A step has C = G / b micro-batches. Rank r of W takes those from C * r // W
    to C * (r + 1) // W - 1, so W need not divide C. Yields lists of keys: a key is epoch x samples
    + index, so that loader workers also know the epoch.
    """

    def __init__(self, samples: int, cfg: argparse.Namespace, world: World):
        self.samples, self.seed, self.epoch, self.first_step = samples, cfg.seed, 0, 0
        cfg.global_batch_size = total = cfg.global_batch_size or cfg.batch_size * world.world_size
        self.global_batch_size, self.per_step = total, total // cfg.batch_size
        if total % cfg.batch_size or self.per_step < world.world_size:
            text = f"{world.world_size} ranks cannot share a batch of {total} in micro-batches of"
            raise UserError(f"{text} {cfg.batch_size}: set --batch-size or --checkpoint-dir")
        first, end = (self.per_step * r // world.world_size for r in (world.rank, world.rank + 1))
        self.local_micro_batches, self.steps_per_epoch = range(first, end), -(-samples // total)

    def bounds(self, step: int, micro: int) -> tuple[int, int, int]:
        """Begin and end of a micro-batch in the epoch's order, and the samples of its step."""
        start = step * self.global_batch_size  # steps are counted from the start of the epoch
        size = min(self.global_batch_size, self.samples - start)  # the last one may be short
        return *(start + size * m // self.per_step for m in (micro, micro + 1)), size

    def __iter__(self):
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        order = torch.randperm(self.samples, generator=generator) + self.epoch * self.samples
        for step in range(self.first_step, self.steps_per_epoch):
            for micro in self.local_micro_batches:
                begin, end, _ = self.bounds(step, micro)
                # An empty one, in a short last step, gets a sample with weight 0 (DDP needs it).
                yield order[begin : max(end, begin + 1)].tolist()


def get_dataloader(cfg, world: World, dataset: Dataset, batch_sampler) -> DataLoader:
    """Yields one micro-batch at a time: images [b, c, h, w] and labels int64 [b]."""
    if isinstance(dataset, InMemoryImages):  # all of it on the device
        dataset.tensors = tuple(tensor.to(world.device) for tensor in dataset.tensors)
        return DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=default_convert)
    options = {"num_workers": cfg.num_workers, "persistent_workers": cfg.num_workers > 0}
    options |= {"worker_init_fn": ignore_stop_signals, "pin_memory": world.device.type != "cpu"}
    if cfg.num_workers and sys.platform == "linux":  # a signal would end Python 3.14's forkserver
        options["multiprocessing_context"] = "fork"
    return DataLoader(SeededDataset(dataset, cfg.seed), batch_sampler=batch_sampler, **options)


# ------------------------------------------------------------------------------------ METRICS
class Metrics:
    """Sums of loss, correct predictions and samples, on the device: adding never waits for a GPU.

    They are integers, the loss in units of 2**-24, so the total does not depend on the order or on
    the number of ranks. A loss that is not finite counts as 0; a loss above 2**29 counts as 2**29.
    """

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(3, dtype=torch.int64, device=device)

    def add(self, loss_sum: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.sums[0] += (loss_sum.float() * 2**24).nan_to_num(0, 0, 0).clamp(max=2**53).long()
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += labels.numel()

    def all_reduce(self, world: World, more=()) -> list[int]:
        """[loss, correct, samples, *more], summed. Collective; waits for the GPU."""
        total = torch.cat([self.sums, self.sums.new_tensor(more)])
        if world.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()


def means(loss: int, correct: int, samples: int) -> dict[str, float]:
    return {"loss": loss * 2**-24 / samples, "accuracy": correct / samples}


def write_record(run: "Run", kind: str, **values: float) -> None:
    """Write a line to metrics.jsonl, and to TensorBoard and W&B if enabled. On rank 0."""
    record = {"kind": kind, "step": run.global_step, "time": time.time(), **values}
    run.unwritten += json.dumps(record).encode() + b"\n"
    try:
        with (run.directory.path / "metrics.jsonl").open("ab", buffering=0) as file:
            run.unwritten = run.unwritten[file.write(run.unwritten) :]
    except OSError as error:
        log(f"WARNING: cannot write metrics yet: {error}", sys.stderr)
    for track in run.trackers:
        track({f"{kind}/{name}": value for name, value in values.items()}, run.global_step)


def open_metrics(run: "Run") -> bool:
    """Delete the records of later steps. Returns whether the current step was evaluated."""
    cfg, path = run.cfg, run.directory.path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept = [s for s in lines if s[-1:] == b"\n" and json.loads(s)["step"] <= run.global_step]
    run.directory.write(path.name, lambda file: file.writelines(kept))
    run.directory.write("config.yaml", lambda f: f.write(yaml.safe_dump(vars(cfg)).encode()))
    if cfg.tensorboard:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        tb = writer(path.with_name("tensorboard"), purge_step=run.global_step + 1)
        run.trackers.append(lambda v, s: [*(tb.add_scalar(k, v[k], s) for k in v), tb.flush()])
    if cfg.wandb:
        wandb, name = importlib.import_module("wandb"), f"{derive_seed(str(path.resolve())):x}"
        wandb.init(id=name, resume="allow", dir=path.parent, config=vars(cfg))
        run.trackers.append(wandb.log)
    return bool(kept) and json.loads(kept[-1])["kind"] == "epoch"


# -------------------------------------------------------------------------------- CHECKPOINTS
class RunDirectory:
    """--checkpoint-dir. Only one job at a time trains in it: its owner, named in the file `lock`.

    The kernel frees the lock when that process and its loader workers have exited. A newer attempt
    of the same job (see $ATTEMPT_ID) takes it over; the older attempt then writes nothing more.
    """

    def __init__(self, path: Path):
        self.path, attempt = path, os.environ.get("ATTEMPT_ID", "?")
        self.owner = f"attempt {attempt}, process {os.getpid()} on {socket.gethostname()}"
        self.job = f"attempt {attempt.rpartition('.')[0]}."

    def lock(self) -> None:
        """For rank 0, before it changes anything. UserError if another job is the owner."""
        with explain(f"cannot write to or lock --checkpoint-dir {self.path}", OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            with open(os.environ.get("STATUS_FILE", os.devnull), "w") as file:
                json.dump({"run_dir": str(self.path.resolve())}, file)
            self.file = (self.path / "lock").open("a+")
            with suppress(BlockingIOError):
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.file.truncate(0)
            if (owner := (self.path / "lock").read_text()) and not owner.startswith(self.job):
                raise UserError(f"{self.path} is in use by {owner}: choose another", "in use")
            self.file.truncate(0)
            print(self.owner, end="", file=self.file, flush=True)
            for leftover in [*self.path.glob(".*.tmp"), self.path / "STOP"]:
                leftover.unlink(missing_ok=True)

    def write(self, name: str, write) -> None:
        """Call write(file) on a temporary file; rename it once its content is on disk."""
        path = self.path / name
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if (now := (self.path / "lock").read_text()) != self.owner:
                raise UserError(f"{self.path} belongs to {now} now: not saved", "replaced")
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            while error.__context__:  # torch.save hides "No space left on device" in its own error
                error = error.__context__
            raise UserError(f"cannot write {path}; is the disk full? ({error})", "disk") from None
        finally:
            with suppress(OSError):  # already renamed, or the directory is read-only
                temporary.unlink()


def save_checkpoint(run: "Run", final: bool) -> None:
    """checkpoint_epoch_N.pt at the end of an epoch, else checkpoint_step_N.pt. Done by rank 0."""
    if run.world.rank:
        return
    epoch, step = divmod(run.global_step, run.sampler.steps_per_epoch)
    name = f"checkpoint_step_{run.global_step}" if step else f"checkpoint_epoch_{epoch}"
    path = run.directory.path / f"{name}.pt"
    with suppress(OSError):  # there is none, or the directory is read-only
        path.with_name("SAVE").unlink()
    state = {"name": name, "run": run.name, "config": dict(vars(run.cfg))}
    state |= {key: getattr(run, key) for key in POSITION_FIELDS}  # plain types: weights_only
    state |= {part: getattr(run, part).state_dict() for part in ("model", "optimizer", "scaler")}
    try:
        if not all(value.isfinite().all() for value in state["model"].values()):
            raise UserError(f"{name} not saved: the weights are not finite; lower --lr", "NaN")
        run.directory.write(path.name, functools.partial(torch.save, state))
        run.failed_saves, run.saved_step = 0, run.global_step
        run.saved = [*(old for old in run.saved if old != path), path]
        for old in run.saved[: -run.cfg.keep]:
            old.unlink(missing_ok=True)
        write_status(run, "running")
    except UserError as error:
        run.failed_saves += 1
        if final or error.cause != "disk" or run.failed_saves == 3:  # in a row
            raise
        log(f"WARNING: {error}; training continues", sys.stderr)


def load_checkpoint(path: Path) -> dict:
    """The content of a checkpoint, on the CPU. UserError if it is damaged, or not one of ours."""
    with explain(f"{path} on {socket.gethostname()} is damaged or not a checkpoint", Exception):
        # The file is a zip archive with a CRC-32 for each record, which torch.load() ignores.
        if damaged := zipfile.ZipFile(path).testzip():
            raise ValueError(f"wrong CRC-32 of {damaged}")
        state = torch.load(path, map_location="cpu", weights_only=True)
        return state | {"name": state["name"]}  # KeyError if it is not one of ours


def find_checkpoint(cfg: argparse.Namespace, directory: RunDirectory) -> Path | None:
    """The checkpoint to load: the newest intact one of the run, else --resume. For rank 0."""

    def step_of(path: Path) -> float:
        with suppress(Exception):  # mmap: without reading the weights
            return torch.load(path, mmap=True, weights_only=True)["global_step"]
        return math.inf  # not readable: load_checkpoint() says why

    saved = sorted(directory.path.resolve().glob("checkpoint_*.pt"), key=step_of, reverse=True)
    if (saved and cfg.resume == "none") or Path(cfg.resume).resolve() in saved[1:]:
        raise UserError(f"{saved[0]} is in the way of --resume {cfg.resume}: delete or move it")
    for path in saved:
        try:
            load_checkpoint(path)
            return path
        except UserError as error:
            log(f"WARNING: skipped: {error}", sys.stderr)
    if saved:
        raise UserError(f"no intact checkpoint in {directory.path}: choose another directory")
    return None if cfg.resume in ("auto", "none") else Path(cfg.resume)


def write_status(run: "Run", state: str, reason: str = "") -> None:
    """status.json, and a copy for the supervisor. States: running, finished, stopped. On rank 0."""
    status = {"state": state, "reason": reason, "run_dir": str(run.directory.path.resolve())}
    status |= {name: getattr(run, name) for name in ("start_step", "global_step", "saved_step")}
    status |= {"world_size": run.world.world_size, "began": run.began, "time": time.time()}
    for path in {"status.json", os.environ.get("STATUS_FILE", "status.json")}:
        run.directory.write(path, lambda file: file.write(json.dumps(status).encode()))


# ----------------------------------------------------------------------------------- STOPPING
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


class StopFlag:
    """Whether and why to stop: a signal, a file or the clock. A second Ctrl-C ends the process."""

    @explain("DEADLINE should be a time in seconds since 1970", ValueError)
    def __init__(self, directory: Path):
        self.reason, self.since, self.save = "", math.inf, False
        self.files = directory / "STOP", Path(os.environ.get("STOP_FILE", directory / "STOP"))
        end = float(os.environ.get("DEADLINE") or os.environ.get("SLURM_JOB_END_TIME") or math.inf)
        self.deadline = end - min(120, (end - time.time()) / 10)  # time for saving
        signal.signal(signal.SIGURG, lambda *_: setattr(self, "save", True))  # ignored by default
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _frame) -> None:
        # Within a second of the first, it is the same Ctrl-C, forwarded by a launcher.
        if number == signal.SIGINT and time.time() > self.since + 1:
            os._exit(130)
        if (number, self.since, os.environ.get("RANK", "0")) == (signal.SIGINT, math.inf, "0"):
            with suppress(OSError):  # not print(), which Ctrl-C may have interrupted
                os.write(2, b"\nstopping: ranks save and exit; press Ctrl-C again to kill them\n")
        self.reason = self.reason or signal.Signals(number).name
        self.since = min(self.since, time.time())

    def poll(self) -> bool:
        """Whether this rank knows of a reason to stop."""
        found = "STOP file" * any(file.exists() for file in self.files)
        self.reason = self.reason or found or "time limit" * (time.time() > self.deadline)
        return bool(self.reason)


def ignore_stop_signals(_worker: int) -> None:
    """Schedulers signal all processes of a job, but a rank needs its workers until it stops."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


# ----------------------------------------------------------------------------------- TRAINING
POSITION_FIELDS = "global_step", "epoch_totals", "logged_totals"  # in a checkpoint
SYNC_SECONDS = 5  # between exchanges of the stop flag; or one step, if that takes longer


class Run:
    """One training run: its parts and its position. Collective."""

    def __init__(self, cfg, world: World, directory: RunDirectory, state: dict):
        self.cfg, self.world, self.directory, device = cfg, world, directory, world.device
        train_set, test_set, spec = get_datasets(cfg)
        self.mean, self.std = torch.tensor((spec.mean, spec.std), device=device)[..., None, None]
        self.sampler = MicroBatchSampler(len(train_set), cfg, world)
        self.train_loader = get_dataloader(cfg, world, train_set, self.sampler)
        # Batches r, r + W, ...: every test sample once, where DistributedSampler would pad.
        batches = torch.arange(len(test_set)).split(cfg.batch_size)[world.rank :: world.world_size]
        self.test_loader = get_dataloader(cfg, world, test_set, [b.tolist() for b in batches])
        self.name = f"{cfg.model}, {cfg.optimizer}, {len(train_set)} samples of {cfg.dataset}"
        torch.manual_seed(cfg.seed)
        self.model = build_model(cfg, spec).to(device, memory_format=torch.channels_last)
        for stage in self.model.children() if cfg.activation_checkpointing else ():
            for block in stage.children():  # of a ResNet; in eager mode, BatchNorm updates twice
                block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
                for norm in (m for m in block.modules() if isinstance(m, nn.BatchNorm2d)):
                    norm.momentum = 1 - (1 - norm.momentum) ** (1 if cfg.compile else 0.5)
        if cfg.compile:  # in place, so names in checkpoints stay; one graph per shape, because a
            self.model.compile(dynamic=False)  # graph for any shape depends on which came first
        self.ddp, self.optimizer = self.model, build_optimizer(cfg, self.model)
        # Without fp16 it only skips steps whose gradients are not finite.
        options = {} if cfg.amp == "fp16" else {"init_scale": 1.0, "growth_interval": 2**31 - 1}
        self.scaler = torch.amp.GradScaler(device.type, **options)
        self.global_step = self.next_sync = self.failed_saves = 0
        self.epoch_totals = self.logged_totals = [0, 0, 0]  # loss, correct, samples over all ranks
        if state and state["run"] != self.name:
            text = f"the checkpoint is of {state['run']}, this is {self.name}"
            raise UserError(f"{text}: choose another --checkpoint-dir")
        with explain("the checkpoint is from a different model", RuntimeError, ValueError):
            if state:
                self.model.load_state_dict(state["model"])
                # Momentum is part of the run, but the options of this command apply to it.
                state["optimizer"]["param_groups"] = self.optimizer.state_dict()["param_groups"]
                self.optimizer.load_state_dict(state["optimizer"])
                if cfg.amp == state["config"]["amp"]:
                    self.scaler.load_state_dict(state["scaler"])
                vars(self).update({name: state[name] for name in POSITION_FIELDS})
        self.start_step = self.saved_step = self.synced_step = self.global_step
        self.total = cfg.epochs * self.sampler.steps_per_epoch
        self.last_step = min(self.total, cfg.stop_at_step or self.total)
        self.trackers, self.unwritten, self.synced_at = [], b"", time.monotonic()
        self.saved = sorted(directory.path.glob("checkpoint_*.pt"), key=os.path.getmtime)
        self.stop, self.began, self.exact_sum = StopFlag(directory.path), time.time(), 0


def compute_loss(run: Run, model: nn.Module, images: torch.Tensor, labels: torch.Tensor):
    """(sum of losses, logits [b, classes], labels) of uint8 or 0 .. 1 images. Yours goes here."""
    device, brightest = run.world.device, 255 if images.dtype == torch.uint8 else 1
    images = images.to(device, torch.float32, non_blocking=True).sub(brightest * run.mean)
    images = images.div_(brightest * run.std).contiguous(memory_format=torch.channels_last)
    labels = labels.to(device, non_blocking=True)
    dtype = torch.float16 if run.cfg.amp == "fp16" else torch.bfloat16
    with torch.autocast(device.type, dtype, enabled=run.cfg.amp != "off"):
        logits = model(images)
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), logits, labels


def wrap_ddp(run: Run) -> None:
    """DistributedDataParallel averages the gradients of all ranks during the backward pass."""
    run.ddp = nn.parallel.DistributedDataParallel(run.model.train(), gradient_as_bucket_view=True)
    run.ddp.broadcast_buffers = False  # BatchNorm's: evaluate() does it (deprecated as an argument)
    # DDP regroups the gradients after its first backward pass. Do that here, with two passes that
    # are then undone: in a resumed run, it would happen at another step and change the rounding.
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    batch = default_collate([run.train_loader.dataset[0]] * run.cfg.batch_size)
    for _ in range(2):
        compute_loss(run, run.ddp, *batch)[0].backward()
    run.model.load_state_dict(before)
    run.optimizer.zero_grad()


def add_exactly(run: Run, last: bool) -> None:
    """For --reproducible, after each micro-batch: gradients that add up to the same bits.

    They are rounded to multiples of 2**-40, the last bit of a float64 from 2**12 on. Sums below
    2**13 are then exact, in any order and on any number of ranks; gradients must be below 2**11.
    With fp16, multiply these limits by the loss scale, a power of two.
    """
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.flatten() for p in parameters]).double()
    rounding = run.scaler.scale(flat.new_tensor(1.5 * 2**12))  # scaled like the gradients
    run.exact_sum = flat.add_(rounding).sub_(rounding).add_(run.exact_sum)
    run.optimizer.zero_grad()
    if last:
        if run.world.world_size > 1:
            dist.all_reduce(run.exact_sum)
        total, run.exact_sum = run.exact_sum, 0
        for p, grad in zip(parameters, total.split([p.numel() for p in parameters])):
            p.grad = torch.empty_like(p).copy_(grad.view_as(p))


def train_step(run: Run, batches, step: int, metrics: Metrics) -> None:
    """One optimizer step: this rank's micro-batches forward and backward, then the update.

    DDP averages gradients over W ranks. Each loss is a sum times W / samples of the step, so the
    average is the mean over these samples, even if the ranks have different numbers of them.
    """
    cfg, sampler, device = run.cfg, run.sampler, run.world.device
    ranks = 1 if cfg.reproducible else run.world.world_size
    for micro, batch in zip(sampler.local_micro_batches, batches):  # zip does not read ahead
        begin, end, step_size = sampler.bounds(step, micro)
        last = micro == sampler.local_micro_batches[-1]
        # Only after the batch is read: reading may also draw random numbers.
        seed = derive_seed(cfg.seed, "dropout", run.global_step, micro)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed() would seed every backend
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)
        with nullcontext() if last or run.ddp is run.model else run.ddp.no_sync():
            loss_sum, logits, labels = compute_loss(run, run.ddp, *batch)
            weight = ranks / step_size if end > begin else 0.0
            run.scaler.scale(loss_sum * weight).backward()
        if cfg.reproducible:
            add_exactly(run, last)
        if end > begin:
            metrics.add(loss_sum.detach(), logits, labels)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(cfg, run.global_step, sampler.steps_per_epoch)  # of every group
    if cfg.clip_grad_norm:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), cfg.clip_grad_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.global_step += 1


def sync(run: Run, metrics: Metrics) -> tuple[list[int], bool, bool]:
    """([loss, correct, samples], whether to stop, to save), the same on all ranks. Collective."""
    faulthandler.dump_traceback_later(run.cfg.hang_timeout, exit=True)  # with all stacks
    steps, now = max(1, run.global_step - run.synced_step), time.monotonic()
    save = run.stop.save or (run.world.rank == 0 and (run.directory.path / "SAVE").exists())
    flags = run.stop.poll(), save, int(1e6 * (now - run.synced_at) / steps)
    *totals, stop, save, mean = metrics.all_reduce(run.world, flags)
    interval = int(1e6 * SYNC_SECONDS * run.world.world_size / max(1, mean))
    run.synced_step, run.synced_at, run.stop.save = run.global_step, now, run.stop.save and not save
    run.next_sync = run.global_step + max(1, min(interval, 2 * steps))
    if run.scaler.get_scale() < 2.0**-10:  # it halves whenever it skips a step
        raise UserError("gradients are often not finite: lower --lr or set --clip-grad-norm", "NaN")
    return totals, bool(stop), bool(save)


def train_epoch(run: Run) -> bool:
    """Train to the end of the epoch, save, evaluate. Returns whether to stop. Collective."""
    cfg, sampler, before = run.cfg, run.sampler, run.epoch_totals
    sampler.epoch, sampler.first_step = divmod(run.global_step, sampler.steps_per_epoch)
    if sampler.first_step == 0:
        run.epoch_totals = run.logged_totals = before = [0, 0, 0]
    metrics, run.mark = Metrics(run.world.device), (time.perf_counter(), before[2])
    batches = iter(run.train_loader)
    run.model.train()
    for step in range(sampler.first_step, sampler.steps_per_epoch):
        train_step(run, batches, step, metrics)
        last, end = step + 1 == sampler.steps_per_epoch, run.global_step == run.last_step
        log_now = last or run.global_step % cfg.log_every_steps == 0
        save_now = run.global_step % (cfg.checkpoint_every_steps or math.inf) == 0
        if log_now or save_now or end or run.global_step >= run.next_sync:
            totals, stop, save = sync(run, metrics)
            run.epoch_totals = [a + b for a, b in zip(before, totals)]
            if log_now:
                log_interval(run)
            if last or end or stop:
                break
            if save_now or save:
                save_checkpoint(run, final=False)
    save_checkpoint(run, final=end or stop)
    if last and (not stop or run.global_step == run.total):
        evaluate(run)
    return stop


def log_interval(run: Run) -> None:
    """Record the steps since the last record, which was at run.mark: (seconds, samples)."""
    values = means(*(a - b for a, b in zip(run.epoch_totals, run.logged_totals)))
    (began, samples), run.mark = run.mark, (time.perf_counter(), run.epoch_totals[2])
    values["samples_per_second"] = speed = (run.mark[1] - samples) / (run.mark[0] - began)
    run.logged_totals = run.epoch_totals
    if run.world.rank == 0:
        write_record(run, "train", lr=run.optimizer.param_groups[0]["lr"], **values)
        log(f"  step {run.global_step}: loss {values['loss']:.4f}, {speed:.0f} samples/s")


@torch.no_grad()
def evaluate(run: Run) -> None:
    """Record loss and accuracy of the epoch and of the test set. Collective."""
    for buffer in run.model.buffers() if run.world.world_size > 1 else ():
        dist.broadcast(buffer, 0)  # BatchNorm: all ranks evaluate what rank 0 saves
    run.model.eval()
    metrics, epoch = Metrics(run.world.device), run.global_step // run.sampler.steps_per_epoch
    for batch in run.test_loader:  # not collective: ranks may have different numbers of batches
        faulthandler.dump_traceback_later(run.cfg.hang_timeout, exit=True)
        metrics.add(*compute_loss(run, run.model, *batch))
    totals = metrics.all_reduce(run.world)
    if run.world.rank == 0:
        train, test, n = means(*run.epoch_totals), means(*totals), totals[2]
        write_record(run, "epoch", epoch=epoch, **train, **{f"test_{k}": test[k] for k in test})
        text = f"Epoch {epoch} - Avg Loss: {train['loss']:.6f}, Accuracy: {train['accuracy']:.2%}"
        log(f"{text}, Test Loss: {test['loss']:.6f}, Test Accuracy: {test['accuracy']:.2%} of {n}")


# --------------------------------------------------------------------------------------- MAIN
def train(cfg: argparse.Namespace, world: World) -> None:
    """The whole run: lock its directory, resume, train epoch by epoch. Collective."""
    if cfg.reproducible and world.device.type == "cpu":
        torch.set_num_threads(1)  # with more, some kernels sum in another order
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    torch.use_deterministic_algorithms(cfg.deterministic or cfg.reproducible)
    # Shapes rarely change: let cuDNN time its kernels once per shape and keep the fastest.
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    directory = RunDirectory(Path(cfg.checkpoint_dir))
    on_rank_0(world, directory.lock)
    path = on_rank_0(world, find_checkpoint, cfg, directory)
    state = load_checkpoint(path) if path else {}
    for name in ("global_batch_size", "seed") if path else ():  # they decide what a step consumes
        if (was := state["config"][name]) != (now := getattr(cfg, name)) and now and not world.rank:
            log(f"WARNING: the {name} of this run is {was}, not {now}", sys.stderr)
        setattr(cfg, name, was)
    on_rank_0(world, lambda: get_datasets(cfg) and None)  # it may download, so rank 0 first
    run, state = Run(cfg, world, directory, state), None  # frees the checkpoint's memory
    if world.rank == 0:
        text = f"{cfg.global_batch_size} = {run.sampler.per_step} micro-batches of {cfg.batch_size}"
        log(f"Global batch {text}; {run.sampler.steps_per_epoch} steps per epoch")
        log(f"Resuming from {path} at step {run.global_step}" if path else "Starting a new run")
    evaluated = on_rank_0(world, open_metrics, run)
    on_rank_0(world, write_status, run, "running")
    if path and not evaluated and run.global_step % run.sampler.steps_per_epoch == 0:
        evaluate(run)  # it was stopped before its evaluation
    if run.global_step < run.last_step and world.world_size > 1 and not cfg.reproducible:
        wrap_ddp(run)
    while run.global_step < run.last_step and not train_epoch(run):
        pass
    ending = "finished" if run.global_step >= run.total else "stopped"
    reasons = [run.stop.reason] * world.world_size
    if world.world_size > 1:
        dist.all_gather_object(reasons, run.stop.reason)  # rank 0 may not have seen it
    if world.rank == 0:  # the others wait below: launchers may kill all when one exits
        log(f"{ending.title()} at step {run.global_step} of {run.total}, saved in {directory.path}")
    on_rank_0(world, write_status, run, ending, next(filter(None, reasons), ""))


def main(argv: list[str] | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until StopFlag exists, Ctrl-C ends the process
    try:
        train(cfg := parse_config(sys.argv[1:] if argv is None else argv), setup_distributed(cfg))
    except (UserError, ModuleNotFoundError) as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2 if os.environ.get("RANK", "0") != "0" else 0)  # let rank 0 exit first
        log(f"train_distributed.py: error: {error}", sys.stderr)
        raise SystemExit(2) from error
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()  # of a DataLoader; exit would wait for it
    if dist.is_initialized():
        time.sleep(0.5 if torch.__version__ < "2.8" else 0.2)  # for gloo: pytorch issue 179291
        dist.destroy_process_group()  # not after an error: it might wait for other ranks


if __name__ == "__main__":
    main()
