"""Train on a data set of Hugging Face, from local Parquet files.

    pip install datasets
    python examples/huggingface.py --write-sample --data-dir data/digit_parquet --num-workers 2 \
        --checkpoint-dir runs/huggingface
    TRAIN_SCRIPT=examples/huggingface.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/digit_parquet \
        --num-workers 2 --checkpoint-dir runs/huggingface_2

Shows batches that are dicts. --data-dir holds train*.parquet and test*.parquet with the columns
image and label; --write-sample writes some. `datasets` converts them once to Arrow files in
DATA_DIR/cache, which it then maps into memory, so each process reads only the rows it needs.
Nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import (  # noqa: E402
    Normalized,
    SimpleConvNet,
    Task,
    UserError,
    main,
    read_mnist,
)

DIGITS = Path(__file__).resolve().parent.parent / "data/mnist_sample"


def write_sample(datasets, root: Path, train: int = 2000, test: int = 500) -> None:
    """Digits as PNG files in a column of a Parquet file, with their labels in another."""
    root.mkdir(parents=True)
    classes = datasets.ClassLabel(names=[str(digit) for digit in range(10)])
    features = datasets.Features({"image": datasets.Image(), "label": classes})
    for part, samples in (("train", train), ("test", test)):
        images, labels = read_mnist(DIGITS, part).tensors
        columns = {
            "image": [image.numpy() for image in images[:samples, 0]],
            "label": labels[:samples].tolist(),
        }
        digits = datasets.Dataset.from_dict(columns, features)
        digits.to_parquet(root / f"{part}.parquet")


class ParquetDigits(Task):
    def add_options(self, parser):
        switch = argparse.BooleanOptionalAction
        parser.add_argument("--write-sample", action=switch, help="to --data-dir, if it is new")

    def data(self, cfg):
        import datasets  # pip install datasets

        root = Path(cfg.data_dir)
        if cfg.write_sample and not root.exists():
            write_sample(datasets, root)
        parts = []
        for name in ("train", "test"):
            files = sorted(str(file) for file in root.glob(f"{name}*.parquet"))
            if not files:
                raise UserError(f"no {name}*.parquet in {root}: --write-sample writes some")
            part = datasets.Dataset.from_parquet(files, cache_dir=str(root / "cache"))
            parts.append(part.with_format("torch"))  # images uint8 [c, h, w]
        train, test = parts
        self.spec = {"classes": train.features["label"].names}
        return train, test

    def model(self, cfg):
        classes = len(self.spec["classes"])
        network = SimpleConvNet(channels=1, size=28, classes=classes, dropout=0.25)
        return Normalized(network, mean=[0.1307], std=[0.3081])

    def loss(self, model, batch):
        return super().loss(model, (batch["image"], batch["label"]))


if __name__ == "__main__":
    main(ParquetDigits())
