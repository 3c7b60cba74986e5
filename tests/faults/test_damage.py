"""Random damage of a checkpoint file: damaged weights are never loaded.

../test_checkpoints.py shows what is printed, and that the run ends the same.
"""

import random
import shutil
import zipfile

import pytest
import torch
from harness import LONG, saves_in, train

import train_distributed


def flip(content, draw):
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def truncate(content, draw):
    del content[draw.randrange(len(content)) :]


def zero(content, draw):
    """A page that was not written before a power failure."""
    start = draw.randrange(len(content) // 4096) * 4096
    content[start : start + 4096] = bytes(4096)


def append(content, draw):
    content += draw.randbytes(draw.randrange(1, 100))


DAMAGES = [flip, truncate, zero, append]


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny):
    """A run with two checkpoints, and their weights."""
    options = [*tiny, "--epochs=2", "--batch-size=64"]
    run = train(tmp_path_factory.mktemp("good") / "run", 1, *options)
    return run.directory, *(run.checkpoint(n)["model"] for n in run.saved())


@pytest.mark.parametrize("seed", range(100 if LONG else 12))
def test_a_damaged_file_is_named_and_the_one_before_is_used_or_its_weights_are_intact(
    tmp_path, capfd, good, seed
):
    run, first, second = good
    draw, damage = random.Random(seed), DAMAGES[seed % len(DAMAGES)]
    directory = shutil.copytree(run, tmp_path / "run")
    newest = saves_in(directory)[-1]
    content = bytearray(newest.read_bytes())
    damage(content, draw)
    newest.write_bytes(content)
    cfg = train_distributed.parse_config([f"--checkpoint-dir={directory}"])
    path = train_distributed.find_checkpoint(cfg)
    warning = capfd.readouterr().out
    print(f"seed {seed}, {damage.__name__}: {path.name}, {warning}")
    if path == newest:  # it is not in the weights
        assert damage is not truncate and warning == ""
    else:
        assert path == saves_in(directory)[0] and newest.name in warning
    expected = second if path == newest else first
    for name, weight in train_distributed.load_checkpoint(path)["model"].items():
        assert torch.equal(weight, expected[name]), f"{name} differs"


def test_a_bit_that_flips_outside_the_tensors_is_found_too(tmp_path, good):
    """Else the step or an option would be another one, or its name missing."""
    draw = random.Random(1)
    directory = shutil.copytree(good[0], tmp_path / "run")
    newest = saves_in(directory)[-1]
    intact = newest.read_bytes()
    with zipfile.ZipFile(newest) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        rest = archive.read(name)
    begin = intact.index(rest)
    cfg = train_distributed.parse_config([f"--checkpoint-dir={directory}"])
    for _ in range(1000 if LONG else 100):
        content = bytearray(intact)
        content[begin + draw.randrange(len(rest))] ^= 1 << draw.randrange(8)
        newest.write_bytes(content)
        assert train_distributed.find_checkpoint(cfg) != newest
