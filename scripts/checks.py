"""Checks of one machine, for scripts/preflight.py and scripts/doctor.py: each returns Findings."""

from __future__ import annotations

import errno
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
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import guard
import report
from report import HOST

GIB = 1 << 30


@dataclass
class Finding:
    """The result of a check. scripts/doctor.py prints it; --json prints these fields."""

    level: str  # OK, WARN or FAIL
    check: str
    observed: str
    remedy: str = ""
    where: str = ""  # hosts; "": this machine or the whole job
    data: dict | None = None  # numbers, for programs

    def __str__(self) -> str:
        text = self.observed
        if self.where:
            text = f"{self.where}: {text}"
        if self.remedy:
            text = f"{text}: {self.remedy}"
        return f"{self.level:5}{self.check:17} {text}"


def check_machine(run_directory: str) -> list[Finding]:
    findings = []
    for check in (software, gpus, gpu_health, shared_memory, limits, cores, host_name, environment):
        findings += attempt(check)
    findings += attempt(disks, run_directory)
    return findings


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
    text = f"{type(error).__name__}: {error}".strip()
    return text.split("\n")[0][:200]


# ---- software, GPUs


def missing_packages(script: str) -> list[str]:
    packages = ["torch"]
    if Path(script).name == "train_distributed.py":
        packages += ["torchvision", "yaml"]
    return [name for name in packages if not importlib.util.find_spec(name)]


def software():
    remedy = "pip install -r requirements.txt, or see scripts/site.sh"
    missing = missing_packages("train_distributed.py")
    if missing:
        level = "FAIL" if "torch" in missing else "WARN"
        yield Finding(level, "packages", f"{sys.executable} has no {', '.join(missing)}", remedy)
    if "torch" in missing:
        return
    import torch

    text = f"{torch.__version__}, Python {platform.python_version()}"
    numbers = re.findall(r"\d+", torch.__version__)
    version = (int(numbers[0]), int(numbers[1]))
    if version < (2, 6):
        yield Finding("FAIL", "PyTorch", f"{text}: 2.6 or newer is needed", remedy)
    elif version < (2, 10):
        text += ": a hostile checkpoint can run code when it is loaded (CVE-2026-24747)"
        remedy = "load only checkpoints that you trust, or update PyTorch to 2.10 or newer"
        yield Finding("WARN", "PyTorch", text, remedy)
    else:
        yield Finding("OK", "PyTorch", text)


GPU_FIELDS = [
    "uuid",
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "power.limit",
    "power.default_limit",
]


BROKEN = ("[GPU is lost]", "[GPU requires reset]", "[Unknown Error]")  # values of nvidia-smi
SMI_SECONDS = 10
HIDE_ALL = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES


def gpus() -> list[Finding]:
    """The GPUs that PyTorch sees. Calls nvidia-smi: CUDA would allocate memory on each GPU."""
    import torch

    count = torch.cuda.device_count()
    try:
        rows = nvidia_smi("gpu", GPU_FIELDS)
        processes = nvidia_smi("compute-apps", ["gpu_uuid", "pid"])
    except RuntimeError as error:
        return [Finding("WARN", "GPUs", str(error), "ask the administrators")]
    rows = [row for row in rows if is_visible(row)]
    findings = []
    for row in rows:
        findings += gpu_problems(row, processes)
    if rows:
        too_old = old_driver(rows[0]["driver_version"], count)
        if too_old:
            return [*findings, too_old]
    return [*findings, gpu_count(count, rows)]


def is_visible(gpu: dict[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES shows this GPU to this process, by its index or UUID."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return True
    for name in names.split(","):
        if name == gpu["index"] or (name and gpu["uuid"].startswith(name)):
            return True
    return False


def gpu_problems(gpu: dict[str, str], processes: list[dict[str, str]]):
    """Memory errors, memory that is in use, and limited power of one GPU."""
    index = gpu["index"]
    broken = [value for value in gpu.values() if value in BROKEN]
    if broken:
        text = f"GPU {index} has failed ({broken[0]})"
        yield Finding("FAIL", "GPUs", text, "exclude the node, and tell the administrators")
    errors = gpu["ecc.errors.uncorrected.volatile.total"]
    if number(errors):
        text = f"GPU {index} has {errors} uncorrected memory errors"
        remedy = "exclude the node, and tell the administrators"
        yield Finding("FAIL", "GPU memory", text, remedy)
    used = gpu["memory.used"]
    if number(used) > 1024:
        pids = [process["pid"] for process in processes if process["gpu_uuid"] == gpu["uuid"]]
        text = f"{used} of {gpu['memory.total']} MiB of GPU {index} are in use by process "
        text += ", ".join(pids) or "unknown"
        remedy = "if it is left over from your training, kill it"
        yield Finding("WARN", "GPU memory", text, remedy, data={"pids": pids})
    limit = gpu["power.limit"]
    default = gpu["power.default_limit"]
    if number(limit) < 0.9 * number(default):
        text = f"the power of GPU {index} is limited to {limit} of {default} W"
        remedy = f"nvidia-smi -i {index} -pl {default}, or ask the administrators"
        yield Finding("WARN", "GPU power", text, remedy)


def gpu_count(count: int, rows: list[dict[str, str]]) -> Finding:
    """Whether PyTorch sees all visible GPUs. rows: of nvidia-smi, which may be missing"""
    import torch

    expected = len(rows)
    driver = ""
    total = "the"
    if rows:
        driver = f", driver {rows[0]['driver_version']}"
        total = str(expected)
    elif report.has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES") not in HIDE_ALL:
        expected = 1  # or more
    if count < expected:
        text = f"PyTorch {torch.__version__} sees {count} of {total} GPUs{driver}"
        remedy = "ask the scheduler for GPUs, or install a PyTorch build for this driver"
        return Finding("WARN", "GPUs", text, remedy)
    if count == 0:
        return Finding("OK", "GPUs", "none: uses the CPU")
    names = sorted({row["name"] for row in rows})
    name = " and ".join(names) or "GPU"
    return Finding("OK", "GPUs", f"{count} x {name}, CUDA {torch.version.cuda or 'none'}{driver}")


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


def gpu_health():
    """What DCGM has found. It reports something only where its health watches are enabled."""
    command = ["dcgmi", "health", "--check"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return
    overall = re.search(r"Overall Health[\s:|]+(Warning|Failure)", result.stdout)
    if not overall:
        return
    reasons: list[str] = []
    for line in result.stdout.splitlines():
        cells = [cell.strip() for cell in line.split("|")]  # "", name, text, ""
        if len(cells) == 4 and not re.search("^(Healthy|Warning|Failure|Overall.*)?$", cells[2]):
            reasons.append(cells[2])
    text = f"dcgmi health reports: {' '.join(reasons)}"
    level = "FAIL" if overall[1] == "Failure" else "WARN"
    yield Finding(level, "GPUs", text, "tell the administrators")


def number(text: str) -> float:
    """0.0 where nvidia-smi prints [N/A]."""
    with suppress(ValueError):
        return float(text)
    return 0.0


def nvidia_smi(what: str, fields: list[str]) -> list[dict[str, str]]:
    """Rows of `nvidia-smi --query-WHAT`; [] without it. Raises RuntimeError with its message."""
    query = f"--query-{what}={','.join(fields)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi does not answer within {SMI_SECONDS} s") from None
    if result.returncode:
        output = (result.stdout + result.stderr).strip()
        raise RuntimeError(f"nvidia-smi: {output}".split("\n")[0])
    rows = []
    for line in result.stdout.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            rows.append(dict(zip(fields, values)))
    return rows


# ---- the machine

FIRST_WRITE = 1 << 20  # bytes to write as a test if there is no checkpoint yet
MAX_WRITE = GIB
WRITE_BLOCK = 8 << 20
WRITE_SECONDS = 3
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
    needed = [
        ("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 65536"),
        ("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 65536"),  # and threads
    ]
    if os.path.isdir("/dev/infiniband"):
        needed += [("locked memory", resource.RLIMIT_MEMLOCK, GIB, "ulimit -l unlimited")]
    for name, limit, least, command in needed:
        value, _ = resource.getrlimit(limit)
        if 0 <= value < least:
            remedy = f"{command} (in scripts/site.sh), or ask the administrators"
            yield Finding("WARN", "ulimit", f"{name} {value}, less than {least}", remedy)
        else:
            text = "unlimited" if value < 0 else str(value)
            yield Finding("OK", "ulimit", f"{name} {text}")


def disks(run_directory: str):
    remedy = "make room, or set another --checkpoint-dir or TMPDIR"
    directories = {"run directory": run_directory, "temporary files": tempfile.gettempdir()}
    for what, directory in directories.items():
        place = existing(Path(directory))
        free = shutil.disk_usage(place).free
        text = f"{what} {place}: {free / GIB:.1f} GiB free"
        if not os.access(place, os.W_OK):
            yield Finding("FAIL", "disk", f"{what} {place} is not writable", remedy)
        elif free < GIB / 10:
            yield Finding("FAIL", "disk", f"{text}: it is full", remedy)
        elif free < 2 * GIB:
            yield Finding("WARN", "disk", f"{text}: enough for a small model only", remedy)
        elif len(directory) > 70 and what == "temporary files":
            text = f"TMPDIR has {len(directory)} characters, too many for sockets of loader workers"
            yield Finding("FAIL", "disk", text, "set a shorter TMPDIR")
        else:
            yield Finding("OK", "disk", text)


def write_test(run_directory: str) -> str:
    """Write as many bytes as a checkpoint has, and read them back. Returns what failed, or "".

    shutil.disk_usage() does not see quotas. Stops after WRITE_SECONDS; leaves no file behind.
    """
    place = existing(Path(run_directory))
    size = min(size_of_checkpoint(place), MAX_WRITE)
    block = os.urandom(min(size, WRITE_BLOCK))
    blocks = 0
    deadline = time.monotonic() + WRITE_SECONDS
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            while blocks * len(block) < size and time.monotonic() < deadline:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
                blocks += 1
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
            file.seek(0)
            is_same = all(file.read(len(block)) == block for _ in range(blocks))
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:  # for example, the directory is another user's
            return ""
        return f"a test of {max(1, size >> 20)} MiB: {error.strerror}"
    return "" if is_same else "it returns other bytes than were written"


def size_of_checkpoint(directory: Path) -> int:
    """The size of the newest checkpoint in bytes; FIRST_WRITE if there is none yet."""
    newest = (0.0, FIRST_WRITE)
    with suppress(OSError):
        for path in directory.glob("*.pt"):
            status = path.stat()
            newest = max(newest, (status.st_mtime, status.st_size))
    return newest[1]


def existing(place: Path) -> Path:
    """The path itself, or its nearest parent directory that exists."""
    place = place.absolute()
    return place if place.exists() else existing(place.parent)


def count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def cores():
    found = count_cores()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share = os.cpu_count() // ranks
    threads = number(os.environ.get("OMP_NUM_THREADS", ""))
    text = f"this process may use {found} of {os.cpu_count()} cores"
    if threads > 1 and threads * ranks > found:
        excess = f"{ranks} x OMP_NUM_THREADS={threads:.0f} threads on {found} cores"
        yield Finding("WARN", "cores", excess, "unset it: cluster_train.sh divides the cores")
    is_one_core = found == 1 and share > 1
    is_two_threads = found == 2 and share > 7  # of one core
    if is_one_core or is_two_threads:
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
    if several and all(guard.LOOPBACK.match(address) for address in addresses):
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
    findings = []
    is_debug = os.environ.get("LOG_LEVEL", "").upper() == "DEBUG"
    for name, (values, effect) in HARMFUL.items():
        if is_debug and name.endswith("DEBUG"):  # set by cluster_train.sh
            continue
        value = os.environ.get(name, "")
        if re.fullmatch(values, value):
            findings.append(Finding("WARN", "environment", f"{name}={value} {effect}", "unset it"))
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name[0] != "^" and name not in interfaces:
            text = f"GLOO_SOCKET_IFNAME={name}, but there are only {', '.join(sorted(interfaces))}"
            findings.append(Finding("FAIL", "environment", text, "unset it"))
    return findings or [Finding("OK", "environment", "no harmful variables")]


# ---- the data


def data(dataset: str, data_dir: str):
    subfolders = {"mnist": "MNIST/raw", "imagefolder": "train"}
    if dataset not in subfolders:
        yield Finding("OK", "data", f"{dataset} needs none")
        return
    folder = Path(data_dir, subfolders[dataset])
    if folder.is_dir() and os.access(folder, os.R_OK):
        yield Finding("OK", "data", f"{dataset} is in {folder}")
        return
    text = f"--dataset {dataset} needs {folder}, which does not exist or is not readable"
    if dataset == "imagefolder":
        remedy = "--data-dir DIR with DIR/train/CLASS/ and DIR/val/CLASS/"
        yield Finding("FAIL", "data", text, remedy)
    else:
        remedy = "the training downloads it; without a network, copy it there"
        yield Finding("WARN", "data", text, remedy)
