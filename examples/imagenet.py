"""Train a network of torchvision on image files, such as ResNet-50 on ImageNet.

    python examples/imagenet.py --data-dir DIR --model resnet50 --amp bf16 \
        --checkpoint-dir runs/imagenet
    TRAIN_SCRIPT=examples/imagenet.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --data-dir DIR --model resnet50 --amp bf16 \
        --checkpoint-dir runs/imagenet_2

Shows random crops, classes named by folders, and how to read rotated, 16-bit and damaged files.
DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg (or .png).
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision import datasets, models, transforms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import (  # noqa: E402
    InMemoryDataset,
    Normalized,
    Task,
    UserError,
    main,
)

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet's pixels, from 0 to 1


def image_folders(root: Path, size: int):
    """(training set, test set): uint8 [3, size, size] and a label; random crops, or the middle."""
    random = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    middle = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    train_transform = transforms.Compose([*random, transforms.PILToTensor()])
    test_transform = transforms.Compose([*middle, transforms.PILToTensor()])
    try:
        train = datasets.ImageFolder(root / "train", train_transform, loader=read_image)
        test = datasets.ImageFolder(root / "val", test_transform, loader=read_image)
    except OSError as error:
        needed = f"{root}/train/CLASS/ and {root}/val/CLASS/"
        raise UserError(f"--data-dir needs images in {needed} ({error})") from None
    for folder in (train, test):
        found: dict[str, str] = {}
        for directory in sorted({os.path.dirname(path) for path, _ in folder.samples}):
            other = found.setdefault(os.path.realpath(directory), directory)
            if other != directory:
                raise UserError(f"{directory} is a link to {other}: its images would count twice")
    odd = {name for name in train.classes if name[0] == "."} or {*train.classes} ^ {*test.classes}
    if odd:
        names = ", ".join(sorted(odd))
        raise UserError(f"these classes of {root} are hidden, or only in train/ or val/: {names}")
    return train, test


def read_image(file, name: str = "") -> Image.Image:
    """An RGB image as a viewer shows it: upright, 16-bit gray as 8-bit. file: a path, or open."""
    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16"):
            bits = getattr(opened, "tag_v2", {}).get(258, [16])[0]  # a TIFF file may have 12
            image = Image.fromarray((np.asarray(image) >> bits - 8).astype(np.uint8))
        if image.mode in ("I", "F"):  # white may be 1, 255, 65535 or any other number
            raise ValueError(f"mode {image.mode} has 32 bits: convert it to 8 bits per channel")
        return image.convert("RGB")
    except Exception as error:  # PIL raises many kinds
        raise UserError(f"cannot read {name or file} ({type(error).__name__}: {error})") from None


class Images(Task):
    def add_options(self, parser):
        add = parser.add_argument
        add("--model", default="resnet18", help="a classifier of torchvision [resnet18]")
        add("--image-size", type=int, default=224, help="pixels per side [224]")
        add("--synthetic", action="store_true", help="train on noise instead, for benchmarks")

    def data(self, cfg):
        if cfg.synthetic:
            self.spec = {"classes": [str(label) for label in range(1000)]}
            shape = (1280, 3, cfg.image_size, cfg.image_size)
            images = torch.randint(256, shape, dtype=torch.uint8)
            return InMemoryDataset(images, torch.randint(1000, (1280,))), None
        train, test = image_folders(Path(cfg.data_dir), cfg.image_size)
        self.spec = {"classes": train.classes}
        return train, test

    def model(self, cfg):
        names = models.list_models(module=models)  # those for classification
        if cfg.model not in names:
            raise UserError(f"--model {cfg.model} is not in torchvision")
        options = {"num_classes": len(self.spec["classes"])}
        if cfg.model in ("googlenet", "inception_v3"):
            options["aux_logits"] = False
        return Normalized(models.get_model(cfg.model, **options), MEAN, STD)

    def blocks(self, model):
        return [m for m in model.modules() if type(m).__name__ in ("BasicBlock", "Bottleneck")]


if __name__ == "__main__":
    main(Images())
