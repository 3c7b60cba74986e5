"""Who takes part in benchmarks/speed.py: one training, written as each one's documentation does.

All train the same network (two 3x3 convolutions 32/64, max pool, linear 9216-128-10) on the same
digits, SGD with momentum 0.9. Each is a function of (batch, clock, directory), which calls
clock.tick() after every step until clock.over.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SAMPLE = REPO / "data" / "mnist_sample"
BLOCK = 20  # steps between two looks at the clock


class Clock:
    """When the first step ended, and the seconds of each block of steps after the first one."""

    def __init__(self, steps: int):
        self.steps, self.done, self.first = steps, 0, 0.0
        self.blocks: list[float] = []

    def tick(self) -> None:
        self.done += 1
        if self.done == 1:
            self.first = time.time()
        if self.done % BLOCK == 0:
            now = time.perf_counter()
            if self.done > BLOCK:
                self.blocks.append(now - self.began)
            self.began = now

    @property
    def over(self) -> bool:
        return self.done >= self.steps


def network():
    from torch import nn

    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    head = nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, *head)


def ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def dataset():
    """As the MNIST examples of PyTorch, Lightning and Accelerate have it: a transform per image."""
    import torchvision
    from torchvision import transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    return torchvision.datasets.MNIST(SAMPLE, transform=transforms.Compose(steps))


def ours(batch: int, clock: Clock, directory: str) -> None:
    """train_distributed.py, as it is, but for the augmentation and the dropout others lack."""
    sys.path.insert(0, str(REPO))
    import train_distributed

    options = "--no-augment --dropout 0 --warmup-epochs 0 --lr-schedule constant --lr 0.01"
    options += f" --weight-decay 0 --epochs {clock.steps} --stop-at-step {clock.steps}"
    options += f" --batch-size {batch} --log-every-steps {BLOCK} --checkpoint-dir {directory}"
    step = train_distributed.train_step

    def timed(*arguments):
        waited = step(*arguments)
        clock.tick()
        return waited

    train_distributed.train_step = timed
    with contextlib.redirect_stdout(sys.stderr):
        train_distributed.main(options.split())


def limit(batch: int, clock: Clock, _directory: str) -> None:
    """A bare loop: normalised floats in memory, no loader, no DDP, no metrics, our tunings."""
    import torch
    import torchvision

    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 2**31 - 1)
    libc.mallopt(-4, 0)
    data = torchvision.datasets.MNIST(SAMPLE)
    images = ((data.data[:, None] / 255) - 0.1307) / 0.3081
    images = images.contiguous(memory_format=torch.channels_last)
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    order = torch.randperm(len(images))
    while not clock.over:
        start = clock.done * batch % (len(images) - batch)
        rows = order[start : start + batch]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), data.targets[rows]).backward()
        optimizer.step()
        clock.tick()


def template(batch: int, clock: Clock, _directory: str) -> None:
    """What most DDP tutorials do: loader workers, DistributedSampler, .item() in every step."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch, sampler=sampler, num_workers=2, drop_last=True)
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses, epoch = [], 0
    while not clock.over:
        sampler.set_epoch(epoch)
        epoch += 1
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            clock.tick()
            if clock.over:
                break


def examples(batch: int, clock: Clock, _directory: str) -> None:
    """As mnist/main.py of pytorch/examples: the loader in this process, the loss looked at rarely.

    With several processes, as its distributed/ddp-tutorial-series: DDP and DistributedSampler.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    data, model, sampler = dataset(), network(), None
    if ranks() > 1:
        dist.init_process_group("gloo")
        model, sampler = torch.nn.parallel.DistributedDataParallel(model), DistributedSampler(data)
    loader = DataLoader(data, batch, sampler=sampler, shuffle=not sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while not clock.over:
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if number % 10 == 0:
                loss.item()
            clock.tick()
            if clock.over:
                break


def lightning(batch: int, clock: Clock, directory: str) -> None:
    """Lightning's Trainer with its defaults; no checkpoints, which no other makes within a turn."""
    import torch
    from lightning import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Digits(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, _index):
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(self.network(images), labels)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    class Watch(Callback):
        def on_train_batch_end(self, *_arguments):
            clock.tick()

    loader = DataLoader(dataset(), batch, shuffle=True, num_workers=2, persistent_workers=True)
    with contextlib.redirect_stdout(sys.stderr):
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks(),
            strategy="ddp" if ranks() > 1 else "auto",
            max_steps=clock.steps,
            callbacks=[Watch()],
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Digits(), loader)


def accelerate(batch: int, clock: Clock, _directory: str) -> None:
    """Accelerate, as its quick tour."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator, model = Accelerator(cpu=True), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(dataset(), batch, shuffle=True, num_workers=2, persistent_workers=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while not clock.over:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            clock.tick()
            if clock.over:
                break


CONTESTANTS = {
    function.__name__: function
    for function in (limit, ours, template, examples, lightning, accelerate)
}


def main() -> None:
    """contestants.py NAME BATCH STEPS DIRECTORY: prints what its clock showed, as JSON."""
    import resource

    name, batch, steps, directory = sys.argv[1:]
    if name != "ours":  # which does so by itself
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    clock = Clock(int(steps))
    CONTESTANTS[name](int(batch), clock, directory)
    # Not after the process has ended: unloading CUDA's libraries touches 100 MB more.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    speeds = [BLOCK * int(batch) / seconds for seconds in clock.blocks]
    print(json.dumps({"first": clock.first, "speeds": speeds, "peak": peak}))


if __name__ == "__main__":
    main()
