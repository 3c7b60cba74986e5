"""Train on one GPU or many with PyTorch DDP, in one flat file to copy and change.

    python train_minimal.py
    torchrun --standalone --nproc-per-node 4 train_minimal.py
    TRAIN_SCRIPT=train_minimal.py sbatch --nodes=2 run_distributed.slurm --epochs 10

Each step uses the same samples on any number of GPUs. To save and stop: Ctrl-C, SIGTERM, SIGUSR1 or
SIGUSR2 to any rank, or a file $STOP_FILE. The same command resumes, also on another number of GPUs,
without losing or repeating a sample; without dropout or random augmentation, the weights differ by
rounding only. For mixed precision, best checkpoints and bit-identical weights: train_distributed.py
"""

import argparse
import math
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

DIGITS = Path(__file__).resolve().parent / "data" / "mnist_sample"
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
EXCHANGE_EVERY = 10  # steps that take a few seconds together: a stop waits for the exchange


class SimpleConvNet(nn.Module):
    """Images [b, 1, 28, 28] -> logits [b, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))  # [b, 32, 26, 26]
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # [b, 64, 12, 12]
        x = F.relu(self.fc1(x.flatten(1)))  # [b, 128]
        return self.fc2(x)


def build_parser():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # error() prints one line
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--checkpoint-dir", default="runs/minimal", help="of this run")
    parser.add_argument("--data-dir", default=DIGITS, help="it has MNIST/raw")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training set")
    parser.add_argument("--global-batch-size", type=int, default=128, help="samples per step")
    parser.add_argument("--lr", type=float, default=0.03, help="at the start; a cosine to 0")
    parser.add_argument("--save-every", type=int, default=100, help="steps; 0: after epochs only")
    return parser


def setup_distributed():
    """Returns (rank, world_size, device). A rank is one process with one GPU."""
    rank = int(os.environ.get("RANK", 0))  # torchrun has set it, or scripts/guard.py under srun
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    store = dist.HashStore() if world_size == 1 else None  # None: that of MASTER_ADDR
    device = torch.device("cpu")
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()  # may see only one
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store)
    return rank, world_size, device


def samples_of_steps(step, samples, batch, rank, world_size):
    """Yields the indices of this rank's samples for each step, from this one on, without an end."""
    steps_per_epoch = samples // batch  # what remains of an epoch is left out
    while True:
        epoch, place = divmod(step, steps_per_epoch)
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
        for begin in range(place * batch, steps_per_epoch * batch, batch):
            yield order[begin : begin + batch][rank::world_size].tolist()
            step += 1


def get_dataloader(dataset, indices, device, seed):
    """Iterates over (images [b, 1, 28, 28], labels [b]); indices yields those of each batch."""
    random_numbers = torch.Generator().manual_seed(seed)  # of the workers
    options = {"num_workers": 1, "pin_memory": device.type == "cuda", "generator": random_numbers}
    loader = DataLoader(dataset, batch_sampler=indices, multiprocessing_context="fork", **options)
    # Schedulers signal all processes of a job, but a rank needs its workers until it stops.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    batches = iter(loader)  # starts the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return batches


def save(path, state):
    """On rank 0. Under another name first, so that a crash leaves the previous checkpoint."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


@torch.no_grad()
def evaluate(model, test_set, rank, world_size, device):
    """Returns (mean loss, accuracy) over the test set, each sample once. Collective."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # such as BatchNorm's statistics, of which rank 0's are saved
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, correct
    indices = BatchSampler(range(rank, len(test_set), world_size), 256, drop_last=False)
    for images, labels in get_dataloader(test_set, indices, device, seed=0):
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
    dist.all_reduce(sums)
    model.train()
    return (sums / len(test_set)).tolist()


def main():
    parser = build_parser()
    args = parser.parse_args()
    rank, world_size, device = setup_distributed()
    transform = Compose([ToTensor(), Normalize([0.1307], [0.3081])])
    try:
        train_set = MNIST(args.data_dir, train=True, transform=transform)
        test_set = MNIST(args.data_dir, train=False, transform=transform)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(f"cannot read MNIST/raw in --data-dir {args.data_dir} ({error})")
    samples, batch = len(train_set), args.global_batch_size
    if not world_size <= batch <= samples:
        parser.error(f"--global-batch-size is not from {world_size} (ranks) to {samples} (samples)")
    steps_per_epoch = samples // batch
    last_step = args.epochs * steps_per_epoch
    torch.manual_seed(0)
    model = SimpleConvNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    path = Path(args.checkpoint_dir) / "checkpoint.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    setup = {"samples": samples, "global_batch_size": batch}  # what must not change in a run
    step = 0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["setup"] != setup:
            parser.error(f"{path} has {state['setup']}, not {setup}: set another --checkpoint-dir")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    steps = [None] * world_size
    dist.all_gather_object(steps, step)
    if len(set(steps)) > 1:
        parser.error(f"the ranks see {path} at the steps {steps}: --checkpoint-dir is not shared")
    if rank == 0:
        print(f"{world_size} x {device.type}: from step {step} to {last_step}", flush=True)
    ddp = nn.parallel.DistributedDataParallel(model)
    indices = samples_of_steps(step, samples, batch, rank, world_size)
    batches = get_dataloader(train_set, indices, device, seed=step * world_size + rank)
    signals = []  # that this rank has received; before this point they end it, and nothing is lost

    def on_signal(number, _frame):
        signals.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends this process at once

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)

    stop = False
    sums = torch.zeros(4, device=device)  # since the last exchange: loss, correct, samples, stops
    began = time.time()
    while not stop:
        if step > 0 and step % steps_per_epoch == 0:  # a run that was stopped here evaluates now
            loss, accuracy = evaluate(model, test_set, rank, world_size, device)
            if rank == 0:
                text = f"test loss {loss:.4f}, test accuracy {accuracy:.4f}"
                print(f"epoch {step // steps_per_epoch}: {text}", flush=True)
            began = time.time()
        if step >= last_step:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 + math.cos(math.pi * step / last_step)) / 2
        torch.manual_seed(step * world_size + rank)  # for dropout: other masks at each step, rank
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        logits = ddp(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        (loss * world_size / batch).backward()  # DDP averages over the ranks
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        sums[0] += loss.detach()
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
        saves = step % steps_per_epoch == 0 or (args.save_every and step % args.save_every == 0)
        if saves or step % EXCHANGE_EVERY == 0:
            sums[3] = bool(signals) or os.path.exists(os.environ.get("STOP_FILE", ""))
            dist.all_reduce(sums)  # so that all ranks stop after the same step
            loss, correct, count, stop = sums.tolist()
            sums.zero_()
            if not math.isfinite(loss + sum(p.sum().item() for p in model.parameters())):
                parser.error(f"the loss or a weight is not finite at step {step}: lower --lr")
            if rank == 0:
                text = f"loss {loss / count:.4f}, accuracy {correct / count:.4f}"
                speed = count / (time.time() - began)
                print(f"step {step}: {text}, {speed:.0f} samples/s", flush=True)
            if rank == 0 and (saves or stop):
                state = {"step": step, "setup": setup, "model": model.state_dict()}
                save(path, state | {"optimizer": optimizer.state_dict()})
            began = time.time()

    if rank == 0:
        print(f"{'stopped' if stop else 'finished'} at step {step} of {last_step}, saved {path}")
    dist.barrier()  # rank 0 has saved: a launcher may end all ranks when one has ended
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # of the DataLoader: it would complain
        for worker in torch.multiprocessing.active_children():
            worker.kill()  # after an error, Python would send them SIGTERM, and wait forever
