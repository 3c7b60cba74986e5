"""Train a module of Lightning's demos.

At a stop, all ranks save after the same step. The same command resumes.
"""

import argparse
import os
import signal
from pathlib import Path

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader


class Loader(DataLoader):
    """Lightning saves its state; a DataLoader would begin again in the middle of an epoch.

    With shuffle=True, give it a sampler whose order depends on the epoch only.
    """

    batches = 0  # that were read in this epoch
    skip = 0

    def __iter__(self):
        skip, self.skip, self.batches = self.skip, 0, 0
        for batch in super().__iter__():
            self.batches += 1
            if self.batches > skip:
                yield batch

    def state_dict(self):
        return {"batches": self.batches % len(self)}

    def load_state_dict(self, state):
        self.skip = state["batches"]


class StopTogether(Callback):
    """After SIGTERM or SIGUSR1 to any rank, all ranks save after the same step, and stop."""

    def __init__(self, path: Path):
        self.path = path
        self.received = False

    def receive(self, *_):
        self.received = True

    def on_train_start(self, trainer, _module):
        # In place of Lightning's: at SIGTERM, it saves nothing, and its ranks may deadlock. At
        # SIGUSR1, it would requeue a job of Slurm, which scripts/supervise.py does, too.
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.receive)
        if trainer.is_global_zero:
            print(f"from step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step % 5 == 0:  # fewer exchanges
            if trainer.strategy.reduce_boolean_decision(self.received, all=False):
                trainer.save_checkpoint(self.path)
                trainer.should_stop = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, default="runs/lightning")
    parser.add_argument("--max-steps", type=int, default=1000)
    args = parser.parse_args()
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])  # guard.py sets it under srun, too
    nodes = int(os.environ["WORLD_SIZE"]) // ranks_per_node
    path = args.output_dir / "last.ckpt"
    trainer = Trainer(
        devices=ranks_per_node,
        num_nodes=nodes,
        strategy="ddp",
        max_steps=args.max_steps,
        min_epochs=0,  # a stop does not wait for the end of an epoch
        default_root_dir=args.output_dir,
        callbacks=[StopTogether(path)],
        logger=False,
        enable_checkpointing=False,
    )
    seed_everything(0)
    loader = Loader(RandomDataset(32, 6400), batch_size=8)  # instead, load your data
    trainer.fit(BoringModel(), loader, ckpt_path=path if path.exists() else None)
    if trainer.is_global_zero:
        print(f"at step {trainer.global_step}")


if __name__ == "__main__":
    main()
