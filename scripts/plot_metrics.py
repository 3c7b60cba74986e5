#!/usr/bin/env python3
"""Draw the metrics of one or more runs in one PNG, a panel for each metric.

    python scripts/plot_metrics.py checkpoints                      # -> checkpoints/metrics.png
    python scripts/plot_metrics.py runs/a runs/b -o comparison.png  # runs compared

A run is a directory that train_distributed.py wrote to. Thin lines: training, a point per record in
metrics.jsonl, without those that average less than half as many steps as usual, such as at the end
of an epoch. Dots: the test set after each epoch. Every second run is dashed. A loss that is always
positive has a logarithmic scale.
"""

import argparse
import json
import math
import re
import statistics
from contextlib import suppress
from pathlib import Path

NOT_METRICS = re.compile(
    "kind|step|time|epoch|lr|samples_per_second|data_wait|gradient_norm|seconds_left|gpu_memory_gb"
)
HELD_OUT = re.compile("^(test|validation)_")
COLUMNS = 3  # panels side by side at most


class Run:
    """What a run has recorded."""

    def __init__(self, directory: Path):
        self.name = directory.name
        last = {}  # after a crash, a step has two records: the last one counts
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            with suppress(ValueError):  # half a line: the run is being written, or was killed
                record = json.loads(line)
                last[record["step"], record["kind"]] = record
        records = [last[key] for key in sorted(last)]
        train = [record for record in records if record["kind"] == "train"]
        others = [record for record in records if record["kind"] != "train"]
        self.records = without_short(train) + others

    def metrics(self) -> list[str]:
        """Their names, as in Task.report(), in the order of the file."""
        keys = [HELD_OUT.sub("", key) for record in self.records for key in record]
        return [key for key in keys if not NOT_METRICS.fullmatch(key)]

    def points(self, key: str, kind: str = "") -> list[tuple[int, float]]:
        """(step, value) of each record. A value that was not finite is null in the file: a gap."""
        found = []
        for record in self.records:
            if key in record and record["kind"].startswith(kind):
                value = record[key]
                found.append((record["step"], math.nan if value is None else value))
        return found


def without_short(records: list[dict]) -> list[dict]:
    """Without those that average less than half as many steps as usual: they are noise."""
    steps = [record["step"] for record in records]
    lengths = [after - before for before, after in zip(steps, steps[1:])]
    usual = statistics.median(lengths) if lengths else 0
    long = [record for record, length in zip(records[1:], lengths) if 2 * length >= usual]
    return records[:1] + long


def draw(runs: list[Run], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    names = dict.fromkeys(name for run in runs for name in run.metrics())
    if not names:
        raise ValueError("metrics.jsonl has no records yet")
    loss_first = sorted(names, key=lambda name: name != "loss")
    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    size = (5.5 * columns, 4.2 * rows)  # inches
    figure = pyplot.figure(figsize=size, layout="constrained")
    for number, name in enumerate(loss_first, 1):
        draw_panel(figure.add_subplot(rows, columns, number), name, runs)
    figure.savefig(output, dpi=120)


def draw_panel(axes, name: str, runs: list[Run]) -> None:
    """The metric of all runs that have it."""
    for number, run in enumerate(runs):
        line = "--" if number % 2 else "-"  # where runs agree, both are seen
        curves = {
            "training": run.points(name, "train") or run.points(name),  # of steps, or of epochs
            "validation": run.points(f"validation_{name}"),
            "test": run.points(f"test_{name}"),
        }
        for what, curve in curves.items():
            style = {"ms": 4 if number % 2 else 7}  # points
            if what == "training":
                style = {"ms": 2, "lw": 1, "alpha": 0.5}
            if curve:
                label = f"{run.name} {what}"
                axes.plot(*zip(*curve), f"o{line}", color=f"C{number}", label=label, **style)
    axes.set_title(name.replace("_", " ").capitalize())
    axes.set_xlabel("step")
    if name.endswith("loss") and axes.dataLim.ymin > 0:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("-o", "--output", type=Path, help="PNG file [metrics.png in the first RUN]")
    options = parser.parse_args()
    output = options.output or options.runs[0] / "metrics.png"
    try:
        draw([Run(directory) for directory in options.runs], output)
    except (ImportError, OSError, ValueError) as error:  # no matplotlib; no run; no such format
        parser.error(str(error))
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
