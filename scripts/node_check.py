#!/usr/bin/env python3
"""Check this node, without PyTorch, in a second; refuse a launch that would fail.

    python scripts/node_check.py [--nnodes N --node-rank R --master-addr A --master-port P]
                                 [--nproc-per-node K] SCRIPT [ARGUMENT ...]

scripts/cluster_train.sh calls it on each node before torchrun, and scripts/guard.py in each srun
step on each node. A refusal is one sentence, which is also written to FAILURE_FILE; settings that
slow training down are warnings. Without a master address and port, it does not check the master;
scripts/doctor.py checks all nodes together.
Before the first attempt, node rank 0 writes as much as a checkpoint has to --checkpoint-dir, and
reads it back, for up to 3 s: a quota may be used up although there is free space.
After a crash, it waits up to a minute until the killed processes have freed their GPU memory.
It prints the number of GPUs.
Exit code: 0, or 2 if the launch was refused. With PREFLIGHT=0, it warns instead of refusing.
"""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import platform
import re
import resource
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import report
from report import HOST, LOOPBACK

PROGRAM = Path(sys.argv[0]).name  # or doctor.py, guard.py, which import this file


def refuse(text: str, cause: str = "configuration") -> None:
    """Print why the launch would fail, and exit with code 2; only warn if PREFLIGHT=0."""
    if os.environ.get("PREFLIGHT") == "0":
        report.say(f"{PROGRAM}: WARNING: {HOST}: {text}")
        return
    report.say(f"{PROGRAM}: error: {HOST}: {text}")
    report.write_failure(cause, text, report.own_rank())
    sys.exit(2)


MEMORY_SECONDS = 60  # to free the GPU memory of a killed attempt
ADDRESS_REMEDY = "set MASTER_ADDR to an address that all nodes can reach"
ANYWAY = "(or set PREFLIGHT=0 to launch anyway)"
INSTALL = "pip install -r requirements.txt, or see scripts/site.sh"


# ------------------------------------------------------------------------------- a launch


def main() -> None:
    args = parse(sys.argv[1:])
    gpu_count = count_gpus()
    ranks = args.nproc_per_node or gpu_count or 1
    check_launch(args.script, args.arguments, gpu_count, ranks, args.node_rank)
    if args.master_addr and args.master_port:
        check_master(args)
    print(gpu_count)


def check_launch(
    script: str, arguments: list[str], gpu_count: int, ranks: int, node_rank: int
) -> None:
    """Refuse a launch that would fail on this node; print what slows it down."""
    if sys.version_info < (3, 10):  # noqa: UP036
        refuse(f"{sys.executable} is not Python 3.10 or newer: see scripts/site.sh")
    request = read_request(arguments)
    missing = missing_packages(script)
    if missing:
        refuse(f"{sys.executable} has no {', '.join(missing)}: {INSTALL}")
    check_backend(request, ranks, gpu_count)
    if node_rank == 0 and report.is_first_attempt():
        check_storage(request)
    findings = environment() + shared_memory()
    if report.has_gpu():
        findings += check_gpus()
    for finding in findings:
        if finding.level != "OK":
            text = f"{PROGRAM}: WARNING: {HOST}: {finding.observed}: {finding.remedy}"
            report.say(text)


def parse(argv: list[str]) -> argparse.Namespace:
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
    return parser.parse_args(argv)


def read_request(arguments: list[str]) -> str:
    """The configuration files without comments, then the arguments, which take precedence."""
    texts = []
    for argument in arguments:
        path = Path(argument.split("=")[-1])  # FILE or --option=FILE
        with suppress(OSError):
            if path.suffix in (".yaml", ".yml", ".json", ".toml") and path.is_file():
                text = path.read_text(errors="replace")
                texts.append(re.sub(r"#.*", "", text))
    return " ".join(texts + arguments)


def check_backend(request: str, ranks: int, gpu_count: int) -> None:
    """nccl, the default where there are GPUs, needs a GPU for each rank."""
    backends = re.findall(r"backend[\"']?[=:\s]+[\"']?(nccl|gloo)\b", request)
    backend = os.environ.get("BACKEND") or ("nccl" if gpu_count else "gloo")
    if backends:
        backend = backends[-1]
    if backend == "nccl" and gpu_count < ranks and os.environ.get("SHARE_GPU") != "1":
        remedy = "request GPUs, or set BACKEND=gloo, or SHARE_GPU=1 to debug several ranks on a GPU"
        refuse(f"{ranks} ranks for nccl, but {gpu_count} visible GPUs: {remedy}")


def check_master(args: argparse.Namespace) -> None:
    """The port must be free on the master, and the other nodes must reach the master."""
    try:
        found = socket.getaddrinfo(args.master_addr, args.master_port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"master {args.master_addr} is unknown here ({error.strerror})"
        refuse(f"{text}: {ADDRESS_REMEDY}")
        return
    if args.node_rank == 0:
        check_port(args.master_addr, args.master_port, found)
    else:
        check_connection(args.master_addr, args.master_port, found)


def check_port(master: str, port: int, found: list[tuple]) -> None:
    """On node rank 0. found: what socket.getaddrinfo() returns for the master"""
    errors = [error_of(bind, info) for info in found]
    if any(error and error.errno == errno.EADDRINUSE for error in errors):
        text = f"port {port} is in use here, on the master"
        refuse(f"{text}: set another MASTER_PORT on all nodes", "port")
    elif None not in errors:
        address = found[0][4][0]
        text = f"node rank 0 is here, but master {master} ({address}) is not"
        text += f" ({errors[0].strerror}): set MASTER_ADDR to an address of this host"
        refuse(f"{text} {ANYWAY}")


def check_connection(master: str, port: int, found: list[tuple]) -> None:
    """On the other nodes. found: what socket.getaddrinfo() returns for the master"""
    addresses = [info[4][0] for info in found]
    address = addresses[0]
    if all(LOOPBACK.match(one) for one in addresses):
        text = f"master {master} resolves to {address}, which is this node itself"
        refuse(f"{text}: {ADDRESS_REMEDY} {ANYWAY}")
        return
    errors = [error_of(connect, info) for info in found]
    if None not in errors:
        why = errors[0].strerror or errors[0]
        remedy = f"check that {master} is up and that MASTER_ADDR is right {ANYWAY}"
        refuse(f"cannot connect to master node at {address}:{port}: {why}: {remedy}", "node lost")


def check_storage(request: str) -> None:
    """On node rank 0, where rank 0 writes the checkpoints."""
    directories = re.findall(r"\b(?:checkpoint|save)[-_]dir[=:\s]+(\S+)", request)
    if not directories or re.search(r"--evaluate\b", request):
        return
    directory = directories[-1].strip("\"'")
    failure = write_test(directory)
    if failure:
        remedy = f"make room, ask for a larger quota, or set another --checkpoint-dir {ANYWAY}"
        refuse(f"cannot write a checkpoint to {directory} ({failure}): {remedy}", "disk")


def check_gpus() -> list[Finding]:
    """gpus(). After a killed attempt, first wait for its GPU memory to be freed."""
    findings = attempt(gpus)
    if report.is_first_attempt() or not is_memory_used(findings):
        return findings
    report.say(f"{PROGRAM}: {HOST}: waiting up to {MEMORY_SECONDS} s for free GPU memory")
    deadline = time.monotonic() + MEMORY_SECONDS
    while is_memory_used(findings) and time.monotonic() < deadline:
        time.sleep(1)
        findings = attempt(gpus)
    return findings


def is_memory_used(findings: list[Finding]) -> bool:
    return any(finding.check == "GPU memory" for finding in findings)


def error_of(call, info: tuple) -> OSError | None:
    """The error of bind() or connect() for an address; info: from socket.getaddrinfo()"""
    family, kind, protocol, _, address = info
    try:  # socket() itself fails if this kernel has no IPv6
        with socket.socket(family, kind, protocol) as probe:
            call(probe, address)
    except OSError as error:
        return error
    return None


def bind(probe: socket.socket, address) -> None:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(address)


def connect(probe: socket.socket, address) -> None:
    probe.settimeout(10)
    with suppress(ConnectionRefusedError):  # the host answers; its store has not started yet
        probe.connect(address)


# ---------------------------------------------------------------------- the checks of a node

GIB = 1 << 30


@dataclass
class Finding:
    """The result of a check. scripts/doctor.py prints it; --json prints these fields."""

    level: str  # OK, WARN or FAIL
    check: str
    observed: str
    remedy: str = ""
    where: str = ""  # hosts; "": this machine or the whole job

    def __str__(self) -> str:
        text = self.observed
        if self.where:
            text = f"{self.where}: {text}"
        if self.remedy:
            text = f"{text}: {self.remedy}"
        return f"{self.level:5}{self.check:17} {text}"


def check_machine(run_directory: str) -> list[Finding]:
    findings = []
    for check in (software, gpus, shared_memory, limits, cores, host_name, environment):
        findings += attempt(check)
    findings += attempt(disks, run_directory)
    return findings


def attempt(check, *arguments) -> list[Finding]:
    """Run a check. If the check itself fails, report that, so that the others still run."""
    try:
        return list(check(*arguments))
    except Exception as error:
        text = f"the check failed ({first_line(error)})"
        return [Finding("WARN", check.__name__, text, "check that by hand")]


def first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return text[:200].rstrip(": ")


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
    if "torch" in missing:
        return
    build = torch_build()
    text = f"{build['__version__']}, Python {platform.python_version()}"
    numbers = re.findall(r"\d+", build["__version__"])
    version = (int(numbers[0]), int(numbers[1]))
    if version < (2, 6):
        yield Finding("FAIL", "PyTorch", f"{text}: 2.6 or newer is needed", INSTALL)
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


def gpus():
    """The GPUs that this process may use."""
    processes = nvidia_smi("compute-apps", ["gpu_uuid", "pid"])
    rows = [row for row in nvidia_smi("gpu", GPU_FIELDS) if is_visible(row)]
    for row in rows:
        yield from gpu_problems(row, processes)
    count = len(rows) or count_gpus()
    if count == 0:
        yield Finding("OK", "GPUs", "none: uses the CPU")
        return
    names = sorted({row["name"] for row in rows})
    text = f"{count} x {' and '.join(names) or 'GPU'}"
    if rows:
        text += f", driver {rows[0]['driver_version']}"
    yield unsuitable_build(text, rows) or Finding("OK", "GPUs", text)


def count_gpus() -> int:
    """The number of GPUs that this process may use, without PyTorch."""
    if not report.has_gpu():
        return 0
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in os.environ:
            return len([device for device in os.environ[name].split(",") if device not in HIDE_ALL])
    with suppress(RuntimeError):
        rows = nvidia_smi("gpu", ["uuid"])
        if rows or shutil.which("nvidia-smi"):
            return len(rows)
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")  # AMD's; 0: a CPU
    amd = [node for node in nodes if node.read_text().strip() not in ("", "0")]
    return len(amd) or len(list(Path("/dev").glob("nvidia[0-9]*")))


def torch_build() -> dict:
    """torch.version: __version__, cuda and hip; PyTorch itself takes seconds to import."""
    package = importlib.util.find_spec("torch").origin
    return runpy.run_path(str(Path(package).with_name("version.py")))


def is_visible(gpu: dict[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES shows this GPU to this process, by its index or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", gpu["index"]).split(",")
    return gpu["index"] in visible or gpu["uuid"] in visible


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
        yield Finding("FAIL", "GPUs", text, remedy)
    used = gpu["memory.used"]
    if number(used) > 1024:
        pids = [process["pid"] for process in processes if process["gpu_uuid"] == gpu["uuid"]]
        text = f"{used} of {gpu['memory.total']} MiB of GPU {index} are in use by process "
        text += ", ".join(pids) or "unknown"
        remedy = "if it is left over from your training, kill it"
        yield Finding("WARN", "GPU memory", text, remedy)
    limit = gpu["power.limit"]
    default = gpu["power.default_limit"]
    if number(limit) < 0.9 * number(default):
        text = f"the power of GPU {index} is limited to {limit} of {default} W"
        remedy = f"nvidia-smi -i {index} -pl {default}, or ask the administrators"
        yield Finding("WARN", "GPU power", text, remedy)


OLDEST_DRIVER = {"12": 525, "13": 580}  # for each CUDA version, from NVIDIA's compatibility table


def unsuitable_build(found: str, rows: list[dict[str, str]]) -> Finding | None:
    """A finding if this PyTorch cannot use the GPUs: it has no CUDA, or the driver is too old."""
    build = torch_build()
    cuda = build["cuda"]
    text = f"PyTorch {build['__version__']}"
    remedy = "TORCH_INDEX=cu126 scripts/quickstart.sh (from driver 525 on), or train on the CPU: "
    remedy += "export CUDA_VISIBLE_DEVICES="
    if not cuda and not build.get("hip") and not build.get("xpu"):
        return Finding("WARN", "GPUs", f"{text} is built for CPUs, and there are {found}", remedy)
    if not rows or not cuda:
        return None
    driver = rows[0]["driver_version"]
    needed = OLDEST_DRIVER.get(cuda.split(".")[0], 0)
    if int(driver.split(".")[0]) >= needed:
        return None
    text += f" for CUDA {cuda} needs driver {needed} (or NVIDIA's cuda-compat), not {driver}"
    return Finding("WARN", "GPU driver", text, f"update the driver, or {remedy}")


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
        if "No devices" in output:  # Slurm hides those that the job has not requested
            return []
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
    if found <= 2 and share >= 8:  # one core, or its two threads
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
    if several and all(LOOPBACK.match(address) for address in addresses):
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

    return findings or [Finding("OK", "environment", "no harmful variables")]


if __name__ == "__main__":
    main()
