"""Predict a number from a table: the rent of a flat.

    python examples/regression.py --write-sample --data-dir data/rents --optimizer adamw --lr 0.01 \
        --epochs 10 --checkpoint-dir runs/regression
    TRAIN_SCRIPT=examples/regression.py scripts/ssh/launch_singlenode.sh \
        configs/default_config.yaml 2 --write-sample --data-dir data/rents --optimizer adamw \
        --lr 0.01 --epochs 10 --checkpoint-dir runs/regression_2

Shows other inputs and metrics than those of classification, and a spec that model() needs: the
mean and standard deviation of each column. --data-dir holds table.csv: a line of names, then
numbers, the last column is the target; --write-sample writes invented rents there.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # train_distributed.py is there
from train_distributed import InMemoryDataset, Task, UserError, main  # noqa: E402


def write_sample(path: Path, rows: int = 5000) -> None:
    """Rents grow with the area and shrink with the distance to the center."""
    random = np.random.default_rng(0)
    area = random.uniform(20, 150, rows)
    rooms = np.ceil(area / 30 + random.uniform(0, 1, rows))
    distance = random.uniform(0, 20, rows)
    rent = area * (8 + 12 * np.exp(-distance / 5)) + 50 * rooms + random.normal(0, 30, rows)
    path.parent.mkdir(parents=True)
    table = np.column_stack([area, rooms, distance, rent])
    np.savetxt(path, table, "%.2f", delimiter=",", header="area,rooms,distance,rent", comments="")


class RentModel(nn.Module):
    """Rows of the table without the last column [b, features] -> the last column [b]."""

    def __init__(self, mean: list[float], std: list[float]):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(len(mean) - 1, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.network((inputs - self.mean[:-1]) / self.std[:-1])  # [b, 1]
        return output[:, 0] * self.std[-1] + self.mean[-1]


class Rent(Task):
    best = "mean_absolute_error"
    best_is_lowest = True

    def add_options(self, parser):
        parser.add_argument("--write-sample", action="store_true", help="to a new --data-dir")

    def data(self, cfg):
        path = Path(cfg.data_dir) / "table.csv"
        if cfg.write_sample and not path.parent.exists():
            write_sample(path)
        try:
            table = np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {path} ({error})") from None
        if not np.isfinite(table).all():
            raise UserError(f"{path} has empty or infinite cells: replace them")
        is_test = np.arange(len(table)) % 5 == 0
        train, test = table[~is_test], table[is_test]
        # Rounded: a resumed run compares them, perhaps on a computer that adds in another order.
        mean = [float(f"{value:.4g}") for value in train.mean(0, np.float64)]
        std = [float(f"{value:.4g}") for value in train.std(0, dtype=np.float64)]
        self.spec = {"mean": mean, "std": std}
        if 0 in std:
            raise UserError(f"{path} has a column of equal numbers: remove it")
        train, test = torch.from_numpy(train), torch.from_numpy(test)
        train_set = InMemoryDataset(train[:, :-1], train[:, -1])
        return train_set, InMemoryDataset(test[:, :-1], test[:, -1])

    def model(self, cfg):
        return RentModel(**self.spec)

    def loss(self, model, batch):
        inputs, targets = batch
        mean, std = model.mean[-1], model.std[-1]
        error = (model(inputs) - targets) / std
        target = (targets - mean) / std
        return error.square().mean(), {
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
