"""Segment images: find the pixels of disks and squares.

    python examples/segmentation.py --optimizer adamw --lr 0.01 --batch-size 16 \
        --checkpoint-dir runs/segmentation
    TRAIN_SCRIPT=examples/segmentation.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --optimizer adamw --lr 0.01 --batch-size 16 \
        --checkpoint-dir runs/segmentation_2

Shows a loss per pixel where the number of valid pixels varies: loss() returns it as "count", a
tensor. The sums of each class give the mean IoU (intersection over union) of the whole test set.
The file draws its own images; pixels at the edge of a shape have the label IGNORED.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import InMemoryDataset, Normalized, Task, main  # noqa: E402

CLASSES = ["background", "disk", "square"]
IGNORED = 255


def draw_shapes(samples: int, seed: int, size: int = 32) -> InMemoryDataset:
    """Noisy images uint8 [n, 1, size, size] with a shape each, and masks int64 [n, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.randint(8, size - 8, (2, samples, 1, 1), generator=generator)
    radius = torch.randint(4, 9, (samples, 1, 1), generator=generator)
    kind = torch.randint(1, 3, (samples, 1, 1), generator=generator)  # see CLASSES
    down = (torch.arange(size).view(1, size, 1) - center[0]).abs()
    right = (torch.arange(size).view(1, 1, size) - center[1]).abs()
    to_center = torch.where(kind == 1, (down**2 + right**2).sqrt(), torch.maximum(down, right))
    masks = torch.where(to_center < radius, kind, 0)
    noise = torch.randint(120, (samples, size, size), generator=generator)
    images = noise + torch.where(masks > 0, 120, 0)
    masks[(to_center - radius).abs() < 0.5] = IGNORED
    return InMemoryDataset(images.byte().unsqueeze(1), masks)


class Segmentation(Task):
    best = "mean_iou"

    def add_options(self, parser):
        pass  # none of the options of Task

    def data(self, cfg):
        return draw_shapes(2000, seed=0), draw_shapes(500, seed=1)

    def model(self, cfg):
        """Images [b, 1, h, w] -> logits [b, classes, h, w]"""
        network = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),  # [b, 16, h / 2, w / 2]
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),  # [b, 32, h / 4, w / 4]
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 16 * len(CLASSES), 1),
            nn.PixelShuffle(4),  # [b, classes, h, w]
        )
        return Normalized(network, mean=[0.3], std=[0.2])

    def loss(self, model, batch):
        images, masks = batch
        logits = model(images)
        # Flat, because cross_entropy() of more dimensions is not deterministic on a GPU.
        flat_logits = logits.movedim(1, -1).flatten(0, 2)  # [pixels, classes]
        labels = masks.flatten()  # [pixels]
        total = nn.functional.cross_entropy(
            flat_logits, labels, reduction="sum", ignore_index=IGNORED
        )
        valid = labels != IGNORED
        count = valid.sum()
        loss = total / count.clamp(min=1)  # the mean of no pixels would be NaN
        predicted = flat_logits.argmax(1)
        sums = {"count": count, "correct": (predicted == labels).sum()}
        for number, name in enumerate(CLASSES):
            is_predicted = predicted == number
            is_labeled = labels == number
            sums[f"both_{name}"] = (is_predicted & is_labeled).sum()  # pixels
            sums[f"either_{name}"] = ((is_predicted | is_labeled) & valid).sum()
        return loss, sums

    def report(self, sums):
        ious = [sums[f"both_{name}"] / max(1, sums[f"either_{name}"]) for name in CLASSES]
        return {
            "loss": sums["loss"] / sums["count"],
            "pixel_accuracy": sums["correct"] / sums["count"],
            "mean_iou": sum(ious) / len(ious),
        }


if __name__ == "__main__":
    main(Segmentation())
