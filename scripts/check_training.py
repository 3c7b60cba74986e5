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
import time
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from hang import HangWatch
from report import HOST, format_ranges, say, write_event
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

STEPS = 3  # of an optimizer, after which the ranks of a DDP module are compared
ALONE_STEPS = 20  # the same, of ranks without a process group
MODULES = 3  # DDP modules are compared, at most
CHUNK = 1 << 20  # elements that are converted at once
ROUNDING = 2e-6  # of float32, between processors of different kinds, see digest()
SAME_BATCH = 50  # digests of its gradients differ by less; those of others, by about 1 / ROUNDING
OTHER_LIBRARIES = {"horovod", "mpi4py", "jax", "ray"}  # may connect the ranks, too
RANK_NAMES = re.compile(r"\b(RANK|\w+_RANK|WORLD_SIZE|SLURM_\w+)\b")


def start(watch: HangWatch) -> None:
    if os.environ.get("CHECK_TRAINING") != "0":
        watch.start_thread(TrainingCheck(watch).run)


class TrainingCheck:
    """Hooks in the script's threads take numbers of the first steps; a thread stores them. The
    lowest rank of a process group compares them as soon as all its ranks have stored theirs.
    """

    def __init__(self, watch: HangWatch):
        self.watch = watch
        self.calls = queue.SimpleQueue()  # that the thread makes
        self.replicas: list[Replica] = []
        self.steps = weakref.WeakKeyDictionary()  # {optimizer: calls of its step()}
        self.has_own_part = False  # of the data, by a DistributedSampler
        self.sets_epoch = False
        self.saves: set[str] = set()
        sampler = torch.utils.data.DistributedSampler
        after(torch.nn.parallel.DistributedDataParallel, "__init__", self.on_module)
        after(sampler, "__iter__", self.indices)
        after(sampler, "set_epoch", self.on_epoch)
        after(torch, "save", self.on_save)
        register_optimizer_step_pre_hook(hook(self.on_step))

    # ------------------------------------------------------------------ in the script's threads

    def on_module(self, _, module, *__, **___) -> None:
        """A DDP module has been created. Ignored parameters: its ranks may have equal batches."""
        if len(self.replicas) < MODULES and not module.parameters_to_ignore:
            self.replicas.append(Replica(module))

    def on_epoch(self, *_) -> None:
        self.sets_epoch = True

    def on_save(self, _, obj, f, *__, **___) -> None:
        path = os.path.realpath(f)  # TypeError: an open file
        key = f"save {HOST} {path} {self.watch.steps}"
        if os.path.isfile(path) and key not in self.saves:
            self.saves.add(key)
            self.call(self.count_save, key, path)

    def indices(self, indices, sampler):
        """Yield those of a DistributedSampler. If optimizers step meanwhile, it is for training."""
        epoch = sampler.epoch
        steps = self.watch.steps
        is_own = [sampler.num_replicas, sampler.rank] == [self.watch.size, self.watch.rank]
        is_own = is_own and torch.is_grad_enabled()
        self.has_own_part |= is_own
        is_again = is_own and sampler.shuffle and getattr(sampler, "epoch_done", None) == epoch
        for index in indices:
            yield index
            if is_again and self.watch.steps > steps and not self.sets_epoch:
                is_again = False
                text = f"DistributedSampler repeats the order of epoch {epoch}: call its "
                self.call(self.say, "epoch", f"{text}set_epoch(epoch) before each epoch")
        if self.watch.steps > steps:
            sampler.epoch_done = epoch

    def on_step(self, optimizer, *_) -> None:
        """Any optimizer's step() begins."""
        done = self.steps.get(optimizer, 0)
        self.steps[optimizer] = done + 1
        if done not in (0, STEPS, ALONE_STEPS):
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        size = distributed.get_world_size() if distributed.is_initialized() else 0
        if size < self.watch.size:
            if done == (STEPS if size else ALONE_STEPS):
                note = {"size": size, "settings": [sys.argv, repr(optimizer)]}
                note["values"] = to_list([digest(each) for each in parameters])
                self.call(self.compare, "alone", range(self.watch.size), note, judge_alone)
            return
        for number, replica in enumerate(self.replicas):
            own = replica.parameters_in(parameters)
            if own and not replica.names:
                replica.begin(own)
            elif list(own) == replica.names and done == STEPS == len(replica.gradients):
                note = replica.end(own)
                note["checks_batch"] = number == 0 and not self.has_own_part
                group = replica.module().process_group
                ranks = distributed.get_process_group_ranks(group)
                key = f"{group.group_name} {number}"
                self.call(self.compare, key, ranks, note, judge_replica)

    def call(self, function, *arguments) -> None:
        self.calls.put(functools.partial(function, *arguments))

    # -------------------------------------------------------------------------------- the thread

    def run(self) -> None:
        with suppress(Exception):  # the store has ended
            while not self.watch.over.wait(1):
                self.make_calls()
            for _ in range(15):  # other ranks may end a bit later
                self.make_calls()
                time.sleep(0.1 * bool(self.calls.qsize()))

    def make_calls(self) -> None:
        for _ in range(self.calls.qsize()):
            self.calls.get()()

    def compare(self, key: str, ranks, note: dict, judge) -> None:
        """With those that the other ranks store with the same key."""
        self.watch.store.set(f"training {key} {self.watch.rank}", json.dumps(note))
        if self.watch.rank == ranks[0]:
            self.judge([f"training {key} {rank}" for rank in ranks], ranks, judge)

    def judge(self, keys: list[str], ranks, judge) -> None:
        if not self.watch.store.check(keys):
            self.call(self.judge, keys, ranks, judge)
            return
        notes = [json.loads(text) for text in self.watch.store.multi_get(keys)]
        for kind, text in judge(ranks, notes):
            self.say(kind, text)

    def count_save(self, key: str, path: str) -> None:
        if self.watch.store.add(key, 1) == 2:
            text = f"several ranks on {HOST} save {path}: let rank 0 save, or give each rank a "
            self.say("save", f"{text}file of its own")

    def say(self, kind: str, text: str) -> None:
        """Once per run."""
        if self.watch.store.add(f"training {kind}", 1) == 1:
            say(f"guard.py: WARNING: {text}")
            write_event("training", text, kind=kind)


class Replica:
    """What is noted of a DDP module."""

    def __init__(self, module):
        self.module = weakref.ref(module)
        self.names: list[str] = []  # of the parameters of the first optimizer that steps
        self.exchanges = 0  # backward passes that average gradients
        self.gradients: list = []  # of the largest parameter before that, see digest()

    def parameters_in(self, parameters: list) -> dict:
        """{name: parameter}"""
        wanted = set(map(id, parameters))
        pairs = self.module().module.named_parameters()
        return {name: each for name, each in pairs if each.requires_grad and id(each) in wanted}

    def begin(self, own: dict) -> None:
        """Before the first step."""
        self.names = list(own)
        self.starts = [digest(each) for each in own.values()]
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
        averaged = [digest(each if each.grad is None else each.grad) for each in own.values()]
        values = [digest(each) for each in own.values()]
        note = {"names": self.names, "exchanges": self.exchanges}
        note["gradients"] = to_list(self.gradients)
        note["values"] = to_list(self.starts + averaged + values)
        self.gradients = []
        return note


# ------------------------------------------------------------------------------------ judgements


def judge_replica(ranks: list[int], notes: list[dict]):
    """Yield (kind, sentence) for what is wrong."""
    names = notes[0]["names"]
    if any(note["names"] != names for note in notes):
        return
    size = len(names)
    different, who = find_different(ranks, notes)
    changed = {index - 2 * size for index in different}
    unequal = [index for index in changed if different & {index, index + size}]
    if unequal and all(note["exchanges"] >= STEPS for note in notes):
        first = min(unequal)
        text = f"{len(unequal)} of {size} parameters of the DDP module ({names[first]} ...) differ "
        text += f"between {who} after step {STEPS}: "
        if first in different:
            text += "they did before step 1, too; load weights on all ranks, before DDP wraps them"
        else:
            text += "their gradients were not averaged; call the DDP module, not its .module, and "
            text += "end no_sync() before a step's last forward pass"
        yield "parameters", text
    gradients = notes[0]["gradients"]
    pairs = zip(ranks, notes)
    same = [rank for rank, note in pairs if math.dist(gradients, note["gradients"]) < SAME_BATCH]
    if len(same) > 1 and any(note["checks_batch"] for note in notes):
        text = f"ranks {format_ranges(same)} train on the same batches; use DistributedSampler, "
        yield "batch", f"{text}or give each rank its own part of the data"


def judge_alone(ranks: list[int], notes: list[dict]):
    """The same, of ranks that are not in one process group."""
    is_sweep = any(note["settings"] != notes[0]["settings"] for note in notes)
    if is_sweep or OTHER_LIBRARIES & sys.modules.keys():
        return
    size = notes[0]["size"]
    different, _ = find_different(ranks, notes)
    if size:
        text = f"the process group has {size} of {len(ranks)} ranks: groups of ranks train separate"
        yield "groups", f"{text} models; let init_process_group() read RANK and WORLD_SIZE"
    elif not different or not names_ranks():
        text = (
            f"WORLD_SIZE is {len(ranks)}, but after step {ALONE_STEPS} there is no process group: "
        )
        text += f"{len(ranks)} separate trainings; call init_process_group() and use "
        yield "alone", f"{text}DistributedDataParallel, or start one rank"


def find_different(ranks: list[int], notes: list[dict]) -> tuple[set[int], str]:
    """(indices of the values that are not the same on all ranks, which ranks)"""
    others = []
    different = set()
    for rank, note in zip(ranks, notes):
        pairs = zip(notes[0]["values"], note["values"])
        found = {index for index, (a, b) in enumerate(pairs) if abs(a - b) > 1}
        different |= found
        if found:
            others.append(rank)
    return different, f"ranks {ranks[0]} and {format_ranges(others)}"


def names_ranks() -> bool:
    """Whether the script or a file beside it does: its ranks may be independent on purpose."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        is_own = file.startswith(sys.path[0]) and "site-packages" not in file
        if is_own and RANK_NAMES.search(Path(file).read_text(errors="replace")):
            return True
    return False


# ----------------------------------------------------------------------------------------- tools


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
    flat = tensor.detach().reshape(-1)
    total = squares = 0
    for chunk in flat.split(CHUNK):
        chunk = chunk.double()
        total = total + chunk.sum()
        squares = squares + chunk.dot(chunk)
    number = total / squares.sqrt() + squares.log() / 2 * flat.numel() ** 0.5
    return number / max(ROUNDING, torch.finfo(tensor.dtype).eps / 8)


def to_list(numbers: list) -> list[float]:
    """With one wait for the GPU."""
    return torch.stack(numbers).tolist()
