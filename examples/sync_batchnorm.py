"""Compute the statistics of BatchNorm over all GPUs: the results then depend on their number.

    torchrun --standalone --nproc-per-node 2 examples/sync_batchnorm.py --synthetic \
        --image-size 32 --batch-size 4 --checkpoint-dir runs/sync_batchnorm
    TRAIN_SCRIPT=examples/sync_batchnorm.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --synthetic --image-size 32 --batch-size 4 \
        --checkpoint-dir runs/sync_batchnorm_2

Shows a forward pass that exchanges data between the ranks, which need equally many micro-batches.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from examples.imagenet import Images  # noqa: E402
from train_distributed import UserError, main  # noqa: E402


class SyncedStatistics(Images):
    def model(self, cfg):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and not torch.accelerator.is_available():
            raise UserError("SyncBatchNorm needs a GPU for each rank: start a single process")
        if cfg.reproducible or cfg.global_batch_size % (ranks * cfg.batch_size) != 0:
            needs = f"a --global-batch-size that is a multiple of {ranks * cfg.batch_size}"
            raise UserError(f"SyncBatchNorm on {ranks} ranks needs {needs}, and no --reproducible")
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().model(cfg))


if __name__ == "__main__":
    main(SyncedStatistics())
