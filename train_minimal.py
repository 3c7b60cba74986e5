"""Train on one GPU or many with PyTorch DDP, in one flat file to copy and change.

    python train_minimal.py
    torchrun --standalone --nproc-per-node 4 train_minimal.py --amp bf16
    TRAIN_SCRIPT=train_minimal.py PROGRESS_FILE='runs/minimal/*.pt' sbatch run_distributed.slurm

Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 to any rank, or a file $STOP_FILE, saves and stops. The same
command resumes, on any number of GPUs: same samples, other dropout, weights equal up to rounding.
"""

import argparse
import math
import os
import signal
import time
import zipfile
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from torchvision import datasets, transforms


# Yours: the data, the model and, below, the loss.
def load_data(data_dir):
    """(training set, test set): each has a length, and data_set[i] is a tuple of tensors."""
    prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.1307], [0.3081])])
    return [datasets.MNIST(data_dir, train=train, transform=prepare) for train in (True, False)]


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
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


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


def micro_batches_from(step, samples, args, rank, world_size):
    """Yields the indices of this rank's micro-batches, from this step on, without an end."""
    batch = args.global_batch_size
    steps_per_epoch = samples // batch  # what remains of an epoch is left out
    epoch, first = divmod(step, steps_per_epoch)
    while True:
        generator = torch.Generator().manual_seed(1_000_000 * args.seed + epoch)
        order = torch.randperm(samples, generator=generator)
        for begin in range(first * batch, steps_per_epoch * batch, batch):
            own = order[begin : begin + batch][rank::world_size]
            for micro in range(args.accumulate):
                yield own[micro :: args.accumulate].tolist()
        epoch, first = epoch + 1, 0


def get_dataloader(dataset, indices, args, device):
    """Iterates over (images [b, 1, 28, 28], labels [b]). Signals stop the rank, not its workers."""
    options = {"num_workers": args.num_workers, "pin_memory": device.type == "cuda"}
    everything = signal.valid_signals()
    options["worker_init_fn"] = lambda _: signal.pthread_sigmask(signal.SIG_BLOCK, everything)
    return DataLoader(dataset, batch_sampler=indices, **options)


def save(path, state):
    """On rank 0. Under another name first, so that a crash leaves the previous checkpoint."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def is_damaged(path):
    """Compares the file with the check sums in it, which torch.load() does not."""
    with suppress(Exception):  # of many types
        return zipfile.ZipFile(path).testzip() is not None
    return True


@torch.no_grad()
def evaluate(model, test_set, args, rank, world_size, device):
    """Returns (mean loss, accuracy) over the test set, each sample once. Collective."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # such as BatchNorm's statistics, of which rank 0's are saved
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, correct
    indices = BatchSampler(range(rank, len(test_set), world_size), 256, drop_last=False)
    for images, labels in get_dataloader(test_set, indices, args, device):
        logits, labels = model(images.to(device)), labels.to(device)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
    dist.all_reduce(sums)
    model.train()
    return (sums / len(test_set)).tolist()


def main():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)  # error() prints one line
    add = parser.add_argument
    add("--checkpoint-dir", default="runs/minimal", help="of this run")
    add("--data-dir", default=Path(__file__).with_name("data") / "mnist_sample", help="of MNIST")
    add("--epochs", type=int, default=5, help="passes over the training set")
    add("--global-batch-size", type=int, default=128, help="samples per step, of all GPUs")
    add("--accumulate", type=int, default=1, help="forward passes per step: less memory")
    add("--lr", type=float, default=0.03, help="peak; a cosine to 0 follows")
    add("--warmup-steps", type=int, default=0, help="from 0 to the peak")
    add("--clip-grad-norm", type=float, default=math.inf, help="largest norm of the gradient")
    add("--amp", choices=["off", "bf16"], default="off", help="mixed precision")
    add("--num-workers", type=int, default=1, help="processes of each rank that read data")
    add("--seed", type=int, default=0, help="of the weights and the order of the samples")
    add("--save-every", type=int, default=100, help="steps")
    add("--wandb", action="store_true", help="log to Weights & Biases")
    args = parser.parse_args()
    torch.multiprocessing.set_start_method("fork", force=True)  # signals end a forkserver
    rank, world_size, device = setup_distributed()
    torch.manual_seed(args.seed)  # all ranks begin with the same data and weights
    if not Path(args.data_dir, "MNIST/raw").is_dir():  # no download: the ranks would race
        parser.error(f"cannot read MNIST/raw in --data-dir {args.data_dir}")
    train_set, test_set = load_data(args.data_dir)
    samples, batch = len(train_set), args.global_batch_size
    if not 0 < world_size * args.accumulate <= batch <= samples:
        parser.error(f"--global-batch-size is not from ranks x --accumulate to {samples} (samples)")
    steps_per_epoch = samples // batch
    last_step = args.epochs * steps_per_epoch
    model = SimpleConvNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    path = Path(args.checkpoint_dir) / "checkpoint.pt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{path}.tmp").touch()
    except OSError as error:
        parser.error(f"cannot write to --checkpoint-dir ({error})")
    setup = {"samples": samples, "global_batch_size": batch, "seed": args.seed}  # of the whole run
    step = 0
    if path.exists():
        if is_damaged(path):
            parser.error(f"{path} is damaged: delete it to begin anew")
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
    run = None
    if rank == 0 and args.wandb:
        import wandb  # WANDB_MODE=offline needs no server

        run = wandb.init(group=path.parent.name, config=vars(args))  # another run per launch

    def log(text, **values):
        if rank == 0:
            print(text, *[f"{name} {value:.5g}" for name, value in values.items()], flush=True)
        if run:
            run.log(values, step=step)

    log(f"{path}: from step {step} to {last_step}; for a new run, set another --checkpoint-dir")
    ddp = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(args.seed + step * world_size + rank)  # of the workers, for augmentation
    indices = micro_batches_from(step, samples, args, rank, world_size)
    batches = iter(get_dataloader(train_set, indices, args, device))
    signals = []  # that this rank has received; before this point they end it, and nothing is lost
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: signals.append(number))
    stop = False
    next_exchange = step + 1
    began = time.time()
    sums = torch.zeros(5, device=device)  # since then: loss, correct, samples; stops, seconds
    while not stop:
        if step > 0 and step % steps_per_epoch == 0:  # a run that was stopped here evaluates now
            loss, accuracy = evaluate(model, test_set, args, rank, world_size, device)
            log(f"epoch {step // steps_per_epoch}:", test_loss=loss, test_accuracy=accuracy)
            began = time.time()
        if step >= last_step:
            break
        warmup = min(1, (step + 1) / (args.warmup_steps + 1))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmup * (1 + math.cos(math.pi * step / last_step)) / 2
        torch.manual_seed(args.seed + step * world_size + rank)  # other dropout at each step, rank
        for micro in range(args.accumulate):
            images, labels = [part.to(device, non_blocking=True) for part in next(batches)]
            is_last = micro == args.accumulate - 1  # then DDP averages the gradients
            with nullcontext() if is_last else ddp.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.amp == "bf16"):
                    logits = ddp(images)
                    loss = F.cross_entropy(logits, labels, reduction="sum")
                (loss * world_size / batch).backward()  # means of unequal parts do not add up
            sums[0] += loss.detach()
            sums[1] += (logits.argmax(1) == labels).sum()
            sums[2] += len(labels)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        saves = step % steps_per_epoch == 0 or step % args.save_every == 0
        if saves or step >= next_exchange:
            sums[3] = bool(signals) or os.path.exists(os.environ.get("STOP_FILE", ""))
            sums[4] = time.time() - began
            dist.all_reduce(sums)  # so that all ranks stop after the same step
            loss, correct, count, stop, seconds = sums.tolist()
            steps_per_second = count / batch / (seconds / world_size)
            next_exchange = step + 1 + int(2 * steps_per_second)  # a stop waits two seconds
            state = {"step": step, "setup": setup, "model": model.state_dict()}
            if not all(weight.isfinite().all() for weight in state["model"].values()):
                parser.error(f"a weight is not finite at step {step}: lower --lr")
            log(f"step {step}:", loss=loss / count, accuracy=correct / count, norm=norm.item())
            if rank == 0 and (saves or stop):
                save(path, state | {"optimizer": optimizer.state_dict()})
            began = time.time()
            sums.zero_()
    log(f"{'stopped' if stop else 'finished'} at step {step} of {last_step}, saved {path}")
    dist.barrier()  # rank 0 has saved: a launcher may end all ranks when one has ended
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the DataLoader's would raise an error
        for worker in torch.multiprocessing.active_children():
            worker.kill()  # it blocks the signal with which Python would end it
