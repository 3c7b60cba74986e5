"""Train on pairs of an image and a text in .tar files (shards).

    python examples/tar_shards.py --write-sample --data-dir data/digit_shards --num-workers 2 \
        --checkpoint-dir runs/tar_shards
    TRAIN_SCRIPT=examples/tar_shards.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/digit_shards --num-workers 2 \
        --checkpoint-dir runs/tar_shards_2

Shows shards read by index: at the start, the headers of the .tar files give the place of each
sample; a rank then reads only the bytes of its own samples. So the order is random over all shards,
and no sample is repeated or left out, on any number of ranks. --data-dir holds train-*.tar and
test-*.tar, with KEY.png and KEY.txt (here: a digit) for each sample; --write-sample writes some.
"""

import argparse
import io
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import Normalized, SimpleConvNet, Task, UserError, main, read_mnist  # noqa: E402

DIGITS = Path(__file__).resolve().parent.parent / "data/mnist_sample"


def write_sample(root: Path) -> None:
    root.mkdir(parents=True)
    train, test = read_mnist(DIGITS, "train"), read_mnist(DIGITS, "test")
    write_shard(root / "train-0.tar", *train[:1000])
    write_shard(root / "train-1.tar", *train[1000:2000])
    write_shard(root / "test-0.tar", *test[:500])


def write_shard(path: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
    with tarfile.open(path, "w") as shard:
        for number, (image, label) in enumerate(zip(images, labels)):
            png = io.BytesIO()
            Image.fromarray(image[0].numpy()).save(png, "png")
            text = str(label.item()).encode()
            for suffix, content in (("png", png.getvalue()), ("txt", text)):
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


class TarShards(Dataset):
    """The samples of all shards: (uint8 [1, h, w], label)."""

    def __init__(self, shards: list[Path]):
        self.samples: list[dict] = []  # {suffix: (shard, offset, size)}
        self.files: dict = {}
        for shard in shards:
            places: dict = {}  # of the members with the same key
            with tarfile.open(shard) as file:
                for member in file:
                    key, _, suffix = member.name.rpartition(".")
                    place = (str(shard), member.offset_data, member.size)
                    places.setdefault(key, {})[suffix] = place
            self.samples += places.values()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        places = self.samples[index]
        image = Image.open(io.BytesIO(self.read(*places["png"])))
        label = int(self.read(*places["txt"]))
        return torch.from_numpy(np.array(image)).unsqueeze(0), label

    def read(self, shard: str, offset: int, size: int) -> bytes:
        """pread(), because loader workers share the position in a file that their parent opened."""
        if shard not in self.files:
            self.files[shard] = os.open(shard, os.O_RDONLY)
        return os.pread(self.files[shard], size, offset)


class DigitShards(Task):
    def add_options(self, parser):
        switch = argparse.BooleanOptionalAction
        parser.add_argument("--write-sample", action=switch, help="to --data-dir, if it is new")

    def data(self, cfg):
        root = Path(cfg.data_dir)
        if cfg.write_sample and not root.exists():
            write_sample(root)
        try:
            train = TarShards(sorted(root.glob("train-*.tar")))
            test = TarShards(sorted(root.glob("test-*.tar")))
        except (OSError, tarfile.TarError) as error:
            raise UserError(f"cannot read the shards in {root} ({error})") from None
        return train, test

    def model(self, cfg):
        network = SimpleConvNet(channels=1, size=28, classes=10, dropout=0.25)
        return Normalized(network, mean=[0.1307], std=[0.3081])


if __name__ == "__main__":
    main(DigitShards())
