#!/usr/bin/env python3
"""Predict a training run on another cluster: steps, traffic, memory, checkpoints.

    python scripts/plan.py --config FILE --nodes 64 --gpus-per-node 8
    python scripts/plan.py --dataset imagefolder --samples 1281167 --classes 1000 \\
        --model resnet50 --amp bf16 --epochs 90 --samples-per-second 2700 --nodes 8

Takes the trainer's options and those of the group "plan". It needs no GPU, trains nothing, and
prints its assumptions. Two figures of your machines matter most: the throughput of one GPU (train
for a minute and read samples_per_second in metrics.jsonl) and the links between GPUs. A launch with
TRAIN_SCRIPT=scripts/doctor.py and --json measures the links: pass its output to --links.

Model of an all_reduce of n bytes over p ranks on N nodes, from NCCL's tuner (src/graph/tuning.cc);
a is the latency of a hop, B the smaller of the two bandwidths:
    ring  2 (p - 1) / p  (N a_inter + (p - N) a_intra  +  n / B)
    tree  2 (log2(N) a_inter + (p / N - 1) a_intra  +  n / B)
NCCL uses the faster one. DDP sends gradients in buckets, each as soon as the backward pass has
computed it. docs/SCALING.md compares predictions with measurements.
"""

import argparse
import functools
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import train_distributed as trainer  # noqa: E402

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes, as in DDP; the first one is small, to start early
FORWARD = 1 / 3  # of a step's computation; the backward pass takes twice as long
OVERHEAD = 1.5e9  # bytes of GPU memory used by CUDA, cuDNN and NCCL themselves
JPEGS = 200  # images of ImageNet's size decoded per second and core
START_SECONDS = 60  # of a job: imports, rendezvous, data, the checkpoint, the first steps


class Links(NamedTuple):
    """Latencies of one hop in seconds, bandwidths in bytes per second."""

    intra_latency: float
    intra_bandwidth: float
    inter_latency: float
    inter_bandwidth: float  # out of a node, all its adapters together


def all_reduce_seconds(size: float, nodes: int, per_node: int, links: Links) -> dict[str, float]:
    """Seconds to sum `size` bytes over all ranks: {"ring": ..., "tree": ...}."""
    ranks, between = nodes * per_node, nodes if nodes > 1 else 0
    if ranks == 1:
        return {"ring": 0.0, "tree": 0.0}
    bandwidths = [links.intra_bandwidth] * (per_node > 1) + [links.inter_bandwidth] * (nodes > 1)
    transfer = size / min(bandwidths)
    around = between * links.inter_latency + (ranks - between) * links.intra_latency
    down = math.log2(nodes) * links.inter_latency + (per_node - 1) * links.intra_latency
    return {"ring": 2 * (ranks - 1) / ranks * (around + transfer), "tree": 2 * (down + transfer)}


def step_seconds(compute: float, gradients: float, reduce) -> float:
    """Seconds of a step with communication: DDP sends each bucket once the backward pass fills it.

    compute is in seconds, gradients in bytes; reduce(bytes) returns how long a bucket takes.
    """
    sent, free = 0.0, 0.0  # bytes sent; time when the network is free again
    while sent < gradients:
        bucket = min(BUCKET if sent else FIRST_BUCKET, gradients - sent)
        sent += bucket
        ready = compute * (FORWARD + (1 - FORWARD) * sent / gradients)
        free = max(free, ready) + reduce(bucket)
    return max(compute, free)


def checkpoint_interval(save: float, between_failures: float) -> float:
    """Optimal seconds between checkpoints (Daly, doi 10.1016/j.future.2004.11.016)."""
    if save >= 2 * between_failures:
        return between_failures
    x = save / (2 * between_failures)
    return math.sqrt(2 * save * between_failures) * (1 + math.sqrt(x) / 3 + x / 9) - save


def links_of(args) -> Links:
    """The links measured in the file --links; the options provide the rest."""
    links = Links(args.intra_microseconds / 1e6, args.intra_gbytes * 1e9,
                  args.inter_microseconds / 1e6, args.inter_gbytes * 1e9)  # fmt: skip
    if not args.links:
        return links
    try:
        text = Path(args.links).read_text()
        found = re.search(r"^\[\n.*?^\]$", text, re.DOTALL | re.MULTILINE)  # in a launcher's log
        findings = json.loads(found[0] if found else text)
        measured = next(f["data"] for f in findings if f["check"] == "all_reduce" and f.get("data"))
        seconds, local, ranks = measured["seconds"], measured["local"], measured["ranks"]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise trainer.UserError(
            f"cannot use --links {args.links} ({error!r}): it should hold the output of a launch "
            "of two or more ranks with TRAIN_SCRIPT=scripts/doctor.py and --json"
        ) from None
    for name, p in (("node", local), ("all", ranks)):
        sizes = sorted(int(key.split()[1]) for key in seconds if key.startswith(name))
        if sizes:
            inside = name == "node" or p == local
            shape = (1, p) if inside else (ranks // local, local)
            times = [seconds[f"{name} {size}"] for size in sizes]
            links = fit(links, "intra" if inside else "inter", shape, sizes, times)
    return links


def fit(links: Links, which: str, shape: tuple[int, int], sizes, times) -> Links:
    """Links for which the model gives the measured times of a small and a large all_reduce."""
    p = math.prod(shape)
    bandwidth = 2 * (p - 1) / p * (sizes[1] - sizes[0]) / max(times[1] - times[0], 1e-9)
    low, high = 0.0, times[0]
    for _ in range(60):
        middle = (low + high) / 2
        new = {f"{which}_bandwidth": bandwidth, f"{which}_latency": middle}
        links = links._replace(**new)
        too_fast = min(all_reduce_seconds(sizes[0], *shape, links).values()) < times[0]
        low, high = (middle, high) if too_fast else (low, middle)
    return links


def positive_number(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise ValueError
    return number


def build_parser() -> argparse.ArgumentParser:
    parser = trainer.build_parser()
    parser.prog, parser.description = "plan.py", __doc__
    add, number = parser.add_argument_group("plan").add_argument, positive_number
    add("--samples", type=trainer.positive_int, help="training samples [counted in --data-dir]")
    add("--classes", type=trainer.positive_int, help="classes [counted in --data-dir]")
    add("--samples-per-second", type=number, help="throughput of one GPU [from --tflops]")
    add("--tflops", type=number, default=60, help="10^12 operations per second of a GPU [60]")
    add("--links", metavar="FILE", help="output of doctor.py --json in a launch [the next four]")
    add("--intra-gbytes", type=number, default=300, help="GB/s between the GPUs of a node [300]")
    add("--intra-microseconds", type=number, default=3, help="latency of a hop in a node [3]")
    add("--inter-gbytes", type=number, default=50, help="GB/s out of a node, all adapters [50]")
    add("--inter-microseconds", type=number, default=15, help="latency of a hop between nodes [15]")
    add("--gpu-gbytes", type=number, default=80, help="GB of memory of a GPU [80]")
    add("--disk-gbytes", type=number, default=1, help="GB/s at which one process writes [1]")
    add("--node-failure-hours", type=number, default=6300, help="MTBF of a node [6300]")
    add("--time-limit-hours", type=number, default=24, help="time limit of a job [24]")
    return parser


def describe_data(args) -> trainer.DataSpec:
    """Shape and classes of the training data; sets args.samples."""
    if args.samples is None and args.dataset != "mnist":
        images, _, spec = trainer.get_datasets(args)
        args.samples = len(images)
    else:  # does not need the data on this machine
        args.samples = args.samples or 60_000
        digits = args.dataset.startswith("mnist")
        channels = 1 if digits and args.model == "simple_convnet" else 3
        size = args.image_size or (28 if digits else 224)
        spec = trainer.DataSpec(channels, size, 10 if digits else 1000)
    return spec._replace(classes=args.classes or spec.classes)


def measure_model(args, spec) -> dict[str, float]:
    """Bytes and floating point operations, counted in passes over two small batches.

    "activations" are the bytes per sample that are kept for the backward pass. The inputs are fake
    tensors (shapes and types without data), so only the weights need memory and no kernel runs:
    bf16 kernels would kill the process on a machine that lists AMX but traps it.
    """
    dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage()._cdata) not in weights:
            kept[place] = tensor  # keeps it alive: its address must not be reused
        return tensor

    def forward(samples: int) -> torch.Tensor:
        images = torch.zeros(samples, spec.channels, spec.size, spec.size)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype, enabled=args.amp != "off"):
            return model(images).float().sum()

    model = trainer.build_model(args, spec).train()
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    for stage in model.children() if args.activation_checkpointing else ():
        for block in stage.children():  # as the trainer's Run does
            block.register_forward_pre_hook(lambda _, inputs: [*map(keep, inputs)] and None)
            recompute = functools.partial(trainer.recompute, use_reentrant=False)
            block.forward = functools.partial(recompute, block.forward)
    bytes_kept = []
    with FakeTensorMode(allow_non_fake_inputs=True):  # the weights
        for samples in (2, 4):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                forward(samples)
            bytes_kept.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
        with FlopCounterMode(display=False) as counter:
            forward(samples).backward()
    parameters = sum(p.numel() for p in model.parameters())
    state = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    momenta = (8 if args.optimizer == "adamw" else 4) * parameters
    return {
        "parameters": parameters,
        "gradients": 4 * parameters,
        "optimizer": momenta,
        "checkpoint": state + momenta,
        "activations": max(0, bytes_kept[1] - bytes_kept[0]) / 2,
        "operations": counter.get_total_flops() / samples,
    }


def predict(args) -> SimpleNamespace:
    """All predicted figures: times in seconds, sizes in bytes."""
    p = SimpleNamespace(nodes=args.nodes or 1, each=args.gpus_per_node or 8)
    p.ranks = p.nodes * p.each
    spec = describe_data(args)
    if args.samples < p.ranks:
        raise trainer.UserError(f"{args.samples} samples for {p.ranks} ranks: lower --nodes")
    args.global_batch_size = args.global_batch_size or args.batch_size * p.ranks
    sampler = trainer.MicroBatchSampler(args.samples, args, trainer.World())
    p.micro_batches, p.steps_per_epoch = sampler.per_step, sampler.steps_per_epoch
    if p.micro_batches < p.ranks:
        text = f"{p.micro_batches} micro-batches of {args.batch_size} for {p.ranks} ranks"
        raise trainer.UserError(f"{text}: lower --batch-size or raise --global-batch-size")
    vars(p).update(measure_model(args, spec), links=links_of(args))

    def reduce(size: float) -> float:
        return min(all_reduce_seconds(size, p.nodes, p.each, p.links).values())

    p.per_rank = -(-p.micro_batches // p.ranks)
    p.speed = args.samples_per_second or 1e12 * args.tflops / p.operations
    p.compute = args.batch_size * p.per_rank / p.speed
    last_pass = args.batch_size / p.speed  # gradients are sent during the last backward pass
    p.step = p.compute - last_pass + step_seconds(last_pass, p.gradients, reduce)
    p.rate = args.global_batch_size / p.step
    p.save = p.checkpoint / (1e9 * args.disk_gbytes)
    p.epoch = p.steps_per_epoch * p.step + p.save
    p.whole = args.epochs * p.epoch
    p.failures = 3600 * args.node_failure_hours / p.nodes
    p.interval = checkpoint_interval(p.save, p.failures)
    p.lost = p.save / p.interval + (p.interval / 2 + START_SECONDS) / p.failures
    limit = 3600 * args.time_limit_hours
    usable = limit - START_SECONDS - min(120, limit / 10)  # time reserved for saving
    if usable <= 0:
        raise trainer.UserError("--time-limit-hours leaves no time to train: raise it")
    p.requeues = max(0, math.ceil(p.whole / usable) - 1)
    p.memory = {"weights": p.gradients, "gradients": p.gradients, "optimizer": p.optimizer}
    p.memory |= {"activations": p.activations * args.batch_size, "CUDA": OVERHEAD}
    return p


def describe(args, p: SimpleNamespace) -> list[tuple[str, str]]:
    """The lines to print, as (name, text); the name "" continues the line above."""
    all_at_once = all_reduce_seconds(p.gradients, p.nodes, p.each, p.links)
    often = f"--checkpoint-every-steps {max(1, round(p.interval / p.step))}"
    source = "measured" if args.samples_per_second else f"estimated from --tflops {args.tflops:g}"
    return [
        ("Plan", f"{args.model} on {p.ranks} ranks ({p.nodes} x {p.each})"),
        ("steps", f"Global batch {args.global_batch_size} = {p.micro_batches} micro-batches of "
                  f"{args.batch_size}; {p.steps_per_epoch} steps per epoch"),
        ("", f"{args.epochs * p.steps_per_epoch} steps in all (--epochs {args.epochs}); "
             f"{args.samples / p.ranks:.0f} samples per rank and epoch"),
        ("compute", f"{time_of(p.compute)} per step: {p.speed:.0f} samples/s on each GPU "
                    f"({source}), {p.operations / 1e9:.2f} GFLOP per sample"),
        ("gradients", f"{size_of(p.gradients)} per step from each rank, {p.parameters} parameters"),
        ("links", f"in a node {p.links.intra_bandwidth / 1e9:.3g} GB/s and "
                  f"{1e6 * p.links.intra_latency:.3g} us per hop, between nodes "
                  f"{p.links.inter_bandwidth / 1e9:.3g} GB/s and "
                  f"{1e6 * p.links.inter_latency:.3g} us "
                  f"({f'measured, {args.links}' if args.links else 'options or assumptions'})"),
        ("all_reduce", "of all gradients at once: "
                       + ", ".join(f"{way} {time_of(t)}" for way, t in all_at_once.items())),
        ("step", f"{time_of(p.step)}: {100 * p.rate / p.ranks / p.speed:.1f} % of linear scaling, "
                 f"{p.rate:.0f} samples/s; {time_of(p.whole)} in all"),
        ("data", f"{p.rate / p.nodes:.0f} samples/s for each node to read"),
        ("memory", f"{size_of(sum(p.memory.values()))} of {args.gpu_gbytes:g} GB on each GPU, at "
                   "least: " + ", ".join(f"{name} {size_of(n)}" for name, n in p.memory.items())),
        ("checkpoint", f"{size_of(p.checkpoint)}, {time_of(p.save)} to write at the end of each "
                       f"epoch, {100 * p.save / p.epoch:.2g} % of it"),
        ("", f"failures of nodes: one every {time_of(p.failures)}; checkpoints every "
             f"{time_of(p.interval)} lose the least time, {100 * p.lost:.2g} % "
             f"({'the run is shorter' if p.interval > p.whole else often})"),
        ("requeues", f"{p.requeues} with a time limit of {time_of(3600 * args.time_limit_hours)}"),
    ]  # fmt: skip


def advise(args, p: SimpleNamespace) -> list[str]:
    even, cores = args.batch_size * p.per_rank * p.ranks, p.rate / p.nodes / JPEGS
    advice = {
        "out of memory: lower --batch-size or set --activation-checkpointing":
            sum(p.memory.values()) > 1e9 * args.gpu_gbytes,
        "saving takes more than 5 % of an epoch: see docs/recipes/async_checkpoint.patch":
            p.save > p.epoch / 20,
        f"{p.micro_batches} micro-batches on {p.ranks} ranks: some ranks wait for others; "
        f"--global-batch-size {even} keeps all busy":
            p.micro_batches % p.ranks,
        f"decoding JPEG files takes {cores:.0f} cores of each node, at an assumed {JPEGS} files "
        "per second and core (benchmarks/loader.py measures it)":
            args.dataset == "imagefolder",
        "the links limit the throughput: with a larger --global-batch-size the ranks communicate "
        "less often":
            p.compute / p.step < 0.9,
        "without --samples-per-second, times are rough estimates; small networks are slower":
            not args.samples_per_second,
        f"only {p.steps_per_epoch} steps per epoch: see docs/SCALING.md on large batches":
            p.steps_per_epoch < 50,
    }  # fmt: skip
    return [text for text, applies in advice.items() if applies]


def size_of(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"


def time_of(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= 2 * length or (unit == "s" and seconds >= 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"


def main() -> int:
    try:
        args = trainer.parse_config(sys.argv[1:], build_parser())
        figures = predict(args)
    except trainer.UserError as error:
        print(f"plan.py: error: {error}", file=sys.stderr)
        return 2
    for name, text in [*describe(args, figures), *(("WARN", a) for a in advise(args, figures))]:
        print(f"{name:11} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
