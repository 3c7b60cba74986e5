"""Tasks of the tests; as a script, it trains Photos.

Strings are for `before` of the harness.
"""

import sys
from pathlib import Path

from torchvision.models import resnet18

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.imagenet import Images  # noqa: E402
from train_distributed import Normalized, SimpleConvNet, Task, main  # noqa: E402

PHOTOS = "import tasks; task = tasks.Photos()"
RESNET = "import tasks; task = tasks.ResNet()"


class Photos(Images):
    """Image files, with a network that is small and has no BatchNorm."""

    def model(self, cfg):
        classes = len(self.spec["classes"])
        network = SimpleConvNet(3, cfg.image_size, classes, dropout=0.25)
        return Normalized(network, mean=[0.5] * 3, std=[0.25] * 3)


class ResNet(Task):
    """Digits, with BatchNorm, whose statistics differ between ranks."""

    def model(self, cfg):
        return Normalized(resnet18(num_classes=10), mean=[0.1307] * 3, std=[0.3081] * 3)

    def blocks(self, model):
        return Images.blocks(self, model)


if __name__ == "__main__":
    main(Photos())
