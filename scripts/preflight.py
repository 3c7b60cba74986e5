#!/usr/bin/env python3
"""Check this node just before a launch, in a few seconds.

    python scripts/preflight.py [--nnodes N --node-rank R --master-addr A --master-port P]
                                [--nproc-per-node K] SCRIPT [ARGUMENT ...]

scripts/cluster_train.sh calls it on each node. It refuses a launch that would fail, with an error
that is also written to FAILURE_FILE, and warns about settings that slow training down. Without a
master address and port, it does not check the master; scripts/doctor.py checks all nodes together.
Before the first attempt, node rank 0 writes as much as a checkpoint has to --checkpoint-dir, and
reads it back, for up to 3 s: a quota may be used up although there is free space.
After a crash, it waits up to a minute until the killed processes have freed their GPU memory.
It prints the number of GPUs that PyTorch sees, and imports PyTorch only if there are GPUs.
Exit code: 0, or 2 if the launch was refused. With PREFLIGHT=0, it warns instead of refusing.
"""

import argparse
import errno
import importlib.util
import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import checks
import guard
import report
from report import HOST

PROGRAM = Path(sys.argv[0]).name  # preflight.py, or doctor.py, which imports this file


def refuse(text: str, cause: str = "configuration") -> None:
    """Print why the launch would fail, and exit with code 2; only warn if PREFLIGHT=0."""
    if os.environ.get("PREFLIGHT") == "0" and PROGRAM != "doctor.py":
        print(f"{PROGRAM}: WARNING: {HOST}: {text}", file=sys.stderr, flush=True)
        return
    print(f"{PROGRAM}: error: {HOST}: {text}", file=sys.stderr, flush=True)
    report.write_failure(cause, text, report.own_rank())
    sys.exit(2)


if sys.version_info < (3, 10):  # noqa: UP036
    refuse(f"{sys.executable} is not Python 3.10 or newer: see scripts/site.sh")

MEMORY_SECONDS = 60  # to free the GPU memory of a killed attempt
ADDRESS_REMEDY = "set MASTER_ADDR to an address that all nodes can reach"
ANYWAY = "(or set PREFLIGHT=0 to launch anyway)"


def main() -> None:
    args = parse(sys.argv[1:])
    request = read_request(args.arguments)
    check_packages(args.script)
    gpu_count = count_gpus()
    ranks = args.nproc_per_node or gpu_count or 1
    check_backend(request, ranks, gpu_count)
    if args.master_addr and args.master_port:
        check_master(args)
    if args.node_rank == 0 and guard.is_first_attempt():
        check_storage(request)
    findings = checks.environment() + checks.shared_memory()
    if report.has_gpu():
        findings += check_gpus() + checks.attempt(checks.gpu_health)
    for finding in findings:
        if finding.level == "FAIL" and finding.check == "GPU driver":
            refuse(f"{finding.observed}: {finding.remedy}")
        elif finding.level != "OK":
            text = f"{PROGRAM}: WARNING: {HOST}: {finding.observed}: {finding.remedy}"
            print(text, file=sys.stderr, flush=True)
    guard.print_answer(str(gpu_count))


def parse(argv: list[str]) -> argparse.Namespace:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="preflight.py", description=__doc__, **style)
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


def check_packages(script: str) -> None:
    missing = checks.missing_packages(script)
    if missing:
        remedy = "pip install -r requirements.txt, or see scripts/site.sh"
        refuse(f"{sys.executable} has no {', '.join(missing)}: {remedy}")


def check_backend(request: str, ranks: int, gpu_count: int) -> None:
    """nccl, the default where there are GPUs, needs a GPU for each rank."""
    backends = re.findall(r"backend[\"']?[=:\s]+[\"']?(nccl|gloo)\b", request)
    backend = os.environ.get("BACKEND") or ("nccl" if gpu_count else "gloo")
    if backends:
        backend = backends[-1]
    if backend == "nccl" and gpu_count < ranks:
        remedy = "request GPUs, or set BACKEND=gloo"
        refuse(f"{ranks} ranks for nccl, but {gpu_count} visible GPUs: {remedy}")


def count_gpus() -> int:
    if not report.has_gpu() or not importlib.util.find_spec("torch"):
        return 0
    import torch

    return torch.cuda.device_count()


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
    if all(guard.LOOPBACK.match(one) for one in addresses):
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
    failure = checks.write_test(directory)
    if failure:
        remedy = f"make room, ask for a larger quota, or set another --checkpoint-dir {ANYWAY}"
        refuse(f"cannot write a checkpoint to {directory} ({failure}): {remedy}", "disk")


def check_gpus() -> list[checks.Finding]:
    """checks.gpus(). After a killed attempt, first wait for its GPU memory to be freed."""
    patience = 0 if guard.is_first_attempt() else MEMORY_SECONDS
    deadline = time.monotonic() + patience
    is_logged = False
    while True:
        findings = checks.attempt(checks.gpus)
        held = [finding for finding in findings if is_own_memory(finding)]
        if not held or time.monotonic() > deadline:
            return findings
        if not is_logged:
            text = f"{PROGRAM}: {HOST}: waiting up to {MEMORY_SECONDS} s: {held[0].observed}"
            print(text, file=sys.stderr, flush=True)
            is_logged = True
        time.sleep(1)


def is_own_memory(finding: checks.Finding) -> bool:
    """Whether GPU memory is in use, and not by processes of another user."""
    if not finding.data:
        return False
    return not any(is_of_others(pid) for pid in finding.data["pids"])


def is_of_others(pid: str) -> bool:
    """Whether this is a process of another user. False if the process has exited."""
    with suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid != os.getuid()
    return False


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


if __name__ == "__main__":
    main()
