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
from dataclasses import dataclass
from pathlib import Path

from ranks import REPO
from speed import cpu_name

GOALS = """Goals on an H100: ours at least 0.90 of the limit for SimpleConvNet, 0.99 for ResNet-50
in bf16, idle below 2 %. For comparison, one A100 trains 2,470 images/s of ResNet-50 (NVIDIA
DeepLearningExamples, AMP) or about 2,600 (timm).
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
    limit: int  # seconds, for all commands together; less than 9 minutes
    commands: list[str]
    shown: str = r"\S"  # pattern of the lines of output that the report shows
    needs: str = "torchvision numpy PIL yaml"  # packages
    gpus: int = 1  # that it needs; the rehearsal runs as many ranks on the CPU
    accepted: tuple[int, ...] = (0,)  # exit codes


TABLE = r"^\|"
SPEED = "python benchmarks/speed.py {gpu} --rounds {rounds} --idle"
CONVNET = SPEED + " --ranks 1 --steps {convnet_steps}"
IMAGES = SPEED + " --model {resnet} --size {size} --workers {cores}"
RESNET = IMAGES + " --dataset synthetic --batch {batch} --steps {steps}"
CORRECTNESS = "python benchmarks/correctness.py {cpu} --ranks {both} "
TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node {ranks} "


def resnet50(ranks: int) -> Part:
    command = f"{RESNET} --amp bf16 --ranks {ranks} --only limit sums ours"
    return Part(
        f"ResNet-50, bf16, synthetic images, {ranks} rank(s)", 480, [command], TABLE, gpus=ranks
    )


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
    ),
    "killed": Part("A killed rank, supervised", 240, [CORRECTNESS + "killed"], TABLE),
    "resume": Part(
        "Stop and resume, bit for bit (ResNet-50, compiled)", 400, [CORRECTNESS + "resume"], TABLE
    ),
    "reproducible": Part(
        "One rank and several, bit for bit", 240, [CORRECTNESS + "reproducible"], TABLE
    ),
    "distributed": Part(
        "scripts/test_distributed.sh",
        150,
        ["scripts/test_distributed.sh {both}"],
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
    "resnet50-1": resnet50(1),
    "resnet50-2": resnet50(2),
    "resnet50-4": resnet50(4),
    "resnet50-8": resnet50(8),
    "convnet": Part("SimpleConvNet on MNIST", 300, [CONVNET + " --only limit ours"], TABLE),
    "convnet-compiled": Part(
        "SimpleConvNet, compiled",
        300,
        [CONVNET + " --compile --only limit ours"],
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
    "peers-tuned": Part(
        "ResNet-50, bf16: peers with our data and memory layout",
        480,
        [RESNET + " --amp bf16 --tuned --ranks 1 --only limit ours lightning accelerate timm"],
        TABLE,
    ),
    "loader": Part(
        "JPEG files: the loader alone",
        300,
        [
            "python benchmarks/loader.py --make {scratch}/loader --files {files} --copies {copies}",
            "python benchmarks/loader.py --data-dir {scratch}/loader --files {loader_files}"
            " --rounds {rounds} --workers {cores} {cores2}",
        ],
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
        "Checkpoints",
        120,
        ["python benchmarks/checkpoints.py --model {resnet} --saves {saves} --directory {scratch}"],
    ),
    "startup": Part(
        "Start-up", 160, ["python benchmarks/startup.py {gpu} --ranks 1 --rounds {rounds}"]
    ),
    "tf32": Part(
        "ResNet-50, float32 (TF32)",
        300,
        [RESNET + " --ranks 1 --only limit ours"],
        TABLE,
    ),
    "fp16": Part(
        "ResNet-50, fp16",
        300,
        [RESNET + " --amp fp16 --ranks 1 --only limit ours"],
        TABLE,
    ),
}


def sizes(options, gpus: int, scratch: str) -> dict[str, object]:
    """The values of the names in braces."""
    cores = len(os.sched_getaffinity(0))
    values = {
        "scratch": scratch,
        "cores": cores,
        "cores2": 2 * cores,
    }
    if options.cpu:
        return values | {
            "gpu": "",
            "cpu": "--cpu",
            "ranks": 2,
            "both": 2,
            "resnet": "resnet18",
            "size": 32,
            "batch": 4,
            "steps": 20,
            "convnet_steps": 20,
            "rounds": options.rounds or 1,
            "saves": 2,
            "files": 64,
            "copies": 16,
            "loader_files": 64,
            "jpeg_batch": 8,
            "jpeg_steps": 20 * cores,
        }
    files = 1024
    jpeg_batch = 128
    jpeg_steps = max(20, 20 * cores // gpus)
    return values | {
        "gpu": "--gpu",
        "cpu": "",
        "ranks": gpus,
        "both": max(2, gpus),  # with one GPU, two ranks share it
        "resnet": "resnet50",
        "size": 224,
        "batch": 256,
        "steps": 60,
        "convnet_steps": 1000,
        "rounds": options.rounds or 5,
        "saves": 12,
        "files": files,
        "copies": jpeg_batch * gpus * (jpeg_steps + 1) // files + 1,
        "loader_files": 512 * cores,
        "jpeg_batch": jpeg_batch,
        "jpeg_steps": jpeg_steps,
    }


def reason_to_skip(name: str, options, gpus: int, values: dict) -> str:
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
    env["SHARE_GPU"] = "1"  # has no effect on ranks that have a GPU each
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


def measure(part: Part, values: dict, seconds: float, log, cpu: bool) -> dict[str, str]:
    """Run the commands of a part. Returns its result in words, and its section of the report."""
    began = time.monotonic()
    section = f"\n### {part.title.format(**values)}\n"
    result = ""
    for command in part.commands:
        words = [word.format(**values) for word in command.split()]
        words = [word for word in words if word]
        left = began + seconds - time.monotonic()
        code, lines, error = run(words, left, log, cpu)
        section += f"\n    {shlex.join(words)}\n{shown_lines(part, lines)}"
        if code is None:
            result = f"failed (stopped after {seconds:.0f} s)"
        elif code not in part.accepted:
            result = f"failed (exit code {code}) {error[:150].replace('|', '/')}".strip()
        elif any(re.match(r"\d+ skipped", line) for line in lines):  # pytest: none has passed
            result = "not measured (all tests were skipped)"
        if result:
            break
    result = result or f"measured in {time.monotonic() - began:.0f} s"
    return {"result": result, "section": section}


class Report:
    """The Markdown file, and a .json file beside it with what was measured before.

    It is written again after each part: it is complete up to there if the machine is taken away.
    """

    def __init__(self, path: Path, heading: str, machine: str, values: dict):
        self.path = path
        self.heading = heading
        self.machine = machine
        self.values = values
        self.parts: dict[str, dict[str, str]] = {}
        with suppress(OSError, ValueError):
            saved = json.loads(Path(f"{path}.json").read_text())
            if saved.get("machine") == machine:
                self.parts = saved["parts"]

    def is_measured(self, name: str) -> bool:
        return name in self.parts and self.parts[name]["result"].startswith("measured")

    def write(self) -> None:
        rows = ""
        sections = ""
        for name, part in PARTS.items():
            found = self.parts.get(name, {"result": "not measured yet", "section": ""})
            rows += f"| {part.title.format(**self.values)} | {found['result']} |\n"
            sections += found["section"]
        head = f"## {self.heading}\n\n{self.machine}, {time.strftime('%F')}\n"
        table = f"| part | result |\n| --- | --- |\n{rows}"
        self.replace(self.path, f"{head}\n{table}\n{GOALS}{sections}")
        saved = {"machine": self.machine, "parts": self.parts}
        self.replace(Path(f"{self.path}.json"), json.dumps(saved, indent=1))

    def replace(self, path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text)
        temporary.replace(path)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="on_gpu.sh", usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--cpu", action="store_true", help="rehearsal on the CPU, with small sizes")
    add("--only", nargs="+", choices=PARTS, metavar="PART", help="[all that are not measured yet]")
    add("--output", type=Path, default=REPO / "runs/on_gpu.md", help="[runs/on_gpu.md]")
    add("--rounds", type=int, help="turns of each contestant [5]")
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
    if options.cpu:
        return gpus, f"{cores}, {versions}"
    return gpus, f"{gpus} x {name}, {cores}, {versions}"


def measure_parts(options, gpus: int, values: dict, report: Report, log) -> bool:
    """Measure the parts that were asked for. Returns whether one of them failed."""
    deadline = time.monotonic() + 60 * options.minutes
    names = options.only
    if names is None:
        names = [name for name in PARTS if not report.is_measured(name)]
    failed = False
    for name in dict.fromkeys(names):
        part = PARTS[name]
        left = deadline - time.monotonic()
        reason = reason_to_skip(name, options, gpus, values)
        # A part that has less than half of its limit is left for the next call.
        enough = min(part.limit / 2, 30 * options.minutes)
        if not reason and (left <= 0 or left < enough):
            reason = f"the {options.minutes:g} minutes were over"
        if reason:
            found = {"result": f"not measured ({reason})", "section": ""}
        else:
            print(f"{name}: at most {min(part.limit, left):.0f} s ...", flush=True)
            found = measure(part, values, min(part.limit, left), log, options.cpu)
        report.parts[name] = found
        report.write()
        print(f"{found['section']}\n{name}: {found['result']}", flush=True)
        failed = failed or found["result"].startswith("failed")
    return failed


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops the command that runs
    options = parse_options()
    gpus, machine = describe_machine(options)
    heading = "Rehearsal on a CPU: not figures of a GPU" if options.cpu else "On a GPU"
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, open(f"{options.output}.log", "a") as log:
        values = sizes(options, gpus, scratch)
        report = Report(options.output, heading, machine, values)
        report.write()
        failed = measure_parts(options, gpus, values, report, log)
    print(f"Wrote {options.output}; all output: {options.output}.log")
    sys.exit(failed)


if __name__ == "__main__":
    main()
