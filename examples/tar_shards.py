"""Train on pairs of an image and a text in .tar files (shards).

    python examples/tar_shards.py --write-sample --data-dir data/digit_shards --num-workers 2 \
        --checkpoint-dir runs/tar_shards
    TRAIN_SCRIPT=examples/tar_shards.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/digit_shards --num-workers 2 \
        --checkpoint-dir runs/tar_shards_2

Shows shards read by index: at the start, the headers of the .tar files give the place of each
sample; a rank then reads only the bytes of its own samples, in an order that is random over all
shards. --data-dir holds train-*.tar and test-*.tar, not compressed, with KEY.png or KEY.jpg and
KEY.txt (here: a digit) for each sample; --write-sample writes some.
"""

import io
import os
import sys
import tarfile
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from examples.imagenet import read_image  # noqa: E402
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


def samples_in(shard: Path) -> list[tuple[str, dict]]:
    """(name, {"image": (shard, offset, size), "txt": (shard, offset, size)}) of each sample."""
    samples: dict = {}
    try:
        with tarfile.open(shard, "r:") as file:  # in a compressed file, the offsets would be wrong
            for member in file:
                key, _, suffix = member.name.rpartition(".")
                kind = "image" if suffix.lower() in ("png", "jpg", "jpeg") else suffix.lower()
                if member.isfile() and not os.path.basename(member.name).startswith("."):
                    place = (str(shard), member.offset_data, member.size)
                    samples.setdefault(f"{key} in {shard}", {})[kind] = place
            if os.pread(file.fileobj.fileno(), 512, file.offset) != bytes(512):
                raise EOFError("its end is missing")
    except Exception as error:  # tarfile raises many kinds
        raise UserError(f"cannot read {shard}: is it compressed, or cut? ({error})") from None
    for name, places in samples.items():
        if not {"image", "txt"} <= places.keys():
            raise UserError(f"{name} has {', '.join(places)}: it needs .png or .jpg, and .txt")
    return list(samples.items())


class TarShards(Dataset):
    """The samples of all shards: (uint8 [1, h, w], label)."""

    def __init__(self, shards: list[Path]):
        self.samples = [sample for shard in shards for sample in samples_in(shard)]
        if not self.samples:
            raise UserError("a data set has no samples: is --data-dir right?")
        self.files: dict = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        name, places = self.samples[index]
        image = read_image(io.BytesIO(self.read(*places["image"])), name).convert("L")
        text = self.read(*places["txt"])
        if not text.strip().isdigit():
            raise UserError(f"the label of {name} is {text[:99]}, not a number")
        return pil_to_tensor(image), int(text)

    def read(self, shard: str, offset: int, size: int) -> bytes:
        """pread(), because loader workers share the position in a file that their parent opened."""
        if shard not in self.files:
            self.files[shard] = os.open(shard, os.O_RDONLY)
        return os.pread(self.files[shard], size, offset)


class DigitShards(Task):
    def add_options(self, parser):
        parser.add_argument("--write-sample", action="store_true", help="to a new --data-dir")

    def data(self, cfg):
        root = Path(cfg.data_dir)
        if cfg.write_sample and not root.exists():
            write_sample(root)
        train = TarShards(sorted(root.glob("train-*.tar")))
        return train, TarShards(sorted(root.glob("test-*.tar")))

    def model(self, cfg):
        network = SimpleConvNet(channels=1, size=28, classes=10, dropout=0.25)
        return Normalized(network, mean=[0.1307], std=[0.3081])


if __name__ == "__main__":
    main(DigitShards())
