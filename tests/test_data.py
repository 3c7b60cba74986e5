"""The data sets: reading, augmentation, and which rank downloads."""

import os
import random
import shutil

import numpy as np
import pytest
import tasks
import torch
from harness import assert_same_state, launch, train

import train_distributed
from train_distributed import InMemoryDataset, Normalized, SeededDataset, UserError


def options(images, *more) -> list[str]:
    small = ["--image-size=32", "--batch-size=4", "--global-batch-size=12", "--epochs=2"]
    return [f"--data-dir={images}", *small, "--log-every-steps=1", *more]


def test_image_files_resume_bitwise_with_other_workers_and_ranks(tmp_path, images):
    """Two epochs of random crops on one rank, read by two workers, are the reference."""
    reproducible = options(images, "--reproducible")
    before = tasks.PHOTOS
    untouched = train(tmp_path / "untouched", 1, *reproducible, "--num-workers=2", before=before)
    for ranks, workers, step in ((3, 0, 5), (2, 1, 7)):
        more = [f"--num-workers={workers}", f"--stop-at-step={step}"]
        run = train(tmp_path / "run", ranks, *reproducible, *more, before=before)
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
        result = launch(run, 1, *words, before=tasks.PHOTOS)
        assert result.codes == [2]
        assert result.err[0].count("\n") == 1
        assert f"error: cannot read {bad} (" in result.err[0]
        assert "truncated" in result.err[0].lower()


def test_folders_without_images_or_of_other_classes_are_named(tmp_path, images):
    empty = tmp_path / "empty"
    for folder in ("train", "val/a"):
        (empty / folder).mkdir(parents=True)
    other = shutil.copytree(images, tmp_path / "other")
    shutil.rmtree(other / "val/a")
    needed = f"--data-dir needs images in {empty}/train/CLASS/ and {empty}/val/CLASS/"
    text = f"these classes of {other} are hidden, or only in train/ or val/: a"
    for data, expected in ((empty, needed), (other, text)):
        result = launch(tmp_path / "run", 2, *options(data), before=tasks.PHOTOS)
        assert result.codes[0] == 2 and result.err[1] == ""
        assert f"error: {expected}" in result.err[0]


class Drawn(torch.utils.data.Dataset):
    """A sample of all generators; the last one is its own."""

    own = None

    def __len__(self):
        return 5

    def seed_sample(self, seed: int, epoch: int):
        self.own = np.random.default_rng(seed)

    def __getitem__(self, index):
        return torch.rand(1).item(), random.random(), np.random.random(), self.own.random()


def test_all_generators_are_seeded_for_each_micro_batch():
    def drawn(key: int, seed: int = 42) -> tuple:
        (sample,) = SeededDataset(Drawn(), seed).__getitems__([key])
        return sample

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = drawn(3)
    others = [drawn(2), drawn(5 + 3), drawn(3, seed=43)]  # sample, epoch, seed
    assert drawn(3) == first
    for other in others:
        assert not set(other) & set(first)


OWN = """if True:
    import multiprocessing, os
    import numpy as np
    import torch
    from train_distributed import Task

    class Rows:
        # Augments with a generator of its own, and opens its file when it reads a sample.
        process = None

        def __init__(self, count):
            self.count = count

        def __len__(self):
            return self.count

        def seed_sample(self, seed, epoch):
            self.generator = np.random.default_rng(seed)

        def __getitem__(self, index):
            self.process = self.process or os.getpid()
            assert self.process == os.getpid(), "the file of another process is read"
            row = torch.rand(4) + float(self.generator.random()) + index
            return row, index % 3

    class Own(Task):
        def data(self, cfg):
            return Rows(50), Rows(20)

        def model(self, cfg):
            return torch.nn.Linear(4, 3)

    task = Own()
"""

DICTIONARIES = """
    class Named(Rows):
        def __getitem__(self, index):
            row, label = super().__getitem__(index)
            return {"row": row, "more": {"label": label, "name": str(index)}}

    class Dictionaries(Own):
        def data(self, cfg):
            return Named(50), Named(20)

        def loss(self, model, batch):
            assert isinstance(batch["more"]["name"][0], str)
            if model.training:  # those of an evaluation have ended
                assert len(multiprocessing.active_children()) == 2
            return super().loss(model, [batch["row"], batch["more"]["label"]])

    task = Dictionaries()
"""

PADDED = """
    class Lines:
        def __len__(self):
            return 50

        def __getitems__(self, indices):  # as of a data base, which is asked once
            return [(torch.rand(1 + index % 4), index % 3) for index in indices]

    def pad(samples):
        rows, labels = zip(*samples)
        rows = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return torch.nn.functional.pad(rows, (0, 4 - rows.shape[1])), torch.tensor(labels)

    class Padded(Own):
        def data(self, cfg):
            return Lines(), Lines()

        def loader_options(self):
            return {"collate_fn": pad}

    task = Padded()
"""


def test_own_data_sets_train_alike_with_and_without_workers(tmp_path):
    options = ["--batch-size=4", "--epochs=2", "--lr=0.01"]
    tuples = train(tmp_path / "tuples", 2, *options, "--num-workers=0", before=OWN)
    more = ["--num-workers=2"]
    named = train(tmp_path / "named", 2, *options, *more, before=OWN + DICTIONARIES)
    ours, theirs = named.newest(), tuples.newest()
    assert_same_state(ours, theirs)


def test_samples_of_several_lengths_are_collated_and_fetched_a_micro_batch_at_a_time(tmp_path):
    options = ["--batch-size=4", "--epochs=1", "--reproducible", "--global-batch-size=8"]
    task = OWN + PADDED
    one = train(tmp_path / "one", 1, *options, "--num-workers=0", before=task)
    two = train(tmp_path / "two", 2, *options, "--num-workers=1", before=task)
    assert_same_state(one.newest(), two.newest())


def test_an_exception_of_the_data_set_keeps_its_traceback(tmp_path):
    broken = OWN + "\n    Rows.__getitem__ = lambda self, index: {}['image']\n"
    result = launch(tmp_path / "run", 1, "--batch-size=4", "--num-workers=1", before=broken)
    assert result.codes == [1]
    assert "KeyError: 'image'" in result.err[0] and "in <lambda>\n" in result.err[0]
    assert "train_distributed.py: error: " not in result.err[0]


class OfData(train_distributed.Task):
    """A task with these data sets."""

    def __init__(self, *data_sets):
        self.data_sets = data_sets

    def data(self, cfg):
        return self.data_sets


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


def refusal_of(train_set, test_set) -> str:
    cfg = train_distributed.parse_config([])
    with pytest.raises(UserError) as refused:
        train_distributed.open_data(OfData(train_set, test_set), cfg)
    return str(refused.value)


def test_a_data_set_without_an_index_or_without_samples_is_refused():
    one, none = InMemoryDataset(torch.zeros(1)), InMemoryDataset(torch.zeros(0))
    refusal = "Stream has no index: use a data set with __getitem__()"
    assert refusal_of(Stream(), one) == refusal
    for sets in ((none, one), (one, none)):
        assert "no samples" in refusal_of(*sets)


def test_floats_and_bytes_are_normalized_alike_and_gray_becomes_color():
    gray = torch.randint(0, 256, (2, 1, 5, 5), dtype=torch.uint8)
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.3, 0.2, 0.1])
    expected = (gray / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    layer = Normalized(torch.nn.Identity(), mean.tolist(), std.tolist())
    for images in (gray, gray / 255):
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


DOWNLOAD = """if True:
    import os, pathlib, time
    import train_distributed as trainer

    class Downloads(trainer.Task):
        def data(self, cfg):
            file = pathlib.Path(cfg.checkpoint_dir) / "downloaded"
            if os.environ["RANK"] == "0":
                assert not file.exists()
                time.sleep(1)
                file.touch()
            assert file.exists()
            return super().data(cfg)

    task = Downloads()
"""


def test_rank_0_downloads_and_the_others_wait(tmp_path, tiny):
    train(tmp_path / "run", 3, *tiny, "--stop-at-step=1", before=DOWNLOAD)
