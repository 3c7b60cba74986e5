"""The trainer on the simulated accelerator of simgpu.cpp: what would fail or wait on a GPU.

All need --long. tests/README.md says what this proves and what it does not.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import simgpu
import tasks
import torch
from harness import assert_same_state, train

from train_distributed import Task

NEEDS = simgpu.why_not()
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(NEEDS), reason=f"needs {NEEDS}")]
ONE_EPOCH = "--epochs=1"  # of 203 samples
FOUR_MICRO_BATCHES = "--global-batch-size=32"  # 7 steps
ON_CPU = "import torch; assert not torch.accelerator.is_available()"
# Waits in steps: at the first, images, labels, DDP's two of its new buckets, and eight for the
# names of the sums, which all ranks compare; one of an order at that of each epoch.
FEW = 14


class CountOnDevice(Task):
    """Counts its items on the device."""

    def loss(self, model, batch):
        loss, sums = super().loss(model, batch)
        return loss, sums | {"count": torch.ones_like(batch[1]).sum()}


class Accelerators:
    """Trains on simulated accelerators, and remembers when each process waited for its own."""

    def __init__(self, library: Path, events: Path):
        self.library = library
        self.events = events

    def enable(self, devices: int) -> str:
        """For `before` of the harness: the code that gives a rank its accelerators."""
        return f"""if True:
            import os, sys
            sys.path.append({str(simgpu.HERE)!r})
            import simgpu
            file = {str(self.events)!r} + os.environ.get("RANK", "0")
            simgpu.enable({str(self.library)!r}, {devices}, file)
        """

    def train(self, directory: Path, ranks: int, *options: str, task=None):
        """harness.train() with two devices. Forgets the events of earlier runs."""
        for file in self.events.parent.iterdir():
            file.unlink()
        run = train(directory, ranks, *options, before=self.enable(2), task=task)
        assert f"distributed training on {ranks} x " in run.out[0]
        return run

    def of_rank(self, rank: int) -> list[dict]:
        lines = Path(f"{self.events}{rank}").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def phases(self, rank: int, kind: str) -> Counter:
        """How many events of a kind happened in each phase of the training."""
        events = [event for event in self.of_rank(rank) if event["kind"] == kind]
        return Counter(phase(event["stack"]) for event in events)

    def assert_no_step_waits(self, ranks: int) -> None:
        """Only exchanges, saves, evaluations, and what comes before the first step, may wait."""
        for rank in range(ranks):
            places, expected = [], 0
            for event in self.of_rank(rank):
                stack = event["stack"]
                is_in_step = phase(stack) in ("train_step", BACKWARD)
                if event["kind"] != "wait" or not is_in_step:
                    continue
                places.append(" < ".join([event["what"], *stack[:4]]))
                functions = {function.split()[0] for function in stack}
                expected += bool(functions & {"batches_of", "_pre_forward", "gather"})
            assert expected == len(places) <= FEW, "\n".join(places)
            assert self.phases(rank, "wait")["agree"], "nothing was recorded"


BACKWARD = "threads of backward"


def phase(stack: list[str]) -> str:
    """The function that the loop or train() had called; backward() has threads of its own."""
    inner = ""
    for function in stack:
        name, place = function.split()
        if place.startswith("train_distributed.py"):
            if name in ("train_steps", "train"):
                return inner
            if name == "main":
                return "before and after train"
        inner = name
    return BACKWARD


@pytest.fixture(scope="session")
def library() -> Path:
    return simgpu.build()


@pytest.fixture
def accelerators(library, tmp_path) -> Accelerators:
    (tmp_path / "events").mkdir()
    return Accelerators(library, tmp_path / "events" / "rank")


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_step_waits_and_the_weights_are_those_of_the_cpu(tmp_path, tiny, accelerators, ranks):
    options = [*tiny, FOUR_MICRO_BATCHES, ONE_EPOCH]
    ours = accelerators.train(tmp_path / "device", ranks, *options)
    accelerators.assert_no_step_waits(ranks)
    theirs = train(tmp_path / "cpu", ranks, *options, before=ON_CPU)
    assert_same_state(ours.newest(), theirs.newest())
    (our_epoch,) = ours.records("epoch")
    (their_epoch,) = theirs.records("epoch")
    for name in ("loss", "accuracy", "test_loss", "test_accuracy"):
        assert our_epoch[name] == their_epoch[name]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, tiny, accelerators, ranks):
    options = [*tiny, "--optimizer=adamw", "--lr=0.001"]
    straight = accelerators.train(tmp_path / "straight", ranks, *options, "--stop-at-step=8")
    accelerators.train(tmp_path / "run", ranks, *options, "--stop-at-step=3")
    resumed = accelerators.train(tmp_path / "run", ranks, *options, "--stop-at-step=8")
    assert_same_state(straight.newest(), resumed.newest())


@pytest.mark.parametrize("options", [[], ["--amp=fp16", "--clip-grad-norm=1"]], ids=["", "fp16"])
def test_reproducible_runs_end_with_the_same_bits(tmp_path, tiny, accelerators, options):
    options = [*tiny, FOUR_MICRO_BATCHES, "--reproducible", "--stop-at-step=4", *options]
    one = accelerators.train(tmp_path / "one", 1, *options)
    two = accelerators.train(tmp_path / "two", 2, *options, "--distributed-backend=nccl")
    assert_same_state(one.newest(), two.newest())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, ["--optimizer=adamw", "--clip-grad-norm=1", "--amp=bf16"]), (1, ["--reproducible"])],
    ids=["adamw-bf16", "reproducible"],
)
@pytest.mark.parametrize("task", [None, CountOnDevice], ids=["samples", "items"])
def test_no_step_waits_with_other_options(tmp_path, tiny, accelerators, ranks, options, task):
    """With fp16, GradScaler does."""
    options = [*tiny, FOUR_MICRO_BATCHES, ONE_EPOCH, *options]
    accelerators.train(tmp_path / "run", ranks, *options, task=task)
    accelerators.assert_no_step_waits(ranks)


def test_image_files_are_copied_from_pinned_memory_and_no_step_waits(
    tmp_path, images, accelerators
):
    options = [f"--data-dir={images}", "--image-size=32", ONE_EPOCH]
    options += ["--num-workers=2", "--batch-size=6", "--log-every-steps=1"]
    accelerators.train(tmp_path / "run", 2, *options, task=tasks.Photos)
    accelerators.assert_no_step_waits(ranks=2)
    for rank in (0, 1):
        copies = accelerators.phases(rank, "pinned copy")
        assert copies["train_step"] >= 2 * 3  # images and labels
        assert accelerators.phases(rank, "pageable copy")["train_step"] <= 2  # DDP's new buckets
