"""Train a model of your own: a small MLP with LayerNorm, on handwritten digits.

    python examples/own_model.py --checkpoint-dir runs/own_model
    TRAIN_SCRIPT=examples/own_model.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --checkpoint-dir runs/own_model_2

Shows the smallest task with its own model: data(), model() and one option. The optimizer, the loss
and the metrics are those of Task. To use the trained model, in the root of the repository:

    from examples.own_model import DigitsMlp
    from train_distributed import load_model

    model = load_model("runs/own_model/best.pt", DigitsMlp())
    logits = model(images)  # uint8 [b, 1, 28, 28]
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import Normalized, Task, main, read_mnist  # noqa: E402

DIGITS = Path(__file__).resolve().parent.parent / "data/mnist_sample"


class Mlp(nn.Module):
    """Images [b, 1, 28, 28] -> logits [b, 10]."""

    def __init__(self, width: int):
        super().__init__()
        self.hidden = nn.Linear(28 * 28, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.hidden(images.flatten(1)))  # [b, width]
        return self.head(self.norm(x))


class DigitsMlp(Task):
    def add_options(self, parser):
        parser.add_argument("--width", type=int, default=256, help="hidden units [256]")

    def data(self, cfg):
        return read_mnist(DIGITS, "train"), read_mnist(DIGITS, "test")

    def model(self, cfg):
        # Mean and standard deviation of the pixels, from 0 to 1.
        return Normalized(Mlp(cfg.width), mean=[0.1307], std=[0.3081])


if __name__ == "__main__":
    main(DigitsMlp())
