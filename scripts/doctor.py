#!/usr/bin/env python3
"""Diagnose a machine or all nodes of a job: what is wrong, where, and what to do.

    python scripts/doctor.py                                       this machine
    TRAIN_SCRIPT=scripts/doctor.py sbatch run_distributed.slurm    all nodes of a job; works with
                                                                   every launcher

It checks each machine: software, GPUs, memory, limits, disks, cores, host name, environment.
In a launch, all ranks also connect to a store with time limits, so that it can name ranks that are
missing, late or different. Then each node connects to each other node, each rank multiplies the
same matrices, and an all_reduce over all ranks is timed. That takes less than a minute. It writes
an empty file to the run directory, and removes it.

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
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from threading import Thread

import guard
import node_check
import report
from node_check import Finding, existing, first_line
from report import HOST

MEET_SECONDS = 20  # for all ranks to connect to the store
CONNECT_SECONDS = 4  # for one node to connect to another
PRODUCT_SECONDS = 20  # for a matrix product
REDUCE_SECONDS = 20  # for the all_reduce
LEVELS = ["OK", "WARN", "FAIL"]


def main() -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hide c10d's long messages
    args, others = parse(sys.argv[1:])
    if args.nnodes:
        return start_ranks(args)
    if "RANK" in os.environ or guard.is_srun_step(os.environ):
        world = guard.launch_environment(os.environ)
        guard.share_gpu(world)
        Rank(args, world).run()
    if others:
        node_check.refuse(f"{others[0]} is not an option outside of a launch: see --help")
    return print_findings(node_check.check_machine(args.checkpoint_dir), args.json)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, arguments of the training script). The command line overrides --config."""
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print the findings as JSON")
    add("--config", help="configuration file of the training")
    add("--checkpoint-dir", "--save-dir", default="checkpoints", help="run directory [checkpoints]")

    add("--distributed-backend", help="nccl or gloo [nccl on GPUs, else gloo]")
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port"):
        add(name, type=int, help=argparse.SUPPRESS)  # from cluster_train.sh, as for torchrun
    add("--master-addr", help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args(argv)
    config = Path(args.config or "")
    if config.suffix in (".yaml", ".yml"):
        parser.set_defaults(**read_config(config))
    return parser.parse_known_args(argv)


def read_config(file: Path) -> dict:
    """The options that the training's configuration file sets; the doctor uses a few."""
    try:
        import yaml

        config = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        return {name: value for name, value in config.items() if value}
    except Exception as error:
        node_check.refuse(f"cannot read --config {file}: {' '.join(str(error).split())}")
        return {}


def print_findings(findings: list[Finding], as_json: bool) -> int:
    """Print all findings, the most severe last. Returns the exit code."""
    findings = sorted(findings, key=lambda finding: LEVELS.index(finding.level))
    levels = [finding.level for finding in findings]
    if as_json:
        text = json.dumps([asdict(finding) for finding in findings], indent=1)
    else:
        counts = [f"{levels.count(level)} {level}" for level in reversed(LEVELS) if level in levels]
        lines = [str(finding) for finding in findings]
        lines.append(f"doctor.py: {', '.join(counts)}")
        text = "\n".join(lines)
    os.write(1, f"{text}\n".encode())  # one write, because other ranks print too
    return LEVELS.index(levels[-1])


# ------------------------------------------------------------------------------- a whole job


def start_ranks(args) -> int:
    """Run the ranks of this node. Without torchrun: it waits for missing nodes. Returns 0 or 2."""
    command = [sys.executable, *sys.argv, "--nnodes=0"]
    processes = []
    for local_rank in range(args.nproc_per_node):
        env = os.environ | {
            "RANK": str(args.node_rank * args.nproc_per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(args.nnodes * args.nproc_per_node),
            "LOCAL_WORLD_SIZE": str(args.nproc_per_node),
            "MASTER_ADDR": args.master_addr,
            "MASTER_PORT": str(args.master_port),
            "SLURM_STEP_NUM_TASKS": "1",  # else, the ranks of an srun step would replace these
        }
        processes.append(subprocess.Popen(command, env=env))
    codes = [process.wait() for process in processes]
    return 2 if any(codes) else 0


class Rank:
    """One rank of a launch. Rank 0 collects the findings."""

    def __init__(self, args, world: dict[str, int]):
        self.args = args
        self.world = world
        self.rank = world["RANK"]
        self.local_rank = world["LOCAL_RANK"]
        self.size = world["WORLD_SIZE"]
        self.doing = ""
        self.findings: list[Finding] = []
        self.nccl_log = Path(tempfile.gettempdir(), f"doctor_nccl_{os.getpid()}")
        self.master = f"{os.environ['MASTER_ADDR']}:{world['MASTER_PORT']}"

    def run(self) -> None:
        """Run all checks and exit."""
        signal.alarm(120)  # in case anything hangs
        stdout = os.dup(1)
        os.dup2(2, 1)  # where the gloo of PyTorch 2.8 and 2.9 would print
        failed = False
        try:
            self.check_machine()
            self.meet()
            self.check_job()
        except Exception as error:
            failed = True
            text = f"rank {self.rank} on {HOST} failed while {self.doing}: {first_line(error)}"
            self.add("FAIL", "doctor", text, "see its log, and docs/TROUBLESHOOTING.md")
        os.dup2(stdout, 1)
        if self.rank == 0:
            failed = print_findings(merge(self.findings), self.args.json) == 2
        elif failed:
            self.report_alone()
        os._exit(2 if failed else 0)  # even if a thread still hangs

    def check_machine(self) -> None:
        """The first rank of each node checks it. Ranks other than 0 keep only problems."""
        self.doing = "checking its machine"
        if self.local_rank != 0:
            return
        for finding in node_check.check_machine(self.args.checkpoint_dir):
            finding.where = HOST
            if finding.level != "OK" or self.rank == 0:
                self.findings.append(finding)

    def report_alone(self) -> None:
        """Print findings that did not reach rank 0.

        Launchers kill all ranks at the first failure, so let rank 0 print its report first.
        """
        text = "".join(f"{finding}\n" for finding in self.findings)
        os.write(2, text.encode())
        time.sleep(30)

    def add(self, level: str, check: str, text: str, remedy: str = "", **fields) -> None:
        self.findings.append(Finding(level, check, text, remedy, **fields))

    def set(self, key: str, value) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float):
        """A value from the store; None if it is not set in time."""
        text = report.wait_for(self.store, key, time.monotonic() + seconds)
        return None if text is None else json.loads(text)

    def gather(self, kind: str, ranks, seconds: float) -> dict:
        """{rank: its value of that kind}; all share one deadline."""
        deadline = time.monotonic() + seconds
        values = {}
        for rank in ranks:
            values[rank] = self.get(f"{kind} {rank}", deadline - time.monotonic())
        return values

    # ---- rank info

    def describe(self) -> dict:
        """The rank info to compare: "same" must be equal, "alike" should be equal."""
        self.doing = "importing PyTorch"
        info = guard.rank_info(["train_distributed.py", *sys.argv[1:]])
        import torch

        gpus = torch.cuda.device_count()
        gpu = self.local_rank if self.local_rank < gpus else 0
        self.backend = self.args.distributed_backend or ("nccl" if gpus else "gloo")
        self.device = torch.device("cuda", gpu) if self.backend == "nccl" else torch.device("cpu")
        nccl = "none"
        if gpus:
            numbers = torch.cuda.nccl.version()
            nccl = ".".join(str(number) for number in numbers)
        info["same"]["Python"] = platform.python_version()
        info["same"]["NCCL"] = nccl
        info["same"]["backend"] = self.backend
        info["alike"] = {
            "GPU": torch.cuda.get_device_name(gpu) if gpus else "none",
            "number of visible GPUs": gpus,
            "number of cores per rank": node_check.count_cores(),
            "number of ranks per node": self.world["LOCAL_WORLD_SIZE"],
        }
        info["findings"] = [asdict(finding) for finding in self.findings]
        return info

    def meet(self) -> None:
        """Connect to the store on the master, and send the rank info."""
        self.info = self.describe()
        self.doing = f"connecting to the store of rank 0 at {self.master}"
        # PyTorch would retry an unknown name for minutes.
        socket.getaddrinfo(os.environ["MASTER_ADDR"], self.world["MASTER_PORT"])
        opening = ThreadPoolExecutor().submit(guard.open_store, self.world, MEET_SECONDS)
        self.store = opening.result(MEET_SECONDS + 5)  # another program may listen there
        self.set(f"info {self.rank}", self.info)
        self.doing = "waiting for rank 0"

    def check_job(self) -> None:
        """The checks that need several ranks. Collective: every rank with a store."""
        if self.rank == 0:
            gathered = self.gather("info", range(self.size), MEET_SECONDS)
            infos = list(gathered.values())
            self.compare_ranks(infos)
            self.set("infos", infos)
        infos = self.get("infos", 2 * MEET_SECONDS + 10)
        if infos is None or infos[self.rank] is None:
            raise TimeoutError("rank 0 had stopped waiting")
        self.hosts = report.ranks_by_host(infos)
        self.leaders = {ranks[0]: host for host, ranks in self.hosts.items()}
        if self.rank in self.leaders:
            self.check_network(infos)
        if None not in infos and self.size > 1:
            guard.choose_interface(infos)
            self.check_products(infos)
            if self.rank == 0:
                self.set("reduce", True)  # start together, because its time is limited
            self.get("reduce", 60)
            self.check_all_reduce()
        if self.rank in self.leaders:
            self.compare_directories()
        if self.rank == 0:
            self.set("done", True)
            time.sleep(1)  # for the others to read all that it has set
        with suppress(Exception):  # rank 0 is the store's server and may exit first
            self.get("done", 30)

    def compare_ranks(self, infos: list[dict | None]) -> None:
        """Report which ranks are missing and which differ."""
        missing = [rank for rank, info in enumerate(infos) if info is None]
        hosts = ", ".join(report.ranks_by_host(infos))
        if missing:
            ranks = report.format_ranges(missing)
            text = f"{ranks} of {self.size} did not answer within {MEET_SECONDS} s"
            remedy = f"see their logs, and check that their hosts reach {self.master}"
            self.add("FAIL", "ranks", f"{text}; the others are on {hosts}", remedy)
        else:
            self.add("OK", "ranks", f"all {self.size} are here, on {hosts}")
        for info in infos[1:]:
            if info:
                self.findings += [Finding(**fields) for fields in info["findings"]]
        different = list(guard.find_differences(infos, "same"))
        for text in different:
            self.add("FAIL", "same everywhere", text, "all nodes need the same software")
        for text in guard.find_differences(infos, "alike"):
            remedy = "all ranks wait for the slowest: ask for the same on each node"
            self.add("WARN", "same everywhere", text, remedy)
        if not different:
            same = infos[0]["same"]
            text = ", ".join(f"{what} {value}" for what, value in same.items())
            self.add("OK", "same everywhere", text)

    # ---- between nodes

    def check_network(self, infos: list[dict]) -> None:
        """Each node connects to each other node."""
        self.doing = "connecting to the other nodes"
        self.set(f"address {self.rank}", self.start_server(infos))
        addresses = self.gather("address", self.leaders, 15)
        del addresses[self.rank]
        hosts = [self.leaders[rank] for rank in addresses]
        with ThreadPoolExecutor(32) as pool:
            results = pool.map(reach, hosts, addresses.values())
            self.set(f"reached {self.rank}", list(results))
        if self.rank == 0 and addresses:
            reached = self.gather("reached", self.leaders, 5 * CONNECT_SECONDS)
            self.findings += network_findings(reached, self.leaders)

    def start_server(self, infos: list[dict]) -> tuple[str, int]:
        """Accept the connections of the other nodes. Returns the address and port."""
        last = list(self.leaders)[-1]  # rank 0's own address may be 127.0.0.1
        address = guard.address_towards(infos[last]["address"])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
        Thread(target=accept_all, args=[server], daemon=True).start()
        return server.getsockname()[:2]

    def compare_directories(self) -> None:
        """Whether the nodes share the run directory: rank 0 sends the name of a file in it."""
        self.doing = "comparing run directories"
        if self.rank != 0:
            file = self.get("file", 15) or ""
            self.set(f"found {self.rank}", appears(file))
            return
        directory = existing(Path(self.args.checkpoint_dir))
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor_") as file:
            self.set("file", file.name)
            answers = self.gather("found", self.leaders.keys() - {0}, 15)
        others = [self.leaders[rank] for rank, answer in answers.items() if answer is False]
        if others:
            text = f"{directory} is not the directory that rank 0 has"
            remedy = "put --checkpoint-dir on a file system that all nodes share"
            self.add("FAIL", "run directory", text, remedy, where=", ".join(others))
        else:
            self.add("OK", "run directory", f"{directory} is the same on all nodes")

    # ---- all ranks

    def check_products(self, infos: list[dict]) -> None:
        """Compare the bits of one matrix product over all ranks."""
        self.doing = "multiplying matrices"
        self.set(f"product {self.rank}", run_limited(PRODUCT_SECONDS, multiply, self.device))
        if self.rank == 0:
            products = self.gather("product", range(self.size), PRODUCT_SECONDS)
            names = [f"rank {rank} on {info['host']}" for rank, info in enumerate(infos)]
            self.findings += product_findings(products, names)

    def check_all_reduce(self) -> None:
        self.doing = "in the all_reduce"
        seconds = REDUCE_SECONDS + self.size / 32
        outcome = run_limited(seconds, self.time_all_reduces)
        log = ""
        if self.nccl_log.exists():
            log = self.nccl_log.read_text(errors="replace")
            self.nccl_log.unlink()
        outcome["links"] = nccl_links(log)
        warnings = re.findall(r"NCCL WARN (.*)", log)
        if "error" in outcome and warnings:
            outcome["error"] += f" ({warnings[-1].strip()[:200]})"
        self.set(f"reduced {self.rank}", outcome)
        if self.rank == 0:
            outcomes = self.gather("reduced", range(self.size), 5)
            self.findings.append(reduce_finding(outcomes))

    def time_all_reduces(self) -> dict:
        """{"speed": of the all_reduce over all ranks, and over those of a node}"""
        import torch
        import torch.distributed as dist

        self.init_process_group()
        total = torch.tensor(float(self.rank + 1), device=self.device)
        dist.all_reduce(total)
        if total.item() != self.size * (self.size + 1) / 2:
            raise RuntimeError(f"the sum is wrong: {total.item()}")
        text = f"{self.size} ranks: {measure_speed(dist.group.WORLD, self.device)}"
        nodes = list(self.hosts.values())
        count = len(nodes[0])
        if len(nodes) > 1 and count > 1:
            own_group, _ = dist.new_subgroups_by_enumeration(nodes)
            text += f"; {count} ranks of a node: {measure_speed(own_group, self.device)}"
        return {"speed": text}

    def init_process_group(self) -> None:
        import torch
        import torch.distributed as dist

        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self.device)
            os.environ["NCCL_DEBUG"] = "INFO"
            os.environ["NCCL_DEBUG_FILE"] = str(self.nccl_log)
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # it would kill this process
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=REDUCE_SECONDS),
            device_id=self.device if is_cuda else None,
        )


def run_limited(seconds: float, function, *arguments) -> dict:
    """What it returns, or {"error"}. If a GPU or NCCL hangs, its thread goes on."""
    try:
        return ThreadPoolExecutor().submit(function, *arguments).result(seconds)
    except Exception as error:
        return {"error": first_line(error)}


def merge(findings: list[Finding]) -> list[Finding]:
    """Combine equal findings of several hosts into one line."""
    merged: dict = {}
    for finding in findings:
        key = (finding.level, finding.check, finding.observed)
        first = merged.setdefault(key, finding)
        if first is not finding:
            first.where += f", {finding.where}"
    return list(merged.values())


def appears(file: str) -> bool:
    """Whether the file exists within ten seconds."""
    for _ in range(100):
        if os.path.exists(file):
            return True
        time.sleep(0.1)
    return False


# ---------------------------------------------------------------------------------- network


def accept_all(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        connection.close()


def reach(host: str, address: list | None) -> tuple[str, float, str]:
    """(host, shortest milliseconds to connect to it, why that fails or "")"""
    if address is None:
        return host, 0, "it has sent no address"
    times = []
    try:
        for _ in range(5):
            began = time.perf_counter()
            socket.create_connection(tuple(address), timeout=CONNECT_SECONDS).close()
            times.append(time.perf_counter() - began)
    except OSError as error:
        return host, 0, str(error)
    return host, 1000 * min(times), ""


def network_findings(reached: dict[int, list | None], names: dict[int, str]) -> list[Finding]:
    """reached: {sender: its results of reach(), or None}; names: hosts of the senders"""
    times = []  # (milliseconds, sender, receiver)
    failures = []
    for sender, results in reached.items():
        where = names[sender]
        if results is None:
            failures.append(Finding("FAIL", "network", "has sent no results", "see its log", where))
            continue
        for receiver, milliseconds, error in results:
            times.append((milliseconds, where, receiver))
            if error:
                text = f"cannot connect to {receiver}: {error}"
                remedy = "gloo and NCCL use any free port: allow all ports between the nodes"
                failures.append(Finding("FAIL", "network", text, remedy, where))
    if failures:
        return failures
    longest, where, receiver = max(times)
    text = f"each node connects to each other node by TCP in {longest:.2f} ms or less"
    if longest > 10:
        remedy = f"check the route from {where} to {receiver} (`ip route get ADDRESS`)"
        return [Finding("WARN", "network", text, remedy)]
    return [Finding("OK", "network", text)]


# ---------------------------------------------------------------------------- matrix product


def multiply(device) -> dict:
    """{"model", "bits": a checksum of a product, the same on all GPUs of that model}

    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    import torch

    model = "CPU"
    size = 64
    dtype = torch.float64  # exact for these numbers, so all CPUs compute the same bits
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        model = f"{gpu.name} with {gpu.multi_processor_count} multiprocessors"
        size = 4096
        dtype = torch.float16
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-1024, 1024, (2, size, size), generator=generator)
    left, right = numbers.to(device, dtype) / 1024
    product = left @ right
    is_stable = all(torch.equal(left @ right, product) for _ in range(100))
    bits = product.cpu().view(torch.int64).sum().item()
    return {"model": model, "bits": bits if is_stable else "other ones each time"}


def product_findings(products: dict[int, dict | None], names: list[str]):
    """products: by rank, of multiply() or {"error"}; names: of the ranks, with their hosts"""
    models: dict[str, dict] = {}  # {model: {rank: bits}}
    for rank, product in products.items():
        product = product or {"error": "no answer"}
        if "error" in product:
            text = f"{names[rank]} cannot multiply matrices: {product['error']}"
            yield Finding("FAIL", "matrix product", text, "see its log")
        else:
            models.setdefault(product["model"], {})[rank] = product["bits"]
    for model, ranks in models.items():
        usual = statistics.mode(ranks.values())
        first = next(rank for rank in ranks if ranks[rank] == usual)
        different = [rank for rank in ranks if ranks[rank] != usual]
        for rank in different:
            text = f"{names[rank]} computes other bits than {names[first]}"
            remedy = "exclude the node, and tell the administrators (of two, either may be wrong)"
            yield Finding("FAIL", "matrix product", text, remedy)
        if not different:
            yield Finding("OK", "matrix product", f"the same bits on all ranks ({model})")


# -------------------------------------------------------------------------------- all_reduce


def measure_speed(group, device) -> str:
    """The latency and bandwidth of an all_reduce."""
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    large = 64 << 20 if device.type == "cuda" else 4 << 20
    latency = time_all_reduce(group, 8 << 10, device)
    duration = time_all_reduce(group, large, device)
    bus = large / duration * 2 * (ranks - 1) / ranks / 1e9  # as nccl-tests define it
    return f"8 KiB in {1e6 * latency:.0f} us, {large >> 20} MiB at {bus:.2f} GB/s (bus)"


def time_all_reduce(group, size: int, device) -> float:
    """Median seconds of an all_reduce of `size` bytes."""
    import torch
    import torch.distributed as dist

    data = torch.ones(size // 4, device=device)
    times = []
    for _ in range(6):
        data[0].item()  # waits for the GPU
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        data[0].item()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])  # the first one sets up NCCL's connections


def nccl_links(log: str) -> list[str]:
    """The transports of NCCL's channels, from its INFO log: ["NET/IB/GDRDMA", "P2P/CUMEM"].

    A network has the number of the device, and with PXN that of the GPU which sends: /0(1).
    """
    kinds = r"(?:P2P|SHM|NET|COLLNET)/[\w ]+"
    found = re.findall(rf"via ({kinds})(?:/\d+(?:\(\d+\))?)?(/GDRDMA)?", log)
    links = {link + direct for link, direct in found}
    if "NVLS comm " in log:
        links.add("NVLS")
    return sorted(links)


def reduce_finding(outcomes: dict[int, dict | None]) -> Finding:
    """outcomes: by rank, {"speed"} or {"error"}, and the "links" of NCCL"""
    errors: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        outcome = outcome or {"error": "no answer"}
        if "error" in outcome:
            errors.setdefault(outcome["error"], []).append(rank)
    if errors:
        texts = [
            f"rank{'s' if len(ranks) > 1 else ''} {report.format_ranges(ranks)}: {error}"
            for error, ranks in errors.items()
        ]
        remedy = "search docs/TROUBLESHOOTING.md for this; see also the findings on the network"
        return Finding("FAIL", "all_reduce", "; ".join(texts), remedy)
    text = outcomes[0]["speed"]
    links = {link for outcome in outcomes.values() for link in outcome["links"]}
    if links:
        text += f"; over {', '.join(sorted(links))}"
    return Finding("OK", "all_reduce", text)


if __name__ == "__main__":
    sys.exit(main())
