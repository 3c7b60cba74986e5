"""A script without Task: plain DDP that stops, resumes and restarts under the launchers.

    torchrun --standalone --nproc-per-node 2 scripts/guard.py examples/own_script.py
    scripts/supervise.py torchrun --standalone --nproc-per-node 2 scripts/guard.py \
        examples/own_script.py --checkpoint-dir runs/supervised
    TRAIN_SCRIPT=examples/own_script.py sbatch --nodes=2 run_distributed.slurm \
        configs/default_config.yaml --checkpoint-dir runs/slurm

A script of your own must resume from its last checkpoint. To stop without losing steps, it also
needs stop_requested() and write_status(): scripts/supervise.py reads from the status whether the
run has finished, and how far it came before a crash.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BEGAN = time.time()
SIGNALS = []  # those that this rank has received
STOP_EVERY = 10  # steps; they should take a few seconds at most: Slurm kills 30 s after SIGTERM


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed-backend", help="the launchers pass it if BACKEND is set")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("runs/own_script"))
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--global-batch-size", type=int, default=96, help="samples per step")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    return parser.parse_args()


def setup_distributed(backend: str | None) -> torch.device:
    """torchrun, or guard.py under srun, has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR."""
    if "RANK" not in os.environ:
        user_error("start this script with torchrun, as shown at its top")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()  # a rank may see only one
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    dist.init_process_group(backend or ("nccl" if device.type == "cuda" else "gloo"))
    return device


def user_error(text: str) -> None:
    """Exit with code 2, after which supervise.py does not restart the script."""
    if os.environ.get("RANK", "0") == "0":
        print(f"own_script.py: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5000, 20, generator=generator)
    labels = inputs[:, :3].argmax(dim=1)
    return TensorDataset(inputs, labels)


def stop_requested(run: Path, device: torch.device) -> bool:
    """Collective: the same answer on all ranks, so that all of them leave after the same step."""
    files = [run / "STOP", Path(os.environ.get("STOP_FILE") or run / "STOP")]
    requested = bool(SIGNALS) or any(file.exists() for file in files)
    flag = torch.tensor(float(requested), device=device)
    dist.all_reduce(flag)
    return flag.item() > 0


def save(
    path: Path, step: int, global_batch_size: int, model: nn.Module, optimizer: Optimizer
) -> None:
    """Rank 0. Written to another name first, so that a crash leaves the previous checkpoint.

    Your own state, such as a schedule, a GradScaler or random generators, belongs here, too.
    """
    state = {"step": step, "global_batch_size": global_batch_size}
    state["model"] = model.state_dict()
    state["optimizer"] = optimizer.state_dict()
    with open(f"{path}.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def load(path: Path, global_batch_size: int, model: nn.Module, optimizer: Optimizer) -> int:
    """Collective. Returns the step of the checkpoint, 0 if there is none."""
    step = 0
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = state["global_batch_size"]
        if saved != global_batch_size:
            user_error(f"{path} needs --global-batch-size {saved}, not {global_batch_size}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    if len(set(steps)) > 1:
        raise RuntimeError(f"the ranks see steps {steps} in {path}: is it on a shared disk?")
    return step


def write_status(run: Path, state: str, start_step: int, step: int, saved_step: int) -> None:
    """Rank 0, at the start, every few steps and at the end. state: running, stopped, finished.

    The reason of a stop is the signal, or "STOP file": supervise.py then knows why it created that
    file. After a time limit or a preemption, it requeues the job.
    """
    if "STATUS_FILE" not in os.environ:  # not under supervise.py
        return
    reason = ""
    if state == "stopped":
        reason = signal.Signals(SIGNALS[0]).name if SIGNALS else "STOP file"
    status = {
        "state": state,
        "reason": reason,
        "run_dir": str(run.resolve()),
        "start_step": start_step,
        "global_step": step,
        "saved_step": saved_step,
        "world_size": dist.get_world_size(),
        "began": BEGAN,
        "time": time.time(),
    }
    path = os.environ["STATUS_FILE"]
    Path(f"{path}.tmp").write_text(json.dumps(status))
    os.replace(f"{path}.tmp", path)


def get_loader(data: TensorDataset, global_batch_size: int) -> DataLoader:
    """Step by step, any number of ranks that divides the global batch gets the same samples."""
    ranks = dist.get_world_size()
    if global_batch_size % ranks != 0:
        user_error(f"--global-batch-size {global_batch_size} is no multiple of {ranks} ranks")
    sampler = DistributedSampler(data, drop_last=True)
    return DataLoader(data, global_batch_size // ranks, sampler=sampler, drop_last=True)


def remaining_batches(loader: DataLoader, start_step: int, epochs: int):
    """(number of the step, its batch) of this rank, without those before the restart.

    The skipped batches of an epoch are loaded, too. If that takes long, skip their indices in the
    sampler instead.
    """
    first_epoch = start_step // len(loader)
    step = first_epoch * len(loader)
    for epoch in range(first_epoch, epochs):
        loader.sampler.set_epoch(epoch)  # another order in each epoch
        for batch in loader:
            step += 1
            if step > start_step:
                yield step, batch


def train(args: argparse.Namespace, device: torch.device) -> None:
    is_main = dist.get_rank() == 0
    run = args.checkpoint_dir
    run.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start_step = load(run / "checkpoint.pt", args.global_batch_size, model, optimizer)
    ddp = DistributedDataParallel(model)
    torch.manual_seed(start_step * 10000 + dist.get_rank())  # for dropout: other masks on each rank
    loader = get_loader(make_data(), args.global_batch_size)
    last_step = args.epochs * len(loader)

    step = saved_step = start_step
    if is_main:
        print(f"starts at step {start_step} of {last_step}", flush=True)
        write_status(run, "running", start_step, step, saved_step)
    for step, (inputs, labels) in remaining_batches(loader, start_step, args.epochs):
        loss = nn.functional.cross_entropy(ddp(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stop = step % STOP_EVERY == 0 and stop_requested(run, device)
        if is_main and (stop or step == last_step or step % args.save_every == 0):
            save(run / "checkpoint.pt", step, args.global_batch_size, model, optimizer)
            saved_step = step
            print(f"step {step} of {last_step}: loss {loss.item():.4f}, saved", flush=True)
        if is_main and step % STOP_EVERY == 0:
            write_status(run, "running", start_step, step, saved_step)
        if stop:
            break
    if is_main:
        (run / "STOP").unlink(missing_ok=True)
        state = "finished" if step >= last_step else "stopped"
        write_status(run, state, start_step, step, saved_step)


def main() -> None:
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        number = signal.Signals[name]
        if signal.getsignal(number) != signal.SIG_IGN:  # as after nohup
            signal.signal(number, lambda received, frame: SIGNALS.append(received))
    args = parse_args()
    device = setup_distributed(args.distributed_backend)
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
