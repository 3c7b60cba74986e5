#!/usr/bin/env python3
"""How fast the trainer's loader reads JPEG files, compared with decoding alone on the same cores.

    python benchmarks/loader.py                         # creates its own files; one to five minutes
    python benchmarks/loader.py --data-dir imagenet --files 5000 --workers 8 16 32
    python benchmarks/loader.py --alternatives          # other ways to decode and to store them
    python benchmarks/loader.py --make DIR --copies 8   # only creates files, each under 8 names

Bare decoding is the limit: one process per core opens, decodes, crops, resizes and flips its share
of the files, as `--dataset imagefolder` does, and discards the images. The trainer's loader does
the same in --workers processes and returns batches of 64; nothing is trained. The last row shows
how smaller files raise the limit. All alternate. The output has the median images per second and
the median ratio within a round.

--alternatives adds: decoding with torchvision.io.decode_jpeg instead of PIL; batches of 256, so
that workers send fewer messages; and the same files in one Parquet file (needs the package
datasets), with the number of files that an epoch opens.
"""

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import can lose a KeyboardInterrupt

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_distributed as trainer  # noqa: E402

CORES = len(os.sched_getaffinity(0))
FORK = multiprocessing.get_context("fork")
WORK_DIRECTORY = "LOADER_BENCHMARK_DIRECTORY"  # set in the process that measures


def make_file(root: Path, copies: int, index: int) -> None:
    """A JPEG file of ImageNet's mean size, 500 x 375 pixels and 110 kB: multi-scale noise."""
    generator, pixels = np.random.default_rng(index), np.zeros((375, 500, 3), np.float32)
    for octave in range(1, 9):
        small = generator.normal(0, 24, (2**octave, 2**octave, 3)).astype(np.float32)
        layers = [Image.fromarray(small[..., c]).resize((500, 375)) for c in range(3)]
        pixels += np.stack(layers, -1)
    first = root / "val" / f"class_{index % 2}" / f"{index}.jpg"
    others = [root / "train" / first.parent.name / f"{index}_{n}.jpg" for n in range(copies)]
    for path in (first, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(pixels + 128, 0, 255).astype(np.uint8)).save(first, quality=92)
    for path in others:
        os.link(first, path)
    if index >= 2:  # an epoch evaluates the files in val
        first.unlink()


def make_files(root: Path, number: int, copies: int = 1) -> None:
    """Make that many files on all cores, each under `copies` names (hard links)."""
    with FORK.Pool(CORES) as pool:
        pool.map(functools.partial(make_file, root, copies), range(number))


def shrink(path: str, target: Path) -> None:
    try:
        image = Image.open(path).convert("RGB")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error}") from error
    scale = 256 / min(image.size)
    image = image.resize([round(scale * side) for side in image.size], Image.BICUBIC)
    image.save(target, quality=92)


def make_smaller(target: Path, paths: list[str]) -> list[str]:
    """Copies of the files, resized so that the short side has 256 pixels."""
    target.mkdir()
    smaller = [target / f"{number}.jpg" for number in range(len(paths))]
    with FORK.Pool(CORES) as pool:
        pool.starmap(shrink, zip(paths, smaller))
    return list(map(str, smaller))


def decode_all(function, paths: list[str], ready, go) -> None:
    torch.set_num_threads(1)
    ready.release()
    go.wait()
    for path in paths:
        function(path)


def alone(function, paths: list[str]) -> float:
    """Images per second of CORES processes that only decode."""
    ready = FORK.Semaphore(0)
    go = FORK.Event()
    shares = [paths[i::CORES] for i in range(CORES)]
    processes = [FORK.Process(target=decode_all, args=(function, s, ready, go)) for s in shares]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    began = time.perf_counter()
    go.set()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("loader.py: error: a file could not be decoded, see above")
    return len(paths) / (time.perf_counter() - began)


class ParquetImages(torch.utils.data.Dataset):
    """The same files and labels in one Parquet file, which Hugging Face's datasets reads."""

    def __init__(self, samples: list[tuple[str, int]], transform, directory: Path):
        import datasets

        datasets.disable_progress_bars()
        rows = {
            "image": [Path(path).read_bytes() for path, _ in samples],
            "label": [label for _, label in samples],
        }
        file = str(directory / "images.parquet")
        datasets.Dataset.from_dict(rows).to_parquet(file)
        self.rows = datasets.Dataset.from_parquet(file, cache_dir=str(directory / "cache"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        row = self.rows[index]
        image = Image.open(io.BytesIO(row["image"])).convert("RGB")
        return self.transform(image), row["label"]


class Opens:
    """Counts the files that Python code opens in this process."""

    def __init__(self):
        self.count = 0
        sys.addaudithook(self.hook)

    def hook(self, event: str, _arguments) -> None:
        self.count += event == "open"


class Loader:
    """The trainer's loader. Calling it reads one epoch and returns the images per second.

    The constructor starts the workers and reads the first epoch.
    """

    def __init__(self, cfg, dataset, files: int, workers: int):
        self.files = files
        cfg.num_workers = workers
        cfg.global_batch_size = cfg.batch_size
        self.epoch = 0
        self.sampler = trainer.MicroBatchSampler(files, cfg, trainer.World())
        dataset = torch.utils.data.Subset(dataset, range(files))
        self.loader = trainer.get_dataloader(cfg, trainer.World(), dataset, self.sampler)
        self()

    def __call__(self) -> float:
        self.sampler.seek(self.epoch * self.sampler.steps_per_epoch)
        self.epoch += 1
        began = time.perf_counter()
        images = sum(len(labels) for _, labels in self.loader)
        assert images == self.files
        return images / (time.perf_counter() - began)


def compare(options, directory: Path) -> None:
    cfg = trainer.parse_config(["--dataset=imagefolder", f"--data-dir={options.data_dir}"])
    dataset, _ = trainer.Task().data(cfg)
    torch.set_num_threads(1)
    paths = [path for path, _ in dataset.samples[: options.files]]
    smaller = make_smaller(directory / "smaller", paths)

    def decode(path: str) -> torch.Tensor:
        return dataset.transform(dataset.loader(path))

    ways = {"decoding alone, the limit": lambda: alone(decode, paths)}
    for workers in options.workers:
        ways[f"ours, {workers} workers"] = Loader(cfg, dataset, len(paths), workers)
    ways["alone, files of 256 pixels"] = lambda: alone(decode, smaller)
    if options.alternatives:
        ways |= alternatives(cfg, dataset, paths, directory)
    kilobytes = statistics.mean(os.path.getsize(path) for path in paths) / 1e3
    print(f"{CORES} cores, {len(paths)} files of {kilobytes:.0f} kB")
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, speed in ways.items():
            speeds[name].append(speed())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("| | images/s | share of the limit |")
    print("| --- | --- | --- |")
    for name, of_rounds in speeds.items():
        shares = sorted(a / b for a, b in zip(of_rounds, next(iter(speeds.values()))))
        share = f"{statistics.median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f})"
        print(f"| {name} | {statistics.median(of_rounds):.0f} | {share} |")


def alternatives(cfg, dataset, paths: list[str], directory: Path) -> dict:
    """Other ways to decode and to store the files: {name: a function that returns images/s}."""
    import torchvision

    *crop_and_flip, _to_tensor = dataset.transform.transforms
    transform = torchvision.transforms.Compose(crop_and_flip)
    rgb = torchvision.io.ImageReadMode.RGB

    def decode_jpeg(path: str) -> torch.Tensor:
        return transform(torchvision.io.decode_jpeg(torchvision.io.read_file(path), mode=rgb))

    def loader(data_set, workers: int = CORES, batch_size: int = cfg.batch_size) -> Loader:
        its_cfg = argparse.Namespace(**{**vars(cfg), "batch_size": batch_size})
        return Loader(its_cfg, data_set, len(paths), workers)

    stored = ParquetImages(dataset.samples[: len(paths)], dataset.transform, directory)
    opens = Opens()
    for name, data_set in (("imagefolder", dataset), ("Parquet", stored)):
        read_epoch = loader(data_set, workers=0)
        opens.count = 0
        read_epoch()
        print(f"{name}: an epoch opens {opens.count} files")
    return {
        "alone, torchvision.io.decode_jpeg": lambda: alone(decode_jpeg, paths),
        f"ours, {CORES} workers, batches of 256": loader(dataset, batch_size=256),
        f"ours, {CORES} workers, Parquet": loader(stored),
    }


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--data-dir", type=Path, help="with train/CLASS/*.jpg and val/CLASS/*.jpg [created]")
    add("--files", type=int, default=1280, help="files per epoch [1280]")
    workers = sorted({0, 1, 2, CORES, 2 * CORES})
    add("--workers", type=int, nargs="+", default=workers, help="[0 1 2, cores, twice the cores]")
    add("--rounds", type=int, default=5, help="[5]")
    add("--alternatives", action="store_true", help="other ways to decode and to store, too")
    add("--make", type=Path, metavar="DIR", help="only create the files, in this directory")
    add("--copies", type=int, default=1, help="with --make: names of each file [1]")
    options = parser.parse_args()
    if options.files < CORES:
        parser.error(f"--files should be at least {CORES}, one for each core")
    if WORK_DIRECTORY not in os.environ:
        sys.exit(run_in_own_session())
    directory = Path(os.environ[WORK_DIRECTORY])
    try:
        if options.make:
            make_files(options.make, options.files, options.copies)
            return
        if not options.data_dir:
            options.data_dir = directory / "made"
            make_files(options.data_dir, options.files)
        compare(options, directory)
    except (OSError, trainer.UserError) as error:
        parser.exit(2, f"loader.py: error: {error}\n")


def run_in_own_session() -> int:
    """Run this command again, in a session of its own, so that Ctrl-C only reaches this process,
    which then kills the whole session. In a process that forks, Python can lose a Ctrl-C.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, WORK_DIRECTORY: directory}
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        process = subprocess.Popen(
            [sys.executable, *sys.argv], env=environment, start_new_session=True
        )
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            return process.wait()
        except KeyboardInterrupt:
            return 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    main()
