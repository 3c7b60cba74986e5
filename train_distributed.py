#!/usr/bin/env python3
"""Train a model with PyTorch DistributedDataParallel (DDP), in one file.

    python train_distributed.py                                     # one process: a laptop, one GPU
    torchrun --standalone --nproc-per-node 4 train_distributed.py   # one machine with four GPUs
    srun -n 4 python scripts/guard.py train_distributed.py          # Slurm: one task for each GPU

Your data, model, optimizer, loss and metrics replace those of the class Task, just below: edit it,
or subclass it in a file of your own (see examples/) that ends with main(MyTask()).

A rank is one process with one GPU. Every rank must call each function marked "collective", or the
other ranks hang. A step consumes --global-batch-size samples, in micro-batches of --batch-size that
are divided among the ranks. The samples of a micro-batch, their augmentation and the dropout mask
depend only on the step and on its index: any number of ranks, and resumed runs, see the same ones.

To save and stop: Ctrl-C; SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 to any rank; a file STOP in
--checkpoint-dir, or the file $STOP_FILE; the time $DEADLINE (seconds since 1970). To save and
continue: a file SAVE in --checkpoint-dir. To resume, run the same command. To use the trained
model, see load_model(). Exit code: 0 finished or saved; 2 user error; 130 second Ctrl-C.

Sections: TASK, TRAINING, SET-UP, DATA, DISTRIBUTED, METRICS, CHECKPOINTS, STOPPING, MESSAGES,
OPTIONS, MAIN
"""

from __future__ import annotations

import argparse
import copy
import difflib
import errno
import faulthandler
import fcntl
import functools
import importlib
import io
import json
import math
import multiprocessing
import os
import random
import re
import reprlib
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # of any number of dimensions
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_convert


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


class Task:
    """What is trained: image classification. Yours replaces it; override what differs."""

    # What losses() returns: sums over the items of a batch. They are added over all ranks.
    sums = ("loss", "count", "correct")
    # Plain values that data() learns and that the model or predict() needs; part of checkpoints.
    spec: dict = {}
    # Whether losses() exchanges data with the other ranks, as a contrastive loss does. All ranks
    # then get equally many micro-batches: the short last step of an epoch is dropped.
    across_ranks = False

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Options of this task: on the command line, in config files and in checkpoints."""
        add = parser.add_argument
        datasets = ["mnist_sample", "mnist", "imagefolder", "synthetic"]
        add("--dataset", choices=datasets, default="mnist_sample", help="[mnist_sample]")
        add("--image-size", type=image_size, help="pixels per side [28 for MNIST, else 224]")
        add(
            "--model", default="simple_convnet", help="[simple_convnet] or a torchvision classifier"
        )
        add("--dropout", type=fraction, default=0.25, help="dropout of simple_convnet [0.25]")

    def data(self, cfg: argparse.Namespace) -> tuple[Dataset, Dataset]:
        """(training set, test set): map-style data sets of tuples, dicts or tensors.

        A data set of tensors in memory is fastest as an InMemoryDataset. Others are read by
        --num-workers processes.
        """
        channels, size = self.image_shape(cfg)
        if cfg.dataset == "synthetic":
            self.spec = IMAGENET_PIXELS | {"classes": [str(label) for label in range(1000)]}
            return synthetic_images(size, cfg.seed)
        if cfg.dataset == "imagefolder":
            root = Path(cfg.data_dir)
            needed = f"{root}/train/CLASS/ and val/CLASS/"
            with explain(f"cannot read --dataset imagefolder: it needs {needed}", OSError):
                train, test = image_folders(root, size)
            self.spec = IMAGENET_PIXELS | {"classes": train.classes}
            return train, test
        self.spec = MNIST_PIXELS | {"classes": [str(digit) for digit in range(10)]}
        root = Path(__file__).with_name("data") / "mnist_sample"  # comes with this file
        if cfg.dataset == "mnist":
            root = Path(cfg.data_dir)
        cannot_read = f"cannot read --dataset {cfg.dataset}; is it in {root}?"
        with explain(cannot_read, OSError, RuntimeError, ValueError):
            if cfg.dataset == "mnist":
                import_package("torchvision", "--dataset mnist").datasets.MNIST(root, download=True)
            train = read_mnist(root / "MNIST/raw", "train", channels, size)
            test = read_mnist(root / "MNIST/raw", "t10k", channels, size)
        return train, test

    def image_shape(self, cfg: argparse.Namespace) -> tuple[int, int]:
        """(channels, pixels per side). The models of torchvision take three channels."""
        is_mnist = cfg.dataset in ("mnist", "mnist_sample")
        channels = 1 if is_mnist and cfg.model == "simple_convnet" else 3
        default_size = 28 if is_mnist else 224
        return channels, cfg.image_size or default_size

    def model(self, cfg: argparse.Namespace) -> nn.Module:
        """Images [b, channels, size, size] -> logits [b, classes]."""
        classes = len(self.spec["classes"])
        if cfg.model == "simple_convnet":
            channels, size = self.image_shape(cfg)
            if size < 6:
                raise UserError(f"--image-size {size} is too small for simple_convnet: at least 6")
            model = SimpleConvNet(channels, size, classes, cfg.dropout)
        else:
            models = import_package("torchvision.models", f"--model {cfg.model}")
            names = models.list_models(models)
            if cfg.model not in names:
                text = f"--model {cfg.model} is not a classifier in torchvision.models"
                raise UserError(text + did_you_mean(cfg.model, names))
            model = models.get_model(cfg.model, num_classes=classes)
        return model.to(memory_format=torch.channels_last)  # convolutions are faster

    def optimizer(self, cfg: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
        """The learning rate of each parameter group is its peak: see lr_factor()."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        options = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "fused": True}  # fused is faster
        if cfg.optimizer == "adamw":
            return torch.optim.AdamW(parameters, **options)
        sgd = torch.optim.SGD(parameters, momentum=0.9, **options)
        for p in parameters:
            # Fused SGD would not initialize the momentum in a first step that GradScaler skips.
            sgd.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        return sgd

    def lr_factor(self, cfg: argparse.Namespace, step: int, steps_per_epoch: int) -> float:
        """What the peak learning rates are multiplied by: linear warm-up, then a cosine to 0."""
        warmup = round(cfg.warmup_epochs * steps_per_epoch)
        last = cfg.epochs * steps_per_epoch
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, last - warmup)
        return (1 + math.cos(math.pi * done)) / 2

    def predict(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Raw images, uint8 or from 0 to 1 -> logits. Also what load_model() returns calls it."""
        if "mean" in self.spec:
            images = normalize(images, self.spec["mean"], self.spec["std"])
        return model(images)

    def losses(self, model: nn.Module, batch) -> dict:
        """A micro-batch -> the sums named in Task.sums, over its items (here: images).

        The gradient is that of loss / count over all micro-batches of the step. The count is a
        number if every sample has the same number of items, else a tensor (tokens, valid pixels).
        Dropout and augmentation drawn here from torch's generator are the same on any number of
        ranks. model.training tells whether this is training.
        """
        images, labels = batch
        logits = self.predict(model, images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        return {"loss": loss, "count": len(labels), "correct": correct}

    def report(self, sums: dict[str, float]) -> dict[str, float]:
        """The metrics to print and to record, from the sums over all ranks."""
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "accuracy": sums["correct"] / sums["count"]}

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """What --activation-checkpointing recomputes, one at a time: the layers of a network."""
        blocks: list[nn.Module] = []
        inside: set[nn.Module] = set()  # the blocks and their parts
        for sequence in model.modules():  # outer modules come before their parts
            if not isinstance(sequence, nn.Sequential):
                continue
            for layer in sequence:
                is_single_operation = not list(layer.children())
                if isinstance(layer, nn.Sequential) or is_single_operation or layer in inside:
                    continue
                blocks.append(layer)
                inside.update(layer.modules())
        return blocks


# What Task.data() and Task.predict() need, for images. Delete it if your task does not.
# Mean and standard deviation of the pixels, from 0 to 1:
IMAGENET_PIXELS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
MNIST_PIXELS = {"mean": [0.1307], "std": [0.3081]}


def normalize(images: torch.Tensor, mean: list[float], std: list[float]) -> torch.Tensor:
    """uint8 [b, c, h, w], or floats from 0 to 1 -> float32 with mean 0 and standard deviation 1."""
    brightest = 255 if images.dtype == torch.uint8 else 1
    images = images.float() - brightest * per_channel(mean, images.device)
    images = images / (brightest * per_channel(std, images.device))
    return images.contiguous(memory_format=torch.channels_last)


def per_channel(values: list[float], device: torch.device) -> torch.Tensor:
    """[channels, 1, 1] on the device; torch.tensor() would be a copy, which waits for the GPU."""
    return torch.stack([torch.full((1, 1), value, device=device) for value in values])


def synthetic_images(size: int, seed: int) -> tuple[InMemoryDataset, InMemoryDataset]:
    """Noise of 1000 classes, for benchmarks, and to try things without data."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1280, 3, size, size)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.randint(1000, (1280,), generator=generator)
    return InMemoryDataset(images, labels), InMemoryDataset(images[:256], labels[:256])


def image_folders(root: Path, size: int) -> tuple[Dataset, Dataset]:
    """ROOT/train/CLASS/*.jpg with random crops, ROOT/val/CLASS/*.jpg: (uint8 [3, h, w], label)."""
    torchvision = import_package("torchvision", "--dataset imagefolder")
    transforms = torchvision.transforms
    crop = transforms.RandomResizedCrop(size)
    flip = transforms.RandomHorizontalFlip()
    resize = transforms.Resize(size * 8 // 7)
    center = transforms.CenterCrop(size)
    train_transform = transforms.Compose([crop, flip, transforms.PILToTensor()])
    test_transform = transforms.Compose([resize, center, transforms.PILToTensor()])
    train = torchvision.datasets.ImageFolder(root / "train", train_transform)
    test = torchvision.datasets.ImageFolder(root / "val", test_transform)
    if train.classes != test.classes:
        raise UserError(f"{train.root} and {test.root} have different classes")
    return train, test


def read_mnist(directory: Path, part: str, channels: int, size: int) -> InMemoryDataset:
    """uint8 [n, channels, size, size] and labels int64 [n]; part is "train" or "t10k"."""
    images = read_idx(directory / f"{part}-images-idx3-ubyte", dimensions=3)
    labels = read_idx(directory / f"{part}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images, but {len(labels)} labels")
    images = images.unsqueeze(1)  # [n, 1, 28, 28]
    if size != images.shape[-1]:
        images = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
    images = images.round().byte().expand(-1, channels, -1, -1)
    return InMemoryDataset(images, labels.long())


def read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """A file of MNIST: a 4-byte magic number, a 4-byte size per dimension, then the bytes."""
    content = path.read_bytes()
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4)]
    if len(content) != header + math.prod(shape):
        raise ValueError(f"{path} is damaged: it has {len(content)} bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].view(shape)


# ----------------------------------------------------------------------------------- TRAINING
@dataclass
class State:
    """Where a run is, and what it has counted. Part of each checkpoint."""

    step: int = 0  # optimizer steps since the start of the run
    epoch_sums: dict[str, int] = field(default_factory=dict)  # of this epoch: see ExactSums
    logged_sums: dict[str, int] = field(default_factory=dict)  # the same, at the last record


@dataclass
class Learner:
    """What learns. The first three are part of each checkpoint."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ddp: nn.Module  # what losses() calls in training: the model, or DDP around it
    first_options: list[dict]  # of the parameter groups, as Task.optimizer() sets them
    items_per_sample: float | str | None = None  # "varying" if losses() counts on the device


@dataclass(frozen=True)
class Run:
    """The parts of a run: what open_run() returns."""

    task: Task
    cfg: argparse.Namespace
    world: World
    sampler: MicroBatchSampler
    train_loader: DataLoader
    test_loader: DataLoader
    learner: Learner
    state: State
    directory: RunDirectory
    writer: CheckpointWriter
    metrics: MetricsWriter
    coordinator: Coordinator


def train(task: Task, cfg: argparse.Namespace, world: World) -> None:
    """One run, from its start or from its newest checkpoint to its last step. Collective."""
    run = open_run(task, cfg, world)
    state, sampler = run.state, run.sampler
    last_step = run.coordinator.last_step
    stop = False
    while state.step < last_step and not stop:
        epoch_end = sampler.end_of_epoch(state.step)
        end = min(epoch_end, last_step)
        if state.step % sampler.steps_per_epoch == 0:
            state.epoch_sums = dict.fromkeys(task.sums, 0)
            state.logged_sums = dict.fromkeys(task.sums, 0)
        sums = ExactSums(task.sums, world.device)
        throughput = Throughput(sampler.samples_before(state.step))
        set_training_mode(run.learner.model)
        sampler.seek(state.step)
        batches = iter(run.train_loader)
        while state.step < end and not stop:
            train_step(run, batches, sums)
            state.step += 1
            if run.coordinator.is_due(state.step):
                stop, save = run.coordinator.agree(state, sums, run.learner)
                if state.step == epoch_end or state.step % cfg.log_every_steps == 0:
                    log_interval(run, throughput)
                if save and not stop and state.step < end:
                    run.writer.save(state, run.learner, automatic=save == "auto")
        run.writer.save(state, run.learner, final=stop or state.step == last_step)
        run_done = state.step == cfg.epochs * sampler.steps_per_epoch
        if state.step == epoch_end and (run_done or not stop):  # else the resumed run evaluates
            evaluate_epoch(run)
    finish(run)


def train_step(run: Run, batches: Iterator, sums: ExactSums) -> None:
    """One optimizer step: forward and backward for this rank's micro-batches, then the update.

    The gradient is the mean over all items of the step, whatever share of them a rank has.
    Collective.
    """
    cfg, learner, step = run.cfg, run.learner, run.state.step
    micro_batches = run.sampler.local_micro_batches(step)
    uses_ddp = learner.ddp is not learner.model
    exact = ExactGradients(learner) if cfg.reproducible else None
    counts = []  # only if losses() counts the items on the device
    for micro in micro_batches:
        batch = next(batches)  # before seeding: reading it may also draw random numbers
        seed_generators(derive_seed(cfg.seed, "dropout", step, micro.index), run.world.device)
        is_last = micro is micro_batches[-1]  # only then DDP exchanges the gradients
        exchange = learner.ddp.no_sync() if uses_ddp and not is_last else nullcontext()
        statistics = statistics_kept(learner.model) if micro.is_filler else nullcontext()
        with exchange, statistics:
            values = compute_losses(run.task, cfg, learner.ddp, batch, run.world.device)
            loss = values["loss"] * loss_weight(run, micro, values["count"])
            learner.scaler.scale(loss).backward()
        if exact:
            exact.add_micro_batch()
        if isinstance(values["count"], torch.Tensor):
            counts.append(torch.zeros_like(values["count"]) if micro.is_filler else values["count"])
        if not micro.is_filler:
            sums.add(values)
    if exact:
        exact.write_gradients(run.world)
    if counts:
        divide_by_items(run, counts)

    factor = run.task.lr_factor(cfg, step, run.sampler.steps_per_epoch)
    for group in learner.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    if cfg.clip_grad_norm:
        learner.scaler.unscale_(learner.optimizer)
        nn.utils.clip_grad_norm_(optimized_parameters(learner.optimizer), cfg.clip_grad_norm)
    learner.scaler.step(learner.optimizer)  # not if gradients of any rank are not finite
    learner.scaler.update()
    learner.model.zero_grad()


def loss_weight(run: Run, micro: MicroBatch, count: float | torch.Tensor) -> float:
    """What the loss of a micro-batch, a sum, is multiplied by: 1 / the items of the whole step.

    If the items are counted on the device, their number in the whole step is not known yet: it is
    1 / samples, and divide_by_items() does the rest.
    """
    if micro.is_filler:
        return 0.0
    items_per_sample = "varying"
    if not isinstance(count, torch.Tensor):
        items_per_sample = count / micro.samples
    before = run.learner.items_per_sample
    if before not in (None, items_per_sample):
        text = f"losses() counted {items_per_sample} items per sample, {before} before"
        raise UserError(f"{text}: always return the count as a tensor if it varies")
    run.learner.items_per_sample = items_per_sample
    step_items = run.sampler.samples_in(run.state.step)
    if items_per_sample != "varying":
        step_items *= items_per_sample
    if run.cfg.reproducible:
        return 1 / step_items  # ExactGradients adds the gradients of all ranks
    return run.world.world_size / step_items  # DDP averages them


def divide_by_items(run: Run, counts: list[torch.Tensor]) -> None:
    """Turn gradients divided by samples into gradients divided by items. Collective."""
    items = torch.stack(counts)
    if run.cfg.reproducible:
        items = items.double()  # also the sum of fractions does not depend on the order
    items = items.sum()
    if run.world.world_size > 1:
        dist.all_reduce(items)
    samples = run.sampler.samples_in(run.state.step)
    factor = torch.where(items > 0, samples / items, 0.0)  # no items: no gradient
    for p in run.learner.model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)


def optimized_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    parameters = []
    for group in optimizer.param_groups:
        parameters += [p for p in group["params"] if p.requires_grad]
    return parameters


def compute_losses(task: Task, cfg, model: nn.Module, batch, device: torch.device) -> dict:
    """Task.losses() of a batch on the device, with --amp. UserError if they are not as promised.

    model: the task's, or DDP around it.
    """
    dtype = torch.float16 if cfg.amp == "fp16" else torch.bfloat16
    with torch.autocast(device.type, dtype, enabled=cfg.amp != "off"):
        values = task.losses(model, to_device(batch, device))
    if not isinstance(values, dict) or set(values) != set(task.sums):
        returned = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        expected = ", ".join(task.sums)
        raise UserError(f"losses() returned {returned}, but Task.sums names {expected}")
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            shape = list(value.shape)
            raise UserError(f"losses() returned {name} with the shape {shape}: return its sum")
    return values


@torch.no_grad()
def evaluate(task: Task, cfg, world: World, model: nn.Module, loader: DataLoader) -> dict:
    """The exact sums of Task.losses() over the test set, as floats. Collective."""
    if world.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's: all ranks evaluate what rank 0 saves
    model.eval()
    sums = ExactSums(task.sums, world.device)
    # Not collective: ranks may have different numbers of batches.
    for number, batch in enumerate(loader):
        faulthandler.dump_traceback_later(cfg.hang_timeout, exit=True)
        index = number * world.world_size + world.rank  # see divide_test_set()
        seed_generators(derive_seed(cfg.seed, "test", index), world.device)
        sums.add(compute_losses(task, cfg, model, batch, world.device))
    totals, _ = sums.all_reduce(world)
    return floats(totals)


def evaluate_epoch(run: Run) -> None:
    """Print and record the metrics of the epoch and of the test set. Collective."""
    began = time.monotonic()
    test_sums = evaluate(run.task, run.cfg, run.world, run.learner.model, run.test_loader)
    if run.world.rank != 0:
        return
    epoch = run.state.step // run.sampler.steps_per_epoch
    values = report(run.task, floats(run.state.epoch_sums))
    test_values = report(run.task, test_sums)
    text = f"Epoch {epoch} - Avg {describe(values)}, {describe(test_values, 'Test ')}"
    log(f"{text} of {test_sums['count']:.0f}")
    for name, value in test_values.items():
        values[f"test_{name}"] = value
    values["evaluation_seconds"] = time.monotonic() - began
    run.metrics.record("epoch", run.state.step, {"epoch": epoch, **values})


def evaluate_checkpoint(task: Task, cfg: argparse.Namespace, world: World) -> None:
    """--evaluate: print the metrics of a checkpoint on the test set; writes no file. Collective."""
    _, test_set = open_data(task, cfg, world)
    spec = task.spec
    predictor = load_model(cfg.evaluate, task, str(world.device))
    if task.spec != spec:
        text = f"the data has {reprlib.repr(spec)}, {cfg.evaluate} {reprlib.repr(task.spec)}"
        raise UserError(f"{text}: set --data-dir")
    batches = divide_test_set(len(test_set), cfg.batch_size, world, task.across_ranks)
    loader = get_dataloader(cfg, world, test_set, batches)
    sums = evaluate(task, cfg, world, predictor.model, loader)
    values = describe(report(task, sums), "Test ")
    log_on_rank_0(world, f"{cfg.evaluate}: {values} of {sums['count']:.0f}")


def log_interval(run: Run, throughput: Throughput) -> None:
    """Print and record the metrics of the steps since the last record."""
    state = run.state
    sums = {name: total - state.logged_sums[name] for name, total in state.epoch_sums.items()}
    state.logged_sums = dict(state.epoch_sums)
    samples_per_second = throughput.measure(run.sampler.samples_before(state.step))
    if run.world.rank != 0:
        return
    values = report(run.task, floats(sums))
    text = "no items"
    if values:
        name = next(iter(values))  # the first, for example the loss
        text = f"{name} {shown(values[name], 4)}"
    log(f"  step {state.step}: {text}, {samples_per_second:.0f} samples/s")
    for number, group in enumerate(run.learner.optimizer.param_groups):
        values[f"lr_{number}" if number else "lr"] = group["lr"]
    values["samples_per_second"] = samples_per_second
    if run.coordinator.weights:
        values["weights"] = run.coordinator.weights
    run.metrics.record("train", state.step, values)


def report(task: Task, sums: dict[str, float]) -> dict[str, float]:
    """Task.report(), or nothing if it cannot divide by the count: there were no items."""
    try:
        return task.report(sums)
    except ZeroDivisionError:
        if sums["count"] != 0:
            raise
        return {}


def set_training_mode(model: nn.Module) -> None:
    """model.train(), except for frozen BatchNorm: its statistics must not change, either."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        frozen = parameters and not any(p.requires_grad for p in parameters)
        if isinstance(module, BatchNorm) and frozen:
            module.eval()


# ------------------------------------------------------------------------------------- SET-UP
def open_run(task: Task, cfg: argparse.Namespace, world: World) -> Run:
    """Lock the run directory, open the data, build what learns, and resume. Collective."""
    directory = RunDirectory(cfg.checkpoint_dir)
    on_rank_0(world, directory.lock)
    path = on_rank_0(world, find_checkpoint, directory, cfg.resume)
    checkpoint = load_on_all_ranks(world, path) if path else None
    settle_config(cfg, checkpoint, world)
    if cfg.reproducible and task.across_ranks:
        text = "this loss depends on the number of ranks: use --deterministic"
        raise UserError(f"--reproducible: {text}")
    train_set, test_set = open_data(task, cfg, world)
    sampler = MicroBatchSampler(len(train_set), cfg, world, task.across_ranks)
    test_batches = divide_test_set(len(test_set), cfg.batch_size, world, task.across_ranks)
    learner = build_learner(task, cfg, world)
    identity = describe_run(task, len(train_set), learner)
    state = State()
    if checkpoint:
        check_identity(checkpoint, identity)
        restore(checkpoint, cfg, learner, state)
    writer = CheckpointWriter(directory, cfg, world, identity, sampler, state.step)
    run = Run(
        task=task,
        cfg=cfg,
        world=world,
        sampler=sampler,
        train_loader=get_dataloader(cfg, world, train_set, sampler),
        test_loader=get_dataloader(cfg, world, test_set, test_batches),
        learner=learner,
        state=state,
        directory=directory,
        writer=writer,
        metrics=MetricsWriter(cfg, directory),
        coordinator=Coordinator(cfg, world, writer),
    )
    start(run, path)
    needs_ddp = world.world_size > 1 and not cfg.reproducible
    if needs_ddp and state.step < run.coordinator.last_step:
        wrap_ddp(run)
    return run


def start(run: Run, path: Path | None) -> None:
    """Say what is trained, and evaluate now if that was interrupted. Collective."""
    cfg, world, step = run.cfg, run.world, run.state.step
    steps_per_epoch = run.sampler.steps_per_epoch
    noun = "micro-batch" if run.sampler.per_step == 1 else "micro-batches"
    batch = f"{cfg.global_batch_size} = {run.sampler.per_step} {noun} of {cfg.batch_size}"
    log_on_rank_0(world, f"Global batch {batch}; {steps_per_epoch} steps per epoch")
    origin = f"Resuming from {path} at step {step}" if path else "Starting a new run"
    log_on_rank_0(world, origin)
    was_evaluated = on_rank_0(world, run.metrics.open, step)
    on_rank_0(world, run.writer.write_status, step, "running")
    if path and not was_evaluated and step % steps_per_epoch == 0:
        evaluate_epoch(run)
    if step >= run.coordinator.last_step:
        limit = f"--epochs {cfg.epochs}"
        if cfg.stop_at_step and cfg.stop_at_step < cfg.epochs * steps_per_epoch:
            limit = f"--stop-at-step {cfg.stop_at_step}"
        where = "the end" if step == run.coordinator.last_step else "after the end"
        log_on_rank_0(world, f"Nothing to train: step {step} is {where} of {limit}")


def finish(run: Run) -> None:
    """Say how the run ended, and why: any rank may have seen the reason. Collective."""
    world, step = run.world, run.state.step
    reasons = [run.coordinator.stop_flag.reason]
    if world.world_size > 1:
        reasons = [None] * world.world_size
        dist.all_gather_object(reasons, run.coordinator.stop_flag.reason)
    known = [reason for reason in reasons if reason]
    reason = known[0] if known else ""
    total = run.cfg.epochs * run.sampler.steps_per_epoch
    ending = "finished" if step >= total else "stopped"
    path = run.directory.path
    position = f"step {step} of {total}" if step <= total else f"step {step}"
    log_on_rank_0(world, f"{ending.title()} at {position}, saved in {path}")
    # The others wait here: a launcher may end all ranks when one exits.
    on_rank_0(world, run.writer.write_status, step, ending, reason)


def settle_config(cfg: argparse.Namespace, checkpoint: dict | None, world: World) -> None:
    """The only place that changes cfg: global batch and seed of a run are those of its start.

    They decide which samples a step consumes. Other options may change: rank 0 prints which.
    """
    if not checkpoint:
        cfg.global_batch_size = cfg.global_batch_size or cfg.batch_size * world.world_size
        return
    saved = checkpoint["config"]
    for name in ("global_batch_size", "seed"):
        now = getattr(cfg, name)
        if now is not None and now != saved[name]:
            text = f"WARNING: the {name} of this run is {saved[name]}, not {now}"
            log_on_rank_0(world, text, sys.stderr)
        setattr(cfg, name, saved[name])
    changes = []
    for name, now in vars(cfg).items():
        if name in saved and saved[name] != now and name not in OPTIONS_OF_A_COMMAND:
            changes.append(f"{name} {saved[name]} -> {now}")
    if changes:
        log_on_rank_0(world, f"Changed since the checkpoint: {', '.join(changes)}")


def build_learner(task: Task, cfg: argparse.Namespace, world: World) -> Learner:
    """The model and what trains it, the same on every rank."""
    seed_generators(cfg.seed, world.device)
    model = task.model(cfg).to(world.device)
    has_sync_batchnorm = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if has_sync_batchnorm and world.world_size > 1 and not task.across_ranks:
        raise UserError("the model has SyncBatchNorm: set across_ranks = True in your task")
    if cfg.activation_checkpointing:
        blocks = task.blocks(model)
        if not blocks:
            text = "Task.blocks() names no blocks of this model: return its layers there"
            raise UserError(f"--activation-checkpointing: {text}")
        for block in blocks:
            recompute_activations(block, cfg.compile)
    if cfg.compile:
        # In place, so that the names in checkpoints stay the same. A graph for each shape: a graph
        # for any shape would depend on which came first.
        model.compile(dynamic=False)
    optimizer = task.optimizer(cfg, model)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # the peak, under PyTorch's usual name
    scaler = torch.amp.GradScaler(world.device.type)
    if cfg.amp != "fp16":  # it does not scale, but skips steps whose gradients are not finite
        never = 2**31 - 1
        scaler = torch.amp.GradScaler(world.device.type, init_scale=1.0, growth_interval=never)
    first_options = copy.deepcopy(optimizer.state_dict()["param_groups"])
    return Learner(model, optimizer, scaler, ddp=model, first_options=first_options)


def recompute_activations(block: nn.Module, compiled: bool) -> None:
    """Keep only the inputs of a block for the backward pass, which computes the rest again."""

    def contexts():
        return nullcontext(), statistics_kept(block)  # of the forward pass, of the recomputation

    options = {"use_reentrant": False}
    if not compiled:  # torch.compile updates the statistics of BatchNorm only once
        options["context_fn"] = contexts
    block.forward = functools.partial(recompute_in_backward, block.forward, **options)


@contextmanager
def statistics_kept(model: nn.Module):
    """BatchNorm updates copies of its running statistics, which are then dropped."""
    originals = []
    for norm in model.modules():
        if isinstance(norm, BatchNorm) and norm.track_running_stats:
            originals.append((norm, dict(norm.named_buffers(recurse=False))))
    for norm, buffers in originals:
        for name, value in buffers.items():
            setattr(norm, name, value.clone())
    try:
        yield
    finally:
        for norm, buffers in originals:
            for name, value in buffers.items():
                setattr(norm, name, value)


def wrap_ddp(run: Run) -> None:
    """DistributedDataParallel averages the gradients of all ranks during the backward pass."""
    learner = run.learner
    set_training_mode(learner.model)
    learner.ddp = DistributedDataParallel(learner.model, gradient_as_bucket_view=True)
    learner.ddp.broadcast_buffers = False  # evaluate() does it (deprecated as an argument)
    # DDP regroups the gradients after its first backward pass. Do that here, with two passes that
    # are then undone: in a resumed run, it would happen at another step and change the rounding.
    before = {name: buffer.clone() for name, buffer in learner.model.named_buffers()}
    run.sampler.seek(run.state.step)
    batch = next(iter(run.train_loader))
    for _ in range(2):
        values = compute_losses(run.task, run.cfg, learner.ddp, batch, run.world.device)
        values["loss"].backward()
    for name, buffer in learner.model.named_buffers():
        buffer.copy_(before[name])
    learner.model.zero_grad()


def describe_run(task: Task, samples: int, learner: Learner) -> dict:
    """What makes a run this run: a checkpoint of another one is refused."""
    shapes = {}
    for name, value in learner.model.state_dict().items():
        if isinstance(value, torch.Tensor):  # a module's extra state may be something else
            shapes[name] = list(value.shape)
    return {
        "task": type(task).__name__,
        "spec": plain(task.spec, "Task.spec"),
        "samples": samples,
        "model_shapes": shapes,
        "optimizer_class": type(learner.optimizer).__name__,
        "optimizer_groups": [len(group["params"]) for group in learner.optimizer.param_groups],
    }


def check_identity(checkpoint: dict, identity: dict) -> None:
    """UserError, with both values, if the checkpoint is of another run."""
    remedy = "choose another --checkpoint-dir"
    for what, ours in identity.items():
        theirs = checkpoint[what]
        if theirs == ours:
            continue
        if what == "model_shapes":
            names = sorted(theirs.keys() | ours.keys())
            name = next(name for name in names if theirs.get(name) != ours.get(name))
            text = f"the checkpoint is of another model: its {name} is {theirs.get(name, 'absent')}"
            raise UserError(f"{text}, here {ours.get(name, 'absent')}: {remedy}")
        text = f"the checkpoint has {what} {reprlib.repr(theirs)}"
        raise UserError(f"{text}, this run has {reprlib.repr(ours)}: {remedy}")


def restore(checkpoint: dict, cfg, learner: Learner, state: State) -> None:
    """Continue from the checkpoint."""
    learner.model.load_state_dict(checkpoint["model"])
    # What the optimizer has learned is part of the run, but an option that was changed applies.
    saved = checkpoint["optimizer"]["param_groups"]
    groups = zip(saved, checkpoint["optimizer_options"], learner.first_options)
    for group, options_before, options in groups:
        for name, value in options.items():
            if value != options_before.get(name):
                group[name] = value
    learner.optimizer.load_state_dict(checkpoint["optimizer"])
    if cfg.amp == checkpoint["config"]["amp"]:
        learner.scaler.load_state_dict(checkpoint["scaler"])
    state.step = checkpoint["global_step"]
    state.epoch_sums = checkpoint["epoch_sums"]
    state.logged_sums = checkpoint["logged_sums"]


# --------------------------------------------------------------------------------------- DATA
def open_data(task: Task, cfg: argparse.Namespace, world: World) -> tuple[Dataset, Dataset]:
    """Task.data(), on rank 0 first, because it may download. Collective."""
    data_sets: list[Dataset] = []
    task.spec = dict(task.spec)  # not that of the class, which all tasks share

    def open_all() -> None:  # returns nothing, because on_rank_0() would send it to all ranks
        seed_generators(cfg.seed)  # for data sets that are divided at random
        data_sets.extend(task.data(cfg))

    on_rank_0(world, open_all)
    if world.rank != 0:
        open_all()
    for data_set in data_sets:
        if isinstance(data_set, IterableDataset) or not hasattr(data_set, "__len__"):
            raise UserError(
                f"{type(data_set).__name__} has no index: return a map-style data set, with "
                "__len__() and __getitem__(); examples/tar_shards.py reads shards by index"
            )
        if len(data_set) == 0:
            raise UserError(f"{type(data_set).__name__} has no samples: is --data-dir right?")
    train_set, test_set = data_sets
    return train_set, test_set


class InMemoryDataset(TensorDataset):
    """Tensors with the same first dimension. Gathers a whole micro-batch in one operation."""

    def __getitems__(self, keys: list[int]) -> list[torch.Tensor]:
        """keys (see MicroBatchSampler) -> the rows of each tensor, [b, ...]"""
        device = self.tensors[0].device
        rows = torch.tensor(keys) % len(self)
        rows = rows.to(device, non_blocking=True)
        return [tensor[rows] for tensor in self.tensors]


class SeededDataset(Dataset):
    """Seeds torch, numpy and random for each sample, so that its augmentation does not depend on
    the loader worker that reads it, nor on what it has read before.
    """

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: int):
        epoch, index = divmod(key, len(self.dataset))  # see MicroBatchSampler
        seed_generators(derive_seed(self.seed, "augmentation", epoch, index))
        try:
            return self.dataset[index]
        except OSError as error:
            name = index
            with suppress(Exception):
                name = self.dataset.samples[index][0]  # torchvision's ImageFolder has paths
            text = f"cannot read sample {name}: replace or remove it"
            raise UserError(f"{text} ({type(error).__name__}: {error})") from None


def derive_seed(*parts) -> int:
    """A 63-bit seed from numbers and words; neighboring numbers give unrelated seeds."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of torch, numpy and random, and that of the device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed() would seed every backend
    if device is not None and device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)


class MicroBatch(NamedTuple):
    """One micro-batch of a step."""

    index: int  # in the step, counted over all ranks
    begin: int  # its samples are order[begin:end] of the epoch
    end: int
    is_filler: bool = False  # for a rank without a share of the step: its weight is 0

    @property
    def samples(self) -> int:
        return self.end - self.begin


def largest_micro_batch(batch: int, ranks: int, most: int) -> int:
    """The largest size up to `most` that divides a batch into one or more per rank; 0 if none."""
    for size in range(min(most, batch // ranks, 10**6), 0, -1):
        if batch % size == 0:
            return size
    return 0


class MicroBatchSampler:
    """The micro-batches of this rank. It replaces DistributedSampler.

    Each step takes the next G samples of the epoch's permutation, the last step the rest: every
    sample is used once. A step has C = G / b micro-batches. Rank r of W takes those from C * r // W
    to C * (r + 1) // W - 1: of 4 micro-batches, 3 ranks take 1, 1 and 2. Yields lists of keys: a
    key is epoch x samples + index, so that loader workers also know the epoch.

    A short last step has as few micro-batches as its samples fill, all about equally large. No
    micro-batch has a single sample, which BatchNorm refuses: if --batch-size is 2, one may have 3,
    and a rest of one sample belongs to the step before. A rank without a share computes the step's
    first micro-batch with weight 0, because DDP needs every rank; BatchNorm ignores it.

    equal: all ranks get equally many micro-batches of b samples; the rest of an epoch is dropped.
    """

    def __init__(self, samples: int, cfg, world: World, equal: bool = False):
        self.samples = samples
        self.batch_size = cfg.batch_size
        self.global_batch_size = cfg.global_batch_size
        self.seed = cfg.seed
        self.world = world
        self.equal = equal
        self.first_step = 0
        self.per_step = cfg.global_batch_size // cfg.batch_size
        ranks = world.world_size
        if cfg.global_batch_size % cfg.batch_size or self.per_step < ranks:
            batch = cfg.global_batch_size
            size = largest_micro_batch(batch, ranks, cfg.batch_size)
            remedy = f"set --batch-size to {size}" if size else f"use at most {batch} ranks"
            text = f"a batch of {batch} cannot be divided into micro-batches of {cfg.batch_size}"
            text = f"{text}, at least one per rank (ranks: {ranks}): {remedy}"
            raise UserError(f"{text}, or choose another --checkpoint-dir for another global batch")
        steps, rest = divmod(samples, cfg.global_batch_size)
        if equal and (self.per_step % ranks or steps == 0):
            text = f"this loss needs equally many micro-batches on each of {ranks} ranks"
            raise UserError(f"{text}, not {self.per_step} of {samples} samples: set --batch-size")
        if not equal and (rest > 1 or steps == 0):
            steps += 1
        self.steps_per_epoch = steps

    def seek(self, step: int) -> None:
        """Begin the next iteration with this step, which goes to the end of its epoch."""
        self.first_step = step

    def end_of_epoch(self, step: int) -> int:
        """The first step of the next epoch."""
        return (step // self.steps_per_epoch + 1) * self.steps_per_epoch

    def bounds(self, step: int) -> tuple[int, int]:
        """Begin and end of a step's samples in the epoch's order."""
        position = step % self.steps_per_epoch
        begin = position * self.global_batch_size
        is_last = position == self.steps_per_epoch - 1
        end = self.samples if is_last and not self.equal else begin + self.global_batch_size
        return begin, end

    def samples_in(self, step: int) -> int:
        begin, end = self.bounds(step)
        return end - begin

    def samples_before(self, step: int) -> int:
        """How many samples the run has used when it begins this step."""
        epochs = step // self.steps_per_epoch
        per_epoch = self.bounds(self.steps_per_epoch - 1)[1]
        return epochs * per_epoch + self.bounds(step)[0]

    def local_micro_batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of this rank, at least one."""
        start, end = self.bounds(step)
        size = end - start
        count = math.ceil(size / self.batch_size)  # on all ranks
        if self.batch_size > 1:
            count = max(1, min(count, size // 2))
        rank, ranks = self.world.rank, self.world.world_size
        first = count * rank // ranks
        first_of_next_rank = count * (rank + 1) // ranks
        micro_batches = []
        for index in range(first, first_of_next_rank):
            begin = start + size * index // count
            end = start + size * (index + 1) // count
            micro_batches.append(MicroBatch(index, begin, end))
        if not micro_batches:
            micro_batches.append(MicroBatch(0, start, start + size // count, is_filler=True))
        return micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.first_step // self.steps_per_epoch
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        order = torch.randperm(self.samples, generator=generator) + epoch * self.samples
        for step in range(self.first_step, self.end_of_epoch(self.first_step)):
            for micro in self.local_micro_batches(step):
                yield order[micro.begin : micro.end].tolist()


def divide_test_set(samples: int, batch_size: int, world: World, equal: bool) -> list[list[int]]:
    """The test batches of this rank: r, r + W, ... Every sample is used once, without padding.

    equal: equally many full batches on each rank; the rest is dropped.
    """
    batches = [list(range(i, min(i + batch_size, samples))) for i in range(0, samples, batch_size)]
    if equal:
        usable = samples // (batch_size * world.world_size) * world.world_size
        if usable == 0:
            text = f"{samples} test samples are too few for {world.world_size} ranks"
            raise UserError(f"{text} with --batch-size {batch_size}: lower it")
        batches = batches[:usable]
    return batches[world.rank :: world.world_size]


def get_dataloader(cfg, world: World, dataset: Dataset, batch_sampler) -> DataLoader:
    """Yields one micro-batch at a time, as the data set's samples, each stacked to [b, ...]."""
    if isinstance(dataset, InMemoryDataset):
        dataset = copy.copy(dataset)
        dataset.tensors = tuple(tensor.to(world.device) for tensor in dataset.tensors)  # all of it
        return DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=default_convert)
    workers = cores_of_rank() if cfg.num_workers is None else cfg.num_workers
    options = {
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "worker_init_fn": ignore_stop_signals,
        "pin_memory": world.device.type != "cpu",
    }
    if workers and sys.platform == "linux":  # a signal would end Python 3.14's forkserver
        options["multiprocessing_context"] = "fork"
    return DataLoader(SeededDataset(dataset, cfg.seed), batch_sampler=batch_sampler, **options)


def cores_of_rank() -> int:
    """The cores of this rank: those it is bound to, at most its share of the machine, and 16."""
    ranks_here = launch_variable(os.environ, "LOCAL_WORLD_SIZE", 1)
    cores = (os.cpu_count() or 1) // ranks_here
    if hasattr(os, "sched_getaffinity"):  # Linux; scripts/guard.py and Slurm bind a rank
        cores = min(cores, len(os.sched_getaffinity(0)))
    return min(16, max(1, cores))


def to_device(batch, device: torch.device):
    """The batch with all its tensors on the device; it may be a tuple, a dict, or nested."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [to_device(value, device) for value in batch]
    return batch  # for example, a list of strings


# -------------------------------------------------------------------------------- DISTRIBUTED
class World(NamedTuple):
    """The rank of this process and its device. The defaults describe a single process."""

    rank: int = 0  # 0 .. world_size - 1
    world_size: int = 1
    device: torch.device = torch.device("cpu")


def setup_distributed(cfg: argparse.Namespace) -> World:
    """Join all ranks into one process group. Collective."""
    rank, local_rank, world_size, per_node = launch_environment(os.environ)
    nodes = world_size // per_node
    if (cfg.nodes or nodes) != nodes or (cfg.gpus_per_node or per_node) != per_node:
        raise UserError(f"--nodes or --gpus-per-node: this launch has {nodes} x {per_node} ranks")
    device = select_device(local_rank, world_size)
    default_backend = {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")
    backend = cfg.distributed_backend or default_backend
    if backend == "nccl" and device.type == "cpu" and world_size > 1:
        raise UserError("--distributed-backend nccl needs GPUs, and PyTorch finds none: use gloo")
    world = World(rank, world_size, device)
    noun = "process" if device.type == "cpu" else "GPU"
    if world_size > 1:
        noun = "processes" if device.type == "cpu" else "GPUs"
    topology = f"{world_size} {noun} ({per_node} per node)"
    log_on_rank_0(world, f"Starting distributed training on {topology}")
    versions = f"PyTorch {torch.__version__}, {backend}"
    log_on_rank_0(world, f"Master node: {socket.gethostname()}; {versions}")
    if world_size > 1:
        if not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
            text = f"MASTER_ADDR or MASTER_PORT is not set, but there are {world_size} ranks"
            raise UserError(
                f"{text}: start with torchrun, or put scripts/guard.py before the script"
            )
        faulthandler.dump_traceback_later(cfg.hang_timeout, exit=True)  # connecting may hang
        timeout = timedelta(seconds=cfg.hang_timeout)
        bound_device = None if backend == "gloo" else device
        dist.init_process_group(backend, timeout=timeout, device_id=bound_device)
        faulthandler.cancel_dump_traceback_later()
    return world


def launch_environment(env) -> tuple[int, int, int, int]:
    """(rank, local rank, world size, ranks per node): torchrun's, else Slurm's, else 0, 0, 1, 1.

    Other programs need torchrun's names, so Slurm's values are written there.
    """
    if not env.get("RANK") and launch_variable(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        with explain("the variables of this step of Slurm are incomplete: unset them", KeyError):
            env["RANK"] = env["SLURM_PROCID"]
            env["LOCAL_RANK"] = env["SLURM_LOCALID"]
            env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
            per_node = env["SLURM_STEP_TASKS_PER_NODE"]  # like 4(x2) or 4,3
            env["LOCAL_WORLD_SIZE"] = re.split("[(,]", per_node)[0]
    rank = launch_variable(env, "RANK", 0)
    world_size = launch_variable(env, "WORLD_SIZE", 1)
    local_rank = launch_variable(env, "LOCAL_RANK", 0)
    per_node = launch_variable(env, "LOCAL_WORLD_SIZE", 1)
    if not (0 <= rank < world_size and 0 <= local_rank and 1 <= per_node <= world_size):
        raise UserError(
            f"RANK {rank}, LOCAL_RANK {local_rank}, WORLD_SIZE {world_size} and LOCAL_WORLD_SIZE "
            f"{per_node} contradict each other: start with torchrun, or unset them all"
        )
    return rank, local_rank, world_size, per_node


def launch_variable(env, name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not re.fullmatch("-?[0-9]{1,9}", text):
        raise UserError(
            f"{name} is {text}, which is not a number: start with torchrun, or unset it"
        )
    return int(text)


def is_launched_as_rank_0() -> bool:
    """For messages before setup_distributed(), and where there is no World."""
    return os.environ.get("RANK") in (None, "", "0")


def select_device(local_rank: int, world_size: int) -> torch.device:
    """The GPU of this rank, which PyTorch uses from now on; the CPU if there is none."""
    accelerator = getattr(torch, "accelerator", torch.cuda)  # PyTorch < 2.6: only CUDA
    no_collectives = world_size > 1 and torch.backends.mps.is_available()  # on the GPU of a Mac
    if no_collectives or not accelerator.is_available():
        return torch.device("cpu")
    gpus = accelerator.device_count()
    if gpus == 0:
        return torch.device("cpu")
    # With one GPU per Slurm task, each rank sees one GPU, number 0.
    device = torch.device(local_rank % gpus)  # cuda (NVIDIA, AMD), xpu (Intel) or mps
    set_device = getattr(accelerator, "set_device_index", torch.cuda.set_device)
    set_device(device)  # otherwise, each rank would also use memory of GPU 0
    return device


def configure_torch(cfg: argparse.Namespace) -> None:
    """Settings of PyTorch. Before the process group, because NCCL reads some of them."""
    deterministic = cfg.deterministic or cfg.reproducible
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    if not cfg.evaluate:  # optimizers import it, for a second: better now, on all ranks at once
        importlib.import_module("torch._dynamo")
    if deterministic:
        torch.use_deterministic_algorithms(True)
    # Shapes rarely change: let cuDNN time its kernels once per shape and keep the fastest.
    torch.backends.cudnn.benchmark = not deterministic
    if cfg.reproducible:
        torch.set_num_threads(1)  # on a CPU: with more, some kernels sum in another order


def on_rank_0(world: World, function, *arguments):
    """Call a function on rank 0; return its result on all ranks. Collective.

    If it raises an error, rank 0 raises that, and the other ranks exit with code 2.
    """
    result = None
    error = None
    if world.rank == 0:
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
    failed = error is not None
    if world.world_size > 1:
        outcome = [result, failed]
        dist.broadcast_object_list(outcome)
        result, failed = outcome
    if error:
        raise error
    if failed:
        time.sleep(2)  # let rank 0 print it first: launchers kill the rest
        raise SystemExit(2)
    return result


class ExactGradients:
    """For --reproducible: the gradients of a step add up to the same bits on any number of ranks.

    Those of each micro-batch are rounded to multiples of 2**-40, the last bit of a float64 from
    2**12 to 2**13. Sums below 2**13 are then exact, in any order. Gradients of 2**11 and sums of
    2**13 or more count as not finite, and the step is skipped. With fp16, all limits are multiplied
    by the loss scale, a power of two.
    """

    def __init__(self, learner: Learner):
        self.model = learner.model
        self.parameters = optimized_parameters(learner.optimizer)
        device = self.parameters[0].device
        one = torch.ones((), dtype=torch.float64, device=device)
        self.scale = learner.scaler.scale(one)
        size = sum(p.numel() for p in self.parameters)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)

    def add_micro_batch(self) -> None:
        """Move the gradients of a micro-batch from .grad to the total."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
        flat.masked_fill_(flat.abs() >= 2.0**11 * self.scale, math.nan)
        # A float64 near 1.5 * 2**12 has no bits below 2**-40: adding it rounds them away.
        rounding = 1.5 * 2**12 * self.scale
        flat.add_(rounding)
        flat.sub_(rounding)
        self.total.add_(flat)
        self.model.zero_grad()

    def write_gradients(self, world: World) -> None:
        """Add the totals of all ranks and write them to .grad. Collective."""
        if world.world_size > 1:
            dist.all_reduce(self.total)
        self.total.masked_fill_(self.total.abs() >= 2.0**13 * self.scale, math.nan)
        sizes = [p.numel() for p in self.parameters]
        for p, gradient in zip(self.parameters, self.total.split(sizes)):
            p.grad = torch.empty_like(p)
            p.grad.copy_(gradient.view_as(p))


# ------------------------------------------------------------------------------------ METRICS
class ExactSums:
    """Sums of what losses() returns, over micro-batches and ranks, exact in any order.

    A float64 is split into digits of 32 bits, from 2**-160 to 2**160, which are added as int64. A
    total is a Python integer in units of 2**-160. Adding never waits for a GPU. A value that is not
    finite, or not below 2**160, counts as 0, and rank 0 says so.
    """

    LOWEST = -160  # exponent of the lowest digit
    EXPONENTS = range(LOWEST, -LOWEST + 1, 32)  # the last one: values that are not finite
    PENDING = 256  # values to collect before they are split together

    def __init__(self, names, device: torch.device):
        self.names = list(names)
        self.device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        scales = [2.0**exponent for exponent in self.EXPONENTS]
        scales = torch.tensor(scales, dtype=torch.float64)
        self.scales = scales.to(self.device, non_blocking=True)
        shape = (len(self.names), len(scales))
        self.digits = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.pending: list[dict] = []

    def add(self, values: dict) -> None:
        """Add numbers or tensors without dimensions, by name."""
        self.pending.append({name: self.as_tensor(values[name]) for name in self.names})
        if len(self.pending) == self.PENDING:
            self.split_pending()

    def as_tensor(self, value) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach()
        return torch.full((), value, dtype=torch.float64, device=self.device)

    def split_pending(self) -> None:
        """Add the digits of the values. Decimal: 1234 / 1, 10, 100, 1000, without the fractions,
        is 1234, 123, 12, 1. Each minus 10 times the next gives the digits 4, 3, 2, 1.
        """
        for number, name in enumerate(self.names):
            column = torch.stack([values[name] for values in self.pending])
            column = column.to(self.device, torch.float64)
            not_finite = 2.0 ** self.EXPONENTS[-1]
            column = torch.where(column.abs() < not_finite, column, not_finite)
            quotients = (column[:, None] / self.scales).trunc()  # [values, digits]
            next_quotients = F.pad(quotients[:, 1:], (0, 1))
            digits = quotients - next_quotients * 2.0**32  # exact: 32 bits of 53 remain
            self.digits[number] += digits.long().sum(0)
        self.pending.clear()

    def all_reduce(self, world: World, flags=()) -> tuple[dict[str, int], list[int]]:
        """(totals since the last call, flags), added over all ranks. Collective.

        flags: integers or tensors of integers, that travel with the digits, which saves a second
        all_reduce. They are returned as one list. Waits for the GPU, once.
        """
        if self.pending:
            self.split_pending()
        vectors = [self.digits.flatten()]
        for flag in flags:
            vectors.append(self.as_tensor(flag).to(self.device, torch.int64).view(-1))
        vector = torch.cat(vectors)
        if world.world_size > 1:
            vector = vector.to(world.device)
            dist.all_reduce(vector)
        self.digits.zero_()
        integers = vector.tolist()
        totals = {}
        for name in self.names:
            digits = [integers.pop(0) for _ in self.EXPONENTS]
            not_finite = digits.pop()
            totals[name] = sum(digit << 32 * place for place, digit in enumerate(digits))
            if not_finite:
                text = f"{not_finite} values of {name} were not finite and count as 0"
                log_on_rank_0(world, f"WARNING: {text}", sys.stderr)
        return totals, integers


def floats(totals: dict[str, int]) -> dict[str, float]:
    """The totals of ExactSums, each rounded once."""
    unit = 2**-ExactSums.LOWEST
    return {name: total / unit for name, total in totals.items()}


class Throughput:
    """Samples per second since the last measurement."""

    def __init__(self, samples: int):
        self.samples = samples
        self.since = time.perf_counter()

    def measure(self, samples: int) -> float:
        """samples: used since the start of the run"""
        now = time.perf_counter()
        rate = (samples - self.samples) / (now - self.since)
        self.samples = samples
        self.since = now
        return rate


class MetricsWriter:
    """metrics.jsonl in the run directory, and TensorBoard and W&B if enabled. For rank 0."""

    def __init__(self, cfg: argparse.Namespace, directory: RunDirectory):
        self.cfg = cfg
        self.directory = directory
        self.path = directory.path / "metrics.jsonl"
        self.unwritten = b""
        self.trackers: list = []  # functions of (values by name, step)

    def open(self, step: int) -> bool:
        """Prepare to record the steps after this one. Returns whether this one was evaluated."""
        options = {name: value for name, value in vars(self.cfg).items() if name != "config"}
        config = yaml.safe_dump(options).encode()
        self.directory.replace_file("config.yaml", lambda file: file.write(config))
        last_kind = self.delete_later_records(step)
        if self.cfg.tensorboard:
            self.trackers.append(tensorboard_tracker(self.path.with_name("tensorboard"), step))
        if self.cfg.wandb:
            wandb = import_package("wandb", "--wandb")
            run_id = f"{derive_seed(str(self.path.resolve())):x}"
            wandb.init(id=run_id, resume="allow", dir=self.path.parent, config=vars(self.cfg))
            self.trackers.append(wandb.log)
        return last_kind == "epoch"

    def delete_later_records(self, step: int) -> str:
        """Delete the records of later steps, and lines that are none. Returns the last one's kind.

        A crash can leave half a line.
        """
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"{self.path} is not a file: delete or move it")
        kept = []
        last_kind = ""
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content.splitlines():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                record = json.loads(line)
                if record["step"] <= step:
                    kept.append(line + b"\n")
                    last_kind = record["kind"]
        self.directory.replace_file(self.path.name, lambda file: file.writelines(kept))
        return last_kind

    def record(self, kind: str, step: int, values: dict[str, float | str]) -> None:
        """Write a line of JSON. If the disk is full, it is kept until the next one."""
        record = {"kind": kind, "step": step, "time": time.time(), **values}
        self.unwritten += json.dumps(record).encode() + b"\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                written = file.write(self.unwritten)
                self.unwritten = self.unwritten[written:]
        except OSError as error:
            log(f"WARNING: cannot write metrics yet: {error}", sys.stderr)
        numbers = {}
        for name, value in values.items():
            if not isinstance(value, str):
                numbers[f"{kind}/{name}"] = value
        for track in self.trackers:
            track(numbers, step)


def tensorboard_tracker(directory: Path, step: int):
    tensorboard = import_package("torch.utils.tensorboard", "--tensorboard", "tensorboard")
    writer = tensorboard.SummaryWriter(directory, purge_step=step + 1)

    def track(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


# -------------------------------------------------------------------------------- CHECKPOINTS
CHECKPOINT_NAME = re.compile(r"checkpoint_((epoch|step)_[0-9]+|auto)\.pt")
TEMPORARY_NAME = re.compile(
    rf"\.({CHECKPOINT_NAME.pattern}|status\.json|config\.yaml|metrics\.jsonl)\..+\.tmp"
)
OWNER = re.compile(r"(attempt \S+, )?process [0-9]+ on \S+")  # an attempt is JOB.NUMBER


class RunDirectory:
    """--checkpoint-dir. Only one job at a time trains in it: its owner, named in the file `lock`.

    The kernel frees the lock when that process and its loader workers have exited. A newer attempt
    of the same job (see $ATTEMPT_ID) takes it over; the older attempt then writes nothing more.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.lock_path = self.path / "lock"
        attempt = os.environ.get("ATTEMPT_ID")
        process = f"process {os.getpid()} on {socket.gethostname()}"
        self.owner = f"attempt {attempt}, {process}" if attempt else process

    def lock(self) -> None:
        """For rank 0, before it changes anything. UserError if another job is the owner."""
        self.tell_supervisor()
        what = f"cannot write to or lock --checkpoint-dir {self.path}: choose another one"
        with explain(what, OSError):
            self.path.mkdir(parents=True, exist_ok=True)
            self.file = open(self.lock_path, "a+", opener=open_no_link)
            owner = self.lock_path.read_text(errors="replace")
            if owner and not OWNER.fullmatch(owner):
                raise UserError(f"{self.lock_path} is another program's file: delete or move it")
            if not self.acquire() and not self.is_newer_than(owner):
                remedy = "wait for it, stop that process, or choose another --checkpoint-dir"
                text = f"{self.path} is in use by {owner or 'another process'}: {remedy}"
                raise UserError(text, "in use")
            self.file.truncate(0)
            self.file.write(self.owner)
            self.file.flush()
            for leftover in self.path.iterdir():
                if TEMPORARY_NAME.fullmatch(leftover.name) or leftover.name == "STOP":
                    leftover.unlink(missing_ok=True)

    def tell_supervisor(self) -> None:
        """Write where the run is to the file $STATUS_FILE."""
        status_file = os.environ.get("STATUS_FILE")
        if status_file:
            with explain(f"cannot write STATUS_FILE {status_file}", OSError):
                Path(status_file).write_text(json.dumps({"run_dir": str(self.path.resolve())}))

    def acquire(self) -> bool:
        """Lock the file `lock`, unless another process has."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    def is_newer_than(self, owner: str) -> bool:
        """Whether this is a later attempt of the owner's job."""
        job, number = attempt_of(self.owner)
        their_job, their_number = attempt_of(owner)
        return job != "" and job == their_job and number > their_number

    def checkpoints(self) -> list[Path]:
        """The files that save() has written, in no order."""
        found = []
        for path in self.path.resolve().iterdir():
            if CHECKPOINT_NAME.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                found.append(path)
        return found

    def replace_file(self, name: str | Path, write) -> None:
        """Call write(file) on a temporary file; rename it once its content is on disk.

        name: in this directory, or the absolute path of a file elsewhere.
        """
        path = self.path / name
        process = f"{socket.gethostname()}.{os.getpid()}"
        temporary = path.with_name(f".{path.name}.{process}.tmp")
        try:
            with suppress(FileNotFoundError):
                temporary.unlink()  # of an earlier process with the same number
            with temporary.open("xb") as file:  # x: not through a link
                write(file)
                file.flush()
                os.fsync(file.fileno())
            self.check_owner()
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            cause = first_cause(error)  # torch.save hides "No space left on device"
            raise UserError(f"cannot write {path}; is the disk full? ({cause})", "disk") from None
        finally:
            with suppress(OSError):  # already renamed, or the directory is read-only
                temporary.unlink()

    def check_owner(self) -> None:
        """UserError if a newer attempt has taken over."""
        self.acquire()  # after a takeover, the older attempt keeps the lock until it exits
        owner = self.lock_path.read_text()
        if owner != self.owner:
            raise UserError(f"{self.path} belongs to {owner} now: not saved", "replaced")


def first_cause(error: BaseException) -> BaseException:
    """The error that led to this one."""
    while error.__context__:
        error = error.__context__
    return error


def attempt_of(owner: str) -> tuple[str, int]:
    """(job, number) of the owner of a lock; ("", 0) without scripts/supervise.py."""
    match = re.match(r"attempt (\S+)\.([0-9]+), ", owner)
    return (match[1], int(match[2])) if match else ("", 0)


def open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


FIRST_AUTO_SECONDS = 60  # until the first automatic save: it is unknown how long one takes
MIN_AUTO_SECONDS = 10  # between automatic saves
AUTO_SHARE = 0.01  # of the time, at most, for automatic saves


class CheckpointWriter:
    """Saves checkpoints and the status of the run, and deletes old checkpoints. For rank 0."""

    def __init__(self, directory: RunDirectory, cfg, world: World, identity: dict,
                 sampler: MicroBatchSampler, step: int):  # fmt: skip
        self.directory = directory
        self.cfg = cfg
        self.world = world
        self.identity = identity  # see describe_run()
        self.steps_per_epoch = sampler.steps_per_epoch
        self.start_step = step
        self.saved_step = step
        self.failed_saves = 0  # in a row
        self.failed_auto_saves = 0  # in a row
        self.began = time.time()
        self.last_save = time.monotonic()
        self.save_seconds = 0.0  # of all saves
        self.auto_interval = FIRST_AUTO_SECONDS
        self.auto_path = directory.path.resolve() / "checkpoint_auto.pt"
        self.saved: list[Path] = []
        if world.rank == 0:  # the directory may be on a disk of its node
            saved = sorted(directory.checkpoints(), key=os.path.getmtime)
            self.saved = [path for path in saved if path != self.auto_path]

    def auto_save_due(self) -> bool:
        """Whether it is time for an automatic save: they take little of it. For rank 0."""
        is_late = time.monotonic() - self.last_save > self.auto_interval
        return is_late and self.cfg.checkpoint_every_steps is None

    def save(self, state: State, learner: Learner, final=False, automatic=False) -> None:
        """checkpoint_epoch_N.pt at the end of an epoch, else checkpoint_step_N.pt.

        An automatic save replaces the one before, checkpoint_auto.pt; the final save deletes it.
        Does nothing on other ranks.
        """
        if self.world.rank != 0:
            return
        began = time.monotonic()
        epoch, rest = divmod(state.step, self.steps_per_epoch)
        name = f"checkpoint_step_{state.step}" if rest else f"checkpoint_epoch_{epoch}"
        if automatic:
            name = self.auto_path.stem
        else:
            with suppress(OSError):  # there is none, or the directory is read-only
                (self.directory.path / "SAVE").unlink()
        content = self.content(name, state, learner)
        self.check_weights(content, learner.model)
        self.save_if_possible(content, final)
        self.last_save = time.monotonic()
        self.auto_interval = max(MIN_AUTO_SECONDS, (self.last_save - began) / AUTO_SHARE)
        self.auto_interval *= 2 ** min(self.failed_auto_saves, 8)  # on a full disk: more rarely
        self.save_seconds += self.last_save - began

    def save_if_possible(self, content: dict, final: bool) -> None:
        """If the disk is full, training continues, unless this is the final save or the third
        failure in a row. Automatic saves are not counted, and become rarer.
        """
        try:
            self.save_file(content)
        except UserError as error:
            if content["name"] == self.auto_path.stem:
                self.failed_auto_saves += 1
            else:
                self.failed_saves += 1
            if final or error.cause != "disk" or self.failed_saves == 3:
                raise
            log(f"WARNING: {error}; training continues", sys.stderr)
        if final:
            self.auto_path.unlink(missing_ok=True)

    def save_file(self, content: dict) -> None:
        """Write the checkpoint and the status; delete checkpoints beyond --keep."""
        path = self.directory.path.resolve() / f"{content['name']}.pt"
        self.directory.replace_file(path.name, functools.partial(torch.save, content))
        self.failed_saves = 0
        self.failed_auto_saves = 0
        self.saved_step = content["global_step"]
        if path != self.auto_path:
            self.saved = [old for old in self.saved if old != path] + [path]
        for old in self.saved[: -self.cfg.keep]:
            old.unlink(missing_ok=True)
        self.write_status(self.saved_step, "running")

    def check_weights(self, content: dict, model: nn.Module) -> None:
        """UserError if a parameter is not finite. Buffers may be: some masks are -inf."""
        weights = content["model"]
        names = [name for name, _ in model.named_parameters() if name in weights]
        finite = [weights[name].isfinite().all() for name in names]
        if finite and not torch.stack(finite).all():
            text = f"{content['name']} not saved: the weights are not finite; lower --lr"
            raise UserError(text, "NaN")

    def content(self, name: str, state: State, learner: Learner) -> dict:
        """Plain types and tensors only, for torch.load(weights_only=True)."""
        return {
            "name": name,
            **self.identity,
            "config": vars(self.cfg),
            "global_step": state.step,
            "epoch_sums": state.epoch_sums,
            "logged_sums": state.logged_sums,
            "model": learner.model.state_dict(),
            "optimizer": learner.optimizer.state_dict(),
            "optimizer_options": learner.first_options,
            "scaler": learner.scaler.state_dict(),
        }

    def write_status(self, step: int, state: str, reason: str = "") -> None:
        """status.json, and a copy for the supervisor. States: running, finished, stopped."""
        status = {
            "state": state,
            "reason": reason,
            "run_dir": str(self.directory.path.resolve()),
            "start_step": self.start_step,
            "global_step": step,
            "saved_step": self.saved_step,
            "world_size": self.world.world_size,
            "pytorch": torch.__version__,
            "began": self.began,
            "save_seconds": self.save_seconds,  # without the save that writes this status
            "time": time.time(),
        }
        text = json.dumps(status).encode()
        self.directory.replace_file("status.json", lambda file: file.write(text))
        if os.environ.get("STATUS_FILE"):
            copy_for_supervisor = Path(os.environ["STATUS_FILE"]).resolve()
            self.directory.replace_file(copy_for_supervisor, lambda file: file.write(text))


def load_checkpoint(path: Path, file: io.BytesIO | None = None) -> dict:
    """The content of a checkpoint, on the CPU. UserError if it is damaged, or not one of ours.

    file: the same file in memory, if it has been read already.
    """
    place = f"{path} on {socket.gethostname()}"
    try:
        source = path if file is None else file
        # The file is a zip archive with a CRC-32 for each record, which torch.load() ignores.
        damaged = zipfile.ZipFile(source).testzip()
        if damaged:
            raise ValueError(f"wrong CRC-32 of {damaged}")
        if file is not None:
            file.seek(0)
        content = torch.load(source, map_location="cpu", weights_only=True)
        content["task"]  # KeyError if it is not one of ours
    except Exception as error:  # a file can be damaged in many ways
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, MemoryError) or "allocate memory" in cause:
            raise UserError(f"not enough memory to load {place} ({cause})", "memory") from None
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a wrong offset in the file
            raise UserError(f"cannot read {place} ({error.strerror or cause})", "disk") from None
        raise UserError(f"{place} is damaged or not a checkpoint ({cause})", "damaged") from None
    return content


def load_on_all_ranks(world: World, path: Path) -> dict:
    """load_checkpoint(), but only rank 0 reads the file, and sends it to the others. Collective."""
    if world.world_size == 1:
        return load_checkpoint(path)
    file = io.BytesIO()
    size = on_rank_0(world, lambda: file.write(path.read_bytes()))
    if world.rank != 0:
        file.write(bytes(size))
    buffer = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    for chunk in buffer.split(2**28):  # 256 MB, because it passes through the GPU's memory
        on_device = chunk.to(world.device)
        dist.broadcast(on_device, src=0)
        chunk.copy_(on_device)
    return load_checkpoint(path, file)


def find_checkpoint(directory: RunDirectory, resume: str) -> Path | None:
    """The checkpoint to load: the newest intact one of the run, else --resume. For rank 0."""
    saved = sorted(directory.checkpoints(), key=step_of, reverse=True)
    is_older = Path(resume).resolve() in saved[1:]
    if saved and (resume == "none" or is_older):
        raise UserError(f"{saved[0]} is in the way of --resume {resume}: delete or move it")
    for path in saved:
        try:
            load_checkpoint(path)
            return path
        except UserError as error:
            if error.cause != "damaged":
                raise
            log(f"WARNING: skipped: {error}", sys.stderr)
    if saved:
        raise UserError(f"no intact checkpoint in {directory.path}: choose another directory")
    if resume in ("auto", "none"):
        return None
    load_checkpoint(Path(resume))  # UserError if it is not intact
    return Path(resume)


def step_of(path: Path) -> float:
    with suppress(Exception):  # mmap: without reading the weights
        return torch.load(path, mmap=True, map_location="cpu", weights_only=True)["global_step"]
    return math.inf  # not readable: load_checkpoint() says why


def plain(value, what: str):
    """The same value, of the types that a checkpoint may contain. UserError if it has others."""
    with suppress(TypeError, ValueError):
        plain_value = json.loads(json.dumps(value))
        if plain_value == value:
            return plain_value
    types = "numbers, texts, lists, and dicts with texts as keys"
    raise UserError(f"{what} is {reprlib.repr(value)}, but a checkpoint can only contain {types}")


class Predictor(nn.Module):
    """A trained model that takes raw inputs, as the data set returns them: see Task.predict()."""

    def __init__(self, task: Task, model: nn.Module):
        super().__init__()
        self.task = task
        self.model = model  # without Task.predict(), for example to save its weights alone

    def forward(self, inputs):
        return self.task.predict(self.model, inputs)


def load_model(path: str, task: Task | None = None, device: str = "cpu") -> Predictor:
    """The trained model of a checkpoint, for prediction.

    task: that of the training; the default is this file's. Its data is not needed. UserError if the
    file is damaged or of another task.
    """
    task = task or Task()
    checkpoint = load_checkpoint(Path(path))
    name = type(task).__name__
    if checkpoint["task"] != name:
        text = f"{path} is of the task {checkpoint['task']}, not {name}"
        raise UserError(f"{text}: use the script that trained it, or load_model(..., task=...)")
    task.spec = checkpoint["spec"]
    model = task.model(argparse.Namespace(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    model.requires_grad_(False)
    return Predictor(task, model).to(device).eval()


# ----------------------------------------------------------------------------------- STOPPING
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
SYNC_SECONDS = 5  # between exchanges of the stop flag; or one step, if that takes longer


class StopFlag:
    """Whether and why to stop: a signal, a file or the clock. A second Ctrl-C ends the process."""

    def __init__(self, directory: Path):
        self.reason = ""
        self.since = math.inf  # time of the first signal
        self.files = [directory / "STOP"]
        if os.environ.get("STOP_FILE"):
            self.files.append(Path(os.environ["STOP_FILE"]))
        end = os.environ.get("DEADLINE") or os.environ.get("SLURM_JOB_END_TIME") or "inf"
        with explain("DEADLINE should be in seconds since 1970, as of `date +%s`", ValueError):
            end = float(end)
        time_for_saving = min(120, (end - time.time()) / 10)
        self.deadline = end - time_for_saving
        for number in STOP_SIGNALS:
            under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, _frame) -> None:
        is_first = self.since == math.inf
        # Within a second of the first, it is the same Ctrl-C, forwarded by a launcher.
        if number == signal.SIGINT and time.time() > self.since + 1:
            os._exit(130)
        if number == signal.SIGINT and is_first and is_launched_as_rank_0():
            with suppress(OSError):  # not print(), which Ctrl-C may have interrupted
                os.write(2, b"\nstopping: ranks save and exit; press Ctrl-C again to kill them\n")
        if is_first:
            self.since = time.time()
        if not self.reason:
            self.reason = signal.Signals(number).name

    def poll(self) -> bool:
        """Whether this rank knows of a reason to stop."""
        if not self.reason and any(file.exists() for file in self.files):
            self.reason = "STOP file"
        if not self.reason and time.time() > self.deadline:
            self.reason = "time limit"
        return bool(self.reason)


class Coordinator:
    """All ranks decide together, after the same step, whether to stop or to save.

    The stop flags are part of the all_reduce of the metrics, which also shows that all ranks live.
    """

    def __init__(self, cfg, world: World, writer: CheckpointWriter):
        self.cfg = cfg
        self.world = world
        self.writer = writer
        self.directory = writer.directory.path
        self.stop_flag = StopFlag(self.directory)
        self.steps_per_epoch = writer.steps_per_epoch
        self.last_step = cfg.epochs * self.steps_per_epoch
        if cfg.stop_at_step:
            self.last_step = min(self.last_step, cfg.stop_at_step)
        self.next_sync = writer.start_step
        self.synced_step = writer.start_step
        self.synced_at = time.monotonic()
        self.skipped_steps = 0  # since the last sync without any
        self.equal_step = writer.start_step  # the last one with the same weights on all ranks
        self.weights = ""  # digest of rank 0's weights at the last sync; "": unknown

    def is_due(self, step: int) -> bool:
        """Whether to call agree() after this step. The same on all ranks."""
        if step == self.last_step or step % self.steps_per_epoch == 0:
            return True
        log_due = step % self.cfg.log_every_steps == 0
        return log_due or self.save_due(step) or step >= self.next_sync

    def save_due(self, step: int) -> bool:
        every = self.cfg.checkpoint_every_steps
        return every is not None and step % every == 0

    def agree(self, state: State, sums: ExactSums, learner: Learner) -> tuple[bool, str]:
        """Add the sums of all ranks to the state; decide (whether to stop, what to save).

        What to save: "step" if it is due or was requested, "auto" for an automatic save, or "".

        Collective. Waits for the GPU, once.
        """
        faulthandler.dump_traceback_later(self.cfg.hang_timeout, exit=True)  # with all stacks
        now = time.monotonic()
        steps = max(1, state.step - self.synced_step)
        microseconds_per_step = int(1e6 * (now - self.synced_at) / steps)
        save_requested = self.world.rank == 0 and (self.directory / "SAVE").exists()
        auto_save = self.world.rank == 0 and self.writer.auto_save_due()
        # The scale is a power of two. To read it by itself would wait for the GPU a second time.
        scale = learner.scaler.scale(torch.ones((), device=self.world.device))
        scale_exponent = scale.clamp(2.0**-126, 2.0**127).log2().round()  # neither 0 nor infinity
        # Each is added over all ranks; the sums come back in the same order.
        flags = [self.stop_flag.poll(), save_requested, auto_save]
        flags += [microseconds_per_step, scale_exponent, self.digests(learner)]
        totals, results = sums.all_reduce(self.world, flags)
        stops, saves, auto_saves, microseconds, exponents, *digests = results
        for name, total in totals.items():
            state.epoch_sums[name] += total
        seconds_per_step = microseconds / 1e6 / self.world.world_size  # the mean of all ranks
        steps_until_sync = int(SYNC_SECONDS / max(seconds_per_step, 1e-6))
        # The first steps are slow: approach the right number by doubling it.
        self.next_sync = state.step + max(1, min(steps_until_sync, 2 * steps))
        self.synced_step = state.step
        self.synced_at = now
        self.check_replicas(state.step, digests)
        exponent = exponents // self.world.world_size  # the same on all ranks
        self.check_scale(learner.scaler, exponent)
        save = "auto" if auto_saves else ""
        if saves or self.save_due(state.step):
            save = "step"
        return stops > 0, save

    def digests(self, learner: Learner) -> torch.Tensor:
        """[world size]: the digest of this rank's weights in its own place, 0 in the others.

        The sum over all ranks then has the digest of each rank. Where ranks may have different
        weights, as with FSDP, all places are 0.
        """
        digests = torch.zeros(self.world.world_size, dtype=torch.int64, device=self.world.device)
        uses_ddp = learner.ddp is not learner.model
        are_replicas = uses_ddp or self.cfg.reproducible
        if are_replicas or self.world.world_size == 1:
            digests[self.world.rank] = weights_digest(learner.model)
        return digests

    def check_replicas(self, step: int, digests: list[int]) -> None:
        """UserError, before anything is saved, if a rank has other weights than the others."""
        self.weights = f"{digests[0] % 2**64:016x}" if digests[0] else ""
        if len(set(digests)) == 1:
            self.equal_step = step
            return
        usual = max(digests, key=digests.count)
        ranks = [str(rank) for rank, digest in enumerate(digests) if digest != usual]
        who = "the ranks have different weights"
        if len(ranks) < len(digests) / 2:
            plural = "s" if len(ranks) > 1 else ""
            who = f"rank{plural} {', '.join(ranks)}: other weights than the other ranks"
        when = f"after step {self.equal_step} they were equal, after step {step} no longer"
        cause = "a memory error, different hardware, or code that changes them on one rank only"
        text = f"{who}; {when}: {cause}. Nothing is saved; the same command resumes"
        raise UserError(text, "weights differ")

    def check_scale(self, scaler, exponent: int) -> None:
        """Report the steps that the scaler has skipped; each has halved the scale, 2**exponent."""
        if self.cfg.amp == "fp16":
            too_often = exponent < -10  # in fp16, some skipped steps are usual
        else:
            skipped = -exponent  # without fp16, the scale begins at 1 and never grows
            if skipped:
                text = f"WARNING: {skipped} steps skipped: their gradients were not finite"
                log_on_rank_0(self.world, text, sys.stderr)
                scaler.update(1.0)
            self.skipped_steps = (self.skipped_steps + skipped) if skipped else 0
            too_often = self.skipped_steps > 10
        if too_often:
            remedy = "lower --lr or set --clip-grad-norm"
            raise UserError(f"gradients are often not finite: {remedy}", "NaN")


def weights_digest(model: nn.Module) -> torch.Tensor:
    """The sum of the bits of all parameters, as integers that wrap around: exact in any order.

    A single bit that differs gives another digest; two values that were exchanged do not. 0 if
    there are parameters of other kinds, such as parts of a sharded one. Buffers, such as the
    statistics of BatchNorm, are left out. Does not wait for the GPU.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
    sums = []
    for parameter in model.parameters():
        tensor = parameter.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return torch.zeros((), dtype=torch.int64, device=tensor.device)
        size = tensor.element_size()
        bits = tensor.view(integers[size])
        # On a CPU, PyTorch adds int32 as int64 20 times as slowly.
        total = bits.sum(dtype=integers[max(size, 4)])
        sums.append(total.long())
    return torch.stack(sums).sum()


def ignore_stop_signals(_worker: int) -> None:
    """Schedulers signal all processes of a job, but a rank needs its workers until it stops."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


# ----------------------------------------------------------------------------------- MESSAGES
class UserError(Exception):
    """Something the user can fix: printed as one sentence, without a traceback."""

    def __init__(self, text: str, cause: str = "configuration"):
        text = text.rpartition("UserError: ")[2]  # a loader worker's comes with its traceback
        super().__init__(" ".join(text.split()))
        self.cause = cause  # for scripts/supervise.py: after "disk", a restart may help


@contextmanager
def explain(what: str, *errors: type[Exception]):
    """Turn errors of files and libraries into a UserError that says what failed."""
    try:
        yield
    except errors as error:
        raise UserError(f"{what} ({type(error).__name__}: {error})") from None


def import_package(module: str, needed_by: str, package: str = ""):
    """A package that only some runs need, imported when they need it, because that takes time."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.split(".")[0]
        remedy = f"pip install {package}"
        raise UserError(f"{needed_by} needs the package {package}: {remedy} ({error})") from None


def log(text: str, stream=None) -> None:
    """Print a line. If the output cannot be written, discard it and continue training."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:  # a closed terminal, a `tee` killed by Ctrl-C, a full disk under the log
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def log_on_rank_0(world: World, text: str, stream=None) -> None:
    if world.rank == 0:
        log(text, stream)


def shown(value: float, digits: int) -> str:
    """A number for people: with some decimal digits, or, if it is large or small, in short form."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}g}"


def describe(values: dict[str, float], prefix: str = "") -> str:
    """For example "Loss: 0.090462, Accuracy: 97.43%"; accuracies are shares."""
    parts = []
    for name, value in values.items():
        title = f"{prefix}{name.replace('_', ' ').title()}"
        text = f"{value:.2%}" if name.endswith("accuracy") else shown(value, 6)
        parts.append(f"{title}: {text}")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------ OPTIONS
# They say how a command starts, not what the run is.
OPTIONS_OF_A_COMMAND = ["config", "evaluate", "checkpoint_dir", "resume", "stop_at_step", "nodes"]
OPTIONS_OF_A_COMMAND += ["gpus_per_node", "distributed_backend"]
OPTIONS_OF_A_COMMAND += ["global_batch_size", "seed"]  # settle_config() keeps the run's


def did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def __init__(self, *arguments, **settings):
        self.required_options: list[argparse.Action] = []
        super().__init__(*arguments, **settings)

    def error(self, message: str):
        raise UserError(message)

    def add_argument(self, *names, **settings):
        """An option that is required may be in the config file: parse() checks it."""
        required = settings.pop("required", False)
        action = super().add_argument(*names, **settings)
        if required:
            self.required_options.append(action)
        return action

    def parse(self, words: list[str], complete: bool = True) -> argparse.Namespace:
        """complete: whether these are all words, so that no required option may be missing."""
        cfg, unknown = self.parse_known_args(words)
        options = ["--" + name.replace("_", "-") for name in vars(cfg)]
        if unknown:
            hint = did_you_mean(unknown[0].split("=")[0], options)
            raise UserError(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        for action in self.required_options:
            if complete and getattr(cfg, action.dest) is None:
                raise UserError(f"{action.option_strings[0]} is required: {action.help}")
        for name, value in vars(cfg).items():
            setattr(cfg, name, plain(value, f"the option {name}"))
            if value == "" and self.get_default(name) != "":
                raise UserError(f"--{name.replace('_', '-')} is empty: is a variable not set?")
        return cfg


def script_name() -> str:
    """For example my_train.py: what was started, for help and error messages."""
    return Path(sys.argv[0]).name


def build_parser(task: Task | None = None) -> Parser:
    """The options, one per line. They are also the keys of a config file, with _ instead of -."""
    started = sys.modules["__main__"]
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(script_name(), description=started.__doc__, formatter_class=style,
                    allow_abbrev=False)  # fmt: skip
    add = parser.add_argument
    switch = argparse.BooleanOptionalAction
    add("--config", metavar="FILE", help="YAML file of options; the command line overrides it")
    add("--evaluate", metavar="FILE.pt", help="only evaluate this checkpoint, with its options")
    add("--checkpoint-dir", "--save-dir", default="checkpoints", help="run directory [checkpoints]")
    add("--resume", default="auto", help="auto, none, or a FILE.pt for a new directory [auto]")
    add("--epochs", type=positive_int, default=5, help="passes over the training data [5]")
    add("--stop-at-step", type=positive_int, help="save and exit at this step; same schedule")
    add("--seed", type=whole_number, default=42, help="random seed [42]")
    add("--deterministic", action=switch, default=False, help="repeatable kernels, slower on GPU")
    add("--reproducible", action=switch, default=False, help="same weights on any number of ranks")
    add("--data-dir", default="data", help="where the data is, or is downloaded to [data]")
    add("--num-workers", type=whole_number, help="loader workers, for files [cores of a rank]")
    add("--batch-size", type=positive_int, default=64, help="micro-batch: samples per forward [64]")
    add("--global-batch-size", type=positive_int, help="samples per step [batch size x ranks]")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="[sgd]")
    add("--lr", type=not_negative, default=0.05, help="peak learning rate [0.05]")
    add("--warmup-epochs", type=not_negative, default=0.2, help="epochs of linear warm-up [0.2]")
    add("--weight-decay", type=not_negative, default=1e-4, help="[0.0001]")
    add(
        "--clip-grad-norm", type=not_negative, default=0.0, help="largest gradient norm; 0: off [0]"
    )
    add("--amp", choices=["off", "bf16", "fp16"], default="off", help="mixed precision [off]")
    add("--compile", action=switch, default=False, help="torch.compile the model")
    add("--activation-checkpointing", action=switch, default=False, help="less memory, slower")
    add("--log-every-steps", type=positive_int, default=20, help="steps between records [20]")
    add("--tensorboard", action=switch, default=False, help="also write TensorBoard files")
    add("--wandb", action=switch, default=False, help="also log to W&B (WANDB_MODE=offline works)")
    add("--checkpoint-every-steps", type=positive_int, help="save every N steps [automatic]")
    add("--keep", type=positive_int, default=3, help="newest checkpoints to keep [3]")
    add("--distributed-backend", choices=["nccl", "gloo"], help="[nccl or xccl on GPUs, else gloo]")
    add("--nodes", type=positive_int, help="fail unless there are this many nodes")
    add("--gpus-per-node", type=positive_int, help="fail unless a node has this many ranks")
    add("--hang-timeout", type=positive_int, default=600, help="seconds without progress [600]")
    (task or Task()).add_options(parser)  # last: it may set defaults of the others
    return parser


def positive_int(text: str) -> int:
    return checked_number(text, int, 1, 10**9)


def whole_number(text: str) -> int:
    return checked_number(text, int, 0, 10**18)


def not_negative(text: str) -> float:
    return checked_number(text, float, 0, 1e30)


def image_size(text: str) -> int:
    return checked_number(text, int, 1, 2**16)


def fraction(text: str) -> float:
    return checked_number(text, float, 0, 1)


def checked_number(text: str, kind: type, lowest: float, highest: float):
    """The number, if it is in the range; else argparse's error, which names the option."""
    with suppress(ValueError):
        number = kind(text)
        if lowest <= number <= highest:
            return number
    noun = "a whole number" if kind is int else "a number"
    shown_text = text or "''"
    limits = f"from {lowest:g} to {highest:g}"
    raise argparse.ArgumentTypeError(f"{shown_text} is not {noun} {limits}")


def parse_config(argv: list[str], parser: Parser | None = None) -> argparse.Namespace:
    """The options. The command line overrides the file --config, which overrides the defaults.

    With --evaluate, the options of that checkpoint are the defaults.
    """
    parser = parser or build_parser()
    cfg = parser.parse(argv, complete=False)  # errors of the command line come first
    if cfg.evaluate:
        saved = load_checkpoint(Path(cfg.evaluate))["config"]
        for name in set(saved) - set(OPTIONS_OF_A_COMMAND) | {"seed"}:
            parser.set_defaults(**{name: saved[name]})
    words = []
    if cfg.config:
        try:
            words = read_config(cfg.config, parser)
            parser.parse(words, complete=False)  # so that errors name the file
        except UserError as error:
            raise UserError(f"{cfg.config}: {error}") from None
    return parser.parse(words + argv)


def read_config(file: str, parser: Parser) -> list[str]:
    """The words of a command line for a YAML file like `epochs: 5`."""
    example = "it needs lines like `epochs: 5`"
    if not Path(file).is_file():
        if Path(file).exists():
            raise UserError("it is not a file")
        raise UserError(f"there is no file {Path(file).absolute()}")
    with explain(example, OSError, UnicodeError, yaml.YAMLError):
        text = Path(file).read_text(encoding="utf-8")
        try:
            # A tree of strings: `amp: off` stays "off", and nothing in the file is executed.
            root = yaml.compose(text, yaml.BaseLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1
            raise UserError(f"line {line}: {example} ({error.problem})") from None
    if root is None:
        return []  # an empty file
    if not isinstance(root, yaml.MappingNode):
        raise UserError(example)
    options = {}
    for key, value in root.value:
        name = key.value
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"line {key.start_mark.line + 1}: {example}")
        if name in options:
            raise UserError(f"{name} is there twice")
        if isinstance(value, yaml.SequenceNode):
            if not all(isinstance(item, yaml.ScalarNode) for item in value.value):
                raise UserError(f"{name} should have a single value; {example}")
            options[name] = [item.value for item in value.value]
        elif not isinstance(value, yaml.ScalarNode):
            raise UserError(f"{name} should have a single value; {example}")
        elif value.value in ("", "null", "~") and not value.style:  # not in quotes
            continue  # the default
        elif name in ("config", "evaluate", "help"):
            raise UserError(f"{name} belongs on the command line")
        else:
            options[name] = value.value
    known = vars(parser.parse([], complete=False))
    of_this_file = vars(build_parser().parse([]))  # configs/default_config.yaml has these
    foreign = [name for name in options if name in of_this_file and name not in known]
    if foreign and is_launched_as_rank_0():
        names = ", ".join(foreign)
        log(f"WARNING: {file}: your task has no option {names}: ignored", sys.stderr)
    options = {name: options[name] for name in options if name not in foreign}
    return words_of(options, parser)


def words_of(options: dict, parser: Parser) -> list[str]:
    """{"epochs": "5", "compile": "true"} -> ["--epochs=5", "--compile"]"""
    switches = []  # options without a value
    for action in parser._actions:  # also those of groups
        if action.nargs == 0:
            switches += action.option_strings
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        is_switch = f"--{flag}" in switches
        if is_switch and str(value).lower() == "true":
            words.append(f"--{flag}")
        elif is_switch and str(value).lower() == "false":
            words.append(f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *value]
        else:
            words.append(f"--{flag}={value}")
    return words


# --------------------------------------------------------------------------------------- MAIN
def main(task: Task | None = None, argv: list[str] | None = None) -> None:
    """Train or evaluate as the command line says. A script of your own calls main(MyTask())."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until StopFlag exists, Ctrl-C ends the process
    task = task or Task()
    try:
        cfg = parse_config(sys.argv[1:] if argv is None else argv, build_parser(task))
        configure_torch(cfg)
        world = setup_distributed(cfg)
        if cfg.evaluate:
            evaluate_checkpoint(task, cfg, world)
        else:
            train(task, cfg, world)
    except UserError as error:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not is_launched_as_rank_0():
            time.sleep(5)  # let rank 0 exit first: then its launcher ends this rank
        log(f"{script_name()}: error: {error}", sys.stderr)
        raise SystemExit(2) from error
    finally:
        faulthandler.cancel_dump_traceback_later()  # a script may go on after main()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            worker.kill()  # of a DataLoader; exit would wait for it
    if dist.is_initialized():
        time.sleep(0.5 if torch.__version__ < "2.8" else 0.2)  # for gloo: pytorch issue 179291
        dist.destroy_process_group()  # not after an error: it might wait for other ranks


if __name__ == "__main__":
    main()
