"""Fine-tune a whole ResNet, its backbone at a tenth of the learning rate of the new head.

    python examples/fine_tuning.py --write-sample --data-dir data/digit_files --image-size 64 \
        --num-workers 2 --lr 0.003 --milestones 2,3 --epochs 4 --checkpoint-dir runs/fine_tuning
    TRAIN_SCRIPT=examples/fine_tuning.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/digit_files --image-size 64 \
        --num-workers 2 --lr 0.003 --milestones 2,3 --epochs 4 --checkpoint-dir runs/fine_tuning_2

Shows a learning rate for each parameter group, and a schedule by epoch: after each milestone, the
rates are a tenth. The data and the model are those of image_folder.py.
"""

import argparse
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from examples.image_folder import FineTuning  # noqa: E402
from train_distributed import main  # noqa: E402


def epoch_list(text: str) -> str:
    """Stays a text: options are also written to checkpoints and read from YAML files."""
    if re.fullmatch("[0-9]+(,[0-9]+)*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text} is not a list of epochs like 2,3")


class SlowBackbone(FineTuning):
    def add_options(self, parser):
        super().add_options(parser)
        parser.add_argument("--milestones", type=epoch_list, default="3,4", help="epochs [3,4]")

    def model(self, cfg):
        return super().model(cfg).requires_grad_(True)

    def optimizer(self, cfg, model):
        resnet = model.network
        head = list(resnet.fc.parameters())
        backbone = [p for name, p in resnet.named_parameters() if not name.startswith("fc.")]
        groups = [{"params": head}, {"params": backbone, "lr": cfg.lr / 10}]
        return torch.optim.AdamW(groups, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)

    def lr_factor(self, cfg, step, total_steps):
        epoch = cfg.epochs * step / total_steps
        passed = [text for text in cfg.milestones.split(",") if epoch >= int(text)]
        return 0.1 ** len(passed)


if __name__ == "__main__":
    main(SlowBackbone())
