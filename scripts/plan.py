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

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import train_distributed as trainer  # noqa: E402

FIRST_BUCKET = 2**20  # bytes, as in DDP: small, to start early
BUCKET = 25 * 2**20  # bytes of the following buckets
FORWARD = 1 / 3  # of a step's computation; the backward pass takes twice as long
OVERHEAD = 1.5e9  # bytes of GPU memory used by CUDA, cuDNN and NCCL themselves
JPEGS = 200  # images of ImageNet's size decoded per second and core
START_SECONDS = 60  # of a job: imports, rendezvous, data, the checkpoint, the first steps


# ------------------------------------------------------------------------------------- FORMULAS
class Links(NamedTuple):
    """Latencies of one hop in seconds, bandwidths in bytes per second."""

    intra_latency: float
    intra_bandwidth: float
    inter_latency: float
    inter_bandwidth: float  # out of a node, all its adapters together


def all_reduce_seconds(size: float, nodes: int, per_node: int, links: Links) -> dict[str, float]:
    """Seconds to sum `size` bytes over all ranks: {"ring": ..., "tree": ...}."""
    ranks = nodes * per_node
    if ranks == 1:
        return {"ring": 0.0, "tree": 0.0}
    bandwidths = []
    if per_node > 1:
        bandwidths.append(links.intra_bandwidth)
    if nodes > 1:
        bandwidths.append(links.inter_bandwidth)
    transfer = size / min(bandwidths)
    hops_between_nodes = nodes if nodes > 1 else 0
    hops_in_nodes = ranks - hops_between_nodes
    around = hops_between_nodes * links.inter_latency + hops_in_nodes * links.intra_latency
    ring = 2 * (ranks - 1) / ranks * (around + transfer)
    down = math.log2(nodes) * links.inter_latency + (per_node - 1) * links.intra_latency
    tree = 2 * (down + transfer)
    return {"ring": ring, "tree": tree}


def step_seconds(compute: float, gradients: float, reduce) -> float:
    """Seconds of a step with communication: DDP sends each bucket once the backward pass fills it.

    compute is in seconds, gradients in bytes; reduce(bytes) returns how long a bucket takes.
    """
    sent = 0.0  # bytes
    network_free = 0.0  # time when the network is free again
    while sent < gradients:
        size = BUCKET if sent else FIRST_BUCKET
        size = min(size, gradients - sent)
        sent += size
        backward_share = sent / gradients
        ready = compute * (FORWARD + (1 - FORWARD) * backward_share)
        network_free = max(network_free, ready) + reduce(size)
    return max(compute, network_free)


def checkpoint_interval(save: float, between_failures: float) -> float:
    """Optimal seconds between checkpoints (Daly, doi 10.1016/j.future.2004.11.016)."""
    if save >= 2 * between_failures:
        return between_failures
    x = save / (2 * between_failures)
    young = math.sqrt(2 * save * between_failures)
    return young * (1 + math.sqrt(x) / 3 + x / 9) - save


# ---------------------------------------------------------------------------------------- LINKS
def links_of(args) -> Links:
    """The links measured in the file --links; the options provide the rest."""
    links = Links(
        intra_latency=args.intra_microseconds / 1e6,
        intra_bandwidth=args.intra_gbytes * 1e9,
        inter_latency=args.inter_microseconds / 1e6,
        inter_bandwidth=args.inter_gbytes * 1e9,
    )
    if not args.links:
        return links
    try:
        measured = read_measurement(Path(args.links))
        seconds = measured["seconds"]  # like {"node 8192": 0.001, "all 8192": 0.002, ...}
        per_node = measured["local"]
        ranks = measured["ranks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise trainer.UserError(
            f"cannot use --links {args.links} ({error!r}): it should hold the output of a launch "
            "of two or more ranks with TRAIN_SCRIPT=scripts/doctor.py and --json"
        ) from None
    within_node = times_by_size(seconds, "node")
    over_all = times_by_size(seconds, "all")
    if within_node:
        links = fit(links, "intra", 1, per_node, within_node)
    if over_all and ranks == per_node:
        links = fit(links, "intra", 1, per_node, over_all)
    elif over_all:
        links = fit(links, "inter", ranks // per_node, per_node, over_all)
    return links


def read_measurement(path: Path) -> dict:
    """What the doctor's check "all_reduce" found. The file may be the log of the whole launch."""
    text = path.read_text()
    json_in_log = re.search(r"^\[\n.*?^\]$", text, re.DOTALL | re.MULTILINE)
    if json_in_log:
        text = json_in_log[0]
    for finding in json.loads(text):
        if finding["check"] == "all_reduce" and finding.get("data"):
            return finding["data"]
    raise KeyError("all_reduce")


def times_by_size(seconds: dict[str, float], group: str) -> dict[int, float]:
    """{bytes: seconds}, smallest size first, of the measurements in this group of ranks."""
    times = {}
    for key, value in seconds.items():
        name, size = key.split()
        if name == group:
            times[int(size)] = value
    return dict(sorted(times.items()))


def fit(links: Links, which: str, nodes: int, per_node: int, times: dict[int, float]) -> Links:
    """Links for which the model gives the measured times of a small and a large all_reduce."""
    ranks = nodes * per_node
    (small, small_time), (large, large_time) = list(times.items())[:2]
    slope = max(large_time - small_time, 1e-9) / (large - small)  # seconds per byte
    bandwidth = 2 * (ranks - 1) / ranks / slope
    low = 0.0
    high = small_time
    for _ in range(60):  # bisection
        latency = (low + high) / 2
        links = links._replace(**{f"{which}_bandwidth": bandwidth, f"{which}_latency": latency})
        predicted = min(all_reduce_seconds(small, nodes, per_node, links).values())
        if predicted < small_time:
            low = latency
        else:
            high = latency
    return links


# ------------------------------------------------------------------------------ DATA AND MODEL
def describe_data(task: trainer.Task, args) -> None:
    """Set args.samples and task.spec, which the model needs: those of the data, or the options."""
    if args.samples is None and args.dataset != "mnist":
        train_set, _ = task.data(args)
        args.samples = len(train_set)
        classes = len(task.spec["classes"])
    else:  # does not need the data on this machine
        args.samples = args.samples or 60_000
        classes = 10 if is_digits(args) else 1000
    classes = args.classes or classes
    task.spec = {"classes": [str(number) for number in range(classes)]}


def is_digits(args) -> bool:
    return args.dataset.startswith("mnist")


def measure_model(task: trainer.Task, args) -> dict[str, float]:
    """Bytes and floating point operations, counted in passes over two small batches.

    "activations" are the bytes per sample that are kept for the backward pass. The inputs are fake
    tensors (shapes and types without data), so only the weights need memory and no kernel runs:
    bf16 kernels would kill the process on a machine that lists AMX but traps it.
    """
    try:
        model = task.model(args).train()
    except (MemoryError, RuntimeError) as error:
        raise trainer.UserError(f"cannot build the model here ({error})") from None
    if args.activation_checkpointing:
        for block in task.blocks(model):
            trainer.recompute_activations(block, args.compile)
    few = 2  # samples
    more = 4
    with FakeTensorMode(allow_non_fake_inputs=True):  # the weights
        activations_of_few = bytes_kept(model, fake_images(task, args, few), args.amp)
        activations_of_more = bytes_kept(model, fake_images(task, args, more), args.amp)
        with FlopCounterMode(display=False) as counter:
            forward(model, fake_images(task, args, more), args.amp).backward()
    parameters = sum(p.numel() for p in model.parameters())
    weights = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    moments = 2 if args.optimizer == "adamw" else 1
    optimizer = 4 * moments * parameters
    activations = (activations_of_more - activations_of_few) / (more - few)
    return {
        "parameters": parameters,
        "gradients": 4 * parameters,
        "optimizer": optimizer,
        "checkpoint": weights + optimizer,
        "activations": max(0, activations),
        "operations": counter.get_total_flops() / more,
    }


def fake_images(task: trainer.Task, args, samples: int) -> torch.Tensor:
    channels, size = task.image_shape(args)
    images = torch.zeros(samples, channels, size, size)
    return images.contiguous(memory_format=torch.channels_last)


def forward(model: torch.nn.Module, images: torch.Tensor, amp: str) -> torch.Tensor:
    """The sum of all outputs: what the backward pass begins with."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=amp != "off"):
        return model(images).float().sum()


def bytes_kept(model: torch.nn.Module, images: torch.Tensor, amp: str) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # keeps it alive: its address must not be reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(model, images, amp)
    return sum(storage.nbytes() for storage in kept.values())


# ------------------------------------------------------------------------------------ THE PLAN
@dataclass
class Plan:
    """The predicted figures: times in seconds, sizes in bytes."""

    nodes: int
    per_node: int
    ranks: int
    links: Links
    model: dict[str, float]  # see measure_model()
    micro_batches: int  # in a step
    per_rank: int  # micro-batches of the busiest rank
    steps_per_epoch: int
    speed: float  # samples per second on each GPU, while it computes
    compute: float  # per step
    step: float
    rate: float  # samples per second on all GPUs
    save: float
    epoch: float
    run: float  # all epochs
    between_failures: float
    interval: float  # between checkpoints
    lost: float  # share of the time
    requeues: int
    memory: dict[str, float]  # on each GPU


def predict(args) -> Plan:
    """All predicted figures. UserError if the run is not possible."""
    nodes = args.nodes or 1
    per_node = args.gpus_per_node or 8
    ranks = nodes * per_node
    task = trainer.Task()
    describe_data(task, args)
    if args.samples < ranks:
        raise trainer.UserError(f"{args.samples} samples for {ranks} ranks: lower --nodes")
    args.global_batch_size = args.global_batch_size or args.batch_size * ranks
    sampler = trainer.MicroBatchSampler(args.samples, args, trainer.World())
    if sampler.per_step < ranks:
        text = f"{sampler.per_step} micro-batches of {args.batch_size} for {ranks} ranks"
        raise trainer.UserError(f"{text}: lower --batch-size or raise --global-batch-size")
    model = measure_model(task, args)
    links = links_of(args)

    def reduce(size: float) -> float:
        return min(all_reduce_seconds(size, nodes, per_node, links).values())

    per_rank = math.ceil(sampler.per_step / ranks)
    speed = args.samples_per_second or 1e12 * args.tflops / model["operations"]
    compute = args.batch_size * per_rank / speed
    last_pass = args.batch_size / speed  # gradients are sent during the last backward pass
    step = compute - last_pass + step_seconds(last_pass, model["gradients"], reduce)

    save = model["checkpoint"] / (1e9 * args.disk_gbytes)
    epoch = sampler.steps_per_epoch * step + save
    run = args.epochs * epoch
    between_failures = 3600 * args.node_failure_hours / nodes
    interval = checkpoint_interval(save, between_failures)
    lost_per_failure = interval / 2 + START_SECONDS
    limit = 3600 * args.time_limit_hours
    time_for_saving = min(120, limit / 10)  # as in the trainer
    usable = limit - START_SECONDS - time_for_saving
    if usable <= 0:
        raise trainer.UserError("--time-limit-hours leaves no time to train: raise it")

    memory = {
        "weights": model["gradients"],  # as large as the gradients
        "gradients": model["gradients"],
        "optimizer": model["optimizer"],
        "activations": model["activations"] * args.batch_size,
        "CUDA": OVERHEAD,
    }
    return Plan(
        nodes=nodes,
        per_node=per_node,
        ranks=ranks,
        links=links,
        model=model,
        micro_batches=sampler.per_step,
        per_rank=per_rank,
        steps_per_epoch=sampler.steps_per_epoch,
        speed=speed,
        compute=compute,
        step=step,
        rate=args.global_batch_size / step,
        save=save,
        epoch=epoch,
        run=run,
        between_failures=between_failures,
        interval=interval,
        lost=save / interval + lost_per_failure / between_failures,
        requeues=max(0, math.ceil(run / usable) - 1),
        memory=memory,
    )


def print_plan(args, plan: Plan) -> None:
    print_line("Plan", f"{args.model} on {plan.ranks} ranks ({plan.nodes} x {plan.per_node})")
    print_steps(args, plan)
    print_communication(args, plan)
    efficiency = 100 * plan.rate / plan.ranks / plan.speed
    scaling = f"{efficiency:.1f} % of linear scaling, {plan.rate:.0f} samples/s"
    print_line("step", f"{time_of(plan.step)}: {scaling}; {time_of(plan.run)} for the whole run")
    print_line("data", f"{plan.rate / plan.nodes:.0f} samples/s for each node to read")
    total = size_of(sum(plan.memory.values()))
    parts = ", ".join(f"{name} {size_of(size)}" for name, size in plan.memory.items())
    print_line("memory", f"{total} of {args.gpu_gbytes:g} GB on each GPU, at least: {parts}")
    print_checkpoints(plan)
    time_limit = time_of(3600 * args.time_limit_hours)
    print_line("requeues", f"{plan.requeues} with a time limit of {time_limit}")


def print_steps(args, plan: Plan) -> None:
    batch = f"{args.global_batch_size} = {plan.micro_batches} micro-batches of {args.batch_size}"
    print_line("steps", f"Global batch {batch}; {plan.steps_per_epoch} steps per epoch")
    steps = args.epochs * plan.steps_per_epoch
    each = args.samples / plan.ranks
    text = f"{steps} steps in all (--epochs {args.epochs})"
    print_line("", f"{text}; {each:.0f} samples per rank and epoch")
    source = f"estimated from --tflops {args.tflops:g}"
    if args.samples_per_second:
        source = "measured"
    text = f"{time_of(plan.compute)} per step: {plan.speed:.0f} samples/s on each GPU ({source})"
    print_line("compute", f"{text}, {plan.model['operations'] / 1e9:.2f} GFLOP per sample")


def print_communication(args, plan: Plan) -> None:
    size = plan.model["gradients"]
    parameters = plan.model["parameters"]
    print_line("gradients", f"{size_of(size)} per step from each rank, {parameters} parameters")
    links = plan.links
    intra = f"{links.intra_bandwidth / 1e9:.3g} GB/s and {1e6 * links.intra_latency:.3g} us per hop"
    inter = f"{links.inter_bandwidth / 1e9:.3g} GB/s and {1e6 * links.inter_latency:.3g} us"
    source = f"measured, {args.links}" if args.links else "options or assumptions"
    print_line("links", f"in a node {intra}, between nodes {inter} ({source})")
    ways = all_reduce_seconds(size, plan.nodes, plan.per_node, links)
    times = ", ".join(f"{way} {time_of(seconds)}" for way, seconds in ways.items())
    print_line("all_reduce", f"of all gradients at once: {times}")


def print_checkpoints(plan: Plan) -> None:
    size = size_of(plan.model["checkpoint"])
    share = 100 * plan.save / plan.epoch
    text = f"{size}, {time_of(plan.save)} to write at the end of each epoch"
    print_line("checkpoint", f"{text}, {share:.2g} % of it")
    steps = max(1, round(plan.interval / plan.step))
    option = f"--checkpoint-every-steps {steps}"
    if plan.interval > plan.run:
        option = "the run is shorter"
    failures = f"failures of nodes: one every {time_of(plan.between_failures)}"
    best = f"checkpoints every {time_of(plan.interval)} lose the least time"
    print_line("", f"{failures}; {best}, {100 * plan.lost:.2g} % ({option})")


def print_line(name: str, text: str) -> None:
    """The name "" continues the line above."""
    print(f"{name:11} {text}")


def warnings(args, plan: Plan) -> list[str]:
    advice = []
    if sum(plan.memory.values()) > 1e9 * args.gpu_gbytes:
        advice.append("out of memory: lower --batch-size or set --activation-checkpointing")
    if plan.save > plan.epoch / 20:
        advice.append(
            "saving takes more than 5 % of an epoch: see docs/recipes/async_checkpoint.patch"
        )
    if plan.micro_batches % plan.ranks:
        even = args.batch_size * plan.per_rank * plan.ranks
        idle = f"{plan.micro_batches} micro-batches on {plan.ranks} ranks: some ranks wait for"
        advice.append(f"{idle} others; --global-batch-size {even} keeps all busy")
    if args.dataset == "imagefolder":
        cores = plan.rate / plan.nodes / JPEGS
        advice.append(
            f"decoding JPEG files takes {cores:.0f} cores of each node, at an assumed {JPEGS} "
            "files per second and core (benchmarks/loader.py measures it)"
        )
    if plan.compute / plan.step < 0.9:
        advice.append(
            "the links limit the throughput: with a larger --global-batch-size the ranks "
            "communicate less often"
        )
    if not args.samples_per_second:
        advice.append(
            "without --samples-per-second, times are rough estimates; small networks are slower"
        )
    if plan.steps_per_epoch < 50:
        advice.append(
            f"only {plan.steps_per_epoch} steps per epoch: see docs/SCALING.md on large batches"
        )
    return advice


def size_of(number: float) -> str:
    """For example 46.8 MB."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6}
    for unit, size in units.items():
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"


def time_of(seconds: float) -> str:
    """For example 35 min: in the largest unit of which there are at least two."""
    units = {"days": 86400, "h": 3600, "min": 60, "s": 1, "ms": 1e-3}
    for unit, length in units.items():
        least = 1 if unit == "s" else 2 * length
        if seconds >= least:
            return f"{seconds / length:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"


# ------------------------------------------------------------------------------------- OPTIONS
def positive_number(text: str) -> float:
    return trainer.checked_number(text, float, 1e-6, 1e12)


def class_count(text: str) -> int:
    return trainer.checked_number(text, int, 1, 10**6)


def build_parser() -> trainer.Parser:
    """The trainer's options, and those of the group "plan"."""
    parser = trainer.build_parser()
    parser.prog = "plan.py"
    parser.description = __doc__
    add = parser.add_argument_group("plan").add_argument
    number = positive_number
    add("--samples", type=trainer.positive_int, help="training samples [counted in --data-dir]")
    add("--classes", type=class_count, help="classes [counted in --data-dir]")
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


def main() -> int:
    try:
        args = trainer.parse_config(sys.argv[1:], build_parser())
        plan = predict(args)
    except trainer.UserError as error:
        print(f"plan.py: error: {error}", file=sys.stderr)
        return 2
    print_plan(args, plan)
    for text in warnings(args, plan):
        print_line("WARN", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
