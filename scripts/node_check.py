#!/usr/bin/env python3
"""Check this node, without PyTorch, in a second; refuse a launch that would fail.

    python scripts/node_check.py [--nnodes N --node-rank R --master-addr A --master-port P]
                                 [--nproc-per-node K] SCRIPT [ARGUMENT ...]

scripts/cluster_train.sh calls it on each node before torchrun, and scripts/guard.py in each srun
step on each node. A refusal is one sentence, which is also written to FAILURE_FILE; settings that
slow training down are warnings. Without a master address and port, it does not check the master;
scripts/doctor.py checks all nodes together.
It prints the number of GPUs.
Exit code: 0, or 2 if the launch was refused. With GUARD=0, it warns instead of refusing.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import platform
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import report
from report import HOST, LOOPBACK, PROGRAM

INSTALL = "pip install -r requirements.txt, or see scripts/site.sh"
ADDRESS_REMEDY = (
    "set MASTER_ADDR to an address of node rank 0 that all nodes can reach "
    "(or set GUARD=0 to launch anyway)"
)


# ------------------------------------------------------------------------------- a launch


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="node_check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nnodes", type=int, default=1)
    add("--node-rank", type=int, default=0)
    add("--master-addr", help="the host of node rank 0")
    add("--master-port", type=int)
    add("--nproc-per-node", type=int, default=0, help="ranks; 0: one per GPU, or 1 [0]")
    add("script", metavar="SCRIPT", help="the training script")
    add("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    gpu_count = check_launch(args.script, args.arguments, args.nproc_per_node)
    if args.master_addr and args.master_port:
        check_master(args.master_addr, args.master_port, args.node_rank)
    print(gpu_count)


def check_launch(script: str, arguments: list[str], ranks: int) -> int:
    """Refuse a launch that would fail on this node; print what slows it down.

    ranks: on this node; 0: one per GPU, or 1. Returns the number of GPUs.
    """
    if sys.version_info < (3, 10):  # noqa: UP036
        refuse(f"{sys.executable} is not Python 3.10 or newer: see scripts/site.sh")
    missing = missing_packages(script)
    if missing:
        refuse(f"{sys.executable} has no {', '.join(missing)}: {INSTALL}")
    gpu_count = count_gpus()
    check_backend(" ".join(arguments), ranks or gpu_count or 1, gpu_count)
    for check in (environment, shared_memory, gpus):
        for finding in attempt(check):
            if finding.level != "OK":
                text = f"{finding.observed}: {finding.remedy}"
                report.say(f"{PROGRAM}: WARNING: {HOST}: {text}")
    return gpu_count


def refuse(text: str, cause: str = "configuration") -> None:
    """Print why the launch would fail, and exit with code 2; only warn if GUARD=0."""
    if os.environ.get("GUARD") == "0":
        report.say(f"{PROGRAM}: WARNING: {HOST}: {text}")
        return
    report.say(f"{PROGRAM}: error: {HOST}: {text}")
    report.write_failure(cause, text)
    sys.exit(2)


def check_backend(options: str, ranks: int, gpu_count: int) -> None:
    """nccl, the default where there are GPUs, needs a GPU for each rank."""
    asked_for = re.findall(r"backend[= ](nccl|gloo)\b", options)
    backend = [os.environ.get("BACKEND") or ("nccl" if gpu_count else "gloo"), *asked_for][-1]
    if backend == "nccl" and gpu_count < ranks and os.environ.get("SHARE_GPU") != "1":
        remedy = "request GPUs, or set BACKEND=gloo, or SHARE_GPU=1 to debug several ranks on a GPU"
        refuse(f"{ranks} ranks for nccl, but {gpu_count} visible GPUs: {remedy}")


def check_master(master: str, port: int, node_rank: int) -> None:
    """The port must be free on the master, and the other nodes must reach the master."""
    try:
        found = socket.getaddrinfo(master, port, type=socket.SOCK_STREAM)
    except OSError as error:
        refuse(f"master {master} is unknown here ({error.strerror}): {ADDRESS_REMEDY}")
        return
    addresses = [info[4][0] for info in found]
    if node_rank == 0:
        errors = {listen_error(info) for info in found}
        if errno.EADDRINUSE in errors:
            text = f"port {port} is in use here, on the master"
            refuse(f"{text}: set another MASTER_PORT on all nodes", "port")
        elif None not in errors:
            text = f"node rank 0 is here, but master {master} ({addresses[0]}) is not"
            refuse(f"{text}: {ADDRESS_REMEDY}")
    elif all(LOOPBACK.match(address) for address in addresses):
        text = f"master {master} resolves to {addresses[0]}, which is this node itself"
        refuse(f"{text}: {ADDRESS_REMEDY}")
    else:
        try:
            socket.create_connection((master, port), timeout=10).close()
        except ConnectionRefusedError:  # the host answers; its store has not started yet
            pass
        except OSError as error:
            text = f"cannot connect to master node at {addresses[0]}:{port}: {error}"
            refuse(f"{text}: is {master} up? If not, {ADDRESS_REMEDY}", "node lost")


def listen_error(info: tuple) -> int | None:
    """info: from socket.getaddrinfo()"""
    family, _, _, _, address = info
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        return error.errno
    return None


# ---------------------------------------------------------------------- the checks of a node

GIB = 1 << 30


class Finding(NamedTuple):
    """The result of a check."""

    level: str  # OK, WARN or FAIL
    check: str
    observed: str
    remedy: str = ""
    where: str = ""  # hosts or ranks; "": this machine or the whole job

    def __str__(self) -> str:
        text = self.observed
        if self.where:
            text = f"{self.where}: {text}"
        if self.level != "OK":
            text = f"{text}: {self.remedy}"
        return f"{self.level:5}{self.check:17} {text}"


def check_machine(run_directory: str) -> list[Finding]:
    findings = []
    for check in (software, gpus, shared_memory, environment):
        findings += attempt(check)
    return findings + attempt(disks, run_directory)


def attempt(check, *arguments) -> list[Finding]:
    """Run a check. If the check itself fails, report that, so that the others still run."""
    try:
        return list(check(*arguments))
    except Exception as error:
        text = f"the check failed ({first_line(error)})"
        return [Finding("WARN", check.__name__, text, "check that by hand")]


def first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return text[:200]


# ---- software, GPUs


def missing_packages(script: str) -> list[str]:
    packages = ["torch"]
    if Path(script).name == "train_distributed.py":
        packages += ["torchvision", "yaml"]
    return [name for name in packages if not importlib.util.find_spec(name)]


def software():
    missing = missing_packages("train_distributed.py")
    if missing:
        level = "FAIL" if "torch" in missing else "WARN"
        yield Finding(level, "packages", f"{sys.executable} has no {', '.join(missing)}", INSTALL)
    if "torch" not in missing:
        version = torch_build()["__version__"]
        major, minor = re.findall(r"\d+", version)[:2]
        level = "OK" if (int(major), int(minor)) >= (2, 6) else "FAIL"
        text = f"{version}, Python {platform.python_version()}"
        yield Finding(level, "PyTorch", text, f"2.6 or newer is needed: {INSTALL}")


def torch_build() -> dict:
    """torch.version: __version__, cuda and hip; PyTorch itself takes seconds to import."""
    package = importlib.util.find_spec("torch").origin
    return runpy.run_path(str(Path(package).with_name("version.py")))


MEMORY_ERRORS = "uncorrected memory errors"
ECC_ERRORS = "ecc.errors.uncorrected.volatile.total"
GPU_FIELDS = ("uuid", "index", "name", "driver_version", "memory.total", "memory.used", ECC_ERRORS)
BROKEN = {"[GPU is lost]", "[GPU requires reset]", "[Unknown Error]"}  # values of nvidia-smi
SMI_SECONDS = 10
HIDE_ALL = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES


def gpus():
    """The GPUs that this process may use."""
    rows = []
    if report.has_gpu():
        rows = [row for row in nvidia_smi() if is_visible(row)]
    count = len(rows) or count_gpus()
    if count == 0:
        yield Finding("OK", "GPUs", "none: uses the CPU")
        return
    for row in rows:
        yield from gpu_problems(row)
    names = sorted({f"{row['name']}, driver {row['driver_version']}" for row in rows})
    text = f"{count} x {' and '.join(names) or 'GPU'}"
    build = torch_build()
    if build["cuda"] or build.get("hip") or build.get("xpu"):
        yield Finding("OK", "GPUs", text)
    else:
        text = f"PyTorch {build['__version__']} is built for CPUs, and there are {text}"
        remedy = "TORCH_INDEX=cu126 scripts/quickstart.sh, or export CUDA_VISIBLE_DEVICES="
        yield Finding("WARN", "GPUs", text, remedy)


def gpu_problems(gpu: dict[str, str]):
    """gpu: a row of nvidia_smi()"""
    faults = sorted(BROKEN.intersection(gpu.values()))
    if gpu[ECC_ERRORS].isdigit() and gpu[ECC_ERRORS] != "0":
        faults.append(f"{gpu[ECC_ERRORS]} {MEMORY_ERRORS}")
    for fault in faults:
        text = f"GPU {gpu['index']} has failed ({fault})"
        yield Finding("FAIL", "GPUs", text, "exclude the node, and tell the administrators")
    used = gpu["memory.used"]
    if used.isdigit() and int(used) > 1024:
        text = f"{used} of {gpu['memory.total']} MiB of GPU {gpu['index']} are in use"
        remedy = "see nvidia-smi; if a process is left over from your training, kill it"
        yield Finding("WARN", "GPU memory", text, remedy)


def count_gpus() -> int:
    """The number of GPUs that this process may use, without PyTorch."""
    if not report.has_gpu():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device not in HIDE_ALL])
    with suppress(RuntimeError):
        if shutil.which("nvidia-smi"):
            return len(nvidia_smi())
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")  # AMD's; 0: a CPU
    amd = [node for node in nodes if node.read_text().strip() not in ("", "0")]
    return len(amd) or len(list(Path("/dev").glob("nvidia[0-9]*")))


def is_visible(gpu: dict[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES shows this GPU to this process, by its index or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", gpu["index"]).split(",")
    return gpu["index"] in visible or gpu["uuid"] in visible


def nvidia_smi() -> list[dict[str, str]]:
    """GPU_FIELDS of each GPU; [] without nvidia-smi. Raises RuntimeError with its message."""
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.Popen(command, text=True, **pipes)
    except FileNotFoundError:
        return []
    try:
        output, _ = process.communicate(timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # without waiting for its end: a broken driver may prevent it
        raise RuntimeError(f"nvidia-smi does not answer within {SMI_SECONDS} s") from None
    if process.returncode:
        if "No devices" in output:  # Slurm hides those that the job has not requested
            return []
        raise RuntimeError(f"nvidia-smi: {output.strip()}")
    rows = [line.split(", ") for line in output.splitlines()]
    return [dict(zip(GPU_FIELDS, row)) for row in rows if len(row) == len(GPU_FIELDS)]


LOST_GPU = re.compile(
    "Unable to determine the device handle|GPU is lost|GPU requires reset|does not answer", re.I
)


def report_gpu(reason: str) -> None:
    """If the driver says that a GPU has failed, or does not answer, tell scripts/supervise.py:
    evidence against this host. reason: the error of a rank, or "".

    The error alone is no evidence: most CUDA errors are the script's own fault. Nor are memory
    errors, unless it is one: the driver counts them from its start. After Xid 79 ("fallen off the
    bus"), nvidia-smi itself fails; after Xid 119, it hangs.
    """
    is_memory_error = re.search("ECC|uncorrectable", reason)
    for finding in attempt(gpus):
        if MEMORY_ERRORS in finding.observed and not is_memory_error:
            continue
        if finding.level == "FAIL" or LOST_GPU.search(finding.observed):
            text = f"defective GPU on {HOST}: {finding.observed}"
            report.say(f"guard.py: {text}")
            report.write_event("gpu_failed", text, host=HOST)
            return


# ---- the machine


def shared_memory():
    if os.path.isdir("/dev/shm"):
        usage = shutil.disk_usage("/dev/shm")
        text = f"{usage.free / GIB:.1f} GiB of {usage.total / GIB:.1f} GiB of /dev/shm are free"
        remedy = "DataLoader workers and NCCL need 1 GiB: delete files, or docker run --shm-size=8g"
        yield Finding("WARN" if usage.free < GIB else "OK", "/dev/shm", text, remedy)


def disks(run_directory: str):
    remedy = "make room, or set another --checkpoint-dir or TMPDIR"
    places = {"run directory": run_directory, "temporary files": tempfile.gettempdir()}
    for what, directory in places.items():
        place = existing(Path(directory))
        free = shutil.disk_usage(place).free
        text = f"{what} {place}: {free / GIB:.1f} GiB free"
        if not os.access(place, os.W_OK):
            yield Finding("FAIL", "disk", f"{what} {place} is not writable", remedy)
        elif free < GIB / 10:
            yield Finding("FAIL", "disk", text, remedy)
        else:
            yield Finding("WARN" if free < 2 * GIB else "OK", "disk", text, remedy)


def existing(place: Path) -> Path:
    """The path itself, or its nearest parent directory that exists."""
    place = place.absolute()
    return place if place.exists() else existing(place.parent)


# ---- the environment

HARMFUL = {  # variable: (harmful values, their effect)
    "NCCL_P2P_DISABLE": ("1", "disables direct transfers between GPUs"),
    "NCCL_SHM_DISABLE": ("1", "disables transfers through shared memory"),
    "NCCL_IB_DISABLE": ("1", "replaces InfiniBand with TCP"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "makes each collective wait for the GPU"),
    "CUDA_LAUNCH_BLOCKING": ("1", "makes each kernel wait for the previous one"),
    "NCCL_DEBUG": ("INFO|TRACE", "writes megabytes of log per rank"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks each collective, which is slow"),
    "NCCL_SOCKET_IFNAME": ("lo", "keeps NCCL from reaching other nodes"),
    "GLOO_SOCKET_IFNAME": (r"lo|\^.*", "keeps gloo from reaching other nodes"),
}


def environment() -> list[Finding]:
    """Variables that slow the training down or break it."""
    findings = []
    for name, (values, effect) in HARMFUL.items():
        value = os.environ.get(name, "")
        if re.fullmatch(values, value):
            findings.append(Finding("WARN", "environment", f"{name}={value} {effect}", "unset it"))
    reports = Path(os.environ.get("FAILURE_FILE", "/none")).parent
    if not reports.is_dir():
        text = (
            f"{reports} is not here, so errors and stops do not pass between supervise.py and ranks"
        )
        remedy = "set LOG_DIR to a directory that all nodes see"
        findings.append(Finding("WARN", "environment", text, remedy))
    return findings or [Finding("OK", "environment", "no harmful variables")]


if __name__ == "__main__":
    main()
