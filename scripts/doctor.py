#!/usr/bin/env python3
"""Diagnose a machine or all nodes of a job: what is wrong, where, and what to do.

    python scripts/doctor.py                                       this machine
    TRAIN_SCRIPT=scripts/doctor.py sbatch run_distributed.slurm    all nodes of a job; works with
                                                                   every launcher

It checks each machine: software, GPUs, shared memory, environment, disks.
In a launch, all ranks also connect to a store, and rank 0 names those that are different, or have
not come within RANK_TIMEOUT seconds [300]. Then each node connects to each other node and looks for
the run directory of rank 0, and an all_reduce over all ranks is timed. That takes less than a
minute. It writes an empty file to the run directory, and removes it.

It prints one line per finding: OK, WARN or FAIL, what was found, what to do. Exit code: 0 no
problem, 1 a warning, 2 a failure. In a launch, a warning is also 0, because launchers treat any
other exit code as a crash.

In a launch it replaces the training script, so it accepts all options. It uses --config,
--checkpoint-dir and --distributed-backend.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import guard
import node_check
import report
from node_check import Finding, existing, first_line, run_directory
from report import HOST, format_ranges, ranks_by_host, wait_for

CONNECT_SECONDS = 4  # for one node to connect to another
CHECK_SECONDS = 20  # for each check of all ranks
MARK_SECONDS = 5  # for a network file system to show a new file
LEVELS = ["OK", "WARN", "FAIL"]


def main() -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hide c10d's long messages
    args = parse(sys.argv[1:])
    if args.nnodes:
        return start_ranks(args)
    request = node_check.read_request(sys.argv[1:])
    if "RANK" in os.environ or guard.is_srun_step(os.environ):
        Rank(request).run()
    return print_findings(node_check.check_machine(run_directory(request)))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    node_check.add_launch_options(parser)
    parser.set_defaults(nnodes=0)
    args, _ = parser.parse_known_args(argv)
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


def start_ranks(args) -> int:
    """Run the ranks of this node. Without torchrun: it waits for missing nodes. Returns 0 or 2."""
    command = [sys.executable, *sys.argv, "--nnodes=0"]
    processes = []
    per_node = args.nproc_per_node or 1
    for local_rank in range(per_node):
        env = os.environ | {
            "RANK": str(args.node_rank * per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(args.nnodes * per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": args.master_addr,
            "MASTER_PORT": str(args.master_port),
            "SLURM_STEP_NUM_TASKS": "1",  # else, the ranks of an srun step would replace these
        }
        processes.append(subprocess.Popen(command, env=env))
    codes = [process.wait() for process in processes]
    return 2 if any(codes) else 0


class Rank:
    """One rank of a launch. Rank 0 collects the findings."""

    def __init__(self, request: str):
        self.world = guard.launch_environment(os.environ)
        guard.share_gpu(self.world)
        self.rank = self.world["RANK"]
        self.size = self.world["WORLD_SIZE"]
        self.master = os.environ["MASTER_ADDR"]
        self.request = request
        self.timeout = report.seconds("RANK_TIMEOUT", 300)
        self.findings: list[Finding] = []
        self.infos: list[dict | None] = []  # on rank 0, of all ranks; None: it is missing
        self.job = {"missing": []}  # what rank 0 tells all: see compare_ranks()
        self.doing = "checking its machine"

    def run(self) -> None:
        """Run all checks and exit."""
        signal.alarm(int(self.timeout) + 150)  # in case anything hangs
        failed = False
        try:
            self.check_job()
        except Exception as error:
            failed = True
            text = f"failed while {self.doing}: {first_line(error)}"
            remedy = "see its log, and docs/TROUBLESHOOTING.md"
            where = f"rank {self.rank} on {HOST}"
            self.findings.append(Finding("FAIL", "doctor", text, remedy, where))
        if self.rank == 0:
            failed = print_findings(self.findings) == 2
        elif failed:
            for finding in self.findings:
                report.say(str(finding))
            time.sleep(30)  # launchers kill all ranks at the first failure: rank 0 prints first
        os._exit(2 if failed else 0)  # even if a thread still hangs

    def check_job(self) -> None:
        """Collective: every rank."""
        self.meet(self.describe())
        self.check("network", self.reach_nodes, "allow all ports between the nodes")
        remedy = "put --checkpoint-dir on a file system that all nodes share"
        self.check("run directory", self.find_mark, remedy)
        if self.rank == 0:
            self.mark.unlink(missing_ok=True)
        if self.size > 1 and not self.job["missing"]:
            remedy = "search docs/TROUBLESHOOTING.md for this, or set NCCL_DEBUG=WARN"
            self.check("all_reduce", self.all_reduce, remedy)
        self.send("done", True)
        if self.rank == 0:  # it is the server of the store
            self.gather("done", 5)

    def check(self, name: str, function, remedy: str) -> None:
        """Add what function() -> (passed, text) finds on all ranks. Collective: every rank."""
        self.doing = f"waiting for rank 0 after the check of {name}"
        limit = CHECK_SECONDS + self.size / 32
        try:
            outcome = ThreadPoolExecutor().submit(function).result(limit)
        except Exception as error:  # if a GPU or NCCL hangs, the thread goes on
            outcome = False, first_line(error)
        self.exchange(name, outcome, limit, lambda values: self.judge(name, values, remedy))

    def judge(self, name: str, outcomes: list, remedy: str) -> None:
        """On rank 0."""
        failures = []
        for rank, info in enumerate(self.infos):
            passed, text = outcomes[rank] or (False, "no answer")
            if info and not passed:
                where = f"rank {rank} on {info['host']}"
                failures.append(Finding("FAIL", name, text, remedy, where))
        self.findings += failures or [Finding("OK", name, outcomes[0][1])]

    # ---- the store

    def send(self, name: str, value) -> None:
        self.store.set(f"{name} {self.rank}", json.dumps(value))

    def gather(self, name: str, seconds: float) -> list:
        """What each rank sends; None for those that do not, or are missing. Only for rank 0."""
        deadline = time.monotonic() + seconds
        values = [None] * self.size
        for rank in set(range(self.size)).difference(self.job["missing"]):
            text = wait_for(self.store, f"{name} {rank}", deadline)
            if text:
                values[rank] = json.loads(text)
        return values

    def exchange(self, name: str, value, seconds: float, answer):
        """Send a value to rank 0. Returns, on all ranks, the answer to all values there: small,
        because thousands read it. Collective: every rank.
        """
        self.send(name, value)
        if self.rank == 0:
            self.store.set(name, json.dumps(answer(self.gather(name, seconds))))
        text = wait_for(self.store, name, time.monotonic() + 2 * seconds + 10)
        if text is None:
            raise TimeoutError("it does not answer")
        return json.loads(text)

    # ---- rank info

    def describe(self) -> dict:
        """The rank info, of which "same" must be equal on all ranks."""
        directory = run_directory(self.request)
        if self.world["LOCAL_RANK"] == 0:
            for finding in node_check.check_machine(directory):
                if finding.level != "OK" or self.rank == 0:
                    self.findings.append(finding._replace(where=HOST))
        self.doing = "importing PyTorch"
        info = guard.rank_info(["train_distributed.py", *sys.argv[1:]])
        import torch

        gpus = torch.cuda.device_count()
        self.backend = node_check.requested_backend(self.request, gpus)
        self.device = torch.device("cpu")
        if self.backend == "nccl":
            self.device = torch.device("cuda", self.world["LOCAL_RANK"] % max(1, gpus))
        info["same"]["Python"] = platform.python_version()
        info["same"]["backend"] = self.backend
        info["findings"] = self.findings
        info["directory"] = str(existing(Path(directory)))
        info["port"] = self.listen()
        return info

    def listen(self) -> int:
        """Let other nodes connect to this process, without accept(). Returns the port."""
        options = {}
        if socket.has_dualstack_ipv6():
            options = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        self.server = socket.create_server(("", 0), backlog=1024, **options)
        return self.server.getsockname()[1]

    def meet(self, info: dict) -> None:
        """Connect to the store on the master, and exchange the rank infos."""
        port = self.world["MASTER_PORT"]
        self.doing = f"connecting to the store of rank 0 at {self.master}:{port}"
        # Fails if the name is unknown, which PyTorch would retry for minutes.
        info["address"] = address_towards(self.master) if self.rank else self.master
        opening = ThreadPoolExecutor().submit(guard.open_store, self.world, self.timeout)
        self.store = opening.result(self.timeout + 5)  # another program may listen there
        self.doing = "waiting for rank 0"
        self.job = self.exchange("info", info, self.timeout, self.compare_ranks)
        self.mark = Path(self.job["mark"])
        if self.rank in self.job["missing"]:
            raise TimeoutError("it had stopped waiting")

    def compare_ranks(self, infos: list[dict | None]) -> dict:
        """On rank 0: which ranks are missing and which differ. Returns what all ranks must know."""
        self.infos = infos
        nodes = ranks_by_host(infos)
        missing = [rank for rank, info in enumerate(infos) if info is None]
        text = f"all {self.size} are here, on {', '.join(nodes)}"
        level = "OK"
        if missing:
            level = "FAIL"
            text = f"{format_ranges(missing)} of {self.size} did not answer within "
            text += f"{self.timeout:.0f} s (RANK_TIMEOUT); the others are on {', '.join(nodes)}"
        remedy = f"see their logs, and check that their hosts reach {self.master}"
        self.findings.append(Finding(level, "ranks", text, remedy))
        for info in filter(None, infos[1:]):
            self.findings += [Finding(*fields) for fields in info["findings"]]
        same = infos[0]["same"]
        text = ", ".join(f"{what} {value}" for what, value in same.items())
        failures = []
        for difference in guard.find_differences(infos):
            remedy = "all nodes need the same software"
            failures.append(Finding("FAIL", "same everywhere", difference, remedy))
        self.findings += failures or [Finding("OK", "same everywhere", text)]
        leaders = [infos[ranks[0]] for ranks in nodes.values()]
        places = [(info["host"], info["address"], info["port"]) for info in leaders]
        self.store.set("nodes", json.dumps(places))
        mark = Path(infos[0]["directory"], f".mark_{HOST}_{os.getpid()}")
        return {"missing": missing, "mark": str(mark)}

    # ---- what check() runs; each returns (passed, text)

    def reach_nodes(self) -> tuple[bool, str]:
        """The first rank of each node connects to those of the other nodes."""
        problems = []
        if self.world["LOCAL_RANK"] == 0:
            nodes = json.loads(self.store.get("nodes"))
            others = [place for place in nodes if place[0] != HOST]
            with ThreadPoolExecutor(32) as pool:
                problems = [text for text in pool.map(self.reach, others) if text]
        if problems:
            return False, "; ".join(problems)
        return True, "each node connects to each other node by TCP"

    def reach(self, place: list) -> str:
        """Why this process cannot connect to that node; "" if it can."""
        host, address, port = place
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except OSError as error:
            return f"cannot connect to {host}: {error}"
        return ""

    def find_mark(self) -> tuple[bool, str]:
        """Whether this node has the run directory of rank 0, which writes a file to it."""
        if self.rank == 0:
            self.mark.touch()
        deadline = time.monotonic() + MARK_SECONDS
        while not self.mark.exists():  # a network file system may lag
            if time.monotonic() > deadline:
                return (
                    False,
                    f"does not find the file that rank 0 has written to {self.mark.parent}",
                )
            time.sleep(0.5)
        return True, f"{self.mark.parent} is the same on all nodes"

    def all_reduce(self) -> tuple[bool, str]:
        """Measure latency and bandwidth of an all_reduce over all ranks."""
        import torch
        import torch.distributed as dist

        options = {}
        large = 4 << 20
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # it would kill this process
            options["device_id"] = self.device
            large = 64 << 20
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=CHECK_SECONDS),
            **options,
        )
        total = torch.tensor(float(self.rank + 1), device=self.device)
        dist.all_reduce(total)
        if total.item() != self.size * (self.size + 1) / 2:
            return False, f"the sum is wrong: {total.item()}"
        latency = time_all_reduce(8 << 10, self.device)
        duration = time_all_reduce(large, self.device)
        bus = large / duration * 2 * (self.size - 1) / self.size / 1e9  # as nccl-tests define it
        text = f"8 KiB in {1e6 * latency:.0f} us, {large >> 20} MiB at {bus:.2f} GB/s (bus)"
        return True, f"{self.size} ranks: {text}"


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
