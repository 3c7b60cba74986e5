"""Predict a number from a table: the rent of a flat.

    python examples/regression.py --write-sample --data-dir data/rents --optimizer adamw --lr 0.01 \
        --epochs 10 --checkpoint-dir runs/regression
    TRAIN_SCRIPT=examples/regression.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/rents --optimizer adamw \
        --lr 0.01 --epochs 10 --checkpoint-dir runs/regression_2

Shows other inputs and metrics than those of classification, and a spec that predict() needs: the
mean and standard deviation of each column. --data-dir holds table.csv: a line of names, then
numbers, the last column is the target; --write-sample writes invented rents there.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import InMemoryDataset, Task, UserError, explain, main  # noqa: E402


def write_sample(path: Path, rows: int = 5000) -> None:
    """Rents grow with the area and shrink with the distance to the center."""
    random = np.random.default_rng(0)
    area = random.uniform(20, 150, rows)
    rooms = np.ceil(area / 30 + random.uniform(0, 1, rows))
    distance = random.uniform(0, 20, rows)
    rent = area * (8 + 12 * np.exp(-distance / 5)) + 50 * rooms + random.normal(0, 30, rows)
    path.parent.mkdir(parents=True)
    table = np.column_stack([area, rooms, distance, rent])
    header = "area,rooms,distance,rent"
    np.savetxt(path, table, "%.2f", delimiter=",", header=header, comments="")


class Rent(Task):
    sums = ("loss", "count", "absolute_error", "target", "target_square")

    def add_options(self, parser):
        switch = argparse.BooleanOptionalAction
        add = parser.add_argument
        add("--write-sample", action=switch, default=False, help="to --data-dir, if it is new")

    def data(self, cfg):
        path = Path(cfg.data_dir) / "table.csv"
        if cfg.write_sample and not path.parent.exists():
            write_sample(path)
        with explain(f"cannot read {path}", OSError, ValueError):
            table = np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2)
        if not np.isfinite(table).all():
            raise UserError(f"{path} has empty or infinite cells: replace them")
        is_test = np.arange(len(table)) % 5 == 0
        train = table[~is_test]
        # Rounded: a resumed run compares them, perhaps on a computer that adds in another order.
        self.spec = {
            "mean": [float(f"{value:.4g}") for value in train.mean(0, np.float64)],
            "std": [float(f"{value:.4g}") for value in train.std(0, dtype=np.float64)],
        }
        if 0 in self.spec["std"]:
            raise UserError(f"{path} has a column of equal numbers: remove it")
        return self.rows(train), self.rows(table[is_test])

    def rows(self, table: np.ndarray) -> InMemoryDataset:
        columns = torch.from_numpy(table)
        return InMemoryDataset(columns[:, :-1], columns[:, -1])

    def model(self, cfg):
        features = len(self.spec["mean"]) - 1
        return nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 1))

    def predict(self, model, inputs):
        """Rows of the table without the last column [b, features] -> the last column [b]"""
        mean = torch.tensor(self.spec["mean"], device=inputs.device)
        std = torch.tensor(self.spec["std"], device=inputs.device)
        output = model((inputs - mean[:-1]) / std[:-1])  # [b, 1]
        return output[:, 0] * std[-1] + mean[-1]

    def losses(self, model, batch):
        inputs, targets = batch
        mean, std = self.spec["mean"][-1], self.spec["std"][-1]
        error = (self.predict(model, inputs) - targets) / std
        target = (targets - mean) / std
        return {
            "loss": error.square().sum(),
            "count": len(targets),
            "absolute_error": error.abs().sum() * std,
            "target": target.sum(),
            "target_square": target.square().sum(),
        }

    def report(self, sums):
        mean = sums["target"] / sums["count"]
        variance = sums["target_square"] / sums["count"] - mean**2
        loss = sums["loss"] / sums["count"]  # the mean squared error, in squares of std
        return {
            "loss": loss,
            "mean_absolute_error": sums["absolute_error"] / sums["count"],
            "r2": 1 - loss / variance if variance > 0 else 0.0,
        }


if __name__ == "__main__":
    main(Rent())
