"""The programs that benchmarks/speed.py compares: the same training, as each project documents it.

All train the same network on the same data with SGD and momentum 0.9. A contestant is a function
with the arguments (setup, clock) that calls clock.tick() after every step until clock.over.
"""

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
BLOCKS = 10  # blocks of equally many steps per turn; the first one is warm-up
SYNTHETIC = 512  # number of synthetic images, repeated as needed


@dataclass
class Setup:
    """What to train and where."""

    batch: int
    steps: int
    directory: str  # for output
    device: str  # cpu or cuda
    model: str = "simple_convnet"  # or one of torchvision's
    dataset: str = "mnist"  # or synthetic, or imagefolder
    data_dir: str = "data"  # of MNIST and of imagefolder
    classes: int = 1000  # except for MNIST
    size: int = 224  # pixels per side, except for MNIST
    amp: str = ""  # or bf16, or fp16
    compile: bool = False
    workers: int = 2  # loader processes per rank
    idle: bool = False  # profile the last block instead of timing it
    tuned: bool = False  # for the peers: normalized floats in memory, channels_last


class Profile:
    """Measures the share of time in which the GPU runs nothing; on a CPU, no operator of PyTorch.

    Measured with PyTorch's profiler, from the first kernel to the last. Copies count as work.
    """

    def __init__(self, gpu: bool):
        from torch.profiler import ProfilerActivity, profile

        self.kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if gpu else {"cpu_op"}
        self.profile = profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU])

    def idle_share(self) -> float:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "trace.json")
            self.profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(errors="replace"))["traceEvents"]
        work = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in self.kinds]
        return idle_share(work)


def idle_share(work: list[tuple[float, float]]) -> float:
    """The share of the time from the first (begin, end) to the last that none of them covers."""
    if not work:  # the profiler may not be allowed to see the GPU
        return math.nan
    work = sorted(work)
    first = end = work[0][0]
    idle = 0.0
    for begin, until in work:
        idle += max(0.0, begin - end)
        end = max(end, until)
    return idle / (end - first)


class Clock:
    """Records when the first step ended, and the duration of each block after the first.

    With a profile, the last block is profiled, not timed.
    """

    def __init__(self, steps: int, synchronize=lambda: None, profile: Profile | None = None):
        self.steps, self.done, self.first, self.synchronize = steps, 0, 0.0, synchronize
        self.block, self.profile = steps // BLOCKS, profile
        self.blocks: list[float] = []

    def tick(self) -> None:
        self.done += 1
        if self.done == 1:
            self.synchronize()
            self.first = time.time()
        if self.done % self.block == 0:
            self.synchronize()
            now, number = time.perf_counter(), self.done // self.block
            if number > 1 and not (self.profile and number == BLOCKS):
                self.blocks.append(now - self.began)
            if self.profile and number == BLOCKS - 1:
                self.profile.profile.start()
            elif self.profile and number == BLOCKS:
                self.profile.profile.stop()
            self.began = time.perf_counter()

    @property
    def over(self) -> bool:
        return self.done >= self.steps


def network(setup: Setup | None = None):
    """SimpleConvNet without dropout, or the torchvision model setup.model."""
    from torch import nn

    if setup and setup.model != "simple_convnet":
        import torchvision

        return torchvision.models.get_model(setup.model, num_classes=setup.classes)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def peer_network(setup: Setup):
    """network(), with the memory layout of `ours` if setup.tuned."""
    import torch

    if setup.tuned:
        return network(setup).to(memory_format=torch.channels_last)
    return network(setup)


def mnist_floats(setup: Setup):
    """(normalized images of the shape [N, 1, 28, 28], labels) in memory."""
    import torchvision

    data = torchvision.datasets.MNIST(setup.data_dir)
    images = data.data[:, None].float().div_(255).sub_(0.1307).div_(0.3081)
    return images, data.targets


def dataset(setup: Setup):
    """The data set as in the examples of PyTorch, Lightning, Accelerate: a transform per image.

    With setup.tuned, MNIST is a TensorDataset of normalized floats; synthetic images always are.
    """
    import torch
    import torchvision
    from torchvision import transforms

    if setup.dataset == "synthetic":
        images = torch.randn(SYNTHETIC, 3, setup.size, setup.size)
        data = torch.utils.data.TensorDataset(images, torch.randint(0, 1000, (SYNTHETIC,)))
        return torch.utils.data.ConcatDataset(
            [data] * (needed(setup.steps, setup.batch, ranks()) // SYNTHETIC + 1)
        )
    if setup.dataset == "imagefolder":
        steps = [transforms.RandomResizedCrop(setup.size), transforms.RandomHorizontalFlip()]
        scale = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        steps = transforms.Compose([*steps, transforms.ToTensor(), scale])
        return torchvision.datasets.ImageFolder(Path(setup.data_dir, "train"), steps)
    if setup.tuned:
        return torch.utils.data.TensorDataset(*mnist_floats(setup))
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    return torchvision.datasets.MNIST(setup.data_dir, transform=transforms.Compose(steps))


def ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def my_rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def needed(steps: int, batch: int, ranks: int) -> int:
    """Number of samples such that no epoch ends within a turn."""
    return (steps + 1) * batch * ranks


def loading(setup: Setup) -> dict:
    """DataLoader options that PyTorch's tuning guide recommends."""
    gpu, workers = setup.device == "cuda", setup.workers
    return {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": gpu}


def my_device(setup: Setup):
    import torch

    if setup.device == "cuda":
        torch.cuda.set_device(my_rank())
    return torch.device(setup.device)


def join(setup: Setup):
    """Join the process group. Returns my_device()."""
    import torch.distributed as dist

    dist.init_process_group("nccl" if setup.device == "cuda" else "gloo")
    return my_device(setup)


def autocast(setup: Setup):
    import torch

    dtype = torch.float16 if setup.amp == "fp16" else torch.bfloat16
    return torch.autocast(setup.device, dtype, enabled=bool(setup.amp))


def grad_scaler(setup: Setup):
    import torch

    return torch.amp.GradScaler(setup.device, enabled=setup.amp == "fp16")


def ours(setup: Setup, clock: Clock, *more: str) -> None:
    """train_distributed.py or examples/imagenet.py, without dropout, as the others."""
    sys.path.insert(0, str(REPO))
    import train_distributed as trainer
    from examples.imagenet import Images

    parent = trainer.Task if setup.dataset == "mnist" else Images

    class Repeated(trainer.InMemoryDataset):
        """The same images again and again, so that no epoch ends within a turn."""

        def __len__(self) -> int:
            return needed(setup.steps, setup.batch, ranks())

    class BenchmarkTask(parent):
        def data(self, cfg):
            train, test = super().data(cfg)
            if setup.dataset == "synthetic":
                images, labels = train.tensors
                train = Repeated(images[:SYNTHETIC], labels[:SYNTHETIC])
            return train, test

    def repeated(*arguments):
        part = micro_batch(*arguments)
        return part._replace(indices=part.indices % SYNTHETIC)

    def timed_step(*arguments) -> None:
        train_step(*arguments)
        clock.tick()

    options = [
        "--warmup-epochs=0",
        "--lr=0.01",
        "--weight-decay=0",
        f"--epochs={clock.steps}",
        f"--stop-at-step={clock.steps}",
        f"--log-every-steps={clock.block}",
        f"--batch-size={setup.batch}",
        f"--data-dir={setup.data_dir}",
        f"--num-workers={setup.workers}",
        f"--checkpoint-dir={setup.directory}",
        *more,
    ]
    if setup.dataset == "mnist":
        options += ["--dataset=mnist", "--dropout=0"]
    else:
        options += [f"--model={setup.model}", f"--image-size={setup.size}"]
    if setup.dataset == "synthetic":
        options.append("--synthetic")
    if setup.amp:
        options.append(f"--amp={setup.amp}")
    if setup.compile:
        options.append("--compile")
    train_step = trainer.train_step
    trainer.train_step = timed_step
    micro_batch = trainer.SampleStream.micro_batch
    if setup.dataset == "synthetic":
        trainer.SampleStream.micro_batch = repeated
        trainer.InMemoryDataset = Repeated
    with contextlib.redirect_stdout(sys.stderr):
        trainer.main(BenchmarkTask(), options)


def bare(setup: Setup, clock: Clock) -> None:
    """Ours, started by torchrun alone: no scripts/guard.py, no settings of the launchers."""
    ours(setup, clock)


def reproducible(setup: Setup, clock: Clock) -> None:
    """Ours with --reproducible."""
    ours(setup, clock, "--reproducible")


def limit(setup: Setup, clock: Clock, exchange=lambda model: None) -> None:
    """A bare loop over normalized floats on the device: no loader, no DDP, no metrics."""
    import torch

    device = my_device(setup)
    if setup.dataset == "mnist":
        images, labels = mnist_floats(setup)
    else:
        number = max(SYNTHETIC, setup.batch + 1)
        images = torch.randn(number, 3, setup.size, setup.size)
        labels = torch.randint(0, setup.classes, (number,))
    if setup.device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        begin, end = (len(cores) * n // ranks() for n in (my_rank(), my_rank() + 1))
        os.sched_setaffinity(0, cores[begin:end] or cores)  # as scripts/guard.py does
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as the trainer
    images = images.to(device).contiguous(memory_format=torch.channels_last)
    labels, order = labels.to(device), torch.randperm(len(images)).to(device)
    model = network(setup).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = grad_scaler(setup)
    if setup.compile:
        model.compile(dynamic=False)
    while not clock.over:
        start = clock.done * setup.batch % (len(images) - setup.batch)
        rows = order[start : start + setup.batch]
        optimizer.zero_grad()
        with autocast(setup):
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
        scaler.scale(loss).backward()
        exchange(model)
        scaler.step(optimizer)
        scaler.update()
        clock.tick()


def sums(setup: Setup, clock: Clock) -> None:
    """The limit plus one all_reduce of all gradients after each backward pass."""
    import torch
    import torch.distributed as dist

    def exchange(model) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= ranks()
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients)])

    join(setup)
    limit(setup, clock, exchange)


def usual_loop(setup: Setup, clock: Clock, loader, model, device, read_loss_every: int) -> None:
    """The training loop of most tutorials."""
    import torch

    if setup.compile:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = grad_scaler(setup)
    while not clock.over:
        for number, (images, labels) in enumerate(loader):
            images = images.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            with autocast(setup):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if number % read_loss_every == 0:
                loss.item()
            clock.tick()
            if clock.over:
                break


def template(setup: Setup, clock: Clock) -> None:
    """What most DDP tutorials do: loader workers, DistributedSampler, .item() in every step."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    device, data = join(setup), dataset(setup)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, setup.batch, sampler=sampler, drop_last=True, **loading(setup))
    model = torch.nn.parallel.DistributedDataParallel(network(setup).to(device))
    usual_loop(setup, clock, loader, model, device, read_loss_every=1)


def examples(setup: Setup, clock: Clock) -> None:
    """As in mnist/main.py of pytorch/examples: reads the loss rarely, no loader workers on a CPU.

    With several ranks, as in its distributed/ddp-tutorial-series: DDP and DistributedSampler.
    """
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    device = join(setup) if ranks() > 1 else my_device(setup)
    data, model, sampler = dataset(setup), network(setup).to(device), None
    if ranks() > 1:
        model, sampler = torch.nn.parallel.DistributedDataParallel(model), DistributedSampler(data)
    more = loading(setup) if setup.device == "cuda" or setup.dataset == "imagefolder" else {}
    loader = DataLoader(data, setup.batch, sampler=sampler, shuffle=not sampler, **more)
    usual_loop(setup, clock, loader, model, device, read_loss_every=10)


def lightning(setup: Setup, clock: Clock) -> None:
    """Lightning's Trainer with its defaults, but without checkpoints, as the others."""
    import torch
    from lightning import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Images(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = peer_network(setup)

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

    loader = DataLoader(dataset(setup), setup.batch, shuffle=True, **loading(setup))
    with contextlib.redirect_stdout(sys.stderr):
        trainer = Trainer(
            accelerator="gpu" if setup.device == "cuda" else "cpu",
            devices=ranks(),
            strategy="ddp" if ranks() > 1 else "auto",
            precision={"": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[setup.amp],
            max_steps=clock.steps,
            callbacks=[Watch()],
            default_root_dir=setup.directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Images()
        trainer.fit(torch.compile(module) if setup.compile else module, loader)


def accelerate(setup: Setup, clock: Clock) -> None:
    """Accelerate, as in its quick tour."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    gpu = setup.device == "cuda"
    if ranks() == 1:  # otherwise it expects other ranks
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    accelerator = Accelerator(cpu=not gpu, mixed_precision=setup.amp or "no")
    model = peer_network(setup)
    if setup.compile:
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(dataset(setup), setup.batch, shuffle=True, **loading(setup))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while not clock.over:
        for images, labels in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            clock.tick()
            if clock.over:
                break


def timm(setup: Setup, clock: Clock) -> None:
    """timm's loader, loss and optimizer, in the loop of its train.py."""
    import torch
    from timm.data import create_loader
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import NativeScaler
    from torch.utils.data import DataLoader

    device = join(setup) if ranks() > 1 else my_device(setup)
    if setup.dataset == "imagefolder":
        loader = create_loader(
            dataset(setup),
            input_size=(3, setup.size, setup.size),
            batch_size=setup.batch,
            is_training=True,
            num_workers=setup.workers,
            distributed=ranks() > 1,
            device=device,
        )
    else:
        loader = DataLoader(dataset(setup), setup.batch, shuffle=True, **loading(setup))
    model = peer_network(setup).to(device)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.01, momentum=0.9)
    scaler = NativeScaler(device=setup.device) if setup.amp == "fp16" else None
    criterion = LabelSmoothingCrossEntropy(0.0)
    if ranks() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if setup.compile:
        model = torch.compile(model)
    while not clock.over:
        for images, labels in loader:
            images = images.to(device)
            labels = labels.to(device)
            if setup.tuned:
                images = images.contiguous(memory_format=torch.channels_last)
            with autocast(setup):
                loss = criterion(model(images), labels)
            if scaler:
                scaler(loss, optimizer, parameters=model.parameters())
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            clock.tick()
            if clock.over:
                break


CONTESTANTS = {
    "limit": limit,
    "sums": sums,
    "ours": ours,
    "bare": bare,
    "reproducible": reproducible,
    "template": template,
    "examples": examples,
    "lightning": lightning,
    "accelerate": accelerate,
    "timm": timm,
}


def main() -> None:
    """contestants.py NAME SETUP: print the measured times as JSON. SETUP: a Setup as JSON."""
    import resource

    import torch

    name, setup = sys.argv[1], Setup(**json.loads(sys.argv[2]))
    gpu = setup.device == "cuda"
    synchronize = torch.cuda.synchronize if gpu else lambda: None
    clock = Clock(setup.steps, synchronize, Profile(gpu) if setup.idle else None)
    CONTESTANTS[name](setup, clock)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Read it now: unloading CUDA's libraries at exit touches 100 MB more.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if gpu:
        peak = torch.cuda.max_memory_allocated() / 2**20
    speeds = [clock.block * setup.batch / seconds for seconds in clock.blocks]
    found = {"first": clock.first, "speeds": speeds, "peak": peak}
    if setup.idle:
        found["idle"] = clock.profile.idle_share()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
