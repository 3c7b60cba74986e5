#!/usr/bin/env python3
"""What a training would take on a cluster that is not here: steps, traffic, memory, checkpoints.

    python train_distributed.py --config FILE --plan --nodes 64 --gpus-per-node 8
    python train_distributed.py --dataset imagefolder --samples 1281167 --classes 1000 \\
        --model resnet50 --amp bf16 --epochs 90 --samples-per-second 2700 --plan --nodes 8

Takes the trainer's options, and those of the group "plan". Needs no GPU, starts no training. What
it does not know it assumes, and says so: give it the figures of your machines. Two matter most: how
fast one GPU is (train on it for a minute: samples_per_second in metrics.jsonl), and the links
(`TRAIN_SCRIPT=scripts/doctor.py LAUNCHER ... --json > links.json` measures them).

How long an all_reduce of n bytes takes, p ranks on N nodes, as NCCL's tuner reckons (its
src/graph/tuning.cc); a is latency, B the slower one of the two bandwidths:
    ring  2 (p - 1) / p  (N a_inter + (p - N) a_intra  +  n / B)
    tree  2 (log2(N) a_inter + (p / N - 1) a_intra  +  n / B)
The faster one counts. Gradients leave in DDP's buckets, each as soon as the backward pass has made
it. docs/SCALING.md sets predictions beside measurements.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import train_distributed as trainer  # noqa: E402

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes, DDP's: the first one is small, to start early
FORWARD = 1 / 3  # of a step's computation; the backward pass takes twice as long
OVERHEAD = 1.5e9  # bytes of GPU memory that CUDA, cuDNN and NCCL take for themselves
JPEGS = 200  # of ImageNet's size, decoded in a second by a core
START_SECONDS = 60  # of a job: imports, rendezvous, data, the checkpoint, the first steps
KNOWN = {"mnist": 60_000, "fashion_mnist": 60_000}  # training samples


@dataclass(frozen=True)
class Links:
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
    bandwidth = min(
        links.intra_bandwidth if per_node > 1 else math.inf,
        links.inter_bandwidth if nodes > 1 else math.inf,
    )
    around = between * links.inter_latency + (ranks - between) * links.intra_latency
    down = math.log2(nodes) * links.inter_latency + (per_node - 1) * links.intra_latency
    return {
        "ring": 2 * (ranks - 1) / ranks * (around + size / bandwidth),
        "tree": 2 * (down + size / bandwidth),
    }


def reduce_seconds(size: float, nodes: int, per_node: int, links: Links) -> float:
    """Of the faster one."""
    return min(all_reduce_seconds(size, nodes, per_node, links).values())


def step_seconds(compute: float, gradients: float, reduce) -> float:
    """A step with its communication: DDP sends a bucket as soon as backward has filled it.

    compute is in seconds, gradients in bytes; reduce(bytes) tells how long a bucket takes.
    """
    sent, free = 0.0, 0.0  # bytes; when the network is free again
    while sent < gradients:
        bucket = min(BUCKET if sent else FIRST_BUCKET, gradients - sent)
        sent += bucket
        made = compute * (FORWARD + (1 - FORWARD) * sent / gradients)
        free = max(free, made) + reduce(bucket)
    return max(compute, free)


def checkpoint_interval(save: float, between_failures: float) -> float:
    """Seconds between checkpoints that lose least (Daly, doi 10.1016/j.future.2004.11.016)."""
    if save >= 2 * between_failures:
        return between_failures
    x = save / (2 * between_failures)
    return math.sqrt(2 * save * between_failures) * (1 + math.sqrt(x) / 3 + x / 9) - save


def read_links(path: str, args) -> Links:
    """From what `doctor.py --json` measured; what it did not, from the options."""
    try:
        findings = json.loads(Path(path).read_text())
        measured = next(f["data"] for f in findings if f["check"] == "all_reduce" and f.get("data"))
        seconds, local, ranks = measured["seconds"], measured["local"], measured["ranks"]
    except OSError as error:
        raise trainer.UserError(f"cannot read --links {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, StopIteration):
        raise trainer.UserError(
            f"--links {path} holds no all_reduce of doctor.py --json: a launch of two or more "
            "ranks with TRAIN_SCRIPT=scripts/doctor.py and --json measures one"
        ) from None
    links = links_of(args)
    for name, p in (("node", local), ("all", ranks)):
        sizes = sorted(int(key.split()[1]) for key in seconds if key.startswith(name))
        if not sizes:
            continue
        short, long = (seconds[f"{name} {size}"] for size in sizes)
        bandwidth = 2 * (p - 1) / p * (sizes[1] - sizes[0]) / max(long - short, 1e-9)
        inside = name == "node" or p == local
        which = "intra" if inside else "inter"
        links = replace(links, **{f"{which}_bandwidth": bandwidth})
        nodes = 1 if inside else ranks // local
        low, high = 0.0, short
        for _ in range(60):  # the latency with which reduce_seconds() gives what was measured
            middle = (low + high) / 2
            links = replace(links, **{f"{which}_latency": middle})
            too_fast = reduce_seconds(sizes[0], nodes, local, links) < short
            low, high = (middle, high) if too_fast else (low, middle)
    return links


def links_of(args) -> Links:
    return Links(
        args.intra_microseconds / 1e6,
        args.intra_gbytes * 1e9,
        args.inter_microseconds / 1e6,
        args.inter_gbytes * 1e9,
    )


def build_parser() -> argparse.ArgumentParser:
    parser = trainer.build_parser()
    parser.description = __doc__
    add = parser.add_argument_group("plan").add_argument
    positive = trainer.checked(float, "number above 0", lambda value: 0 < value < math.inf)
    add("--samples", type=trainer.positive_int, help="of training [counted in --data-dir]")
    add("--classes", type=trainer.positive_int, help="[counted in --data-dir]")
    add("--samples-per-second", type=positive, help="of one GPU alone [from --tflops]")
    add("--tflops", type=positive, default=60, help="a GPU's 10^12 operations per second [60]")
    add("--links", metavar="FILE", help="what doctor.py --json printed in a launch [the next four]")
    add("--intra-gbytes", type=positive, default=300, help="GB/s between GPUs of a node [300]")
    add("--intra-microseconds", type=positive, default=3, help="latency of a hop there [3]")
    add("--inter-gbytes", type=positive, default=50, help="GB/s out of a node, all adapters [50]")
    add("--inter-microseconds", type=positive, default=15, help="latency of a hop there [15]")
    add("--gpu-gbytes", type=positive, default=80, help="memory of a GPU [80]")
    add("--disk-gbytes", type=positive, default=1, help="GB/s that one process writes at [1]")
    add(
        "--node-failure-hours",
        type=positive,
        default=6300,
        help="mean time to one's failure [6300]",
    )
    add("--time-limit-hours", type=positive, default=24, help="of one job [24]")
    return parser


def describe_data(args) -> trainer.DataSpec:
    """Sizes and number of the training data; sets args.samples."""
    if args.samples is None and args.dataset not in KNOWN:
        images, _, spec = trainer.get_datasets(args, trainer.World())
        args.samples = len(images)
    else:
        args.samples = args.samples or KNOWN[args.dataset]
        small = args.dataset not in ("imagefolder", "synthetic")
        size = args.image_size or (28 if small else 224)
        channels = 1 if small and args.model == "simple_convnet" else 3
        spec = trainer.DataSpec(channels, size, 10 if small else 1000, (0.0,), (1.0,))
    return replace(spec, classes=args.classes or spec.classes)


def measure_model(args, spec) -> dict[str, float]:
    """Bytes and floating point operations, from a pass over two small batches on this CPU.

    "activations" are the bytes per sample that are kept for the backward pass.
    """
    model = trainer.build_model(args, spec).train()
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    cpu = torch.device("cpu")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor  # and so alive: no other can take its place
        return tensor

    if args.activation_checkpointing:
        for block in trainer.blocks_of(model):
            block.register_forward_pre_hook(lambda _, inputs: [keep(x) for x in inputs] and None)
            trainer.recompute_in_backward(block)
    bytes_kept = []
    for samples in (2, 4):
        kept.clear()
        images = trainer.blank_images(args, spec, samples, cpu)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with trainer.autocast(args, cpu):
                model(images).float().sum()
        bytes_kept.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    with FlopCounterMode(display=False) as counter, trainer.autocast(args, cpu):
        model(images).float().sum().backward()
    parameters = sum(p.numel() for p in model.parameters())
    state = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    momenta = 8 if args.optimizer == "adamw" else 4 if args.momentum else 0
    return {
        "parameters": parameters,
        "gradients": 4 * parameters,
        "optimizer": momenta * parameters,
        "checkpoint": state + momenta * parameters,
        "activations": max(0, bytes_kept[1] - bytes_kept[0]) / 2,
        "operations": counter.get_total_flops() / samples,
    }


def plan(args) -> list[tuple[str, str]]:
    """What to print, as (name, text); a name "" belongs to the line above, "WARN" is advice."""
    nodes, each = args.nodes or 1, args.gpus_per_node or 8
    ranks = nodes * each
    spec = describe_data(args)
    if args.samples < ranks:
        raise trainer.UserError(f"{args.samples} samples for {ranks} ranks: --nodes is too many")
    sampler = trainer.MicroBatchSampler(args.samples, args, trainer.World(world_size=ranks))
    model = measure_model(args, spec)
    links = read_links(args.links, args) if args.links else links_of(args)

    per_rank = -(-sampler.per_step // ranks)
    speed = args.samples_per_second or 1e12 * args.tflops / model["operations"]
    compute = args.batch_size * per_rank / speed
    last_pass = args.batch_size / speed  # gradients are sent in the last micro-batch's backward
    times = all_reduce_seconds(model["gradients"], nodes, each, links)

    def reduce(size: float) -> float:
        return reduce_seconds(size, nodes, each, links)

    step = compute - last_pass + step_seconds(last_pass, model["gradients"], reduce)
    steps = args.epochs * sampler.steps_per_epoch
    memory = {
        "weights": model["gradients"],
        "gradients": model["gradients"],
        "optimizer": model["optimizer"],
        "activations": model["activations"] * args.batch_size,
        "CUDA": OVERHEAD,
    }
    needed = sum(memory.values())
    save = model["checkpoint"] / (1e9 * args.disk_gbytes)
    failures = 3600 * args.node_failure_hours / nodes
    interval = checkpoint_interval(save, failures)
    epoch = sampler.steps_per_epoch * step + save
    whole = args.epochs * epoch
    usable = 3600 * args.time_limit_hours - START_SECONDS - min(120, 360 * args.time_limit_hours)
    if usable <= 0:
        raise trainer.UserError("--time-limit-hours leaves no time to train in: raise it")
    requeues = max(0, math.ceil(whole / usable) - 1)
    lost = save / interval + (interval / 2 + START_SECONDS) / failures
    often = f"--checkpoint-every-steps {max(1, round(interval / step))}"
    if interval > whole:
        often = "the run is shorter"

    linear = args.global_batch_size / (ranks * speed) / step
    source = "measured" if args.samples_per_second else f"a guess, at {args.tflops:g} TFLOP/s"
    measured = f"measured, {args.links}" if args.links else "assumed, or of your options"
    lines = [
        ("Plan", f"{args.model} on {ranks} ranks: {trainer.count(nodes, 'node')} x {each}"),
        ("steps", trainer.batch_equation(args.batch_size, sampler, ranks)),
        ("", f"{steps} steps in all (--epochs {args.epochs}); "
             f"{args.samples / ranks:.0f} samples per rank and epoch"),
        ("compute", f"{time_of(compute)} a step: {speed:.0f} samples/s on each GPU ({source}), "
                    f"{model['operations'] / 1e9:.2f} GFLOP a sample"),
        ("gradients", f"{size_of(model['gradients'])} a step from each rank, "
                      f"{trainer.count(model['parameters'], 'parameter')}"),
        ("links", f"in a node {links.intra_bandwidth / 1e9:.3g} GB/s and "
                  f"{1e6 * links.intra_latency:.3g} us a hop, between nodes "
                  f"{links.inter_bandwidth / 1e9:.3g} GB/s and {1e6 * links.inter_latency:.3g} us "
                  f"({measured})"),
        ("all_reduce", f"of all gradients at once: ring {time_of(times['ring'])}, "
                       f"tree {time_of(times['tree'])}"),
        ("step", f"{time_of(step)}: {100 * linear:.1f} % of linear scaling, "
                 f"{args.global_batch_size / step:.0f} samples/s; {time_of(whole)} in all"),
        ("data", f"{args.global_batch_size / step / nodes:.0f} samples/s for each node to read"),
        ("memory", f"{size_of(needed)} of {args.gpu_gbytes:g} GB on each GPU, at least: "
                   + ", ".join(f"{name} {size_of(size)}" for name, size in memory.items())),
        ("checkpoint", f"{size_of(model['checkpoint'])}, {time_of(save)} to write at the end of "
                       f"each epoch, {100 * save / epoch:.2g} % of it"),
        ("", f"if one of {trainer.count(nodes, 'node')} fails every {time_of(failures)}, another "
             f"every {time_of(interval)} loses least, {100 * lost:.2g} % of the time ({often})"),
        ("requeues", f"{requeues} with a time limit of {time_of(3600 * args.time_limit_hours)}"),
    ]  # fmt: skip
    if needed > 1e9 * args.gpu_gbytes:
        lines.append(("WARN", "it does not fit: lower --batch-size, or --activation-checkpointing"))
    if save > epoch / 20:
        lines.append(("WARN", "saving takes long for so short an epoch: --async-checkpoint"))
    if sampler.per_step % ranks:
        even = args.batch_size * per_rank * ranks
        lines.append(("WARN", f"{sampler.per_step} micro-batches on {ranks} ranks: some ranks wait "
                              f"for others; --global-batch-size {even} occupies all"))  # fmt: skip
    if args.dataset == "imagefolder":
        cores = args.global_batch_size / step / nodes / JPEGS
        lines.append(("WARN", f"at {JPEGS} JPEG files a second on a core, a guess "
                              "(benchmarks/loader.py measures it), decoding takes "
                              f"{cores:.0f} cores of each node"))  # fmt: skip
    if compute / step < 0.9:
        lines.append(("WARN", "the links hold it up: more micro-batches a step "
                              "(--global-batch-size) make communication rarer"))  # fmt: skip
    if not args.samples_per_second:
        lines.append(("WARN", "--samples-per-second of one GPU is not given: small networks are "
                              "slower than a guess from their arithmetic"))  # fmt: skip
    if sampler.steps_per_epoch < 50:
        lines.append(("WARN", f"{trainer.count(sampler.steps_per_epoch, 'step')} an epoch: few "
                              "updates; see docs/SCALING.md on large batches"))  # fmt: skip
    return lines


def size_of(number: float) -> str:
    unit = next(u for u in ("GB", "MB", "kB") if number >= {"GB": 1e9, "MB": 1e6, "kB": 0}[u])
    return f"{number / {'GB': 1e9, 'MB': 1e6, 'kB': 1e3}[unit]:.3g} {unit}"


def time_of(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= 2 * length or (unit == "s" and seconds >= 1):
            return f"{seconds / length:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"


def main() -> int:
    try:
        args = trainer.parse_config(sys.argv[1:], build_parser())
        for name, text in plan(args):
            print(f"{name:11} {text}")
    except trainer.UserError as error:
        print(f"plan: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
