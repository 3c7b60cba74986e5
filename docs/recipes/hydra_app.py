"""A Hydra application: options are NAME=VALUE.

At a stop, all ranks save after the same step. The same command resumes.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

received = []  # stop signals


@dataclass
class Options:
    lr: float = 0.01
    steps: int = 1000
    output: str = "runs/hydra"


ConfigStore.instance().store("options", Options)


@hydra.main(version_base=None, config_path=None, config_name="options")
def main(cfg):
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    dist.init_process_group("gloo")  # on GPUs, "nccl", and torch.cuda.set_device(LOCAL_RANK)
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    step = 0
    checkpoint = Path(cfg.output) / "last.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    if dist.get_rank() == 0:
        print(f"from step {step}", flush=True)
    ddp = DistributedDataParallel(model)
    stop = torch.zeros(1)
    while step < cfg.steps and not stop:
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # other data per rank
        inputs = torch.randn(64, 10)  # instead, load your data
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:  # the ranks agree
            stop.fill_(bool(received))
            dist.all_reduce(stop)
    if dist.get_rank() == 0:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{checkpoint}.tmp")
        os.replace(f"{checkpoint}.tmp", checkpoint)
        print(f"saved at step {step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
