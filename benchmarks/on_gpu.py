#!/usr/bin/env python3
"""Run the benchmarks that need a GPU and write their tables as Markdown: see on_gpu.sh --help."""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ranks import REPO
from speed import cpu_name

GOALS = """Goals for ResNet-50 on an H100: ours at least 0.98 of the limit, idle below 2 %. For
comparison, one A100 trains 2,470 images/s (NVIDIA DeepLearningExamples, AMP) or about 2,600 (timm).
"""
# In a process of its own: this one should not use memory of the GPU.
MACHINE = """import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
name = torch.cuda.get_device_name(0) if gpus else ""
versions = f"PyTorch {torch.__version__}" + f", CUDA {torch.version.cuda}, NCCL {nccl}" * bool(gpus)
print(json.dumps([gpus, name, versions]))"""


class Part(NamedTuple):
    """A row of the report, and the commands that measure it. A name in braces: see sizes()."""

    title: str
    limit: int  # seconds, for all commands together
    commands: list[str]
    shown: str = r"\S"  # pattern of the lines of output that the report shows
    needs: str = "torchvision numpy PIL yaml"  # packages
    accepted: tuple[int, ...] = (0,)  # exit codes


TABLE = r"^\|"
SPEED = "python benchmarks/speed.py {gpu} --ranks 1 --rounds {rounds} --idle --output="
CONVNET = SPEED + " --steps {convnet_steps}"
RESNET = SPEED + " --model {resnet} --size {size} --amp"
SYNTHETIC = RESNET + " --dataset synthetic --batch {batch} --steps {steps} --workers {cores}"
BOTH, PEERS = " --only limit ours", " --only limit ours lightning accelerate"
PARTS = {
    "doctor": Part(
        "The machine",
        60,
        ["python scripts/doctor.py"],
        shown=r"^(OK +GPUs|WARN|FAIL)|: \d",
        needs="",
        accepted=(0, 1),  # 1: a warning
    ),
    "tests": Part(
        "Tests that need a GPU (fp16, bf16, NCCL)",
        200,
        ["python -m pytest -q tests/test_options.py -k test_gpu"],
        shown="passed|failed|skipped|^FAILED",
        needs="torchvision numpy PIL yaml pytest",
    ),
    "distributed": Part(
        "Launch, resume, two ranks",
        150,
        [
            "scripts/test_distributed.sh {ranks}",
            # NCCL refuses two ranks on one GPU. The part `tests` has one rank with DDP over NCCL.
            "python -m torch.distributed.run --standalone --nproc-per-node 2 train_distributed.py"
            " --distributed-backend gloo --stop-at-step 20 --checkpoint-dir {scratch}/two",
        ],
        shown="^(PASS|FAIL|Starting|Master|Stopped)",
    ),
    "resnet50": Part("ResNet-50, bf16, synthetic images", 250, [SYNTHETIC + PEERS], TABLE),
    "convnet": Part("SimpleConvNet on MNIST", 160, [CONVNET + PEERS], TABLE),
    "convnet-compiled": Part(
        "SimpleConvNet, compiled, and with CUDA graphs",
        200,
        [CONVNET + " --compile --recipe cuda_graphs" + BOTH],
        TABLE,
    ),
    "resnet50-compiled": Part(
        "ResNet-50, bf16, compiled", 300, [SYNTHETIC + " --compile" + BOTH], TABLE
    ),
    "checkpoints": Part(
        "Checkpoints, synchronous and asynchronous",
        120,
        ["python benchmarks/checkpoints.py --model {resnet} --saves {saves} --directory {scratch}"],
    ),
    "overhead": Part(
        "Overhead of fault tolerance: SimpleConvNet, ResNet-50",
        160,
        [
            "python benchmarks/overhead.py {gpu} --ranks 1 --turns {turns}",
            "python benchmarks/overhead.py {gpu} --ranks 1 --turns {resnet_turns} -- --amp bf16"
            " --model {resnet} --dataset synthetic --image-size {size} --batch-size {batch}",
        ],
    ),
    "startup": Part(
        "Start-up", 80, ["python benchmarks/startup.py {gpu} --ranks 1 --rounds {rounds}"]
    ),
    "jpeg": Part(
        "ResNet-50, bf16, JPEG files: the loader alone, training",
        240,
        [
            "python benchmarks/loader.py --make {scratch}/jpeg --files {files} --copies {copies}",
            "python benchmarks/loader.py --data-dir {scratch}/jpeg --files {loader_files}"
            " --rounds {rounds} --workers {cores} {cores2}",
            # The warm-up, a tenth of the steps, uses up what the workers have read ahead.
            RESNET + " --dataset imagefolder --data-dir {scratch}/jpeg --workers {cores}"
            " --batch {jpeg_batch} --steps {jpeg_steps}" + BOTH,
        ],
    ),
    "mnist": Part(
        "Time to {accuracy} % on MNIST",
        260,
        ["python benchmarks/accuracy.py {cpu} --data-dir {mnist} --rounds 1 --accuracy {accuracy}"],
    ),
    "resnet50-peers": Part(
        "ResNet-50, compiled, Lightning and Accelerate",
        300,
        [SYNTHETIC.replace("{rounds}", "1") + " --compile" + PEERS],
        TABLE,
    ),
}


def sizes(options, gpus: int, scratch: str) -> dict[str, object]:
    """The values of the names in braces."""
    cores = len(os.sched_getaffinity(0))
    values = {"scratch": scratch, "cores": cores, "cores2": 2 * cores, "mnist": options.data_dir}
    values |= {"accuracy": 99, "ranks": gpus or 2}
    if options.cpu:
        values |= {"resnet": "resnet18", "size": 32, "batch": 4, "steps": 20, "convnet_steps": 20}
        values |= {
            "rounds": 1,
            "saves": 2,
            "turns": 4,
            "resnet_turns": 2,
            "gpu": "",
            "cpu": "--cpu",
        }
        values |= {"files": 64, "copies": 16, "jpeg_batch": 8, "jpeg_steps": 20 * cores}
        values |= {"accuracy": 80, "loader_files": 64}
        return values | ({"mnist": "data/mnist_sample"} if options.data_dir == "data" else {})
    batch, steps, files = 128, 20 * cores, 1024
    values |= {"resnet": "resnet50", "size": 224, "batch": 256, "steps": 60, "convnet_steps": 1000}
    values |= {"rounds": 2, "saves": 12, "turns": 300, "resnet_turns": 6, "gpu": "--gpu", "cpu": ""}
    values |= {"jpeg_batch": batch, "jpeg_steps": steps, "loader_files": 512 * cores}
    return values | {"files": files, "copies": batch * (steps + 1) // files + 1}


def reason_to_skip(name: str, options, values: dict) -> str:
    """What a part needs and this machine lacks, or nothing."""
    needs = PARTS[name].needs.split()
    needs += ["triton"] * (not options.cpu and "--compile" in PARTS[name].commands[0])
    if missing := [package for package in needs if not importlib.util.find_spec(package)]:
        return f"not installed: {', '.join(missing)}"
    raw = Path(values["mnist"], "MNIST/raw/train-images-idx3-ubyte")
    return f"no {raw}: set --data-dir" if name == "mnist" and not raw.exists() else ""


def stop(process: subprocess.Popen) -> None:
    """SIGTERM to the process group of a command; SIGKILL to what is left of it 10 s later."""
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(100):
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(words: list[str], seconds: float, log, cpu: bool) -> tuple[int | None, list[str], str]:
    """(exit code, lines of stdout, last line of stderr). The code is None after a time limit."""
    # This is one machine: what it runs should not start steps of the job that this may be.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    env |= {"PYTHON": sys.executable} | ({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    command = [sys.executable if word == "python" else word for word in words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        options = {"cwd": REPO, "env": env, "stdin": subprocess.DEVNULL, "stdout": out}
        process = subprocess.Popen(command, stderr=err, start_new_session=True, **options)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process)
        out.seek(0), err.seek(0)
        lines, errors = out.read().splitlines(), err.read()
    print(
        f"$ {shlex.join(words)}",
        *lines,
        errors,
        f"exit code {code}\n",
        sep="\n",
        file=log,
        flush=True,
    )
    return code, lines, errors.strip().split("\n")[-1].strip()


def measure(part: Part, values: dict, seconds: float, log, cpu: bool) -> tuple[str, str]:
    """Run the commands of a part. Returns its result in words, and its section of the report."""
    began, section = time.monotonic(), f"\n### {part.title.format(**values)}\n"
    for command in part.commands:
        words = [word.format(**values) for word in command.split()]
        words = [word for word in words if word]
        left = began + seconds - time.monotonic()
        code, lines, error = run(words, left, log, cpu)
        section += f"\n    {shlex.join(words)}\n"
        is_table = None
        for line in filter(re.compile(part.shown).search, lines):
            section += "\n" * (is_table != line.startswith("|"))
            is_table = line.startswith("|")
            section += line + "\n" if is_table else f"    {line}\n"
        if code is None:
            return f"failed (stopped after {seconds:.0f} s)", section
        if code not in part.accepted:
            text = f"failed (exit code {code}) {error[:150].replace('|', '/')}"
            return text.strip(), section
        if any(re.match(r"\d+ skipped", line) for line in lines):  # pytest: none has passed
            return "not measured (all tests were skipped)", section
    return f"measured in {time.monotonic() - began:.0f} s", section


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="on_gpu.sh", usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--cpu", action="store_true", help="rehearsal on the CPU, with small sizes")
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="[all]")
    add("--data-dir", default="data", help="directory with MNIST/raw, for mnist [data]")
    add("--output", type=Path, default=REPO / "runs/on_gpu.md", help="[runs/on_gpu.md]")
    add("--minutes", type=float, default=20, help="after this time, the rest is skipped [20]")
    return parser.parse_args()


def fail(text: str) -> None:
    print(f"on_gpu.sh: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def describe_machine(options) -> tuple[int, str]:
    """(number of GPUs, the machine and its versions)."""
    found = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True)
    if found.returncode:
        fail(f"{sys.executable} cannot use PyTorch:\n{found.stderr}")
    gpus, name, versions = json.loads(found.stdout)
    if not gpus and not options.cpu:
        fail("PyTorch finds no GPU here; --cpu is a rehearsal without one")
    cores = f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}"
    return gpus, ", ".join([*[name] * (not options.cpu), cores, versions, time.strftime("%F")])


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops the command that runs
    options = parse_options()
    deadline = time.monotonic() + 60 * options.minutes
    gpus, machine = describe_machine(options)
    heading = "Rehearsal on a CPU: not figures of a GPU" if options.cpu else "On a GPU"
    names, results = list(dict.fromkeys(options.only)), {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, open(f"{options.output}.log", "w") as log:
        values, sections = sizes(options, gpus, scratch), ""

        def report() -> None:
            """Write the report. It is complete up to here if the machine is taken away."""
            rows = [f"| {PARTS[n].title.format(**values)} | {results[n]} |" for n in names]
            table = "\n".join(["| part | result |", "| --- | --- |", *rows])
            temporary = options.output.with_name(f".{options.output.name}.tmp")
            temporary.write_text(f"## {heading}\n\n{machine}\n\n{table}\n\n{GOALS}{sections}")
            temporary.replace(options.output)

        for name in names:
            reason = reason_to_skip(name, options, values)
            results[name] = f"not measured ({reason or 'the script ended before'})"
            if reason:
                print(f"{name}: not measured ({reason})", flush=True)
        report()
        for name in [name for name in names if not reason_to_skip(name, options, values)]:
            seconds = min(PARTS[name].limit, deadline - time.monotonic())
            if seconds <= 0:
                results[name] = f"not measured (the {options.minutes:g} minutes were over)"
            else:
                print(f"{name}: at most {seconds:.0f} s ...", flush=True)
                results[name], section = measure(PARTS[name], values, seconds, log, options.cpu)
                sections += section
                print(f"{section}\n{name}: {results[name]}", flush=True)
            report()
    print(f"Wrote {options.output}; all output: {options.output}.log")
    sys.exit(any(result.startswith("failed") for result in results.values()))


if __name__ == "__main__":
    main()
