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

To stop and save: Ctrl-C or SIGTERM, SIGUSR1, SIGUSR2 to any rank; a file STOP in the run directory;
a file $STOP_FILE on any node; --max-duration; the end of the job's time ($DEADLINE, or Slurm's).

Sections: OPTIONS, DISTRIBUTED, MODEL, DATA, METRICS, CHECKPOINTS, STOPPING, TRAINING, MAIN. For a
second reading: ROLL CALL, CLAIM, WATCHDOG, GRADIENT TREE, LAST WORDS. The heart: MicroBatchSampler,
train_step(), train_epoch(), save_checkpoint().
Make it yours: your model in build_model(), your data in get_datasets().
"""

import argparse
import ctypes
import difflib
import faulthandler
import fcntl
import functools
import hashlib
import importlib
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import re
import signal
import socket
import statistics
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
    """A mistake the user can mend: one sentence with the remedy, exit code 2, no traceback.

    The cause is a word for programs: configuration, data, disk, NaN, port, in use, superseded.
    """

    def __init__(self, text: str, cause: str = "configuration"):
        super().__init__(text)
        self.cause = cause

    def __str__(self) -> str:
        # One line, and without the traceback that a DataLoader worker wraps an exception in.
        return " ".join(re.split(r"\b(?:User|Data)Error: ", super().__str__())[-1].split())


class DataError(UserError):
    """A UserError of a DataLoader worker, from which only its type and its text come through."""

    def __init__(self, text: str):
        super().__init__(text, "data")


# ------------------------------------------------------------------------------------ OPTIONS


def build_parser() -> argparse.ArgumentParser:
    """One option per line. The names are also the keys of a config file, with _ for -."""
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="train_distributed.py", description=__doc__, **style)
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("run").add_argument
    add("--config", metavar="FILE", help="YAML file of options; the command line wins over it")
    add("--print-config", action="store_true", help="print the resolved options and exit")
    add("--plan", action="store_true", help="start nothing: what --nodes would take (plan.py)")
    add("--checkpoint-dir", "--save-dir", default="checkpoints", help="run directory [checkpoints]")
    add("--resume", default="auto", help="auto: go on from the newest checkpoint; none; FILE.pt")
    add("--overwrite", action=switch, default=False, help="--resume none or FILE may delete a run")
    add("--override", action=switch, default=False, help="--resume FILE, new global batch or seed")
    add("--epochs", type=positive_int, default=5, help="passes over the training data [5]")
    add("--stop-at-step", type=positive_int, help="save and exit at this step; schedule unchanged")
    add("--max-duration", type=seconds, help="seconds of training after which to stop and save")
    add("--seed", type=natural, default=42, help="of everything random [42]")
    add("--deterministic", action=switch, default=False, help="repeatable kernels, slower on GPU")
    add("--reproducible", action=switch, default=False, help="same bits on 1, 2, 4, 8 ... ranks")

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
    add("--cuda-graphs", action=switch, default=False, help="and launch it as graphs; on one GPU")
    add("--channels-last", action=switch, default=True, help="memory format of images [on]")
    add("--activation-checkpointing", action=switch, default=False, help="recompute deep networks")

    add = parser.add_argument_group("metrics and checkpoints").add_argument
    add("--log-every-steps", type=positive_int, default=20, help="steps between records [20]")
    add("--tensorboard", action=switch, default=False, help="also write TensorBoard files")
    add("--wandb", action=switch, default=False, help="also log to W&B (WANDB_MODE=offline works)")
    add("--checkpoint-every-steps", type=positive_int, help="besides every epoch [off]")
    add("--keep", type=natural, default=3, help="newest checkpoints kept; 0: all [3]")
    add(
        "--async-checkpoint", action=switch, default=False, help="write them while training goes on"
    )
    add("--trust-checkpoint", action=switch, default=False, help="even one another user owns")
    add("--max-bad-steps", type=positive_int, default=10, help="in a row, NaN or infinite [10]")

    add = parser.add_argument_group("distributed").add_argument
    add("--distributed-backend", choices=["nccl", "gloo"], help="[nccl on GPUs, else gloo]")
    add("--nodes", type=positive_int, help="refuse to start on any other number of nodes")
    add("--gpus-per-node", type=positive_int, help="refuse to start with other ranks per node")
    add("--init-timeout", type=seconds, default=300, help="seconds to wait for all ranks [300]")
    add("--collective-timeout", type=seconds, default=600, help="seconds for one collective [600]")
    add(
        "--hang-timeout", type=seconds, default=300, help="seconds without progress to end at [300]"
    )
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


def parse_config(argv: list[str], parser: "Parser | None" = None) -> argparse.Namespace:
    """Options, resolved in the order default < config file < command line."""
    parser = parser or build_parser()
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
    hidden = ("config", "print_config", "plan", "local_rank")
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

    nonce = env.get("RUN_NONCE", "")  # this launch, so named by a launcher of ours
    if "RANK" in env and "WORLD_SIZE" in env:
        ranks = integer("RANK"), integer("LOCAL_RANK"), integer("WORLD_SIZE")
        local_size, job = integer("LOCAL_WORLD_SIZE", "1"), env.get("TORCHELASTIC_RUN_ID", "none")
        master, port = env.get("MASTER_ADDR", "localhost"), integer("MASTER_PORT", "29500")
        return World(*ranks, local_size, master, port, nonce or job)
    # A batch shell and an interactive allocation have SLURM_PROCID too, though nobody else runs:
    # they have no step id, or one of Slurm's reserved ones, or a terminal (srun --pty bash).
    step = integer("SLURM_STEP_ID", str(0xFFFFFFFF))
    if step >= 0xFFFFFFF0 or ("SLURM_PTY_PORT" in env and os.isatty(0)):
        return World(job=nonce)
    ranks = integer("SLURM_PROCID"), integer("SLURM_LOCALID"), integer("SLURM_STEP_NUM_TASKS")
    local_size, job = integer("SLURM_STEP_TASKS_PER_NODE"), integer("SLURM_JOB_ID")
    # A port of the step's own, below the ephemeral ones (32768 and up).
    port = integer("MASTER_PORT", str(15000 + (16 * job + step) % 15000))
    master = env.get("MASTER_ADDR") or first_host_of_step(env)
    return World(*ranks, local_size, master, port, nonce or f"{job}.{step}")


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


def end_on(problem: str | None, rank: int = 0, cause: str = "configuration") -> None:
    """End on a problem that every rank knows of: rank 0 tells it, the others leave quietly."""
    if problem and rank == 0:
        raise UserError(problem, cause)
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
    result, problem = None, (None, None)
    try:
        result = function(*arguments)
    except UserError as error:
        where = f"rank {world.rank} on {socket.gethostname()}: " * (world.rank > 0)
        problem = where + str(error), error.cause
    text, cause = next((p for p in gather(world, problem) if p[0]), problem)
    end_on(text, world.rank, cause)
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
    try:
        with torch.no_grad():
            model(blank_images(cfg, spec, smallest, world.device))
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
    if cfg.compile or cfg.cuda_graphs:
        # In place, so that the names in a checkpoint stay the same. And each shape for itself: what
        # is compiled for "any shape" depends on which came first, so a resumed run would differ.
        model.compile(dynamic=False, mode="reduce-overhead" if cfg.cuda_graphs else None)
    if cfg.cuda_graphs:
        # A graph's output may not become .grad, or its next run changes it (pytorch #169545). So
        # there is a .grad before, to which it is added, and which update() keeps.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
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
            f"{folder} {state}; where there is a network, python -c 'import torchvision; "
            f'torchvision.datasets.{name}("D", download=True)\' makes D/{name}: copy it to {root} '
            f"({error})"
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
        raise DataError(f"cannot decode {path} ({error}): replace or remove it") from None


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
                "(a resumed run keeps its global batch; a new one, in another --checkpoint-dir, "
                "may raise --global-batch-size)"
            )
        if cfg.reproducible and (
            self.per_step & self.per_step - 1 or world.world_size.bit_count() > 1
        ):
            raise UserError(
                f"--reproducible needs a global batch of 1, 2, 4, 8 ... micro-batches, not "
                f"{self.per_step}, on 1, 2, 4, 8 ... ranks, not {world.world_size}"
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


def blank_images(cfg: argparse.Namespace, spec: DataSpec, number: int, device: torch.device):
    """As prepare() gives them."""
    images = torch.zeros(number, spec.channels, spec.size, spec.size, device=device)
    return images.contiguous(memory_format=torch.channels_last) if cfg.channels_last else images


@functools.lru_cache
def scale_on(device: torch.device, spec: DataSpec, white: int) -> list[torch.Tensor]:
    return [white * torch.tensor(v, device=device)[:, None, None] for v in (spec.mean, spec.std)]


# ------------------------------------------------------------------------------------ METRICS


LOSS_UNIT = 2.0**-24


class Sums:
    """Loss, correct predictions and samples so far, on the device: adding waits for no GPU.

    Whole numbers, the loss in units of 2**-24: they add up to the same bits in any order, on any
    number of ranks, before and after a resume. A loss that is not finite does not count.
    """

    def __init__(self, device: torch.device):
        self.values = torch.zeros(3, dtype=torch.int64, device=device)

    def add(self, loss_sum: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
        loss = loss_sum.detach().double()
        counts = loss.isfinite()
        self.values[0] += (loss / LOSS_UNIT).nan_to_num(0, 0, 0).long()
        self.values[1] += (logits.argmax(1) == labels).sum() * counts
        self.values[2] += counts * len(labels)

    def over_all_ranks(self, world: World, more=()) -> list[int]:
        """[loss, correct, samples, *more], summed. Collective: every rank; waits for the GPU."""
        total = torch.cat([self.values, self.values.new_tensor(more)])
        if world.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()


def means(sums: list[int]) -> dict[str, float]:
    loss, correct, samples = sums
    if not samples:
        return {"loss": math.nan, "accuracy": math.nan}
    return {"loss": loss * LOSS_UNIT / samples, "accuracy": correct / samples}


class MetricsLog:
    """On rank 0: metrics.jsonl, one record a line, and what else was asked for."""

    def __init__(self, cfg: argparse.Namespace, global_step: int):
        path = Path(cfg.checkpoint_dir, "metrics.jsonl")
        # Steps after the checkpoint are trained again: their records go.
        lines = path.read_text().splitlines() if path.exists() else []
        kept = "".join(f"{line}\n" for line in lines if step_in(line) <= global_step)
        write_text(path, kept)
        self.file, self.board, self.run = path.open("ab", buffering=0), None, None
        self.pending = b""
        if cfg.tensorboard:
            board = load_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
            self.board = board(path.with_name("tensorboard"), purge_step=global_step + 1)
        if cfg.wandb:
            name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
            options = {"id": name, "resume": "allow", "dir": cfg.checkpoint_dir}
            self.run = load_optional("wandb", "wandb").init(config=vars(cfg), **options)

    def write(self, kind: str, step: int, **values: float) -> None:
        record = {"kind": kind, "step": step, "time": time.time(), **values}
        record |= {name: None for name, value in values.items() if not math.isfinite(value)}
        self.pending += json.dumps(record).encode() + b"\n"
        try:
            self.pending = self.pending[self.file.write(self.pending) :]
        except OSError as error:  # a full disk, perhaps: next time then
            warn(f"cannot write {self.file.name} yet ({error})")
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

FORMAT = "train_distributed 2"


@dataclass
class Progress:
    """Where a run is. With model, optimizer and scaler, all that a checkpoint must hold.

    The sums are [loss, correct, samples] over all ranks since the epoch began: up to now, and up to
    the last record in metrics.jsonl.
    """

    global_step: int = 0
    sums: list[int] = field(default_factory=lambda: [0, 0, 0])
    logged: list[int] = field(default_factory=lambda: [0, 0, 0])


@contextmanager
def writing(path: Path):
    """A disk that is full or gone is told in one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        while error.__context__:  # torch.save hides "No space left on device" behind its own error
            error = error.__context__
        text = f"cannot write {path} ({error}): older checkpoints are intact"
        raise UserError(text, "disk") from None


class HashingFile:
    """A file to write to, that knows the size and the SHA-256 of what it was given."""

    def __init__(self, file):
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_durably(path: Path, write, claim: "Claim | None" = None) -> HashingFile:
    """write(file) to a temporary file that replaces path once it is on disk: all or nothing.

    Nor does it replace anything once the run directory belongs to another job.
    """
    # Of this process alone: another job may be at the same file.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                write(hashing := HashingFile(file))
                file.flush()
                os.fsync(file.fileno())
            if claim:
                claim.check()
            temporary.replace(path)
            return hashing
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, claim: "Claim | None" = None) -> None:
    write_durably(path, lambda file: file.write(text.encode()), claim)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Saver:
    """Saves checkpoints, in the background if asked to: one at a time.

    Training goes on if one cannot be saved, but not after MOST_FAILURES in a row.
    """

    MOST_FAILURES = 3

    def __init__(self):
        self.thread: threading.Thread | None = None
        self.error: UserError | None = None
        self.failures, self.longest = 0, 0.0  # in a row; in seconds

    def save(self, run: "Run", progress: "Progress", name: str, last: bool) -> None:
        """With last, it is on disk when this returns. Rank 0 does it; the others may go on."""
        if run.world.rank:
            return
        self.wait(last)
        path = Path(run.cfg.checkpoint_dir, f"{name}.pt")
        state = checkpoint_state(run, progress)
        if run.cfg.async_checkpoint and not last:
            self.thread = threading.Thread(target=self.write, args=(run, path, copy_of(state)))
            self.thread.start()
        else:
            self.write(run, path, state)
            self.wait(last)

    def write(self, run: "Run", path: Path, state: dict) -> None:
        began = time.monotonic()
        try:
            save_checkpoint(run, path, state)
            self.failures = 0
        except UserError as error:
            self.error, self.failures = error, self.failures + 1
        self.longest = max(self.longest, time.monotonic() - began)

    def wait(self, last: bool = True) -> None:
        """For the save in flight, if any. Raises what it raised if that ends the run."""
        if self.thread:
            self.thread.join()
        error, self.thread, self.error = self.error, None, None
        if error and (last or self.failures == self.MOST_FAILURES or error.cause != "disk"):
            raise error
        if error:
            warn(f"{error}; training goes on")


def checkpoint_state(run: "Run", progress: "Progress") -> dict:
    """Plain types and tensors only, so that loading need not trust the file (weights_only=True)."""
    return {
        "format": FORMAT,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "progress": asdict(progress),
        "order": run.order(),
        "config": dict(vars(run.cfg)),
    }


def copy_of(state):
    """The same on the CPU, which no further step changes."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    return [copy_of(value) for value in state] if isinstance(state, list) else state


def save_checkpoint(run: "Run", path: Path, state: dict) -> None:
    """Write path and then its manifest path.json, with which the checkpoint counts."""
    step = state["progress"]["global_step"]
    if not all(value.isfinite().all() for value in state["model"].values()):
        raise UserError(f"at step {step} the weights are not finite: not saved. Lower --lr?", "NaN")
    written = write_durably(path, lambda file: torch.save(state, file), run.claim)
    facts = {"step": step, "size": written.size, "sha256": written.sha256.hexdigest()}
    text = json.dumps(facts | {"check": fingerprint(path, facts)})
    write_text(path.with_suffix(".json"), text, run.claim)
    for manifest in manifests(run.cfg)[run.cfg.keep or sys.maxsize :]:
        manifest.unlink()
        manifest.with_suffix(".pt").unlink(missing_ok=True)


def fingerprint(path: Path, facts: dict) -> str:
    """So that a manifest itself cannot be damaged, or stand for another file, unseen."""
    return hashlib.sha256(repr([path.stem, *sorted(facts.items())]).encode()).hexdigest()[:16]


def manifests(cfg: argparse.Namespace) -> list[Path]:
    """Those in the run directory, the newest first; unreadable ones count as newest."""
    files = Path(cfg.checkpoint_dir).glob("checkpoint_*.json")
    return sorted(files, key=lambda file: read_manifest(file).get("step", math.inf), reverse=True)


def read_manifest(path: Path) -> dict:
    """Step, size and sha256 of a checkpoint; {} if the manifest is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        facts = json.loads(path.read_text())
        if facts.pop("check") == fingerprint(path, facts):
            return facts
    return {}


def verify(checkpoint: Path) -> None:
    """Raise UserError unless a checkpoint is what its manifest says."""
    if not (facts := read_manifest(checkpoint.with_suffix(".json"))):
        raise UserError(f"{checkpoint} has a manifest (.json) that is damaged")
    try:
        sound = checkpoint.stat().st_size == facts["size"]
        sound = sound and sha256_of(checkpoint) == facts["sha256"]
    except OSError as error:
        raise UserError(f"{checkpoint} is unreadable ({error.strerror})") from None
    if not sound:
        raise UserError(f"{checkpoint} is damaged: its size or sha256 is not that of its manifest")


def make_run_directory(cfg: argparse.Namespace) -> None:
    directory = Path(cfg.checkpoint_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"cannot write to --checkpoint-dir {directory}: {why}") from None


def choose_checkpoint(cfg: argparse.Namespace) -> str | None:
    """What to resume from. For rank 0, which decides for all."""
    directory = Path(cfg.checkpoint_dir)
    if cfg.override and cfg.resume in ("auto", "none"):
        raise UserError("--override goes with --resume FILE and another --checkpoint-dir")
    if cfg.resume == "auto":
        for checkpoint in directory.glob("checkpoint_*.pt"):
            if not checkpoint.with_suffix(".json").exists():
                warn(f"passed over: {checkpoint} has no manifest, so its save was cut short")
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
        if any(p.name != "status.json" for p in directory.iterdir()) and not cfg.overwrite:
            raise UserError(f"{directory} is not empty: take another, or --overwrite the run in it")
        return None
    chosen = Path(cfg.resume)
    if not chosen.is_file():
        raise UserError(
            f"--resume {chosen}: there is no such file; give a checkpoint_*.pt, auto or none"
        )
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
        if (owner := os.stat(path).st_uid) != os.getuid() and not cfg.trust_checkpoint:
            raise UserError(
                f"{path} belongs to user {owner}: --trust-checkpoint, if you trust them"
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        reason = f"{socket.gethostname()} cannot read {path} ({error.strerror})"
        raise UserError(f"{reason}: all nodes must share the run directory") from None
    except UserError:
        raise
    except Exception as error:  # zip, pickle and torch each have their own
        raise UserError(f"{path} is no checkpoint, or damaged ({type(error).__name__})") from None
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


def restore(state: dict, run: "Run", chosen: str, progress: Progress) -> None:
    """Put the content of a checkpoint where it belongs."""
    vars(progress).update(state["progress"])
    old, new = state["order"], run.order()
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


def open_run_directory(cfg, chosen: str | None, progress: Progress) -> MetricsLog:
    """On rank 0, once all is checked: set aside what lies beyond the step that we go on from."""
    directory = Path(cfg.checkpoint_dir)
    for manifest in manifests(cfg):
        if chosen and manifest.resolve() == Path(chosen).with_suffix(".json").resolve():
            break
        manifest.unlink()  # damaged, or given up with --overwrite
        if cfg.overwrite:
            manifest.with_suffix(".pt").unlink(missing_ok=True)
    for leftover in [*directory.glob(".*.tmp"), *directory.glob(".hang_*"), directory / "STOP"]:
        leftover.unlink(missing_ok=True)
    write_text(directory / "config.yaml", config_as_yaml(cfg))
    return MetricsLog(cfg, progress.global_step)


# ----------------------------------------------------------------------------------- STOPPING

STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


class StopWishes:
    """Who asks to stop: a signal, a file, or the clock. A second Ctrl-C ends at once."""

    NAMES = [*(s.name for s in STOP_SIGNALS), "STOP_FILE", "STOP", "time limit", "max-duration"]

    def __init__(self, cfg: argparse.Namespace, world: World):
        self.heard: set[str] = set()
        self.first_signal, self.began = math.inf, time.time()
        self.stop_file, self.rank = os.environ.get("STOP_FILE"), world.rank
        self.stop_in_directory = Path(cfg.checkpoint_dir, "STOP")
        self.last = self.began + (cfg.max_duration or math.inf)
        end = os.environ.get("DEADLINE") or os.environ.get("SLURM_JOB_END_TIME") or "inf"
        try:
            self.end = float(end)
        except ValueError:
            raise UserError(f"DEADLINE is {end!r}, not a time in seconds since 1970") from None
        # Time to save in: a tenth of what there is, at most two minutes.
        self.reserve = min(120.0, max(0.0, self.end - self.began) / 10)
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _frame) -> None:
        # A launcher may pass on a Ctrl-C that has reached us already: that is still the first.
        if number == signal.SIGINT and time.monotonic() > self.first_signal + 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        if number == signal.SIGINT and self.rank == 0 and self.first_signal == math.inf:
            with suppress(OSError):
                os.write(2, b"Stopping, and saving; a second Ctrl-C ends it at once\n")
        self.first_signal = min(self.first_signal, time.monotonic())
        self.heard.add(signal.Signals(number).name)

    def look(self, longest_save: float) -> list[int]:
        """1 or 0 for each of NAMES: what this rank knows of."""
        if self.stop_file and os.path.exists(self.stop_file):
            self.heard.add("STOP_FILE")
        if self.rank == 0:  # which asks once for all: the others' clocks may differ
            if self.stop_in_directory.exists():
                self.heard.add("STOP")
            if time.time() > self.end - self.reserve - 2 * longest_save:
                self.heard.add("time limit")
            if time.time() > self.last:
                self.heard.add("max-duration")
        return [int(name in self.heard) for name in self.NAMES]


LOOK_SECONDS = 5  # at most, between two looks at who asks to stop (or one step, if that is longer)


class Lookout:
    """When the ranks look together at who asks to stop, and at how they fare.

    What they know rides along with the sums, so all learn of it after the same step; and all derive
    the same next point to look from it, so that there is nothing to send in between.
    """

    def __init__(self, run: "Run", step: int):
        self.run, self.step, self.next = run, step, step + 1
        self.time = time.perf_counter()

    def look(self, step: int, sums: Sums) -> tuple[list[int], list[str]]:
        """([loss, correct, samples] over all ranks, who asks to stop). Collective: every rank."""
        run, world, now = self.run, self.run.world, time.perf_counter()
        each = (now - self.time) / max(1, step - self.step)
        own = [0] * world.world_size
        own[world.rank] = int(1e6 * run.timer.read())
        wishes = run.stop.look(run.saver.longest)
        reduced = sums.over_all_ranks(world, [*wishes, int(1e6 * each), *own])
        totals, wishes, rest = reduced[:3], reduced[3 : 3 + len(wishes)], reduced[3 + len(wishes) :]
        steps = int(LOOK_SECONDS * 1e6 * world.world_size / max(1, rest[0]))
        self.next = step + max(1, min(steps, 2 * (step - self.step)))
        self.step, self.time = step, now
        run.watch.compare(rest[1:])
        return totals, [name for name, count in zip(run.stop.NAMES, wishes) if count]


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
    claim: "Claim"
    stop: StopWishes
    watch: "Watchdog"
    saver: Saver
    test_batches: int  # on the rank that has most
    timer: "Timer"
    bad_steps: list[torch.Tensor] = field(default_factory=list)  # since the last look, 1.0 or 0.0
    bad_in_a_row: int = 0
    ddp: nn.Module | None = None  # the model, its gradients averaged over the ranks
    log: MetricsLog | None = None  # on rank 0

    def order(self) -> dict[str, int]:
        """What decides which samples a step consumes."""
        names = ("samples", "seed", "global_batch_size", "steps_per_epoch")
        return {name: getattr(self.sampler, name) for name in names}


def build_run(cfg: argparse.Namespace, world: World, claim: "Claim", stop: StopWishes) -> Run:
    """Data, model and optimizer. Collective: every rank."""
    train_set, test_set, spec = get_datasets(cfg, world)
    sampler = on_every_rank(world, MicroBatchSampler, len(train_set), cfg, world)
    # Every test sample once, without DistributedSampler's padding: rank r takes batch r, r + W ...
    batches = list(BatchSampler(range(len(test_set)), cfg.batch_size, drop_last=False))
    test_sampler = batches[world.rank :: world.world_size]
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
        claim=claim,
        stop=stop,
        watch=Watchdog(cfg, world, claim),
        saver=Saver(),
        test_batches=-(-len(batches) // world.world_size),
        timer=Timer(world.device),
    )


def wrap_ddp(run: Run) -> nn.Module:
    """DistributedDataParallel averages gradients over the ranks while backward still runs."""
    cfg, spec, device = run.cfg, run.spec, run.world.device
    if run.world.world_size == 1 or cfg.reproducible:
        return run.model
    names = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    ddp = DistributedDataParallel(
        run.model.train(),
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # gradients live in the buffers that are sent: no copies
        # BatchNorm's buffers need no broadcast: evaluate() does it, and rank 0 saves its own.
        **{name: False},
        # For one backward pass a step and a model that uses all its parameters in each of them.
        static_graph=run.sampler.per_step == run.world.world_size and not cfg.compile,
    )
    # In its first two passes DDP finds the order in which it will sum the gradients. Let it do so
    # on blank images, or a resumed run, which finds it anew, would end in other bits.
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    for _ in range(2):
        with autocast(cfg, device):
            loss = ddp(blank_images(cfg, spec, cfg.batch_size, device)).float().sum()
        loss.backward()
    run.model.load_state_dict(before)
    run.optimizer.zero_grad(set_to_none=True)
    return ddp


def tune(cfg: argparse.Namespace, world: World) -> None:
    """Settings of this process, for speed or for repeatable results."""
    if cfg.deterministic or cfg.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    elif world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # shapes stay the same: try the algorithms once
    if cfg.cuda_graphs and (world.world_size > 1 or cfg.reproducible):
        raise UserError("--cuda-graphs is for one rank without --reproducible: use --compile")
    if world.device.type == "cpu":
        if cfg.amp == "fp16":
            raise UserError("--amp fp16 needs a GPU: use --amp bf16")
        if cfg.reproducible:
            torch.set_num_threads(1)  # some kernels sum in another order on more
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(world.cores)
        # glibc returns each large activation to the kernel and faults it in again, page by page,
        # in the next step: the largest single cost of a small network on a CPU. Let it keep them.
        if hasattr(libc := ctypes.CDLL(None), "mallopt"):
            m_trim_threshold, m_mmap_max = -1, -4
            libc.mallopt(m_trim_threshold, 2**31 - 1)
            libc.mallopt(m_mmap_max, 0)


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
    tree = GradientTree(run) if cfg.reproducible else None
    for micro in sampler.mine:
        began = time.perf_counter()
        images, labels = next(batches)
        waited += time.perf_counter() - began
        run.timer.begin()
        begin, end = sampler.bounds(step, micro)
        weight = (1 if tree else world.world_size) / sampler.step_size(step) if end > begin else 0.0
        reseed(device, mix(cfg.seed, "dropout", global_step, micro))
        more_to_come = run.ddp is not run.model and micro != sampler.mine[-1]
        with run.ddp.no_sync() if more_to_come else nullcontext():
            with autocast(cfg, device):
                logits = run.ddp(prepare(images, cfg, run.spec, device))
                labels = labels.to(device, non_blocking=True)
                loss_sum = F.cross_entropy(logits, labels, reduction="sum")
            run.timer.end()
            run.scaler.scale(loss_sum * weight).backward()
        if tree:
            tree.add()
        if end > begin:
            sums.add(loss_sum, logits, labels)
    if tree:
        tree.finish()
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(cfg, global_step, sampler.steps_per_epoch)
    update(run)
    return waited


def update(run: Run) -> None:
    """The optimizer's step; none, on all ranks alike, if a gradient is NaN or infinite.

    The ranks have the same gradients by now. Nothing waits for the GPU: the fused optimizers skip
    a step there, as they do for GradScaler, which looks by itself.
    """
    cfg, groups = run.cfg, run.optimizer.param_groups
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    if cfg.clip_grad_norm:
        run.scaler.unscale_(run.optimizer)
        size = nn.utils.clip_grad_norm_(run.model.parameters(), cfg.clip_grad_norm)
    elif gradients[0].device.type == "cuda":
        size = nn.utils.get_total_norm(gradients)  # all of them in a few kernels
    else:
        size = torch.stack([gradient.sum() for gradient in gradients]).sum()
    bad = size.sub_(size).ne_(0)  # infinity - infinity is NaN, and that is not 0: 1.0, else 0.0
    run.bad_steps.append(bad)
    if not run.scaler.is_enabled():
        run.optimizer.grad_scale, run.optimizer.found_inf = None, bad
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=not cfg.cuda_graphs)


def train_epoch(run: Run, progress: Progress) -> list[str]:
    """From progress.global_step to the end of its epoch, then save. Collective: every rank.

    Returns who asked to stop, if anybody did: the same on all ranks, after the same step.
    """
    cfg, sampler = run.cfg, run.sampler
    epoch, first = divmod(progress.global_step, sampler.steps_per_epoch)
    sampler.set_epoch(epoch, first)
    run.model.train()
    if first == 0:
        progress.sums = progress.logged = [0, 0, 0]
    sums, before, waited = Sums(run.world.device), progress.sums, 0.0
    began = logged = (time.perf_counter(), waited, before[2])
    lookout = Lookout(run, first)
    batches = iter(run.train_loader)
    quiet = run.world.rank != 0 or not sys.stderr.isatty()
    bar = tqdm(total=sampler.steps_per_epoch, initial=first, disable=quiet, leave=False)
    for step in range(first, sampler.steps_per_epoch):
        waited += train_step(run, batches, step, progress.global_step, sums)
        progress.global_step += 1
        run.watch.progress(progress.global_step)
        bar.update()
        last = step + 1 == sampler.steps_per_epoch
        log = last or progress.global_step % cfg.log_every_steps == 0
        save = progress.global_step % (cfg.checkpoint_every_steps or math.inf) == 0
        stop = ["stop-at-step"] * (progress.global_step == cfg.stop_at_step)
        if not (log or save or stop or step + 1 >= lookout.next):
            continue
        reduced, wishes = lookout.look(step + 1, sums)
        progress.sums = [a + b for a, b in zip(before, reduced)]
        now = (time.perf_counter(), waited, progress.sums[2])
        look_for_bad_steps(run, progress)
        if log:
            log_interval(run, progress, speed(logged, now), bar)
            logged = now
        if time.monotonic() > run.claim.told + LOOK_SECONDS:
            run.claim.tell("running", progress.global_step)
        if stop := stop or wishes:
            break
        if save and not last and not run.bad_in_a_row:
            run.saver.save(run, progress, f"checkpoint_step_{progress.global_step}", last=False)
    bar.close()
    name = f"epoch_{epoch + 1}" if last else f"step_{progress.global_step}"
    ends = bool(stop) or progress.global_step == cfg.epochs * sampler.steps_per_epoch
    run.saver.save(run, progress, f"checkpoint_{name}", last=ends)
    if last:
        stop = end_epoch(run, progress, speed(began, now)) or stop
    return stop


def look_for_bad_steps(run: Run, progress: Progress) -> None:
    """Say how many steps were left out; raise UserError after too many of them in a row."""
    bad = torch.stack(run.bad_steps).tolist()
    run.bad_steps.clear()
    for flag in bad:
        run.bad_in_a_row = run.bad_in_a_row + 1 if flag else 0
    if any(bad) and run.world.rank == 0:
        some = count(int(sum(bad)), "step")
        warn(f"left out {some} before step {progress.global_step}: NaN or infinite gradients")
    if run.bad_in_a_row >= run.cfg.max_bad_steps:
        raise UserError(
            f"{run.bad_in_a_row} steps in a row up to step {progress.global_step} had NaN or "
            "infinite gradients: lower --lr, set --clip-grad-norm, or look at the data; the last "
            "checkpoint is from before",
            "NaN",
        )


def speed(begin: tuple, end: tuple) -> dict[str, float]:
    """Between two points (time, seconds waited for data, samples)."""
    seconds, waited, samples = (b - a for a, b in zip(begin, end))
    return {"samples_per_second": samples / seconds, "data_wait": waited / seconds}


def log_interval(run: Run, progress: Progress, pace: dict[str, float], bar: tqdm) -> None:
    """A record for the steps since the last one."""
    values = means([a - b for a, b in zip(progress.sums, progress.logged)])
    progress.logged = progress.sums
    if not run.log:
        return
    values["lr"] = run.optimizer.param_groups[0]["lr"]
    run.log.write("train", progress.global_step, **values, **pace)
    text = f"loss {values['loss']:.4f}, {pace['samples_per_second']:.0f} samples/s"
    bar.set_postfix_str(text)
    if bar.disable:
        print(f"  step {progress.global_step}: {text}", flush=True)


def end_epoch(run: Run, progress: Progress, pace: dict[str, float]) -> list[str]:
    """Evaluate and tell, unless asked to stop: by whom is returned. Collective: every rank."""
    totals, stop = evaluate(run, progress)
    if stop or not run.log:
        return stop
    epoch = progress.global_step // run.sampler.steps_per_epoch
    values, test_samples = means(progress.sums), totals[2]
    test = {f"test_{name}": value for name, value in means(totals).items()}
    run.log.write("epoch", progress.global_step, epoch=epoch, **values, **test, **pace)
    text = (
        f"Epoch {epoch} - Avg Loss: {values['loss']:.6f}, Accuracy: {values['accuracy']:.2%}, "
        f"Test Loss: {test['test_loss']:.6f}, Test Accuracy: {test['test_accuracy']:.2%} "
        f"of {test_samples}"
    )
    if pace:
        text += f" | {pace['samples_per_second']:.0f} samples/s"
        text += f", {pace['data_wait']:.1%} waiting for data"
    print(text, flush=True)
    return []


@torch.no_grad()
def evaluate(run: Run, progress: Progress) -> tuple[list[int], list[str]]:
    """([loss, correct, samples] of the test set, who asks to stop). Collective: every rank.

    The ranks may have different numbers of batches, so only a look at the wishes to stop may be
    collective: hence the model itself, not its DDP wrapper.
    """
    if run.world.world_size > 1:
        for buffer in run.model.buffers():  # BatchNorm: all evaluate what rank 0 has saved
            dist.broadcast(buffer, src=0)
    run.model.eval()
    device, sums, lookout = run.world.device, Sums(run.world.device), Lookout(run, 0)
    batches = iter(run.test_loader)
    for number in range(run.test_batches):
        for images, labels in itertools.islice(batches, 1):  # none, perhaps, in the last round
            labels = labels.to(device, non_blocking=True)
            with autocast(run.cfg, device):
                logits = run.model(prepare(images, run.cfg, run.spec, device))
                sums.add(F.cross_entropy(logits, labels, reduction="sum"), logits, labels)
        run.watch.progress(progress.global_step)
        if number + 1 >= lookout.next and (stop := lookout.look(number + 1, sums)[1]):
            return [0, 0, 0], stop
    return sums.over_all_ranks(run.world), []


# --------------------------------------------------------------------------------------- MAIN


def train(cfg: argparse.Namespace, world: World) -> None:
    """The whole run: resume, train epoch by epoch, save. Collective: every rank."""
    claim, stop_wishes = Claim(cfg, world), StopWishes(cfg, world)
    progress = Progress()
    try:
        run, chosen = start_or_resume(cfg, world, claim, stop_wishes, progress)
        total = cfg.epochs * run.sampler.steps_per_epoch
        goal = min(total, cfg.stop_at_step or total)
        if world.rank == 0:
            print_plan(run, chosen, progress, goal)
        stopped = train_to(goal, run, progress, chosen)
        run.saver.wait()
    except BaseException as error:
        with suppress(UserError, OSError):
            if not claim.facts:
                claim.withdraw()
            elif not lost_the_others(error):
                claim.tell("failed", progress.global_step, f"{type(error).__name__}: {error}")
        raise
    cut_off = progress.global_step < total or set(stopped) - {"stop-at-step"}
    state = "stopped" if cut_off else "finished"
    claim.tell(state, progress.global_step, " ".join(stopped))
    if run.log:
        spent = ["--resume", "--override"] * (cfg.resume != "auto")
        spent += ["--stop-at-step"] * (progress.global_step == cfg.stop_at_step)
        again = "the same command" + " without " * bool(spent) + " and ".join(spent)
        how = "Finished" if state == "finished" else f"Stopped as asked; {again} goes on"
        print(f"{how}: step {progress.global_step} of {total}, saved in {cfg.checkpoint_dir}")
    gather(world, None)  # were some to leave while rank 0 saves, a launcher might end it


def train_to(goal: int, run: Run, progress: Progress, chosen: str | None) -> list[str]:
    """Epoch by epoch up to that step. Returns who asked to stop. Collective: every rank."""
    cfg, world = run.cfg, run.world
    # A checkpoint is saved before its epoch is evaluated: a stop in between leaves that to do.
    at_end_of_epoch = chosen and progress.global_step % run.sampler.steps_per_epoch == 0
    evaluate_first = at_end_of_epoch and not gather(world, is_evaluated(cfg, progress))[0]
    if progress.global_step >= goal and not evaluate_first:
        return []
    opening = [open_run_directory, cfg, chosen, progress] if world.rank == 0 else [lambda: None]
    run.log = on_every_rank(world, *opening)
    run.ddp = wrap_ddp(run)
    hosts = sorted({host for host, _ in run.watch.peers})
    run.claim.facts = {"start_step": progress.global_step, "began": time.time()}
    run.claim.facts |= {"world_size": world.world_size, "hosts": hosts}
    run.claim.tell("running", progress.global_step)
    run.watch.start()
    run.watch.progress(progress.global_step)
    stop: list[str] = []
    if evaluate_first:
        if not is_of_this_run(chosen, cfg):
            epoch = progress.global_step // run.sampler.steps_per_epoch
            run.saver.save(run, progress, f"checkpoint_epoch_{epoch}", last=True)
        stop = end_epoch(run, progress, {})
    while progress.global_step < goal and not stop:
        stop = train_epoch(run, progress)
    run.watch.due = math.inf
    return stop


def start_or_resume(cfg, world: World, claim, stop: StopWishes, progress: Progress):
    """Everything in its place, new or from a file: (Run, that file). Collective: every rank."""
    on_every_rank(world, tune, cfg, world)
    on_rank_0 = functools.partial if world.rank == 0 else lambda *_: lambda: None
    on_every_rank(world, on_rank_0(make_run_directory, cfg))
    owner = gather(world, on_every_rank(world, on_rank_0(claim.make)))[0]
    on_every_rank(world, claim.seen, owner)
    chosen = gather(world, on_every_rank(world, on_rank_0(choose_checkpoint, cfg)))[0]
    state = on_every_rank(world, load_checkpoint, chosen, cfg, world) if chosen else None
    run = build_run(cfg, world, claim, stop)
    if chosen:
        on_every_rank(world, restore, state, run, chosen, progress)
    return run, chosen


def batch_equation(batch_size: int, sampler: MicroBatchSampler, ranks: int) -> str:
    each = sorted({sampler.per_step // ranks, -(-sampler.per_step // ranks)})
    return (
        f"Global batch {sampler.global_batch_size} = {count(sampler.per_step, 'micro-batch')} of "
        f"{batch_size}, {' or '.join(map(str, each))} on each of {count(ranks, 'rank')}; "
        f"{count(sampler.steps_per_epoch, 'step')} per epoch of {sampler.samples} samples"
    )


def print_plan(run: Run, chosen: str | None, progress: Progress, goal: int) -> None:
    """The batch equation, and where the run begins."""
    step = progress.global_step
    print(batch_equation(run.cfg.batch_size, run.sampler, run.world.world_size))
    if step >= goal:
        more = "--stop-at-step" if run.cfg.stop_at_step == goal else "--epochs"
        print(f"Nothing to do: {chosen} is at step {step} of {goal}; a larger {more} would go on")
    elif chosen:
        print(f"Resuming from {chosen} at step {step}")
    sys.stdout.flush()


def plan_instead(words: list[str]) -> None:
    """Become scripts/plan.py, which has options of its own."""
    plan = Path(__file__).resolve().parent / "scripts" / "plan.py"
    if not plan.exists():
        raise UserError(f"--plan needs {plan}: copy it from the repository")
    os.execv(sys.executable, [sys.executable, str(plan), *words])


def main(argv: list[str] | None = None) -> int:
    # Until training listens for it, Ctrl-C simply ends the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Should torchrun die of a signal, its workers would run on unseen: let them stop as well.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    words = sys.argv[1:] if argv is None else argv
    try:
        if "--plan" in words:
            plan_instead(words)
        cfg = parse_config(words)
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


# ---------------------------------------------------------------------------------- ROLL CALL
# At the start: who is missing or strange?


def look_up_master(world: World, host: str, deadline: float) -> None:
    """UserError for a name that nobody knows, where c10d would warn for minutes."""
    deadline = min(deadline, time.monotonic() + 30)  # name services have their moments
    while True:
        try:
            socket.getaddrinfo(world.master_addr, world.master_port)
            return
        except (OSError, UnicodeError) as error:  # the latter: such a name cannot be
            if time.monotonic() > deadline - 1 or isinstance(error, UnicodeError):
                why = getattr(error, "strerror", error)
                raise UserError(
                    f"master {world.master_addr} is unknown on {host} ({why}): "
                    "set MASTER_ADDR to an address of rank 0's host"
                ) from None
        time.sleep(1)


def call_the_roll(world: World, card: dict, cfg: argparse.Namespace) -> dist.Store | None:
    """Meet at a store on the master, where rank 0 checks all cards. Collective: every rank.

    A store with a time limit answers where a collective hangs, so whoever is missing can be named.
    """
    if world.world_size == 1:
        end_on(check_cards([card], cfg))
        announce([card])
        return None
    here, deadline = f"{world.master_addr}:{world.master_port}", time.monotonic() + cfg.init_timeout
    look_up_master(world, card["host"], deadline)
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
            "did rank 0 start, is MASTER_PORT free, no firewall?",
            "port" if "EADDRINUSE" in str(error) else "configuration",
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
    # UnicodeError: such a name cannot be.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError, UnicodeError):
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


# -------------------------------------------------------------------------------------- CLAIM
# One job at a time trains in a run directory.


class Claim:
    """One job at a time trains in a run directory: the one that status.json names."""

    def __init__(self, cfg: argparse.Namespace, world: World):
        self.path, self.rank = Path(cfg.checkpoint_dir, "status.json"), world.rank
        self.me = {"job": world.job, "host": socket.gethostname(), "pid": os.getpid()}
        self.before: bytes | None = None  # what was in the file
        self.told = 0.0
        self.facts: dict = {}  # for scripts/supervise.py, once training begins

    def read(self) -> dict:
        with suppress(OSError, ValueError, TypeError):
            status = dict(json.loads(self.path.read_text()))
            return status if self.me.keys() <= status.keys() else {}
        return {}

    def make(self) -> dict:
        """For rank 0, before it changes anything. Returns who claims the directory now: us.

        A later attempt of the same job takes over at once, and whoever dies leaves it free. On
        another host, a process counts as dead after a minute without a sign of life.
        """
        other = self.read()
        same_job = lineage(other.get("job", "")) == lineage(self.me["job"]) != ""
        if other.get("state") == "running" and not same_job and self.is_alive(other):
            job = f"job {other['job']}, " * (lineage(other["job"]) != "")
            raise UserError(
                f"{self.path.parent} is in use by {job}process {other['pid']} on {other['host']}: "
                f"end that, or take another --checkpoint-dir (if it is dead, remove {self.path})",
                "in use",
            )
        self.before = self.path.read_bytes() if self.path.exists() else b""
        status = {"global_step": 0} | other | {"state": "running"} | self.me
        write_text(self.path, json.dumps(status))
        return self.me

    def withdraw(self) -> None:
        """As if it had never been made."""
        if self.before is not None:
            write_text(self.path, self.before.decode(), claim=self)
            if not self.before:
                self.path.unlink()

    def is_alive(self, other: dict) -> bool:
        if other["host"] == self.me["host"]:
            try:
                os.kill(other["pid"], 0)
            except ProcessLookupError:
                return False
            except OSError:
                pass  # somebody else's
            return True
        with tempfile.TemporaryFile(dir=self.path.parent) as now:  # in the file system's own time
            return os.fstat(now.fileno()).st_mtime - self.path.stat().st_mtime < 60

    def seen(self, owner: dict) -> None:
        """For all ranks: raise UserError unless they see what rank 0 has written."""
        deadline = time.monotonic() + 10  # NFS may show it late
        while {name: self.read().get(name) for name in owner} != owner:
            if time.monotonic() > deadline:
                raise UserError(f"{self.path} is not what rank 0 wrote: all nodes must share it")
            time.sleep(0.2)

    def sign_of_life(self) -> None:
        if self.rank == 0:
            with suppress(OSError):
                os.utime(self.path)

    def check(self) -> None:
        """Raise UserError if another job, or a later attempt of ours, has taken over."""
        now = self.read()
        if any(now.get(name) != value for name, value in self.me.items()):
            who = f"process {now.get('pid')} on {now.get('host')}, job {now.get('job')!r}"
            text = f"{self.path.parent} belongs to {who} now: nothing more is written to it"
            raise UserError(text, "superseded")

    def tell(self, state: str, global_step: int, reason: str = "") -> None:
        """On rank 0. States: running, finished, stopped, failed."""
        self.told = time.monotonic()
        if self.rank == 0:
            status = {"state": state, "global_step": global_step, "reason": reason, **self.me}
            status |= {"time": time.time(), **self.facts}
            write_text(self.path, json.dumps(status, indent=1), claim=self)


def lineage(job: str) -> str:
    """What all attempts of a job share: its name without the number after the dot."""
    return "" if job in ("none", "0") else re.sub(r"\.\d+$", "", job)


# ----------------------------------------------------------------------------------- WATCHDOG
# It ends a training that hangs, and names who is slow.


class Watchdog(threading.Thread):
    """Ends this process when it makes no progress, and says which rank the others waited for.

    A thread of its own. Each rank leaves a note in the run directory on where it stands, and prints
    the stacks of its threads.
    """

    def __init__(self, cfg: argparse.Namespace, world: World, claim: Claim):
        super().__init__(daemon=True)
        self.world, self.claim, self.timeout = world, claim, cfg.hang_timeout
        self.main, self.step, self.due = threading.main_thread().ident, 0, math.inf
        self.peers = gather(world, (socket.gethostname(), os.getpid()))
        self.notes = Path(cfg.checkpoint_dir)
        self.forward, self.compared, self.slow = [0] * world.world_size, 0.0, {}

    def progress(self, step: int) -> None:
        self.step, self.due = step, time.monotonic() + self.timeout

    def run(self) -> None:
        signed = 0.0
        while True:
            time.sleep(0.5)
            if time.monotonic() > signed + 5:
                signed = time.monotonic()
                self.claim.sign_of_life()
            if time.monotonic() > self.due:
                try:
                    self.end()
                finally:  # whatever the disk says
                    os._exit(1)
            if self.due < math.inf:  # should even this thread be unable to run
                faulthandler.dump_traceback_later(self.timeout + 5, exit=True)
            else:
                faulthandler.cancel_dump_traceback_later()

    def end(self) -> None:
        """Tell where we stand, then look where the others do."""
        warn(f"rank {self.world.rank}: no progress for {self.timeout:.0f} s at step {self.step}")
        faulthandler.dump_traceback(all_threads=True)
        note = {"waits": self.waits(), "nonce": self.peers[0][1]}
        with suppress(OSError):
            self.note(self.world.rank).write_text(json.dumps(note))
        time.sleep(2)
        culprits, present = [], []
        for rank, (host, pid) in enumerate(self.peers):
            with suppress(OSError, ValueError):
                theirs = json.loads(self.note(rank).read_text())
                if theirs["nonce"] == note["nonce"]:
                    present.append(rank)
                    if theirs["waits"]:
                        continue
            state = "was busy elsewhere, see its stacks" if rank in present else "does not answer"
            culprits.append(f"rank {rank} on {host} {state}")
            if rank not in present and host == self.peers[self.world.rank][0]:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)  # it would not end by itself
        text = f"hang at step {self.step}: all ranks wait for each other"
        if culprits:
            text = (
                f"hang at step {self.step}: the ranks waited for {count(len(culprits), 'rank')}: "
            )
            text += ", ".join(culprits)
        if present[:1] == [self.world.rank]:
            record_failure("hang", text, self.world.rank)
            print(f"train_distributed.py: error: {text}", file=sys.stderr, flush=True)
            self.claim.tell("failed", self.step, text)

    def note(self, rank: int) -> Path:
        return self.notes / f".hang_{rank}.json"

    def waits(self) -> bool:
        """Whether the main thread is in a collective, or in the backward pass that ends in one."""
        frame = sys._current_frames().get(self.main)
        while frame:
            code = frame.f_code
            if code.co_name in ("over_all_ranks", "gather", "_engine_run_backward"):
                return True
            if "/torch/distributed/" in code.co_filename:
                return True
            frame = frame.f_back
        return False

    def compare(self, micros: list[int]) -> None:
        """Name a rank whose own work took half as long again as that of the median rank, twice.

        Takes each rank's microseconds for a forward pass; rank 0 speaks, every few seconds at most.
        """
        self.forward = [a + b for a, b in zip(self.forward, micros)]
        if self.world.rank or not all(micros) or time.monotonic() < self.compared + LOOK_SECONDS:
            return
        median = statistics.median_low(self.forward)
        self.compared, latest, self.forward = time.monotonic(), self.forward, [0] * len(micros)
        for rank, own in enumerate(latest):
            self.slow[rank] = self.slow.get(rank, 0) + 1 if own > max(1.5 * median, 1000) else 0
            if self.slow[rank] == 2:
                warn(
                    f"rank {rank} on {self.peers[rank][0]} is slow: {own / max(1, median):.1f} "
                    "times the median rank's seconds; other processes there, or a hot GPU?"
                )


class Timer:
    """How long a forward pass takes: this rank's own work, before it has to wait for the others.

    The mean of all since the last reading; on a GPU, which is not waited for, the last one.
    """

    def __init__(self, device: torch.device):
        self.seconds, self.passes = 0.0, 0
        self.events = []
        if device.type == "cuda":
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def begin(self) -> None:
        self.began = time.perf_counter()
        for event in self.events[:1]:
            event.record()

    def end(self) -> None:
        self.seconds, self.passes = self.seconds + time.perf_counter() - self.began, self.passes + 1
        for event in self.events[1:]:
            event.record()

    def read(self) -> float:
        seconds, passes = self.seconds, self.passes
        self.seconds, self.passes = 0.0, 0
        if passes and self.events:
            self.events[1].synchronize()
            return self.events[0].elapsed_time(self.events[1]) / 1000
        return seconds / max(1, passes)


# ------------------------------------------------------------------------------ GRADIENT TREE
# For --reproducible.


class GradientTree:
    """For --reproducible, in place of DDP: gradients summed in an order of their own.

    That of a balanced binary tree over the micro-batches of a step: neighbours first, then pairs of
    neighbours. A rank holds a whole branch of it; then pairs of ranks exchange their sums, pairs of
    pairs, and so on. So the bits do not depend on the number of ranks, if it is a power of two.
    """

    def __init__(self, run: Run):
        self.world, self.branches = run.world, []  # of (height, gradients in a row)
        self.parameters = [p for p in run.model.parameters() if p.requires_grad]

    def add(self) -> None:
        """The gradients of one more micro-batch; they start from nothing again."""
        zeros = torch.zeros_like
        flat = torch.cat(
            [(zeros(p) if p.grad is None else p.grad).flatten() for p in self.parameters]
        )
        height = 0
        while self.branches and self.branches[-1][0] == height:
            flat = self.branches.pop()[1].add_(flat)
            height += 1
        self.branches.append((height, flat))
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """Sums over the ranks, into the gradients. Collective: every rank."""
        ((_, flat),) = self.branches
        distance, rank = 1, self.world.rank
        while distance < self.world.world_size:
            other = torch.empty_like(flat)
            pair = [(dist.isend, flat), (dist.irecv, other)]
            for work in dist.batch_isend_irecv([dist.P2POp(*p, rank ^ distance) for p in pair]):
                work.wait()
            flat, distance = flat + other, 2 * distance
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, flat.split(sizes)):
            parameter.grad = torch.empty_like(parameter).copy_(gradient.view(parameter.shape))


# --------------------------------------------------------------------------------- LAST WORDS
# How an error is told.


def lost_the_others(error: BaseException) -> bool:
    """Whether it is only a consequence of another rank's end."""
    return isinstance(error, dist.DistBackendError) or "gloo/transport" in str(error)


def record_failure(cause: str, reason: str, rank: int) -> None:
    """For scripts/supervise.py: the first rank to fail says why."""
    if file := os.environ.get("FAILURE_FILE"):
        facts = {"cause": cause, "reason": reason, "rank": rank, "host": socket.gethostname()}
        with suppress(OSError), open(file, "x") as first:
            json.dump(facts, first)


def tell(error: Exception) -> None:
    """A user's mistake in a sentence, anything else with its traceback."""
    if lost_the_others(error):
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
    full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "t allocate memory" in str(
        error
    )
    cause = getattr(error, "cause", "out of memory" if full else "exception")
    reason = f"{type(error).__name__}: {error}" if cause == "exception" else str(error)
    record_failure(cause, reason, dist.get_rank() if dist.is_initialized() else 0)
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        return
    # Before the ranks have met, those of a node find the same mistake: one of them speaks.
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    if dist.is_initialized() or local_rank == "0":
        print(f"train_distributed.py: error: {error}", file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun repeats it at the end
        Path(file).write_text(json.dumps({"message": str(error), "timestamp": time.time()}))


class Output(io.FileIO):
    """Standard output or error. It may break (a terminal is closed, Ctrl-C ends the `tee` behind
    us, the log's disk is full), and training goes on and saves nevertheless."""

    def write(self, data) -> int:
        with suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


if __name__ == "__main__":
    for name in ("stdout", "stderr"):
        if (old := getattr(sys, name)) and old is getattr(sys, f"__{name}__"):  # no notebook's
            output = io.BufferedWriter(Output(old.fileno(), "w", closefd=False))
            new = io.TextIOWrapper(output, old.encoding, old.errors, line_buffering=True)
            setattr(sys, name, new)
    sys.exit(main())
