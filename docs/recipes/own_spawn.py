"""A script that starts its own ranks, as in PyTorch's DDP tutorial: one rank for the launcher."""

import os
import sys
import time

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank, ranks, steps):
    port = 20000 + os.getppid() % 10000  # usually, two runs on one host differ
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(steps):
        inputs = torch.randn(64, 10)
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{dist.get_world_size()} ranks: loss {loss:.4f}")
    time.sleep(0.2)  # for gloo: pytorch issue 179291
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, steps = map(int, sys.argv[1:])
    mp.spawn(train, args=(ranks, steps), nprocs=ranks)
