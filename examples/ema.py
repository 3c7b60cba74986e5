"""Keep an exponential moving average of the weights, and evaluate it, too.

    python examples/ema.py --checkpoint-dir runs/ema
    TRAIN_SCRIPT=examples/ema.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --checkpoint-dir runs/ema_2

Shows state of your own in checkpoints: the average is a part of the model that is not trained. A
hook of the optimizer updates it. load_model() predicts with the average.
"""

import copy
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import Task, main  # noqa: E402


class WithAverage(nn.Module):
    """A model, which is trained, and the moving average of its weights and buffers."""

    def __init__(self, model: nn.Module, decay: float):
        super().__init__()
        self.decay = decay
        self.model = model
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("updates", torch.zeros(()))

    def forward(self, x):
        return self.model(x) if self.training else self.average(x)

    @torch.no_grad()
    def update(self, *_) -> None:
        """In the first steps the decay is lower, so that the initial weights do not count."""
        self.updates += 1
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        values = self.model.state_dict()
        for name, average in self.average.state_dict().items():
            if average.is_floating_point():
                average.lerp_(values[name], 1 - decay)
            else:
                average.copy_(values[name])  # a counter of BatchNorm


class AveragedWeights(Task):
    def add_options(self, parser):
        super().add_options(parser)
        parser.add_argument("--ema-decay", type=float, default=0.999, help="[0.999]")

    def model(self, cfg):
        return WithAverage(super().model(cfg), cfg.ema_decay)

    def optimizer(self, cfg, model):
        optimizer = super().optimizer(cfg, model)
        optimizer.register_step_post_hook(model.update)
        return optimizer

    def loss(self, model, batch):
        if model.training:
            return super().loss(model, batch)
        loss, sums = super().loss(model.model, batch)
        average_loss, average_sums = super().loss(model.average, batch)
        _, labels = batch
        sums["ema_loss"] = average_loss * len(labels)  # a sum, as all values for report()
        sums["ema_correct"] = average_sums["correct"]
        return loss, sums

    def report(self, sums):
        values = super().report(sums)
        if "ema_loss" in sums:  # not in training
            values["ema_loss"] = sums["ema_loss"] / sums["count"]
            values["ema_accuracy"] = sums["ema_correct"] / sums["count"]
        return values


if __name__ == "__main__":
    main(AveragedWeights())
