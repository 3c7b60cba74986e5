#!/usr/bin/env python3
"""Train a model with PyTorch DistributedDataParallel (DDP), in one file.

    python train_distributed.py                                     # one process: a laptop, one GPU
    torchrun --standalone --nproc-per-node 4 train_distributed.py   # one machine with four GPUs
    srun -n 4 python scripts/guard.py train_distributed.py          # Slurm: one task for each GPU

Your data, model, optimizer, loss and metrics replace those of the class Task, just below: edit it,
or subclass it in a file of your own (see examples/) that ends with main(MyTask()). To own the
training loop, copy train_minimal.py instead.

A rank is one process with one GPU. Every rank must call each function marked "collective", or the
other ranks hang. A step uses --global-batch-size samples, in micro-batches of --batch-size that are
divided among the ranks. The samples of a micro-batch, their augmentation and the dropout depend
only on the step and the number of the micro-batch: any number of ranks, and resumed runs, see the
same ones.

To save and stop: Ctrl-C; SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 to any rank; a file STOP in
--checkpoint-dir, or the file $STOP_FILE; shortly before the time $DEADLINE (seconds since 1970). A
file SAVE in --checkpoint-dir saves and continues. To resume, run the same command. To use the
trained model, see load_model(). Exit code: 0 finished or saved; 1 error or hang; 2 user error; 130
second Ctrl-C.

Sections:
    TASK, OPTIONS     edit: model, data, loss, metrics, schedule; options and their defaults
    TRAINING, DATA    read: the loop, a step, an evaluation; which samples a step uses
    RANKS, METRICS, STOPPING, CHECKPOINTS, READING OPTIONS, MAIN
                      leave alone: nothing there depends on the task
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import difflib
import enum
import faulthandler
import functools
import gc
import inspect
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    import torch.nn.functional as F
    import yaml
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
    from torch.utils.checkpoint import checkpoint as recompute_in_backward
    from torch.utils.data import (
        ConcatDataset,
        DataLoader,
        Dataset,
        IterableDataset,
        Subset,
        TensorDataset,
        default_collate,
    )
except ImportError as error:
    remedy = "activate the environment, or pip install -r requirements.txt"
    raise SystemExit(f"{error}: {remedy}") from None

try:
    import fcntl
except ImportError:  # Windows, where load_model() works
    fcntl = None


# --------------------------------------------------------------------------------------- TASK
class SimpleConvNet(nn.Module):
    """Two convolutions, two linear layers: [b, channels, size, size] -> logits [b, classes]."""

    def __init__(self, channels: int, size: int, classes: int, dropout: float):
        super().__init__()
        pooled = (size - 4) // 2  # 12 for 28 pixels
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.fc1 = nn.Linear(64 * pooled * pooled, 128)
        self.fc2 = nn.Linear(128, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))  # [b, 32, size - 2, size - 2]
        x = F.relu(self.conv2(x))  # [b, 64, size - 4, size - 4]
        x = F.max_pool2d(x, 2)  # [b, 64, pooled, pooled]
        x = self.dropout(x.flatten(1))
        x = self.dropout(F.relu(self.fc1(x)))  # [b, 128]
        return self.fc2(x)


class Normalized(nn.Module):
    """A network for raw images: uint8 [b, c, h, w], or floats from 0 to 1, which it normalizes.

    mean, std: of the pixels of each channel, from 0 to 1. With three of them, gray images become
    images of three channels.
    """

    def __init__(self, network: nn.Module, mean: list[float], std: list[float]):
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)  # convolutions are faster
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype != torch.uint8:
            images = 255 * images
        images = (images - self.mean) / self.std
        return self.network(images.to(memory_format=torch.channels_last))


class Task:
    """What is trained: digits. Subclass it, and override what differs in your task."""

    # Plain values that data() learns and model() needs, such as class names; part of checkpoints.
    spec: dict = {}
    # The metric of report() by which best.pt is chosen and --patience counts.
    best = "accuracy"
    best_is_lowest = False  # needed for other metrics than losses, whose names end with "loss"

    # Set by the trainer on every rank, before each step and evaluation, and by load_model():
    cfg: argparse.Namespace  # the options
    step = 0  # optimizer steps that are done
    total_steps = 0  # of the run

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options of this task: on the command line, in config files and in checkpoints."""
        add = parser.add_argument
        datasets = ["mnist_sample", "mnist"]
        add("--dataset", choices=datasets, default="mnist_sample", help="[mnist_sample]")
        add("--dropout", type=fraction, default=0.25, help="[0.25]")

    def data(self, cfg) -> tuple[Dataset, Dataset | None]:
        """(training set, test set or None): map-style data sets of tuples, dicts or tensors.

        Or (training set, validation set, test set): then best.pt and --patience go by the
        validation set, and the test set is evaluated once, at the end, with best.pt. A data set of
        tensors in memory is fastest as an InMemoryDataset. Others are read by --num-workers
        processes.
        """
        self.spec = {"classes": [str(digit) for digit in range(10)]}
        root = Path(__file__).with_name("data") / "mnist_sample"  # comes with this file
        if cfg.dataset == "mnist":
            root = Path(cfg.data_dir)
        return read_mnist(root, "train"), read_mnist(root, "test")

    def order(self, cfg, train_set: Dataset, epoch: int, generator: torch.Generator):
        """The indices of an epoch's samples in their order: as many as there are samples.

        Some may be missing, and others repeated. Must depend on the arguments alone; it is called
        one epoch ahead. For example, to draw rare classes as often as others:
        list(WeightedRandomSampler(weights, len(train_set), generator=generator))
        """
        return torch.randperm(len(train_set), generator=generator)

    def model(self, cfg) -> nn.Module:
        """Raw images -> logits [b, classes]."""
        network = SimpleConvNet(1, 28, len(self.spec["classes"]), cfg.dropout)
        return Normalized(network, mean=[0.1307], std=[0.3081])

    def optimizer(self, cfg, model: nn.Module) -> torch.optim.Optimizer:
        """The learning rate of each parameter group is its peak: see lr_factor()."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        # Fused is faster. With fp16, a first step that is skipped would leave its state undefined.
        fused = cfg.amp != "fp16" and all(p.is_floating_point() for p in parameters)
        options = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "fused": fused}
        if cfg.optimizer == "adamw":
            return torch.optim.AdamW(parameters, **options)
        return torch.optim.SGD(parameters, momentum=0.9, **options)

    def lr_factor(self, cfg, step: int, total_steps: int) -> float:
        """What the peak learning rates are multiplied by: linear warm-up, then a cosine to 0.

        step: from 0 to total_steps - 1, as in the function of torch's LambdaLR.
        """
        steps_per_epoch = total_steps / cfg.epochs
        warmup = cfg.warmup_epochs * steps_per_epoch
        done = step + 0.5  # the middle of the step
        if done < warmup:
            return done / warmup
        return (1 + math.cos(math.pi * (done - warmup) / (total_steps - warmup))) / 2

    def loss(self, model: nn.Module, batch) -> tuple[torch.Tensor, dict]:
        """A micro-batch on the device -> (its mean loss, sums for report()).

        The gradient of a step is that of the mean loss of all its samples. Sums are numbers or
        tensors of any shape, such as a confusion matrix, and are added up. Where samples have
        different numbers of items, such as tokens or valid pixels, return the mean over the items
        (a number, even if there are none), and their number as the sum "count", a tensor, best of
        integers, which add up exactly: then it is the mean over all items. Random numbers of
        torch, numpy and random are the same here on any number of ranks. model.training says
        whether this is a step of the training. In an evaluation, the result may have a third part:
        rows, a dict of tensors [b, ...], for metrics that need all predictions.
        """
        images, labels = batch
        logits = model(images)
        try:
            loss = F.cross_entropy(logits, labels)
            correct = (logits.argmax(1) == labels).sum()
        except (IndexError, RuntimeError) as error:  # on a GPU, a wrong number is an assert
            raise UserError(
                f"labels {labels.dtype} {list(labels.shape)} do not fit logits "
                f"{list(logits.shape)}: they are int64, from 0 to {logits.shape[1] - 1} ({error})"
            ) from None
        return loss, {"correct": correct}

    def report(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        """The metrics to print and to record, from the sums over all micro-batches and ranks.

        The sums are float64 tensors. sums["count"] is the number of samples (or items),
        sums["loss"] the sum of their losses. A metric that is not a mean comes from sums, too: F1
        is 2 * tp / (2 * tp + fp + fn). In an evaluation, sums also has the rows of loss(),
        [samples, ...] in the order of the data set: for AUC, mAP, a median.
        """
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}

    def after_evaluation(self, values: dict[str, float]) -> bool:
        """Called on rank 0 with what report() made of an evaluation. True ends the training."""
        return False

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """What --activation-checkpointing recomputes, one by one, such as a ResNet's."""
        return []

    def loader_options(self) -> dict:
        """Options of the DataLoader, for example {"collate_fn": pad, "prefetch_factor": 8}."""
        return {}

    def wrap(self, loss: LossOf) -> DistributedDataParallel:
        """What exchanges the gradients of several ranks in the backward pass."""
        ddp = DistributedDataParallel(loss, gradient_as_bucket_view=True)
        ddp.broadcast_buffers = False  # evaluate() does it (deprecated as an argument)
        return ddp


def read_mnist(root: Path, part: str) -> InMemoryDataset:
    """uint8 [n, 1, 28, 28] and labels int64 [n]; part: train or test."""
    from torchvision.datasets import MNIST  # not at the top: it takes time, and not all need it

    try:
        digits = MNIST(root, train=part == "train", download=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot read MNIST in {root}: is --data-dir right? ({error})") from None
    return InMemoryDataset(digits.data.unsqueeze(1), digits.targets)


# ------------------------------------------------------------------------------------ OPTIONS
# What may change in a run at any time:
FREE_OPTIONS = {"config", "evaluate", "checkpoint_dir", "resume", "init", "epochs", "total_steps"}
FREE_OPTIONS |= {"stop_at_step", "data_dir", "num_workers", "log_every_steps", "tensorboard"}
FREE_OPTIONS |= {"wandb", "keep", "checkpoint_every_steps", "save_minutes", "nodes", "patience"}
FREE_OPTIONS |= {"gpus_per_node", "distributed_backend", "hang_timeout", "eval_every_steps"}
FREE_OPTIONS |= {"eval_every_epochs"}
# What never changes in a run:
FIXED_OPTIONS = {"seed", "batch_size", "global_batch_size", "optimizer", "dataset"}
FIXED_OPTIONS |= {"task", "spec", "samples"}  # see Saver.identity


def build_parser(task) -> Parser:
    """The options, one per line. They are also the keys of a config file, with _ instead of -."""
    parser = Parser(
        description=sys.modules["__main__"].__doc__,  # of the started script
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        conflict_handler="resolve",  # a task may define an option anew
    )
    add = parser.add_argument
    switch = functools.partial(add, action=argparse.BooleanOptionalAction, default=False)

    def option(name: str, kind: Callable, text: str, default=None):
        add(name, type=kind, default=default, help=text)

    option("--config", path, "FILE of options in YAML; the command line wins")
    option("--evaluate", path, "FILE.pt: evaluate it and nothing else, by its options")
    add("--checkpoint-dir", "--save-dir", type=path, help="of this run [checkpoints]")
    option("--resume", path, "FILE.pt: continue its run in a new --checkpoint-dir")
    option("--init", path, "FILE.pt: begin with these weights, of another run or of others")
    option("--epochs", positive, "passes over the training data [5]", 5.0)
    option("--total-steps", positive_int, "length of the run, instead of --epochs")
    option("--stop-at-step", positive_int, "save and exit at this step; same schedule")
    option("--seed", integer, "random seed [42]", 42)
    switch("--deterministic", help="repeatable kernels, slower on a GPU")
    switch("--reproducible", help="the same weights on any number of ranks")
    option("--data-dir", path, "where the data is or is downloaded to [data]", "data")
    option("--num-workers", not_negative_int, "loader workers, for files [cores of a rank]")
    option("--batch-size", positive_int, "micro-batch: samples per forward pass [64]", 64)
    option("--global-batch-size", positive_int, "samples per step [batch size x ranks]")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="[sgd]")
    option("--lr", not_negative, "peak learning rate [0.05]", 0.05)
    option("--warmup-epochs", not_negative, "epochs of linear warm-up [0.2]", 0.2)
    option("--weight-decay", not_negative, "[0.0001]", 1e-4)
    option("--clip-grad-norm", not_negative, "largest norm of the gradient; 0: off [0]", 0.0)
    add("--amp", choices=["off", "bf16", "fp16"], default="off", help="mixed precision [off]")
    switch("--tf32", default=True, help="TF32 for products of float32 on GPUs [on]")
    switch("--compile", help="torch.compile the model")
    switch("--activation-checkpointing", help="less memory, slower")
    option("--eval-every-epochs", positive_int, "evaluate and save after N epochs, and last [1]", 1)
    option("--eval-every-steps", positive_int, "also every N steps")
    option("--patience", positive_int, "stop after N evaluations without a better one")
    option("--log-every-steps", positive_int, "steps between records [20]", 20)
    switch("--tensorboard", help="also write TensorBoard files")
    switch("--wandb", help="also log to W&B (WANDB_MODE=offline works)")
    option("--save-minutes", not_negative, "minutes between saves [10]", 10.0)
    option("--checkpoint-every-steps", positive_int, "also save every N steps")
    option("--keep", positive_int, "newest checkpoints to keep [3]", 3)
    add("--distributed-backend", choices=["nccl", "gloo"], help="[nccl or xccl on GPUs, else gloo]")
    option("--nodes", positive_int, "fail unless there are this many nodes")
    option("--gpus-per-node", positive_int, "fail unless a node has this many ranks")
    option("--hang-timeout", positive_int, "seconds without progress [600]", 600)
    task.add_options(parser)  # last: it may set defaults of the others
    for action in parser._actions:
        if action.type is bool:  # bool("false") is True
            name, remedy = action.option_strings[0], "action=argparse.BooleanOptionalAction"
            raise UserError(f"{name}: type=bool takes every text for true: use {remedy}")
    return parser


# The types of options. If one raises ValueError, argparse names the option, the type and the text.


def path(text: str) -> str:
    """Replaces ~ and $VARIABLES, which a shell does not do after =, nor YAML at all."""
    text = os.path.expandvars(os.path.expanduser(text))
    if "$" in text:  # of a variable that is not set
        raise ValueError
    return text


def number(kind: type, lowest: float, highest: float) -> Callable:
    """The type of an int or a float from the lowest number to the highest."""

    def convert(text: str):
        with suppress(ValueError):
            value = kind(text)
            if lowest <= value <= highest:  # not if it is NaN
                return value
        text = f"{text!r} is not of type {kind.__name__}, from {lowest} to {highest}"
        raise argparse.ArgumentTypeError(text)

    return convert


integer = number(int, -(2**63), 2**63 - 1)
positive_int = number(int, 1, 2**31 - 1)
not_negative_int = number(int, 0, 2**31 - 1)
positive = number(float, 1e-9, 2**31)
not_negative = number(float, 0, math.inf)
fraction = number(float, 0, 1)


# ----------------------------------------------------------------------------------- TRAINING
# In all functions, cfg holds the options, and world says which rank this is.


@dataclass
class State:
    """Where a run is, and what it has counted. Part of each checkpoint."""

    step: int = 0  # optimizer steps since the start of the run
    is_due: bool = False  # whether it is to be evaluated after this step
    best_score: float = -math.inf  # what Task.best was at its best; negative if lowest is best
    evaluations_since_best: int = 0
    epoch_sums: Counter = field(default_factory=Counter)  # of this epoch, on rank 0
    interval_sums: Counter = field(default_factory=Counter)  # since the last record


def train(task, cfg, world):
    """One run, from its start or its newest checkpoint to its last step. Collective."""
    path = on_rank_0(find_checkpoint, cfg)
    checkpoint = None
    task.step = 0
    if path:
        checkpoint = load_checkpoint(path, is_verified=False)  # rank 0 has verified it
        task.step = checkpoint["state"]["step"]
    if not cfg.global_batch_size:
        cfg.global_batch_size = cfg.batch_size * world.world_size
        if checkpoint:  # that of the run stays, on any number of ranks
            cfg.global_batch_size = checkpoint["config"]["global_batch_size"]
    train_set, held_out, test_set = open_data(task, cfg)
    if cfg.patience and held_out is None:
        raise UserError("--patience: there is no test set (Task.data())")
    stream = SampleStream(task, cfg, world, train_set)
    total_steps = stream.total_steps
    last_step = min(total_steps, cfg.stop_at_step or total_steps)
    model = build_model(task, cfg, world)
    optimizer = build_optimizer(task, cfg, model)
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.amp == "fp16")
    saver = Saver(task, cfg, stream)
    state = State()
    if checkpoint:
        saver.restore(path, checkpoint, state, model, optimizer, scaler)
    else:
        if cfg.init:
            load_initial_weights(cfg, model)
        on_rank_0(saver.try_to_save, state, model, optimizer, scaler)
    del checkpoint  # a mapped file takes up space on the disk even after it is deleted
    loss_of = LossOf(task, cfg, world, model)
    if dist.is_initialized() and not cfg.reproducible:
        ddp = task.wrap(loss_of)
        if getattr(ddp, "module", None) is not loss_of:
            raise UserError("Task.wrap(loss) must return DistributedDataParallel(loss, ...)")
        loss_of = ddp
        settle_buckets(ddp)
    keys = functools.partial(stream.keys, state.step)
    count = (last_step - state.step) * len(stream.micro_batches)
    batches = batches_of(task, cfg, world, train_set, keys, count)
    prefix = "test_" if test_set is None else "validation_"
    metrics = MetricsWriter(task, cfg, saver, prefix)
    requests = StopRequests(cfg)
    sums = Sums()
    exchange = Exchange(world)
    seconds_left = None  # until the first exchange
    reason = ""  # why to end before the last step; the same on all ranks
    begin = f"Resuming from {path} at step {state.step}" if path else "Starting a new run"
    log_on_rank_0(f"Code: {saver.code}\n{begin}, to step {last_step}")
    if state.step >= last_step:
        log_on_rank_0("Nothing is left to train: raise --epochs, or set another --checkpoint-dir")
    saver.write_status(state.step, "running")

    set_train_or_eval = functools.partial(
        set_mode, optimizer=optimizer, model=model, frozen=frozen_parts(model)
    )
    set_train_or_eval("train")
    exchange.restart(state.step)
    try:
        while True:
            task.step = state.step
            # After the save, so that a run that is stopped during an evaluation repeats it later.
            if state.is_due and not reason:
                set_train_or_eval("eval")
                results, reason = evaluate(task, cfg, world, model, held_out, requests)
                if not reason:
                    reason = on_rank_0(judge_evaluation, task, cfg, state, results, metrics, saver)
                set_train_or_eval("train")
                exchange.restart(state.step)
            elif stream.ends_epoch(state.step) and not reason:
                on_rank_0(metrics.record_evaluation, state, {})
            if reason or state.step >= last_step:
                break
            factor = task.lr_factor(cfg, state.step, total_steps)
            if factor is None:
                raise UserError("Task.lr_factor() must return a number, not None")
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * float(factor)
            arguments = (loss_of, optimizer, scaler, batches, sums, state.step, exchange)
            train_step(cfg, world, stream, *arguments)
            state.step += 1
            if state.step == saver.start_step + 1:  # the optimizer has more to save now
                on_rank_0(saver.try_to_save, state, model, optimizer, scaler)
            state.is_due = stream.is_evaluated(state.step)
            every = cfg.checkpoint_every_steps
            saves = state.is_due or state.step == last_step or (every and state.step % every == 0)
            if saves or stream.ends_epoch(state.step) or exchange.is_due(state.step):
                asked = requests.poll() + saver.poll()
                totals, reason, agreed = exchange.all_reduce(state.step, sums, asked)
                seconds_left = (last_step - state.step) * exchange.seconds_per_step
                metrics.record_intervals(state, totals, exchange, seconds_left)
                if saves or reason or "SAVE" in agreed:
                    check_replicas(model)
                    set_train_or_eval("eval")
                    saver.save(state, model, optimizer, scaler, seconds_left)
                    set_train_or_eval("train")
                collect_garbage()
                exchange.restart(state.step)
        set_train_or_eval("eval")
        if saver.saved_step < state.step:  # that save has failed: try again, else fail
            saver.save(state, model, optimizer, scaler)
        is_over = last_step == total_steps or reason  # not by --stop-at-step
        if test_set is not None and is_over and reason not in STOP_REASONS:
            arguments = (model, test_set, requests, state, metrics, saver)
            reason = evaluate_best(task, cfg, world, *arguments) or reason
    except Exception as error:
        with suppress(UserError):  # a full disk must not hide the error
            saver.write_status(state.step, "failed", str(error))
        raise
    ending = "finished"
    StopRequests.has_stopped = reason in STOP_REASONS
    if reason in STOP_REASONS or (not reason and state.step < total_steps):  # --stop-at-step
        ending = "stopped"
    why = f" ({reason})" if reason else ""
    where = f"step {state.step} of {total_steps}{why}, saved in {run_directory(cfg)}"
    log_on_rank_0(f"{ending.title()} at {where}")
    saver.write_status(state.step, ending, reason, seconds_left)


def train_step(cfg, world, stream, loss_of, optimizer, scaler, batches, sums, step, exchange):
    """One optimizer step: forward and backward for this rank's micro-batches, then the update.

    The gradient is the mean over all samples (or items) of the step. Collective.
    """
    counts = []  # of items, if their number varies

    def forward(micro):
        """The loss of one micro-batch: its mean, or, with a count, the sum over its items."""
        began = time.monotonic()
        batch = next(batches)
        exchange.seconds_waited += time.monotonic() - began
        seed_generators(derive_seed(cfg.seed, "dropout", step, micro), world.device)
        loss, values, _ = loss_of(batch)
        sums.add(step // cfg.log_every_steps, loss, values, batch, cfg.batch_size)
        if "count" not in values:
            return loss
        counts.append(values["count"].to(loss.device, torch.float32))
        return loss * counts[-1]

    if cfg.reproducible:
        exact_gradients(stream, optimizer, scaler, forward, counts)
    else:
        averaged_gradients(world, stream, loss_of, scaler, forward)
    if counts:
        divide_by_items(optimizer, counts, stream.micro_batches_per_step)
    is_recorded = stream.is_recorded(step + 1)
    if cfg.clip_grad_norm or is_recorded:
        scaler.unscale_(optimizer)
        parameters = parameters_of(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, cfg.clip_grad_norm or math.inf)
    if is_recorded:
        exchange.recorded[step + 1] = (optimizer.param_groups[0]["lr"], norm)
    seed_generators(derive_seed(cfg.seed, "optimizer", step), world.device)  # if it draws
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def averaged_gradients(world, stream, loss_of, scaler, forward):
    """Gradients by DDP, which averages over the ranks in the last micro-batch. Collective.

    Those of the sum of all losses of all ranks, divided by the micro-batches of the step.
    """
    weight = world.world_size / stream.micro_batches_per_step
    for micro in stream.micro_batches:
        is_last = micro == stream.micro_batches[-1]
        with nullcontext() if world.world_size == 1 or is_last else loss_of.no_sync():
            loss = forward(micro)
            if weight != 1:
                loss = loss * weight
            scaler.scale(loss).backward()


def divide_by_items(optimizer, counts, micro_batches):
    """Turn gradients of sums over items into gradients of their mean. Collective."""
    items = torch.stack(counts).sum()
    if dist.is_initialized():
        dist.all_reduce(items)
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    torch._foreach_mul_(gradients, micro_batches / or_one(items))


def or_one(items):
    """A number of items to divide by; without items, the dividend is 0."""
    return items.masked_fill(items == 0, 1)


ROUNDING = 1.5 * 2**12  # the last bit of a float64 from 2**12 to 2**13 is 2**-40


def exact_gradients(stream, optimizer, scaler, forward, counts):
    """--reproducible: gradients that add up to the same bits on any number of ranks. Collective.

    Those of each micro-batch are rounded to multiples of 2**-40. Sums below 2**13 are then exact,
    in any order; larger ones become NaN.
    """
    scale = scaler.get_scale()  # of fp16, else 1
    totals = {}
    for p in parameters_of(optimizer):
        totals[p] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float64))
    used = dict.fromkeys(totals, False)
    for micro in stream.micro_batches:
        loss = forward(micro) / stream.micro_batches_per_step
        if len(counts) == 1:  # sums over items are divided by this number before they are rounded
            divisor = or_one(counts[0].double())
            if dist.is_initialized():
                dist.broadcast(divisor, 0)
            scale = scale * divisor
        scaler.scale(loss).backward()
        for p, total in totals.items():
            if p.grad is not None:
                gradient = p.grad.to(total.dtype) / scale
                total.add_(gradient + ROUNDING - ROUNDING)
                p.grad = None
                used[p] = True
    if dist.is_initialized():
        flags = torch.tensor([*used.values()], dtype=torch.int32, device=total.device)
        dist.all_reduce(flags)
        used = dict(zip(used, flags.tolist()))  # on any rank; waits for the GPU
    for p, total in totals.items():
        if not used[p]:  # momentum must not move it, either
            continue
        if dist.is_initialized():
            dist.all_reduce(total)
        total.masked_fill_(total.abs() >= 2.0**13, math.nan)
        p.grad = (total * scale).to(p.dtype)


def parameters_of(optimizer):
    """All: a loss may freeze and thaw some of them in turn."""
    return [p for group in optimizer.param_groups for p in group["params"]]


NO_BATCH = object()  # what settle_buckets() uses


class LossOf(nn.Module):
    """Task.loss() as a module for DDP: loss() gets the plain model on any number of ranks.

    If DDP wrapped the model, model.encoder(x) in loss() would work on one rank only. Returns the
    loss, the sums and the rows of Task.loss(); only the loss has a graph.
    """

    def __init__(self, task, cfg, world, model):
        super().__init__()
        self.task = task
        self.model = model
        dtype = torch.float16 if cfg.amp == "fp16" else torch.bfloat16
        enabled = cfg.amp != "off"
        self.autocast = functools.partial(torch.autocast, world.device.type, dtype, enabled)

    def forward(self, batch):
        if batch is NO_BATCH:
            return sum(p.sum().abs() * 0 for p in self.parameters() if p.requires_grad)
        with self.autocast():
            result = self.task.loss(self.model, batch)
        parts = result if isinstance(result, tuple) else (result,)
        is_pair = len(parts) in (2, 3) and isinstance(parts[1], dict)
        if not is_pair or not isinstance(parts[0], torch.Tensor) or parts[0].dim():
            raise UserError(
                "Task.loss() must return the mean loss, a tensor without dimensions, and a dict of "
                f"sums, which may be empty, not ({', '.join(map(name_of, parts))})"
            )
        loss, sums, *more = parts
        rows = more[0] if more and more[0] is not None else {}
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError("Task.loss(): the loss has no gradient, as after detach() or no_grad()")
        try:
            # Copies: a task may go on to add to its own.
            sums = {name: torch.as_tensor(value).detach().clone() for name, value in sums.items()}
            rows = {name: row.detach() for name, row in rows.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            text = "sums must be numbers or tensors, and rows a dict of tensors"
            raise UserError(f"Task.loss(): {text} ({error})") from None
        twice = sums.keys() & {"loss", *rows} or rows.keys() & {"loss", "count"}
        if twice or sums.get("count", loss).dim():
            text = (
                '"loss", "count", sums and rows need names of their own, and "count" is one number'
            )
            raise UserError(f"Task.loss(): {text}; sums: {', '.join(map(str, sums))}")
        return loss, sums, rows


def name_of(value):
    """Its type, and the shape of a tensor, for messages."""
    name = type(value).__name__
    if isinstance(value, (tuple, list)):
        name += f" of {len(value)}"
    return f"{name} {list(value.shape)}" if isinstance(value, torch.Tensor) else name


@torch.no_grad()
def evaluate(task, cfg, world, model, data_set, requests=None):
    """(sums of Task.loss() over the data set, each sample once; "" or why to stop). Collective.

    On rank 0, the sums also have the rows. They are empty without a data set. Leaves the model in
    evaluation mode. The checkpoint has been saved before.
    """
    totals = Counter()
    if data_set is None:
        return totals, ""
    share_buffers(model)
    model.eval()
    loss_of = LossOf(task, cfg, world, model)
    micro_batches = torch.arange(len(data_set)).split(cfg.batch_size)
    rounds = math.ceil(len(micro_batches) / world.world_size)
    numbers = range(world.rank, rounds * world.world_size, world.world_size)
    mine = [micro_batches[number % len(micro_batches)] for number in numbers]
    sums = Sums()
    rows = {}  # by number of the micro-batch
    exchange = Exchange(world)

    def keys(device):
        return (indices.to(device) for indices in mine)

    batches = batches_of(task, cfg, world, data_set, keys, len(mine))
    for done, (number, indices, batch) in enumerate(zip(numbers, mine, batches), 1):
        seed_generators(derive_seed(cfg.seed, "test", number), world.device)
        # A short micro-batch would make the compiler give up the fixed size of the others.
        stance = "default" if len(indices) == cfg.batch_size else "force_eager"
        with torch.compiler.set_stance(stance):
            loss, values, rows_of_batch = loss_of(batch)
        if number < len(micro_batches):
            sums.add(0, loss, values, batch, len(indices))
            rows[number] = {name: row.cpu() for name, row in rows_of_batch.items()}
        else:  # a second time, in the last round: it does not count
            nothing = {name: torch.zeros_like(value) for name, value in values.items()}
            sums.add(0, torch.zeros_like(loss), nothing, batch, 0)
        if done == rounds or exchange.is_due(done):
            asked = requests.poll() if requests else []
            by_interval, reason, _ = exchange.all_reduce(done, sums, asked)
            totals.update(by_interval[0])  # a Counter adds
            exchange.restart(done)
            if reason and done < rounds:
                return totals, reason
    if not math.isfinite(totals["loss"]):
        warn_once("the loss of an evaluation is not finite: is each sample of its data set?")
    return {**totals, **gather_rows(rows)}, ""


@torch.no_grad()
def share_buffers(model):
    """Give all ranks the buffers of rank 0, such as BatchNorm's: it is the one that saves them.

    Not those that have grown to another size on some rank. Collective.
    """
    if not dist.is_initialized():
        return
    own = {(name, tuple(buffer.shape)): buffer for name, buffer in model.named_buffers()}
    for key in sorted(set(own).intersection(*gather(list(own)))):
        values = own[key].contiguous()  # gloo would send the memory of a view as it lies
        dist.broadcast(values, 0)
        own[key].copy_(values)


def gather_rows(rows):
    """{name: [samples, ...]} in the order of the data set, from {micro-batch: {name: [b, ...]}} of
    each rank. Collective.
    """
    everywhere = {}
    for rows_of_rank in gather(rows):
        everywhere |= rows_of_rank
    parts = [everywhere[number] for number in sorted(everywhere)]
    try:
        return {name: torch.cat([part[name] for part in parts]) for name in set().union(*parts)}
    except (KeyError, RuntimeError) as error:
        text = "Task.loss() must return the same rows [b, ...] in each micro-batch of an evaluation"
        raise UserError(f"{text} ({error})") from None


def judge_evaluation(task, cfg, state, sums, metrics, saver):
    """Record an evaluation; keep its checkpoint as best.pt if Task.best was never better.

    For rank 0. Returns "", or why to end the training.
    """
    values = metrics.record_evaluation(state, sums)
    if not values:
        return ""
    if task.best in values:
        score = values[task.best]
        if task.best_is_lowest or task.best.endswith("loss"):
            score = -score
        state.evaluations_since_best += 1
        if math.isnan(score):
            warn_once(f"{task.best} is NaN, which is never the best")
        if score > state.best_score:
            state.evaluations_since_best = 0
            try:
                saver.save_best()
                state.best_score = score
            except OSError as error:  # the save before the evaluation has failed
                warn(f"cannot keep the best checkpoint: {error}")
    else:
        log(f"  best.pt and --patience need {task.best} (Task.best) in Task.report()")
    if task.after_evaluation(values):
        return "Task.after_evaluation()"
    if cfg.patience and state.evaluations_since_best >= cfg.patience:
        return f"no better {task.best} in {cfg.patience} evaluations"
    return ""


def evaluate_best(task, cfg, world, model, test_set, requests, state, metrics, saver):
    """At the end, evaluate the test set with best.pt. Returns "" or why to stop. Collective."""
    best = saver.directory / "best.pt"
    has_best = on_rank_0(best.exists)
    if has_best:
        load_weights(model, load_checkpoint(best)["model"])
    sums, reason = evaluate(task, cfg, world, model, test_set, requests)
    if not reason:
        on_rank_0(metrics.record_test, state.step, sums, "best.pt" if has_best else "the last step")
    return reason


def evaluate_checkpoint(task, cfg, world):
    """--evaluate: print the metrics of a checkpoint on the test set; writes no file. Collective."""
    *_, held_out, test_set = open_data(task, cfg)
    spec = task.spec
    model = load_model(cfg.evaluate, task, str(world.device))
    task.cfg = cfg
    if held_out is None or not is_same(task.spec, spec):
        raise UserError(f"--evaluate {cfg.evaluate}: no test set, or not with {task.spec}")
    data_set = held_out if test_set is None else test_set
    sums, _ = evaluate(task, cfg, world, model, data_set)
    if is_rank_0():
        log(f"{cfg.evaluate}: {describe(report(task, sums))}")


def build_model(task, cfg, world):
    """The model, with the same weights on every rank."""
    HangTimer.idle = 0
    seed_generators(cfg.seed, world.device)
    model = new_model(task, cfg).to(world.device)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("Task.model(): no parameter of the model is to be trained")
    if cfg.activation_checkpointing:
        blocks = task.blocks(model)
        if not blocks:
            raise UserError("--activation-checkpointing: Task.blocks() returns no blocks")
        for block in blocks:
            # Its backward pass gets only its inputs, and computes the rest again.
            forward = functools.partial(recompute_in_backward, block.forward, use_reentrant=False)
            block.forward = forward
    if cfg.compile:
        model.compile()  # in place: the names in checkpoints stay the same
    return model


def new_model(task, cfg):
    """Task.model()."""
    model = task.model(cfg)
    if not isinstance(model, nn.Module):
        raise UserError(f"Task.model() must return a torch.nn.Module, not {name_of(model)}")
    if any(map(torch.nn.parameter.is_lazy, model.parameters())):
        raise UserError("Task.model() must call a model with lazy modules once, on an input")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride():  # expanded from one number: nothing can be copied to it
                module._buffers[name] = buffer.contiguous()
    return model


def build_optimizer(task, cfg, model):
    optimizer = task.optimizer(cfg, model)
    if not hasattr(optimizer, "param_groups"):
        raise UserError(f"Task.optimizer() must return an optimizer, not {name_of(optimizer)}")
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise UserError(
            "Task.optimizer() has made a scheduler of torch, which the trainer would override: "
            "return its factors from Task.lr_factor()"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{name_of(optimizer)} computes the loss several times per step: copy "
            "train_minimal.py, and change its loop"
        )
    check_arguments(task.lr_factor, "cfg", "step", "total_steps")
    known = set(parameters_of(optimizer))
    if known - set(model.parameters()):
        raise UserError(
            "Task.optimizer() has parameters that are not in the model, and so in no checkpoint: "
            "make them a part of what Task.model() returns"
        )
    others = [name for name, p in model.named_parameters() if p.requires_grad and p not in known]
    if others:
        warn_once(
            f"not in the optimizer, and not frozen: {len(others)} parameters ({others[0]} ...)"
        )
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])  # a number of NumPy could not be loaded
        group["initial_lr"] = group["lr"]
    return optimizer


def frozen_parts(model):
    """Those whose statistics of BatchNorm must not change.

    Found once: a loss that freezes and thaws parts in turn, as a GAN's, may do so at any time.
    """
    frozen = []
    for part in model.modules():
        if {p.requires_grad for p in part.parameters()} == {False}:  # and not without any
            frozen.append(part)
    return frozen


def set_mode(mode, optimizer, model, frozen):
    """mode: train, for steps; eval, for evaluations and saves."""
    model.train(mode == "train")
    for part in frozen:
        part.eval()
    if hasattr(optimizer, mode):  # a schedule-free one has two sets of weights
        getattr(optimizer, mode)()


def collect_garbage():
    """On all ranks after the same step: a rank that collects on its own makes the others wait."""
    gc.collect()
    if gc.isenabled():  # the first time
        gc.disable()
        gc.freeze()  # what exists now is not looked at again


# --------------------------------------------------------------------------------------- DATA
def open_data(task, cfg):
    """[training set, set to evaluate or None, test set for the end or None]. Collective.

    Calls Task.data(), on rank 0 first, because it may download.
    """
    HangTimer.idle = 0
    data_sets = []

    def open_all():
        seed_generators(cfg.seed)  # for data sets that are divided at random
        given = task.data(cfg)
        is_valid = isinstance(given, (tuple, list)) and len(given) in (2, 3)
        if not is_valid or given[0] is None:
            raise UserError(
                "Task.data() must return (training set, test set or None), or (training, "
                f"validation, test set), not {name_of(given)}"
            )
        data_sets.extend(given)

    on_rank_0(open_all)
    if not is_rank_0():
        open_all()
    given = [data_set for data_set in data_sets if data_set is not None]
    for data_set in given:
        is_loader = isinstance(data_set, (DataLoader, IterableDataset))
        if is_loader or not hasattr(data_set, "__len__"):
            raise UserError(
                f"{name_of(data_set)} has no index: use a data set with __getitem__(); options of "
                "its DataLoader come from Task.loader_options()"
            )
        if len(data_set) == 0:
            raise UserError("a data set has no samples: is --data-dir right?")
    seen = gather([[len(data_set) for data_set in given], as_text(task.spec)])
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise UserError(
                f"rank {rank} sees {other[0]} samples (training, test), rank 0 {seen[0][0]}, or "
                "another Task.spec: the ranks need the same --data-dir"
            )
    HangTimer.idle = 0
    return [*data_sets, None][:3]


class InMemoryDataset(TensorDataset):
    """Tensors or arrays of the same first dimension, copied to the device of each rank."""

    def __init__(self, *arrays):
        super().__init__(*map(torch.as_tensor, arrays))


class SeededDataset(Subset):
    """Seeds torch, numpy and random for each micro-batch, so that its augmentation does not depend
    on the loader worker that reads it, nor on what it has read before.

    A data set with a generator or a curriculum of its own has a method seed_sample(seed, epoch),
    also inside of a Subset or a ConcatDataset.
    """

    def __init__(self, dataset, seed):
        super().__init__(dataset, range(len(dataset)))
        self.seed = seed
        self.seeded = []
        parts = [dataset]
        for part in parts:  # which grows
            if isinstance(part, ConcatDataset):
                parts += part.datasets
            if isinstance(part, Subset):
                parts.append(part.dataset)
            if hasattr(part, "seed_sample"):
                check_arguments(part.seed_sample, "seed", "epoch")
                self.seeded.append(part)

    def __getitems__(self, keys):
        """The samples of a micro-batch, for keys of SampleStream; the DataLoader calls it."""
        epoch = keys[0] // len(self.dataset)
        seed = derive_seed(self.seed, "augmentation", keys[0])
        seed_generators(seed)
        for part in self.seeded:
            part.seed_sample(seed, epoch)
        return super().__getitems__([key % len(self.dataset) for key in keys])


def check_arguments(method, *names):
    """UserError if a method that a task defines does not take these arguments."""
    try:
        inspect.signature(method).bind(*names)
    except TypeError:
        arguments = ", ".join(names)
        raise UserError(f"{method.__qualname__}() must take the arguments ({arguments})") from None


def derive_seed(*parts):
    """A 63-bit seed from numbers and words; neighboring numbers give unrelated seeds."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, device: torch.device | None = None):
    """Seed random, numpy and torch, also on the device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would seed every backend
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class SampleStream:
    """Which samples each step uses. A function of the step alone: there is no state to save.

    The training set is used again and again, each time in the order of Task.order(). Step s uses
    the samples s * G to (s + 1) * G - 1 of this endless stream, where G is the global batch: all
    steps are equally large, and one may begin in one epoch and end in the next. It has C = G / b
    micro-batches. Rank r of W computes those from C * r // W to C * (r + 1) // W - 1: of 4
    micro-batches, 3 ranks compute 1, 1 and 2. It replaces DistributedSampler.
    """

    def __init__(self, task, cfg, world, train_set):
        self.task = task
        self.cfg = cfg
        self.train_set = train_set
        self.samples = samples = len(train_set)
        self.micro_batches_per_step, rest = divmod(cfg.global_batch_size, cfg.batch_size)
        ranks, count = world.world_size, self.micro_batches_per_step
        if cfg.batch_size > samples:
            raise UserError(f"--batch-size {cfg.batch_size} is more than the {samples} samples")
        if rest or count < ranks or cfg.global_batch_size > samples:
            raise UserError(
                f"a global batch of {cfg.global_batch_size} samples does not fit: it must be a "
                f"multiple of --batch-size {cfg.batch_size}, from {cfg.batch_size * ranks} (for "
                f"{ranks} ranks) to {samples // cfg.batch_size * cfg.batch_size} (of {samples} "
                "samples). A smaller --batch-size allows more; a resumed run keeps its global batch"
            )
        self.micro_batches = range(count * world.rank // ranks, count * (world.rank + 1) // ranks)
        if cfg.total_steps:
            cfg.epochs = cfg.total_steps * cfg.global_batch_size / samples
        steps = math.ceil(cfg.epochs * samples / cfg.global_batch_size)
        self.total_steps = task.total_steps = cfg.total_steps or steps
        log_on_rank_0(
            f"Global batch {cfg.global_batch_size} = {count} x {cfg.batch_size}; "
            f"{samples / cfg.global_batch_size:.4g} steps per epoch"
        )

    def epochs_done(self, step):
        """The complete passes over the training set after this many steps."""
        return step * self.cfg.global_batch_size // self.samples

    def ends_epoch(self, step):
        """Whether an epoch is complete after this number of steps, and was not one step before."""
        beyond = step * self.cfg.global_batch_size % self.samples
        return step > 0 and beyond < self.cfg.global_batch_size

    def is_recorded(self, step):
        """Whether a record of the training ends after this number of steps, at least one."""
        return self.ends_epoch(step) or step % self.cfg.log_every_steps == 0

    def is_evaluated(self, step):
        every = self.cfg.eval_every_steps
        if self.ends_epoch(step) and self.epochs_done(step) % self.cfg.eval_every_epochs == 0:
            return True
        return step == self.total_steps or bool(every and step > 0 and step % every == 0)

    def order(self, epoch):
        """The keys of this epoch's samples in their order; a key is epoch * samples + index."""
        seed = derive_seed(self.cfg.seed, "order", epoch)
        generator = torch.Generator().manual_seed(seed)
        seed_generators(seed)  # for an order that does not use the generator
        order = self.task.order(self.cfg, self.train_set, epoch, generator)
        if not isinstance(order, torch.Tensor):
            order = torch.tensor(list(order))
        is_mask = order.is_floating_point() or order.dtype == torch.bool
        if (
            is_mask
            or order.shape != (self.samples,)
            or order.min() < 0
            or order.max() >= self.samples
        ):
            raise UserError(
                f"Task.order() must return {self.samples} indices from 0 to {self.samples - 1}"
            )
        return order.long() + epoch * self.samples

    def keys(self, step, device):
        """The keys int64 [b] of this rank's micro-batches, from this step on, without an end."""
        epoch = None
        while True:
            now, place = divmod(step * self.cfg.global_batch_size, self.samples)
            if now != epoch:
                epoch = now
                two_epochs = torch.cat([self.order(epoch), self.order(epoch + 1)]).to(device)
            for micro in self.micro_batches:
                begin = place + micro * self.cfg.batch_size
                yield two_epochs[begin : begin + self.cfg.batch_size]
            step += 1


def batches_of(task, cfg, world, dataset, keys, count=math.inf):
    """Micro-batches on the device of this rank; keys(device) yields the keys int64 [b] of each.

    count: how many there are, if they are few; no more loader workers are started.
    """
    if type(dataset) is InMemoryDataset:  # a subclass may change the samples
        tensors = [tensor.to(world.device) for tensor in dataset.tensors]
        for micro_batch in keys(world.device):
            rows = micro_batch % len(dataset)
            yield [tensor[rows] for tensor in tensors]
        return
    lists = (micro_batch.tolist() for micro_batch in keys("cpu"))
    loader = get_dataloader(task, cfg, world, dataset, lists, count)
    if world.device.type != "cuda":
        for batch in loader:
            yield move(batch, world.device)
        return
    side = side_stream()
    current = torch.cuda.current_stream()
    used = deque(maxlen=8)  # events after the last steps
    for batch in loader:
        if len(used) == used.maxlen:
            used[0].synchronize()  # no more copies wait in the memory of the GPU
        with torch.cuda.stream(side):  # copy it while the previous step runs
            batch = move(batch, world.device, current)
        current.wait_stream(side)
        used.append(current.record_event())
        yield batch


@functools.cache
def side_stream():
    """One in the process: what was freed on a stream stays reserved for it."""
    return torch.cuda.Stream()


def move(batch, device, current=None):
    """A batch with its tensors on the device, also those in mappings and objects with to()."""

    def move_part(part):
        if isinstance(part, torch.Tensor):
            copied = part.to(device, non_blocking=True)
            if current:
                copied.record_stream(current)  # until the step is done, the memory is not reused
            return copied
        if isinstance(part, Mapping):
            moved = copy.copy(part)
            for name, value in part.items():
                moved[name] = move(value, device, current)
            return moved
        if hasattr(part, "to"):
            with torch.cuda.stream(current):  # nobody could record its tensors
                return part.to(device)
        return part

    def is_leaf(part):
        return isinstance(part, Mapping) or hasattr(part, "to")

    return tree_map(move_part, batch, is_leaf=is_leaf)


def get_dataloader(task, cfg, world, dataset, batch_sampler, count=math.inf) -> DataLoader:
    """Yields one micro-batch at a time, as the data set's samples, each stacked to [b, ...]."""
    workers = cores_of_rank() if cfg.num_workers is None else cfg.num_workers
    options = {
        "num_workers": min(workers, count),
        "collate_fn": stack_samples,
        "pin_memory": world.device.type != "cpu",
    }
    if sys.platform == "linux":  # a signal would end Python 3.14's forkserver
        options["multiprocessing_context"] = "fork"
    given = task.loader_options() or {}
    refused = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"}
    refused &= given.keys()
    if refused:
        raise UserError(
            f"Task.loader_options() has {', '.join(sorted(refused))}: which samples a step uses is "
            "decided by --batch-size and Task.order()"
        )
    options |= given
    options["worker_init_fn"] = functools.partial(start_worker, given.get("worker_init_fn"))
    if not options["num_workers"]:
        for name in ("multiprocessing_context", "prefetch_factor", "persistent_workers", "timeout"):
            options.pop(name, None)
    elif len(tempfile.gettempdir()) > 70:
        raise UserError("TMPDIR is too long for the sockets of loader workers: set a shorter one")
    seeded = SeededDataset(dataset, cfg.seed)
    try:
        return DataLoader(seeded, batch_sampler=batch_sampler, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"Task.loader_options(): {error}") from None


def stack_samples(samples):
    """The DataLoader's own collate_fn, with a remedy where it fails."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        remedy = "set a collate_fn in Task.loader_options()"
        raise UserError(f"samples cannot be stacked: {remedy} ({error})") from None


def cores_of_rank():
    """The cores of this rank: those it is bound to, at most its share of the machine, and 16."""
    cores = (os.cpu_count() or 1) // launch_variable("LOCAL_WORLD_SIZE", 1)
    if hasattr(os, "sched_getaffinity"):  # Linux; scripts/guard.py and Slurm bind a rank
        cores = min(cores, len(os.sched_getaffinity(0)))
    return min(16, max(1, cores))


def start_worker(worker_init_fn, worker):
    """Schedulers signal all processes of a job, but a rank needs its workers until it stops."""
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        # One that reads without an end would outlive its rank.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>
    if worker_init_fn:
        worker_init_fn(worker)


# =========================================================== Nothing below depends on the task.
# ------------------------------------------------------------------------------------- RANKS
class World(NamedTuple):
    """The rank of this process and its device. The defaults describe a single process."""

    rank: int = 0  # 0 .. world_size - 1
    world_size: int = 1
    device: torch.device = torch.device("cpu")


def setup_distributed(cfg) -> World:
    """Join all ranks into one process group. Collective."""
    use_slurm_variables(os.environ)
    world_size = launch_variable("WORLD_SIZE", 1)
    per_node = launch_variable("LOCAL_WORLD_SIZE", 1)
    nodes = world_size // per_node
    if (cfg.nodes or nodes) != nodes or (cfg.gpus_per_node or per_node) != per_node:
        raise UserError(
            f"--nodes or --gpus-per-node: this launch has {nodes} x {per_node} ranks: the launcher "
            "sets their number (torchrun: --nproc-per-node)"
        )
    device = torch.device("cpu")
    gpus = torch.accelerator.device_count()
    if gpus:  # with one GPU per Slurm task, each rank sees one GPU, number 0
        index = launch_variable("LOCAL_RANK", 0) % gpus
        torch.accelerator.set_device_index(index)  # else, each rank would also use GPU 0
        device = torch.device(index)  # cuda (NVIDIA, AMD), xpu (Intel) or mps
    backend = cfg.distributed_backend or dist.get_default_backend_for_device(device)
    if backend == "nccl" and device.type == "cpu":
        raise UserError("--distributed-backend nccl needs GPUs, and PyTorch finds none: use gloo")
    if device.type == "cpu" and (cfg.gpus_per_node or os.environ.get("SLURM_GPUS_ON_NODE")):
        log_on_rank_0("WARNING: PyTorch finds no GPU here, and trains on the CPU")
    launch = f"{world_size} x {device.type} ({per_node} per node)"
    log_on_rank_0(f"Starting distributed training on {launch}")
    log_on_rank_0(f"Master node: {socket.gethostname()}; PyTorch {torch.__version__}, {backend}")
    if world_size > 1:
        missing = {"RANK", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()
        if missing:
            raise UserError(
                f"WORLD_SIZE is {world_size}, but {', '.join(sorted(missing))} is not set: start "
                "the ranks with torchrun or scripts/guard.py, or unset WORLD_SIZE for one process"
            )
        bound_device = None if backend == "gloo" else device
        # HangTimer ends a rank that waits, and scripts/guard.py before it. PyTorch's own timeout
        # would also count the time in which a job is suspended.
        os.environ.setdefault("HANG_TIMEOUT", str(0.9 * cfg.hang_timeout))
        dist.init_process_group(backend, timeout=timedelta(days=1), device_id=bound_device)
    return World(launch_variable("RANK", 0), world_size, device)


def use_slurm_variables(env):
    """In a step of several tasks that srun has started, its variables win over stale ones.

    They are written under torchrun's names, which other programs read.
    """
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "TORCHELASTIC_RUN_ID" in env:
        return
    env["RANK"] = env["SLURM_PROCID"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["WORLD_SIZE"] = tasks
    env["LOCAL_WORLD_SIZE"] = re.split("[(,]", env["SLURM_STEP_TASKS_PER_NODE"])[0]  # 4(x2)


def launch_variable(name, default):
    """The number in a variable of the environment, of the type of its default."""
    text = os.environ.get(name) or default
    try:
        return type(default)(text)
    except ValueError:
        raise UserError(f"the variable {name} is {text!r}, not a number: unset it") from None


def is_rank_0():
    """Under a bare srun, only after setup_distributed()."""
    return launch_variable("RANK", 0) == 0


def configure_torch(cfg):
    """Settings of PyTorch. Before the first use of a GPU, which reads some of them."""
    deterministic = cfg.deterministic or cfg.reproducible
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    torch.use_deterministic_algorithms(deterministic)
    # All steps have the same shapes: let cuDNN time its kernels once and keep the fastest.
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.allow_tf32 = cfg.tf32
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high" if cfg.tf32 else "highest")
    if cfg.reproducible:
        torch.set_num_threads(1)  # on a CPU: with more, some kernels sum in another order


def settle_buckets(ddp):
    """A first backward pass, after which DDP regroups the gradients for good. Collective.

    In a resumed run, that would happen at another step than in a run that was never stopped, and
    change the rounding. It skips the forward pass of the model, which may keep what it computes
    in its first one, and uses no data: only zeros of the parameters.
    """
    # These note which parameters are used, or expect gradients that are sparse.
    if ddp.static_graph or any(getattr(part, "sparse", False) for part in ddp.modules()):
        return
    ddp(NO_BATCH).backward()
    ddp.zero_grad()


def on_rank_0(function, *arguments):
    """Call a function on rank 0; return its result on all ranks. Collective.

    If it raises an error, rank 0 raises that, and the other ranks exit with code 2.
    """
    outcome = [None, True]  # result, whether it has failed
    try:
        if is_rank_0():
            outcome = [function(*arguments), False]
    finally:  # also after an error
        result, has_failed = gather(outcome)[0]
    if has_failed:
        time.sleep(2)  # let rank 0 print it first: launchers kill the rest
        raise SystemExit(2)
    return result


def gather(value):
    """[that of rank 0, that of rank 1, ...]. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_replicas(model):
    """UserError, before anything is saved, if a rank has different weights. Collective."""
    digests = gather(digests_of(model.parameters()).sum().item())
    half = len(digests) / 2  # if no more ranks than that agree, any of them may be wrong
    odd = [rank for rank, digest in enumerate(digests) if digests.count(digest) <= half]
    if odd:
        raise UserError(
            f"different weights on the ranks {odd}: a memory error, different hardware, or code "
            "that changes them on some ranks only; the same command resumes from the last "
            "checkpoint",
            "weights differ",
        )


def digests_of(tensors):
    """int64 [n]: for each tensor, the sum of its bits as integers that wrap around.

    A flipped bit changes it; the order of the sum does not. Does not wait for the GPU.
    """
    sums = []
    for tensor in tensors:
        values = tensor.detach().flatten()
        if values.element_size() < 4:
            values = values.float()  # exact
        # On a CPU, PyTorch adds int32 as int64 20 times as slowly.
        sums.append(values.view(torch.int32).sum(dtype=torch.int32))
    return torch.stack(sums).long()


# ------------------------------------------------------------------------------------ METRICS
class Sums:
    """What Task.loss() has returned since the last exchange, by interval. Never waits for a GPU."""

    def __init__(self):
        self.columns = defaultdict(list)  # by (interval, name)
        self.shapes = None  # {name: shape}, the same in each micro-batch and on all ranks

    def add(self, interval, loss, values, batch, samples):
        """samples: of the batch; how many the loss is the mean of, if values have no "count".

        Collective the first time, when the names are compared.
        """
        HangTimer.idle = 0
        loss = loss.detach()
        if "count" not in values:
            parts = batch if isinstance(batch, (tuple, list)) else [batch]
            if isinstance(batch, Mapping):
                parts = batch.values()
            tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.dim()]
            sizes = {tensor.shape[0] for tensor in tensors}
            if all(tensor.dim() > 1 for tensor in tensors):  # may be [t, b]
                sizes |= {tensor.shape[1] for tensor in tensors}
            if samples and sizes and samples not in {len(parts), *sizes}:
                raise UserError(
                    f"{samples} samples became a batch of {max(sizes)}: if a collate_fn drops "
                    'samples, return the number of the others as the sum "count" from Task.loss()'
                )
            values = {**values, "count": torch.tensor(samples)}
        values = {**values, "loss": loss}
        shapes = {}
        for name, value in values.items():
            shapes[name] = value.shape
            self.columns[interval, name].append(value)
        if self.shapes is None:
            self.shapes = shapes
            for others in gather(shapes):
                refuse_other_sums(others, shapes, "on all ranks")
        if shapes != self.shapes:
            refuse_other_sums(shapes, self.shapes, "in each micro-batch")

    def take(self):
        """{interval: {name: sum of what was added}}, float64, in the same order on all ranks.

        That of "loss" counts each mean loss as often as its items. Waits for the GPU.
        """
        totals = defaultdict(dict)
        for interval in sorted({interval for interval, _ in self.columns}):
            counts = self.column(interval, "count")
            for name in sorted(self.shapes, key=str):
                column = self.column(interval, name)
                if name == "loss":
                    column = column * counts
                totals[interval][name] = column.sum(0)
        self.columns.clear()
        return totals

    def column(self, interval, name):
        """float64 [micro-batches, ...]"""
        return torch.stack(self.columns[interval, name]).cpu().double()


def refuse_other_sums(shapes, expected, where):
    """UserError if Task.loss() has returned sums of other names or shapes."""
    others = sorted(map(str, dict(shapes.items() ^ expected.items())))
    if others:
        names = ", ".join(others[:3])
        raise UserError(f"Task.loss() must return the same sums {where}, also {names}")


class Exchange:
    """At some steps, the ranks add up their sums, and agree on whether to stop or to save.

    Makes the host wait for the GPU.
    """

    SECONDS = 1  # between two exchanges; or one step, if that takes longer

    def __init__(self, world):
        self.world = world
        self.steps_between = 1  # from one exchange to the next
        # By step, if it is recorded: learning rate, and norm of the gradient before clipping.
        self.recorded = {}
        self.restart(0)

    def restart(self, step):
        """Start the clock again, for example after a save."""
        HangTimer.idle = 0
        self.step = step
        self.time = time.monotonic()
        self.seconds_waited = 0.0  # for data

    def is_due(self, step):
        """The same on all ranks."""
        return step >= self.step + self.steps_between

    def all_reduce(self, step, sums, requests):
        """({interval: sums over all ranks}, why to stop or "", the requests of any rank).

        Collective.
        """
        totals = sums.take()
        header = [time.monotonic() - self.time, self.seconds_waited]
        header += [request in requests for request in REQUESTS]
        parts = [torch.tensor(header, dtype=torch.float64)]
        parts += [value.flatten() for values in totals.values() for value in values.values()]
        vector = torch.cat(parts)
        if self.world.world_size > 1:
            vector = vector.to(self.world.device)
            dist.all_reduce(vector)
            vector = vector.cpu()
        parts = iter(vector.split([part.numel() for part in parts]))
        elapsed, waited, *flags = next(parts).tolist()
        for values in totals.values():
            for name, value in values.items():
                values[name] = next(parts).reshape(value.shape)
        agreed = [request for request, flag in zip(REQUESTS, flags) if flag]
        reason = next((request for request in agreed if request in STOP_REASONS), "")
        steps = max(1, step - self.step)
        self.seconds_per_step = elapsed / steps / self.world.world_size
        self.data_wait = waited / elapsed  # the share of the time
        # The first steps are slow: approach the right number by doubling it.
        self.steps_between = max(1, min(2 * steps, int(self.SECONDS / self.seconds_per_step)))
        return totals, reason, agreed


class HangTimer:
    """Prints all stacks after --hang-timeout seconds without progress; one of several ranks exits.

    It counts its own seconds: a process that is suspended makes no progress, but does not hang.
    """

    idle = 0  # seconds of this process; whatever makes progress sets it to 0

    def __init__(self, cfg):
        HangTimer.idle = 0
        self.limit = cfg.hang_timeout
        self.is_over = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while not self.is_over.wait(1):
            HangTimer.idle += 1
            if HangTimer.idle == self.limit:
                warn(f"no progress in {self.limit} s (--hang-timeout); all stacks of this rank:")
                # 2: sys.stderr may be closed, or replaced by something that is no file.
                faulthandler.dump_traceback(file=2, all_threads=True)
                if launch_variable("WORLD_SIZE", 1) > 1:  # alone, nobody waits for it
                    os._exit(1)


class MetricsWriter:
    """Prints metrics and writes them to metrics.jsonl, TensorBoard and W&B, on rank 0.

    metrics.jsonl has a line of JSON for each record. After a crash it may have a step twice: the
    last record counts.
    """

    def __init__(self, task, cfg, saver, prefix):
        self.task = task
        self.cfg = cfg
        self.stream = saver.stream
        self.prefix = prefix  # of the metrics of evaluations
        self.path = saver.directory / "metrics.jsonl"
        self.has_reported = False
        self.board = None  # of TensorBoard
        self.wandb = None
        on_rank_0(self.open, saver)

    def open(self, saver):
        options = saver.options | {"config": None}
        text = f"# {saver.code}\n{yaml.safe_dump(options)}".encode()
        write_file(self.path.with_name("config.yaml"), lambda file: file.write(text))
        try:
            if self.cfg.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # it takes time

                self.board = SummaryWriter(self.path.with_name("tensorboard"))
            if self.cfg.wandb:
                import wandb

                self.wandb = wandb.init(
                    id=saver.run_id, resume="allow", dir=self.path.parent, config=options
                )
        except ImportError as error:
            raise UserError(f"--tensorboard and --wandb need pip install ({error})") from None

    def record_intervals(self, state, totals, exchange, seconds_left):
        """Add the totals of Exchange to the state. Record the intervals that are complete."""
        every = self.cfg.log_every_steps
        for interval, sums in totals.items():
            end = min(interval * every + every, state.step)
            if not math.isfinite(sums["loss"]):  # the same on all ranks
                raise UserError(
                    f"the loss is not finite in the steps {interval * every + 1} to {end}: lower "
                    "--lr, or set --clip-grad-norm",
                    "NaN",
                )
            state.epoch_sums.update(sums)  # a Counter adds
            state.interval_sums.update(sums)
            is_complete = self.stream.is_recorded(end)
            if not is_complete and self.has_reported:
                continue
            values = report(self.task, state.interval_sums)
            self.has_reported = True  # a mistake in it shows after one step
            if not is_complete:
                log_on_rank_0(f"  step {end}: {describe(values)}")
                continue
            state.interval_sums = Counter()
            rate = self.cfg.global_batch_size / exchange.seconds_per_step
            epoch = end * self.cfg.global_batch_size / self.stream.samples
            left = timedelta(seconds=round(seconds_left))
            line = f"  step {end}: {describe(values)}, {rate:.0f} samples/s, epoch {epoch:.2f}"
            ends = time.strftime("%H:%M", time.localtime(time.time() + seconds_left))
            log_on_rank_0(f"{line}, {left} left, ends about {ends}")
            lr, norm = exchange.recorded.pop(end)
            values |= {
                "lr": lr,
                "samples_per_second": rate,
                "data_wait": exchange.data_wait,  # share of the time
                "gradient_norm": float(norm),
                "seconds_left": seconds_left,
                "gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9,  # at its peak
            }
            self.record("train", end, values)

    def record_evaluation(self, state, sums):
        """Record an evaluation, and at its end the epoch. Returns the metrics of the evaluation.

        For rank 0. Both are empty without a data set.
        """
        values = {}
        # No sums: recorded by a run that saved only afterwards.
        ends_epoch = bool(state.epoch_sums) and self.stream.ends_epoch(state.step)
        if ends_epoch:
            values = report(self.task, state.epoch_sums)
        results = report(self.task, sums) if sums else {}
        values |= {f"{self.prefix}{name}": value for name, value in results.items()}
        if ends_epoch:
            epoch = self.stream.epochs_done(state.step)
            log(f"Epoch {epoch}: {describe(values)}")
            self.record("epoch", state.step, {"epoch": epoch, **values})
            state.epoch_sums = Counter()
        elif values:
            log(f"  step {state.step}: {describe(values)}")
            self.record("evaluation", state.step, values)
        return results

    def record_test(self, step, sums, weights):
        """The test set, at the end of a run with a validation set. For rank 0."""
        values = {f"test_{name}": value for name, value in report(self.task, sums).items()}
        log(f"Test set, with the weights of {weights}: {describe(values)}")
        self.record("test", step, values)

    def record(self, kind, step, values):
        if not is_rank_0():
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {"kind": kind, "step": step, "time": time.time(), **finite}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            warn(f"cannot write metrics: {error}")
        numbers = {f"{kind}/{name}": value for name, value in values.items()}
        if self.board:
            for name, number in numbers.items():
                self.board.add_scalar(name, number, step)
            self.board.flush()
        if self.wandb:
            self.wandb.log(numbers, step)


def report(task, sums):
    """Task.report(). Where a metric cannot be computed, such as F1 of no samples, it is NaN."""
    try:
        values = task.report(copy.deepcopy(dict(sums)))  # which it may change
    except (ArithmeticError, ValueError) as error:
        warn_once(f"Task.report() has failed, so {task.best} is NaN ({name_of(error)}: {error})")
        values = {task.best: math.nan, "loss": sums["loss"] / sums["count"]}
    if not isinstance(values, Mapping):
        raise UserError(f"Task.report() must return a dict of metrics, not {name_of(values)}")
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            text = f"Task.report(): {name} is {name_of(value)}, and a metric is one number"
            raise UserError(text) from None
    return numbers


def describe(values):
    return ", ".join(f"{name} {value:.5g}" for name, value in values.items())


def log(text, stream=None):
    """Print a line. If the output cannot be written, discard it and continue training."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except UnicodeError:  # the output takes ASCII only
        log(text.encode("ascii", "backslashreplace").decode(), stream)
    except OSError:  # a closed terminal, a `tee` killed by Ctrl-C, a full disk under the log
        with suppress(AttributeError, OSError):  # not a file of the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(text):
    log(f"WARNING: {text}", sys.stderr)


@functools.cache
def warn_once(text):
    """What every rank finds out, from rank 0."""
    if is_rank_0():
        warn(text)


def log_on_rank_0(text):
    if is_rank_0():
        log(text)


# ----------------------------------------------------------------------------------- STOPPING
STOP_NAMES = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"]
STOP_SIGNALS = [getattr(signal, name) for name in STOP_NAMES if hasattr(signal, name)]
STOP_REASONS = [*STOP_NAMES, "STOP file", "time limit"]
REQUESTS = [*STOP_REASONS, "SAVE"]


class StopRequests:
    """Reasons to stop: signals, files and the clock. A second Ctrl-C ends the process."""

    signal = ""  # the name of the first one that this process has received
    has_stopped = False  # for any of the reasons

    def __init__(self, cfg):
        StopRequests.signal = ""
        self.signal_time = 0.0
        stop_file = run_directory(cfg) / "STOP"
        self.files = [stop_file, Path(os.environ.get("STOP_FILE") or stop_file)]
        end = launch_variable("DEADLINE", launch_variable("SLURM_JOB_END_TIME", math.inf))
        time_left = end - time.time()
        if time_left < 0:  # of a Slurm job that has ended, in whose terminal this was started
            warn("ignored a DEADLINE or SLURM_JOB_END_TIME that is over")
            time_left = math.inf
        self.deadline = time.time() + max(time_left - 120, 0.9 * time_left)  # time to save
        if threading.current_thread() is not threading.main_thread():
            return  # Python gives signals to the main thread only
        for number in STOP_SIGNALS:
            name = signal.Signals(number).name
            under_nohup = name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(number, self.on_signal)

    def on_signal(self, number, _frame):
        if not self.signal:
            StopRequests.signal = signal.Signals(number).name
            self.signal_time = time.time()
            if number == signal.SIGINT and is_rank_0():
                with suppress(OSError):  # not print(), which Ctrl-C may have interrupted
                    os.write(2, b"\nstopping: ranks save and exit; Ctrl-C again kills them\n")
        # Within a second of the first, it is the same Ctrl-C, forwarded by a launcher.
        elif number == signal.SIGINT and time.time() > self.signal_time + 1:
            os._exit(130)

    def poll(self):
        """The reasons that this rank knows of. Only rank 0 looks at files and the clock."""
        reasons = [self.signal]
        if is_rank_0() and any(file.exists() for file in self.files):
            reasons.append("STOP file")
        if is_rank_0() and time.time() > self.deadline:
            reasons.append("time limit")
        return reasons


# -------------------------------------------------------------------------------- CHECKPOINTS


@contextmanager
def only_run_in_directory(cfg):
    """Lock --checkpoint-dir, so that no other run writes to it. Collective.

    The kernel frees the lock, too, when the process and its loader workers have ended.
    """
    lock = on_rank_0(lock_directory, cfg)
    try:
        yield
        gather([])  # until rank 0 has written everything: a launcher may end all when one exits
    finally:
        if is_rank_0():
            os.close(lock)


def lock_directory(cfg):
    """The file descriptor of the lock. For rank 0."""
    directory = run_directory(cfg)
    file = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{directory} is in use by {file.read_text()}"
            remedy = "stop that process, or set another --checkpoint-dir"
            raise UserError(f"{text}: {remedy}", "in use") from None
        except (OSError, AttributeError) as error:  # or a system without fcntl
            warn(f"no lock against a second process in this directory ({error})")
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        for leftover in [*directory.glob(".checkpoint_*.tmp"), directory / "STOP"]:
            leftover.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to or lock --checkpoint-dir {directory} ({error})") from None
    return lock


def write_file(path, write):
    """Call write(file) on a temporary file; rename it once its content is on disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        cause = error.__context__ or error  # torch.save() hides "No space left on device"
        raise UserError(f"cannot write {path}; is the disk full? ({cause})", "disk") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


class Saver:
    """Saves checkpoints and the status of the run, and deletes old ones, on rank 0."""

    def __init__(self, task, cfg, stream):
        self.cfg = cfg
        self.stream = stream
        self.directory = run_directory(cfg)
        self.options = plain_options(task, cfg)
        self.code = on_rank_0(code_version)
        # Compared at a resume, as the options are.
        self.identity = {
            "task": type(task).__name__,
            "spec": task.spec,
            "samples": stream.samples,
            "code": self.code,
        }
        self.last_save = time.monotonic()
        self.run_id = os.urandom(8).hex()
        self.start_step = 0
        self.saved_step = 0
        self.newest = None  # checkpoint of this run, even if its save has failed
        self.has_failed = False  # the last save has

    def restore(self, path, checkpoint, state, model, optimizer, scaler):
        """Continue from the checkpoint."""
        refuse_changes(self.cfg, self.options, checkpoint, self.identity)
        load_weights(model, checkpoint["model"])
        fresh_groups = [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(checkpoint["optimizer"])
        except ValueError as error:
            raise UserError(f"the optimizer is not that of the checkpoint ({error})") from None
        # Not tensors that are mapped: a deleted file would keep its place on the disk.
        for p, values in optimizer.state.items():
            optimizer.state[p] = tree_map_only(torch.Tensor, unmapped, values)
        # What the optimizer has learned is part of the run, but options apply as they are now.
        for group, fresh in zip(optimizer.param_groups, fresh_groups):
            options = {"initial_lr", *vars(self.cfg)}
            group.update({name: fresh[name] for name in options & fresh.keys()})
        if checkpoint["scaler"]:  # of fp16
            scaler.load_state_dict(checkpoint["scaler"])
        vars(state).update(copy.deepcopy(checkpoint["state"]))
        self.newest = path
        self.start_step = state.step
        if path.parent == self.directory:
            self.run_id = checkpoint["run_id"]
            self.saved_step = state.step
        else:
            state.best_score = -math.inf  # best.pt is the best of its directory

    def poll(self):
        """SAVE if rank 0 is to save, because of the clock or a file."""
        is_late = time.monotonic() > self.last_save + 60 * self.cfg.save_minutes
        if is_rank_0() and (is_late or (self.directory / "SAVE").exists()):
            return ["SAVE"]
        return []

    def save(self, state, model, optimizer, scaler, seconds_left=0.0):
        """Write checkpoint_epoch_N.pt at the end of epoch N, else checkpoint_step_N.pt.

        Deletes all but the newest --keep of them. A failed save is a warning once, and an error
        the second time.
        """
        if not is_rank_0():
            return
        name = f"checkpoint_step_{state.step}.pt"
        if self.stream.ends_epoch(state.step):
            name = f"checkpoint_epoch_{self.stream.epochs_done(state.step)}.pt"
        self.newest = path = self.directory / name
        if not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f"{path.name} not saved: the weights are not finite; lower --lr", "NaN")
        content = self.content(state, model, optimizer, scaler)
        content["digests"] = digests_in(content)
        try:
            write_file(path, functools.partial(write_checkpoint, content))
            self.has_failed = False
            self.saved_step = state.step
            self.write_status(state.step, "running", seconds_left=seconds_left)
            if (self.directory / "SAVE").exists():
                log(f"Saved {path.name}, as the file SAVE asks")
            paths = checkpoints_in(self.directory)
            paths.sort(key=lambda old: (old == path, old.lstat().st_mtime))
            for old in paths[: -self.cfg.keep]:  # this one is always among those that stay
                old.unlink(missing_ok=True)
        except UserError as error:
            if self.has_failed or error.cause != "disk":
                raise
            self.has_failed = True
            warn(f"{error}")
        self.last_save = time.monotonic()
        (self.directory / "SAVE").unlink(missing_ok=True)

    def content(self, state, model, optimizer, scaler):
        return {
            **self.identity,
            "config": self.options,
            "run_id": self.run_id,
            "total_steps": self.stream.total_steps,
            "state": vars(state),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }

    def try_to_save(self, state, model, optimizer, scaler):
        """UserError, before the first step, if a checkpoint could not hold this run. For rank 0."""
        trial = self.directory / "checkpoint_trial"
        try:
            content = self.content(state, model, optimizer, scaler)
            content = tree_map_only(torch.Tensor, lambda tensor: tensor.new_empty(0), content)
            write_file(trial, functools.partial(write_checkpoint, content))
            trial.unlink()
        except UserError:
            raise
        except Exception as error:
            text = f"the state of the model, the optimizer or the task cannot be saved: {error}"
            raise UserError(text) from None

    def save_best(self):
        """Keep the newest checkpoint as best.pt, beside the others. For rank 0."""
        temporary = self.directory / ".checkpoint_best.tmp"
        try:
            try:
                os.link(self.newest, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.newest, temporary)
            temporary.replace(self.directory / "best.pt")
        finally:
            temporary.unlink(missing_ok=True)  # it stays if best.pt is that file already

    def write_status(self, step, state, reason="", seconds_left=None):
        """status.json, and a copy for the supervisor. States: running, finished, stopped,
        failed. After a kill, it stays "running".
        """
        if not is_rank_0():
            return
        status = {
            "state": state,
            "reason": reason,
            "run_dir": str(self.directory.resolve()),
            "start_step": self.start_step,
            "global_step": step,
            "saved_step": self.saved_step,
            "seconds_left": seconds_left,
            "world_size": launch_variable("WORLD_SIZE", 1),
        }
        text = json.dumps(status).encode()
        write_file(self.directory / "status.json", lambda file: file.write(text))
        if "STATUS_FILE" in os.environ:
            try:
                write_file(Path(os.environ["STATUS_FILE"]), lambda file: file.write(text))
            except UserError as error:
                warn_once(f"{error}: does this host see LOG_DIR of scripts/supervise.py?")


def write_checkpoint(content, file):
    torch.save(content, file)
    file.flush()
    try:
        open_checkpoint(file.name)  # what cannot be loaded ends the run now, not later
    except pickle.UnpicklingError as error:
        kind = str(error).rpartition("GLOBAL ")[2].partition(" was not")[0]
        text = f"a checkpoint cannot hold {kind}, only numbers, texts and tensors"
        raise UserError(text) from None


def unmapped(tensor):
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def checkpoints_in(directory):
    """Not copies such as checkpoint_epoch_3_good.pt."""
    name = re.compile(r"checkpoint_(epoch|step)_\d+\.pt")
    return [path for path in directory.iterdir() if name.fullmatch(path.name)]


def find_checkpoint(cfg):
    """The newest intact checkpoint in --checkpoint-dir, else that of --resume. For rank 0."""
    directory = run_directory(cfg)
    paths = checkpoints_in(directory)
    for path in sorted(paths, key=step_of, reverse=True):
        try:
            saved = load_checkpoint(path)["config"]
        except UserError as error:
            warn(f"skipped: {error}")
            continue
        for option in ("resume", "init"):  # what the run began with may be repeated
            now = getattr(cfg, option)
            if now not in (None, saved[option]):
                text = f"--{option} {now}, but {directory} has a run of its own"
                raise UserError(f"{text}: set another --checkpoint-dir")
        return path
    if paths:
        raise UserError(f"no intact checkpoint in {directory}: set another --checkpoint-dir")
    if not cfg.resume:
        return None
    load_checkpoint(Path(cfg.resume))
    return Path(cfg.resume)


def step_of(path):
    """Infinity if it cannot be loaded: find_checkpoint() then comes to it first, and names it."""
    with suppress(Exception):
        return open_checkpoint(path)["state"]["step"]
    return math.inf


def open_checkpoint(path):
    """Its content, mapped into memory: a tensor is read when it is used."""
    with zipfile.ZipFile(path) as archive:
        (rest,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        archive.read(rest)  # all but the tensors: BadZipFile if it has changed
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def load_checkpoint(path, is_verified=True):
    """open_checkpoint(), or a UserError if the file is not as it was saved.

    is_verified: read and compare all of it.
    """
    HangTimer.idle = 0
    try:
        checkpoint = open_checkpoint(path)
        if is_verified:
            verify(checkpoint)
        return checkpoint
    except (FileNotFoundError, PermissionError) as error:
        text = f"{socket.gethostname()} cannot read {path} ({error.strerror})"
        raise UserError(f"{text}: is it there, in a directory that all nodes see?") from None
    except Exception as error:  # a file can be damaged in many ways
        text = f"{path} is damaged, or of another version of the trainer"
        raise UserError(f"{text} ({type(error).__name__}: {error})") from None


def verify(checkpoint):
    digests = checkpoint["digests"]  # empty in a file of weights that was converted
    if digests and digests != digests_in(checkpoint):
        raise ValueError("a tensor is not as it was saved")


def digests_in(checkpoint):
    """Of all tensors in it, which may be on several devices."""
    leaves = tree_leaves(checkpoint)
    return [digests_of([leaf]).item() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def load_weights(model, weights):
    """load_state_dict(), also for buffers that have appeared or grown."""
    device = next(model.parameters()).device
    for name, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            saved = weights.get(f"{name}.{leaf}" if name else leaf)
            if saved is not None and (buffer is None or saved.shape != buffer.shape):
                module._buffers[leaf] = saved.to(device, copy=True)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"the model is another one than that of the checkpoint ({error})") from None


def load_initial_weights(cfg, model):
    """--init: the weights of a checkpoint, or a state dict of others; says which do not fit."""
    try:
        weights = torch.load(cfg.init, map_location="cpu", weights_only=True)
        if isinstance(weights.get("digests"), list):
            verify(weights)
        for key in ("model", "state_dict"):
            if isinstance(weights.get(key), Mapping):
                weights = weights[key]
    except Exception as error:
        text = f"cannot read --init {cfg.init}, a file of torch.save()"
        raise UserError(f"{text} ({type(error).__name__}: {error})") from None
    own = model.state_dict()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    candidates = []
    # Others may have saved the network inside of ours, or ours inside of a wrapper.
    for prefix in dict.fromkeys(["", *[name.partition(".")[0] + "." for name in own]]):
        found = {}
        for name, weight in weights.items():
            name = prefix + name.removeprefix("module.").removeprefix("_orig_mod.")
            if torch.is_tensor(weight) and name in own and weight.shape == own[name].shape:
                found[name] = weight
        candidates.append(found)
    # Of two places that fit, such as a network and its average, the one that is trained.
    fitting = max(candidates, key=lambda found: (len(found), len(trained & found.keys())))
    if not fitting:
        names = f"{', '.join(list(weights)[:3])} ..., not {', '.join(list(own)[:3])} ..."
        raise UserError(f"--init {cfg.init}: no weight fits the model; it has {names}")
    model.load_state_dict(fitting, strict=False)
    others = ", ".join(sorted(own.keys() - fitting.keys()))
    taken = f"{len(fitting)} taken, {len(weights) - len(fitting)} left"
    log_on_rank_0(f"Weights of {cfg.init}: {taken}; new in the model: {others or 'none'}")


def load_model(path: str, task: Task | None = None, device: str = "cpu") -> nn.Module:
    """The trained model of a checkpoint, for prediction: it takes inputs as the data set has them.

    task: that of the training; the default is this file's. Its data is not needed. Sets task.spec.
    """
    task = task or Task()
    checkpoint = load_checkpoint(Path(path))
    name = type(task).__name__
    if checkpoint["task"] != name:
        text = f"{path} is of the task {checkpoint['task']}, not {name}"
        raise UserError(f"{text}: run its script, or pass that task")
    task.spec = checkpoint["spec"]
    task.step = checkpoint["state"]["step"]
    task.total_steps = checkpoint.get("total_steps", 0)
    task.cfg = saved_options(build_parser(task), checkpoint["config"]).parse_args([])
    model = new_model(task, task.cfg)
    load_weights(model, checkpoint["model"])
    model.requires_grad_(False)
    return model.to(device).eval()


# ---------------------------------------------------------------------------- READING OPTIONS
class UserError(Exception):
    """Something the user can fix: printed as one sentence, without a traceback."""

    def __init__(self, text, cause="configuration"):
        text = text.rpartition("UserError: ")[2]  # a loader worker's comes with its traceback
        super().__init__(" ".join(text.split()))
        self.cause = cause  # for scripts/supervise.py: after "disk", a restart may help


def run_directory(cfg):
    return Path(cfg.checkpoint_dir or "checkpoints")


def refuse_changes(cfg, options, checkpoint, identity):
    """UserError if options, or the identity of the run, have changed in a way that is not allowed.

    Without --checkpoint-dir, a second experiment would continue the first one by mistake.
    """
    before = checkpoint["config"] | {name: checkpoint[name] for name in identity}
    changes = {}
    for name, now in (options | identity).items():
        then = before.get(name, now)
        if name not in FREE_OPTIONS and not is_same(then, now):
            changes[name] = f"{name} {then} -> {now}"
    text = ", ".join(changes.values())
    refused = FIXED_OPTIONS & changes.keys() if cfg.checkpoint_dir else changes.keys() - {"code"}
    if refused:
        text = f"the options of this run have changed ({text}): set another --checkpoint-dir for a"
        advice = f", or --checkpoint-dir {run_directory(cfg)} to continue it"
        if FIXED_OPTIONS & changes.keys():
            advice = f"; {', '.join(sorted(FIXED_OPTIONS))} cannot change"
        raise UserError(f"{text} new one{advice}")
    if changes:
        log_on_rank_0(f"Changed since the checkpoint: {text}")


def is_same(value, other):
    """Also where they hold tensors or NaN."""
    with suppress(RuntimeError):  # of a comparison of tensors
        if value == other:
            return True
    return as_text(value) == as_text(other)


def as_text(value):
    return repr(tree_map_only(torch.Tensor, torch.Tensor.tolist, value))


def plain_options(task, cfg):
    """The options as a checkpoint and a YAML file can hold them: a Path, for example, as a text.

    UserError if the type of an option does not read back what is written.
    """
    options = {}
    for name, value in vars(cfg).items():
        plain = {str, int, float, bool, type(None)}  # not a class derived from them
        if not plain.issuperset(map(type, tree_leaves(value))):
            value = str(value.value if isinstance(value, enum.Enum) else value)
        options[name] = value
    try:
        again = saved_options(build_parser(task), options).parse_args([])
        for name, value in options.items():
            if isinstance(value, str) and repr(getattr(again, name)) != repr(getattr(cfg, name)):
                raise ValueError(f"{name} {value!r}")
    except Exception as error:
        text = f"an option could not be read from a checkpoint again: {error}"
        raise UserError(text) from None
    return options


def saved_options(parser, options):
    """The parser, with the options of a checkpoint or a file as defaults; it converts texts."""
    parser.set_defaults(**options)
    for action in parser._actions:
        action.required = action.required and action.dest not in options
    return parser


def did_you_mean(word, known):
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f", did you mean {near[0]}?" if near else ""


def code_version():
    """What runs: digests of the started script and of this file, and the commit."""
    started = getattr(sys.modules["__main__"], "__file__", __file__)
    parts = []
    for file in sorted({Path(started).resolve(), Path(__file__).resolve()}):
        parts.append(f"{file.name} {blake2b(file.read_bytes(), digest_size=4).hexdigest()}")
    describe_commit = ["git", "describe", "--always", "--dirty=, modified", "--exclude=*"]
    with suppress(OSError):  # no git
        git = subprocess.run(describe_commit, cwd=file.parent, capture_output=True, text=True)
        if git.stdout:
            parts.append(f"commit {git.stdout.strip()}")
    return ", ".join(parts)


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        hint = did_you_mean(unknown[1], [*self._option_string_actions]) if unknown else ""
        raise UserError(message + hint)


def parse_config(argv, task=None):
    """The options. The command line overrides the file --config, which overrides the defaults.

    With --evaluate, the options of that checkpoint are the defaults.
    """
    task = task or Task()
    parser = build_parser(task)
    files = Parser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", type=path)
    files.add_argument("--evaluate", type=path)
    given, _ = files.parse_known_args(argv)
    if given.evaluate:  # the launchers also name a config, but a checkpoint has its own options
        saved = load_checkpoint(Path(given.evaluate))["config"]
        saved_options(parser, saved | {"nodes": None, "gpus_per_node": None})
    elif given.config:
        saved_options(parser, read_config(given.config, task))
    task.cfg = parser.parse_args(argv)
    return task.cfg


def read_config(file, task):
    """{name in cfg: value}, from a YAML file of lines like `epochs: 5`."""
    try:
        # Texts: `amp: off` stays "off". Nothing in the file is executed.
        content = Path(file).read_text(encoding="utf-8")
        texts = yaml.load(content, yaml.BaseLoader) or {}
        values = yaml.safe_load(content) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read --config {file} ({error})") from None
    if not isinstance(texts, dict):
        raise UserError(f"--config {file}: it needs lines like `epochs: 5`")
    parser = build_parser(task)
    flags = {}  # by their names in a file
    for action in parser._actions:
        action.required = False
        for flag in action.option_strings:
            flags.setdefault(action.dest, flag)
            flags[flag.lstrip("-").replace("-", "_")] = flag
    options = {}
    for (name, text), value in zip(texts.items(), values.values()):
        key = name.replace("-", "_")
        try:
            if key not in flags:
                raise UserError(f"there is no such option{did_you_mean(key, flags)}")
            flag = flags[key]
            dest = parser._option_string_actions[flag].dest
            options[dest] = option_value(parser, flag, key, text, value)
        except UserError as error:
            raise UserError(f"--config {file}, {name}: {error}") from None
    return options


def option_value(parser, flag, key, text, value):
    """What argparse stores for a text, or a list of texts; value: as YAML reads it."""
    action = parser._option_string_actions[flag]
    if value is None:
        return action.default
    words = [f"{flag}={value if isinstance(value, float) else text}"]  # .inf: inf
    if action.nargs == 0:
        is_stored = isinstance(value, bool) or value in (action.const, action.default)
        if key == action.dest and (is_stored or isinstance(action, argparse._CountAction)):
            return value
        if isinstance(value, bool):
            words = [flag] * value
    elif isinstance(action, argparse._AppendAction) and isinstance(text, list):
        action.default = []  # which they replace
        words = [f"{flag}={part}" for part in text]
    elif isinstance(text, list) and action.nargs:
        words = [flag, *text]
    elif isinstance(text, list) and isinstance(action.default, (list, tuple)):
        return value  # as a type of the task makes it from one text
    elif isinstance(text, (list, dict)):
        raise UserError(f"it takes one value, not {name_of(value)}")
    return getattr(parser.parse_args(words), action.dest)


# --------------------------------------------------------------------------------------- MAIN
def main(task: Task | None = None, argv: list[str] | None = None):
    """Train or evaluate as the command line says. A script of your own calls main(MyTask())."""
    task = task() if isinstance(task, type) else task or Task()
    children = multiprocessing.active_children()
    numbers = [*STOP_SIGNALS, getattr(signal, "SIGCHLD", signal.SIGINT)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    timer = None
    try:
        task.spec = dict(task.spec)  # of this task alone
        cfg = parse_config(sys.argv[1:] if argv is None else argv, task)
        timer = HangTimer(cfg)
        configure_torch(cfg)
        world = setup_distributed(cfg)
        if cfg.evaluate:
            evaluate_checkpoint(task, cfg, world)
        else:
            with only_run_in_directory(cfg):
                train(task, cfg, world)
        if dist.is_initialized():
            time.sleep(0.2)  # for gloo: pytorch issue 179291
            dist.destroy_process_group()  # not after an error: it might wait for other ranks
    except UserError as error:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # its launcher may end this rank
        if not is_rank_0():
            time.sleep(5)  # let rank 0 exit first: then its launcher ends this rank
        log(f"{Path(sys.argv[0]).name}: error: {error}", sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:  # before the handlers of signals are set
        raise SystemExit(130) from None
    finally:  # a notebook, for example, goes on after main()
        if timer:
            timer.is_over.set()
        gc.enable()
        gc.unfreeze()
        for worker in set(multiprocessing.active_children()) - set(children):
            worker.kill()  # of a DataLoader; exit would wait for it
        put_back(handlers)


def put_back(handlers):
    """Of signals. After a stop, only for a user who goes on: its signal may come several times."""
    if threading.current_thread() is not threading.main_thread():
        return
    is_stopping = StopRequests.signal or StopRequests.has_stopped
    is_stopping = is_stopping and not hasattr(sys, "ps1")  # of a notebook or a prompt
    for number, handler in handlers.items():
        if handler is not None and not (is_stopping and number in STOP_SIGNALS):
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
