"""Change the schedule of the learning rate: a constant, a lower limit, or a larger batch.

    python examples/learning_rate.py --schedule constant --checkpoint-dir runs/learning_rate
    TRAIN_SCRIPT=examples/learning_rate.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --lr-base-batch-size 64 --checkpoint-dir runs/learning_rate_2

Shows lr_factor(), which is a function of the step alone, so a resumed run needs no state of a
scheduler. With --lr-base-batch-size B, --lr is the rate for a global batch of B samples, and grows
in proportion to the global batch (Goyal et al., arXiv:1706.02677).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import Task, main  # noqa: E402


class OtherSchedule(Task):
    def add_options(self, parser):
        super().add_options(parser)
        add = parser.add_argument
        add("--schedule", choices=["cosine", "constant"], default="cosine", help="[cosine]")
        add("--min-lr-factor", type=float, default=0.0, help="x lr at the end [0]")
        add("--lr-base-batch-size", type=int, help="global batch of --lr [any]")

    def optimizer(self, cfg, model):
        optimizer = super().optimizer(cfg, model)
        if cfg.lr_base_batch_size:
            for group in optimizer.param_groups:
                group["lr"] *= cfg.global_batch_size / cfg.lr_base_batch_size
        return optimizer

    def lr_factor(self, cfg, step, total_steps):
        # Linear warm-up, then a cosine from 1 to 0.
        factor = super().lr_factor(cfg, step, total_steps)
        if step < cfg.warmup_epochs * total_steps / cfg.epochs:
            return factor
        if cfg.schedule == "constant":
            return 1.0
        return cfg.min_lr_factor + (1 - cfg.min_lr_factor) * factor


if __name__ == "__main__":
    main(OtherSchedule())
