#!/usr/bin/env python3
"""Draw docs/survival.png: a run that much happens to, beside one that runs undisturbed.

    python tests/cluster/picture.py FILE.png      # as root, with the packages of the cluster tests

On the Slurm cluster of the tests, a job of five nodes trains on four of them. A rank is killed; the
job is requeued; a rank of node02 is stopped until it has caused two hangs, so that node02 is left
out and the spare node05 takes its place; the job is cancelled, and submitted again on two nodes.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib import pyplot

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "scripts")]

import plot_metrics  # noqa: E402
from harness import REPO, is_rank  # noqa: E402
from machines import Cluster, Process  # noqa: E402

EPOCHS = 6
OPTIONS = ["--reproducible", f"--epochs={EPOCHS}", "--global-batch-size=64", "--batch-size=16"]
OPTIONS += ["--checkpoint-every-steps=20", "--log-every-steps=5"]
COLORS = {"killed": "tab:red", "stopped": "tab:olive", "hang": "tab:orange"}  # by cause
COLORS |= {"finished": "tab:green"}
NODES = ["node01", "node02", "node03", "node04", "node05"]


class Disturbed:
    """The run, and the cluster that it runs on."""

    def __init__(self, cluster: Cluster, run: Path):
        self.cluster = cluster
        self.run = run
        self.job = ""

    def submit(self, *flags: str, **env: str) -> None:
        flags = [*flags, "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]
        flags.append(f"--output={self.run.parent}/%j.out")
        words = ["run_distributed.slurm", "configs/default_config.yaml", *OPTIONS]
        words.append(f"--checkpoint-dir={self.run}")
        env = {"HANG_TIMEOUT": "8", "LOG_DIR": str(self.run.parent / "logs"), **env}
        code, text = self.cluster.on("login", "sbatch", "--parsable", *flags, *words, **env)
        if code:
            sys.exit(text)
        self.job = text.split()[-1]

    def slurm(self, *words: str) -> str:
        return self.cluster.on("login", *words)[1]

    def wait_for(self, condition, what: str) -> None:
        print(f"waiting: {what}", flush=True)
        deadline = time.monotonic() + 300
        while not condition():
            if time.monotonic() > deadline:
                sys.exit(f"gave up: {self.slurm('squeue')}\n{self.output()[-3000:]}")
            time.sleep(0.2)

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.run.parent.glob("*.out")))

    def step(self) -> int:
        try:
            return json.loads((self.run / "status.json").read_text())["saved_step"]
        except (OSError, ValueError, KeyError):
            return 0

    def wait_for_steps(self, more: int) -> None:
        begin = self.step()
        self.wait_for(lambda: self.step() >= begin + more, f"{more} steps after {begin}")

    def rank_on(self, host: str) -> list[Process]:
        found = []
        for process in self.cluster.processes():
            if process.host == host and is_rank(process.line):
                found.append(process)
        return found

    def attempts(self) -> int:
        path = self.run / "attempts.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def stop_rank_on(self, host: str) -> None:
        before = self.attempts()
        for process in self.rank_on(host):
            os.kill(process.pid, signal.SIGSTOP)
        self.wait_for(lambda: self.attempts() > before, f"a hang because of {host}")

    def wait_for_end(self) -> None:
        listing = ("squeue", "--noheader", f"--jobs={self.job}")
        self.wait_for(lambda: not self.slurm(*listing).strip(), "the end of the job")

    def is_pending(self) -> bool:
        soon = f"JobId={self.job}", "StartTime=now+3"  # instead of two minutes
        return self.cluster.on("login", "scontrol", "update", *soon)[0] == 0


def disturb(cluster: Cluster, run: Path) -> None:
    training = Disturbed(cluster, run)
    training.submit("--nodes=5", NNODES="4")
    training.wait_for_steps(60)
    os.kill(training.rank_on("node03")[0].pid, signal.SIGKILL)
    training.wait_for_steps(60)
    training.slurm("scontrol", "requeue", training.job)
    training.wait_for(training.is_pending, "the requeued job")
    training.wait_for_steps(60)
    training.stop_rank_on("node02")
    training.wait_for_steps(20)
    training.stop_rank_on("node02")
    training.wait_for_steps(80)
    training.slurm("scancel", training.job)
    training.wait_for_end()
    training.submit("--nodes=2")
    training.wait_for_end()
    print(training.output())


def draw(disturbed: Path, undisturbed: Path, file: str) -> None:
    """Both runs, and below them when each attempt of the first one ran, on how many ranks."""
    runs = [plot_metrics.Run(path) for path in (disturbed, undisturbed)]
    figure = pyplot.figure(figsize=(11, 5.3), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[3.4, 0.3])
    for column, name in enumerate(("loss", "accuracy")):
        plot_metrics.draw_panel(figure.add_subplot(grid[0, column]), name, runs)
    axes = figure.add_subplot(grid[1, :])
    lines = (disturbed / "attempts.jsonl").read_text().splitlines()
    attempts = [json.loads(line) for line in lines]
    drawn = set()
    for attempt in attempts:
        cause = attempt["cause"]
        left = (attempt["start"] - attempts[0]["start"]) / 60
        width = (attempt["end"] - attempt["start"]) / 60
        label = None if cause in drawn else cause
        bar = axes.barh(0, width, left=left, color=COLORS[cause], edgecolor="black", label=label)
        axes.bar_label(bar, [attempt["world_size"]], label_type="center", fontsize="small")
        drawn.add(cause)
    axes.set_title("Attempts of the disturbed run: number of ranks", loc="left")
    axes.set_xlabel("minutes")
    axes.set_yticks([])
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize="small", frameon=False)
    figure.savefig(file, dpi=120)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as directory:
        disturbed = Path(directory, "disturbed")
        undisturbed = Path(directory, "undisturbed")
        cluster = Cluster(Path(f"/tmp/picture-{os.getpid()}"), 5, 1, NAMES=" ".join(NODES))
        try:
            disturb(cluster, disturbed)
        finally:
            cluster.down()
        trainer = [sys.executable, REPO / "train_distributed.py", *OPTIONS]
        subprocess.run([*trainer, f"--checkpoint-dir={undisturbed}"], check=True)
        draw(disturbed, undisturbed, sys.argv[1])
        compare = [sys.executable, REPO / "scripts/compare_runs.py", disturbed, undisturbed]
        subprocess.run(compare)


if __name__ == "__main__":
    main()
