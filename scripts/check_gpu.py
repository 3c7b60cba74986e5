#!/usr/bin/env python3
"""Multiply matrices on one GPU, and print what is compared with the other GPUs of the job.

    python scripts/check_gpu.py [DEVICE] [SIZE]

scripts/guard.py runs it for each rank before the first attempt, in a process of its own, because a
script cannot fork once its process has used a GPU. Rank 0 compares the results with compare().
Prints a line of JSON; nothing if there is no GPU:

    model    only GPUs of the same model are compared
    digest   of the bits of the products; "" if a repeated product had other bits
    seconds  of a product, for each data type: the median, after the clocks have risen

cuBLAS computes the same bits on all GPUs with the same architecture and the same number of
multiprocessors: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
Besides importing PyTorch, it took 8 s on an idle H200, where the results of two runs were equal. No
defective GPU has been tried.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import signal
import time
from collections import Counter
from typing import NamedTuple

SLOWER = 0.15  # a GPU is slow if a product takes this much longer than on the others of its model
WARM_UP_SECONDS = 0.5  # the clocks of an idle GPU rise within some tenths of a second
SAMPLES = 10  # times that are measured, at most
MIN_SAMPLES = 3
SAMPLE_SECONDS = 2  # no further sample after this time
PRODUCTS = 10  # in a sample: the host waits only once for all of them
REMEDY = "leave out that node, and tell the administrators (or set GPU_CHECK=0 to launch anyway)"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal to send when the parent process ends


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, **style)
    parser.add_argument("device", type=int, nargs="?", default=0, help="its number [0]")
    parser.add_argument("size", type=int, nargs="?", default=4096, help="of the matrices [4096]")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic algorithms
    import torch

    accelerator = getattr(torch, "accelerator", torch.cuda)  # PyTorch < 2.6: only CUDA
    if not accelerator.is_available():
        return
    device = torch.device(args.device % accelerator.device_count())  # as in train_distributed.py
    set_device = getattr(accelerator, "set_device_index", torch.cuda.set_device)
    set_device(device)
    torch.use_deterministic_algorithms(True)
    result = measure(device, args.size, accelerator.synchronize)
    print(json.dumps({"model": model_of(device), **result}))


# ------------------------------------------------------------------------------------- on one GPU


def model_of(device) -> str:
    """The name of the GPU, and the number of its multiprocessors, if it is known."""
    import torch

    properties = getattr(torch, device.type).get_device_properties(device)
    units = getattr(properties, "multi_processor_count", 0)
    return f"{properties.name} ({units} multiprocessors)"


def measure(device, size: int, synchronize) -> dict:
    import torch

    digests = []
    seconds = []
    is_stable = True
    left32 = random_matrix(size, 1).to(device)
    right32 = random_matrix(size, 2).to(device)
    for dtype in (torch.float32, torch.float16):
        left = left32.to(dtype)
        right = right32.to(dtype)
        first = left @ right
        digests.append(digest(first))
        warm_up(left, right, synchronize)
        times = []
        end = time.perf_counter() + SAMPLE_SECONDS
        while len(times) < MIN_SAMPLES or (len(times) < SAMPLES and time.perf_counter() < end):
            began = time.perf_counter()
            for _ in range(PRODUCTS):
                product = left @ right
            synchronize()
            times.append((time.perf_counter() - began) / PRODUCTS)
            is_stable = is_stable and torch.equal(product, first)
        seconds.append(sorted(times)[len(times) // 2])
    return {"digest": " ".join(digests) if is_stable else "", "seconds": seconds}


def random_matrix(size: int, seed: int):
    """[size, size]: numbers from -1 to 1, the same bits on every CPU."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-(2**23), 2**23, (size, size), generator=generator)
    return numbers.float() / 2**23  # exact


def warm_up(left, right, synchronize) -> None:
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        _ = left @ right
        synchronize()


def digest(tensor) -> str:
    """A short hash of all bits."""
    on_cpu = tensor.cpu()
    content = (ctypes.c_char * on_cpu.nbytes).from_address(on_cpu.data_ptr())
    return hashlib.sha256(content).hexdigest()[:16]


# ------------------------------------------------------------------------------- on rank 0, of all


class Problem(NamedTuple):
    is_failure: bool  # or a warning
    ranks: list[int]
    text: str


def compare(infos: list[dict]) -> list[Problem]:
    """infos: the rank infos of scripts/guard.py. Those of checked GPUs have gpu_check: what main()
    prints, and the GPU's index on its host; or why it was not checked.
    """
    problems = find_unchecked(infos)
    models: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        model = info.get("gpu_check", {}).get("model")
        if model:
            models.setdefault(model, []).append(rank)
    for ranks in models.values():
        problems += compare_bits(infos, ranks)
        problems += compare_times(infos, ranks)
    return problems


def find_unchecked(infos: list[dict]) -> list[Problem]:
    reasons: dict[str, list[int]] = {}
    for rank, info in enumerate(infos):
        reason = info.get("gpu_check", {}).get("not_checked")
        if reason:
            reasons.setdefault(reason, []).append(rank)
    problems = []
    for reason, ranks in reasons.items():
        text = f"{names(infos, ranks)} could not be checked ({reason}): the training starts anyway"
        problems.append(Problem(False, ranks, text))
    return problems


def compare_bits(infos: list[dict], ranks: list[int]) -> list[Problem]:
    """ranks: those with GPUs of one model."""
    digests = {rank: infos[rank]["gpu_check"]["digest"] for rank in ranks}
    unstable = [rank for rank in ranks if not digests[rank]]
    stable = [rank for rank in ranks if digests[rank]]
    different, unclear = find_different(infos, {rank: digests[rank] for rank in stable})
    problems = []
    if unstable:
        text = f"{names(infos, unstable)} computed other bits each time for the same product"
        problems.append(Problem(True, unstable, f"{text}: {REMEDY}"))
    if different:
        text = f"{names(infos, different)} computed other bits than other GPUs of the same model"
        problems.append(Problem(True, different, f"{text}: {REMEDY}"))
    if unclear:
        text = f"{names(infos, unclear)} computed other bits than other GPUs of the same model: "
        text += (
            "compare the drivers and libraries of the nodes; if they are the same, a GPU has failed"
        )
        problems.append(Problem(False, unclear, text))
    return problems


def find_different(infos: list[dict], digests: dict[int, str]) -> tuple[list[int], list[int]]:
    """(ranks whose GPU has failed, ranks with other bits where that is not certain)

    It is certain if the GPUs of a host differ, or if a single GPU of a host differs from most
    others. All GPUs of a host may differ from the others because its libraries do.
    """
    if not digests:
        return [], []
    usual, count = Counter(digests.values()).most_common(1)[0]
    is_majority = 2 * count > len(digests)
    failed = []
    unclear = []
    for own in by_host(infos, list(digests)).values():
        others = [rank for rank in own if digests[rank] != usual]
        agree = len({digests[rank] for rank in own}) == 1
        if agree and (len(own) > 1 or not is_majority):
            unclear += others
        elif is_majority:
            failed += others
        else:
            failed += own
    return failed, unclear


def compare_times(infos: list[dict], ranks: list[int]) -> list[Problem]:
    """ranks: those with GPUs of one model."""
    slower = {}
    for times in zip(*(infos[rank]["gpu_check"]["seconds"] for rank in ranks)):
        median = sorted(times)[(len(times) - 1) // 2]  # of two, the faster one
        for rank, seconds in zip(ranks, times):
            slower[rank] = max(slower.get(rank, 0), seconds / median - 1)
    problems = []
    for rank in ranks:
        if slower[rank] > SLOWER:
            text = f"{names(infos, [rank])} is {slower[rank]:.0%} slower than other GPUs of the "
            text += "same model: see its clocks, power and temperature (nvidia-smi -q)"
            problems.append(Problem(False, [rank], text))
    return problems


def by_host(infos: list[dict], ranks: list[int]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(infos[rank]["host"], []).append(rank)
    return hosts


def names(infos: list[dict], ranks: list[int]) -> str:
    """Such as "GPU 3 of n07" or "GPUs 0, 1 of n01, GPU 3 of n07"."""
    texts = []
    for host, own in by_host(infos, ranks).items():
        indices = sorted(infos[rank]["gpu_check"]["index"] for rank in own)
        noun = "GPU" if len(indices) == 1 else "GPUs"
        texts.append(f"{noun} {', '.join(map(str, indices))} of {host}")
    return ", ".join(texts)


if __name__ == "__main__":
    main()
