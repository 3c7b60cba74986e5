#!/usr/bin/env python3
"""Draw loss and accuracy of one or more runs, side by side in one PNG.

    python scripts/plot_metrics.py checkpoints                      # -> checkpoints/metrics.png
    python scripts/plot_metrics.py runs/a runs/b -o comparison.png  # runs compared

A run is a directory that train_distributed.py wrote to. Thin lines: training, a point per record in
metrics.jsonl. Dots: the test set after each epoch.
"""

import argparse
import json
import sys
from pathlib import Path


def read_records(run: Path) -> dict[str, list[dict]]:
    """{"train": records, "epoch": records} of a run; exits with an error if there are none."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except OSError as error:
        sys.exit(f"plot_metrics.py: error: {run} is not a run directory ({error.strerror})")
    records: dict[str, list[dict]] = {"train": [], "epoch": []}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # half a line: the run is being written, or was killed
        records[record["kind"]].append(record)
    if not records["train"]:
        sys.exit(f"plot_metrics.py: error: {run}/metrics.jsonl has no records yet")
    return records


def draw(runs: list[Path], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot

    figure, (loss, accuracy) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, run in enumerate(runs):
        records, color = read_records(run), f"C{number}"
        name = run.name if len(runs) > 1 else ""
        for axes, key, scale in ((loss, "loss", 1), (accuracy, "accuracy", 100)):
            train = [(r["step"], scale * r[key]) for r in records["train"]]
            style = {"color": color, "alpha": 0.5, "lw": 1, "label": f"{name} training".strip()}
            axes.plot(*zip(*train), **style, marker="." if len(train) == 1 else None)
            if records["epoch"]:
                test = [(r["step"], scale * r[f"test_{key}"]) for r in records["epoch"]]
                last = f"{test[-1][1]:.4f}" if key == "loss" else f"{test[-1][1]:.2f} %"
                label = f"{name} test, last {last}".strip()
                axes.plot(*zip(*test), "o-", color=color, label=label)
    loss.set(title="Loss", xlabel="step", yscale="log")
    accuracy.set(title="Accuracy", xlabel="step", ylabel="%")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(output, dpi=120)


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("-o", "--output", type=Path, help="PNG file [metrics.png in the first RUN]")
    options = parser.parse_args()
    output = options.output or options.runs[0] / "metrics.png"
    try:
        draw(options.runs, output)
    except ImportError:
        sys.exit("plot_metrics.py: error: it needs one more package: pip install matplotlib")
    except OSError as error:
        sys.exit(f"plot_metrics.py: error: cannot write {output}: {error.strerror}")
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
