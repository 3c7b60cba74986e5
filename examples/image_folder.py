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

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import (  # noqa: E402
    Normalized,
    Task,
    UserError,
    image_folders,
    import_package,
    main,
    positive_int,
    read_mnist,
)

DIGITS = Path(__file__).resolve().parent.parent / "data/mnist_sample"


def write_sample(root: Path, train: int = 1000, val: int = 200) -> None:
    """Digits as ROOT/train/CLASS/NUMBER.png and ROOT/val/CLASS/NUMBER.png."""
    to_image = import_package("torchvision.transforms.functional", "--write-sample").to_pil_image
    for folder, part, samples in (("train", "train", train), ("val", "test", val)):
        images, labels = read_mnist(DIGITS, part).tensors
        for number in range(samples):
            directory = root / folder / str(labels[number].item())
            directory.mkdir(parents=True, exist_ok=True)
            to_image(images[number]).save(directory / f"{number}.png")


class FineTuning(Task):
    weights = None  # data() sets it: load_model() needs no pretrained weights

    def add_options(self, parser):
        add = parser.add_argument
        add("--resnet", default="resnet18", help="a ResNet of torchvision [resnet18]")
        add("--weights", help="DEFAULT: torchvision's [random]")
        add("--image-size", type=positive_int, default=224, help="pixels per side [224]")
        add("--write-sample", action=argparse.BooleanOptionalAction, default=False,
            help="write digits to --data-dir if it does not exist")  # fmt: skip

    def data(self, cfg):
        root = Path(cfg.data_dir)
        if cfg.write_sample and not root.exists():
            write_sample(root)
        train, test = image_folders(root, cfg.image_size)
        self.weights = cfg.weights
        self.spec = {"classes": train.classes}
        return train, test

    def model(self, cfg):
        models = import_package("torchvision.models", "this example")
        try:
            resnet = models.get_model(cfg.resnet, weights=self.weights)
        except (ValueError, KeyError, OSError) as error:
            text = f"cannot load --resnet {cfg.resnet} --weights {cfg.weights}"
            raise UserError(f"{text} ({error})") from None
        if not isinstance(resnet, models.ResNet):
            raise UserError(f"--resnet {cfg.resnet} is not a ResNet: take resnet18 or resnet50")
        resnet.requires_grad_(False)
        resnet.layer4.requires_grad_(True)  # the last blocks
        resnet.fc = nn.Linear(resnet.fc.in_features, len(self.spec["classes"]))
        # Of ImageNet's pixels, from 0 to 1.
        model = Normalized(resnet, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        return model.to(memory_format=torch.channels_last)

    def loss(self, model, batch):
        images, labels = batch
        logits = model(images)
        smoothing = 0.1 if model.training else 0.0
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        return loss, {"correct": (logits.argmax(1) == labels).sum()}


if __name__ == "__main__":
    main(FineTuning())
