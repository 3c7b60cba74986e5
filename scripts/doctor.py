#!/usr/bin/env python3
"""What is wrong with this machine, or this cluster, in plain words: where, and what to do.

    python scripts/doctor.py                                       this machine
    TRAIN_SCRIPT=scripts/doctor.py sbatch run_distributed.slurm    all nodes of a job, together;
                                                                   so with every launcher

Alone it looks at Python, PyTorch, GPUs, memory, limits, disks, names, environment, data and launch
scripts. In a launch each rank does so; then all of them meet at a store with time limits, which
answers where a collective would hang, so whoever is missing, late or odd is named; then the network
is measured between the nodes, and an all_reduce over all ranks. It takes under a minute and writes
nothing but a file of a few bytes in the run directory, and notes in logs/, which it removes.

One line per finding: OK, WARN or FAIL, what was seen, what was expected, what to do.
Exit code: 0 all is well, 1 a warning, 2 a failure. (In a launch warnings end with 0 too: launchers
take anything else for a crash.)

It needs PyTorch for the GPUs and the all_reduce, and nothing else but Python. It accepts the
options of the trainer, whose place it takes in a launch, and reads --config, --checkpoint-dir,
--data-dir, --dataset and --distributed-backend.
"""

import argparse
import errno
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"doctor.py: error: {sys.executable} is not Python 3.11 or newer: see scripts/site.sh")

REPOSITORY = Path(__file__).resolve().parent.parent
HOST = socket.gethostname()
GIB = 1 << 30
MEET_SECONDS = 20  # that ranks may start later than the first one
MEASURE_SECONDS = 4  # at most, for a pair of nodes
REDUCE_SECONDS = 20  # at most, for all of the all_reduce


@dataclass
class Finding:
    level: str  # OK, WARN or FAIL
    check: str
    observed: str
    expected: str = ""
    remedy: str = ""
    where: str = ""  # hosts or ranks; "": here
    data: dict | None = None  # figures, for programs

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        text = f"{self.level:5}{self.check:17} {where}{self.observed}"
        if self.level != "OK":
            text += f"; expected: {self.expected}. {self.remedy[:1].upper()}{self.remedy[1:]}"
        return text


def ok(check: str, observed: str) -> Finding:
    return Finding("OK", check, observed)


def main() -> int:
    # c10d says in many lines what we say in one.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    args = parse(sys.argv[1:])
    if args.quick:
        return quick(args)
    if args.nnodes:  # as cluster_train.sh calls it, in torchrun's place
        return start_ranks(args)
    rank = rank_of_launch()
    if rank is None:
        if args.rest:
            return refuse(f"{args.rest[0]} is no option of mine alone: see --help (in a launch, "
                          "those of the training are)")  # fmt: skip
        return report(local_checks(args) + guarded([launch_scripts, data], args), args.json)
    return Rank(args, *rank).run()


def parse(argv: list[str]) -> argparse.Namespace:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="doctor.py", description=__doc__, **style)
    add = parser.add_argument
    add("--json", action="store_true", help="findings as JSON, for programs")
    add("--quick", action="store_true", help="what cluster_train.sh asks before each launch")
    add("--config", help="of the training: where its data and its run directory are")
    add("--checkpoint-dir", "--save-dir", help="run directory [of the config, else checkpoints]")
    add("--data-dir", help="[of the config, else data]")
    add("--dataset", help="[of the config, else mnist_sample]")
    add("--distributed-backend", help="nccl or gloo [nccl on GPUs, else gloo]")
    add("--nnodes", type=int, help=argparse.SUPPRESS)
    add("--node-rank", type=int, help=argparse.SUPPRESS)
    add("--nproc-per-node", type=int, help=argparse.SUPPRESS)
    add("--master-addr", help=argparse.SUPPRESS)
    add("--master-port", type=int, help=argparse.SUPPRESS)
    add("--needs", default="torch", help=argparse.SUPPRESS)
    args, args.rest = parser.parse_known_args(argv)
    in_config = {}
    if args.config:
        try:
            lines = Path(args.config).read_text(errors="replace").splitlines()
        except OSError as error:
            sys.exit(refuse(f"cannot read --config {args.config}: {error.strerror}"))
        found = (re.match(r"(\w+):\s*(.*?)\s*(#.*)?$", line) for line in lines)
        in_config = {m[1]: m[2].strip("'\"") for m in found if m and m[2] not in ("", "null")}
    defaults = {"checkpoint_dir": "checkpoints", "data_dir": "data", "dataset": "mnist_sample"}
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, in_config.get(name, default))
    return args


def refuse(problem: str) -> int:
    print(f"doctor.py: error: {problem}", file=sys.stderr)
    return 2


def report(findings: list[Finding], as_json: bool) -> int:
    """Print all of it. Returns the exit code."""
    worst = max((["OK", "WARN", "FAIL"].index(f.level) for f in findings), default=0)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1), flush=True)
        return worst
    findings = sorted(findings, key=lambda finding: ["OK", "WARN", "FAIL"].index(finding.level))
    lines = [str(finding) for finding in findings]  # the worst stand last, where the eye is
    count = {level: sum(f.level == level for f in findings) for level in ("FAIL", "WARN", "OK")}
    words = ", ".join(f"{number} {level}" for level, number in count.items() if number)
    lines.append(f"doctor.py: {words}")
    os.write(1, ("\n".join(lines) + "\n").encode())  # in one piece: other ranks may write, too
    return worst


def run_command(*command: str, timeout: float = 10) -> str:
    """What it prints; "" if it fails or is not there."""
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        return result.stdout if result.returncode == 0 else ""
    return ""


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


# ------------------------------------------------------------------------------- THIS MACHINE


def local_checks(args) -> list[Finding]:
    """Of this machine, in the environment as it is."""
    checks = [software, gpus, shared_memory, limits, disks, cores, name_of_host, environment]
    return guarded(checks, args)


def guarded(checks, args) -> list[Finding]:
    """A machine that is strange in one way is no reason to say nothing of the rest."""
    findings = []
    for check in checks:
        try:
            findings += check(args)
        except Exception as error:
            what = f"{check.__name__} could not be looked at ({type(error).__name__}: {error})"
            findings.append(Finding("WARN", "doctor", what, "an answer", "look at it yourself"))
    return findings


def software(args) -> list[Finding]:
    version = platform.python_version()
    if missing := missing_packages(args):
        remedy = "pip install -r requirements.txt, or see scripts/site.sh"
        return [Finding("FAIL", "packages", missing, "all of them", remedy)]
    import torch

    numbers = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    found = f"{torch.__version__}, Python {version}"
    if numbers < (2, 10):
        remedy = "pip install -r requirements.txt"
        return [Finding("FAIL", "PyTorch", found, "2.10 or newer", remedy)]
    return [ok("PyTorch", found)]


def missing_packages(args) -> str:
    missing = [name for name in args.needs.split(",") if not importlib.util.find_spec(name)]
    return f"{sys.executable} has no {', '.join(missing)}" if missing else ""


def nvidia_smi(what: str, fields: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-WHAT`; [] without it. Raises RuntimeError with its complaint."""
    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return []
    if result.returncode:
        complaint = (result.stdout + result.stderr).strip().split("\n")[0]
        raise RuntimeError(f"nvidia-smi: {complaint}")
    rows = [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def gpu_devices() -> list[str]:
    return glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/kfd") + glob.glob("/dev/dxg")


def gpus(args) -> list[Finding]:
    """Those that PyTorch sees. Asks nvidia-smi, since asking CUDA would occupy each of them."""
    fields = "index,uuid,memory.total,memory.free,ecc.errors.uncorrected.volatile.total"
    fields += ",power.limit,power.default_limit,driver_version"
    rows = nvidia_smi("gpu", fields)
    if not importlib.util.find_spec("torch"):
        return []
    import torch

    count, driver = torch.cuda.device_count(), f", driver {rows[0][-1]}" if rows else ""
    if not count and not rows and not gpu_devices():
        return [ok("GPUs", "none: trains on the CPU")]
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    mine = {str(device.uuid).removeprefix("GPU-") for device in devices}
    rows = [row for row in rows if row[1].removeprefix("GPU-") in mine or not mine]
    findings = gpu_processes(mine)
    for row in rows:
        findings += gpu_state(*row[:-1])
    if not count:
        what = f"PyTorch {torch.__version__} sees none of the GPUs here{driver}"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            what += ": CUDA_VISIBLE_DEVICES is empty"
        remedy = "ask the scheduler for GPUs; or a PyTorch that fits the driver: pytorch.org"
        expected = "some, unless you train on the CPU"
        return [*findings, Finding("WARN", "GPUs", what, expected, remedy)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    peers = sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    names = " and ".join(sorted({device.name for device in devices}))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"
    told = f"{count} x {names}, CUDA {torch.version.cuda}, NCCL {nccl}{driver}"
    if pairs:
        told += f", {peers} of {len(pairs)} pairs reach each other's memory (P2P)"
    return [*findings, ok("GPUs", told)]


def gpu_state(index, _, total, free, errors, limit, default) -> list[Finding]:
    """Of one GPU, in nvidia-smi's words; where it says [N/A], there is nothing to compare."""
    findings = []
    if errors.isdigit() and int(errors):
        what = f"GPU {index} has {errors} uncorrected memory errors"
        remedy = "reset it or leave it out: tell the admins"
        findings.append(Finding("FAIL", "GPU memory", what, "none", remedy))
    with suppress(ValueError):
        if float(free) < 0.8 * float(total):
            what = f"GPU {index} has only {free} of {total} MiB free"
            remedy = "is another job on it? See nvidia-smi"
            findings.append(Finding("WARN", "GPU memory", what, "nearly all", remedy))
    with suppress(ValueError):
        if float(limit) < 0.9 * float(default):
            what = f"GPU {index} is capped at {limit} of {default} W"
            remedy = f"nvidia-smi -i {index} -pl {default}, or ask the admins"
            findings.append(Finding("WARN", "GPU power", what, "its default", remedy))
    return findings


def gpu_processes(mine: set[str]) -> list[Finding]:
    """Left over from another training, perhaps."""
    findings = []
    for pid, gpu, used in nvidia_smi("compute-apps", "pid,gpu_uuid,used_memory"):
        owner = run_command("ps", "-o", "user=,args=", "-p", pid).strip()
        is_ours = not mine or gpu.removeprefix("GPU-") in mine
        if not is_ours or "doctor.py" in owner:
            continue
        what = f"process {pid} ({owner[:60] or 'unknown'}) holds {used} MiB on {gpu[:12]}"
        remedy = f"if it is yours and left over: kill {pid}"
        findings.append(Finding("WARN", "GPU processes", what, "none before a launch", remedy))
    return findings


def shared_memory(_args) -> list[Finding]:
    if not os.path.isdir("/dev/shm"):
        return []
    usage = shutil.disk_usage("/dev/shm")
    seen = f"{gib(usage.free)} of {gib(usage.total)} free"
    if usage.free < GIB:
        remedy = "DataLoader workers and NCCL need it: docker run --shm-size=8g, or empty /dev/shm"
        return [Finding("WARN", "/dev/shm", seen, "1 GiB or more", remedy)]
    return [ok("/dev/shm", seen)]


def limits(_args) -> list[Finding]:
    findings = []
    wanted = [("open files", resource.RLIMIT_NOFILE, 1024, "ulimit -n 65536")]
    wanted += [("processes", resource.RLIMIT_NPROC, 1024, "ulimit -u 4096")]
    if os.path.isdir("/dev/infiniband"):
        wanted += [("locked memory", resource.RLIMIT_MEMLOCK, GIB, "ulimit -l unlimited")]
    seen = []
    for name, limit, least, remedy in wanted:
        soft, _ = resource.getrlimit(limit)
        seen.append(f"{name} {'unlimited' if soft < 0 else soft}")
        if 0 <= soft < least:
            remedy += " (in scripts/site.sh), or ask the admins"
            findings.append(Finding("WARN", "ulimit", seen[-1], f"{least} or more", remedy))
    return findings or [ok("ulimit", ", ".join(seen))]


def disks(args) -> list[Finding]:
    findings, seen = [], []
    places = {"run directory": Path(args.checkpoint_dir), "temporary files": tempfile.gettempdir()}
    for what, place in places.items():
        place = nearest(Path(place))
        usage = shutil.disk_usage(place)
        said = f"{what} {place}: {gib(usage.free)} free"
        seen.append(said)
        if not os.access(place, os.W_OK):
            remedy = "choose another --checkpoint-dir, or TMPDIR"
            findings.append(
                Finding("FAIL", "disk", f"{what} {place} is not writable", "it is", remedy)
            )
        elif usage.free < 100 << 20:
            remedy = "delete what is not needed, or choose another place"
            findings.append(Finding("FAIL", "disk", f"{said}: it is full", "5 GiB or more", remedy))
        elif usage.free < 2 * GIB:
            remedy = "a checkpoint needs three times the model (with --keep 3, nine times)"
            findings.append(Finding("WARN", "disk", said, "2 GiB or more", remedy))
    return findings or [ok("disk", "; ".join(seen))]


def nearest(place: Path) -> Path:
    """The place itself, or the directory that it will be made in."""
    place = place.absolute()
    return place if place.exists() else nearest(place.parent)


def my_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def tasks_per_node() -> int:
    """Of this Slurm step; 0 outside of one."""
    return int(re.match(r"\d*", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))[0] or 0)


def cores(_args) -> list[Finding]:
    mine, all_cores = my_cores(), os.cpu_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or tasks_per_node() or 1)
    seen = f"{mine} of this machine's {all_cores} are this process's"
    share = all_cores // ranks
    if (mine == 1 and share > 1) or (mine == 2 and share > 7):  # a core, or its two threads
        remedy = "srun --cpus-per-task=N (from Slurm 22.05 srun does not take it from sbatch)"
        return [Finding("WARN", "cores", seen, f"{share} per rank", remedy)]
    return [ok("cores", seen)]


def name_of_host(_args) -> list[Finding]:
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(HOST, None)}
    except OSError as error:
        remedy = f"a line in /etc/hosts: ADDRESS {HOST}"
        return [Finding("WARN", "host name", f"{HOST} is unknown ({error})", "an address", remedy)]
    seen = f"{HOST} is {', '.join(sorted(addresses))}"
    loops = all(a.startswith("127.") or a == "::1" or "::ffff:127." in a for a in addresses)
    if loops and others_to_reach():
        remedy = f"in /etc/hosts, {HOST} should be its own address (Debian writes 127.0.1.1); gloo"
        remedy += " and c10d rendezvous take what stands there. Until then: GLOO_SOCKET_IFNAME=eth0"
        return [Finding("WARN", "host name", f"{seen}: this machine itself", "an address", remedy)]
    return [ok("host name", seen)]


def others_to_reach() -> bool:
    """Whether this is part of a job of several nodes; alone, a loopback name harms nobody."""
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "NNODES"):
        if (os.environ.get(name) or "1") != "1":
            return True
    return False


SLOW = "it switches off the fast way between GPUs, for all that follows"
OLD = "an old name; time limits of collectives are on by default"
HARMFUL = {
    "NCCL_P2P_DISABLE": ("1", SLOW, "unset it; if P2P really hangs, look at ACS in the BIOS"),
    "NCCL_SHM_DISABLE": ("1", SLOW, "unset it; if /dev/shm is too small, enlarge it"),
    "NCCL_IB_DISABLE": ("1", "all goes over TCP instead of InfiniBand", "unset it"),
    "NCCL_NET_GDR_LEVEL": ("0|LOC", SLOW, "unset it: NCCL knows the topology"),
    "NCCL_IB_GID_INDEX": (".+", "the right one differs by node", "unset it: NCCL finds it"),
    "NCCL_TREE_THRESHOLD": (".+", "gone since NCCL 2.5", "unset it"),
    "NCCL_BLOCKING_WAIT": ("1", OLD, "unset it"),
    "NCCL_ASYNC_ERROR_HANDLING": (".+", "renamed to TORCH_NCCL_ASYNC_ERROR_HANDLING", "unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "it makes each collective wait for the GPU", "unset it"),
    "CUDA_LAUNCH_BLOCKING": ("1", "each kernel waits for the one before: much slower", "unset it"),
    "NCCL_DEBUG": ("INFO|TRACE", "megabytes of log, once per rank", "unset it for the long run"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "it checks each collective: slower", "unset it"),
    "NCCL_SOCKET_IFNAME": ("lo", "NCCL then reaches this machine only", "unset it"),
    "GLOO_SOCKET_IFNAME": (r"lo|\^.*", "gloo knows no ^, and lo is this machine only", "unset it"),
    "PYTHONHASHSEED": ("random", "data orders built on hash() differ by rank", "unset it"),
}  # fmt: skip


def environment(_args) -> list[Finding]:
    findings, debug = [], os.environ.get("LOG_LEVEL") == "DEBUG"  # which asks for it, for once
    for name, (value, why, remedy) in HARMFUL.items():
        now = os.environ.get(name)
        if not now or not re.fullmatch(value, now) or (debug and name.endswith("DEBUG")):
            continue
        findings.append(Finding("WARN", "environment", f"{name}={now}: {why}", "unset", remedy))
    here = {name for _, name in socket.if_nameindex()}
    for name in (os.environ.get("GLOO_SOCKET_IFNAME") or "").split(","):
        if name and name != "lo" and not name.startswith("^") and name not in here:
            what = f"GLOO_SOCKET_IFNAME={name}, but the interfaces are {', '.join(sorted(here))}"
            findings.append(
                Finding("FAIL", "environment", what, "one of them", "unset it, or mend it")
            )
    return findings or [ok("environment", "nothing in it that slows or breaks a training")]


# ---------------------------------------------------------------------------- THE REPOSITORY


def launch_scripts(_args) -> list[Finding]:
    findings, kinds = [], (".sh", ".slurm", ".sbatch", ".pbs")
    scripts = sorted(path for path in REPOSITORY.iterdir() if path.suffix in kinds)
    for path in scripts:
        findings += launch_script(path)
    return findings or [ok("launch scripts", f"{len(scripts)} in {REPOSITORY}: nothing strange")]


def launch_script(path: Path) -> list[Finding]:
    """Directives that Slurm or PBS will not see, or that contradict each other."""
    findings, options, body = [], {}, False
    text = path.read_text(errors="replace")

    def complain(level, line, what, expected, remedy):
        where = f"{path.name}:{line}"
        findings.append(Finding(level, "launch scripts", what, expected, remedy, where))

    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"#\s+(SBATCH|PBS)\s+-", line) or re.match(r"##(SBATCH|PBS)\s", line):
            what = f"`{line.strip()}` is a comment, which the scheduler does not read"
            complain("WARN", number, what, "#SBATCH, without a space", "mend it, or delete it")
        elif re.match(r"#(SBATCH|PBS)\s", line):
            if body:
                what = f"`{line.strip()}` stands after the first command, so it is ignored"
                complain("WARN", number, what, "all directives first", "move it up")
            for name, value in re.findall(r"--([a-z-]+)(?:[= ]([^ ]+))?", line):
                options[name] = (value, number)
        elif line.strip() and not line.startswith("#"):
            body = True
    tasks, number = options.get("ntasks-per-node", ("1", 0))
    commands = (line for line in text.splitlines() if not re.match(r"\s*(#|echo|.*\bfail\b)", line))
    starter = re.compile(r"\btorchrun\b|torch\.distributed\.(run|launch)|cluster_train\.sh")
    starts = any(starter.search(line) for line in commands)
    if starts and tasks != "1":
        what = f"--ntasks-per-node={tasks}, but torchrun starts the workers of a node by itself"
        complain("WARN", number, what, "--ntasks-per-node=1", "one task per node")
    if {"gpus-per-task", "gpus-per-node"} <= options.keys():
        what, number = "--gpus-per-task beside --gpus-per-node", options["gpus-per-task"][1]
        remedy = "drop --gpus-per-task: with it each task sees one GPU, and NVLink is lost"
        complain("WARN", number, what, "one of them", remedy)
    for name in ("output", "error"):
        folder, number = options.get(name, ("", 0))
        folder = os.path.dirname(folder)
        if folder and "%" not in folder and not (path.parent / folder).is_dir():
            what = f"--{name} in {folder}/, which is not there: Slurm ends the job without a word"
            complain("FAIL", number, what, "a directory", f"mkdir -p {path.parent / folder}")
    return findings


def data(args) -> list[Finding]:
    """Whether --data-dir holds what --dataset needs."""
    kinds = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw", "imagefolder": "train"}
    if args.dataset not in kinds:
        return [ok("data", f"{args.dataset} needs nothing")]
    folder = Path(args.data_dir, kinds[args.dataset])
    if folder.is_dir() and os.access(folder, os.R_OK):
        return [ok("data", f"{args.dataset} is in {folder}")]
    if args.dataset == "imagefolder":
        remedy = "--data-dir DIR with DIR/train/CLASS/ and DIR/val/CLASS/"
        return [Finding("FAIL", "data", f"{folder} is not there", "it is", remedy)]
    remedy = "the training downloads it; where there is no network, copy it there"
    return [Finding("WARN", "data", f"{folder} is not there", "it is", remedy)]


# ------------------------------------------------------------------------- BEFORE EACH LAUNCH


class Refused(Exception):
    """A launch that would fail: (what is wrong, what to do, its cause for supervise.py)."""

    def __init__(self, text: str, remedy: str = "", cause: str = "configuration"):
        super().__init__(f"{text}: {remedy}" if remedy else text)
        self.text, self.cause = text, cause


def quick(args) -> int:
    """For cluster_train.sh: what would make this node's workers fail. Prints the number of GPUs."""
    try:
        visible = check_launch(args)
    except Refused as refusal:
        print(f"doctor.py: error: {HOST}: {refusal}", file=sys.stderr, flush=True)
        record_failure(refusal.cause, refusal.text)
        return 2
    checks = [environment, shared_memory] + [gpus] * bool(gpu_devices())
    for finding in guarded(checks, args):
        if finding.level != "OK":
            text = f"{finding.observed}: {finding.remedy}"
            print(f"WARNING: {HOST}: {text}", file=sys.stderr, flush=True)
    try:
        print(visible, flush=True)
    except BrokenPipeError:  # who asked was told to stop
        os._exit(2)
    return 0


def record_failure(cause: str, reason: str) -> None:
    """For supervise.py, if nobody was first."""
    if file := os.environ.get("FAILURE_FILE"):
        with suppress(OSError), open(file, "x") as first:
            json.dump({"cause": cause, "reason": reason, "host": HOST}, first)


def check_launch(args) -> int:
    """The number of visible GPUs; or raises Refused.

    PyTorch is imported only where there are GPUs: on others it would cost seconds for nothing.
    """
    if missing := missing_packages(args):
        raise Refused(missing, "pip install -r requirements.txt, or scripts/site.sh")
    visible = 0
    if gpu_devices():
        import torch

        visible = torch.cuda.device_count()
    workers = args.nproc_per_node or visible or 1
    if args.distributed_backend == "nccl" and visible < workers:
        raise Refused(f"{workers} workers for nccl, but {visible} visible GPUs")
    master, port, nodes = args.master_addr, args.master_port, args.nnodes
    remedy = "set MASTER_ADDR to an address of it"
    try:
        address = socket.getaddrinfo(master, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise Refused(f"master {master} is unknown here ({error.strerror})", remedy) from None
    if nodes > 1 and args.node_rank == 0:
        kind = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    text = f"port {port} is busy here, on the master"
                    raise Refused(text, "set another MASTER_PORT on all nodes", "port") from None
                text = f"node rank 0 is here, but master {master} ({address[0]}) is not"
                raise Refused(f"{text}: {error.strerror}") from None
    elif nodes > 1:
        if address[0].startswith("127."):
            text = f"master {master} is {address[0]} here, this node itself"
            raise Refused(text, "set MASTER_ADDR to an address that all nodes reach")
        try:
            socket.create_connection(address[:2], timeout=10).close()
        except ConnectionRefusedError:
            pass  # it answers; its store comes up in a moment
        except OSError as error:
            text = f"cannot reach master {master} ({address[0]}): {error.strerror or error}"
            raise Refused(text, cause="node lost") from None
    return visible


# ------------------------------------------------------------------------------ ALL OF A JOB


def start_ranks(args) -> int:
    """This node's ranks, as torchrun would start them, which waits for nodes that never come."""
    local, ranks = args.nproc_per_node, []
    own = ["--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port"]
    pairs = zip(sys.argv, ["", *sys.argv])
    words = [word for word, before in pairs if word not in own and before not in own]
    for rank in range(local):
        env = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(local)}
        env |= {"RANK": str(args.node_rank * local + rank), "WORLD_SIZE": str(args.nnodes * local)}
        env |= {"MASTER_ADDR": args.master_addr, "MASTER_PORT": str(args.master_port)}
        env |= {"NNODES": str(args.nnodes)}
        ranks.append(subprocess.Popen([sys.executable, *words], env=env))
    try:
        codes = [process.wait() for process in ranks]
        return 2 if any(codes) else 0
    except BaseException:
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        raise


def rank_of_launch() -> tuple[int, int, int, int, str, int] | None:
    """(rank, world size, local rank, local world size, master, port); None if this is alone."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        numbers = [env["RANK"], env["WORLD_SIZE"], env.get("LOCAL_RANK", "0")]
        numbers += [env.get("LOCAL_WORLD_SIZE", "1")]
        master, port = env.get("MASTER_ADDR", "localhost"), env.get("MASTER_PORT", "29500")
        return (*map(int, numbers), master, int(port))
    step = int(env.get("SLURM_STEP_ID", str(0xFFFFFFFF)))
    if step >= 0xFFFFFFF0 or ("SLURM_PTY_PORT" in env and os.isatty(0)):
        return None
    numbers = [env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"], env["SLURM_LOCALID"]]
    numbers.append(tasks_per_node())
    port = env.get("MASTER_PORT") or str(15000 + (16 * int(env["SLURM_JOB_ID"]) + step) % 15000)
    master = env.get("MASTER_ADDR") or (hosts_of_job() or ["localhost"])[0]
    return (*map(int, numbers), master, int(port))


def hosts_of_job() -> list[str]:
    """The nodes of the job, rank 0's first; [] if nobody says."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if nodes:
        return run_command("scontrol", "show", "hostnames", nodes).split()
    with suppress(OSError, KeyError):
        lines = Path(os.environ["PBS_NODEFILE"]).read_text().split()
        return list(dict.fromkeys(lines))
    return []


def interface_towards(host: str, port: int) -> dict:
    """{"address", "interface", "mtu"} of this machine on the way to the host. Sends nothing."""
    found = {"address": "127.0.0.1", "interface": "lo", "mtu": 65536}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        found["address"] = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == found["address"]:
                    answer = fcntl.ioctl(probe, 0x8921, struct.pack("256s", name.encode()))
                    found |= {"interface": name, "mtu": struct.unpack("i", answer[16:20])[0]}
    return found


def sha(path) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]
    except OSError as error:
        return f"unreadable ({error.strerror})"


class Rank:
    """One rank of a launch. It tells the store what it does next, and leaves the same in a note in
    logs/, which may be shared where the network is broken; rank 0 asks, waits, and reports.
    """

    def __init__(self, args, rank, world_size, local_rank, local_size, master, port):
        self.args, self.rank, self.world_size = args, rank, world_size
        self.local_rank, self.local_size = local_rank, local_size
        self.master, self.port = master, port
        self.store, self.began, self.card = None, time.monotonic(), None
        self.is_told, self.doing = False, "starting"
        job = os.environ.get("RUN_NONCE") or os.environ.get("SLURM_JOB_ID") or f"{master}-{port}"
        self.notes = REPOSITORY / "logs" / ("doctor_" + re.sub(r"\W", "_", job))

    def run(self) -> int:
        signal.alarm(120)  # whatever hangs, it is over then
        self.findings: list[Finding] = []
        try:
            self.say("importing PyTorch")
            self.card = self.make_card()
            if self.meet():
                self.say("looking at this machine")
                if self.local_rank == 0:
                    self.findings += local_checks(self.args)
                else:
                    self.findings += [f for f in cores(self.args) if f.level != "OK"]
                for finding in self.findings:
                    finding.where = HOST
                if self.rank == 0:
                    self.findings += guarded([launch_scripts, data], self.args)
                self.exchange()
        except Exception as error:
            first = str(error).strip().split("\n")[0][:200]
            what = f"rank {self.rank} on {HOST} failed while {self.doing}"
            what += f" ({type(error).__name__}: {first})"
            self.findings.append(Finding("FAIL", "doctor", what, "an answer", "see its log"))
            if self.card is None:
                self.findings += local_checks(self.args)  # they may say why
        finally:
            with suppress(OSError):
                (self.notes / f"{self.rank}.json").unlink()
                self.notes.rmdir()
        return self.end()

    def end(self) -> int:
        """On rank 0 all findings; elsewhere what could not be told there."""
        code = 0
        if self.rank == 0:
            code = report(merge(self.findings), self.args.json)
            if code == 2:
                worst = next(f for f in self.findings if f.level == "FAIL")
                record_failure("configuration", f"{worst.check}: {worst.observed}")
        elif not self.is_told:
            for finding in self.findings:
                if finding.level != "OK":
                    print(finding, file=sys.stderr, flush=True)
            code = 2
            # Our exit may end all others. Rank 0 tells of us too: let it, if it lives.
            time.sleep(max(0.0, self.began + 50 - time.monotonic()))
        sys.stdout.flush()
        os._exit(2 if code == 2 else 0)  # whatever still hangs

    def say(self, doing: str) -> None:
        """What this rank does next."""
        self.doing = doing
        with suppress(OSError):
            self.notes.mkdir(parents=True, exist_ok=True)
            note = {"host": HOST, "doing": doing}
            (self.notes / f"{self.rank}.json").write_text(json.dumps(note))
        if self.store:
            self.set(f"doing/{self.rank}", doing)

    def set(self, key: str, value) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float):
        """A value of the store; None if it is not there in time."""
        began, wait = time.monotonic(), 0.01
        while not self.store.check([key]):
            if time.monotonic() > began + seconds:
                return None
            time.sleep(wait)
            wait = min(1.5 * wait, 0.1)
        return json.loads(self.store.get(key))

    def get_all(self, kind: str, ranks, seconds: float) -> dict:
        """{rank: value of kind/rank}, with one deadline for all."""
        end = time.monotonic() + seconds
        return {rank: self.get(f"{kind}/{rank}", end - time.monotonic()) for rank in ranks}

    def make_card(self) -> dict:
        """What the ranks compare."""
        import torch

        visible = torch.cuda.device_count()
        index = self.local_rank if self.local_rank < visible else 0
        gpu = torch.cuda.get_device_properties(index) if visible else None
        backend = self.args.distributed_backend or ("nccl" if visible else "gloo")
        same = {
            "PyTorch": torch.__version__,
            "Python": platform.python_version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if visible else "none",
            "train_distributed.py": sha(REPOSITORY / "train_distributed.py"),
            "config": sha(self.args.config) if self.args.config else "none",
            "backend": backend,
            "GPU": gpu.name if gpu else "none",
            "visible GPUs": visible,
            "cores per rank": my_cores(),
            "ranks per node": self.local_size,
        }
        way = interface_towards(self.master, self.port)
        if self.local_rank == 0:
            same["mtu"] = way["mtu"] if way["interface"] != "lo" else None
        return {
            "host": HOST,
            "same": same,
            "way": way,
            "uuid": str(gpu.uuid) if gpu else None,
            "backend": backend,
            "index": index,
        }

    # ---- meeting

    def meet(self) -> bool:
        """At a store on the master. Returns whether it was reached."""
        from datetime import timedelta

        import torch.distributed as dist

        here = f"{self.master}:{self.port}"
        self.say(f"reaching the store at {here}")
        try:
            self.store = dist.TCPStore(
                self.master,
                self.port,
                is_master=self.rank == 0,
                timeout=timedelta(seconds=MEET_SECONDS),
                wait_for_workers=False,
            )
        except Exception as error:  # DistError, and others of older versions
            why = self.why_not(str(error))
            text = f"rank {self.rank} on {HOST} has no store at {here}: {why}"
            self.say(text)
            remedy = (
                "is MASTER_ADDR an address of rank 0's node, the port free, no firewall between?"
            )
            self.findings.append(Finding("FAIL", "meeting", text, "a store", remedy))
            return False
        self.set(f"card/{self.rank}", self.card)
        self.say("waiting for rank 0")
        return True

    def why_not(self, error: str) -> str:
        """In a word, from a connection of our own."""
        if self.rank == 0:
            return "the port is in use" if "EADDRINUSE" in error else error.split("\n")[0][:200]
        try:
            socket.create_connection((self.master, self.port), timeout=5).close()
            return "it answers, but not as a store"
        except socket.gaierror:
            return f"{self.master} is unknown here"
        except TimeoutError:
            return "no answer within 5 s (a firewall drops packets, or the address is wrong)"
        except OSError as problem:
            return problem.strerror or str(problem)

    def exchange(self) -> None:
        """Rank 0 leads: who is there, who differs; clocks, files, network, all_reduce."""
        if self.rank == 0:
            self.set("present", self.call_the_roll())
        present = self.get("present", 2 * MEET_SECONDS + 10)
        if present is None or str(self.rank) not in present:
            text = f"rank {self.rank} on {HOST} was not called by rank 0 on {self.master}"
            self.findings.append(Finding("FAIL", "meeting", text, "it is", "see the log of rank 0"))
            return
        self.hosts = {int(rank): host for rank, (host, _) in present.items()}
        self.addresses = {int(rank): address for rank, (_, address) in present.items()}
        self.leaders: dict[str, int] = {}
        for rank, host in self.hosts.items():
            self.leaders.setdefault(host, rank)
        if self.rank in self.leaders.values():
            self.compare_clocks()
            self.share_a_file()
            self.measure_network()
        if len(self.hosts) == self.world_size > 1:
            self.say("waiting for the network to be measured")
            if self.rank == 0:
                self.set("reduce", True)  # all at once, since it may take a certain time only
            self.get("reduce", 60)
            self.reduce()
        if self.rank:
            self.say("done")
            self.set(f"findings/{self.rank}", [asdict(f) for f in self.findings])
            self.is_told = True
            with suppress(Exception):  # rank 0 may leave while we ask
                self.get("goodbye", 30)
            return
        told = self.get_all("findings", [rank for rank in self.hosts if rank], 10)
        for rank, findings in told.items():
            if findings is None:
                doing = self.get(f"doing/{rank}", 0)
                text = f"rank {rank} on {self.hosts[rank]} went silent while {doing}"
                self.findings.append(Finding("FAIL", "ranks", text, "an answer", "see its log"))
            self.findings += [Finding(**finding) for finding in findings or []]
        self.set("goodbye", True)
        time.sleep(0.5)

    def call_the_roll(self) -> dict:
        """Rank 0: who came, who did not, and who is unlike the others. {rank: (host, address)}"""
        cards = self.get_all("card", range(self.world_size), MEET_SECONDS)
        missing = [rank for rank, card in cards.items() if card is None]
        cards = {rank: card for rank, card in cards.items() if card}
        hosts = hosts_of_job()
        for rank in missing:
            node = rank // self.local_size
            host = hosts[node] if node < len(hosts) else f"node {node}"
            what = f"rank {rank} on {host} did not come within {MEET_SECONDS} s"
            note = self.notes / f"{rank}.json"
            with suppress(OSError, ValueError):
                if note.stat().st_mtime > time.time() - 120:  # not another doctor's
                    fact = json.loads(note.read_text())
                    what = f"rank {rank} on {fact['host']} runs, but has not come: {fact['doing']}"
            remedy = f"see the log of {host}; does it reach {self.master}:{self.port}?"
            self.findings.append(Finding("FAIL", "ranks", what, "all ranks", remedy))
        if not missing:
            seen = {card["host"] for card in cards.values()}
            told = f"all {self.world_size} came, on {', '.join(sorted(seen))}"
            self.findings.append(ok("ranks", told))
        self.findings += compare_cards(cards)
        return {rank: (card["host"], card["way"]["address"]) for rank, card in cards.items()}

    # ---- looking

    def compare_clocks(self) -> None:
        """Each node's leader asks rank 0 for the time; half of the way there and back is added."""
        others = [rank for rank in self.leaders.values() if rank]
        self.say("comparing clocks")
        if self.rank:
            asked = time.monotonic()
            self.set(f"clock/ask/{self.rank}", 1)
            theirs = self.get(f"clock/answer/{self.rank}", 15)
            way = time.monotonic() - asked
            off = theirs and time.time() - way / 2 - theirs
            self.set(f"clock/off/{self.rank}", off and (0.0 if abs(off) < way else off))
            return
        waiting, deadline = set(others), time.monotonic() + 10
        while waiting and time.monotonic() < deadline:
            for rank in list(waiting):
                if self.store.check([f"clock/ask/{rank}"]):
                    self.set(f"clock/answer/{rank}", time.time())
                    waiting.discard(rank)
            time.sleep(0.002)
        furthest = 0.0
        for host, rank in self.leaders.items():
            off = self.get(f"clock/off/{rank}", max(1, deadline - time.monotonic())) if rank else 0
            furthest = max(furthest, abs(off or 0))
            if off is not None and abs(off) > 2:
                what = f"{host}'s clock is {off:+.0f} s off that of {HOST}"
                remedy = "deadlines and file times will be wrong: start chrony or ntpd there"
                self.findings.append(Finding("WARN", "clocks", what, "less than 2 s", remedy))
        if furthest <= 2 and others:
            self.findings.append(ok("clocks", f"{furthest:.2f} s apart at most"))

    def share_a_file(self) -> None:
        """Does every node see, in the run directory, what rank 0 writes?"""
        self.say("looking at the run directory")
        directory = Path(self.args.checkpoint_dir).absolute()
        if self.rank == 0:
            place = nearest(directory)  # a file no node has looked for yet: NFS remembers those
            file, token = place / f".doctor_{HOST}_{os.getpid()}", f"{time.time()}"
            try:
                file.write_text(token)
            except OSError as error:
                what = f"{place} cannot be written to ({error.strerror})"
                remedy = "choose another --checkpoint-dir"
                self.findings.append(Finding("FAIL", "run directory", what, "it can", remedy))
                file = None
            self.set("file", [str(file), token] if file else None)
            others = [rank for rank in self.leaders.values() if rank]
            saw = self.get_all("saw", others, 15) if file else {}
            late = {self.hosts[rank]: seconds for rank, seconds in saw.items()}
            with suppress(OSError, AttributeError):
                file.unlink()
            blind = [host for host, seconds in late.items() if seconds is None or seconds < 0]
            if blind:
                what = f"{directory} on {', '.join(blind)} is not that of {HOST}"
                remedy = "put --checkpoint-dir on a file system that all nodes share"
                self.findings.append(Finding("FAIL", "run directory", what, "one for all", remedy))
            elif late:
                told = (
                    f"{directory} is shared; what is written shows after {max(late.values()):.2f} s"
                )
                self.findings.append(ok("run directory", told))
            return
        file, token = self.get("file", 15) or (None, "")
        began = time.monotonic()
        while file and time.monotonic() < began + 10:
            with suppress(OSError):
                if Path(file).read_text() == token:
                    self.set(f"saw/{self.rank}", time.monotonic() - began)
                    return
            time.sleep(0.05)
        self.set(f"saw/{self.rank}", -1)

    # ---- measuring

    def measure_network(self) -> None:
        """Between pairs of nodes: all pairs of a few, of many a ring; what is apart, at once."""
        ranks = list(self.leaders.values())
        pairs = [(a, b) for a in ranks for b in ranks if a < b]
        if len(pairs) > 10:
            pairs = [*zip(ranks, ranks[1:]), (ranks[0], ranks[-1])]
        for together in rounds(pairs):
            for pair in together:
                if self.rank in pair:
                    self.measure_pair(*pair)
            for a, b in together:
                self.get_all(f"pair/{a}-{b}/done", (a, b), 3 * MEASURE_SECONDS)
        if self.rank == 0 and pairs:
            self.judge_network(pairs)

    def measure_pair(self, a: int, b: int) -> None:
        """a listens, b dials; pings, then as much as goes through in half a second, each way."""
        key, result = f"pair/{a}-{b}", None
        self.say(f"measuring the network between ranks {a} and {b}")
        try:
            if self.rank == a:
                mine = interface_towards(self.addresses[b], 1)["address"]
                with socket.create_server((mine, 0)) as server:
                    if server.getsockname()[0].startswith("127."):
                        raise OSError("its address is a loopback")
                    server.settimeout(MEASURE_SECONDS)
                    self.set(f"{key}/address", server.getsockname()[:2])
                    link, _ = server.accept()
                with link:
                    link.settimeout(MEASURE_SECONDS)
                    answer_pings(link)
                    way = receive(link)
                    self.set(f"{key}/back", send(link, way))
            else:
                address = self.get(f"{key}/address", MEASURE_SECONDS)
                if address is None:
                    raise OSError("no address to dial")
                with socket.create_connection(tuple(address), timeout=MEASURE_SECONDS) as link:
                    times = ping(link)
                    there = send(link, statistics.median(times))
                    receive(link)
                result = {"milliseconds": 1e3 * statistics.median(times), "there": there}
                result["back"] = self.get(f"{key}/back", MEASURE_SECONDS)
        except (OSError, struct.error) as error:
            result = {"error": str(error) or type(error).__name__}
        self.set(f"{key}/result/{self.rank}", result)
        self.set(f"{key}/done/{self.rank}", True)

    def judge_network(self, pairs: list[tuple[int, int]]) -> None:
        names = {rank: host for host, rank in self.leaders.items()}
        results = {}
        for a, b in pairs:
            told = [self.get(f"pair/{a}-{b}/result/{rank}", 0) for rank in (b, a)]
            errors = [result for result in told if result and "error" in result]
            results[a, b] = (errors or [told[0] or {"error": "no answer"}])[0]
        self.findings += network_findings(results, names)

    def reduce(self) -> None:
        """all_reduce over all ranks, in a thread that may hang; and what it tells of the links."""
        self.say("in the first all_reduce")
        outcome: dict = {}

        def work():
            try:
                outcome.update(all_reduce(self))
            except Exception as error:
                outcome["error"] = str(error).strip().split("\n")[-1][:200]

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(REDUCE_SECONDS + self.world_size / 32)
        if not outcome.get("seconds") and (words := nccl_warning()):
            outcome["error"] = words
        self.say("done" if outcome and "error" not in outcome else "in the all_reduce")
        self.set(f"reduced/{self.rank}", outcome)
        if self.rank:
            return
        outcomes = self.get_all("reduced", range(self.world_size), 5)
        stuck = [rank for rank, result in outcomes.items() if not result]
        wrong = {rank: r["error"] for rank, r in outcomes.items() if r and "error" in r}
        if stuck or wrong:
            what = f"hangs on ranks {', '.join(map(str, stuck))}" if stuck else ""
            what += "; ".join(f"rank {rank}: {error}" for rank, error in list(wrong.items())[:2])
            remedy = "search docs/TROUBLESHOOTING.md for these words; is the network above well?"
            level = Finding("FAIL", "all_reduce", what, "sums on all ranks", remedy)
            self.findings.append(level)
        else:
            outcome = outcomes[0]
            outcome["links"] = sorted({link for o in outcomes.values() for link in o["links"]})
            finding = ok("all_reduce", told_of_reduce(outcome, self.world_size))
            finding.data = outcome | {"ranks": self.world_size}  # scripts/plan.py reads it
            self.findings.append(finding)


def rounds(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in groups of which nobody is in two: they do not disturb each other."""
    made: list[list[tuple[int, int]]] = []
    for pair in pairs:
        busy = [{rank for other in group for rank in other} for group in made]
        free = next((n for n, ranks in enumerate(busy) if not ranks & set(pair)), None)
        if free is None:
            made.append([pair])
        else:
            made[free].append(pair)
    return made


def compare_cards(cards: dict[int, dict]) -> list[Finding]:
    """Who differs from the others, or shares a GPU with one."""
    findings, odd = [], False
    for what in cards[0]["same"]:
        groups: dict = {}
        for rank, card in cards.items():
            if (value := card["same"].get(what)) is not None:
                groups.setdefault(str(value), []).append(rank)
        if len(groups) < 2:
            continue
        # The most common is right; with as many of each, rank 0's.
        right = max(groups, key=lambda value: (len(groups[value]), 0 in groups[value]))
        for value, ranks in groups.items():
            if value == right:
                continue
            odd, hosts = True, sorted({cards[rank]["host"] for rank in ranks})
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} on {', '.join(hosts)}"
            soft = ("cores per rank", "ranks per node", "mtu", "GPU", "visible GPUs")
            level = "WARN" if what in soft else "FAIL"
            remedy = "all nodes should run the same: one environment and one clone that all share"
            if what in soft:
                remedy = "the slowest rank sets the pace: ask for the same on each node"
            if what == "mtu":
                remedy = "large packets may be lost between them: ask the admins"
            findings.append(
                Finding(level, "same everywhere", f"{what} is {value}", right, remedy, who)
            )
    by_gpu: dict = {}
    for rank, card in cards.items():
        if card["uuid"]:
            by_gpu.setdefault((card["host"], card["uuid"]), []).append(rank)
    for (host, uuid), ranks in by_gpu.items():
        if len(ranks) > 1:
            what = f"ranks {', '.join(map(str, ranks))} share {uuid[:16]}"
            remedy = "as many processes as GPUs on each node; device = LOCAL_RANK"
            findings.append(Finding("FAIL", "one GPU each", what, "a GPU each", remedy, host))
    if not odd and len(cards) > 1:
        told = ", ".join(f"{what} {value}" for what, value in list(cards[0]["same"].items())[:4])
        findings.append(ok("same everywhere", told))
    return findings


def merge(findings: list[Finding]) -> list[Finding]:
    """The same finding on many hosts in one line; what is OK everywhere once."""
    merged: dict = {}
    for finding in findings:
        key = (finding.level, finding.check, finding.observed)
        if finding.level == "OK":
            key = ("OK", finding.check)
        merged.setdefault(key, []).append(finding)
    lines = []
    for same in merged.values():
        first, hosts = same[0], list(dict.fromkeys(f.where for f in same))
        where = ", ".join(hosts) if first.level != "OK" or len(hosts) == 1 else ""
        if first.level == "OK" and len(hosts) > 1:
            first.observed += f" (and {len(hosts) - 1} more)"
            where = hosts[0]
        lines.append(Finding(**asdict(first) | {"where": where}))
    return lines


# ---- between two nodes


def ping(link: socket.socket) -> list[float]:
    """Seconds there and back, of up to 20 bytes one after the other."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times, deadline = [], time.monotonic() + 1
    while len(times) < 20 and (len(times) < 3 or time.monotonic() < deadline):
        began = time.perf_counter()
        link.sendall(b"p")
        if not link.recv(1):
            raise OSError("it hung up")
        times.append(time.perf_counter() - began)
    link.sendall(b"e")
    return times


def answer_pings(link: socket.socket) -> None:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while link.recv(1) == b"p":
        link.sendall(b"p")


DATAGRAMS = 200  # to count lost ones by


def send(link: socket.socket, way: float) -> dict:
    """What goes through: {"gbit": per second, in half a second; "lost": share of datagrams}.

    Where the way there and back takes long, the first is not tried: it would tell nothing new.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        port = struct.unpack("H", link.recv(2))[0]
        for _ in range(DATAGRAMS):
            with suppress(OSError):  # a filter of its own: as good as lost
                udp.sendto(bytes(64), (link.getpeername()[0], port))
            time.sleep(0.0005)
    link.sendall(b"s")
    came = struct.unpack("H", link.recv(2))[0]
    link.sendall(struct.pack("d", way))
    chunk, sent, began = bytes(1 << 18), 0, time.perf_counter()
    while way < 0.02 and time.perf_counter() < began + 0.5:
        link.sendall(chunk)
        sent += len(chunk)
    link.sendall(b"end")
    if link.recv(3) != b"all":
        raise OSError("it hung up")
    gbit = 8e-9 * sent / (time.perf_counter() - began)
    return {"gbit": gbit, "lost": 1 - came / DATAGRAMS}


def receive(link: socket.socket) -> float:
    """The other side of send(). Returns the seconds there and back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind((link.getsockname()[0], 0))
        link.sendall(struct.pack("H", udp.getsockname()[1]))
        udp.setblocking(False)
        came, ended = 0, None
        while ended is None or time.monotonic() < ended + 0.1:  # the last ones may come later
            readable, _, _ = select.select([udp] if ended else [udp, link], [], [], 0.1)
            if udp in readable:
                came += bool(udp.recv(64))
            elif link in readable:
                link.recv(1)
                ended = time.monotonic()
        link.sendall(struct.pack("H", came))
    way = struct.unpack("d", link.recv(8))[0]
    tail = b""
    while tail != b"end":
        data = link.recv(1 << 20)
        if not data:
            raise OSError("it hung up")
        tail = (tail + data)[-3:]
    link.sendall(b"all")
    return way


def network_findings(results: dict, names: dict[int, str]) -> list[Finding]:
    """results: {(rank a, rank b): {"milliseconds", "there" (b to a), "back"} or {"error"}}"""
    findings, check = [], "network"
    broken = {pair: r["error"] for pair, r in results.items() if "error" in r}
    fine = {pair: r for pair, r in results.items() if "error" not in r}
    for (a, b), error in broken.items():
        what = f"{names[b]} cannot talk to {names[a]} on a free port: {error}"
        remedy = (
            "gloo and NCCL open ports of their own between nodes: no firewall inside the cluster"
        )
        findings.append(Finding("FAIL", check, what, "a connection", remedy))
    lossy: dict = {}
    slow = {pair: r["milliseconds"] for pair, r in fine.items()}
    usual = min(slow.values(), default=0.0)
    late = {pair: ms for pair, ms in slow.items() if ms > max(10, 5 * usual) or ms > 20}
    if late:
        culprit = common(late, slow)
        who = " and ".join(names[rank] for rank in max(late, key=late.get))
        what = f"{max(late.values()):.0f} ms there and back"
        if culprit is not None:
            who = names[culprit]
            what += " to each of the others"
        remedy = "not the cluster's own network? See `ip route get`; or leave the node out"
        findings.append(Finding("WARN", check, what, "less than 1 ms", remedy, who))
    for (a, b), r in fine.items():
        for sender, receiver, way in ((b, a, r["there"]), (a, b, r["back"])):
            if way and 0.01 < way["lost"] < 1:  # all of them: a filter, which TCP does not mind
                lossy.setdefault(sender, {})[receiver] = way["lost"]
    for sender, shares in lossy.items():
        to = ", ".join(names[receiver] for receiver in shares)
        what = f"of the packets that it sends to {to}, {max(shares.values()):.1%} are lost"
        remedy = "a bad cable or port, or a full switch: leave the node out, tell the admins"
        findings.append(Finding("WARN", check, what, "none", remedy, names[sender]))
    if fine and not findings:
        gbit = [way["gbit"] for r in fine.values() for way in (r["there"], r["back"]) if way]
        slowest = min(fine, key=lambda pair: fine[pair]["there"]["gbit"])
        told = f"TCP {min(gbit):.1f} to {max(gbit):.1f} Gbit/s, {usual:.2f} to "
        told += f"{max(slow.values()):.2f} ms there and back"
        if len(fine) > 1:
            told += f"; slowest between {names[slowest[0]]} and {names[slowest[1]]}"
        findings.append(ok(check, told))
    return findings


def common(late: dict, all_pairs: dict) -> int | None:
    """The rank that is in all of the slow pairs, and in none of the others."""
    ranks = set.intersection(*map(set, late))
    rest = {rank for pair in all_pairs if pair not in late for rank in pair}
    ranks -= rest
    return ranks.pop() if len(ranks) == 1 else None


# ---- all ranks


def all_reduce(rank: Rank) -> dict:
    """Seconds for small and large all_reduces; how NCCL carried them."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    card, cuda = rank.card, rank.card["backend"] == "nccl"
    device = torch.device("cuda", card["index"]) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(nccl_log())}
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # it would end us before we can tell
    elif name_leads_nowhere(card["way"]) and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = card["way"]["interface"]  # as the trainer does
    dist.init_process_group(
        card["backend"],
        store=dist.PrefixStore("group", rank.store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=REDUCE_SECONDS),
        device_id=device if cuda else None,
    )
    total = torch.tensor(float(rank.rank + 1), device=device)
    dist.all_reduce(total)
    if total.item() != rank.world_size * (rank.world_size + 1) / 2:
        raise RuntimeError(f"the sum is wrong: {total.item()}")
    groups = {"all": dist.group.WORLD}
    nodes = [[r for r, host in rank.hosts.items() if host == name] for name in rank.leaders]
    if rank.world_size > rank.local_size > 1:
        groups["node"], _ = dist.new_subgroups_by_enumeration(nodes)
    seconds = {}
    for name, group in groups.items():
        for size in (8 << 10, (64 << 20) if cuda else (4 << 20)):
            seconds[f"{name} {size}"] = time_all_reduce(torch, dist, group, size, device)
    log = nccl_log()
    links = nccl_links(log.read_text(errors="replace")) if log.exists() else []
    log.unlink(missing_ok=True)
    return {"seconds": seconds, "links": links, "local": len(nodes[0])}


def nccl_log() -> Path:
    return Path(tempfile.gettempdir(), f"doctor_nccl_{os.getpid()}")


def nccl_warning() -> str:
    """The last complaint in NCCL's log; "" if there is none."""
    log, lines = nccl_log(), []
    with suppress(OSError):
        lines = re.findall(r"NCCL WARN (.*)", log.read_text(errors="replace"))
        log.unlink()
    return lines[-1].strip()[:200] if lines else ""


def name_leads_nowhere(way: dict) -> bool:
    with suppress(OSError):
        return socket.gethostbyname(HOST).startswith("127.") and way["interface"] != "lo"
    return False


def time_all_reduce(torch, dist, group, size: int, device) -> float:
    """Seconds for one of `size` bytes; the median of a few."""
    data, times, slowest = torch.ones(size // 4, device=device), [], 0.0
    dist.all_reduce(data, group=group)  # NCCL connects with the first one of each kind
    while len(times) < 7 and slowest < 0.5:
        data.fill_(1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        if len(times) == 1:
            slow = torch.tensor(times[0], device=device)
            dist.all_reduce(slow, dist.ReduceOp.MAX, group)  # so that all try as often
            slowest = slow.item()
    return statistics.median(times)


def nccl_links(log: str) -> list[str]:
    """["P2P/CUMEM", "NET/IB"]: what NCCL says its channels go over, in its INFO log."""
    found = re.findall(r"via ((?:P2P|SHM|NET|C2C|NVLS)(?:/\w+)?)(?:/\d+)?(/GDRDMA)?", log)
    return sorted({link + direct for link, direct in found})


def told_of_reduce(outcome: dict, world_size: int) -> str:
    """Bus bandwidth as nccl-tests define it: bytes / seconds x 2 (n - 1) / n."""
    said = []
    for key, seconds in outcome["seconds"].items():
        name, size = key.split()
        n = world_size if name == "all" else outcome["local"]
        who = f"{n} ranks" if name == "all" else f"{n} of a node"
        if int(size) < 1 << 20:
            said.append(f"{who}: 8 KiB in {1e6 * seconds:.0f} us")
        else:
            bus = int(size) / seconds * 2 * (n - 1) / n / 1e9
            said.append(f"{int(size) >> 20} MiB at {bus:.2f} GB/s (bus)")
    links = f", over {', '.join(outcome['links'])}" if outcome["links"] else ""
    return ", ".join(said) + links


if __name__ == "__main__":
    sys.exit(main())
