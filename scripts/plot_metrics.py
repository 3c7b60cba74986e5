#!/usr/bin/env python3
"""Draw the metrics of one or more runs in one PNG, a panel for each metric.

    python scripts/plot_metrics.py checkpoints                      # -> checkpoints/metrics.png
    python scripts/plot_metrics.py runs/a runs/b -o comparison.png  # runs compared

A run is a directory that train_distributed.py wrote to, or its metrics.jsonl. Thin lines: training,
a point per record. Dots: the test set after each epoch. Every second run is dashed. A loss that is
always positive has a logarithmic scale.
"""

import argparse
import json
import math
import re
from contextlib import suppress
from pathlib import Path

NOT_METRICS = re.compile(
    "kind|step|time|epoch|lr|samples_per_second|data_wait|gradient_norm|seconds_left|gpu_memory_gb"
)
HELD_OUT = re.compile("^(test|validation)_")
COLUMNS = 3  # panels side by side at most


def read_records(path: Path) -> dict[tuple, dict]:
    """{(step, kind): record}; after a crash, a step has two records: the last one counts."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    records = {}
    for line in file.read_bytes().splitlines():
        with suppress(ValueError, KeyError, TypeError):  # half a line: the run was killed
            record = json.loads(line)
            records[record["step"], record["kind"]] = record
    return records


class Run:
    """What a run has recorded."""

    def __init__(self, path: Path):
        self.directory = path if path.is_dir() else path.parent
        self.name = self.directory.name
        last = read_records(path)
        self.records = [last[key] for key in sorted(last)]

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


def draw(runs: list[Run], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    names = dict.fromkeys(name for run in runs for name in run.metrics())
    if not names:
        raise ValueError("metrics.jsonl has no records yet")
    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    size = (5.5 * columns, 4.2 * rows)  # inches
    figure = pyplot.figure(figsize=size, layout="constrained")
    for number, name in enumerate(names, 1):
        draw_panel(figure.add_subplot(rows, columns, number), name, runs)
    figure.savefig(output)


def draw_panel(axes, name: str, runs: list[Run]) -> None:
    """The metric of all runs that have it."""
    for number, run in enumerate(runs):
        line = "--" if number % 2 else "-"  # where runs agree, both are seen
        color = f"C{number}"
        training = run.points(name, "train") or run.points(name)  # of steps, or of epochs
        if training:
            label = f"{run.name} training"
            axes.plot(*zip(*training), f".{line}", ms=4, lw=1, alpha=0.5, color=color, label=label)
        for held_out in ("validation", "test"):
            curve = run.points(f"{held_out}_{name}")
            if curve:
                label = f"{run.name} {held_out}"
                axes.plot(*zip(*curve), f"o{line}", ms=5, color=color, label=label)
    axes.set_title(name)
    axes.set_xlabel("step")
    if name.endswith("loss") and axes.dataLim.ymin > 0:
        axes.set_yscale("log")
    axes.legend()


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, help="PNG file [metrics.png in the first RUN]")
    options = parser.parse_args()
    try:
        runs = [Run(path) for path in options.runs]
        output = options.output or runs[0].directory / "metrics.png"
        draw(runs, output)
    except (ImportError, OSError, ValueError) as error:  # no matplotlib; no run; no such format
        parser.error(str(error))
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
