#!/usr/bin/env python3
"""A model that does not fit on one GPU: FSDP divides it, its gradients and the optimizer's state.

    torchrun --standalone --nproc-per-node 2 scripts/guard.py docs/recipes/fsdp.py
    TRAIN_SCRIPT=docs/recipes/fsdp.py PROGRESS_FILE='runs/fsdp/*/.metadata' \
        sbatch run_distributed.slurm

Copy it, and replace the model and the data. It saves every ten steps, and resumes from the newest
complete save, on any number of ranks.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

DIRECTORY = Path("runs/fsdp")  # on a file system that all nodes see
STEPS = 40


def main():
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights on all ranks
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))
    for block in blocks:
        fully_shard(block)  # it moves to the GPU, is divided, and is gathered just before its use
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    step = 0
    saved = [path.parent for path in DIRECTORY.glob("*/.metadata")]  # it is written last
    if saved:
        newest = max(saved, key=lambda path: int(path.name))
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = int(newest.name)
    while step < STEPS:
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # other samples per rank
        inputs = torch.randn(32, 64, device=device)
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=DIRECTORY / str(step))
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
