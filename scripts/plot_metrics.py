#!/usr/bin/env python3
"""Draw the metrics of one or more runs in one PNG, a panel for each metric.

    python scripts/plot_metrics.py checkpoints                      # -> checkpoints/metrics.png
    python scripts/plot_metrics.py runs/a runs/b -o comparison.png  # runs compared

A run is a directory that train_distributed.py wrote to. Thin lines: training, a point per record in
metrics.jsonl. Dots: the test set after each epoch. A loss has a logarithmic scale if it is always
positive; shares whose name ends in "accuracy" are in percent. If scripts/supervise.py has kept the
run going, a bar below shows when each attempt ran, and how it ended. The numbers in the bars are
numbers of ranks, if they differ.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

NOT_METRICS = re.compile(
    "kind|step|time|epoch|lr|samples_per_second|data_wait|gradient_norm|seconds_left|gpu_memory_gb"
)
COLUMNS = 3  # panels side by side at most
MAX_RANKS = 10**6
NEVER = 10**11  # seconds since 1970: no attempt ends later
# Colors of how an attempt ended.
GOOD_ENDS = {"finished": "tab:green", "stopped": "tab:olive", "ended": "tab:gray"}
CRASHES = ["tab:red", "tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:cyan", "black"]


class UserError(Exception):
    """Something the user can fix: printed as one sentence, without a traceback."""


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str):
        raise UserError(message)


def read_objects(path: Path) -> list[dict]:
    """The JSON objects of a file, one per line, without lines that are something else.

    The last line may be half a line: the run is being written, or was killed.
    """
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


class Run:
    """What a run has recorded."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.train: list[dict] = []
        self.epochs: list[dict] = []
        path = directory / "metrics.jsonl"
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file")
        try:
            records = read_objects(path)
        except OSError as error:
            text = f"{directory} is not the --checkpoint-dir of a run ({error.strerror})"
            raise UserError(text) from None
        last = {}  # after a crash, a step has two records: the last one counts
        for record in records:
            step, kind = record.get("step"), record.get("kind")
            is_ours = isinstance(step, int) and is_number(step)
            if is_ours and kind in ("train", "epoch"):
                last[step, kind] = record
        for step, kind in sorted(last):
            of_kind = self.train if kind == "train" else self.epochs
            of_kind.append(last[step, kind])
        if not self.metrics():
            raise UserError(f"{path} has no records yet")
        self.attempts = read_attempts(directory)

    def metrics(self) -> list[str]:
        """Their names, as in Task.report(): in the order of the file, the loss first."""
        names = []
        for record in self.train + self.epochs:
            for key, value in record.items():
                name = key.removeprefix("test_")
                is_metric = is_number(value) and not NOT_METRICS.fullmatch(name)
                if is_metric and name not in names:
                    names.append(name)
        return loss_first(names)

    def training_points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each record; of each epoch if only epochs have this metric."""
        return points(self.train, name) or points(self.epochs, name)

    def test_points(self, name: str) -> list[tuple[int, float]]:
        return points(self.epochs, f"test_{name}")


class Attempt(NamedTuple):
    """A line of attempts.jsonl: an attempt of scripts/supervise.py that has ended."""

    start: float  # seconds since 1970
    end: float
    cause: str
    ranks: int  # 0: unknown


def read_attempts(directory: Path) -> list[Attempt]:
    """Nothing if there is no attempt log; without lines that are damaged or of another program."""
    path = directory / "attempts.jsonl"
    records = read_objects(path) if path.is_file() else []
    attempts = []
    for record in records:
        start, end, cause = (record.get(name) for name in ("start", "end", "cause"))
        if not is_number(start) or not is_number(end) or not 0 <= start <= end < NEVER:
            continue  # it is still running, or is not ours
        ranks = record.get("world_size")
        if not isinstance(ranks, int) or not 0 < ranks < MAX_RANKS:
            ranks = 0
        if isinstance(cause, str) and re.fullmatch("[A-Za-z ]{1,30}", cause):
            attempts.append(Attempt(start, end, cause, ranks))
    return sorted(attempts)


def points(records: list[dict], key: str) -> list[tuple[int, float]]:
    found = []
    for record in records:
        value = record.get(key)
        if is_number(value):
            is_drawable = abs(value) < math.inf
            found.append((record["step"], value if is_drawable else math.nan))  # nan: a gap
    return found


def is_number(value) -> bool:
    """Whether it is a number: not one of those that only Python's int can hold."""
    is_huge = isinstance(value, int) and abs(value) > 10**300
    return isinstance(value, int | float) and not is_huge


def loss_first(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: name != "loss")


def draw(runs: list[Run], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    all_names = [name for run in runs for name in run.metrics()]
    names = loss_first(list(dict.fromkeys(all_names)))
    columns = min(len(names), COLUMNS)
    rows = math.ceil(len(names) / columns)
    supervised = [run for run in runs if run.attempts]
    heights = [3.4] * rows  # inches
    if supervised:
        heights.append(0.3 * len(supervised))
    labels = 0.8 * len(heights)  # inches: titles, numbers of the axes
    size = (5.5 * columns, sum(heights) + labels)
    figure = pyplot.figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for number, name in enumerate(names):
        place = grid[number // columns, number % columns]
        draw_panel(figure.add_subplot(place), name, runs)
    if supervised:
        draw_attempts(figure.add_subplot(grid[rows, :]), supervised, has_names=len(runs) > 1)
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
        label = run.directory.name if len(runs) > 1 else ""
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


def next_color(cause: str, colors: dict[str, str]) -> str:
    """The color of a cause that has none yet; crashes after each other get different ones."""
    crashes = [known for known in colors if known not in GOOD_ENDS]
    return GOOD_ENDS.get(cause, CRASHES[len(crashes) % len(CRASHES)])


def draw_attempts(axes, runs: list[Run], has_names: bool) -> None:
    """A row for each run: when its attempts ran, since the start of the first one."""
    longest = max(run.attempts[-1].end - run.attempts[0].start for run in runs)
    unit, seconds = ("hours", 3600) if longest > 2 * 3600 else ("minutes", 60)
    colors = {}  # of the causes that have been drawn
    for row, run in enumerate(runs):
        first = run.attempts[0].start
        sizes = {attempt.ranks for attempt in run.attempts} - {0}
        for attempt in run.attempts:
            is_new = attempt.cause not in colors
            if is_new:
                colors[attempt.cause] = next_color(attempt.cause, colors)
            left = (attempt.start - first) / seconds
            width = (attempt.end - attempt.start) / seconds
            color = colors[attempt.cause]
            bar = axes.barh(row, width, left=left, color=color, edgecolor="black", lw=0.5)
            if is_new:
                bar.set_label(attempt.cause)
            if attempt.ranks and len(sizes) > 1:
                axes.bar_label(bar, [attempt.ranks], label_type="center", fontsize="small")
    axes.set_title("Attempts", loc="left")
    axes.set_xlabel(unit)
    axes.set_yticks([])
    if has_names:
        axes.set_yticks(range(len(runs)), [run.directory.name for run in runs])
    axes.invert_yaxis()  # the first run above
    # Above the bars, beside the title.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize="small", frameon=False)


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
