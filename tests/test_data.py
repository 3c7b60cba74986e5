"""The data sets: reading, augmentation, and which rank downloads."""

import io
import multiprocessing
import os
import random
import re
import shutil
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import tasks
import torch
from harness import assert_same_state, launch, train
from PIL import Image
from test_bad_input import only_error

import train_distributed
from examples.imagenet import image_folders, read_image
from examples.tar_shards import TarShards
from train_distributed import MicroBatch, Normalized, SeededDataset, UserError


def options(images, *more) -> list[str]:
    small = ["--image-size=32", "--batch-size=4", "--global-batch-size=12", "--epochs=2"]
    return [f"--data-dir={images}", *small, "--log-every-steps=1", *more]


def test_image_files_resume_bitwise_with_other_workers_and_ranks(tmp_path, images):
    """Two epochs of random crops on one rank, read by two workers, are the reference."""
    reproducible = options(images, "--reproducible")
    photos = {"task": tasks.Photos}
    untouched = train(tmp_path / "untouched", 1, *reproducible, "--num-workers=2", **photos)
    for ranks, workers, step in ((3, 0, 5), (2, 1, 7)):
        more = [f"--num-workers={workers}", f"--stop-at-step={step}"]
        run = train(tmp_path / "run", ranks, *reproducible, *more, **photos)
    assert_same_state(run.newest(), untouched.newest())
    ours, theirs = ([r["test_loss"] for r in x.records("epoch")] for x in (run, untouched))
    assert ours == theirs and len(ours) == 2


def test_an_image_that_does_not_decode_is_named(tmp_path, images):
    broken = shutil.copytree(images, tmp_path / "data")
    bad = broken / "train/a/0.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    for workers in (0, 1):
        run = tmp_path / f"run{workers}"
        words = options(broken, f"--num-workers={workers}")
        result = launch(run, 1, *words, task=tasks.Photos)
        assert result.codes == [2]
        assert only_error(result.err[0]).startswith(f"cannot read {bad} (")
        assert "truncated" in result.err[0].lower()


def image_file(name: str, pixels: np.ndarray, tmp_path: Path, **options) -> Path:
    path = tmp_path / name
    Image.fromarray(pixels).save(path, **options)
    return path


def test_pictures_of_16_bits_are_scaled_and_those_of_32_refused(tmp_path):
    gray = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    expected = np.asarray(read_image(image_file("8.png", (gray * 255).astype(np.uint8), tmp_path)))
    for name in ("16.png", "16.tiff"):
        read = np.asarray(read_image(image_file(name, (gray * 65535).astype(np.uint16), tmp_path)))
        assert read.shape == (8, 8, 3) and np.abs(read.astype(int) - expected).max() <= 1
    for kind in (np.float32, np.int32):
        path = image_file("32.tiff", (gray * 65535).astype(kind), tmp_path)
        with pytest.raises(UserError, match=f"{path} .*convert it to 8 bits"):
            read_image(path)


def shard(path: Path, members: dict[str, bytes], mode="w", kind=tarfile.REGTYPE) -> Path:
    with tarfile.open(path, mode) as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), kind
            file.addfile(member, io.BytesIO(content))
    return path


def test_tar_files_of_others_are_read_or_named(tmp_path):
    png = image_file("1.png", np.full((4, 4), 7, np.uint8), tmp_path).read_bytes()
    jpg = image_file("1.jpg", np.full((4, 4, 3), 7, np.uint8), tmp_path).read_bytes()
    sample = {"d/1.png": png, "d/1.txt": b"3\n"}
    of_macos = {"d/._1.png": b"Mac OS X", "._d": b"", "d/1.JSON": b"{}"}
    for members in (sample, {**of_macos, **sample}, {"1.v2.JPEG": jpg, "1.v2.TXT": b"3"}):
        ((image, label),) = TarShards([shard(tmp_path / "a.tar", members)])
        assert (image == 7).all() and image.shape == (1, 4, 4) and label == 3
    bad = tmp_path / "b.tar"
    two = {**sample, "d/2.png": png, "d/2.txt": b"4"}
    refused = {
        "is it compressed": lambda: shard(bad, sample, "w:gz"),
        "d/1 in .*b.tar has image: it needs": lambda: shard(bad, {"d/1.png": png}),
        "is b'cat', not a number": lambda: shard(bad, {**sample, "d/1.txt": b"cat"}),
        "cannot read d/1 in .*b.tar": lambda: shard(bad, {**sample, "d/1.png": png[:40]}),
        "its end is missing": lambda: bad.write_bytes(shard(bad, two).read_bytes()[:3172]),
    }
    for message, write in refused.items():
        write()
        with pytest.raises(UserError, match=message):
            list(TarShards([bad]))


def test_folders_without_images_or_of_other_classes_are_named(tmp_path, images):
    empty = tmp_path / "empty"
    for folder in ("train", "val/a"):
        (empty / folder).mkdir(parents=True)
    other = shutil.copytree(images, tmp_path / "other")
    shutil.rmtree(other / "val/a")
    needed = f"--data-dir needs images in {empty}/train/CLASS/ and {empty}/val/CLASS/"
    text = f"these classes of {other} are hidden, or only in train/ or val/: a"
    for data, expected in ((empty, needed), (other, text)):
        with pytest.raises(UserError, match=re.escape(expected)):
            image_folders(data, 32)


class Drawn(torch.utils.data.Dataset):
    """A sample of all generators."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.rand(1).item(), random.random(), np.random.random()


def test_all_generators_are_seeded_for_each_micro_batch():
    def drawn(seed: int) -> tuple:
        part = MicroBatch(seed, 0, [3])
        return SeededDataset(Drawn(), range(5)).__getitems__(part)[0]

    first = drawn(42)
    assert not set(drawn(43)) & set(first)
    assert drawn(42) == first


class Rows:
    """Augments with a generator of its own, and opens its file when it reads a sample."""

    process = None

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.process = self.process or os.getpid()
        assert self.process == os.getpid(), "the file of another process is read"
        row = torch.rand(4) + np.random.random() + index
        return row, index % 3


class Own(train_distributed.Task):
    rows = Rows

    def data(self, cfg):
        return self.rows(50), self.rows(20)

    def model(self, cfg):
        return torch.nn.Linear(4, 3)


class NamedRows(Rows):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return {"row": row, "more": {"label": label, "name": str(index)}}


class Dictionaries(Own):
    rows = NamedRows

    def loss(self, model, batch):
        assert isinstance(batch["more"]["name"][0], str)
        if model.training:  # those of an evaluation have ended
            assert len(multiprocessing.active_children()) == 2
        return super().loss(model, [batch["row"], batch["more"]["label"]])


class Lines(Rows):
    def __getitems__(self, indices):  # as of a data base, which is asked once
        return [(torch.rand(1 + index % 4), index % 3) for index in indices]


def pad(samples):
    rows, labels = zip(*samples)
    rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return torch.nn.functional.pad(rows, (0, 4 - rows.shape[1])), torch.tensor(labels)


class Padded(Own):
    rows = Lines

    def loader_options(self):
        return {"collate_fn": pad}


def test_own_data_sets_train_alike_with_and_without_workers(tmp_path):
    options = ["--batch-size=4", "--epochs=2", "--lr=0.01"]
    tuples = train(tmp_path / "tuples", 2, *options, "--num-workers=0", task=Own)
    more = ["--num-workers=2"]
    named = train(tmp_path / "named", 2, *options, *more, task=Dictionaries)
    ours, theirs = named.newest(), tuples.newest()
    assert_same_state(ours, theirs)


def test_samples_of_several_lengths_are_collated_and_fetched_a_micro_batch_at_a_time(tmp_path):
    options = ["--batch-size=4", "--epochs=1", "--reproducible", "--global-batch-size=8"]
    one = train(tmp_path / "one", 1, *options, "--num-workers=0", task=Padded)
    two = train(tmp_path / "two", 2, *options, "--num-workers=1", task=Padded)
    assert_same_state(one.newest(), two.newest())


def test_images_of_any_type_are_normalized_alike_and_gray_becomes_color():
    gray = torch.randint(0, 256, (2, 1, 5, 5), dtype=torch.uint8)
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.3, 0.2, 0.1])
    expected = (gray / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    layer = Normalized(torch.nn.Identity(), mean.tolist(), std.tolist())
    for images in (gray, gray / 255, gray.int(), gray.long()):
        torch.testing.assert_close(layer(images), expected)
    assert layer.state_dict() == {}


def test_data_that_is_divided_at_random_is_the_same_on_all_ranks():
    class Divided(train_distributed.Task):
        def data(self, cfg):
            self.drawn = [np.random.rand(), random.random(), torch.rand(1).item()]
            return super().data(cfg)

    drawn = []
    for number in range(2):
        np.random.seed(number)
        random.seed(number)
        task = Divided()
        train_distributed.open_data(task, train_distributed.parse_config([]))
        drawn.append(task.drawn)
    assert drawn[0] == drawn[1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
@pytest.mark.parametrize(
    ("cores", "ranks_here", "bound_to", "workers"),
    [
        (96, 8, 96, 12),  # torchrun alone binds no rank
        (96, 8, 10, 10),  # Slurm or scripts/guard.py gave it fewer
        (2, 4, 2, 1),
        (128, 1, 128, 16),
    ],
)
def test_a_rank_has_one_loader_worker_per_core(monkeypatch, cores, ranks_here, bound_to, workers):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(bound_to)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    assert train_distributed.cores_of_rank() == workers


class Downloads(train_distributed.Task):
    def data(self, cfg):
        file = Path(cfg.checkpoint_dir) / "downloaded"
        if os.environ["RANK"] == "0":
            assert not file.exists()
            time.sleep(1)
            file.touch()
        assert file.exists()
        return super().data(cfg)


def test_rank_0_downloads_and_the_others_wait(tmp_path, tiny):
    train(tmp_path / "run", 3, *tiny, "--stop-at-step=1", task=Downloads)
