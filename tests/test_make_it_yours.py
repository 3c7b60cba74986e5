"""The patches of docs/make_it_yours: each applies, and what it makes of the trainer trains."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO, context, load
from torchvision.datasets import MNIST

PATCHES = REPO / "docs/make_it_yours"
DROPPED = sorted(path.stem for path in PATCHES.glob("drop_*.patch"))


def run_copy(path: str, argv: list[str], log: str) -> None:
    """A trainer other than the repository's, in a process that has imported torch already."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.exit(load(Path(path)).main(argv))


def patched(tmp_path: Path, name: str) -> Path:
    copy = tmp_path / "train_distributed.py"
    copy.write_text((REPO / "train_distributed.py").read_text())
    (tmp_path / "data").symlink_to(REPO / "data")
    command = ["git", "apply", PATCHES / f"{name}.patch"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", f"--config={REPO}/.ruff.toml", copy]
    result = subprocess.run(ruff, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    return copy


def train(copy: Path, *options: str) -> list[dict]:
    run, log = copy.with_name("run"), copy.with_name("log")
    argv = [f"--checkpoint-dir={run}", "--log-every-steps=1", "--stop-at-step=2", *options]
    process = context.Process(target=run_copy, args=(str(copy), argv, str(log)))
    process.start()
    process.join(100)
    process.kill()
    assert process.exitcode == 0, log.read_text()
    assert (run / "checkpoint_step_2.pt").exists()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_your_model(tmp_path):
    records = train(patched(tmp_path, "own_model"), "--model=mlp", "--batch-size=16")
    assert 2 < records[0]["loss"] < 3  # of 10 classes, by chance: ln 10


def test_your_image_files_and_a_resnet_of_which_you_train_the_end(tmp_path):
    digits = MNIST(REPO / "data/mnist_sample", train=False)
    for part in ("train", "val"):
        for number in range(24):
            image, label = digits[number]
            path = tmp_path / "images" / part / str(label % 2) / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.convert("RGB").save(path)
    options = ["--dataset=imagefolder", f"--data-dir={tmp_path / 'images'}", "--image-size=32"]
    options += ["--batch-size=8", "--num-workers=1"]
    copy = patched(tmp_path, "image_folder")
    records = train(copy, *options, "--model=resnet18")
    assert 0.3 < records[0]["loss"] < 3


def test_your_text(tmp_path):
    (tmp_path / "texts").mkdir()
    for page in (REPO / "docs").glob("*.md"):
        (tmp_path / "texts" / f"{page.stem}.txt").write_text(page.read_text())
    copy = patched(tmp_path, "language_model")
    records = train(copy, "--dataset=text", f"--data-dir={tmp_path / 'texts'}", "--batch-size=8")
    assert 5 < records[0]["loss"] < 6.5  # per byte, of 256, by chance: ln 256 = 5.5
    assert records[0]["accuracy"] < 0.2


@pytest.mark.parametrize("name", DROPPED)
def test_what_you_do_not_need_can_be_deleted(tmp_path, name):
    copy = patched(tmp_path, name)
    removed = len((REPO / "train_distributed.py").read_text().splitlines())
    removed -= len(copy.read_text().splitlines())
    assert removed > 3
    train(copy, "--batch-size=8")


def test_the_patches_are_small_and_the_guide_names_each():
    guide = (REPO / "docs/MAKE_IT_YOURS.md").read_text()
    for path in PATCHES.glob("*.patch"):
        changed = re.findall(r"(?m)^[+-](?![+-]{2})", path.read_text())
        assert path.name.startswith("drop_") or len(changed) < 60
        assert path.name in guide
