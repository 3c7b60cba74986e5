"""Names the step, the rank and the layer of a gradient that is not finite: for guard.py.

CHECK_FINITE=1 looks at each step of each optimizer: nothing waits for the GPU, but it takes time.
Without it, only one small parameter is looked at, once the script has ended.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import weakref

import torch
from check_training import after, hook, parameters_of
from report import say, within
from torch.optim.optimizer import register_optimizer_step_pre_hook

STEPS = 20  # between two reads of what the device keeps
LIMIT = 5  # seconds for the last read: the device may wait for a rank that is gone


class FiniteCheck:
    """A gradient's size is its largest absolute value: nan or inf, if any of its numbers is."""

    def __init__(self, rank: int):
        self.rank = rank
        self.steps = weakref.WeakKeyDictionary()  # {optimizer: calls of its step()}
        self.own = {}  # {parameter: size before the ranks average}, in the order of the backward
        self.kept = []  # (step, parameters, sizes [2, parameters]: own, averaged)
        self.has_found = False
        self.weights = None  # one parameter
        self.looks_at_steps = os.environ.get("CHECK_FINITE") == "1"
        if self.looks_at_steps:
            after(torch.optim.Optimizer, "__init__", self.on_optimizer)
        register_optimizer_step_pre_hook(hook(self.on_step))

    def on_optimizer(self, _, optimizer, *__, **___) -> None:
        for each in parameters_of(optimizer):
            each.register_hook(hook(functools.partial(self.on_gradient, each)))

    def on_gradient(self, parameter, gradient) -> None:
        size = size_of(gradient)
        self.own[parameter] = torch.maximum(size, self.own.get(parameter, size))

    def on_step(self, optimizer, *_) -> None:
        """Any optimizer's step() begins."""
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if not self.looks_at_steps:
            self.weights = optimizer.param_groups[-1]["params"][-1]
            return
        if self.has_found:
            return
        known = set(parameters_of(optimizer))
        trained = [each for each in self.own if each in known]
        own = [self.own.pop(each) for each in trained]
        if trained and not hasattr(optimizer, "found_inf"):  # which GradScaler looks at
            averaged = [size_of(each.grad) for each in trained]
            sizes = torch.stack([torch.stack(own), torch.stack(averaged)])
            self.kept.append((self.steps[optimizer], trained, sizes))
        if len(self.kept) == STEPS:
            self.read()

    def read(self) -> None:
        for step, parameters, sizes in self.kept:
            own, averaged = sizes.isfinite().tolist()
            if not all(averaged):
                self.has_found = True
                if self.rank == 0 or not all(own):
                    say(f"guard.py: step {step}: {describe(self.rank, parameters, own)}")
                break
        self.kept = []

    def end(self) -> None:
        """The script has ended."""
        within(LIMIT, self.last_read)

    def last_read(self) -> None:
        self.read()
        if self.rank == 0 and self.weights is not None and not self.weights.isfinite().all():
            text = "the weights are not finite: CHECK_FINITE=1 names the step, rank and layer"
            say(f"guard.py: {text}")


def size_of(gradient):
    return torch.linalg.vector_norm(gradient, math.inf).float()


def describe(rank: int, parameters: list, are_finite: list[bool]) -> str:
    """parameters: in the order in which the backward pass came to them."""
    if all(are_finite):
        return f"the average of the gradients is not finite, but those of rank {rank} are"
    first = are_finite.index(False)
    text = f"{are_finite.count(False)} of {len(parameters)} gradients of rank {rank} are not finite"
    if first == 0:
        return f"{text}, from the loss on"
    layer = name_of(parameters[first])
    return f"{text}; look at the layers from {layer} to {name_of(parameters[first - 1])}"


def name_of(parameter) -> str:
    """Its name in the outermost module."""
    names = [""]
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            names += [name for name, own in each.named_parameters() if own is parameter]
    return max(names, key=len).removeprefix("module.")
