#!/usr/bin/env python3
"""Train a model with PyTorch DistributedDataParallel (DDP), in one file.

    python train_distributed.py                                     # one process: a laptop, one GPU
    torchrun --standalone --nproc-per-node 4 train_distributed.py   # one machine with four GPUs
    srun -n 4 python scripts/guard.py train_distributed.py          # Slurm: one task for each GPU

Your data, model, optimizer, loss and metrics replace those of the class Task, just below: edit it,
or subclass it in a file of your own (see examples/) that ends with main(MyTask()).

A rank is one process with one GPU. Every rank must call each function marked "collective", or the
other ranks hang. A step uses --global-batch-size samples, in micro-batches of --batch-size that are
divided among the ranks. The samples of a micro-batch, their augmentation and the dropout depend
only on the step and the number of the micro-batch: any number of ranks, and resumed runs, see the
same ones.

To save and stop: Ctrl-C; SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 to any rank; a file STOP in
--checkpoint-dir, or the file $STOP_FILE; shortly before the time $DEADLINE (seconds since 1970). A
file SAVE in --checkpoint-dir saves and continues, a file PROFILE records five steps. To resume, run
the same command. To use the trained model, see load_model(). Exit code: 0 finished or saved; 2 user
error; 130 second Ctrl-C.

Sections: TASK, TRAINING, DATA, DISTRIBUTED, METRICS, STOPPING, CHECKPOINTS, OPTIONS, MAIN
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import difflib
import faulthandler
import fcntl
import functools
import gc
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
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
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils.checkpoint import checkpoint as recompute_in_backward
    from torch.utils.data import (
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
    # The metric of report() on the test set by which best.pt is chosen.
    best = "accuracy"
    best_is_lowest = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options of this task: on the command line, in config files and in checkpoints."""
        add = parser.add_argument
        datasets = ["mnist_sample", "mnist"]
        add("--dataset", choices=datasets, default="mnist_sample", help="[mnist_sample]")
        add("--dropout", type=fraction, default=0.25, help="[0.25]")

    def data(self, cfg) -> tuple[Dataset, Dataset | None]:
        """(training set, test set or None): map-style data sets of tuples, dicts or tensors.

        A data set of tensors in memory is fastest as an InMemoryDataset. Others are read by
        --num-workers processes.
        """
        self.spec = {"classes": [str(digit) for digit in range(10)]}
        root = Path(__file__).with_name("data") / "mnist_sample"  # comes with this file
        if cfg.dataset == "mnist":
            root = Path(cfg.data_dir)
        return read_mnist(root, "train"), read_mnist(root, "test")

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

    def lr_factor(self, cfg, epoch: float) -> float:
        """What the peak learning rates are multiplied by: linear warm-up, then a cosine to 0.

        epoch: passes over the training set that are done, from 0 to cfg.epochs.
        """
        if epoch < cfg.warmup_epochs:
            return epoch / cfg.warmup_epochs
        done = (epoch - cfg.warmup_epochs) / (cfg.epochs - cfg.warmup_epochs)
        return (1 + math.cos(math.pi * done)) / 2

    def loss(self, model: nn.Module, batch) -> tuple[torch.Tensor, dict]:
        """A micro-batch on the device -> (its mean loss, sums for report()).

        The gradient of a step is that of the mean loss of all its samples. Where samples have
        different numbers of items, such as tokens or valid pixels, return the mean over the items
        (a number, even if there are none), and their number as the sum "count", a tensor, best of
        integers, which add up exactly: then it is the mean over all items. Random numbers of torch
        are the same here on any number of ranks. model.training says whether this is a step of the
        training.
        """
        images, labels = batch
        logits = model(images)
        try:
            loss = F.cross_entropy(logits, labels)
        except IndexError as error:  # on a GPU: "device-side assert", see docs/TROUBLESHOOTING.md
            raise UserError(f"a label is not from 0 to {logits.shape[1] - 1} ({error})") from None
        return loss, {"correct": (logits.argmax(1) == labels).sum()}

    def report(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics to print and to record, from the sums over all micro-batches and ranks.

        sums["count"] is the number of samples (or items), sums["loss"] the sum of their losses. A
        metric that is not a mean comes from sums, too. For F1, loss() returns the numbers of true
        positives, false positives and false negatives, of each class under a name of its own; then
        F1 = 2 * tp / (2 * tp + fp + fn), exactly, on any number of ranks.
        """
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}

    def after_evaluation(self, values: dict[str, float]) -> bool:
        """Called on rank 0 with the metrics of the test set. True ends the training."""
        return False

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """What --activation-checkpointing recomputes, one by one, such as a ResNet's."""
        return []

    def loader_options(self) -> dict:
        """Options of the DataLoader, for example {"collate_fn": pad, "prefetch_factor": 8}."""
        return {}

    def wrap(self, loss: LossOf) -> DistributedDataParallel:
        """What exchanges the gradients of several ranks in the backward pass."""
        return DistributedDataParallel(loss, gradient_as_bucket_view=True)


def read_mnist(root: Path, part: str) -> InMemoryDataset:
    """uint8 [n, 1, 28, 28] and labels int64 [n]; part: train or test."""
    from torchvision.datasets import MNIST  # not at the top: it takes time, and not all need it

    try:
        digits = MNIST(root, train=part == "train", download=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot read MNIST in {root}: is --data-dir right? ({error})") from None
    return InMemoryDataset(digits.data.unsqueeze(1), digits.targets)


# ----------------------------------------------------------------------------------- TRAINING
# In all functions, cfg holds the options, and world says which rank this is.


@dataclass
class State:
    """Where a run is, and what it has counted. Part of each checkpoint."""

    step: int = 0  # optimizer steps since the start of the run
    best_score: float = -math.inf  # what Task.best was at its best; negative if lowest is best
    evaluations_since_best: int = 0
    epoch_sums: Counter = field(default_factory=Counter)  # of this epoch, on rank 0
    interval_sums: Counter = field(default_factory=Counter)  # since the last record


def train(task, cfg, world):
    """One run, from its start or its newest checkpoint to its last step. Collective."""
    lock = on_rank_0(lock_directory, cfg)
    path = on_rank_0(find_checkpoint, cfg)
    checkpoint = load_checkpoint(path) if path else None
    if not cfg.global_batch_size:
        cfg.global_batch_size = cfg.batch_size * world.world_size
        if checkpoint:  # that of the run stays, on any number of ranks
            cfg.global_batch_size = checkpoint["config"]["global_batch_size"]
    train_set, test_set = open_data(task, cfg)
    if cfg.patience and test_set is None:
        raise UserError("--patience: there is no test set (Task.data())")
    stream = SampleStream(len(train_set), cfg, world)
    model = build_model(task, cfg, world)
    optimizer = task.optimizer(cfg, model)
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])  # a number of NumPy could not be loaded
        group["initial_lr"] = group["lr"]
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.amp == "fp16")
    saver = Saver(task, cfg, stream)
    state = State()
    if checkpoint:
        saver.restore(path, checkpoint, state, model, optimizer, scaler)
    elif cfg.init:
        load_initial_weights(cfg, model)
    del checkpoint  # a mapped file takes up space on the disk even after it is deleted
    loss_of = LossOf(task, cfg, world, model)
    if dist.is_initialized() and not cfg.reproducible:
        loss_of = task.wrap(loss_of)
        settle_buckets(loss_of)
    keys = functools.partial(stream.keys, state.step)
    batches = batches_of(task, cfg, world, train_set, keys)
    metrics = MetricsWriter(task, cfg, saver)
    requests = StopRequests(cfg)
    total_steps = math.ceil(cfg.epochs * len(train_set) / cfg.global_batch_size)
    last_step = min(total_steps, cfg.stop_at_step or total_steps)
    sync = Sync(cfg, world)
    seconds_left = None  # until the first exchange
    reason = ""  # why to end before the last step; the same on all ranks
    profiled = 0  # the step at which the last profile ends
    begin = f"Resuming from {path} at step {state.step}" if path else "Starting a new run"
    log_on_rank_0(f"Code: {saver.code}\n{begin}, to step {last_step}")
    saver.write_status(state.step, "running")

    set_training_mode(model)
    sync.restart(state.step)
    try:
        while True:
            # After the save, so that a run that is stopped during an evaluation repeats it later.
            if stream.ends_interval(state.step, cfg.eval_every_steps) and not reason:
                sums, reason = evaluate(task, cfg, world, model, test_set, requests)
                if not reason:
                    reason = on_rank_0(judge_evaluation, task, cfg, state, sums, metrics, saver)
                sync.restart(state.step)
            if reason or state.step >= last_step:
                break
            epoch = cfg.epochs * (state.step + 0.5) / total_steps  # in the middle of this step
            factor = float(task.lr_factor(cfg, epoch))
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            train_step(cfg, world, stream, loss_of, optimizer, scaler, batches, state.step, sync)
            state.step += 1
            ends = (
                state.step == last_step
                or stream.ends_interval(state.step, cfg.eval_every_steps)
                or stream.ends_interval(state.step, cfg.checkpoint_every_steps)
            )
            if ends or sync.is_due(state.step):
                asked = requests.poll() + saver.poll()
                totals, reason, agreed = sync.all_reduce(state.step, asked)
                seconds_left = (last_step - state.step) * sync.seconds_per_step
                metrics.record_intervals(state, totals, sync, seconds_left)
                if ends or reason or "SAVE" in agreed:
                    check_replicas(model)
                    saver.save(state, model, optimizer, scaler, seconds_left)
                if "PROFILE" in agreed and state.step >= profiled:
                    profiled = start_profiler(cfg, world, optimizer, state.step)
                collect_garbage()
                sync.restart(state.step)
        if saver.saved_step < state.step:  # that save has failed: try again, else fail
            saver.save(state, model, optimizer, scaler)
    except Exception as error:
        with suppress(UserError):  # a full disk must not hide the error
            saver.write_status(state.step, "failed", str(error))
        raise
    ending = "finished"
    if reason in STOP_REASONS or (not reason and state.step < total_steps):  # --stop-at-step
        ending = "stopped"
    why = f" ({reason})" if reason else ""
    where = f"step {state.step} of {total_steps}{why}, saved in {run_directory(cfg)}"
    log_on_rank_0(f"{ending.title()} at {where}")
    saver.write_status(state.step, ending, reason, seconds_left)
    on_rank_0(os.close, lock)  # the others wait: a launcher may end all when one exits


def train_step(cfg, world, stream, loss_of, optimizer, scaler, batches, step, sync):
    """One optimizer step: forward and backward for this rank's micro-batches, then the update.

    The gradient is the mean over all samples (or items) of the step. Collective.
    """
    exact = ExactGradients(optimizer, scaler) if cfg.reproducible else None
    averaged = 1 if exact else world.world_size  # ranks over which DDP averages
    counts = []  # of items, if their number varies
    for micro in stream.micro_batches:
        began = time.monotonic()
        batch = next(batches)
        sync.seconds_waited += time.monotonic() - began
        seed_generators(derive_seed(cfg.seed, "dropout", step, micro), world.device)
        # The gradient is the sum of weight * loss over all micro-batches of all ranks. With counts,
        # weight * loss is a sum over items, and divide_by_items() makes it the mean over all.
        is_last = micro == stream.micro_batches[-1]  # only then DDP exchanges the gradients
        with nullcontext() if averaged == 1 or is_last else loss_of.no_sync():
            loss, values = loss_of(batch)
            weight = averaged / stream.micro_batches_per_step
            if "count" in values:
                if exact and not counts:
                    exact.divide_by(values["count"])
                counts.append(values["count"])
                weight = weight * values["count"]
            weighted = loss if not counts and weight == 1 else loss * weight
            scaler.scale(weighted).backward()
        if exact:
            exact.add_micro_batch()
        sync.add(step // cfg.log_every_steps, {"loss": loss, "count": cfg.batch_size, **values})
    if exact:
        exact.write_gradients()
    if counts:
        divide_by_items(optimizer, counts, stream.micro_batches_per_step)
    is_recorded = stream.ends_interval(step + 1, cfg.log_every_steps)
    if cfg.clip_grad_norm or is_recorded:
        scaler.unscale_(optimizer)
        parameters = parameters_of(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, cfg.clip_grad_norm or math.inf)
    scaler.step(optimizer)
    scaler.update()
    if is_recorded:
        sync.recorded[step + 1] = (optimizer.param_groups[0]["lr"], norm)
    optimizer.zero_grad()


def divide_by_items(optimizer, counts: list[torch.Tensor], micro_batches: int):
    """Turn gradients of sums over items into gradients of their mean. Collective."""
    items = torch.stack(counts).sum()
    if dist.is_initialized():
        dist.all_reduce(items)
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    torch._foreach_mul_(gradients, micro_batches / items.clamp(min=1))


def parameters_of(optimizer):
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.requires_grad]


@torch.no_grad()
def evaluate(task, cfg, world, model, test_set, requests=None):
    """(sums of Task.loss() over the test set, each sample once; "" or why to stop). Collective.

    The sums are empty without a test set. The checkpoint has been saved before.
    """
    sums = Counter()
    if test_set is None:
        return sums, ""
    if dist.is_initialized():
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's: all ranks evaluate what rank 0 saves
    model.eval()
    loss_of = LossOf(task, cfg, world, model)
    micro_batches = torch.arange(len(test_set)).split(cfg.batch_size)
    rounds = math.ceil(len(micro_batches) / world.world_size)
    numbers = range(world.rank, rounds * world.world_size, world.world_size)
    mine = [micro_batches[number % len(micro_batches)] for number in numbers]
    sync = Sync(cfg, world)

    def keys(device):
        for indices in mine:
            yield indices.to(device)

    batches = batches_of(task, cfg, world, test_set, keys)
    for done, (number, indices, batch) in enumerate(zip(numbers, mine, batches), 1):
        seed_generators(derive_seed(cfg.seed, "test", number), world.device)
        loss, values = loss_of(batch)
        values = {"loss": loss, "count": len(indices), **values}
        if number >= len(micro_batches):  # a second time, in the last round: it does not count
            values = {name: 0 * value for name, value in values.items()}
        sync.add(0, values)
        if done == rounds or sync.is_due(done):
            totals, reason, _ = sync.all_reduce(done, requests.poll() if requests else [])
            sums.update(totals[0])  # a Counter adds
            sync.restart(done)
            if reason and done < rounds:
                return sums, reason
    set_training_mode(model)
    return sums, ""


def judge_evaluation(task, cfg, state, test_sums: Counter, metrics, saver) -> str:
    """Record an evaluation; keep its checkpoint as best.pt if Task.best was never better.

    For rank 0. Returns "", or why to end the training.
    """
    values = metrics.record_evaluation(state, test_sums)
    if not values:
        return ""
    if task.best in values:
        score = values[task.best]
        if task.best_is_lowest:
            score = -score
        state.evaluations_since_best += 1
        if score > state.best_score:  # never if it is NaN
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


def evaluate_checkpoint(task, cfg, world):
    """--evaluate: print the metrics of a checkpoint on the test set; writes no file. Collective."""
    _, test_set = open_data(task, cfg)
    spec = task.spec
    model = load_model(cfg.evaluate, task, str(world.device))
    if test_set is None or task.spec != spec:
        raise UserError(f"--evaluate {cfg.evaluate}: no test set, or not with {task.spec}")
    sums, _ = evaluate(task, cfg, world, model, test_set)
    log_on_rank_0(f"{cfg.evaluate}: {describe(report(task, sums))}")


def build_model(task, cfg, world):
    """The model, with the same weights on every rank."""
    seed_generators(cfg.seed, world.device)
    model = task.model(cfg).to(world.device)
    if cfg.activation_checkpointing:
        blocks = task.blocks(model)
        if not blocks:
            raise UserError("--activation-checkpointing: Task.blocks() returns no blocks")
        for block in blocks:
            # Its backward pass gets only its inputs, and computes the rest again.
            forward = functools.partial(recompute_in_backward, block.forward, use_reentrant=False)
            block.forward = forward
    if cfg.compile:
        model.compile(dynamic=False)  # in place: the names in checkpoints stay the same
    return model


def set_training_mode(model: nn.Module):
    """model.train(), except for frozen parts: the statistics of their BatchNorm must not change."""
    model.train()
    for part in model.modules():
        if {p.requires_grad for p in part.parameters()} == {False}:  # frozen, and not without any
            part.eval()


def start_profiler(cfg, world, optimizer, step: int):
    """Record five of the next steps of this rank in a file for Perfetto. Returns their end."""
    directory = str(run_directory(cfg))
    log_on_rank_0(f"Recording the steps after {step}: see {directory}/trace_*.json")
    name = f"trace_step_{step}_rank_{world.rank}"
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=5, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(directory, name),
    )
    profiler.start()
    optimizer.register_step_post_hook(lambda *_: profiler.step())
    return step + 6


def collect_garbage():
    """On all ranks after the same step: a rank that collects on its own makes the others wait."""
    gc.collect()
    if gc.isenabled():  # the first time
        gc.disable()
        gc.freeze()  # what exists now is not looked at again


# --------------------------------------------------------------------------------------- DATA
def open_data(task, cfg):
    """Task.data(), on rank 0 first, because it may download. Collective."""
    start_hang_timer(cfg)
    data_sets = []

    def open_all():
        seed_generators(cfg.seed)  # for data sets that are divided at random
        data_sets.extend(task.data(cfg))

    on_rank_0(open_all)
    if not is_rank_0():
        open_all()
    given = [data_set for data_set in data_sets if data_set is not None]
    for data_set in given:
        if isinstance(data_set, IterableDataset):
            raise UserError("an IterableDataset has no index: use a data set with __getitem__()")
        if len(data_set) == 0:
            raise UserError("a data set has no samples: is --data-dir right?")
    seen = gather([[len(data_set) for data_set in given], task.spec])
    for rank, other in enumerate(seen):
        if other != seen[0]:
            raise UserError(
                f"rank {rank} sees {other[0]} samples (training, test), rank 0 {seen[0][0]}, or "
                "another Task.spec: the ranks need the same --data-dir"
            )
    return data_sets


class InMemoryDataset(TensorDataset):
    """Tensors with the same first dimension, which are copied to the device of each rank."""


class SeededDataset(Subset):
    """Seeds torch, numpy and random for each micro-batch, so that its augmentation does not depend
    on the loader worker that reads it, nor on what it has read before.

    A data set with a generator of its own gets the seed by its method seed_sample(seed).
    """

    def __init__(self, dataset: Dataset, seed: int):
        super().__init__(dataset, range(len(dataset)))
        self.seed = seed

    def __getitems__(self, keys: list[int]) -> list:
        """The samples of a micro-batch, for keys of SampleStream; the DataLoader calls it."""
        seed = derive_seed(self.seed, "augmentation", keys[0])
        seed_generators(seed)
        if hasattr(self.dataset, "seed_sample"):
            self.dataset.seed_sample(seed)
        return super().__getitems__([key % len(self.dataset) for key in keys])


def derive_seed(*parts) -> int:
    """A 63-bit seed from numbers and words; neighboring numbers give unrelated seeds."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, device: torch.device | None = None):
    """Seed torch's generator, and that of the device; without a device, numpy's and random's."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would seed every backend
    if device is None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class SampleStream:
    """Which samples each step uses. A function of the step alone: there is no state to save.

    The training set is used again and again, each time in a new order. Step s uses the
    samples s * G to (s + 1) * G - 1 of this endless stream, where G is the global batch: all steps
    are equally large, and one may begin in one epoch and end in the next. It has C = G / b
    micro-batches. Rank r of W computes those from C * r // W to C * (r + 1) // W - 1: of 4
    micro-batches, 3 ranks compute 1, 1 and 2. It replaces DistributedSampler.
    """

    def __init__(self, samples: int, cfg, world):
        self.samples = samples
        self.cfg = cfg
        self.micro_batches_per_step, rest = divmod(cfg.global_batch_size, cfg.batch_size)
        ranks, count = world.world_size, self.micro_batches_per_step
        if rest or count < ranks or cfg.global_batch_size > samples:
            raise UserError(
                f"a global batch of {cfg.global_batch_size} samples does not fit: it needs whole "
                f"micro-batches of {cfg.batch_size}, at least one for each of {ranks} ranks, and "
                f"at most the {samples} samples of the training set (a resumed run keeps its "
                "global batch; another --checkpoint-dir starts a new one)"
            )
        self.micro_batches = range(count * world.rank // ranks, count * (world.rank + 1) // ranks)
        log_on_rank_0(
            f"Global batch {cfg.global_batch_size} = {count} x {cfg.batch_size}; "
            f"{samples / cfg.global_batch_size:.4g} steps per epoch"
        )

    def epochs_done(self, step: int) -> int:
        """The complete passes over the training set after this many steps."""
        return step * self.cfg.global_batch_size // self.samples

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is complete after this number of steps, and was not one step before."""
        beyond = step * self.cfg.global_batch_size % self.samples
        return step > 0 and beyond < self.cfg.global_batch_size

    def ends_interval(self, step: int, every: int | None) -> bool:
        """Whether an epoch, or an interval of so many steps, is complete after this step."""
        return self.ends_epoch(step) or (every is not None and step > 0 and step % every == 0)

    def order(self, epoch: int):
        """The keys of this epoch's samples in their order; a key is epoch * samples + index."""
        generator = torch.Generator().manual_seed(derive_seed(self.cfg.seed, "order", epoch))
        return torch.randperm(self.samples, generator=generator) + epoch * self.samples

    def keys(self, step: int, device):
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


def batches_of(task, cfg, world, dataset, keys: Callable):
    """Micro-batches on the device of this rank; keys(device) yields the keys int64 [b] of each."""
    if type(dataset) is InMemoryDataset:  # a subclass may change the samples
        tensors = [tensor.to(world.device) for tensor in dataset.tensors]
        for micro_batch in keys(world.device):
            rows = micro_batch % len(dataset)
            yield [tensor[rows] for tensor in tensors]
        return
    lists = (micro_batch.tolist() for micro_batch in keys("cpu"))
    side = None
    if world.device.type == "cuda":
        side = torch.cuda.Stream()
        current = torch.cuda.current_stream()

    def to_device(tensor):
        copy = tensor.to(world.device, non_blocking=True)
        if side:
            copy.record_stream(current)  # until the step is done, the memory is not reused
        return copy

    for batch in get_dataloader(task, cfg, world, dataset, lists):
        with torch.cuda.stream(side):  # copy it while the previous step runs
            batch = tree_map_only(torch.Tensor, to_device, batch)
        if side:
            current.wait_stream(side)
        yield batch


def get_dataloader(task, cfg, world, dataset, batch_sampler) -> DataLoader:
    """Yields one micro-batch at a time, as the data set's samples, each stacked to [b, ...]."""
    workers = cores_of_rank() if cfg.num_workers is None else cfg.num_workers
    options = {
        "num_workers": workers,
        "worker_init_fn": live_as_long_as_the_rank,
        "collate_fn": stack_samples,
        "pin_memory": world.device.type != "cpu",
    }
    if workers and len(tempfile.gettempdir()) > 70:
        raise UserError("TMPDIR is too long for the sockets of loader workers: set a shorter one")
    if workers and sys.platform == "linux":  # a signal would end Python 3.14's forkserver
        options["multiprocessing_context"] = "fork"
    options |= task.loader_options()
    return DataLoader(SeededDataset(dataset, cfg.seed), batch_sampler=batch_sampler, **options)


def stack_samples(samples):
    """The DataLoader's own collate_fn, with a remedy where it fails."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        remedy = "set a collate_fn in Task.loader_options()"
        raise UserError(f"samples cannot be stacked: {remedy} ({error})") from None


def cores_of_rank() -> int:
    """The cores of this rank: those it is bound to, at most its share of the machine, and 16."""
    cores = (os.cpu_count() or 1) // launch_variable("LOCAL_WORLD_SIZE", 1)
    if hasattr(os, "sched_getaffinity"):  # Linux; scripts/guard.py and Slurm bind a rank
        cores = min(cores, len(os.sched_getaffinity(0)))
    return min(16, max(1, cores))


def live_as_long_as_the_rank(_worker):
    """Schedulers signal all processes of a job, but a rank needs its workers until it stops."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if sys.platform == "linux":  # a worker that reads without an end would outlive it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>


# -------------------------------------------------------------------------------- DISTRIBUTED
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
        timeout = timedelta(seconds=cfg.hang_timeout)
        bound_device = None if backend == "gloo" else device
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
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


def launch_variable(name: str, default: int) -> int:
    return int(os.environ.get(name) or default)


def is_rank_0() -> bool:
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
    elif "GLIBC_TUNABLES" not in os.environ:  # by which a user may have set malloc
        keep_freed_memory()
    if cfg.reproducible:
        torch.set_num_threads(1)  # on a CPU: with more, some kernels sum in another order


def keep_freed_memory():
    """Let glibc keep up to 384 MiB: each step would get the same pages from the kernel anew."""
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 384 * 2**20)  # M_TRIM_THRESHOLD of <malloc.h>
        libc.mallopt(-4, 0)  # M_MMAP_MAX: also large blocks come from the memory that is kept


class LossOf(nn.Module):
    """Task.loss() as a module for DDP: loss() gets the plain model on any number of ranks.

    If DDP wrapped the model, model.encoder(x) in loss() would work on one rank only.
    """

    def __init__(self, task, cfg, world, model: nn.Module):
        super().__init__()
        self.task = task
        self.model = model
        dtype = torch.float16 if cfg.amp == "fp16" else torch.bfloat16
        enabled = cfg.amp != "off"
        self.autocast = functools.partial(torch.autocast, world.device.type, dtype, enabled)

    def forward(self, batch):
        with self.autocast():
            return self.task.loss(self.model, batch)


def settle_buckets(ddp: DistributedDataParallel):
    """A first backward pass, after which DDP regroups the gradients for good. Collective.

    In a resumed run, that would happen at another step than in a run that was never stopped, and
    change the rounding. It skips the forward pass of the model, which may keep what it computes
    in its first one, and uses no data: only zeros of the parameters.
    """
    ddp.broadcast_buffers = False  # evaluate() does it (deprecated as an argument)
    if ddp.static_graph:  # it would note which parameters are used
        return

    def zero(_batch):
        return sum(p.sum().abs() * 0 for p in ddp.parameters() if p.requires_grad)

    ddp.module.forward = zero
    ddp(None).backward()
    del ddp.module.forward  # that of the class again
    ddp.zero_grad()


def on_rank_0(function: Callable, *arguments):
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


class ExactGradients:
    """For --reproducible: the gradients of a step add up to the same bits on any number of ranks.

    Those of each micro-batch are rounded to multiples of 2**-40, the last bit of a float64 from
    2**12 to 2**13. Sums below 2**13 are then exact, in any order; larger ones become NaN.
    """

    ROUNDING = 1.5 * 2**12  # the last bit of a float64 from 2**12 to 2**13 is 2**-40

    def __init__(self, optimizer, scaler):
        self.scale = scaler.get_scale()  # of fp16, else 1
        self.totals = {}
        for p in parameters_of(optimizer):
            dtype = torch.promote_types(p.dtype, torch.float64)
            self.totals[p] = torch.zeros_like(p, dtype=dtype)

    def divide_by(self, count):
        """Before gradients of sums over items are rounded, divide them by this number of rank 0.

        Collective.
        """
        count = count.double().clamp(min=1)
        if dist.is_initialized():
            dist.broadcast(count, 0)
        self.scale = self.scale * count

    def add_micro_batch(self):
        """Move the gradients of a micro-batch from .grad to the totals."""
        for p, total in self.totals.items():
            if p.grad is not None:
                gradient = p.grad.to(total.dtype) / self.scale
                total.add_(gradient + self.ROUNDING - self.ROUNDING)
                p.grad = None

    def write_gradients(self):
        """Add the totals of all ranks and write them to .grad. Collective."""
        for p, total in self.totals.items():
            if dist.is_initialized():
                dist.all_reduce(total)
            total.masked_fill_(total.abs() >= 2.0**13, math.nan)
            p.grad = (total * self.scale).to(p.dtype)


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
class Sync:
    """At some steps, the ranks add up their metrics, and agree on whether to stop or to save.

    It makes the host wait for the GPU, and shows that all ranks live: after --hang-timeout seconds
    without one, a rank prints its stacks and exits.
    """

    SECONDS = 1  # between two exchanges; or one step, if that takes longer

    def __init__(self, cfg, world):
        self.cfg = cfg
        self.world = world
        # What loss() has returned since the last exchange, by (interval, name).
        self.columns = defaultdict(list)
        self.steps_between = 1  # from one exchange to the next
        # By step, if it is recorded: learning rate, and norm of the gradient before clipping.
        self.recorded = {}
        self.restart(0)

    def restart(self, step: int):
        """Start the clock again, for example after a save."""
        start_hang_timer(self.cfg)
        self.step = step
        self.time = time.monotonic()
        self.seconds_waited = 0.0

    def is_due(self, step: int) -> bool:
        """The same on all ranks."""
        return step >= self.step + self.steps_between

    def add(self, interval, values):
        """Keep numbers, and tensors without dimensions, without waiting for the GPU."""
        for name, value in values.items():
            number = value.detach() if isinstance(value, torch.Tensor) else value
            self.columns[interval, name].append(number)

    def take_sums(self):
        """{(interval, name): sum of what was added}, in the same order on all ranks.

        In float64. That of "loss" counts each mean loss as often as its items.
        """
        numbers = {}
        for key, column in sorted(self.columns.items()):
            is_tensor = isinstance(column[0], torch.Tensor)  # then it waits for the GPU
            numbers[key] = torch.stack(column).tolist() if is_tensor else column
        self.columns.clear()
        sums = {}
        for (interval, name), column in numbers.items():
            counts = numbers[interval, "count"]
            if len(column) != len(counts):
                raise UserError(f"Task.loss() must return the same sums each time, also {name}")
            if name == "loss":
                column = [loss * count for loss, count in zip(column, counts)]
            sums[interval, name] = float(sum(column))
        return sums

    def all_reduce(self, step: int, requests: list[str]):
        """({interval: sums over all ranks}, why to stop or "", the requests of any rank).

        Collective.
        """
        start_hang_timer(self.cfg)
        sums = self.take_sums()
        numbers = {"elapsed": time.monotonic() - self.time, "waited": self.seconds_waited, **sums}
        for request in REQUESTS:
            numbers[request] = request in requests
        if self.world.world_size > 1:
            vector = torch.tensor([*numbers.values()], dtype=torch.float64).to(self.world.device)
            dist.all_reduce(vector)
            numbers = dict(zip(numbers, vector.tolist()))
        agreed = [request for request in REQUESTS if numbers[request]]
        reason = next((request for request in agreed if request in STOP_REASONS), "")
        steps = max(1, step - self.step)
        self.seconds_per_step = numbers["elapsed"] / steps / self.world.world_size
        self.data_wait = numbers["waited"] / numbers["elapsed"]  # the share of the time
        # The first steps are slow: approach the right number by doubling it.
        self.steps_between = max(1, min(2 * steps, int(self.SECONDS / self.seconds_per_step)))
        totals = defaultdict(dict)
        for interval, name in sums:
            totals[interval][name] = numbers[interval, name]
        return totals, reason, agreed


def start_hang_timer(cfg):
    """After --hang-timeout, unless it is started again, print all stacks and exit."""
    # 2: sys.stderr may be closed, or replaced by something that is no file.
    faulthandler.dump_traceback_later(cfg.hang_timeout, exit=True, file=2)


class MetricsWriter:
    """Prints metrics and writes them to metrics.jsonl, TensorBoard and W&B, on rank 0.

    metrics.jsonl has a line of JSON for each record. After a crash it may have a step twice: the
    last record counts.
    """

    def __init__(self, task, cfg, saver):
        self.task = task
        self.cfg = cfg
        self.stream = saver.stream
        self.path = saver.directory / "metrics.jsonl"
        self.board = None  # of TensorBoard
        self.wandb = None
        on_rank_0(self.open, saver)

    def open(self, saver):
        options = vars(self.cfg) | {"config": None}
        text = f"# {saver.code}\n{yaml.safe_dump(options)}".encode()
        write_file(self.path.with_name("config.yaml"), lambda file: file.write(text))
        if self.cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # it takes time

            self.board = SummaryWriter(self.path.with_name("tensorboard"))
        if self.cfg.wandb:
            import wandb

            self.wandb = wandb.init(
                id=saver.run_id, resume="allow", dir=self.path.parent, config=options
            )

    def record_intervals(self, state, totals, sync, seconds_left):
        """Add the totals of Sync to the state. Record the intervals that are complete."""
        every = self.cfg.log_every_steps
        for interval, sums in totals.items():
            end = min(interval * every + every, state.step)
            check_loss(sums, f"in the steps {interval * every + 1} to {end}")
            state.epoch_sums.update(sums)  # a Counter adds
            state.interval_sums.update(sums)
            if not self.stream.ends_interval(end, every):
                continue
            values = report(self.task, state.interval_sums)
            state.interval_sums = Counter()
            rate = self.cfg.global_batch_size / sync.seconds_per_step
            epoch = end * self.cfg.global_batch_size / self.stream.samples
            left = timedelta(seconds=round(seconds_left))
            line = f"  step {end}: {describe(values)}, {rate:.0f} samples/s, epoch {epoch:.2f}"
            log_on_rank_0(f"{line}, {left} left at {time.strftime('%H:%M:%S')}")
            lr, norm = sync.recorded.pop(end)
            values |= {
                "lr": lr,
                "samples_per_second": rate,
                "data_wait": sync.data_wait,  # share of the time
                "gradient_norm": float(norm),
                "seconds_left": seconds_left,
                "gpu_memory_gb": torch.cuda.max_memory_allocated() / 1e9,  # at its peak
            }
            self.record("train", end, values)

    def record_evaluation(self, state, test_sums):
        """Record an evaluation, and at its end the epoch. Returns the metrics of the test set.

        For rank 0. Both are empty without a test set.
        """
        test_values = {}
        if test_sums:
            check_loss(test_sums, "in the evaluation")
            test_values = report(self.task, test_sums)
        values = {f"test_{name}": value for name, value in test_values.items()}
        # No sums: recorded by a run that saved only afterwards.
        if state.epoch_sums and self.stream.ends_epoch(state.step):
            epoch = self.stream.epochs_done(state.step)
            values = report(self.task, state.epoch_sums) | values
            log(f"Epoch {epoch}: {describe(values)}")
            self.record("epoch", state.step, {"epoch": epoch, **values})
            state.epoch_sums = Counter()
        elif values:
            log(f"  step {state.step}: {describe(values)}")
            self.record("evaluation", state.step, values)
        return test_values

    def record(self, kind: str, step: int, values: dict):
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
    """Task.report(), whose values may also be tensors or numbers of NumPy."""
    return {name: float(value) for name, value in task.report(dict(sums)).items()}


def check_loss(sums, where):
    """UserError if the sum of the losses is not finite; the same on all ranks."""
    if not math.isfinite(sums["loss"]):
        raise UserError(
            f"the loss is not finite {where}: lower --lr, or set --clip-grad-norm", "NaN"
        )


def describe(values):
    return ", ".join(f"{name} {value:.5g}" for name, value in values.items())


def log(text, stream=None):
    """Print a line. If the output cannot be written, discard it and continue training."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:  # a closed terminal, a `tee` killed by Ctrl-C, a full disk under the log
        with suppress(AttributeError, OSError):  # not a file of the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(text):
    log(f"WARNING: {text}", sys.stderr)


def log_on_rank_0(text: str):
    if is_rank_0():
        log(text)


# ----------------------------------------------------------------------------------- STOPPING
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
STOP_REASONS = [*[number.name for number in STOP_SIGNALS], "STOP file", "time limit"]
REQUESTS = [*STOP_REASONS, "SAVE", "PROFILE"]


class StopRequests:
    """Reasons to stop: signals, files and the clock. A second Ctrl-C ends the process."""

    def __init__(self, cfg):
        self.signal = ""  # the name of the first one
        self.signal_time = 0.0
        stop_file = run_directory(cfg) / "STOP"
        self.files = [stop_file, Path(os.environ.get("STOP_FILE") or stop_file)]
        end = os.environ.get("DEADLINE") or os.environ.get("SLURM_JOB_END_TIME") or "inf"
        time_left = float(end) - time.time()
        if time_left < 0:  # of a Slurm job that has ended, in whose terminal this was started
            warn("ignored a DEADLINE or SLURM_JOB_END_TIME that is over")
            time_left = math.inf
        self.deadline = time.time() + max(time_left - 120, 0.9 * time_left)  # time to save
        for number in STOP_SIGNALS:
            under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _frame):
        if not self.signal:
            self.signal = signal.Signals(number).name
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
LOCK_SECONDS = 120  # to wait for another process to leave the run directory


def lock_directory(cfg) -> int:
    """Let only one process train in --checkpoint-dir. For rank 0.

    Returns a file descriptor: the kernel frees the lock when it is closed, or when the process and
    its loader workers have ended.
    """
    directory = run_directory(cfg)
    file = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        for waited in range(LOCK_SECONDS + 1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                text = f"{directory} is in use by {file.read_text()}"
            except OSError as error:
                warn(f"no lock against a second process in this directory ({error})")
                break
            if waited == LOCK_SECONDS:
                remedy = "stop that process, or set another --checkpoint-dir"
                raise UserError(f"{text}: {remedy}", "in use")
            if waited == 0:
                log(f"{text}: waiting for its end, up to {LOCK_SECONDS} s")
            time.sleep(1)
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        for leftover in [*directory.glob(".checkpoint_*.tmp"), directory / "STOP"]:
            leftover.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to or lock --checkpoint-dir {directory} ({error})") from None
    return lock


def write_file(path: Path, write: Callable):
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

    def restore(self, path: Path, checkpoint: dict, state, model, optimizer, scaler):
        """Continue from the checkpoint."""
        refuse_changes(self.cfg, checkpoint, self.identity)
        model.load_state_dict(checkpoint["model"])
        fresh_groups = [dict(group) for group in optimizer.param_groups]
        # Not tensors that are mapped: a deleted file would keep its place on the disk.
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        # What the optimizer has learned is part of the run, but options apply as they are now.
        for group, fresh in zip(optimizer.param_groups, fresh_groups):
            options = {"initial_lr", *vars(self.cfg)}
            group.update({name: fresh[name] for name in options & fresh.keys()})
        if checkpoint["scaler"]:  # of fp16
            scaler.load_state_dict(checkpoint["scaler"])
        vars(state).update(checkpoint["state"])
        self.newest = path
        self.start_step = state.step
        if path.parent == self.directory:
            self.run_id = checkpoint["run_id"]
            self.saved_step = state.step
        else:
            state.best_score = -math.inf  # best.pt is the best of its directory

    def poll(self):
        """On rank 0: SAVE, by the clock or by a file, and PROFILE, whose file it removes."""
        requests = []
        if is_rank_0():
            is_late = time.monotonic() > self.last_save + 60 * self.cfg.save_minutes
            if is_late or (self.directory / "SAVE").exists():
                requests.append("SAVE")
            profile = self.directory / "PROFILE"
            if profile.exists():
                profile.unlink()
                requests.append("PROFILE")
        return requests

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
        if not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f"{name} not saved: the weights are not finite; lower --lr", "NaN")
        content = {
            **self.identity,
            "config": vars(self.cfg),
            "run_id": self.run_id,
            "state": vars(state),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }
        content["digests"] = digests_in(content)
        self.newest = self.directory / name

        def write(file):
            torch.save(content, file)
            file.flush()
            try:
                open_checkpoint(file.name)  # what cannot be loaded ends the run now, not later
            except pickle.UnpicklingError as error:
                kind = str(error).rpartition("GLOBAL ")[2].partition(" was not")[0]
                raise UserError(
                    f"a checkpoint cannot hold {kind}, only numbers, texts and tensors"
                ) from None

        try:
            write_file(self.newest, write)
            self.has_failed = False
            self.saved_step = state.step
            self.write_status(state.step, "running", seconds_left=seconds_left)
            paths = checkpoints_in(self.directory)
            paths.sort(key=lambda path: (path == self.newest, path.lstat().st_mtime))
            for old in paths[: -self.cfg.keep]:  # this one is always among those that stay
                old.unlink(missing_ok=True)
        except UserError as error:
            if self.has_failed or error.cause != "disk":
                raise
            self.has_failed = True
            warn(f"{error}")
        self.last_save = time.monotonic()
        (self.directory / "SAVE").unlink(missing_ok=True)

    def save_best(self):
        """Keep the newest checkpoint as best.pt, beside the others. For rank 0."""
        temporary = self.directory / ".checkpoint_best.tmp"
        try:
            os.link(self.newest, temporary)
            temporary.replace(self.directory / "best.pt")
        finally:
            temporary.unlink(missing_ok=True)  # it stays if best.pt is that file already

    def write_status(self, step: int, state: str, reason: str = "", seconds_left=None):
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
        for path in [self.directory / "status.json", os.environ.get("STATUS_FILE")]:
            if path:
                write_file(Path(path), lambda file: file.write(text))


def checkpoints_in(directory: Path):
    """Not copies such as checkpoint_epoch_3_good.pt."""
    name = re.compile(r"checkpoint_(epoch|step)_\d+\.pt")
    return [path for path in directory.iterdir() if name.fullmatch(path.name)]


def find_checkpoint(cfg) -> Path | None:
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
    return Path(cfg.resume) if cfg.resume else None


def step_of(path: Path):
    """Infinity if it cannot be loaded: find_checkpoint() then comes to it first, and names it."""
    with suppress(Exception):
        return open_checkpoint(path)["state"]["step"]
    return math.inf


def open_checkpoint(path: Path):
    """Its content, mapped into memory: a tensor is read when it is used."""
    with zipfile.ZipFile(path) as archive:
        (rest,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        archive.read(rest)  # all but the tensors: BadZipFile if it has changed
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def load_checkpoint(path: Path):
    """open_checkpoint(), or a UserError if the file is not as it was saved."""
    try:
        checkpoint = open_checkpoint(path)
        digests = checkpoint["digests"]  # empty in a file of weights that was converted
        if digests and digests != digests_in(checkpoint):
            raise ValueError("a tensor is not as it was saved")
        return checkpoint
    except (FileNotFoundError, PermissionError) as error:
        text = f"{socket.gethostname()} cannot read {path} ({error.strerror})"
        raise UserError(f"{text}: is it there, in a directory that all nodes see?") from None
    except Exception as error:  # a file can be damaged in many ways
        text = f"{path} is damaged, or of another version of the trainer"
        raise UserError(f"{text} ({type(error).__name__}: {error})") from None


def digests_in(checkpoint: dict):
    """Of all tensors in it, which may be on several devices."""
    leaves = tree_leaves(checkpoint)
    return [digests_of([leaf]).item() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def load_initial_weights(cfg, model):
    """--init: the weights of another run; says which do not fit the model."""
    weights = load_checkpoint(Path(cfg.init))["model"]
    own = model.state_dict()
    fitting = {}
    for name, weight in weights.items():
        if torch.is_tensor(weight) and name in own and weight.shape == own[name].shape:
            fitting[name] = weight
    model.load_state_dict(fitting, strict=False)
    others = ", ".join(sorted((own.keys() | weights.keys()) - fitting.keys()))
    log_on_rank_0(f"Weights of {cfg.init}: {len(fitting)} taken; not: {others or 'none'}")


def load_model(path: str, task: Task | None = None, device: str = "cpu") -> nn.Module:
    """The trained model of a checkpoint, for prediction: it takes inputs as the data set has them.

    task: that of the training; the default is this file's. Its data is not needed. Sets task.spec.
    """
    task = task or Task()
    checkpoint = load_checkpoint(Path(path))
    name = type(task).__name__
    if checkpoint["task"] != name:
        raise UserError(f"{path} is of the task {checkpoint['task']}, not {name}: pass that task")
    task.spec = checkpoint["spec"]
    options = {action.dest: action.default for action in build_parser(task)._actions}
    options |= checkpoint["config"]  # which lacks options that were added later
    model = task.model(argparse.Namespace(**options))
    model.load_state_dict(checkpoint["model"])
    model.requires_grad_(False)
    return model.to(device).eval()


# ------------------------------------------------------------------------------------ OPTIONS
# What may change in a run at any time:
FREE_OPTIONS = {"config", "evaluate", "checkpoint_dir", "resume", "init", "epochs", "stop_at_step"}
FREE_OPTIONS |= {"data_dir", "num_workers", "log_every_steps", "tensorboard", "wandb", "keep"}
FREE_OPTIONS |= {"checkpoint_every_steps", "save_minutes", "nodes", "gpus_per_node"}
FREE_OPTIONS |= {"distributed_backend", "hang_timeout", "eval_every_steps", "patience"}
# What never changes in a run:
FIXED_OPTIONS = {"seed", "batch_size", "global_batch_size", "optimizer", "dataset"}
FIXED_OPTIONS |= {"task", "spec", "samples"}  # see Saver.identity


class UserError(Exception):
    """Something the user can fix: printed as one sentence, without a traceback."""

    def __init__(self, text: str, cause: str = "configuration"):
        text = text.rpartition("UserError: ")[2]  # a loader worker's comes with its traceback
        super().__init__(" ".join(text.split()))
        self.cause = cause  # for scripts/supervise.py: after "disk", a restart may help


def run_directory(cfg) -> Path:
    return Path(cfg.checkpoint_dir or "checkpoints")


def refuse_changes(cfg, checkpoint: dict, identity: dict):
    """UserError if options, or the identity of the run, have changed in a way that is not allowed.

    Without --checkpoint-dir, a second experiment would continue the first one by mistake.
    """
    before = checkpoint["config"] | {name: checkpoint[name] for name in identity}
    changes = {}
    for name, now in (vars(cfg) | identity).items():
        if name not in FREE_OPTIONS and name in before and before[name] != now:
            changes[name] = f"{name} {before[name]} -> {now}"
    text = ", ".join(changes.values())
    refused = FIXED_OPTIONS & changes.keys() if cfg.checkpoint_dir else changes.keys() - {"code"}
    if refused:
        fixed = ", ".join(sorted(FIXED_OPTIONS))
        raise UserError(
            f"the options of this run have changed ({text}): set another --checkpoint-dir for a "
            f"new one, or --checkpoint-dir {run_directory(cfg)} to continue it; "
            f"{fixed} cannot change"
        )
    if changes:
        log_on_rank_0(f"Changed since the checkpoint: {text}")


def did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return f", did you mean {near[0]}?" if near else ""


def code_version() -> str:
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

    def error(self, message: str):
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        hint = did_you_mean(unknown[1], [*self._option_string_actions]) if unknown else ""
        raise UserError(message + hint)


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
    option("--init", path, "FILE.pt: begin with the weights of another run")
    option("--epochs", positive_int, "passes over the training data [5]", 5)
    option("--stop-at-step", positive_int, "save and exit at this step; same schedule")
    option("--seed", int, "random seed [42]", 42)
    switch("--deterministic", help="repeatable kernels, slower on a GPU")
    switch("--reproducible", help="the same weights on any number of ranks")
    option("--data-dir", path, "where the data is or is downloaded to [data]", "data")
    option("--num-workers", int, "loader workers, for files [cores of a rank]")
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
    option("--eval-every-steps", positive_int, "evaluate every N steps and each epoch")
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
    return parser


def path(text: str) -> str:
    """Replaces ~ and $VARIABLES, which a shell does not do after =, nor YAML at all."""
    text = os.path.expandvars(os.path.expanduser(text))
    if "$" in text:  # of a variable that is not set
        raise ValueError
    return text


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError  # argparse then names the option, this function and the text
    return number


def not_negative(text: str) -> float:
    number = float(text)
    if not number >= 0:  # also if it is NaN
        raise ValueError
    return number


def fraction(text: str) -> float:
    if float(text) > 1:
        raise ValueError
    return not_negative(text)


def parse_config(argv: list[str], task: Task | None = None) -> argparse.Namespace:
    """The options. The command line overrides the file --config, which overrides the defaults.

    With --evaluate, the options of that checkpoint are the defaults.
    """
    parser = build_parser(task or Task())
    files = Parser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", type=path)
    files.add_argument("--evaluate", type=path)
    given, _ = files.parse_known_args(argv)
    words = []
    if given.evaluate:  # the launchers also name a config, but a checkpoint has its own options
        saved = load_checkpoint(Path(given.evaluate))["config"]
        parser.set_defaults(**saved | {"nodes": None, "gpus_per_node": None})
    elif given.config:
        words = read_config(given.config, parser)
    return parser.parse_args(words + argv)


def read_config(file: str, parser) -> list[str]:
    """The words of a command line for a YAML file like `epochs: 5`: ["--epochs=5"]."""
    try:
        # All values are texts: `amp: off` stays "off", and nothing in the file is executed.
        options = yaml.load(Path(file).read_text(encoding="utf-8"), yaml.BaseLoader) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read --config {file} ({error})") from None
    if not isinstance(options, dict):
        raise UserError(f"--config {file}: it needs lines like `epochs: 5`")
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        action = parser._option_string_actions.get(flag)  # None: argparse will refuse the flag
        is_switch = action and action.nargs == 0
        text = str(value).lower()
        if value in ("", "null", "~"):  # the default
            continue
        if isinstance(value, list):
            words += [flag, *map(str, value)]
        elif is_switch and text == "true":
            words.append(flag)
        elif is_switch and text == "false":
            words += [word for word in action.option_strings if word.startswith("--no-")]
        else:
            words.append(f"{flag}={value}")
    return words


# --------------------------------------------------------------------------------------- MAIN
def main(task: Task | None = None, argv: list[str] | None = None):
    """Train or evaluate as the command line says. A script of your own calls main(MyTask())."""
    task = task or Task()
    try:
        cfg = parse_config(sys.argv[1:] if argv is None else argv, task)
        configure_torch(cfg)
        world = setup_distributed(cfg)
        if cfg.evaluate:
            evaluate_checkpoint(task, cfg, world)
        else:
            train(task, cfg, world)
    except UserError as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # its launcher may end this rank
        if not is_rank_0():
            time.sleep(5)  # let rank 0 exit first: then its launcher ends this rank
        log(f"{Path(sys.argv[0]).name}: error: {error}", sys.stderr)
        raise SystemExit(2) from error
    finally:
        faulthandler.cancel_dump_traceback_later()  # a script may go on after main()
        gc.enable()
        gc.unfreeze()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else PyTorch raises an error at the exit
        for worker in multiprocessing.active_children():
            worker.kill()  # of a DataLoader; exit would wait for it
    if dist.is_initialized():
        time.sleep(0.2)  # for gloo: pytorch issue 179291
        dist.destroy_process_group()  # not after an error: it might wait for other ranks


if __name__ == "__main__":
    main()
