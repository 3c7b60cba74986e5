"""Tasks of the tests; as a script, it trains Photos."""

import sys
import textwrap
from pathlib import Path

import torch
from torchvision.models import resnet18

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.imagenet import Images  # noqa: E402
from train_distributed import (  # noqa: E402
    InMemoryDataset,
    Normalized,
    SimpleConvNet,
    Task,
    main,
)


class Photos(Images):
    """Image files, with a network that is small and has no BatchNorm."""

    def model(self, cfg):
        classes = len(self.spec["classes"])
        network = SimpleConvNet(3, cfg.image_size, classes, dropout=0.25)
        return Normalized(network, mean=[0.5] * 3, std=[0.25] * 3)


class ResNet(Task):
    """Digits, with BatchNorm, whose statistics differ between ranks."""

    def model(self, cfg):
        return Normalized(resnet18(num_classes=10), mean=[0.1307] * 3, std=[0.3081] * 3)

    def blocks(self, model):
        return Images.blocks(self, model)


QUICK = ["--batch-size=8", "--warmup-epochs=0"]


class Small(Task):
    """A small regression, to be subclassed."""

    best = "loss"
    best_is_lowest = True

    def data(self, cfg):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        y = x.sum(1, keepdim=True)
        return InMemoryDataset(x[:48], y[:48]), InMemoryDataset(x[48:], y[48:])

    def model(self, cfg):
        return torch.nn.Linear(4, 1)

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean(), {}

    def report(self, sums):
        return {"loss": sums["loss"] / sums["count"]}


MINE = """
import os
import numpy as np
import torch
import train_distributed as trainer
from tasks import Small

class Mine(Small):
{}

task = Mine()
"""


def small(methods: str = "pass") -> dict[str, str]:
    """For train(): a subclass of Small with these methods."""
    return {"before": MINE.format(textwrap.indent(methods.strip(), "    "))}


def task_of(methods: str = "pass") -> Task:
    """The task of small(), for this process."""
    scope: dict = {}
    exec(small(methods)["before"], scope)
    return scope["task"]


if __name__ == "__main__":
    main(Photos())
