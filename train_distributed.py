#!/usr/bin/env python3
"""Train an image classifier with PyTorch DistributedDataParallel: one file, to read from the top.

    python train_distributed.py                                     # one process: laptop, one GPU
    torchrun --standalone --nproc-per-node 4 train_distributed.py   # four GPUs of one machine
    srun --ntasks-per-node=4 python train_distributed.py            # Slurm, one task per GPU

Every option: --help. The same names serve in a file: --config configs/default_config.yaml.

A step consumes --global-batch-size samples, cut into micro-batches of --batch-size. The pair (step,
micro-batch) alone decides which samples a micro-batch holds, how they are augmented, and what
dropout drops. The ranks only divide the micro-batches among themselves. So 2 GPUs, 3 GPUs, or a run
that was stopped and resumed, all train on the same batches in the same order; one number,
global_step, says where a run is, and there is no random state to save.

Writes to --checkpoint-dir (one directory = one run): checkpoint_epoch_N.pt, checkpoint_step_N.pt, a
manifest .json beside each, config.yaml, metrics.jsonl, status.json.
Exit code: 0 finished, or stopped on request with all saved; 2 a mistake in what was asked, told in
one sentence; 1 anything else (torchrun turns every failure into 1).

Sections: OPTIONS, DISTRIBUTED, MODEL, DATA, METRICS, CHECKPOINTS, TRAINING, MAIN, ROLL CALL.
The heart: MicroBatchSampler, train_step(), train_epoch(), save_checkpoint().
Make it yours: your model in build_model(), your data in get_datasets().
"""

import argparse
import ctypes
import difflib
import fcntl
import functools
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import platform
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
import yaml
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    TensorDataset,
    default_convert,
)
from torchvision import transforms
from tqdm import tqdm


class UserError(Exception):
    """A mistake the user can mend: one sentence with the remedy, exit code 2, no traceback."""

    def __str__(self) -> str:
        # One line, and without the traceback that a DataLoader worker wraps an exception in.
        return " ".join(super().__str__().rsplit("UserError: ", 1)[-1].split())


# ------------------------------------------------------------------------------------ OPTIONS


def build_parser() -> argparse.ArgumentParser:
    """One option per line. The names are also the keys of a config file, with _ for -."""
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="train_distributed.py", description=__doc__, **style)
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("run").add_argument
    add("--config", metavar="FILE", help="YAML file of options; the command line wins over it")
    add("--print-config", action="store_true", help="print the resolved options and exit")
    add("--checkpoint-dir", "--save-dir", default="checkpoints", help="run directory [checkpoints]")
    add("--resume", default="auto", help="auto: go on from the newest checkpoint; none; FILE.pt")
    add("--overwrite", action=switch, default=False, help="--resume none or FILE may delete a run")
    add("--override", action=switch, default=False, help="--resume FILE, new global batch or seed")
    add("--epochs", type=positive_int, default=5, help="passes over the training data [5]")
    add("--stop-at-step", type=positive_int, help="save and exit at this step; schedule unchanged")
    add("--seed", type=natural, default=42, help="of everything random [42]")
    add("--deterministic", action=switch, default=False, help="repeatable kernels, slower on GPU")

    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=list(DATASETS), default="mnist_sample", help="[mnist_sample]")
    add("--data-dir", default="data", help="where data is, or is downloaded to [data]")
    add("--image-size", type=positive_int, help="pixels a side [MNIST 28, else 224]")
    add("--augment", action=switch, default=True, help="random shifts, or crops and flips [on]")
    add("--num-workers", type=natural, help="loader processes per rank [in memory 0, else cores]")
    add("--drop-last", action=switch, default=False, help="leave out an epoch's short last step")
    add("--synthetic-samples", type=positive_int, default=1280, help="epoch of synthetic [1280]")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="simple_convnet", help="or a torchvision classifier, as resnet50")
    add("--dropout", type=fraction, default=0.25, help="of simple_convnet [0.25]")

    add = parser.add_argument_group("batch and learning rate").add_argument
    add("--batch-size", type=positive_int, default=64, help="micro-batch: at once on one GPU [64]")
    add("--global-batch-size", type=positive_int, help="samples per step [batch size x ranks]")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="[sgd]")
    add("--lr", type=amount, default=0.05, help="peak learning rate [0.05]")
    add("--lr-base-batch-size", type=positive_int, help="B: peak is lr x global batch / B [off]")
    add("--lr-schedule", choices=["cosine", "constant"], default="cosine", help="[cosine]")
    add("--warmup-epochs", type=amount, default=0.2, help="linear warm-up [0.2]")
    add("--min-lr", type=amount, default=0.0, help="where the cosine ends [0]")
    add("--momentum", type=fraction, default=0.9, help="of sgd [0.9]")
    add("--weight-decay", type=amount, default=1e-4, help="[0.0001]")
    add("--clip-grad-norm", type=amount, default=0.0, help="largest gradient norm [0: any]")

    add = parser.add_argument_group("speed").add_argument
    add("--amp", choices=["off", "bf16", "fp16"], default="off", help="mixed precision [off]")
    add("--compile", action=switch, default=False, help="torch.compile the model")
    add("--channels-last", action=switch, default=True, help="memory format of images [on]")
    add("--activation-checkpointing", action=switch, default=False, help="recompute deep networks")

    add = parser.add_argument_group("metrics and checkpoints").add_argument
    add("--log-every-steps", type=positive_int, default=20, help="steps between records [20]")
    add("--tensorboard", action=switch, default=False, help="also write TensorBoard files")
    add("--wandb", action=switch, default=False, help="also log to W&B (WANDB_MODE=offline works)")
    add("--checkpoint-every-steps", type=positive_int, help="besides every epoch [off]")
    add("--keep", type=natural, default=3, help="newest checkpoints kept; 0: all [3]")

    add = parser.add_argument_group("distributed").add_argument
    add("--distributed-backend", choices=["nccl", "gloo"], help="[nccl on GPUs, else gloo]")
    add("--nodes", type=positive_int, help="refuse to start on any other number of nodes")
    add("--gpus-per-node", type=positive_int, help="refuse to start with other ranks per node")
    add("--init-timeout", type=seconds, default=300, help="seconds to wait for all ranks [300]")
    add("--collective-timeout", type=seconds, default=600, help="seconds for one collective [600]")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # old launchers pass it
    return parser


def checked(kind, name: str, valid):
    """A type for argparse that says in words what it takes."""

    def convert(text: str):
        with suppress(ValueError):
            if valid(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a {name}")

    return convert


positive_int = checked(int, "whole number from 1 up", lambda value: value > 0)
natural = checked(int, "whole number from 0 up", lambda value: 0 <= value < 2**63)
amount = checked(float, "number from 0 up", lambda value: 0 <= value < math.inf)
seconds = checked(float, "number of seconds from 1 to 1000000", lambda value: 1 <= value <= 1e6)
fraction = checked(float, "number from 0 to below 1", lambda value: 0 <= value < 1)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that complains with UserErrors and knows the nearest name to a typo."""

    def error(self, message: str) -> None:
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].split("=")[0]
            message = f"unknown option {word}{nearest(word, self._option_string_actions)}"
        raise UserError(f"{message} (--help lists the options)")


def nearest(word: str, names) -> str:
    close = difflib.get_close_matches(word, names, n=1)
    return f", did you mean {close[0]}?" if close else ""


def count(number: int, noun: str) -> str:
    """3, "process" -> "3 processes" """
    return f"{number} {noun}" + ("es" if noun[-1] in "sh" else "s") * (number != 1)


def parse_config(argv: list[str]) -> argparse.Namespace:
    """Options, resolved in the order default < config file < command line."""
    parser = build_parser()
    cfg = parser.parse_args(argv)
    if not cfg.config:
        return cfg
    try:
        words = config_file_words(cfg.config, parser)
        parser.parse_args(words)
    except OSError as error:
        raise UserError(f"cannot read --config {cfg.config}: {error.strerror}") from None
    except (UserError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{cfg.config}: {error}") from None
    return parser.parse_args(words + argv)


def config_file_words(path: str, parser: Parser) -> list[str]:
    """A YAML file as command line words, so that file and command line pass the same checks."""
    # BaseLoader makes strings, lists and dicts, nothing else: safe, and `amp: off` stays "off".
    options = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader) or {}
    if not isinstance(options, dict) or not all(isinstance(v, str) for v in options.values()):
        raise UserError("should hold lines like `epochs: 5`, one option each, not nested")
    words = []
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if value in ("", "null"):  # leaves the default
            continue
        if isinstance(parser._option_string_actions.get(flag), argparse.BooleanOptionalAction):
            if value.lower() not in ("true", "false"):
                raise UserError(f"{key}: {value!r} is neither true nor false")
            words.append(flag if value.lower() == "true" else f"--no-{flag[2:]}")
        else:
            words.append(f"{flag}={value}")
    return words


def config_as_yaml(cfg: argparse.Namespace) -> str:
    hidden = ("config", "print_config", "local_rank")
    return yaml.safe_dump({k: v for k, v in vars(cfg).items() if k not in hidden}, sort_keys=False)


# -------------------------------------------------------------------------------- DISTRIBUTED


@dataclass(frozen=True)
class World:
    """Who this process is among all of them; as it stands, one process alone."""

    rank: int = 0  # over all nodes: 0 .. world_size - 1
    local_rank: int = 0  # on this node: 0 .. local_world_size - 1
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "localhost"  # where rank 0 is
    master_port: int = 0
    job: str = ""  # tells this launch from others
    device: torch.device = torch.device("cpu")
    cores: int = 1  # CPU cores that are this rank's own


def read_launch_environment(env: dict[str, str]) -> World:
    """torchrun's variables first, else those of a real srun step, else one process alone."""

    def integer(name: str, default: str = "") -> int:
        value = re.match(r"\d+", env.get(name, default))
        if not value:
            raise UserError(f"{name} is {env.get(name)!r}: the launcher should make it a number")
        return int(value[0])

    if "RANK" in env and "WORLD_SIZE" in env:
        ranks = integer("RANK"), integer("LOCAL_RANK"), integer("WORLD_SIZE")
        local_size, job = integer("LOCAL_WORLD_SIZE", "1"), env.get("TORCHELASTIC_RUN_ID", "none")
        master, port = env.get("MASTER_ADDR", "localhost"), integer("MASTER_PORT", "29500")
        return World(*ranks, local_size, master, port, env.get("RUN_NONCE", job))
    # A batch shell and an interactive allocation have SLURM_PROCID too, though nobody else runs:
    # they have no step id, or one of Slurm's reserved ones, or a terminal (srun --pty bash).
    step = integer("SLURM_STEP_ID", str(0xFFFFFFFF))
    if step >= 0xFFFFFFF0 or ("SLURM_PTY_PORT" in env and os.isatty(0)):
        return World()
    ranks = integer("SLURM_PROCID"), integer("SLURM_LOCALID"), integer("SLURM_STEP_NUM_TASKS")
    local_size, job = integer("SLURM_STEP_TASKS_PER_NODE"), integer("SLURM_JOB_ID")
    # A port of the step's own, below the ephemeral ones (32768 and up).
    port = integer("MASTER_PORT", str(15000 + (16 * job + step) % 15000))
    master = env.get("MASTER_ADDR") or first_host_of_step(env)
    return World(*ranks, local_size, master, port, f"{job}.{step}")


def first_host_of_step(env: dict[str, str]) -> str:
    """The host of rank 0. Slurm itself unfolds lists like rack[01-02]-n[1-4]."""
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        return "localhost"
    command = ["scontrol", "show", "hostnames", env.get("SLURM_STEP_NODELIST", "")]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise UserError(f"`{' '.join(command)}` names no host: set MASTER_ADDR") from None


def setup_distributed(cfg: argparse.Namespace) -> World:
    """Join all ranks into one process group and say who is where. Collective: every rank.

    Raises UserError when ranks are missing, share a GPU, or do not all run the same thing.
    """
    world = read_launch_environment(os.environ)
    gpus = torch.cuda.device_count()
    # srun --gpus-per-task=1 shows every rank one GPU only: device 0, whatever its local rank.
    index = world.local_rank if world.local_rank < gpus else 0
    device = torch.device("cuda", index) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # before anything collective, or all ranks sit on GPU 0 too
    world = replace(world, device=device, cores=take_cores(world, pin=not gpus))
    backend = cfg.distributed_backend or ("nccl" if gpus else "gloo")
    if backend == "nccl" and not gpus:
        raise UserError(f"{socket.gethostname()} shows no GPU, which nccl needs: ask for one")
    card = {
        "host": socket.gethostname(),
        "address": address_towards(world.master_addr),
        "device": torch.cuda.get_device_name(device) if gpus else "CPU",
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if gpus else None,
        # What all ranks must have in common; only their data may lie in different places.
        "same": {
            "train_distributed.py": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8],
            "torch": torch.__version__,
            "backend": backend,
            **{f"--{k}": v for k, v in vars(cfg).items() if k not in ("data_dir", "local_rank")},
        },
    }
    store = call_the_roll(world, card, cfg)
    if store:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=cfg.collective_timeout),
            device_id=device if backend == "nccl" else None,
        )
        total = torch.tensor(world.rank + 1, device=device)
        dist.all_reduce(total)
        if total.item() != (right := world.world_size * (world.world_size + 1) // 2):
            raise RuntimeError(f"the first all_reduce gave {total.item()} instead of {right}")
    return world


def take_cores(world: World, pin: bool) -> int:
    """How many CPU cores are this rank's own; pinned, it keeps to them.

    srun binds each task to cores of its own. torchrun lets all ranks roam over all cores, where
    ranks that compute on the CPU get in each other's way.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return max(1, os.cpu_count() // world.local_world_size)
    cores, ranks = sorted(os.sched_getaffinity(0)), world.local_world_size
    if "TORCHELASTIC_RUN_ID" in os.environ or len(cores) == os.cpu_count():
        begin, end = (len(cores) * n // ranks for n in (world.local_rank, world.local_rank + 1))
        cores = cores[begin:end]
        if cores and pin:
            os.sched_setaffinity(0, cores)
    return max(1, len(cores))


def end_on(problem: str | None, rank: int = 0) -> None:
    """End on a problem that every rank knows of: rank 0 tells it, the others leave quietly."""
    if problem and rank == 0:
        raise UserError(problem)
    if problem:
        time.sleep(1)  # the first exit makes a launcher kill the rest: let rank 0 speak first
        raise SystemExit(2)


def gather(world: World, value) -> list:
    """A small value of each rank. Collective: every rank."""
    values = [value] * world.world_size
    if world.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def on_every_rank(world: World, function, *arguments):
    """function(*arguments) here; a UserError on any rank ends them all. Collective: every rank."""
    result = problem = None
    try:
        result = function(*arguments)
    except UserError as error:
        problem = f"rank {world.rank} on {socket.gethostname()}: " * (world.rank > 0) + str(error)
    end_on(next(filter(None, gather(world, problem)), None), world.rank)
    return result


# -------------------------------------------------------------------------------------- MODEL


class SimpleConvNet(nn.Module):
    """Two convolutions, two linear layers: [b, channels, size, size] -> logits [b, classes]."""

    def __init__(self, channels: int, size: int, classes: int, dropout: float):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.fc1 = nn.Linear(64 * ((size - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))  # [b, 32, size - 2, size - 2]
        x = F.relu(self.conv2(x))  # [b, 64, size - 4, size - 4]
        x = F.max_pool2d(x, 2)  # [b, 64, 12, 12] for MNIST's 28 pixels
        x = self.dropout(torch.flatten(x, 1))  # [b, 9216]
        return self.fc2(self.dropout(F.relu(self.fc1(x))))


def build_model(cfg: argparse.Namespace, spec: "DataSpec") -> nn.Module:
    """The model, from images [b, channels, size, size] to logits [b, classes]. Yours goes here."""
    if cfg.model == "simple_convnet":
        return SimpleConvNet(spec.channels, spec.size, spec.classes, cfg.dropout)
    names = torchvision.models.list_models(torchvision.models)
    if cfg.model not in names:
        hint = nearest(cfg.model, ["simple_convnet", *names])
        raise UserError(f"--model {cfg.model} is no classifier of torchvision{hint}")
    # Two of them have a second output for training; without it they are plain classifiers.
    extra = {"aux_logits": False} if cfg.model in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(cfg.model, num_classes=spec.classes, **extra)


def place_model(cfg: argparse.Namespace, world: World, spec: "DataSpec", smallest: int):
    """build_model() on this rank's device, with the speed options applied.

    It is tried on the smallest micro-batch of an epoch, now rather than hours later.
    """
    torch.manual_seed(cfg.seed)
    model = build_model(cfg, spec).to(world.device)
    if cfg.channels_last:
        model = model.to(memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    blank = torch.zeros(smallest, spec.channels, spec.size, spec.size, device=world.device)
    try:
        with torch.no_grad():
            model(blank)
    except (RuntimeError, AssertionError, ValueError) as error:
        if not isinstance(model, SimpleConvNet) and "torchvision" not in type(model).__module__:
            raise  # a bug in a model of your own: you want to see where
        problem = f"{cfg.model} cannot train on {count(smallest, 'image')} of {spec.size} pixels"
        remedy = "choose --image-size, or --drop-last if the last step of an epoch is too short"
        raise UserError(f"{problem} ({error}): {remedy}") from None
    model.load_state_dict(before)  # BatchNorm has looked
    if cfg.activation_checkpointing:
        for block in blocks_of(model):
            recompute_in_backward(block)
    if cfg.compile:
        # In place, so that the names in a checkpoint stay the same. And each shape for itself: what
        # is compiled for "any shape" depends on which came first, so a resumed run would differ.
        model.compile(dynamic=False)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost blocks that are stacked in a Sequential (in a ResNet, its Bottlenecks)."""
    found = []
    for child in model.children():
        stacked = isinstance(model, nn.Sequential) and any(child.children())
        is_block = stacked and not isinstance(child, nn.Sequential)
        found += [child] if is_block else blocks_of(child)
    return found


def recompute_in_backward(block: nn.Module) -> None:
    """Activation checkpointing: keep the input of a block only, compute the rest once more."""
    block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    for norm in block.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.momentum:
            # Its running statistics get each batch twice now. Two such updates make one.
            norm.momentum = 1 - math.sqrt(1 - norm.momentum)


def build_optimizer(cfg: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    # fused: one pass over all parameters instead of several operations for each of them
    options = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "fused": True}
    if cfg.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **options)
    return torch.optim.SGD(model.parameters(), momentum=cfg.momentum, **options)


def learning_rate(cfg: argparse.Namespace, step: int, steps_per_epoch: int) -> float:
    """A function of the step alone: linear warm-up, then a cosine or a constant.

    With --lr-base-batch-size B the peak is lr x global batch / B (Goyal et al., arXiv:1706.02677).
    """
    peak = cfg.lr * cfg.global_batch_size / (cfg.lr_base_batch_size or cfg.global_batch_size)
    warmup = round(cfg.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if cfg.lr_schedule == "constant":
        return peak
    done = (step - warmup) / max(1, cfg.epochs * steps_per_epoch - warmup)
    return cfg.min_lr + (peak - cfg.min_lr) * (1 + math.cos(math.pi * done)) / 2


# --------------------------------------------------------------------------------------- DATA


@dataclass(frozen=True)
class DataSpec:
    """What the model and the loop must know of a data set."""

    channels: int  # that the model takes
    size: int  # pixels a side that the model takes
    classes: int
    mean: tuple[float, ...]  # of pixels scaled to 0 .. 1, by channel of the data
    std: tuple[float, ...]


IMAGENET_SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def get_datasets(cfg: argparse.Namespace, world: World):
    """(training set, test set, DataSpec) of --dataset. Collective: every rank. Yours goes here."""
    if cfg.dataset in ("mnist", "fashion_mnist"):
        # Rank 0 first, alone, for the folder may be shared; then one process of each other node.
        for my_turn in (world.rank == 0, world.local_rank == 0):
            download = functools.partial(read_mnist, cfg, train=True, download=True)
            on_every_rank(world, download if my_turn else lambda: None)
    return on_every_rank(world, DATASETS[cfg.dataset], cfg)


def mnist(cfg: argparse.Namespace):
    """MNIST or Fashion-MNIST in --data-dir, or the sample of MNIST that ships beside this file."""
    train, test = (read_mnist(cfg, train) for train in (True, False))
    train_set = InMemoryImages(train.data[:, None], train.targets)
    train_set.shift_seed = cfg.seed if cfg.augment else None
    channels = 1 if cfg.model == "simple_convnet" else 3  # torchvision's models expect colour
    mean, std = (0.2860, 0.3530) if cfg.dataset == "fashion_mnist" else (0.1307, 0.3081)
    spec = DataSpec(channels, cfg.image_size or 28, 10, (mean,), (std,))
    return train_set, InMemoryImages(test.data[:, None], test.targets), spec


def read_mnist(cfg: argparse.Namespace, train: bool, download: bool = False):
    """torchvision's data set; it compares downloads with their MD5 and reads no truncated file."""
    kind = torchvision.datasets.MNIST
    if cfg.dataset == "fashion_mnist":
        kind = torchvision.datasets.FashionMNIST
    root = SAMPLE if cfg.dataset == "mnist_sample" else Path(cfg.data_dir)
    name, folder = kind.__name__, root / kind.__name__
    socket.setdefaulttimeout(30)  # where a firewall swallows packets, give up rather than hang
    try:
        return kind(root, train=train, download=download)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        state = "is damaged: delete it" if any(folder.glob("raw/*ubyte")) else "cannot be had"
        raise UserError(
            f"{folder} {state} ({error}); where there is a network, python -c 'import torchvision; "
            f'torchvision.datasets.{name}("D", download=True)\' makes D/{name}: copy it to {root}'
        ) from None
    finally:
        socket.setdefaulttimeout(None)


def image_folder(cfg: argparse.Namespace):
    """DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg, augmented as usual for ImageNet."""
    size = cfg.image_size or 224
    plain = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    augmented = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    sets = []
    for name, steps in (("train", augmented if cfg.augment else plain), ("val", plain)):
        steps = transforms.Compose([*steps, transforms.PILToTensor()])
        try:
            folder = Path(cfg.data_dir, name)
            sets.append(torchvision.datasets.ImageFolder(folder, steps, loader=decode))
        except OSError as error:
            problem = f"--data-dir {cfg.data_dir} needs {name}/CLASS/IMAGE files"
            raise UserError(f"{problem} ({error})") from None
    train, val = sets
    if odd := set(train.classes) ^ set(val.classes):
        raise UserError(f"train and val of {cfg.data_dir} differ in the classes {sorted(odd)}")
    return train, val, DataSpec(3, size, len(train.classes), *IMAGENET_SCALE)


def synthetic(cfg: argparse.Namespace):
    """Random images in the shape of ImageNet: for benchmarks, and to try things without data."""
    n, size = cfg.synthetic_samples, cfg.image_size or 224
    generator = torch.Generator().manual_seed(cfg.seed)
    images = torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 1000, (n,), generator=generator)
    spec = DataSpec(3, size, 1000, *IMAGENET_SCALE)
    return InMemoryImages(images, labels), InMemoryImages(images[:256], labels[:256]), spec


SAMPLE = Path(__file__).resolve().parent / "data" / "mnist_sample"
DATASETS = {"mnist_sample": mnist, "mnist": mnist, "fashion_mnist": mnist}
DATASETS |= {"imagefolder": image_folder, "synthetic": synthetic}


class InMemoryImages(TensorDataset):
    """images uint8 [n, c, height, width] and labels int64 [n]: a micro-batch is gathered at once.

    With shift_seed, each image moves by up to 2 pixels, drawn from (seed, epoch, sample).
    """

    shift_seed: int | None = None

    def to(self, device: torch.device) -> None:
        self.tensors = tuple(tensor.to(device) for tensor in self.tensors)

    def __getitems__(self, keys: list[int]):
        """keys (see MicroBatchSampler) -> uint8 [b, c, height, width], int64 [b]"""
        ids = torch.tensor(keys) % len(self)
        rows = ids.to(self.tensors[0].device, non_blocking=True)
        images, labels = (tensor[rows] for tensor in self.tensors)
        if self.shift_seed is not None:
            by = epoch_shifts(self.shift_seed, keys[0] // len(self), len(self))[ids]
            images = shift(images, by.to(images.device, non_blocking=True))
        return images, labels


@functools.lru_cache(maxsize=1)
def epoch_shifts(seed: int, epoch: int, samples: int) -> torch.Tensor:
    """int64 [samples, 2]: by how many rows and columns, -2 .. 2, each sample moves this epoch."""
    generator = torch.Generator().manual_seed(mix(seed, "shift", epoch))
    return torch.randint(-2, 3, (samples, 2), generator=generator)


def shift(images: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """images [b, c, h, w] moved by [b, 2] rows and columns of at most 2; black comes in."""
    b, _, h, w = images.shape
    arange = functools.partial(torch.arange, device=images.device)
    rows = (arange(2, h + 2) - by[:, :1])[:, :, None]  # [b, h, 1]
    cols = (arange(2, w + 2) - by[:, 1:])[:, None, :]  # [b, 1, w]
    # Indices on both sides of a slice move its axis to the end: [b, h, w, c].
    return F.pad(images, (2, 2, 2, 2))[arange(b)[:, None, None], :, rows, cols].movedim(-1, 1)


class Seeded(Dataset):
    """A data set of (image, label) whose random augmentation comes from (seed, epoch, sample)."""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: int):
        """key: see MicroBatchSampler"""
        epoch, index = divmod(key, len(self))
        seed = mix(self.seed, "augment", epoch, index)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self.dataset[index]


def decode(path: str):
    try:
        return torchvision.datasets.folder.default_loader(path)
    except Exception as error:
        raise UserError(f"cannot decode {path} ({error}): replace or remove it") from None


def mix(*numbers) -> int:
    """A 63-bit seed out of numbers and words; neighbours get unrelated ones."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class MicroBatchSampler(Sampler):
    """The micro-batches of this rank; stands where DistributedSampler stands.

    One permutation per epoch, from (seed, epoch). Step s takes the next G samples of it, the last
    step what is left: none is lost, none used twice. A step is cut into C = G / b micro-batches;
    rank r of W holds those from C * r // W up to C * (r + 1) // W.

    Yields lists of keys; key = epoch * samples + sample id. So the loader's workers, which outlive
    an epoch, need no message to know which augmentation is due.
    """

    def __init__(self, samples: int, cfg: argparse.Namespace, world: World):
        cfg.global_batch_size = cfg.global_batch_size or cfg.batch_size * world.world_size
        self.samples, self.seed = samples, cfg.seed
        self.global_batch_size = cfg.global_batch_size
        total, each = cfg.global_batch_size, cfg.batch_size
        self.per_step, rest = divmod(total, each)
        if rest:
            raise UserError(f"global batch size {total} is no multiple of batch size {each}")
        if self.per_step < world.world_size:
            raise UserError(
                f"global batch size {total} is {count(self.per_step, 'micro-batch')} of {each} for "
                f"{world.world_size} ranks: lower --batch-size to {total // world.world_size or 1} "
                "(a resumed run keeps its global batch; a new one may raise --global-batch-size)"
            )
        first, end = (self.per_step * r // world.world_size for r in (world.rank, world.rank + 1))
        self.mine = range(first, end)
        short_step = samples % total > 0 and not cfg.drop_last
        self.steps_per_epoch = samples // total + short_step
        if not self.steps_per_epoch:
            raise UserError(f"{samples} training samples do not fill a global batch of {total}")
        # Of the micro-batches; the last step of an epoch has the smallest.
        self.smallest = max(1, self.step_size(self.steps_per_epoch - 1) // self.per_step)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        self.epoch, self.first_step = epoch, first_step

    def step_size(self, step: int) -> int:
        return min(self.global_batch_size, self.samples - step * self.global_batch_size)

    def bounds(self, step: int, micro: int) -> tuple[int, int]:
        """Begin and end of a micro-batch in the epoch's order. A short step is cut evenly too."""
        start, size = step * self.global_batch_size, self.step_size(step)
        return start + size * micro // self.per_step, start + size * (micro + 1) // self.per_step

    def __iter__(self):
        generator = torch.Generator().manual_seed(mix(self.seed, "order", self.epoch))
        order = torch.randperm(self.samples, generator=generator) + self.epoch * self.samples
        for step in range(self.first_step, self.steps_per_epoch):
            for micro in self.mine:
                begin, end = self.bounds(step, micro)
                # A last step of fewer than C samples leaves micro-batches empty. They borrow one
                # with weight 0, because every rank must take part in the backward pass.
                yield order[begin : max(end, begin + 1)].tolist()


def get_dataloader(cfg, world: World, dataset: Dataset, batch_sampler: Sampler) -> DataLoader:
    """Yields a micro-batch at a time: images [b, c, h, w] and labels int64 [b]."""
    in_memory = isinstance(dataset, InMemoryImages)
    workers = cfg.num_workers
    if workers is None:
        workers = 0 if in_memory else min(world.cores, 16)
    if in_memory and not workers:
        dataset.to(world.device)
    return DataLoader(
        dataset if in_memory else Seeded(dataset, cfg.seed),
        batch_sampler=batch_sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=leave_signals_to_the_rank,
        # Python 3.11 may, very rarely, fork a worker that waits for a lock for ever: tell of it.
        timeout=cfg.collective_timeout if workers else 0,
        collate_fn=default_convert if in_memory else None,  # in memory: collated already
        pin_memory=workers > 0 and world.device.type == "cuda",
    )


def leave_signals_to_the_rank(_worker: int) -> None:
    """Launchers signal all processes of a job, but a rank that stops still needs its workers."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def prepare(images: torch.Tensor, cfg: argparse.Namespace, spec: DataSpec, device: torch.device):
    """[b, c, h, w] anywhere -> normalised floats [b, channels, size, size] on the device.

    uint8 means pixels of 0 .. 255, floats mean 0 .. 1 (as from ToTensor).
    """
    mean, std = scale_on(device, spec, 255 if images.dtype == torch.uint8 else 1)
    images = images.to(device, torch.float32, non_blocking=True).sub(mean).div_(std)
    if images.shape[-1] != spec.size:
        images = F.interpolate(images, size=spec.size, mode="bilinear")
    images = images.expand(-1, spec.channels, -1, -1)
    return images.contiguous(memory_format=torch.channels_last) if cfg.channels_last else images


@functools.lru_cache
def scale_on(device: torch.device, spec: DataSpec, white: int) -> list[torch.Tensor]:
    return [white * torch.tensor(v, device=device)[:, None, None] for v in (spec.mean, spec.std)]


# ------------------------------------------------------------------------------------ METRICS


class Sums:
    """Loss, correct predictions and samples so far, on the device: adding waits for no GPU."""

    def __init__(self, device: torch.device):
        self.values = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss_sum: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.values[0] += loss_sum.detach()
        self.values[1] += (logits.argmax(1) == labels).sum()
        self.values[2] += len(labels)

    def over_all_ranks(self, world: World, *more: float) -> list[float]:
        """[loss, correct, samples, *more], summed. Collective: every rank; waits for the GPU."""
        total = torch.cat([self.values, self.values.new_tensor(more)])
        if world.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()


class MetricsLog:
    """On rank 0: metrics.jsonl, one record a line, and what else was asked for."""

    def __init__(self, cfg: argparse.Namespace, global_step: int):
        path = Path(cfg.checkpoint_dir, "metrics.jsonl")
        # Steps after the checkpoint are trained again: their records go.
        lines = path.read_text().splitlines() if path.exists() else []
        kept = "".join(f"{line}\n" for line in lines if step_in(line) <= global_step)
        write_text(path, kept)
        self.file, self.board, self.run = path.open("a"), None, None
        if cfg.tensorboard:
            board = load_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
            self.board = board(path.with_name("tensorboard"), purge_step=global_step + 1)
        if cfg.wandb:
            name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
            options = {"id": name, "resume": "allow", "dir": cfg.checkpoint_dir}
            self.run = load_optional("wandb", "wandb").init(config=vars(cfg), **options)

    def write(self, kind: str, step: int, **values: float) -> None:
        record = {"kind": kind, "step": step, "time": time.time(), **values}
        with writing(Path(self.file.name)):
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        for name, value in values.items() if self.board else ():
            self.board.add_scalar(f"{kind}/{name}", value, step)
        if self.run:
            self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)


def load_optional(module: str, package: str):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"--{package} needs one more package: pip install {package}") from None


def step_in(record: str) -> float:
    """The step of a JSON record; infinity if the record is damaged."""
    try:
        return json.loads(record)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def is_evaluated(cfg: argparse.Namespace, progress: "Progress") -> bool:
    """Whether metrics.jsonl tells of an epoch that ended here."""
    path = Path(cfg.checkpoint_dir, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return any(step_in(line) == progress.global_step and '"epoch"' in line for line in lines)


# -------------------------------------------------------------------------------- CHECKPOINTS

FORMAT = "train_distributed 1"


@dataclass
class Progress:
    """Where a run is. With model, optimizer and scaler, all that a checkpoint must hold.

    The sums are [loss, correct, samples] over all ranks since the epoch began: up to now, and up to
    the last record in metrics.jsonl.
    """

    global_step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    logged: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


@contextmanager
def writing(path: Path):
    """A disk that is full or gone is told in one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        while error.__context__:  # torch.save hides "No space left on device" behind its own error
            error = error.__context__
        raise UserError(f"cannot write {path} ({error}): older checkpoints are intact") from None


def write_durably(path: Path, write) -> None:
    """write(file) to a temporary file that replaces path once it is on disk: all or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_durably(path, lambda file: file.write(text.encode()))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(run: "Run", progress: Progress, name: str) -> None:
    """Rank 0 writes name.pt and then its manifest name.json, with which the checkpoint counts.

    Plain types and tensors only, so that loading need not trust the file (weights_only=True).
    """
    path = Path(run.cfg.checkpoint_dir, f"{name}.pt")
    if run.world.rank:
        return
    state = {
        "format": FORMAT,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "progress": asdict(progress),
        "order": run.order(),
        "config": vars(run.cfg),
    }
    write_durably(path, lambda file: torch.save(state, file))
    facts = {"step": progress.global_step, "size": path.stat().st_size}
    write_text(path.with_suffix(".json"), json.dumps(facts | {"sha256": sha256_of(path)}))
    for manifest in manifests(run.cfg)[run.cfg.keep or sys.maxsize :]:
        manifest.unlink()
        manifest.with_suffix(".pt").unlink(missing_ok=True)


def manifests(cfg: argparse.Namespace) -> list[Path]:
    """Those in the run directory, the newest first; unreadable ones count as newest."""
    files = Path(cfg.checkpoint_dir).glob("checkpoint_*.json")
    return sorted(files, key=lambda file: step_in(file.read_text()), reverse=True)


def verify(checkpoint: Path) -> None:
    """Raise UserError unless a checkpoint is what its manifest says."""
    try:
        facts = json.loads(checkpoint.with_suffix(".json").read_text())
        sound = checkpoint.stat().st_size == facts["size"]
        sound = sound and sha256_of(checkpoint) == facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint} or its manifest is unreadable ({error!r})") from None
    if not sound:
        raise UserError(f"{checkpoint} is damaged: its size or sha256 is not that of its manifest")


def choose_checkpoint(cfg: argparse.Namespace) -> str | None:
    """What to resume from. For rank 0, which decides for all. Makes the directory, no more."""
    directory = Path(cfg.checkpoint_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UserError(f"cannot write to --checkpoint-dir {directory}: {error.strerror}") from None
    if cfg.override and cfg.resume in ("auto", "none"):
        raise UserError("--override goes with --resume FILE and another --checkpoint-dir")
    if cfg.resume == "auto":
        for manifest in manifests(cfg):
            checkpoint = manifest.with_suffix(".pt")
            try:
                verify(checkpoint)
            except UserError as damage:
                warn(f"passed over: {damage}")
                continue
            return str(checkpoint)
        if manifests(cfg):
            raise UserError(f"no checkpoint in {directory} is intact: start in another directory")
        return None
    if cfg.resume == "none":
        if any(directory.iterdir()) and not cfg.overwrite:
            raise UserError(f"{directory} is not empty: take another, or --overwrite the run in it")
        return None
    chosen = Path(cfg.resume)
    if not chosen.is_file():
        raise UserError(f"--resume {chosen}: there is no such file (else: auto, none)")
    if chosen.with_suffix(".json").exists():
        verify(chosen)
    newest = next((m.with_suffix(".pt") for m in manifests(cfg)), chosen)
    if newest.resolve() != chosen.resolve() and not cfg.overwrite:
        raise UserError(f"{newest} is in the way: take another --checkpoint-dir, or --overwrite")
    return str(chosen)


def warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def load_checkpoint(path: str, cfg: argparse.Namespace, world: World) -> dict:
    """A checkpoint, on the CPU, if it is one of this run. Its global batch and seed win."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        reason = f"{socket.gethostname()} cannot read {path} ({error.strerror})"
        raise UserError(f"{reason}: all nodes must share the run directory") from None
    except Exception as error:  # zip, pickle and torch each have their own
        raise UserError(f"{path} is no checkpoint ({str(error)[:80]})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is no checkpoint of this trainer ({FORMAT})")
    for name in ("model", "dataset", "optimizer"):
        if (was := state["config"][name]) != (now := getattr(cfg, name)):
            change = f"{path} was trained with --{name} {was}, this is {now}"
            raise UserError(f"{change}: take another --checkpoint-dir for another run")
    for name in ("global_batch_size", "seed") if not cfg.override else ():
        if (now := getattr(cfg, name)) not in (
            None,
            was := state["order"][name],
        ) and not world.rank:
            warn(f"the {name} of this run is {was} (from {path}), not {now}")
        setattr(cfg, name, was)
    return state


def is_of_this_run(checkpoint: str, cfg: argparse.Namespace) -> bool:
    return Path(checkpoint).resolve().parent == Path(cfg.checkpoint_dir).resolve()


def restore(state: dict, run: "Run", chosen: str) -> Progress:
    """Put the content of a checkpoint where it belongs."""
    progress, old, new = Progress(**state["progress"]), state["order"], run.order()
    if old["samples"] != new["samples"]:
        raise UserError(f"{old['samples']} samples in the checkpoint, {new['samples']} in the data")
    if old != new:
        # Steps of another size: their numbers must not meet those of the old ones in a directory.
        change = ", ".join(name for name in old if old[name] != new[name])
        if is_of_this_run(chosen, run.cfg):
            raise UserError(f"with another {change}, take another --checkpoint-dir")
        epochs, rest = divmod(progress.global_step, old["steps_per_epoch"])
        if rest:
            raise UserError(f"{change} may change between epochs only: resume at the end of one")
        progress.global_step = epochs * new["steps_per_epoch"]
    try:
        run.model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"the checkpoint is of another {run.cfg.model}: {error}") from None
    # Momentum is part of the run, but how much of it to use is an option.
    state["optimizer"]["param_groups"] = run.optimizer.state_dict()["param_groups"]
    run.optimizer.load_state_dict(state["optimizer"])
    if run.scaler.is_enabled() and state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    return progress


def open_run_directory(cfg, chosen: str | None, progress: Progress) -> MetricsLog:
    """On rank 0, once all is checked: set aside what lies beyond the step that we go on from."""
    directory = Path(cfg.checkpoint_dir)
    for manifest in manifests(cfg):
        if chosen and manifest.resolve() == Path(chosen).with_suffix(".json").resolve():
            break
        manifest.unlink()  # damaged, or given up with --overwrite
        if cfg.overwrite:
            manifest.with_suffix(".pt").unlink(missing_ok=True)
    for leftover in directory.glob(".*.tmp"):
        leftover.unlink()
    write_text(directory / "config.yaml", config_as_yaml(cfg))
    return MetricsLog(cfg, progress.global_step)


def write_status(run: "Run", progress: Progress, state: str, reason: str = "") -> None:
    """status.json tells programs how a run stands: running, finished, stopped or failed."""
    if run.world.rank == 0:
        status = {"state": state, "global_step": progress.global_step, "reason": reason}
        write_text(Path(run.cfg.checkpoint_dir, "status.json"), json.dumps(status, indent=1))


# ----------------------------------------------------------------------------------- TRAINING


@dataclass
class Run:
    """What build_run() puts together for the functions below."""

    cfg: argparse.Namespace
    world: World
    spec: DataSpec
    sampler: MicroBatchSampler
    train_loader: DataLoader
    test_loader: DataLoader
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ddp: nn.Module | None = None  # the model, its gradients averaged over the ranks
    log: MetricsLog | None = None  # on rank 0

    def order(self) -> dict[str, int]:
        """What decides which samples a step consumes."""
        names = ("samples", "seed", "global_batch_size", "steps_per_epoch")
        return {name: getattr(self.sampler, name) for name in names}


def build_run(cfg: argparse.Namespace, world: World) -> Run:
    """Data, model and optimizer. Collective: every rank."""
    train_set, test_set, spec = get_datasets(cfg, world)
    sampler = on_every_rank(world, MicroBatchSampler, len(train_set), cfg, world)
    # Every test sample once, without the padding of DistributedSampler: rank r takes r, r + W ...
    mine = range(world.rank, len(test_set), world.world_size)
    test_sampler = BatchSampler(mine, cfg.batch_size, drop_last=False)
    model = on_every_rank(world, place_model, cfg, world, spec, sampler.smallest)
    return Run(
        cfg=cfg,
        world=world,
        spec=spec,
        sampler=sampler,
        train_loader=get_dataloader(cfg, world, train_set, sampler),
        test_loader=get_dataloader(cfg, world, test_set, test_sampler),
        model=model,
        optimizer=build_optimizer(cfg, model),
        scaler=torch.amp.GradScaler(world.device.type, enabled=cfg.amp == "fp16"),
    )


def wrap_ddp(run: Run) -> nn.Module:
    """DistributedDataParallel averages gradients over the ranks while backward still runs."""
    cfg, spec, device = run.cfg, run.spec, run.world.device
    if run.world.world_size == 1:
        return run.model
    ddp = DistributedDataParallel(
        run.model.train(),
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # gradients live in the buffers that are sent: no copies
        # For one backward pass a step and a model that uses all its parameters in each of them.
        static_graph=run.sampler.per_step == run.world.world_size and not cfg.compile,
    )
    # In its first two passes DDP finds the order in which it will sum the gradients. Let it do so
    # on blank images, or a resumed run, which finds it anew, would end in other bits.
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    blank = torch.zeros(cfg.batch_size, spec.channels, spec.size, spec.size, device=device)
    if cfg.channels_last:
        blank = blank.to(memory_format=torch.channels_last)
    for _ in range(2):
        with autocast(cfg, device):
            loss = ddp(blank).float().sum()
        loss.backward()
    run.model.load_state_dict(before)
    run.optimizer.zero_grad(set_to_none=True)
    return ddp


def tune(cfg: argparse.Namespace, world: World) -> None:
    """Settings of this process, for speed or for repeatable results."""
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    elif world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # shapes stay the same: try the algorithms once
    if world.device.type == "cpu":
        if cfg.amp == "fp16":
            raise UserError("--amp fp16 needs a GPU: use --amp bf16")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(world.cores)
        # glibc returns each large activation to the kernel and faults it in again, page by page,
        # in the next step: the largest single cost of a small network on a CPU. Let it keep them.
        if hasattr(libc := ctypes.CDLL(None), "mallopt"):
            m_trim_threshold, m_mmap_max = -1, -4
            libc.mallopt(m_trim_threshold, 2**31 - 1)
            libc.mallopt(m_mmap_max, 0)


STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2


def listen_for_stop() -> list[str]:
    """A list that gets the name of a signal that asks to stop. A second Ctrl-C ends at once."""
    heard: list[str] = []
    first = math.inf

    def on_signal(number: int, _frame) -> None:
        nonlocal first
        # A launcher may pass on a Ctrl-C that has reached us already: that is still the first.
        if number == signal.SIGINT and time.monotonic() > first + 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        first = min(first, time.monotonic())
        heard.append(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    return heard


def autocast(cfg: argparse.Namespace, device: torch.device) -> torch.autocast:
    dtype = torch.float16 if cfg.amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=cfg.amp != "off")


def reseed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would visit every backend
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def train_step(run: Run, batches, step: int, global_step: int, sums: Sums) -> float:
    """One optimizer step: this rank's micro-batches forward and backward, then the update.

    DDP averages gradients over W ranks in the last backward pass. Every loss is a sum, scaled by
    W / samples in the step: so the average is the exact mean over these samples, however unevenly
    the ranks share them. Returns the seconds spent waiting for data.
    """
    cfg, world, sampler, device = run.cfg, run.world, run.sampler, run.world.device
    waited = 0.0
    for micro in sampler.mine:
        began = time.perf_counter()
        images, labels = next(batches)
        waited += time.perf_counter() - began
        begin, end = sampler.bounds(step, micro)
        weight = world.world_size / sampler.step_size(step) if end > begin else 0.0
        reseed(device, mix(cfg.seed, "dropout", global_step, micro))
        more_to_come = world.world_size > 1 and micro != sampler.mine[-1]
        with run.ddp.no_sync() if more_to_come else nullcontext():
            with autocast(cfg, device):
                logits = run.ddp(prepare(images, cfg, run.spec, device))
                labels = labels.to(device, non_blocking=True)
                loss_sum = F.cross_entropy(logits, labels, reduction="sum")
            run.scaler.scale(loss_sum * weight).backward()
        if end > begin:
            sums.add(loss_sum, logits, labels)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(cfg, global_step, sampler.steps_per_epoch)
    if cfg.clip_grad_norm:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), cfg.clip_grad_norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return waited


LOOK_SECONDS = 5  # at most, between two looks at who asked to stop (or one step, if that is longer)


def train_epoch(run: Run, progress: Progress, heard: list[str]) -> bool:
    """From progress.global_step to the end of its epoch, then save. Collective: every rank.

    Returns whether anybody asked to stop: the same on all ranks, after the same step.
    """
    cfg, sampler = run.cfg, run.sampler
    epoch, first = divmod(progress.global_step, sampler.steps_per_epoch)
    sampler.set_epoch(epoch, first)
    run.model.train()
    if first == 0:
        progress.sums = progress.logged = [0.0, 0.0, 0.0]
    sums, before, waited = Sums(run.world.device), progress.sums, 0.0
    began = logged = looked = (time.perf_counter(), waited, before[2], first)
    next_look, step_seconds = first + 1, LOOK_SECONDS
    batches = iter(run.train_loader)
    quiet = run.world.rank != 0 or not sys.stderr.isatty()
    bar = tqdm(total=sampler.steps_per_epoch, initial=first, disable=quiet, leave=False)
    for step in range(first, sampler.steps_per_epoch):
        waited += train_step(run, batches, step, progress.global_step, sums)
        progress.global_step += 1
        bar.update()
        last = step + 1 == sampler.steps_per_epoch
        log = last or progress.global_step % cfg.log_every_steps == 0
        save = progress.global_step % (cfg.checkpoint_every_steps or math.inf) == 0
        stop = progress.global_step == cfg.stop_at_step
        if not (log or save or stop or step + 1 >= next_look):
            continue
        # The wish to stop rides along with the sums, so all ranks learn of it after the same step.
        *reduced, wishes, seconds = sums.over_all_ranks(run.world, bool(heard), step_seconds)
        steps = int(LOOK_SECONDS * run.world.world_size / seconds)
        next_look = step + 1 + max(1, min(steps, 2 * (step + 1 - looked[3])))
        progress.sums = [a + b for a, b in zip(before, reduced)]
        now = (time.perf_counter(), waited, progress.sums[2], step + 1)
        step_seconds, looked = (now[0] - looked[0]) / (now[3] - looked[3]), now
        if log:
            log_interval(run, progress, speed(logged, now), bar)
            logged = now
        if stop := stop or wishes > 0:
            break
        if save and not last:
            save_checkpoint(run, progress, f"checkpoint_step_{progress.global_step}")
    bar.close()
    name = f"epoch_{epoch + 1}" if last else f"step_{progress.global_step}"
    save_checkpoint(run, progress, f"checkpoint_{name}")
    if last:
        end_epoch(run, progress, speed(began, now))
    return stop


def speed(begin: tuple, end: tuple) -> dict[str, float]:
    """Between two points (time, seconds waited for data, samples, steps)."""
    seconds, waited, samples, _ = (b - a for a, b in zip(begin, end))
    return {"samples_per_second": samples / seconds, "data_wait": waited / seconds}


def log_interval(run: Run, progress: Progress, pace: dict[str, float], bar: tqdm) -> None:
    """A record for the steps since the last one."""
    loss, correct, samples = (a - b for a, b in zip(progress.sums, progress.logged))
    progress.logged = progress.sums
    if not run.log:
        return
    values = {"loss": loss / samples, "accuracy": correct / samples}
    values["lr"] = run.optimizer.param_groups[0]["lr"]
    run.log.write("train", progress.global_step, **values, **pace)
    text = f"loss {values['loss']:.4f}, {pace['samples_per_second']:.0f} samples/s"
    bar.set_postfix_str(text)
    if bar.disable:
        print(f"  step {progress.global_step}: {text}", flush=True)


def end_epoch(run: Run, progress: Progress, pace: dict[str, float]) -> None:
    """Evaluate and tell. Collective: every rank."""
    test_loss, test_correct, test_samples = evaluate(run)
    if not run.log:
        return
    loss, correct, samples = progress.sums
    epoch = progress.global_step // run.sampler.steps_per_epoch
    values = {"loss": loss / samples, "accuracy": correct / samples}
    test = {"test_loss": test_loss / test_samples, "test_accuracy": test_correct / test_samples}
    run.log.write("epoch", progress.global_step, epoch=epoch, **values, **test, **pace)
    text = (
        f"Epoch {epoch} - Avg Loss: {values['loss']:.6f}, Accuracy: {values['accuracy']:.2%}, "
        f"Test Loss: {test['test_loss']:.6f}, Test Accuracy: {test['test_accuracy']:.2%} "
        f"of {test_samples:.0f}"
    )
    if pace:
        text += f" | {pace['samples_per_second']:.0f} samples/s"
        text += f", {pace['data_wait']:.1%} waiting for data"
    print(text, flush=True)


@torch.no_grad()
def evaluate(run: Run) -> list[float]:
    """[loss, correct, samples] summed over the test set. Collective: every rank.

    The ranks may have different numbers of batches, so nothing in the loop may be collective:
    hence the model itself, not its DDP wrapper.
    """
    if run.world.world_size > 1:
        for buffer in run.model.buffers():  # BatchNorm: all evaluate what rank 0 will save
            dist.broadcast(buffer, src=0)
    run.model.eval()
    device, sums = run.world.device, Sums(run.world.device)
    for images, labels in run.test_loader:
        labels = labels.to(device, non_blocking=True)
        with autocast(run.cfg, device):
            logits = run.model(prepare(images, run.cfg, run.spec, device))
            sums.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
    return sums.over_all_ranks(run.world)


# --------------------------------------------------------------------------------------- MAIN


def train(cfg: argparse.Namespace, world: World) -> None:
    """The whole run: resume, train epoch by epoch, save. Collective: every rank."""
    run, progress, chosen = start_or_resume(cfg, world)
    total = cfg.epochs * run.sampler.steps_per_epoch
    goal = min(total, cfg.stop_at_step or total)
    if world.rank == 0:
        print_plan(run, chosen, progress, goal)
    # A checkpoint is saved before its epoch is evaluated: a stop in between leaves that to do.
    at_end_of_epoch = chosen and progress.global_step % run.sampler.steps_per_epoch == 0
    evaluate_first = at_end_of_epoch and not gather(world, is_evaluated(cfg, progress))[0]
    heard: list[str] = []
    if progress.global_step < goal or evaluate_first:
        opening = [open_run_directory, cfg, chosen, progress] if world.rank == 0 else [lambda: None]
        run.log = on_every_rank(world, *opening)
        run.ddp = wrap_ddp(run)
        heard = listen_for_stop()
        write_status(run, progress, "running")
        try:
            if evaluate_first:
                if not is_of_this_run(chosen, cfg):
                    epoch = progress.global_step // run.sampler.steps_per_epoch
                    save_checkpoint(run, progress, f"checkpoint_epoch_{epoch}")
                end_epoch(run, progress, {})
            while progress.global_step < goal and not train_epoch(run, progress, heard):
                pass
        except BaseException as error:
            with suppress(UserError):
                write_status(run, progress, "failed", f"{type(error).__name__}: {error}")
            raise
    state = "finished" if progress.global_step >= total else "stopped"
    write_status(run, progress, state, " ".join(sorted(set(heard))))
    if run.log:
        again = "the same command" + " without --resume and --override" * (cfg.resume != "auto")
        how = "Finished" if state == "finished" else f"Stopped as asked; {again} goes on"
        print(f"{how}: step {progress.global_step} of {total}, saved in {cfg.checkpoint_dir}")


def start_or_resume(cfg: argparse.Namespace, world: World) -> tuple[Run, Progress, str | None]:
    """Everything in its place, new or from a checkpoint. Collective: every rank."""
    on_every_rank(world, tune, cfg, world)
    chosen = on_every_rank(world, choose_checkpoint if world.rank == 0 else lambda _: None, cfg)
    chosen = gather(world, chosen)[0]
    state = on_every_rank(world, load_checkpoint, chosen, cfg, world) if chosen else None
    run = build_run(cfg, world)
    progress = on_every_rank(world, restore, state, run, chosen) if chosen else Progress()
    return run, progress, chosen


def print_plan(run: Run, chosen: str | None, progress: Progress, goal: int) -> None:
    """The batch equation in words, and where the run begins."""
    sampler, ranks, step = run.sampler, run.world.world_size, progress.global_step
    each = sorted({sampler.per_step // ranks, -(-sampler.per_step // ranks)})
    print(
        f"Global batch {run.cfg.global_batch_size} = {count(sampler.per_step, 'micro-batch')} of "
        f"{run.cfg.batch_size}, {' or '.join(map(str, each))} on each of {count(ranks, 'rank')}; "
        f"{count(sampler.steps_per_epoch, 'step')} per epoch of {sampler.samples} samples"
    )
    if step >= goal:
        more = "--stop-at-step" if run.cfg.stop_at_step == goal else "--epochs"
        print(f"Nothing to do: {chosen} is at step {step} of {goal}; a larger {more} would go on")
    elif chosen:
        print(f"Resuming from {chosen} at step {step}")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    # Until training listens for it, Ctrl-C simply ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Should torchrun die of a signal, its workers would run on unseen: let them stop as well.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    try:
        cfg = parse_config(sys.argv[1:] if argv is None else argv)
        if cfg.print_config:
            print(config_as_yaml(cfg), end="")
            return 0
        train(cfg, setup_distributed(cfg))
    except Exception as error:
        tell(error)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()  # a loader's, which the error holds on to, and for which exit would wait
        return 2 if isinstance(error, UserError) else 1
    if dist.is_initialized():
        dist.destroy_process_group()  # only after success: else it might wait for the dead
    return 0


def tell(error: Exception) -> None:
    """A user's mistake in a sentence, anything else with its traceback."""
    if isinstance(error, dist.DistBackendError) or "gloo/transport" in str(error):
        # Another rank failed first. A launcher reports the first to exit, so let that one go ahead;
        # torchrun's SIGTERM, which means that it has noticed, ends the wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        rank, what = dist.get_rank(), str(error).split("] ", 1)[-1].split(". This is")[0]
        print(
            f"train_distributed.py: rank {rank} on {socket.gethostname()} lost the others ({what})",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(3)
        return
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        return
    # Before the ranks have met, those of a node find the same mistake: one of them speaks.
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    if dist.is_initialized() or local_rank == "0":
        print(f"train_distributed.py: error: {error}", file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun repeats it at the end
        Path(file).write_text(json.dumps({"message": str(error), "timestamp": time.time()}))


# ---------------------------------------------------------------------------------- ROLL CALL
# Finding out at the start who is missing or strange. Skip it at first reading.


def call_the_roll(world: World, card: dict, cfg: argparse.Namespace) -> dist.Store | None:
    """Meet at a store on the master, where rank 0 checks all cards. Collective: every rank.

    A store with a time limit answers where a collective hangs, so whoever is missing can be named.
    """
    if world.world_size == 1:
        end_on(check_cards([card], cfg))
        announce([card])
        return None
    here, deadline = f"{world.master_addr}:{world.master_port}", time.monotonic() + cfg.init_timeout
    watchdog = threading.Timer(cfg.init_timeout + 10, give_up, [f"{here} is not a store of ours"])
    watchdog.daemon = True
    watchdog.start()

    def wait_for(key: str, grace: float = 0.0) -> str | None:
        while not store.check([key]):
            if time.monotonic() > deadline + grace:
                return None
            time.sleep(0.05)
        return store.get(key).decode()

    try:
        store = connect_store(world, cfg.init_timeout)
        # Whoever dials the port could join: the job's name keeps strays of other jobs out.
        if world.rank == 0:
            store.set("job", world.job)
        if (job := wait_for("job")) not in (None, world.job):
            give_up(f"job {world.job} dialled {here} of job {job}: set another MASTER_PORT")
        store.set(f"card/{world.rank}", json.dumps(card))
        if world.rank == 0:
            cards = [json.loads(wait_for(f"card/{r}") or "null") for r in range(world.world_size)]
            store.set("problem", problem := check_cards(cards, cfg))
            announce(cards) if not problem else time.sleep(0.5)  # the others read it from us
        problem = wait_for("problem", grace=5)
    except dist.DistError as error:
        raise UserError(
            f"rank {world.rank} on {card['host']} has no store at {here} ({error}): "
            "did rank 0 start, is MASTER_PORT free, no firewall?"
        ) from None
    finally:
        watchdog.cancel()
    if problem is None:
        give_up(f"rank {world.rank} on {card['host']}: rank 0 did not start, see its log")
    end_on(problem, world.rank)
    choose_interface(world, store, card)
    return dist.PrefixStore("group", store)


def connect_store(world: World, timeout: float) -> dist.Store:
    """Rank 0 serves the store, unless torchrun's agent does already; the others dial it."""
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        world.master_addr,
        world.master_port,
        is_master=world.rank == 0 and not is_agents,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    # torchrun restarts workers against the same store, so each attempt has keys of its own.
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def choose_interface(world: World, store: dist.Store, card: dict) -> None:
    """Tell gloo where the other hosts are, on a host that knows itself as 127.0.1.1 (Debian's way).

    Gloo listens where its host's name leads to, which nobody else could reach then.
    """
    with suppress(OSError):
        if not socket.gethostbyname(card["host"]).startswith("127."):
            return
    cards = (json.loads(store.get(f"card/{rank}")) for rank in range(world.world_size))
    others = [other["address"] for other in cards if other["host"] != card["host"]]
    if not others or card["same"]["backend"] != "gloo" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    target = next((a for a in others if not a.startswith("127.")), world.master_addr)
    if (address := address_towards(target)).startswith("127."):
        return
    for _, name in socket.if_nameindex():
        with socket.socket() as probe, suppress(OSError):  # it has no IPv4 address
            found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            if socket.inet_ntoa(found[20:24]) == address:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def address_towards(host: str) -> str:
    """This machine's address on the way to the host. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 1))
        return probe.getsockname()[0]
    return "127.0.0.1"


def check_cards(cards: list[dict | None], cfg: argparse.Namespace) -> str:
    """What is wrong with the ranks that came, in one sentence; "" if nothing is."""
    hosts = ranks_by_host(cards)
    if missing := [rank for rank, card in enumerate(cards) if card is None]:
        return (
            f"ranks {spans(missing)} of {len(cards)} did not start within {cfg.init_timeout:.0f} s:"
            f" see their logs (here: {', '.join(f'{spans(r)} on {h}' for h, r in hosts.items())})"
        )
    for rank, card in enumerate(cards):
        for what, value in card["same"].items():
            if value != (mine := cards[0]["same"].get(what)):
                return f"rank {rank} on {card['host']} has {what} {value}, rank 0 has {mine}"
    for host, ranks in hosts.items():
        gpus = len({cards[rank]["gpu"] for rank in ranks})
        if cards[0]["same"]["backend"] == "nccl" and gpus < len(ranks):
            return (
                f"Duplicate GPU detected: on {host}, ranks {spans(ranks)} share "
                f"{count(gpus, 'visible GPU')}: start {count(gpus, 'process')} there, "
                f"or ask for {len(ranks)} GPUs"
            )
        if cfg.gpus_per_node not in (None, len(ranks)):
            runs = count(len(ranks), "process")
            return f"--gpus-per-node {cfg.gpus_per_node}, but {host} runs {runs}"
    if cfg.nodes not in (None, len(hosts)):
        return f"--nodes {cfg.nodes}, but this job runs on {len(hosts)}: {', '.join(hosts)}"
    return ""


def ranks_by_host(cards: list[dict | None]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        if card:
            hosts.setdefault(card["host"], []).append(rank)
    return hosts


def spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'"""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends))


def announce(cards: list[dict]) -> None:
    hosts, backend = ranks_by_host(cards), cards[0]["same"]["backend"]
    sizes = sorted({len(ranks) for ranks in hosts.values()})
    nodes = f"{count(len(hosts), 'node')} x {' or '.join(map(str, sizes))}"
    print(f"Starting distributed training on {count(len(cards), 'process')} ({nodes})")
    print(f"Master node: {cards[0]['host']}")
    for host, ranks in hosts.items():
        print(
            f"  {host}: rank{'s' * (len(ranks) > 1)} {spans(ranks)} on {cards[ranks[0]]['device']}"
        )
    if backend == "nccl":
        backend += " " + ".".join(map(str, torch.cuda.nccl.version()))
    versions = f"PyTorch {torch.__version__}, Python {platform.python_version()}, {backend}"
    print(versions, flush=True)


def give_up(problem: str) -> None:
    """End this process wherever it hangs."""
    print(f"train_distributed.py: error: {problem}", file=sys.stderr, flush=True)
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
