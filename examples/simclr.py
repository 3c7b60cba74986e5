"""Learn features of images without labels: SimCLR, a contrastive loss over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/simclr.py --optimizer adamw --lr 0.003 \
        --checkpoint-dir runs/simclr
    TRAIN_SCRIPT=examples/simclr.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --optimizer adamw --lr 0.003 --checkpoint-dir runs/simclr_2

Shows a loss that compares the samples of all ranks: each view of an image should be most similar to
the other view of the same image, among the views of the micro-batches of all ranks (Chen et al.,
arXiv:2002.05709). So the loss depends on --batch-size x ranks: on twice as many ranks, halve
--batch-size to compare with as many images. An evaluation compares the views of one micro-batch
only: its last round has none for some ranks, which could not take part.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from examples.augmentation import shifted  # noqa: E402
from train_distributed import Normalized, SimpleConvNet, Task, UserError, main, read_mnist  # noqa: E402

DIGITS = Path(__file__).resolve().parent.parent / "data/mnist_sample"
TEMPERATURE = 0.2
FEATURES = 32


class AllGather(torch.autograd.Function):
    """[n, d] -> [ranks x n, d]. Its gradient is the sum of those of all ranks. Collective."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def random_view(images: torch.Tensor) -> torch.Tensor:
    """uint8 images, shifted, with random contrast and noise."""
    images = shifted(shifted(images)).float()
    contrast = torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(0.5, 1)
    noise = 30 * torch.randn_like(images)
    return (images * contrast + noise).clamp(0, 255).byte()


class Contrastive(Task):
    def add_options(self, parser):
        pass  # none of the options of Task

    def data(self, cfg):
        return read_mnist(DIGITS, "train"), read_mnist(DIGITS, "test")

    def model(self, cfg):
        """Images [b, 1, 28, 28] -> features [b, FEATURES]"""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if cfg.reproducible:
            raise UserError("the loss depends on the number of ranks: --reproducible is impossible")
        if cfg.global_batch_size % (ranks * cfg.batch_size) != 0:
            needs = f"a --global-batch-size that is a multiple of {ranks * cfg.batch_size}"
            raise UserError(f"{ranks} ranks need equally many micro-batches: set {needs}")
        network = SimpleConvNet(channels=1, size=28, classes=FEATURES, dropout=0.0)
        return Normalized(network, mean=[0.1307], std=[0.3081])

    def loss(self, model, batch):
        images, _ = batch  # without labels
        views = torch.cat([random_view(images), random_view(images)])
        own = F.normalize(model(views).float())  # [2b, FEATURES]
        every, first = own, 0
        if model.training and dist.is_initialized():
            every = AllGather.apply(own)
            first = dist.get_rank() * len(own)
        similarity = own @ every.T / TEMPERATURE
        row = torch.arange(len(own), device=own.device)
        itself = first + row
        partner = first + (row + len(images)) % len(own)
        similarity = similarity.scatter(1, itself.unsqueeze(1), float("-inf"))
        correct = (similarity.argmax(1) == partner).sum() / 2  # of two views of each image
        return F.cross_entropy(similarity, partner), {"correct": correct}


if __name__ == "__main__":
    main(Contrastive())
