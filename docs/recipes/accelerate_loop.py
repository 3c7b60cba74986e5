"""Train a small model with Accelerate, in a loop that saves and resumes in the middle of an epoch.

At a stop, all ranks save after the same step. The same command resumes.
"""

import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 20
received = []  # stop signals


def main():
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate")
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    # Without it, a resumed epoch has another order: samples are repeated and skipped (1.15).
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(0)
    inputs = torch.randn(4000, 10)  # instead of these two lines, load your data
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    saved = directory / "last"
    if saved.exists():
        accelerator.load_state(saved)
        step = int((saved / "step").read_text())
    accelerator.print(f"from step {step}", flush=True)
    steps = len(loader)
    is_stopped = False
    while step < EPOCHS * steps and not is_stopped:
        loader.set_epoch(step // steps)
        rest = accelerator.skip_first_batches(loader, step % steps)
        for x, y in rest:
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:  # the ranks agree
                stop = torch.tensor(float(bool(received)), device=accelerator.device)
                is_stopped = bool(accelerator.reduce(stop) > 0)
                if is_stopped:
                    break
    accelerator.save_state(saved)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (saved / "step").write_text(str(step))
    accelerator.print(f"at step {step}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
