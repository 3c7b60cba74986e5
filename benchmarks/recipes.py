#!/usr/bin/env python3
"""Memory and duration of a step with the recipe fsdp, compared with DDP.

    python benchmarks/recipes.py                                        # two minutes on two cores
    python benchmarks/recipes.py --ranks 8 --model vit_l_16 --size 224 --batch 16 --optimizer adamw

Both trainers run in the same processes and take turns. The memory is that of one rank between the
update and zero_grad(): the bytes of the storage of all parameters, gradients and optimizer states,
without activations, buffers, and the whole parameters and gradients of the part of the model that
FSDP works on. The ratio of durations is the median and the range over the rounds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ranks import MALLOC, load_trainer, repeated, run_ranks


class Trainer:
    """A copy of train_distributed.py in its own directory, with or without the recipe."""

    def __init__(self, directory: Path, recipe: str, words: list[str], world=None):
        self.code = load_trainer(directory, recipe)
        cfg = self.code.parse_config([*words, f"--checkpoint-dir={directory / 'run'}"])
        self.world = world or self.code.setup_distributed(cfg)
        task = self.code.Task()
        self.run = self.code.open_run(task, cfg, self.world)
        self.learner = self.run.learner
        self.learner.model.train()
        self.learner.optimizer.register_step_post_hook(lambda *_: self.measure())
        self.sums = self.code.ExactSums(task.sums, self.world.device)
        self.batches = repeated(self.run.train_loader)

    def measure(self) -> None:
        parameters = list(self.learner.model.parameters())
        gradients = [p.grad for p in parameters]
        states = self.learner.optimizer.state.values()
        momenta = [value for state in states for value in state.values()]
        self.bytes = bytes_of(parameters) + bytes_of(gradients) + bytes_of(momenta)

    def seconds(self, steps: int) -> float:
        """The mean duration of a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self.code.train_step(self.run, self.batches, self.sums)
            self.run.state.step += 1
        self.sums.all_reduce(self.world)  # waits for the GPU and for the other ranks
        return (time.perf_counter() - began) / steps


def bytes_of(tensors: list) -> int:
    """What this rank holds of them. Tensors may share a storage: DDP's gradients do."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    size_of_storage = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size_of_storage.values())


def worker(options) -> None:
    """On every rank: print {name: [bytes, seconds of each round]} of both."""
    words = f"--dataset synthetic --image-size {options.size} --model {options.model}"
    words += f" --batch-size {options.batch} --optimizer {options.optimizer}"
    own = Path(tempfile.mkdtemp(dir=options.directory))
    ddp = Trainer(own / "ddp", "", words.split())
    both = {"DDP": ddp, "FSDP": Trainer(own / "fsdp", "fsdp", words.split(), ddp.world)}
    times = {name: [] for name in both}
    for number in range(options.rounds + 1):
        for name in sorted(both, reverse=number % 2 == 1):
            times[name].append(both[name].seconds(options.steps))
    print(json.dumps({name: [both[name].bytes, *times[name][1:]] for name in both}))  # 1: warm-up


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--model", default="resnet50", help="of torchvision.models [resnet50]")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="adamw", help="[adamw]")
    parser.add_argument("--size", type=int, default=32, help="pixels per side [32]")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step [4]")
    parser.add_argument("--steps", type=int, default=5, help="per turn [5]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help=argparse.SUPPRESS)  # a worker
    options = parser.parse_args()
    if options.directory:
        return worker(options)
    print(f"{options.model}, {options.optimizer}, {options.batch} samples per rank")
    print("| ranks | DDP, per rank | FSDP, per rank | ratio | duration of a step, FSDP / DDP |")
    print("| --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as directory:
            words = [__file__, *sys.argv[1:], f"--directory={directory}"]
            lines = [out.splitlines()[-1] for out in run_ranks(words, ranks, **MALLOC)]
        (ddp, *slow), (fsdp, *fast) = (
            [max(values) for values in zip(*(json.loads(line)[name] for line in lines))]
            for name in ("DDP", "FSDP")
        )
        times = sorted(b / a for a, b in zip(slow, fast))
        median = f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})"
        memory = f"{ddp / 1e6:.1f} MB | {fsdp / 1e6:.1f} MB | {fsdp / ddp:.3f}"
        print(f"| {ranks} | {memory} | {median} |", flush=True)


if __name__ == "__main__":
    main()
