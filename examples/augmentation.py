"""Augment images on the GPU: shift each digit by up to 2 pixels.

    python examples/augmentation.py --checkpoint-dir runs/augmentation
    TRAIN_SCRIPT=examples/augmentation.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --checkpoint-dir runs/augmentation_2

Shows random numbers in loss(). The trainer seeds PyTorch's generators for each micro-batch, so
the shifts are the same on any number of ranks, and in a resumed run.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import Task, main  # noqa: E402


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Images [b, c, h, w], each shifted by up to 2 pixels in both directions; margins are 0."""
    b, _, h, w = images.shape
    device = images.device
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    top, left = torch.randint(5, (2, b, 1), device=device)
    rows = top + torch.arange(h, device=device)  # [b, h]
    columns = left + torch.arange(w, device=device)  # [b, w]
    number = torch.arange(b, device=device)[:, None, None]
    moved = padded[number, :, rows[:, :, None], columns[:, None, :]]  # [b, h, w, c]
    return moved.movedim(-1, 1)


class ShiftedDigits(Task):
    def loss(self, model, batch):
        images, labels = batch
        if model.training:
            images = shifted(images)
        return super().loss(model, (images, labels))


if __name__ == "__main__":
    main(ShiftedDigits())
