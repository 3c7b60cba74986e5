#!/usr/bin/env python3
"""Diagnose a machine or all nodes of a job: what is wrong, where, and what to do.

    python scripts/doctor.py                                       this machine
    TRAIN_SCRIPT=scripts/doctor.py sbatch run_distributed.slurm    all nodes of a job; works with
                                                                   every launcher

It checks each machine: software, GPUs, memory, limits, disks, cores, host name, environment, launch
scripts, data. In a launch, all ranks also connect to a store with time limits, so that it can name
ranks that are missing, late or different. Then it measures the network between the nodes and an
all_reduce over all ranks. That takes less than a minute. It writes an empty file to the run
directory and notes to logs/, and removes them.

It prints one line per finding: OK, WARN or FAIL, what was found, what to do. Exit code: 0 no
problem, 1 a warning, 2 a failure. In a launch, a warning is also 0, because launchers treat any
other exit code as a crash.

In a launch it replaces the training script, so it accepts all options. It uses --config,
--checkpoint-dir, --data-dir, --dataset and --distributed-backend.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import checks
import guard
import preflight
from checks import REPOSITORY, Finding, existing, first_line
from guard import HOST

MEET_SECONDS = 20  # for all ranks to connect to the store
SEND_SECONDS = 4  # for one node to send to another
REDUCE_SECONDS = 20  # for the all_reduce
LEVELS = ["OK", "WARN", "FAIL"]


def main() -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # hide c10d's long messages
    args, others = parse(sys.argv[1:])
    if args.nnodes:
        return start_ranks(args)
    if "RANK" in os.environ or guard.is_srun_step(os.environ):
        Rank(args, guard.launch_environment(os.environ)).run()
    if others:
        preflight.refuse(f"{others[0]} is not an option outside of a launch: see --help")
    findings = checks.check_machine(args.checkpoint_dir)
    findings += checks.check_repository(args.dataset, args.data_dir)
    return report(findings, args.json)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, arguments of the training script). The command line overrides --config."""
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="doctor.py", description=__doc__, **style)
    add = parser.add_argument
    add("--json", action="store_true", help="print the findings as JSON")
    add("--config", help="configuration file of the training")
    add("--checkpoint-dir", "--save-dir", default="checkpoints", help="run directory [checkpoints]")
    add("--data-dir", default="data", help="[data]")
    add("--dataset", default="mnist_sample", help="[mnist_sample]")
    add("--distributed-backend", help="nccl or gloo [nccl on GPUs, else gloo]")
    for name in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-port"):
        add(name, type=int, help=argparse.SUPPRESS)  # from cluster_train.sh, as for torchrun
    add("--master-addr", help=argparse.SUPPRESS)
    file = Path(parser.parse_known_args(argv)[0].config or "")
    if file.suffix in (".yaml", ".yml"):
        try:
            import yaml

            config = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            names = "checkpoint_dir", "data_dir", "dataset", "distributed_backend"
            parser.set_defaults(**{name: config[name] for name in names if config.get(name)})
        except Exception as error:
            preflight.refuse(f"cannot read --config {file}: {' '.join(str(error).split())}")
    return parser.parse_known_args(argv)


def report(findings: list[Finding], as_json: bool) -> int:
    """Print all findings, the most severe last. Returns the exit code."""
    findings = sorted(findings, key=lambda finding: LEVELS.index(finding.level))
    levels = [finding.level for finding in findings]
    counts = (f"{levels.count(level)} {level}" for level in reversed(LEVELS) if level in levels)
    text = "\n".join([*map(str, findings), f"doctor.py: {', '.join(counts)}"])
    if as_json:
        text = json.dumps([asdict(finding) for finding in findings], indent=1)
    os.write(1, f"{text}\n".encode())  # one write, because other ranks print too
    return LEVELS.index(levels[-1])


# ------------------------------------------------------------------------------- a whole job


def start_ranks(args) -> int:
    """Run the ranks of this node. Without torchrun: it waits for missing nodes. Returns 0 or 2."""
    local, ranks = args.nproc_per_node, []
    for rank in range(local):
        env = os.environ | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(local)}
        env |= {"RANK": str(args.node_rank * local + rank), "WORLD_SIZE": str(args.nnodes * local)}
        env |= {"MASTER_ADDR": args.master_addr, "MASTER_PORT": str(args.master_port)}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv, "--nnodes=0"], env=env))
    return 2 * any([process.wait() for process in ranks])


class Rank:
    """One rank of a launch.

    Before each step it writes a note to logs/, which may be shared even if the network between the
    nodes is broken. Rank 0 collects the findings and reads the notes to report where a rank hangs.
    """

    def __init__(self, args, world: dict[str, int]):
        self.args, self.rank, self.size = args, world["RANK"], world["WORLD_SIZE"]
        self.world, self.local_rank = world, world["LOCAL_RANK"]
        self.began, self.doing, self.is_done = time.monotonic(), "", False
        self.findings: list[Finding] = []
        self.master = f"{os.environ['MASTER_ADDR']}:{world['MASTER_PORT']}"
        self.notes = REPOSITORY / "logs" / ("doctor_" + re.sub(r"\W", "_", self.master))

    def run(self) -> None:
        """Run all checks and exit."""
        signal.alarm(120)  # in case anything hangs
        stdout = os.dup(1)
        os.dup2(2, 1)  # where the gloo of PyTorch 2.8 and 2.9 would print
        try:
            self.log("importing PyTorch")
            with suppress(ImportError):  # checks.software() reports it
                import torch  # noqa: F401
            self.log("checking its machine")
            findings = checks.attempt(checks.cores)
            if self.local_rank == 0:
                findings = checks.check_machine(self.args.checkpoint_dir)
            for finding in findings:
                finding.where = HOST
            self.findings += [f for f in findings if f.level != "OK" or self.rank == 0]
            self.info = self.describe()
            if self.meet():
                self.check_job()
        except Exception as error:
            text = f"rank {self.rank} on {HOST} failed while {self.doing}: {first_line(error)}"
            self.add("FAIL", "doctor", text, "see its log")
        os.dup2(stdout, 1)
        if self.rank == 0:
            self.findings += checks.check_repository(self.args.dataset, self.args.data_dir)
            failed = report(merge(self.findings), self.args.json) == 2
            if failed:
                worst = next(f for f in self.findings if f.level == "FAIL")
                guard.write_failure("configuration", f"{worst.check}: {worst.observed}", 0)
        elif failed := not self.is_done:
            # Print findings that did not reach rank 0. Launchers kill all ranks at the first
            # failure, so let rank 0 print its report first.
            os.write(2, "".join(f"{finding}\n" for finding in self.findings).encode())
            time.sleep(max(0.0, self.began + 50 - time.monotonic()))
        shutil.rmtree(self.notes, ignore_errors=True)
        os._exit(2 * failed)  # even if a thread still hangs

    def add(self, level: str, check: str, text: str, remedy: str = "", **fields) -> None:
        self.findings.append(Finding(level, check, text, remedy, **fields))

    def log(self, doing: str) -> None:
        """Write what this rank does next to its note."""
        self.doing = doing
        with suppress(OSError):
            self.notes.mkdir(parents=True, exist_ok=True)
            (self.notes / str(self.rank)).write_text(f"on {HOST} was last seen {doing}")

    def last_seen(self, rank: int) -> str:
        """The note of that rank; "" if there is none, or it is of an earlier launch."""
        with suppress(OSError):
            note = self.notes / str(rank)
            return note.read_text() if note.stat().st_mtime > time.time() - 120 else ""
        return ""

    def set(self, key: str, value) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str, seconds: float):
        """A value from the store; None if it is not set in time."""
        text = guard.wait_for(self.store, key, time.monotonic() + seconds)
        return None if text is None else json.loads(text)

    def gather(self, kind: str, ranks, seconds: float) -> dict:
        """{rank: its value of that kind}; all share one deadline."""
        end = time.monotonic() + seconds
        return {rank: self.get(f"{kind} {rank}", end - time.monotonic()) for rank in ranks}

    # ---- rank info

    def describe(self) -> dict:
        """The rank info to compare: "same" must be equal, "alike" should be equal."""
        info = guard.rank_info(self.world, ["train_distributed.py", *sys.argv[1:]])
        import torch

        gpus = torch.cuda.device_count()
        self.gpu = self.local_rank if self.local_rank < gpus else 0
        self.backend = self.args.distributed_backend or ("nccl" if gpus else "gloo")
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
        python = platform.python_version()
        info["same"] |= {"Python": python, "NCCL": nccl, "backend": self.backend}
        info["alike"] = {
            "GPU": torch.cuda.get_device_name(self.gpu) if gpus else "none",
            "number of visible GPUs": gpus,
            "number of cores per rank": checks.count_cores(),
            "number of ranks per node": self.world["LOCAL_WORLD_SIZE"],
        }
        info["findings"] = [asdict(finding) for finding in self.findings if self.rank]
        return info

    def meet(self) -> bool:
        """Connect to the store on the master. Returns whether that worked."""
        self.log(f"connecting to {self.master}")
        try:
            # PyTorch would retry an unknown name for minutes.
            socket.getaddrinfo(os.environ["MASTER_ADDR"], self.world["MASTER_PORT"])
            opening = ThreadPoolExecutor().submit(guard.open_store, self.world, MEET_SECONDS)
            self.store = opening.result(MEET_SECONDS + 5)
        except Exception as error:
            text = str(error).split("\n")[0] or "another program answers there"
            known = {"timed out": "no answer", "EADDRINUSE": "the port is in use"}
            why = next((known[words] for words in known if words in text), text)
            text = f"rank {self.rank} on {HOST} cannot open the store at {self.master}: {why}"
            remedy = "check MASTER_ADDR (an address of rank 0), the port, and any firewall"
            self.add("FAIL", "ranks", text, remedy)
            return False
        self.set(f"info {self.rank}", self.info)
        self.log("waiting for rank 0")
        return True

    def check_job(self) -> None:
        """The checks that need several ranks. Collective: every rank with a store."""
        if self.rank == 0:
            infos = [*self.gather("info", range(self.size), MEET_SECONDS).values()]
            self.compare_ranks(infos)
            self.set("infos", infos)
        infos = self.get("infos", 2 * MEET_SECONDS + 10)
        if infos is None or infos[self.rank] is None:
            text = f"rank {self.rank} on {HOST} was too late: rank 0 had stopped waiting"
            self.add("FAIL", "ranks", text, "see the log of rank 0")
            return
        self.hosts = guard.ranks_by_host(infos)
        self.leaders = {ranks[0]: host for host, ranks in self.hosts.items()}
        if self.rank in self.leaders:
            self.compare_nodes()
            self.measure_network(infos)
        if None not in infos and self.size > 1:
            guard.choose_interface(infos, self.info)
            self.log("waiting for the measurements of the network")
            if self.rank == 0:
                self.set("reduce", True)  # start together, because its time is limited
            self.get("reduce", 60)
            self.check_all_reduce()
        if self.rank == 0:
            self.set("done", True)
        with suppress(Exception):  # rank 0 is the store's server and may exit first
            self.get("done", 30)
        self.is_done = True

    def compare_ranks(self, infos: list[dict | None]) -> None:
        """Report which ranks are missing and which differ."""
        for rank in (rank for rank, info in enumerate(infos) if not info):
            hosts, node = guard.hosts_of_job(os.environ), rank // self.world["LOCAL_WORLD_SIZE"]
            host = hosts[node] if node < len(hosts) else f"node rank {node}"
            missing = f"on {host} did not start within {MEET_SECONDS} s"
            remedy = f"see its log, and check that its host reaches {self.master}"
            self.add("FAIL", "ranks", f"rank {rank} {self.last_seen(rank) or missing}", remedy)
        if None not in infos:
            hosts = ", ".join(guard.ranks_by_host(infos))
            self.add("OK", "ranks", f"all {self.size} are here, on {hosts}")
        self.findings += [Finding(**f) for info in infos if info for f in info["findings"]]
        different = list(guard.find_differences(infos))
        for text in different:
            remedy = "all nodes need the same software, and each rank a GPU of its own"
            self.add("FAIL", "same everywhere", text, remedy)
        alike = [info and info | {"same": info["alike"], "gpu": ""} for info in infos]
        for text in guard.find_differences(alike):
            remedy = "all ranks wait for the slowest: ask for the same on each node"
            self.add("WARN", "same everywhere", text, remedy)
        if not different:
            text = ", ".join(f"{what} {value}" for what, value in infos[0]["same"].items())
            self.add("OK", "same everywhere", text)

    # ---- between nodes

    def compare_nodes(self) -> None:
        """Clocks and run directories: rank 0 sends its time and the name of a file it created."""
        self.log("comparing clocks and run directories")
        directory, before = Path(self.args.checkpoint_dir).absolute(), time.time()
        self.set(f"ready {self.rank}", True)
        if self.rank == 0:
            self.gather("ready", self.leaders, 10)
            file = existing(directory) / f".doctor_{time.time_ns()}"  # NFS caches names
            with suppress(OSError):  # checks.disks() reports it
                file.touch()
            self.set("sent", [time.time(), str(file)])
            for found in self.gather("found", self.leaders.keys() - {0}, 15).values():
                self.findings += [Finding(**finding) for finding in found or []]
            with suppress(OSError):
                file.unlink()
            return
        sent, file = self.get("sent", 15) or (before, "")
        after, deadline = time.time(), time.monotonic() + 10
        while not (seen := os.path.exists(file)) and time.monotonic() < deadline:
            time.sleep(0.05)
        clock = Finding("OK", "clocks", "less than 2 s from that of rank 0", "", HOST)
        # Rank 0 sent it between before and after: the offset is from before - sent to after - sent.
        if before - sent > 2 or after - sent < -2:
            text = f"its clock is {after - sent:+.0f} s from that of rank 0"
            remedy = "deadlines and file times will be wrong: start chrony or ntpd there"
            clock = Finding("WARN", "clocks", text, remedy, HOST)
        run = Finding("OK", "run directory", f"{directory} is shared with rank 0", "", HOST)
        if not seen:
            text = f"{directory} is not the directory that rank 0 has"
            remedy = "put --checkpoint-dir on a file system that all nodes share"
            run = Finding("FAIL", "run directory", text, remedy, HOST)
        self.set(f"found {self.rank}", [asdict(clock), asdict(run)])

    def measure_network(self, infos: list[dict]) -> None:
        """Each node sends to the next one; with up to five nodes, to each of the others."""
        ring, results = list(self.leaders), {}
        towards = os.environ["MASTER_ADDR"] if self.rank else infos[ring[-1]]["address"]
        family = socket.AF_INET6 if ":" in self.info["address"] else socket.AF_INET
        server = socket.create_server(("", 0), family=family)
        Thread(target=answer, args=[server], daemon=True).start()
        address = guard.address_towards(towards), server.getsockname()[1]
        self.set(f"address {self.rank}", address)
        addresses = self.gather("address", ring, 15)
        for distance in range(1, len(ring) if len(ring) <= 5 else 2):
            receivers = dict(zip(ring, ring[distance:] + ring[:distance]))
            self.log(f"sending to {self.leaders[receivers[self.rank]]}")
            try:
                result = send(addresses[receivers[self.rank]])
            except (OSError, TypeError) as error:
                result = {"error": str(error)}
            self.set(f"sent {distance} {self.rank}", result)
            for sender, result in self.gather(f"sent {distance}", ring, 3 * SEND_SECONDS).items():
                results[sender, receivers[sender]] = result or {"error": "no answer"}
        if self.rank == 0 and results:
            self.findings += network_findings(results, self.leaders)

    # ---- all ranks

    def check_all_reduce(self) -> None:
        self.log("in the all_reduce")
        seconds = REDUCE_SECONDS + self.size / 32
        try:
            outcome = ThreadPoolExecutor().submit(self.time_all_reduces).result(seconds)
        except Exception as error:
            text = str(error).strip().split("\n")[-1][:200]
            outcome = {"error": text or f"no result after {seconds:.0f} s"}
        log = nccl_log()
        text = log.read_text(errors="replace") if log.exists() else ""
        log.unlink(missing_ok=True)
        outcome["links"] = nccl_links(text)
        if "error" in outcome and (warnings := re.findall(r"NCCL WARN (.*)", text)):
            outcome["error"] += f" ({warnings[-1].strip()[:200]})"
        self.set(f"reduced {self.rank}", outcome)
        if self.rank == 0:
            outcomes = self.gather("reduced", range(self.size), 5)
            self.findings.append(reduce_finding(outcomes))

    def time_all_reduces(self) -> dict:
        """{"seconds": {"all BYTES" or "node BYTES": seconds}, "local": ranks per node, "ranks"}"""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        cuda = self.backend == "nccl"
        device = torch.device("cuda", self.gpu) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(nccl_log())}
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # it would kill this process
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=REDUCE_SECONDS),
            device_id=device if cuda else None,
        )
        total = torch.tensor(float(self.rank + 1), device=device)
        dist.all_reduce(total)
        if total.item() != self.size * (self.size + 1) / 2:
            raise RuntimeError(f"the sum is wrong: {total.item()}")
        nodes, groups = [*self.hosts.values()], {"all": dist.group.WORLD}
        if len(nodes) > 1 and len(nodes[0]) > 1:
            groups["node"], _ = dist.new_subgroups_by_enumeration(nodes)
        sizes = 8 << 10, (64 << 20) if cuda else (4 << 20)
        seconds = {
            f"{name} {size}": time_all_reduce(group, size, device)
            for name, group in groups.items()
            for size in sizes
        }
        return {"seconds": seconds, "local": len(nodes[0]), "ranks": self.size}


def merge(findings: list[Finding]) -> list[Finding]:
    """Combine equal findings of several hosts into one line."""
    merged: dict = {}
    for finding in findings:
        first = merged.setdefault((finding.level, finding.check, finding.observed), finding)
        if finding.where not in first.where.split(", "):
            first.where += f", {finding.where}"
    return list(merged.values())


# ---------------------------------------------------------------------------------- network


def answer(server: socket.socket) -> None:
    """Serve the send() of all nodes: answer each line."""

    def serve(link: socket.socket) -> None:
        with link, suppress(OSError):
            while data := link.recv(1 << 20):
                if data.endswith(b"\n"):
                    link.sendall(b"\n")

    while True:
        Thread(target=serve, args=[server.accept()[0]], daemon=True).start()


def send(address: list) -> dict:
    """Send for half a second: {"milliseconds": round trip, "gbit": per second, "lost": share}.

    If the round trip is slow, only "milliseconds" is measured: the rest would add nothing.
    """

    def ping() -> float:
        began = time.perf_counter()
        link.sendall(b"\n")
        if not link.recv(1):
            raise OSError("the connection was closed")
        return time.perf_counter() - began

    with socket.create_connection(tuple(address), timeout=SEND_SECONDS) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        result = {"milliseconds": 1000 * min(ping() for _ in range(5))}
        if result["milliseconds"] > 10:
            return result
        chunk, sent, began, (again, packets) = bytes(1 << 18), 0, time.perf_counter(), counts(link)
        while time.perf_counter() < began + 0.5:
            sent += link.send(chunk)
        ping()
        result["gbit"] = 8e-9 * sent / (time.perf_counter() - began)
        result["lost"] = (counts(link)[0] - again) / (counts(link)[1] - packets)
        return result


def counts(link: socket.socket) -> tuple[int, int]:
    """(packets retransmitted, packets sent) from struct tcp_info (<linux/tcp.h>) of the kernel."""
    info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 140)
    return struct.unpack_from("I", info, 100)[0], struct.unpack_from("I", info, 136)[0]


def network_findings(results: dict, names: dict[int, str]) -> list[Finding]:
    """results: {(sender, receiver): what send() returned, or {"error"}}"""
    findings, lost = [], {}
    times = {pair: r["milliseconds"] for pair, r in results.items() if "error" not in r}
    gbits = {pair: r["gbit"] for pair, r in results.items() if "gbit" in r}
    for (sender, receiver), result in results.items():
        if "error" in result:
            text = f"{names[sender]} cannot send to {names[receiver]}: {result['error']}"
            remedy = "gloo and NCCL use any free port: allow all ports between the nodes"
            findings.append(Finding("FAIL", "network", text, remedy))
        if result.get("lost", 0) > 0.01:
            lost.setdefault(sender, {})[receiver] = result["lost"]
    if far := {pair for pair, milliseconds in times.items() if milliseconds > 10}:
        slowest = max(far, key=times.get)
        where = " and ".join(names[rank] for rank in slowest)
        text = f"{times[slowest]:.0f} ms round trip"
        near = {rank for pair in times.keys() - far for rank in pair}
        if len(culprit := set.intersection(*map(set, far)) - near) == 1:
            where, text = names[culprit.pop()], f"{text} to each of the others"
        remedy = "check its route (`ip route get ADDRESS`), or exclude the node"
        findings.append(Finding("WARN", "network", text, remedy, where))
    for sender, shares in lost.items():
        to = ", ".join(names[receiver] for receiver in shares)
        text = f"{max(shares.values()):.1%} of the packets that it sends to {to} are lost"
        remedy = "exclude the node; a cable, port or switch may be bad: tell the administrators"
        findings.append(Finding("WARN", "network", text, remedy, names[sender]))
    if findings:
        return findings
    (sender, receiver), best = min(gbits, key=gbits.get), max(gbits.values())
    text = f"TCP {gbits[sender, receiver]:.1f} to {best:.1f} Gbit/s, the slowest from "
    text += f"{names[sender]} to {names[receiver]}; "
    text += f"{min(times.values()):.2f} to {max(times.values()):.2f} ms round trip"
    return [Finding("OK", "network", text)]


# -------------------------------------------------------------------------------- all_reduce


def time_all_reduce(group, size: int, device) -> float:
    """Median seconds of an all_reduce of `size` bytes."""
    import torch
    import torch.distributed as dist

    data, times, slowest = torch.ones(size // 4, device=device), [], torch.zeros(1, device=device)
    dist.all_reduce(data, group=group)  # the first one sets up NCCL's connections
    while len(times) < 7 and slowest.item() < 0.5:
        data.fill_(1)[0].item()  # item() waits for the GPU
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        data[0].item()
        times.append(time.perf_counter() - began)
        if len(times) == 1:
            slowest += times[0]
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group)  # all must repeat equally often
    return statistics.median(times)


def nccl_log() -> Path:
    return Path(tempfile.gettempdir(), f"doctor_nccl_{os.getpid()}")


def nccl_links(log: str) -> list[str]:
    """The transports of NCCL's channels, from its INFO log: ["NET/IB/GDRDMA", "P2P/CUMEM"]."""
    found = re.findall(r"via ((?:P2P|SHM|NET|C2C|NVLS)(?:/\w+)?)(?:/\d+)?(/GDRDMA)?", log)
    return sorted({link + direct for link, direct in found})


def reduce_finding(outcomes: dict[int, dict | None]) -> Finding:
    """outcomes: by rank, the result of time_all_reduces() or {"error"}, and its "links"."""
    errors: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        if error := (outcome or {"error": "no answer"}).get("error"):
            errors.setdefault(error, []).append(rank)
    if errors:
        texts = [
            f"rank{'s' * (len(ranks) > 1)} {guard.format_ranges(ranks)}: {error}"
            for error, ranks in errors.items()
        ]
        remedy = "search docs/TROUBLESHOOTING.md for this; see also the findings on the network"
        return Finding("FAIL", "all_reduce", "; ".join(texts), remedy)
    outcome, texts = outcomes[0], []
    outcome["links"] = sorted({link for other in outcomes.values() for link in other["links"]})
    for name, n in ("all", outcome["ranks"]), ("node", outcome["local"]):
        times = [(int(k.split()[1]), s) for k, s in outcome["seconds"].items() if name in k]
        if times:
            (small, latency), (large, seconds) = times
            bus = large / seconds * 2 * (n - 1) / n / 1e9  # as nccl-tests define it
            text = f"{n} ranks" + " of a node" * (name == "node")
            text += f": {small >> 10} KiB in {1e6 * latency:.0f} us"
            texts.append(f"{text}, {large >> 20} MiB at {bus:.2f} GB/s (bus)")
    text = "; ".join(texts) + f"; over {', '.join(outcome['links'])}" * bool(outcome["links"])
    return Finding("OK", "all_reduce", text, data=outcome)  # for scripts/plan.py


if __name__ == "__main__":
    sys.exit(main())
