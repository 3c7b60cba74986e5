"""Checks of one machine, for scripts/preflight.py and scripts/doctor.py: each returns Findings."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import guard
from guard import HOST

REPOSITORY = Path(__file__).resolve().parent.parent
GIB = 1 << 30


@dataclass
class Finding:
    """The result of a check. scripts/doctor.py prints it; --json prints these fields."""

    level: str  # OK, WARN or FAIL
    check: str
    observed: str
    remedy: str = ""
    where: str = ""  # hosts, or a file and line; "": this machine or the whole job
    data: dict | None = None  # numbers, for programs

    def __str__(self) -> str:
        where, remedy = self.where and f"{self.where}: ", self.remedy and f": {self.remedy}"
        return f"{self.level:5}{self.check:17} {where}{self.observed}{remedy}"


def check_machine(run_directory: str) -> list[Finding]:
    checks = [software, gpus, shared_memory, limits, cores, host_name, environment]
    findings = [finding for check in checks for finding in attempt(check)]
    return findings + attempt(disks, run_directory)


def check_repository(dataset: str, data_dir: str) -> list[Finding]:
    """The checks that only one node needs to run."""
    return attempt(launch_scripts) + attempt(data, dataset, data_dir)


def attempt(check, *arguments) -> list[Finding]:
    """Run a check. If the check itself crashes, report that, so that the others still run."""
    try:
        return list(check(*arguments))
    except ModuleNotFoundError:  # software() reports it
        return []
    except Exception as error:
        text = f"{check.__name__}() failed ({first_line(error)})"
        return [Finding("WARN", "checks", text, "check that by hand")]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:200]


# ---- software, GPUs


def missing_packages(script: str) -> list[str]:
    packages = ["torch"]
    if Path(script).name == "train_distributed.py":
        packages += ["torchvision", "yaml"]
    return [name for name in packages if not importlib.util.find_spec(name)]


def software():
    remedy = "pip install -r requirements.txt, or see scripts/site.sh"
    if missing := missing_packages("train_distributed.py"):
        level = "FAIL" if "torch" in missing else "WARN"
        yield Finding(level, "packages", f"{sys.executable} has no {', '.join(missing)}", remedy)
    if "torch" in missing:
        return
    import torch

    text = f"{torch.__version__}, Python {platform.python_version()}"
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if version < (2, 4):
        yield Finding("FAIL", "PyTorch", f"{text}: the trainer needs 2.4 or newer", remedy)
    elif version < (2, 10):
        text += ": a hostile checkpoint can run code when it is loaded (CVE-2026-24747)"
        remedy = "load only checkpoints that you trust, or update PyTorch to 2.10 or newer"
        yield Finding("WARN", "PyTorch", text, remedy)
    else:
        yield Finding("OK", "PyTorch", text)


def gpus() -> list[Finding]:
    """The GPUs that PyTorch sees. Calls nvidia-smi: CUDA would allocate memory on each GPU."""
    import torch

    count, visible = torch.cuda.device_count(), tuple(guard.visible_gpus())
    fields = "uuid,index,name,driver_version,memory.total,memory.used"
    fields += ",ecc.errors.uncorrected.volatile.total,power.limit,power.default_limit"
    try:
        rows = [row for row in nvidia_smi("gpu", fields) if row[0].startswith(visible)]
        processes = nvidia_smi("compute-apps", "gpu_uuid,pid")
    except RuntimeError as error:
        return [Finding("WARN", "GPUs", str(error), "ask the administrators")]
    findings, driver = [], f", driver {rows[0][3]}" if rows else ""
    for uuid, index, _, _, total, used, errors, limit, default in rows:
        if number(errors):
            text = f"GPU {index} has {errors} uncorrected memory errors"
            remedy = "exclude the node, and tell the administrators"
            findings.append(Finding("FAIL", "GPU memory", text, remedy))
        if number(used) > 1024:
            pids = [pid for gpu, pid in processes if gpu == uuid]
            text = f"{used} of {total} MiB of GPU {index} are in use by process "
            text += ", ".join(pids) or "unknown"
            remedy = "if it is left over from your training, kill it"
            findings.append(Finding("WARN", "GPU memory", text, remedy, data={"pids": pids}))
        if number(limit) < 0.9 * number(default):
            text = f"the power of GPU {index} is limited to {limit} of {default} W"
            remedy = f"nvidia-smi -i {index} -pl {default}, or ask the administrators"
            findings.append(Finding("WARN", "GPU power", text, remedy))
    if rows and (too_old := old_driver(rows[0][3], count)):
        return [*findings, too_old]
    if count < max(len(visible), guard.has_gpu()):
        text = f"PyTorch {torch.__version__} sees {count} of {len(visible) or 'the'} GPUs{driver}"
        remedy = "ask the scheduler for GPUs, or install a PyTorch build for this driver"
        return [*findings, Finding("WARN", "GPUs", text, remedy)]
    names = " and ".join(sorted({row[2] for row in rows})) or "GPU"
    text = f"{count} x {names}, CUDA {torch.version.cuda or 'none'}{driver}"
    return [*findings, Finding("OK", "GPUs", text if count else "none: uses the CPU")]


OLDEST_DRIVER = {"12": 525, "13": 580}  # for each CUDA version, from NVIDIA's compatibility table


def old_driver(driver: str, count: int) -> Finding | None:
    """A finding if the driver is too old for this PyTorch, which still counts GPUs with NVML."""
    import torch

    cuda = torch.version.cuda or "none"
    needed = OLDEST_DRIVER.get(cuda.split(".")[0], 0)
    if int(driver.split(".")[0]) >= needed or torch.cuda.is_available():
        return None
    text = f"PyTorch {torch.__version__} for CUDA {cuda} needs driver {needed}, not {driver}"
    remedy = "update the driver, or TORCH_INDEX=cu126 scripts/quickstart.sh (from driver 525 on), "
    remedy += "or train on the CPU: export CUDA_VISIBLE_DEVICES="
    return Finding("FAIL" if count else "WARN", "GPU driver", text, remedy)


def number(text: str) -> float:
    """0.0 where nvidia-smi prints [N/A]."""
    with suppress(ValueError):
        return float(text)
    return 0.0


def nvidia_smi(what: str, fields: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-WHAT`; [] without it. Raises RuntimeError with its message."""
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        raise RuntimeError("nvidia-smi does not answer within 10 s") from None
    if result.returncode:
        raise RuntimeError(f"nvidia-smi: {(result.stdout + result.stderr).strip()}".split("\n")[0])
    rows = [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


# ---- the machine


def shared_memory() -> list[Finding]:
    if not os.path.isdir("/dev/shm"):
        return []
    usage = shutil.disk_usage("/dev/shm")
    text = f"{usage.free / GIB:.1f} GiB of {usage.total / GIB:.1f} GiB of /dev/shm are free"
    if usage.free < GIB:
        remedy = "DataLoader workers and NCCL need 1 GiB: delete files, or docker run --shm-size=8g"
        return [Finding("WARN", "/dev/shm", text, remedy)]
    return [Finding("OK", "/dev/shm", text)]


def limits():
    needed = [("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 65536")]
    if os.path.isdir("/dev/infiniband"):
        needed += [("locked memory", resource.RLIMIT_MEMLOCK, GIB, "ulimit -l unlimited")]
    for name, limit, least, command in needed:
        value, _ = resource.getrlimit(limit)
        if 0 <= value < least:
            remedy = f"{command} (in scripts/site.sh), or ask the administrators"
            yield Finding("WARN", "ulimit", f"{name} {value}, less than {least}", remedy)
        else:
            yield Finding("OK", "ulimit", f"{name} {'unlimited' if value < 0 else value}")


def disks(run_directory: str):
    remedy = "make room, or set another --checkpoint-dir or TMPDIR"
    for what, place in ("run directory", run_directory), ("temporary files", tempfile.gettempdir()):
        place = existing(Path(place))
        free = shutil.disk_usage(place).free
        text = f"{what} {place}: {free / GIB:.1f} GiB free"
        if not os.access(place, os.W_OK):
            yield Finding("FAIL", "disk", f"{what} {place} is not writable", remedy)
        elif free < GIB / 10:
            yield Finding("FAIL", "disk", f"{text}: it is full", remedy)
        elif free < 2 * GIB:
            yield Finding("WARN", "disk", f"{text}: enough for a small model only", remedy)
        else:
            yield Finding("OK", "disk", text)


def existing(place: Path) -> Path:
    """The path itself, or its nearest parent directory that exists."""
    place = place.absolute()
    return place if place.exists() else existing(place.parent)


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cores():
    found, ranks = count_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share, threads = os.cpu_count() // ranks, number(os.environ.get("OMP_NUM_THREADS", ""))
    text = f"this process may use {found} of {os.cpu_count()} cores"
    if threads > 1 and threads * ranks > found:
        excess = f"{ranks} x OMP_NUM_THREADS={threads:.0f} threads on {found} cores"
        yield Finding("WARN", "cores", excess, "unset it: cluster_train.sh divides the cores")
    if (found == 1 and share > 1) or (found == 2 and share > 7):  # one core, or its two threads
        text += f", but there are {share} for each rank"
        remedy = "srun --cpus-per-task=N (Slurm 22.05 and 23.02 do not pass it on from sbatch)"
        yield Finding("WARN", "cores", text, remedy)
    else:
        yield Finding("OK", "cores", text)


def host_name():
    try:
        addresses = sorted({info[4][0] for info in socket.getaddrinfo(HOST, None)})
    except OSError as error:
        remedy = f"add a line to /etc/hosts: ADDRESS {HOST}"
        yield Finding("WARN", "host name", f"{HOST} is unknown ({error.strerror})", remedy)
        return
    text = f"{HOST} is {', '.join(addresses)}"
    several = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    if several and all(map(guard.LOOPBACK.match, addresses)):
        text += ": gloo listens there, where no other node can connect"
        remedy = "give it its own address in /etc/hosts; until then, set GLOO_SOCKET_IFNAME=eth0"
        yield Finding("WARN", "host name", text, remedy)
    else:
        yield Finding("OK", "host name", text)


# ---- the environment

HARMFUL = {  # variable: (harmful values, their effect)
    "NCCL_P2P_DISABLE": ("1", "disables direct transfers between GPUs"),
    "NCCL_SHM_DISABLE": ("1", "disables transfers through shared memory"),
    "NCCL_IB_DISABLE": ("1", "replaces InfiniBand with TCP"),
    "NCCL_NET_GDR_LEVEL": ("0|LOC", "disables transfers from the network to the GPU"),
    "NCCL_IB_GID_INDEX": (".+", "may be wrong on some nodes; NCCL finds the index"),
    "NCCL_TREE_THRESHOLD": (".+", "has no effect since NCCL 2.5"),
    "NCCL_BLOCKING_WAIT": ("1", "is an old name; collectives have time limits by default"),
    "NCCL_ASYNC_ERROR_HANDLING": (".+", "is an old name of TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "makes each collective wait for the GPU"),
    "CUDA_LAUNCH_BLOCKING": ("1", "makes each kernel wait for the previous one"),
    "NCCL_DEBUG": ("INFO|TRACE", "writes megabytes of log per rank"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "checks each collective, which is slow"),
    "NCCL_SOCKET_IFNAME": ("lo", "keeps NCCL from reaching other nodes"),
    "GLOO_SOCKET_IFNAME": (r"lo|\^.*", "keeps gloo from reaching other nodes"),
}


def environment() -> list[Finding]:
    """Variables that slow the training down or break it."""
    findings, debug = [], os.environ.get("LOG_LEVEL") == "DEBUG"  # then cluster_train.sh sets both
    for name, (values, effect) in HARMFUL.items():
        value = os.environ.get(name, "")
        if re.fullmatch(values, value) and not (debug and name.endswith("DEBUG")):
            findings.append(Finding("WARN", "environment", f"{name}={value} {effect}", "unset it"))
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name[0] != "^" and name not in interfaces:
            text = f"GLOO_SOCKET_IFNAME={name}, but there are only {', '.join(sorted(interfaces))}"
            findings.append(Finding("FAIL", "environment", text, "unset it"))
    return findings or [Finding("OK", "environment", "no harmful variables")]


# ---- the repository


def launch_scripts() -> list[Finding]:
    kinds = (".sh", ".slurm", ".sbatch", ".pbs")
    scripts = sorted(path for path in REPOSITORY.iterdir() if path.suffix in kinds)
    findings = [finding for path in scripts for finding in launch_script(path)]
    text = f"{len(scripts)} in {REPOSITORY}: no problems"
    return findings or [Finding("OK", "launch scripts", text)]


def launch_script(path: Path):
    """Directives that Slurm or PBS ignore, or that contradict each other."""

    def finding(number: int, text: str, remedy: str, level: str = "WARN") -> Finding:
        return Finding(level, "launch scripts", text, remedy, f"{path.name}:{number}")

    options, in_body, starts_workers = {}, False, False
    starter = re.compile(r"\btorchrun\b|torch\.distributed\.(run|launch)|cluster_train\.sh")
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if re.match(r"#\s+(SBATCH|PBS)\s+-|##(SBATCH|PBS)\s", line):
            text = f"`{line.strip()}` is a comment, which the scheduler ignores"
            yield finding(number, text, "write #SBATCH without a space, or delete it")
        elif re.match(r"#(SBATCH|PBS)\s", line):
            if in_body:
                text = f"`{line.strip()}` comes after the first command, so it is ignored"
                yield finding(number, text, "move it up")
            for name, value in re.findall(r"--([a-z-]+)(?:[= ]([^ ]+))?", line):
                options[name] = (value, number)
        elif line.strip() and not line.startswith("#"):
            in_body = True
            if starter.search(line) and not re.match(r"\s*(#|echo|.*\bfail\b)", line):
                starts_workers = True
    tasks, number = options.get("ntasks-per-node", ("1", 0))
    if starts_workers and tasks != "1":
        text = f"--ntasks-per-node={tasks}, but torchrun starts the workers of a node itself"
        yield finding(number, text, "set --ntasks-per-node=1")
    if {"gpus-per-task", "gpus-per-node"} <= options.keys():
        text = "--gpus-per-task with --gpus-per-node: each task sees one GPU only, without NVLink"
        yield finding(options["gpus-per-task"][1], text, "remove --gpus-per-task")
    for name in ("output", "error"):
        value, number = options.get(name, ("", 0))
        folder = os.path.dirname(value)
        if folder and "%" not in folder and not (path.parent / folder).is_dir():
            text = f"--{name} in {folder}/, which does not exist: Slurm ends the job silently"
            yield finding(number, text, f"mkdir -p {path.parent / folder}", "FAIL")


def data(dataset: str, data_dir: str):
    folder = Path(data_dir, {"mnist": "MNIST/raw", "imagefolder": "train"}.get(dataset, ""))
    text = f"--dataset {dataset} needs {folder}, which does not exist or is not readable"
    if dataset not in ("mnist", "imagefolder"):
        yield Finding("OK", "data", f"{dataset} needs none")
    elif folder.is_dir() and os.access(folder, os.R_OK):
        yield Finding("OK", "data", f"{dataset} is in {folder}")
    elif dataset == "imagefolder":
        remedy = "--data-dir DIR with DIR/train/CLASS/ and DIR/val/CLASS/"
        yield Finding("FAIL", "data", text, remedy)
    else:
        remedy = "the training downloads it; without a network, copy it there"
        yield Finding("WARN", "data", text, remedy)
