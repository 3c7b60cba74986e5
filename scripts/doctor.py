#!/usr/bin/env python3
"""Diagnose a machine or all nodes of a job: what is wrong, where, and what to do.

    python scripts/doctor.py                                       this machine
    TRAIN_SCRIPT=scripts/doctor.py sbatch run_distributed.slurm    all nodes of a job; works with
                                                                   every launcher

It checks each machine: software, GPUs, shared memory, environment, disks.
In a launch, it takes the place of the training script. So torchrun and guard.py have named hosts
and ranks that did not come within RANK_TIMEOUT, or have other software. Then each node connects to
each other node and looks for the run directory of rank 0, and an all_reduce over all ranks is
timed. That takes less than a minute. It writes an empty file to the run directory, and removes it.

It prints one line per finding: OK, WARN or FAIL, what was found, what to do. Exit code: 0 no
problem, 1 a warning, 2 a failure. In a launch, a warning is also 0, because launchers treat any
other exit code as a crash; and all options of the training script are accepted.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import node_check
import report
from node_check import Finding, existing, first_line
from report import HOST, wait_for

CONNECT_SECONDS = 4  # for one node to connect to another
CHECK_SECONDS = 20  # for each check of all ranks
MARK_SECONDS = 5  # for a network file system to show a new file
LEVELS = ["OK", "WARN", "FAIL"]


def main() -> int:
    args = parse()
    if "RANK" in os.environ:
        Rank(args).run()
    return print_findings(node_check.check_machine(args.checkpoint_dir))


def parse() -> argparse.Namespace:
    """Its own options; in a launch, there are also those of the training script."""
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="a YAML file that may have the other two options")
    parser.add_argument("--checkpoint-dir", default="checkpoints", help="the run directory")
    parser.add_argument("--distributed-backend", help="nccl or gloo, in a launch")
    args, unknown = parser.parse_known_args()
    if unknown and "RANK" not in os.environ:
        parser.error(f"there is no option {unknown[0]}")
    if args.config:
        try:
            import yaml

            settings = yaml.safe_load(Path(args.config).read_text()) or {}
        except Exception as error:  # no PyYAML; no such file; not YAML
            parser.error(f"cannot read --config {args.config}: {first_line(error)}")
        parser.set_defaults(**{name: settings[name] for name in settings if settings[name]})
        args, _ = parser.parse_known_args()
    return args


def print_findings(findings: list[Finding]) -> int:
    """Print all findings, the most severe last. Returns the exit code."""
    places: dict[Finding, list[str]] = {}  # where the same was found
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        places.setdefault(finding._replace(where=""), []).append(finding.where)
    lines = [str(finding._replace(where=", ".join(where))) for finding, where in places.items()]
    levels = [finding.level for finding in places]
    counts = [f"{levels.count(level)} {level}" for level in reversed(LEVELS) if level in levels]
    lines.append(f"doctor.py: {', '.join(counts)}\n")
    os.write(1, "\n".join(lines).encode())  # one write, because other ranks print too
    return LEVELS.index(levels[-1])


# ------------------------------------------------------------------------------- a whole job


class Rank:
    """One rank of a launch. Rank 0 collects the findings."""

    def __init__(self, args: argparse.Namespace):
        import torch.distributed as dist

        self.args = args
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.store, self.rank, self.size = next(dist.rendezvous("env://"))
        self.limit = CHECK_SECONDS + self.size / 32
        self.findings: list[Finding] = []
        self.hosts: list[str] = []  # on rank 0, of all ranks

    def run(self) -> None:
        """Run all checks and exit. Collective: every rank."""
        self.meet()
        self.check("network", self.reach_nodes, "allow all ports between the nodes")
        remedy = "put --checkpoint-dir on a file system that all nodes share"
        self.check("run directory", self.find_mark, remedy)
        if self.rank == 0:
            self.mark.unlink(missing_ok=True)
        if self.size > 1:
            remedy = "search docs/TROUBLESHOOTING.md for this, or set NCCL_DEBUG=WARN"
            self.check("all_reduce", self.all_reduce, remedy)
        self.send("done", True)
        code = 0
        if self.rank == 0:
            self.gather("done", 5)  # it may be the server of the store
            if print_findings(self.findings) == 2:
                failed = next(finding for finding in self.findings if finding.level == "FAIL")
                report.write_failure("configuration", f"{failed.check}: {failed.observed}", 0)
                code = 2
        os._exit(code)  # even if a thread still hangs

    def meet(self) -> None:
        """The first rank of each node checks it; rank 0 learns what it found, and where it is."""
        master = os.environ["MASTER_ADDR"]
        info = {"host": HOST, "port": self.listen(), "findings": []}
        info["address"] = address_towards(master) if self.rank else master
        if self.local_rank == 0:
            for finding in node_check.check_machine(self.args.checkpoint_dir):
                if finding.level != "OK" or self.rank == 0:
                    info["findings"].append(finding._replace(where=HOST))
        place = existing(Path(self.args.checkpoint_dir))
        info["mark"] = str(place / f".mark_{HOST}_{os.getpid()}")
        self.mark = Path(self.exchange("info", info, self.collect))

    def collect(self, infos: list[dict | None]) -> str:
        """On rank 0. Returns what all ranks must know: a file that rank 0 will write."""
        nodes = {}
        for rank, info in enumerate(infos):
            if info is None:
                remedy = "see its log: does a disk or nvidia-smi hang?"
                self.findings.append(Finding("FAIL", "ranks", f"rank {rank}: no answer", remedy))
                self.hosts.append("an unknown host")
                continue
            self.hosts.append(info["host"])
            self.findings += [Finding(*fields) for fields in info["findings"]]
            nodes.setdefault(info["host"], (info["address"], info["port"]))
        self.store.set("nodes", json.dumps(nodes))
        return infos[0]["mark"]

    def check(self, name: str, function, remedy: str) -> None:
        """Add what function() -> (passed, text) finds on all ranks. Collective: every rank."""
        late = (False, f"has not ended after {self.limit:.0f} s")  # a GPU or NCCL may hang
        outcome = report.within(self.limit, outcome_of, function) or late
        self.exchange(name, outcome, lambda outcomes: self.judge(name, outcomes, remedy))

    def judge(self, name: str, outcomes: list, remedy: str) -> None:
        """On rank 0."""
        failures = []
        for rank, outcome in enumerate(outcomes):
            passed, text = outcome or (False, "no answer")
            if not passed:
                where = f"rank {rank} on {self.hosts[rank]}"
                failures.append(Finding("FAIL", name, text, remedy, where))
        self.findings += failures or [Finding("OK", name, outcomes[0][1])]

    # ---- the store

    def send(self, name: str, value) -> None:
        self.store.set(f"{name} {self.rank}", json.dumps(value))

    def gather(self, name: str, seconds: float) -> list:
        """What each rank sends; None for those that do not. Only for rank 0."""
        deadline = time.monotonic() + seconds
        texts = [wait_for(self.store, f"{name} {rank}", deadline) for rank in range(self.size)]
        return [json.loads(text) if text else None for text in texts]

    def exchange(self, name: str, value, answer):
        """Send a value to rank 0. Returns, on all ranks, the answer to all values there: small,
        because thousands read it. Collective: every rank.
        """
        self.send(name, value)
        if self.rank == 0:
            self.store.set(name, json.dumps(answer(self.gather(name, self.limit + 5))))
        text = wait_for(self.store, name, time.monotonic() + 2 * self.limit + 10)
        if text is None:
            raise TimeoutError(f"rank 0 does not answer ({name})")
        return json.loads(text)

    def listen(self) -> int:
        """Let other nodes connect to this process, without accept(). Returns the port."""
        options = {}
        if socket.has_dualstack_ipv6():
            options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        self.server = socket.create_server(("", 0), backlog=1024, **options)
        return self.server.getsockname()[1]

    # ---- what check() runs; each returns (passed, text)

    def reach_nodes(self) -> tuple[bool, str]:
        """The first rank of each node connects to those of the other nodes."""
        problems = []
        if self.local_rank == 0:
            nodes = json.loads(self.store.get("nodes"))
            nodes.pop(HOST)
            with ThreadPoolExecutor(32) as pool:
                problems = [text for text in pool.map(reach, nodes.items()) if text]
        if problems:
            return False, "; ".join(problems)
        return True, "each node connects to each other node by TCP"

    def find_mark(self) -> tuple[bool, str]:
        """Whether this node has the run directory of rank 0, which writes a file to it."""
        if self.rank == 0:
            self.mark.touch()
        deadline = time.monotonic() + MARK_SECONDS
        while not self.mark.exists():  # a network file system may lag
            if time.monotonic() > deadline:
                return False, f"has no file that rank 0 has written to {self.mark.parent}"
            time.sleep(0.5)
        return True, f"{self.mark.parent} is the same on all nodes"

    def all_reduce(self) -> tuple[bool, str]:
        """Measure latency and bandwidth of an all_reduce over all ranks."""
        import torch
        import torch.distributed as dist

        gpus = torch.cuda.device_count()
        backend = self.args.distributed_backend or os.environ.get("BACKEND")
        backend = backend or ("nccl" if gpus else "gloo")
        device = torch.device("cpu")
        large = 4 << 20
        options = {}
        if backend == "nccl":
            device = torch.device("cuda", self.local_rank % max(1, gpus))
            torch.cuda.set_device(device)
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # it would kill this process
            large = 64 << 20
            options["device_id"] = device
        dist.init_process_group(
            backend,
            timeout=timedelta(seconds=10 * CHECK_SECONDS),  # for guard.py, it is no hang before
            **options,
        )
        total = torch.tensor(float(self.rank + 1), device=device)
        dist.all_reduce(total)
        if total.item() != self.size * (self.size + 1) / 2:
            return False, f"the sum is wrong: {total.item()}"
        latency = time_all_reduce(8 << 10, device)
        duration = time_all_reduce(large, device)
        bus = large / duration * 2 * (self.size - 1) / self.size / 1e9  # as nccl-tests define it
        text = f"8 KiB in {1e6 * latency:.0f} us, {large >> 20} MiB at {bus:.2f} GB/s (bus)"
        return True, f"{self.size} ranks: {text}"


def outcome_of(function) -> tuple[bool, str]:
    try:
        return function()
    except Exception as error:
        return False, first_line(error)


def reach(node: tuple) -> str:
    """Why this process cannot connect to that node; "" if it can."""
    host, place = node
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError as error:
        return f"cannot connect to {host}: {error}"
    return ""


def address_towards(host: str) -> str:
    """This machine's address on the route to the host. Sends no packet."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def time_all_reduce(size: int, device) -> float:
    """Median seconds of an all_reduce of `size` bytes."""
    import torch
    import torch.distributed as dist

    data = torch.ones(size // 4, device=device)
    times = []
    for _ in range(6):
        data[0].item()  # waits for the GPU
        began = time.perf_counter()
        dist.all_reduce(data)
        data[0].item()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one sets up NCCL's connections


if __name__ == "__main__":
    sys.exit(main())
