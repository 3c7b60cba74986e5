"""Damaged checkpoint files are detected and named, and the previous checkpoint is used."""

import random
import shutil

import pytest
from harness import LONG, assert_same_state, train

import train_distributed


def flip(path, draw):
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(path, draw):
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def zero(path, draw):
    content, length = bytearray(path.read_bytes()), min(4096, path.stat().st_size)
    places = [n for n in range(0, len(content) - length + 1) if any(content[n : n + length])]
    start = draw.choice(places[:: max(1, len(places) // 50)])
    content[start : start + length] = bytes(length)
    path.write_bytes(content)


def delete(path, _draw):
    path.unlink()


def append(path, draw):
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


def older(path, _draw):
    """The file of the checkpoint before it, under this one's name."""
    shutil.copy(path.with_name("checkpoint_epoch_2.pt"), path)


MUTATIONS = [flip, truncate, zero, delete, append, older]


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny):
    """A run with the checkpoints 1, 2 and 3, and the content of the last two."""
    options = [*tiny, "--epochs=3", "--batch-size=64"]
    run = train(tmp_path_factory.mktemp("good") / "run", 1, *options)
    return run, run.checkpoint("checkpoint_epoch_2"), run.checkpoint("checkpoint_epoch_3")


@pytest.mark.parametrize("seed", range(100 if LONG else 8))
def test_a_mutation_is_named_and_the_checkpoint_before_is_used_or_nothing_has_changed(
    tmp_path, capsys, good, seed
):
    run, second, third = good
    draw, mutate = random.Random(seed), MUTATIONS[seed % len(MUTATIONS)]
    directory = shutil.copytree(run.directory, tmp_path / "run")
    newest = directory / "checkpoint_epoch_3.pt"
    mutate(newest, draw)
    path = train_distributed.find_checkpoint(train_distributed.RunDirectory(directory), "auto")
    state = train_distributed.load_checkpoint(path)
    warning = capsys.readouterr().err
    print(f"seed {seed}, {mutate.__name__}: {path.name}, {warning}")
    if path == newest:
        assert mutate in (flip, append) and warning == "" and state["config"] == third["config"]
        assert_same_state(state, third)
    else:
        assert path.name == "checkpoint_epoch_2.pt"
        assert_same_state(state, second)
        named = warning.startswith(f"WARNING: skipped: {newest} on ")
        assert named or mutate in (delete, older)  # older: the two are the same, step 2
