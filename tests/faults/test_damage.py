"""Whatever happens to a checkpoint's files: noticed, named, and the newest good one serves."""

import random
import shutil

import pytest
import torch
from harness import LONG, train

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
    shutil.copy(path.with_name(path.name.replace("_3", "_2")), path)


MUTATIONS = [flip, truncate, zero, delete, append, older]


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny):
    run = train(tmp_path_factory.mktemp("good") / "run", 1, *tiny, "--epochs=3")
    return run.directory


@pytest.mark.parametrize("seed", range(100 if LONG else 30))
def test_each_mutation_is_noticed_and_the_one_before_serves(tmp_path, capsys, good, seed):
    draw = random.Random(seed)
    mutate, suffix = MUTATIONS[seed % len(MUTATIONS)], draw.choice([".pt", ".json"])
    print(f"seed {seed}: {mutate.__name__} {suffix}")
    run = tmp_path / "run"
    shutil.copytree(good, run)
    newest = run / f"checkpoint_epoch_3{suffix}"
    before = newest.read_bytes()
    mutate(newest, draw)
    assert not newest.exists() or newest.read_bytes() != before
    cfg = train_distributed.parse_config([f"--checkpoint-dir={run}"])
    chosen = train_distributed.choose_checkpoint(cfg)
    told = capsys.readouterr().err
    assert told.startswith(f"WARNING: passed over: {run}/checkpoint_epoch_3.pt ")
    assert chosen == str(run / "checkpoint_epoch_2.pt")
    assert torch.load(chosen, weights_only=True)["progress"]["global_step"] == 52


def test_a_checkpoint_of_another_user_is_not_loaded_unless_told(tmp_path, good, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(good, run)
    cfg = train_distributed.parse_config([f"--checkpoint-dir={run}", "--model=simple_convnet"])
    cfg.dataset = "mnist"
    path, world = str(run / "checkpoint_epoch_3.pt"), train_distributed.World()
    monkeypatch.setattr("os.getuid", lambda: 12345)  # to be somebody else takes root
    with pytest.raises(train_distributed.UserError, match="belongs to user .*--trust-checkpoint"):
        train_distributed.load_checkpoint(path, cfg, world)
    cfg.trust_checkpoint = True
    assert train_distributed.load_checkpoint(path, cfg, world)["progress"]["global_step"] == 78
