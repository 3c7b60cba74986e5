"""The data sets: reading, augmentation, and which rank downloads."""

import gzip
import hashlib
import http.server
import os
import random
import shutil
import threading

import numpy as np
import pytest
import torch
from harness import REPO, SHARED_MNIST, assert_same_state, launch, train, write_mnist

import train_distributed
from train_distributed import InMemoryDataset, SeededDataset, UserError, World


def options(images, *more) -> list[str]:
    small = ["--image-size=32", "--batch-size=4", "--global-batch-size=12", "--epochs=2"]
    return ["--dataset=imagefolder", f"--data-dir={images}", *small, "--log-every-steps=1", *more]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, images):
    """Two epochs of random crops on one rank, read by two workers."""
    directory = tmp_path_factory.mktemp("untouched") / "run"
    return train(directory, 1, *options(images, "--reproducible", "--num-workers=2"))


def test_image_files_resume_bitwise_with_other_workers_and_ranks(tmp_path, images, untouched):
    for ranks, workers, step in ((3, 0, 5), (2, 1, 8)):
        more = ["--reproducible", f"--num-workers={workers}", f"--stop-at-step={step}"]
        run = train(tmp_path / "run", ranks, *options(images, *more))
    end = "checkpoint_epoch_2"
    assert_same_state(run.checkpoint(end), untouched.checkpoint(end))
    ours, theirs = ([r["test_loss"] for r in x.records("epoch")] for x in (run, untouched))
    assert ours == theirs and len(ours) == 2


def test_augmentation_depends_on_epoch_and_sample_not_on_the_worker(images):
    cfg = train_distributed.parse_config(options(images))
    folders = train_distributed.Task().data(cfg)
    data, plain = (SeededDataset(folder, cfg.seed) for folder in folders)
    n = len(folders[0])
    torch.manual_seed(1)
    first = data[5][0]
    torch.manual_seed(2)
    assert torch.equal(first, data[5][0])
    assert not torch.equal(first, data[n + 5][0]), "another epoch should have another crop"
    assert data[n + 5][1] == folders[0].samples[5][1]
    assert torch.equal(plain[5][0], plain[len(folders[1]) + 5][0])


def test_an_image_that_does_not_decode_is_named(tmp_path, images):
    broken = shutil.copytree(images, tmp_path / "data")
    bad = broken / "train/a/0.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    for workers in (0, 1):
        run = tmp_path / f"run{workers}"
        result = launch(run, 1, *options(broken, f"--num-workers={workers}"))
        assert result.codes == [2]
        assert result.err[0].count("\n") == 1
        assert "error: cannot read sample " in result.err[0] and str(bad) in result.err[0]
        assert "replace or remove it" in result.err[0]


def test_an_empty_folder_of_images_is_named(tmp_path):
    for folder in ("train", "val/a"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    result = launch(tmp_path / "run", 2, *options(tmp_path / "data"))
    assert result.codes[0] == 2 and result.err[1] == ""
    expected = f"cannot read --dataset imagefolder: it needs {tmp_path}/data/train/CLASS/ and val/"
    assert f"error: {expected}" in result.err[0]
    assert "find any class folder" in result.err[0]


def test_classes_that_differ_between_train_and_val_are_named(tmp_path, images):
    data = shutil.copytree(images, tmp_path / "data")
    shutil.rmtree(data / "val/a")
    result = launch(tmp_path / "run", 1, *options(data))
    assert result.codes == [2] and result.err[0].count("\n") == 1
    assert f"error: {data}/train and {data}/val have different classes\n" in result.err[0]


class Drawn(torch.utils.data.Dataset):
    """A sample of all three generators."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.rand(3), random.random(), np.random.random()


def test_torch_random_and_numpy_are_seeded_for_each_sample():
    data = SeededDataset(Drawn(), 42)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = data[3]
    again = data[3]
    others = [data[2], data[5 + 3], SeededDataset(Drawn(), 43)[3]]  # sample, epoch, seed
    for i in range(3):
        assert torch.equal(torch.as_tensor(first[i]), torch.as_tensor(again[i]))
        for other in others:
            assert not torch.equal(torch.as_tensor(first[i]), torch.as_tensor(other[i]))


OWN = """if True:
    import random, torch
    from PIL import Image
    from torchvision import transforms
    from train_distributed import Task, UserError

    class Digits:  # a typical data set: (image, label), random augmentation, floats
        def __init__(self, count):
            self.count = count
        def __len__(self):
            return self.count
        def __getitem__(self, index):
            if index >= self.count:
                raise IndexError
            image = Image.new("RGB", (20, 20), (index, 90, 10))
            return transforms.ToTensor()(transforms.RandomAffine(90)(image)), index % 3

    class Own(Task):
        def data(self, cfg):
            return Digits(50), Digits(20)
        def model(self, cfg):
            return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1200, 3))

    task = Own()
"""


DICTIONARIES = (
    OWN
    + """
    class Named(Digits):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return {"image": image, "more": {"label": label, "name": str(index)}}

    class Dictionaries(Own):
        def data(self, cfg):
            return Named(50), Named(20)
        def losses(self, model, batch):
            assert isinstance(batch["more"]["name"][0], str)
            return super().losses(model, [batch["image"], batch["more"]["label"]])

    task = Dictionaries()
"""
)


def test_batches_of_dictionaries_train_like_tuples(tmp_path):
    options = ["--batch-size=4", "--epochs=1", "--lr=0.01", "--num-workers=0"]
    tuples = train(tmp_path / "tuples", 2, *options, before=OWN)
    dictionaries = train(tmp_path / "dictionaries", 2, *options, before=DICTIONARIES)
    end = "checkpoint_epoch_1"
    assert_same_state(tuples.checkpoint(end), dictionaries.checkpoint(end))


BROKEN = (
    OWN
    + """
    class Broken(Digits):
        def __getitem__(self, index):
            return {}["image"]

    class BrokenData(Own):
        def data(self, cfg):
            return Broken(50), Digits(20)

    task = BrokenData()
"""
)


def test_an_exception_of_the_data_set_keeps_its_traceback(tmp_path):
    options = ["--batch-size=4", "--num-workers=1"]
    result = launch(tmp_path / "run", 1, *options, before=BROKEN)
    assert result.codes == [1]
    assert "KeyError: 'image'" in result.err[0] and "in __getitem__\n" in result.err[0]
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
        train_distributed.open_data(OfData(train_set, test_set), cfg, World())
    return str(refused.value)


@pytest.mark.parametrize("stream", [Stream(), (n for n in range(3))])
def test_a_data_set_without_an_index_is_refused_with_the_remedy(stream):
    message = refusal_of(stream, InMemoryDataset(torch.zeros(2)))
    remedy = "return a map-style data set, with __len__() and __getitem__(); "
    assert message.startswith(f"{type(stream).__name__} has no index: {remedy}")


def test_an_empty_data_set_is_refused():
    one, none = InMemoryDataset(torch.zeros(1)), InMemoryDataset(torch.zeros(0))
    for sets in ((none, one), (one, none)):
        assert refusal_of(*sets) == "InMemoryDataset has no samples: is --data-dir right?"


def test_floats_and_bytes_are_normalised_alike():
    images, labels = torch.randint(0, 256, (2, 1, 5, 5), dtype=torch.uint8), torch.tensor([3, 4])
    task = train_distributed.Task()
    task.spec = {"mean": [0.4], "std": [0.3]}
    expected = ((images / 255 - 0.4) / 0.3).flatten(1)
    loss = torch.nn.functional.cross_entropy(expected, labels, reduction="sum")
    for batch in (images, images / 255):
        torch.testing.assert_close(task.predict(torch.nn.Flatten(), batch), expected)
        values = task.losses(torch.nn.Flatten(), [batch, labels])
        torch.testing.assert_close(values["loss"], loss)


def test_synthetic_images_train_a_torchvision_model(tmp_path):
    small = ["--image-size=32", "--batch-size=8", "--stop-at-step=2"]
    run = train(tmp_path / "run", 2, "--dataset=synthetic", "--model=resnet18", *small)
    assert run.status()["global_step"] == 2


def test_a_gathered_batch_equals_its_images_one_by_one():
    images = torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8)
    data = InMemoryDataset(images, torch.arange(9))
    keys = [9 + 4, 9 + 0, 9 + 8]
    gathered, labels = data.__getitems__(keys)
    assert labels.tolist() == [4, 0, 8]
    for key, image in zip(keys, gathered, strict=True):
        assert torch.equal(data.__getitems__([key])[0][0], image)
        assert torch.equal(images[key % 9], image)


class CountingServer(http.server.ThreadingHTTPServer):
    """Serves the four gzipped files of a small MNIST and records the requests."""

    def __init__(self, root):
        self.files = {
            f"/{path.name}.gz": gzip.compress(path.read_bytes(), mtime=0)
            for path in (root / "MNIST/raw").iterdir()
        }
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.files[self.path])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    server = CountingServer(write_mnist(tmp_path / "source", train=203, test=103))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def use(server) -> str:
    """Point torchvision at the test's server, with the MD5 sums of its files."""
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    sums = [(n[1:], hashlib.md5(content).hexdigest()) for n, content in server.files.items()]
    return (
        "from torchvision.datasets import MNIST;"
        f"MNIST.mirrors = [{address!r}]; MNIST.resources = {sums!r}"
    )


def test_one_process_downloads_and_the_others_wait(tmp_path, server):
    options = ["--dataset=mnist", f"--data-dir={tmp_path}/data", "--stop-at-step=1"]
    train(tmp_path / "run", 3, *options, "--batch-size=8", before=use(server))
    # torchvision asks for each file twice: once to follow redirects, once to read it.
    assert sorted(server.asked) == sorted(2 * list(server.files))
    train(tmp_path / "again", 3, *options, "--batch-size=8", before=use(server))
    assert len(server.asked) == 8, "existing files should not be downloaded again"


def test_a_download_with_another_checksum_is_refused(tmp_path, server):
    good = use(server)
    name = next(iter(server.files))
    server.files[name] = server.files[name][:-1] + b"?"
    options = ["--dataset=mnist", f"--data-dir={tmp_path}/data", "--batch-size=8"]
    result = launch(tmp_path / "run", 2, *options, before=good)
    assert result.codes[0] == 2 and result.err[1] == ""
    assert f"error: cannot read --dataset mnist; is it in {tmp_path}/data?" in result.err[0]
    assert "File not found or corrupted" in result.err[0]


def test_the_shipped_sample_is_mnist():
    """Every 10th training and every 5th test digit, as data/README.md says."""
    if not SHARED_MNIST.exists():
        pytest.skip(f"all of MNIST is not at {SHARED_MNIST}")
    for name, every in (("train", 10), ("t10k", 5)):
        for kind, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            file = f"MNIST/raw/{name}-{kind}-ubyte"
            whole = np.fromfile(SHARED_MNIST / file, np.uint8)[header:].reshape(-1, size)
            sample = np.fromfile(REPO / "data/mnist_sample" / file, np.uint8)[header:]
            assert np.array_equal(sample.reshape(-1, size), whole[::every])


OPENS_LATE = """if True:
    import os
    import torch
    import train_distributed as trainer

    class OpensLate(torch.utils.data.Dataset):
        # Opens its file when a sample is first read, as is usual for HDF5.
        process = None

        def __len__(self):
            return 40

        def __getitem__(self, index):
            self.process = self.process or os.getpid()
            if self.process != os.getpid():
                raise RuntimeError("the file of another process is read")
            return torch.rand(1, 28, 28), index % 10

    class Task(trainer.Task):
        def data(self, cfg):
            super().data(cfg)
            return OpensLate(), OpensLate()

    task = Task()
"""


def test_only_loader_workers_read_samples_so_that_they_do_not_share_open_files(tmp_path):
    options = ["--batch-size=4", "--num-workers=2", "--epochs=1"]
    train(tmp_path / "run", 2, *options, before=OPENS_LATE)


def test_data_and_weights_drawn_from_numpy_or_random_are_the_same_on_all_ranks():
    class Drawn(train_distributed.Task):
        def data(self, cfg):
            self.drawn = [np.random.rand(), random.random()]
            return super().data(cfg)

        def model(self, cfg):
            self.weights = [np.random.rand(), random.random()]
            return super().model(cfg)

    drawn = []
    for number in range(2):
        np.random.seed(number)
        random.seed(number)
        task = Drawn()
        cfg = train_distributed.parse_config([])
        train_distributed.open_data(task, cfg, World())
        np.random.seed(number)
        train_distributed.build_learner(task, cfg, World())
        drawn.append([task.drawn, task.weights])
    assert drawn[0] == drawn[1]


def workers_of_a_rank(cores: int, ranks_here: int, bound_to: int, monkeypatch) -> int:
    """How many loader workers a rank starts for files by default."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(bound_to)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    cfg = train_distributed.parse_config([])
    world = World(0, ranks_here, torch.device("cpu"))
    files = torch.utils.data.TensorDataset(torch.zeros(4))
    return train_distributed.get_dataloader(cfg, world, files, [[0, 1]]).num_workers


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
    assert workers_of_a_rank(cores, ranks_here, bound_to, monkeypatch) == workers
