"""Halve the bytes that the ranks exchange: send gradients as bfloat16.

    torchrun --standalone --nproc-per-node 2 examples/slow_links.py --checkpoint-dir runs/slow_links
    TRAIN_SCRIPT=examples/slow_links.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --checkpoint-dir runs/slow_links_2

Shows wrap(), which decides how the ranks exchange gradients: here by DDP with a communication hook.
For networks slower than about 1 Gbit/s. The gradients are still computed, and applied, as float32.
With --reproducible, the trainer does not use DDP, and wrap() is not called.
"""

import sys
from pathlib import Path

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import Task, main  # noqa: E402


class Bf16Gradients(Task):
    def wrap(self, loss):
        ddp = super().wrap(loss)
        ddp.register_comm_hook(state=None, hook=bf16_compress_hook)
        return ddp


if __name__ == "__main__":
    main(Bf16Gradients())
