#!/usr/bin/env python3
"""Time to 99 % test accuracy on MNIST: configs/mnist_fast.yaml compared with a plain loop.

    python benchmarks/accuracy.py --data-dir data               # 10 to 30 minutes on two cores
    python benchmarks/accuracy.py --data-dir data --rounds 1 --accuracy 98

The plain loop ("template") is the usual one with the same network: a transform per image, loader
workers, .item() in every step, batch size 64, SGD with momentum, constant learning rate 0.01. It
evaluates after each epoch and stops at --accuracy. "ours" is the trainer with mnist_fast.yaml. Each
runs in one process on all cores, with a different seed in each round. The output has seconds from
start to end and test accuracy per round, and the median ratio of the rounds in which both reached
--accuracy.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from contestants import network
from ranks import REPO, run_ranks

MOST = 30  # epochs at most


def template(seed: int, data_dir: str, goal: float) -> float:
    """Train until the test accuracy reaches the goal, in percent. Returns the accuracy."""
    import torch
    import torchvision
    from torch.utils.data import DataLoader
    from torchvision import transforms

    torch.manual_seed(seed)
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    train, test = (
        torchvision.datasets.MNIST(data_dir, train=t, transform=transforms.Compose(steps))
        for t in (True, False)
    )
    loader = DataLoader(train, 64, shuffle=True, num_workers=2)
    test_loader = DataLoader(test, 1000, num_workers=2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    accuracy, losses = 0.0, []
    for _ in range(MOST):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            guesses = ((model(x.to(device)).argmax(1).cpu(), y) for x, y in test_loader)
            right = sum((guess == y).sum().item() for guess, y in guesses)
        accuracy = 100 * right / len(test)
        if accuracy >= goal:
            break
    return accuracy


def turn(name: str, seed: int, options) -> tuple[float, float]:
    """Run one of the two. Returns (seconds, accuracy in percent)."""
    env = {"CUDA_VISIBLE_DEVICES": ""} if options.cpu else {}
    with tempfile.TemporaryDirectory() as directory:
        words = [__file__, f"--template={seed}", f"--accuracy={options.accuracy}"]
        if name == "ours":  # started as by the launchers
            words = [REPO / "scripts/guard.py", REPO / "train_distributed.py", f"--seed={seed}"]
            words += ["--config", REPO / "configs/mnist_fast.yaml", f"--checkpoint-dir={directory}"]
        began = time.monotonic()
        output = run_ranks([*words, f"--data-dir={options.data_dir}"], 1, **env)[0]
        seconds = time.monotonic() - began
        if name == "ours":
            lines = Path(directory, "metrics.jsonl").read_text().splitlines()
            return seconds, 100 * json.loads(lines[-1])["test_accuracy"]
        return seconds, float(re.findall(r"[\d.]+", output)[-1])


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--data-dir", default="data", help="directory with MNIST/raw [data]")
    add("--rounds", type=int, default=3, help="[3]")
    add("--accuracy", type=float, default=99.0, help="the goal, in percent [99]")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    add("--template", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.template is not None:
        print(template(options.template, options.data_dir, options.accuracy))
        return
    ratios = []
    print("| seed | configs/mnist_fast.yaml | template | ratio |\n| --- | --- | --- | --- |")
    for seed in range(1, options.rounds + 1):
        ours, other = (turn(name, seed, options) for name in ("ours", "template"))
        reached = min(ours[1], other[1]) >= options.accuracy
        ratios += [other[0] / ours[0]] * reached
        cells = " | ".join(f"{seconds:.0f} s, {share:.2f} %" for seconds, share in (ours, other))
        print(f"| {seed} | {cells} | {ratios[-1]:.1f} |" if reached else f"| {seed} | {cells} | |")
        sys.stdout.flush()
    print(f"template / ours: {statistics.median(ratios):.1f}" if ratios else "The goal was missed.")


if __name__ == "__main__":
    main()
