import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from harness import REPO  # noqa: E402


def write_mnist(root: Path, train: int, test: int) -> Path:
    """A small MNIST in torchvision's layout, made of the first digits of the shipped sample."""
    for name, count in (("train", train), ("t10k", test)):
        for kind, header, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
            source = REPO / "data/mnist_sample/MNIST/raw" / f"{name}-{kind}-ubyte"
            content = source.read_bytes()
            head = content[:4] + count.to_bytes(4, "big") + content[8:header]
            target = root / "MNIST" / "raw" / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(head + content[header : header + count * size])
    return root


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> list[str]:
    """Options for 203 training and 103 test digits: no multiple of any batch or world size here."""
    root = write_mnist(tmp_path_factory.mktemp("tiny"), train=203, test=103)
    return ["--dataset=mnist", f"--data-dir={root}", "--batch-size=8", "--log-every-steps=1"]
