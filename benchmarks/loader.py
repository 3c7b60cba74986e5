#!/usr/bin/env python3
"""How fast the trainer's loader reads JPEG files, compared with decoding alone on the same cores.

    python benchmarks/loader.py                         # creates its own files; one to five minutes
    python benchmarks/loader.py --data-dir imagenet --files 5000 --workers 8 16 32
    python benchmarks/loader.py --make DIR --copies 8   # only creates files, each under 8 names

Bare decoding is the limit: one process per core opens, decodes, crops, resizes and flips its share
of the files, as `examples/imagenet.py` does, and discards the images. The trainer's loader does
the same in --workers processes and returns batches of 64; nothing is trained. The last row shows
how smaller files raise the limit. All alternate. The output has the median images per second and
the median ratio within a round.

"""

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_distributed as trainer  # noqa: E402
from examples.imagenet import Images  # noqa: E402

CORES = len(os.sched_getaffinity(0))
FORK = multiprocessing.get_context("fork")


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


class Loader:
    """The trainer's loader. Calling it reads all files once and returns the images per second.

    The constructor starts the workers and reads the files a first time.
    """

    def __init__(self, cfg, dataset, files: int, workers: int):
        self.files = files
        cfg.num_workers = workers
        task = trainer.Task()
        task.loader_options = lambda: {"persistent_workers": workers > 0}
        parts = torch.randperm(files).split(cfg.batch_size)
        micro_batches = [trainer.MicroBatch(0, 0, part.tolist()) for part in parts]
        self.loader = trainer.get_dataloader(task, cfg, trainer.World(), dataset, micro_batches)
        self()

    def __call__(self) -> float:
        began = time.perf_counter()
        images = sum(len(labels) for _, labels in self.loader)
        assert images == self.files
        return images / (time.perf_counter() - began)


def compare(options, directory: Path) -> None:
    task = Images()
    cfg = trainer.parse_config([f"--data-dir={options.data_dir}"], task)
    dataset, _ = task.data(cfg)
    torch.set_num_threads(1)
    paths = [path for path, _ in dataset.samples[: options.files]]
    smaller = make_smaller(directory / "smaller", paths)

    def decode(path: str) -> torch.Tensor:
        return dataset.transform(dataset.loader(path))

    ways = {"decoding alone, the limit": lambda: alone(decode, paths)}
    for workers in options.workers:
        ways[f"ours, {workers} workers"] = Loader(cfg, dataset, len(paths), workers)
    ways["alone, files of 256 pixels"] = lambda: alone(decode, smaller)
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


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--data-dir", type=Path, help="with train/CLASS/*.jpg and val/CLASS/*.jpg [created]")
    add("--files", type=int, default=1280, help="files per epoch [1280]")
    workers = sorted({0, 1, 2, CORES, 2 * CORES})
    add("--workers", type=int, nargs="+", default=workers, help="[0 1 2, cores, twice the cores]")
    add("--rounds", type=int, default=5, help="[5]")
    add("--make", type=Path, metavar="DIR", help="only create the files, in this directory")
    add("--copies", type=int, default=1, help="with --make: names of each file [1]")
    options = parser.parse_args()
    if options.files < CORES:
        parser.error(f"--files should be at least {CORES}, one for each core")
    try:
        if options.make:
            make_files(options.make, options.files, options.copies)
            return
        with tempfile.TemporaryDirectory() as directory:
            if not options.data_dir:
                options.data_dir = Path(directory, "made")
                make_files(options.data_dir, options.files)
            compare(options, Path(directory))
    except (OSError, trainer.UserError) as error:
        parser.exit(2, f"loader.py: error: {error}\n")


if __name__ == "__main__":
    main()
