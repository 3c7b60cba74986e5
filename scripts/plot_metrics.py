#!/usr/bin/env python3
"""Draw the metrics of one or more runs in one PNG, a panel for each metric.

    python scripts/plot_metrics.py checkpoints                      # -> checkpoints/metrics.png
    python scripts/plot_metrics.py runs/a runs/b -o comparison.png  # runs compared

A run is a directory that train_distributed.py wrote to. Thin lines: training, a point per record in
metrics.jsonl. Dots: the test set after each epoch. A loss has a logarithmic scale if it is always
positive; shares whose name ends in "accuracy" are in percent.
"""

import argparse
import json
import math
import re
import sys
from contextlib import suppress
from pathlib import Path

NOT_METRICS = re.compile(
    "kind|step|time|epoch|lr|samples_per_second|data_wait|gradient_norm|seconds_left|gpu_memory_gb"
)
COLUMNS = 3  # panels side by side at most


class UserError(Exception):
    """Something the user can fix: printed as one sentence, without a traceback."""


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str):
        raise UserError(message)


class Run:
    """What a run has recorded."""

    def __init__(self, directory: Path):
        self.name = directory.name
        try:
            lines = (directory / "metrics.jsonl").read_text().splitlines()
        except OSError as error:
            text = f"{directory} is not the --checkpoint-dir of a run ({error.strerror})"
            raise UserError(text) from None
        last = {}  # after a crash, a step has two records: the last one counts
        for line in lines:
            with suppress(ValueError):  # half a line: the run is being written, or was killed
                record = json.loads(line)
                last[record["step"], record["kind"]] = record
        steps = sorted(last)
        self.train = [last[step, kind] for step, kind in steps if kind == "train"]
        self.epochs = [last[step, kind] for step, kind in steps if kind == "epoch"]
        if not self.metrics():
            raise UserError(f"{directory}/metrics.jsonl has no records yet")

    def metrics(self) -> list[str]:
        """Their names, as in Task.report(): in the order of the file, the loss first."""
        keys = [key for record in self.train + self.epochs for key in record]
        names = [key.removeprefix("test_") for key in keys]
        return loss_first([name for name in names if not NOT_METRICS.fullmatch(name)])

    def training_points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each record; of each epoch if only epochs have this metric."""
        return points(self.train, name) or points(self.epochs, name)

    def test_points(self, name: str) -> list[tuple[int, float]]:
        return points(self.epochs, f"test_{name}")


def loss_first(names: list[str]) -> list[str]:
    return sorted(dict.fromkeys(names), key=lambda name: name != "loss")


def points(records: list[dict], key: str) -> list[tuple[int, float]]:
    """A value that was not finite is null in the file, and a gap in the line."""
    found = []
    for record in records:
        if key in record:
            value = record[key]
            found.append((record["step"], math.nan if value is None else value))
    return found


def draw(runs: list[Run], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    names = loss_first([name for run in runs for name in run.metrics()])
    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    size = (5.5 * columns, 4.2 * rows)  # inches
    figure = pyplot.figure(figsize=size, layout="constrained")
    for number, name in enumerate(names, 1):
        draw_panel(figure.add_subplot(rows, columns, number), name, runs)
    try:
        figure.savefig(output, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a file format it does not know
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {output}: {reason}") from None
    finally:
        pyplot.close(figure)


def draw_panel(axes, name: str, runs: list[Run]) -> None:
    """The metric of all runs that have it."""
    is_share = name.endswith("accuracy")
    scale = 100 if is_share else 1
    drawn = []  # all values
    for number, run in enumerate(runs):
        color = f"C{number}"
        label = run.name if len(runs) > 1 else ""
        training = run.training_points(name)
        if training:
            steps = [step for step, _ in training]
            values = [scale * value for _, value in training]
            marker = "." if len(training) == 1 else None  # a line of one point is invisible
            text = f"{label} training".strip()
            axes.plot(steps, values, color=color, alpha=0.5, lw=1, marker=marker, label=text)
            drawn += values
        test = run.test_points(name)
        if test:
            steps = [step for step, _ in test]
            values = [scale * value for _, value in test]
            last = f"{values[-1]:.2f} %" if is_share else f"{values[-1]:.4g}"
            text = f"{label} test, last {last}".strip()
            axes.plot(steps, values, "o-", color=color, label=text)
            drawn += values
    axes.set_title(name.replace("_", " ").capitalize())
    axes.set_xlabel("step")
    if is_share:
        axes.set_ylabel("%")
    if name.endswith("loss") and min(drawn) > 0:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> int:
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=style)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("-o", "--output", type=Path, help="PNG file [metrics.png in the first RUN]")
    try:
        options = parser.parse_args()
        output = options.output or options.runs[0] / "metrics.png"
        draw([Run(directory) for directory in options.runs], output)
    except UserError as error:
        print(f"plot_metrics.py: error: {error}", file=sys.stderr)
        return 2
    except ImportError:
        text = "it needs one more package: pip install matplotlib"
        print(f"plot_metrics.py: error: {text}", file=sys.stderr)
        return 2
    print(f"Wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
