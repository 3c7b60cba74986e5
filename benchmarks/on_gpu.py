#!/usr/bin/env python3
"""Check and measure everything that needs a GPU, without a network; write a report as Markdown.

    python benchmarks/on_gpu.py                            # on all GPUs, about half an hour
    python benchmarks/on_gpu.py --only doctor tests killed resume
    sbatch --gpus=2 --cpus-per-task=32 --wrap ".venv/bin/python benchmarks/on_gpu.py"
    python benchmarks/on_gpu.py --cpu                      # a rehearsal with small sizes

First what is right (hangs, kills, exact resume), then what is fast. The report is written again
after each part, and all output goes to a .log file beside it. A part that fails or exceeds its time
limit does not stop the others. Exit code: 0 no part failed, 1 a part failed, 2 user error.
"""

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
from dataclasses import dataclass
from pathlib import Path

from ranks import REPO
from speed import cpu_name

GOALS = """Goals for ResNet-50 on an H100: ours at least 0.98 of the limit, idle below 2 %. For
comparison, one A100 trains 2,470 images/s (NVIDIA DeepLearningExamples, AMP) or about 2,600 (timm).
"""
# In a process of its own: this one should not use memory of the GPU.
MACHINE = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
name = ""
versions = f"PyTorch {torch.__version__}"
if gpus:
    name = torch.cuda.get_device_name(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions += f", CUDA {torch.version.cuda}, NCCL {nccl}"
print(json.dumps([gpus, name, versions]))
"""


@dataclass(frozen=True)
class Part:
    """A row of the report, and the commands that measure it. A name in braces: see sizes()."""

    title: str
    limit: int  # seconds, for all commands together
    commands: list[str]
    shown: str = r"\S"  # pattern of the lines of output that the report shows
    needs: str = "torchvision numpy PIL yaml"  # packages
    gpus: int = 1  # that it needs; the rehearsal runs as many ranks on the CPU
    accepted: tuple[int, ...] = (0,)  # exit codes


TABLE = r"^\|"
SPEED = "python benchmarks/speed.py {gpu} --rounds {rounds} --idle --output="
CONVNET = SPEED + " --ranks 1 --steps {convnet_steps}"
IMAGES = SPEED + " --model {resnet} --size {size} --workers {cores}"
RESNET = IMAGES + " --dataset synthetic --batch {batch} --steps {steps}"
CORRECTNESS = "python benchmarks/correctness.py {cpu} --ranks {ranks} "
TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node {ranks} "


PARTS = {
    # Is it right?
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
        ["python -m pytest -q tests/test_gpu.py"],
        shown="passed|failed|skipped|^FAILED",
        needs="torchvision numpy PIL yaml pytest",
    ),
    "hang": Part(
        "A hang over NCCL: a sleeping rank, a busy GPU",
        240,
        [CORRECTNESS + "hang-host hang-gpu"],
        TABLE,
        gpus=2,
    ),
    "killed": Part(
        "Recovery from a killed rank",
        240,
        ["python benchmarks/recovery.py --ranks {ranks} --rounds 1"],
    ),
    "resume": Part(
        "Stop and resume, bit for bit (ResNet-50, compiled)", 400, [CORRECTNESS + "resume"], TABLE
    ),
    "reproducible": Part(
        "One rank and several, bit for bit", 240, [CORRECTNESS + "reproducible"], TABLE
    ),
    "distributed": Part(
        "scripts/test_distributed.sh",
        150,
        ["scripts/test_distributed.sh {ranks}"],
        shown="^(PASS|FAIL|Starting|Master|Stopped)",
    ),
    "bandwidth": Part(
        "Bus bandwidth of all_reduce",
        60,
        [TORCHRUN + "scripts/doctor.py"],
        shown=r"\(bus\)",
        gpus=2,
        accepted=(0, 1),
    ),
    # How fast is it?
    "resnet50": Part(
        "ResNet-50, bf16, on all GPUs",
        480,
        [RESNET + " --amp bf16 --ranks {ranks} --only limit sums ours"],
        TABLE,
    ),
    "convnet-compiled": Part(
        "SimpleConvNet, compiled, and with CUDA graphs",
        400,
        [CONVNET + " --compile --recipe cuda_graphs --only limit ours"],
        TABLE,
    ),
    "resnet50-compiled": Part(
        "ResNet-50, bf16, compiled",
        480,
        [RESNET + " --amp bf16 --compile --ranks 1 --only limit ours"],
        TABLE,
    ),
    "peers": Part(
        "ResNet-50, bf16: peers as their documentation has it",
        480,
        [RESNET + " --amp bf16 --ranks 1 --only limit ours lightning accelerate timm"],
        TABLE,
    ),
    "jpeg": Part(
        "JPEG files: ResNet-50, bf16, all ranks",
        400,
        [
            "python benchmarks/loader.py --make {scratch}/jpeg --files {files} --copies {copies}",
            # The warm-up, a tenth of the steps, uses up what the workers have read ahead.
            IMAGES + " --amp bf16 --dataset imagefolder --data-dir {scratch}/jpeg"
            " --batch {jpeg_batch} --steps {jpeg_steps} --ranks {ranks} --only limit ours",
        ],
    ),
    "checkpoints": Part(
        "Checkpoints, synchronous and asynchronous",
        120,
        ["python benchmarks/checkpoints.py --model {resnet} --saves {saves} --directory {scratch}"],
    ),
    "startup": Part(
        "Start-up", 160, ["python benchmarks/startup.py {gpu} --ranks 1 --rounds {rounds}"]
    ),
    "mnist": Part(
        "Time to {accuracy} % on MNIST",
        260,
        ["python benchmarks/accuracy.py {cpu} --data-dir {mnist} --rounds 1 --accuracy {accuracy}"],
    ),
}


def sizes(options, gpus: int, scratch: str) -> dict[str, object]:
    """The values of the names in braces."""
    cores = len(os.sched_getaffinity(0))
    values = {
        "scratch": scratch,
        "cores": cores,
        "mnist": options.data_dir,
    }
    if options.cpu:
        if options.data_dir == "data":
            values["mnist"] = "data/mnist_sample"
        return values | {
            "gpu": "",
            "cpu": "--cpu",
            "ranks": 2,
            "resnet": "resnet18",
            "size": 32,
            "batch": 4,
            "steps": 20,
            "convnet_steps": 20,
            "rounds": options.rounds or 1,
            "saves": 2,
            "files": 64,
            "copies": 16,
            "jpeg_batch": 8,
            "jpeg_steps": 20 * cores,
            "accuracy": 80,
        }
    files = 1024
    jpeg_batch = 128
    jpeg_steps = max(20, 20 * cores // gpus)
    return values | {
        "gpu": "--gpu",
        "cpu": "",
        "ranks": gpus,
        "resnet": "resnet50",
        "size": 224,
        "batch": 256,
        "steps": 60,
        "convnet_steps": 1000,
        "rounds": options.rounds or 5,
        "saves": 12,
        "files": files,
        "copies": jpeg_batch * gpus * (jpeg_steps + 1) // files + 1,
        "jpeg_batch": jpeg_batch,
        "jpeg_steps": jpeg_steps,
        "accuracy": 99,
    }


def reason_to_skip(name: str, options, values: dict) -> str:
    """What a part needs and this machine lacks, or nothing."""
    part = PARTS[name]
    ranks = values["ranks"]
    if part.gpus > ranks:
        return f"needs {part.gpus} GPUs"
    needs = part.needs.split()
    if not options.cpu and "--compile" in part.commands[0]:
        needs.append("triton")
    missing = [package for package in needs if not importlib.util.find_spec(package)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    raw = Path(values["mnist"], "MNIST/raw/train-images-idx3-ubyte")
    if name == "mnist" and not raw.exists():
        return f"no {raw}: set --data-dir"
    return ""


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


def command_environment(cpu: bool) -> dict[str, str]:
    """This is one machine: what it runs should not start steps of the job that this may be."""
    env = {}
    for name, value in os.environ.items():
        if not name.startswith(("SLURM_", "PBS_")):
            env[name] = value
    env["PYTHON"] = sys.executable
    if cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def run(words: list[str], seconds: float, log, cpu: bool) -> tuple[int | None, list[str], str]:
    """(exit code, lines of stdout, last line of stderr). The code is None after a time limit."""
    command = [sys.executable if word == "python" else word for word in words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env=command_environment(cpu),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process)
        out.seek(0)
        err.seek(0)
        lines = out.read().splitlines()
        errors = err.read()
    log.write(f"$ {shlex.join(words)}\n")
    for line in lines:
        log.write(f"{line}\n")
    log.write(f"{errors}\nexit code {code}\n\n")
    log.flush()
    return code, lines, errors.strip().split("\n")[-1].strip()


def shown_lines(part: Part, lines: list[str]) -> str:
    """The lines for the report: tables as they are, everything else as a block of code."""
    text = ""
    is_table = None
    for line in lines:
        if not re.search(part.shown, line):
            continue
        if is_table != line.startswith("|"):
            text += "\n"
            is_table = line.startswith("|")
        text += f"{line}\n" if is_table else f"    {line}\n"
    return text


def measure(part: Part, values: dict, log, cpu: bool) -> dict[str, str]:
    """Run the commands of a part. Returns its result in words, and its section of the report."""
    began = time.monotonic()
    section = f"\n### {part.title.format(**values)}\n"
    result = ""
    for command in part.commands:
        words = [word.format(**values) for word in command.split()]
        words = [word for word in words if word]
        left = began + part.limit - time.monotonic()
        code, lines, error = run(words, left, log, cpu)
        section += f"\n    {shlex.join(words)}\n{shown_lines(part, lines)}"
        if code is None:
            result = f"failed (stopped after {part.limit} s)"
        elif code not in part.accepted:
            result = f"failed (exit code {code}) {error[:150].replace('|', '/')}".strip()
        elif any(re.match(r"\d+ skipped", line) for line in lines):  # pytest: none has passed
            result = "not measured (all tests were skipped)"
        if result:
            break
    result = result or f"measured in {time.monotonic() - began:.0f} s"
    return {"result": result, "section": section}


def write_report(path: Path, head: str, found: dict[str, dict[str, str]], values: dict) -> None:
    """It is complete up to the last part if the machine is taken away."""
    rows = ""
    for name, part in found.items():
        rows += f"| {PARTS[name].title.format(**values)} | {part['result']} |\n"
    sections = "".join(part["section"] for part in found.values())
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(f"{head}\n| part | result |\n| --- | --- |\n{rows}\n{GOALS}{sections}")
    temporary.replace(path)


def parse_options() -> argparse.Namespace:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--cpu", action="store_true", help="rehearsal on the CPU, with small sizes")
    names = ", ".join(PARTS)
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"[{names}]")
    add("--data-dir", default="data", help="directory with MNIST/raw, for mnist [data]")
    add("--output", type=Path, default=REPO / "runs/on_gpu.md", help="[runs/on_gpu.md]")
    add("--rounds", type=int, help="turns of each contestant [5]")
    return parser.parse_args()


def fail(text: str) -> None:
    print(f"on_gpu.py: error: {text}", file=sys.stderr)
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
    if options.cpu:
        return gpus, f"{cores}, {versions}"
    return gpus, f"{gpus} x {name}, {cores}, {versions}"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops the command that runs
    options = parse_options()
    gpus, machine = describe_machine(options)
    heading = "Rehearsal on a CPU: not figures of a GPU" if options.cpu else "On a GPU"
    head = f"## {heading}\n\n{machine}, {time.strftime('%F')}\n"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as scratch, open(f"{options.output}.log", "a") as log:
        values = sizes(options, gpus, scratch)
        for name in options.only:
            reason = reason_to_skip(name, options, values)
            if reason:
                found[name] = {"result": f"not measured ({reason})", "section": ""}
            else:
                print(f"{name}: at most {PARTS[name].limit} s ...", flush=True)
                found[name] = measure(PARTS[name], values, log, options.cpu)
            write_report(options.output, head, found, values)
            print(f"{found[name]['section']}\n{name}: {found[name]['result']}", flush=True)
    print(f"Wrote {options.output}; all output: {options.output}.log")
    sys.exit(any(part["result"].startswith("failed") for part in found.values()))


if __name__ == "__main__":
    main()
