"""Reports ranks that do not train one model together: for guard.py. CHECK_TRAINING=0: never.

Where ranks may differ on purpose, it says nothing. It calls no collective, and changes no result.
"""

from __future__ import annotations

import functools
import json
import math
import os
import queue
import re
import sys
import weakref
import zlib
from contextlib import suppress
from pathlib import Path

import torch
from hang import HangWatch
from report import HOST, format_ranges, say, write_event
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

STEPS = 3  # of an optimizer, after which the ranks of a DDP module are compared
ALONE_STEPS = 20  # the same, of ranks without a process group
CHUNK = 1 << 20  # elements that are converted at once
ROUNDING = 2e-6  # of float32, between processors of different kinds, see digest()
SAME_BATCH = 50  # digests of its gradients differ by less; those of others, by about 1 / ROUNDING
OTHER_LIBRARIES = {"horovod", "mpi4py", "jax", "ray"}  # may connect the ranks, too
BEFORE = set(sys.modules) - {"__main__"}  # loaded by guard.py
RANK_NAMES = re.compile(r"\b(RANK|\w+_RANK|WORLD_SIZE|SLURM_\w+)\b")


class TrainingCheck:
    """Hooks in the script's threads take numbers of the first steps; a thread stores them. The rank
    of a process group that is the last to do so compares those of all its ranks.
    """

    def __init__(self, watch: HangWatch):
        self.watch = watch
        self.calls = queue.SimpleQueue()  # that the thread makes
        self.replicas: list[Replica] = []
        self.steps = weakref.WeakKeyDictionary()  # {optimizer: calls of its step()}
        self.has_own_part = False  # of the data, by a DistributedSampler
        self.sets_epoch = False
        self.saves = set()  # keys
        after(torch.nn.parallel.DistributedDataParallel, "__init__", self.on_module)
        after(torch.utils.data.DistributedSampler, "__iter__", self.on_sampler)
        after(torch, "save", self.on_save)
        register_optimizer_step_pre_hook(hook(self.on_step))

    # ------------------------------------------------------------------ in the script's threads

    def on_module(self, _, module, *__, **___) -> None:
        """A DDP module has been created. Ignored parameters: its ranks may have equal batches."""
        if not module.parameters_to_ignore:
            self.replicas.append(Replica(module))

    def on_save(self, _, obj, f, *__, **___) -> None:
        path = os.path.realpath(f)  # TypeError: an open file
        key = f"save {HOST} {path} {self.watch.steps}"
        if os.path.isfile(path) and key not in self.saves:
            self.saves.add(key)
            text = f"several ranks on {HOST} save {path}: let rank 0 save, or give each rank a file"
            self.call(self.say, "save", f"{text} of its own", key)

    def on_sampler(self, indices, sampler):
        """A DistributedSampler begins. Returns its indices."""
        self.sets_epoch |= sampler.epoch > 0
        if [sampler.num_replicas, sampler.rank] != [self.watch.size, self.watch.rank]:
            return indices
        self.has_own_part = True
        passes = vars(sampler).setdefault("training_passes", [])
        return self.indices(indices, passes) if sampler.shuffle else indices

    def indices(self, indices, passes: list):
        """Yield them. passes: complete ones during which optimizers stepped: in training."""
        steps = self.watch.steps
        for index in indices:
            yield index
            if passes and self.watch.steps > steps and not self.sets_epoch:
                passes.clear()
                text = "DistributedSampler repeats the order of epoch 0: call its set_epoch(epoch)"
                self.call(self.say, "epoch", text)
        if self.watch.steps > steps:
            passes.append(steps)

    def on_step(self, optimizer, *_) -> None:
        """Any optimizer's step() begins."""
        done = self.steps.get(optimizer, 0)
        self.steps[optimizer] = done + 1
        if done not in (0, STEPS, ALONE_STEPS):
            return
        trained = {id(each): each for each in parameters_of(optimizer)}
        size = distributed.get_world_size() if distributed.is_initialized() else 0
        if size < self.watch.size:
            if done == (STEPS if size else ALONE_STEPS):
                key = f"{sys.argv} {optimizer}"  # differs between the ranks of a sweep
                numbers = [size, *digests(trained.values()).tolist()]
                self.call(self.compare, key, range(self.watch.size), numbers, judge_alone)
            return
        for number, replica in enumerate(self.replicas):
            with suppress(Exception):  # it is gone; of another optimizer. The others are compared
                own = replica.parameters_in(trained)
                if own and not replica.names:
                    replica.begin(own)
                elif list(own) == replica.names and done == STEPS:
                    note = replica.end(own)
                    note["checks_batch"] = number == 0 and not self.has_own_part
                    ranks = distributed.get_process_group_ranks(replica.module().process_group)
                    key = f"{ranks} {number} {replica.names}"
                    self.call(self.compare, key, ranks, note, judge_replica)

    def call(self, function, *arguments) -> None:
        self.calls.put(functools.partial(function, *arguments))

    # -------------------------------------------------------------------------------- the thread

    def run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self.watch.over.wait(1)
            while not self.calls.empty():
                with suppress(Exception):  # the store has ended
                    self.calls.get()()

    def compare(self, key: str, ranks, note, judge) -> None:
        """With the notes that the other ranks store with the same key, if this is the last one."""
        store = self.watch.store
        name = f"training {zlib.crc32(key.encode())}"
        store.set(f"{name} {self.watch.rank}", json.dumps(note))
        if store.add(f"{name} ranks", 1) == len(ranks):
            keys = [f"{name} {rank}" for rank in ranks]
            notes = [json.loads(text) for text in store.multi_get(keys)]
            for finding in judge(ranks, notes):
                self.say(*finding)

    def say(self, kind: str, text: str, save="") -> None:
        """Once per run; if it is about a save, not before two ranks have done it."""
        add = self.watch.store.add
        if (not save or add(save, 1) == 2) and add(f"training {kind}", 1) == 1:
            say(f"guard.py: WARNING: {text}")
            write_event("training", text, kind=kind)


class Replica:
    """What is noted of a DDP module."""

    def __init__(self, module):
        self.module = weakref.ref(module)
        self.names = None  # of the parameters of the first optimizer that steps
        self.exchanges = 0  # backward passes that average gradients
        self.gradients = []  # of the largest parameter before that, see digest()

    def parameters_in(self, trained: dict) -> dict:
        """{name: parameter}"""
        pairs = self.module().module.named_parameters()
        return {name: each for name, each in pairs if each.requires_grad and id(each) in trained}

    def begin(self, own: dict) -> None:
        """Before the first step."""
        self.names = list(own)
        self.starts = digests(own.values())
        largest = max(own.values(), key=torch.numel)
        self.handle = largest.register_hook(hook(self.on_gradient))

    def on_gradient(self, gradient) -> None:
        module = self.module()
        if module.require_backward_grad_sync and not module._comm_hooks:
            self.exchanges += 1
        if len(self.gradients) < STEPS:
            self.gradients.append(digest(gradient))

    def end(self, own: dict) -> dict:
        """After the last step."""
        self.handle.remove()
        gradients = torch.stack(self.gradients)  # RuntimeError: this is another optimizer
        self.gradients = []
        averaged = [each if each.grad is None else each.grad for each in own.values()]
        numbers = torch.stack([self.starts, digests(averaged), digests(own.values())])
        return {
            "exchanges": self.exchanges,
            "parameters": numbers.T.tolist(),
            "gradients": gradients.tolist(),
            "names": self.names,
        }


# ------------------------------------------------------------------------------------ judgements


def judge_replica(ranks, notes):
    """Yield (kind, sentence) for what is wrong."""
    unequal = {}
    names = notes[0]["names"]
    for name, *numbers in zip(names, *(note["parameters"] for note in notes)):
        have_begun, have_averaged, have_ended = map(differ, zip(*numbers))
        if have_ended and (have_begun or have_averaged):
            unequal[name] = have_begun
    if unequal and all(note["exchanges"] >= STEPS for note in notes):
        name = next(iter(unequal))
        cause = (
            "their gradients were not averaged; call the DDP module, not its .module, and end "
            "no_sync() before a step's last forward pass"
        )
        if unequal[name]:
            cause = "they did before step 1; load them on all ranks, before DDP wraps the model"
        yield (
            "parameters",
            f"{len(unequal)} of {len(names)} parameters of the DDP module ({name} ...) differ "
            f"between ranks {format_ranges(ranks)} after step {STEPS}: {cause}",
        )
    gradients = notes[0]["gradients"]
    same = [
        rank
        for rank, note in zip(ranks, notes)
        if math.dist(gradients, note["gradients"]) < SAME_BATCH
    ]
    if len(same) > 1 and any(note["checks_batch"] for note in notes):
        yield (
            "batch",
            f"ranks {format_ranges(same)} train on the same batches; use DistributedSampler, or "
            "give each rank its own part of the data",
        )


def judge_alone(ranks, notes):
    """The same, of ranks that are not in one process group, but in groups of a size, or in none."""
    sizes, *values = zip(*notes)
    size = sizes[0]
    may_differ = OTHER_LIBRARIES & sys.modules.keys()
    if any(map(differ, values)) and not may_differ:
        may_differ = names_ranks()
    if size:
        yield (
            "groups",
            f"the process group has size {size}, but WORLD_SIZE is {len(ranks)}: groups of ranks "
            "train separate models; let init_process_group() read RANK and WORLD_SIZE",
        )
    elif not may_differ:
        yield (
            "alone",
            f"WORLD_SIZE is {len(ranks)}, but there is no process group after {ALONE_STEPS} steps: "
            f"{len(ranks)} separate trainings; call init_process_group() and use "
            "DistributedDataParallel, or start one rank",
        )


def differ(numbers) -> bool:
    return max(numbers) - min(numbers) > 1


def names_ranks() -> bool:
    """Whether the script, or a file of its own, does: its ranks may be independent on purpose."""
    modules = [sys.modules[name] for name in sys.modules.keys() - BEFORE]
    files = [str(getattr(module, "__file__", "")) for module in modules]
    own = [file for file in files if file.endswith(".py") and "/python3." not in file]
    return any(RANK_NAMES.search(Path(file).read_text("latin-1")) for file in own)


# ----------------------------------------------------------------------------------------- tools


def parameters_of(optimizer) -> list:
    return [each for group in optimizer.param_groups for each in group["params"]]


def after(owner, name: str, note) -> None:
    """After each call of owner.name(), return what note(its result, its arguments) does."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        with suppress(Exception):
            return note(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapper)


def hook(note):
    """note() as a hook whose errors do not end the script, and which torch.compile leaves out."""

    def function(*args) -> None:
        if not torch.compiler.is_compiling():
            with suppress(Exception), torch.no_grad():
                note(*args)

    return function


def digest(tensor):
    """A number, as a tensor. If its elements are rounded otherwise, it changes by less than 1.

    sum(dtype=torch.float64) would copy the tensor.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("would become a part of the graph")
    flat = tensor.reshape(-1)
    total = squares = 0
    for chunk in flat.split(CHUNK):
        chunk = chunk.double()
        total = total + chunk.sum()
        squares = squares + chunk.dot(chunk)
    number = total / squares.sqrt() + squares.log() / 2 * flat.numel() ** 0.5
    return number / max(ROUNDING, torch.finfo(tensor.dtype).eps / 8)


def digests(tensors):
    return torch.stack([digest(tensor) for tensor in tensors])
