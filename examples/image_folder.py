"""Fine-tune the end of a ResNet on image files.

    python examples/image_folder.py --write-sample --data-dir data/digit_files --image-size 64 \
        --num-workers 2 --epochs 2 --checkpoint-dir runs/image_folder
    TRAIN_SCRIPT=examples/image_folder.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/digit_files --image-size 64 \
        --num-workers 2 --epochs 2 --checkpoint-dir runs/image_folder_2

Shows frozen layers, whose BatchNorm keeps its statistics, too, pretrained weights, and a loss that
differs in training. --data-dir holds train/CLASS/*.jpg and val/CLASS/*.jpg (or .png);
--write-sample writes digits there. With --weights DEFAULT, torchvision downloads the weights of
ImageNet when they are first used: do that once where there is a network. Without, the frozen
layers are random.
"""

import argparse
import sys
from pathlib import Path

from torch import nn
from torchvision import models
from torchvision.transforms.functional import to_pil_image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from examples.imagenet import MEAN, STD, Images  # noqa: E402
from train_distributed import Normalized, UserError, main, read_mnist  # noqa: E402

DIGITS = Path(__file__).resolve().parent.parent / "data/mnist_sample"


def write_sample(root: Path, train: int = 1000, val: int = 200) -> None:
    """Digits as ROOT/train/CLASS/NUMBER.png and ROOT/val/CLASS/NUMBER.png."""
    for folder, part, samples in (("train", "train", train), ("val", "test", val)):
        images, labels = read_mnist(DIGITS, part).tensors
        for number in range(samples):
            directory = root / folder / str(labels[number].item())
            directory.mkdir(parents=True, exist_ok=True)
            to_pil_image(images[number]).save(directory / f"{number}.png")


class FineTuning(Images):
    weights = None  # data() sets it: load_model() needs no pretrained weights

    def add_options(self, parser):
        super().add_options(parser)
        add = parser.add_argument
        add("--weights", help="DEFAULT: torchvision's [random]")
        add("--write-sample", action=argparse.BooleanOptionalAction, default=False,
            help="write digits to --data-dir if it does not exist")  # fmt: skip

    def data(self, cfg):
        root = Path(cfg.data_dir)
        if cfg.write_sample and not root.exists():
            write_sample(root)
        self.weights = cfg.weights
        return super().data(cfg)

    def model(self, cfg):
        try:
            resnet = models.get_model(cfg.model, weights=self.weights)
        except Exception as error:  # of a name, a download or a damaged file
            text = f"cannot load --model {cfg.model} --weights {cfg.weights}"
            raise UserError(f"{text} ({error})") from None
        if not isinstance(resnet, models.ResNet):
            raise UserError(f"--model {cfg.model} is not a ResNet: take resnet18 or resnet50")
        resnet.requires_grad_(False)
        resnet.layer4.requires_grad_(True)  # the last blocks
        resnet.fc = nn.Linear(resnet.fc.in_features, len(self.spec["classes"]))
        return Normalized(resnet, MEAN, STD)

    def loss(self, model, batch):
        images, labels = batch
        logits = model(images)
        smoothing = 0.1 if model.training else 0.0
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        return loss, {"correct": (logits.argmax(1) == labels).sum()}


if __name__ == "__main__":
    main(FineTuning())
