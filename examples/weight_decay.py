"""Exempt biases and the weights of normalization layers from weight decay.

    python examples/weight_decay.py --lr 0.003 --weight-decay 0.05 \
        --checkpoint-dir runs/weight_decay
    TRAIN_SCRIPT=examples/weight_decay.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --lr 0.003 --weight-decay 0.05 \
        --checkpoint-dir runs/weight_decay_2

Shows parameter groups with options of their own. The task is that of own_model.py.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from examples.own_model import DigitsMlp  # noqa: E402
from train_distributed import main  # noqa: E402


class DecayOfMatrices(DigitsMlp):
    def optimizer(self, cfg, model):
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim > 1]
        vectors = [p for p in trained if p.ndim < 2]  # biases, and weights of normalization layers
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)


if __name__ == "__main__":
    main(DecayOfMatrices())
