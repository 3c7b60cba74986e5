#!/usr/bin/env python3
"""How the rank check and the hang report of scripts/guard.py grow with the number of ranks.

    python benchmarks/ranks_at_scale.py                      # 64, 256 and 1,024 ranks
    python benchmarks/ranks_at_scale.py --before old/guard.py --ranks 64 256 512

Each rank is a thread with its own connection to a real TCPStore, served by rank 0; eight ranks are
a host. The functions are those of guard.py; only what a rank knows about itself is simulated: its
rank info, and its position in a hang, in which the last rank is at fault. All threads share the
cores of this machine, so that the seconds are an upper limit for a cluster, where each rank has its
own; the bytes are the same there. The output is a Markdown table, and a plot:

    seconds   from the start, with all ranks connected, until the last rank has its answer
    rank 0    seconds of CPU time that the process of rank 0 takes, which serves the store
    sent      all keys and values that the ranks send to the store and receive from it
    per rank  the same, divided by the number of ranks
    requests  calls of the store by all ranks
    notes     how many ranks' positions rank 0 has read for the error message

The rows for 10,000 ranks are extrapolated from the smallest and the largest number of ranks, by a
power law. Seconds are not: they are those of this machine.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ranks import REPO, free_port

PER_HOST = 8
PROCESSES = 4  # at most, besides the one of rank 0's host
HOSTS = 16  # in a process, if that takes fewer of them
LARGEST = 10_000  # extrapolated
PARTS = ["rank check", "hang"]
GROWTH = {"cpu": "rank 0: CPU seconds", "sent": "bytes sent"}  # plotted
BUCKETS = [2_359_296, 4_720_640, 7_079_936, 11_397_096]  # gradients of ResNet-50 in DDP
COLLECTIVE = 4000  # the first incomplete one


# ------------------------------------------------------------------------------------ one process


class CountingStore:
    """A store that counts requests, and the bytes of their keys and values."""

    def __init__(self, store):
        self.store = store
        self.requests = 0
        self.sent = 0

    def __getattr__(self, name: str):
        method = getattr(self.store, name)

        def call(*arguments):
            self.requests += 1
            self.sent += size_of(arguments)
            result = method(*arguments)
            self.sent += size_of(result)
            return result

        return call


def size_of(value) -> int:
    """The bytes of all texts in an argument or a result."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(size_of(element) for element in value)
    return 0


class Rank:
    """A thread that calls what guard.py calls in a rank."""

    def __init__(self, guard, rank: int, size: int, port: int):
        self.guard = guard
        self.rank = rank
        local_rank = rank % PER_HOST
        self.world = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": size}
        self.world |= {"LOCAL_WORLD_SIZE": PER_HOST, "MASTER_PORT": port}
        self.connect()
        self.ended = 0.0  # the time when it has its answer
        self.notes = 0
        self.error = ""

    def connect(self) -> None:
        store = self.guard.open_store(self.world, 300)
        self.store = CountingStore(store)
        self.infos = None

    def start(self, part: str) -> threading.Thread:
        function = self.check if part == "rank check" else self.hang
        thread = threading.Thread(target=self.call, args=[function], name=str(self.rank))
        thread.start()
        return thread

    def call(self, function) -> None:
        self.ended = 0.0
        try:
            function()
        except SystemExit as end:
            if function == self.check:
                self.error = f"exit code {end.code}"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = self.ended or time.time()

    def check(self) -> None:
        _, self.infos = self.guard.check_ranks(self.world, [])

    def hang(self) -> None:
        watch = self.guard.HangWatch(self.rank, self.store, self.infos)
        watch.report = functools.partial(self.report, watch.report)
        watch.exit_all()

    def report(self, original, notes: dict, silent: dict) -> None:
        if not self.ended:  # guard.py would have ended the process after the first report
            self.ended = time.time()
            self.notes = len(notes)
            original(notes, silent)


def load_guard(file: Path, host: int, size: int, ranks: dict[int, Rank]):
    """A copy of guard.py for the ranks of one host, which knows them by the names of threads."""
    spec = importlib.util.spec_from_file_location(f"guard_of_host_{host}", file)
    guard = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guard)
    guard.HOST = f"node{host:05}"
    guard.rank_info = lambda world, arguments: rank_info(guard.HOST, host)
    guard.waits_for = lambda: name_of(COLLECTIVE) if own_number() < size - 1 else ""
    guard.positions = lambda: positions(late=own_number() == size - 1)
    guard.connect = lambda world, timeout: ranks[world["RANK"]].store
    for name in ("choose_interface", "log_topology"):
        setattr(guard, name, do_nothing)
    for name in ("watch", "poll"):  # its threads
        setattr(guard.HangWatch, name, do_nothing)
    return guard


def do_nothing(*_, **__) -> None:
    pass


def own_number() -> int:
    return int(threading.current_thread().name)


def rank_info(name: str, host: int) -> dict:
    """As guard.rank_info() returns it; no process has this id."""
    same = {"PyTorch": "2.15.0+cu130", "scripts/guard.py": "0123abcd"}
    same |= {"file train_distributed.py": "4567abcd", "file configs/default.yaml": "89ababcd"}
    address = f"10.{host // 65536}.{host // 256 % 256}.{host % 256}"
    gpu = f"GPU-{host:08}-0000-0000-0000-{own_number() % PER_HOST:012}"
    info = {"host": name, "pid": 0, "started": 0, "address": address, "gpu": gpu, "clock": name}
    return info | {"same": same}


def name_of(number: int) -> str:
    return f"nccl:all_reduce [[{BUCKETS[number % len(BUCKETS)]}]]"


def positions(late: bool) -> dict[str, dict]:
    """As guard.positions() returns it: one process group, 41 names of collectives."""
    completed = COLLECTIVE - 1
    enqueued = completed if late else COLLECTIVE + 20
    names = {str(n): name_of(n) for n in range(COLLECTIVE - 21, enqueued + 1)}
    position = {"enqueued": enqueued, "completed": completed, "started": -1, "names": names}
    return {"nccl-legacy 0": position}


def run_process(options, size: int) -> None:
    """Run the ranks of some hosts: a part for each line of stdin, answered by a line of JSON."""
    answers = sys.stdout
    sys.stdout = open(os.devnull, "w")
    import torch.distributed

    assert torch.distributed.is_available()
    os._exit = sys.exit  # ends the thread of a rank
    threading.stack_size(512 << 10)
    ranks: dict[int, Rank] = {}
    for host in options.hosts:
        guard = load_guard(options.guard, host, size, ranks)
        for rank in range(host * PER_HOST, min(size, (host + 1) * PER_HOST)):
            ranks[rank] = Rank(guard, rank, size, options.port)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "hang":
            sys.stderr = sys.stdout  # the error message
        facts = run_threads(list(ranks.values()), line.strip())
        print(json.dumps(facts), file=answers, flush=True)


def run_threads(ranks: list[Rank], part: str) -> dict:
    sent = sum(rank.store.sent for rank in ranks)
    requests = sum(rank.store.requests for rank in ranks)
    cpu = time.process_time()
    threads = [rank.start(part) for rank in ranks]
    for thread in threads:
        thread.join()
    return {
        "ended": max(rank.ended for rank in ranks),
        "cpu": time.process_time() - cpu,
        "sent": sum(rank.store.sent for rank in ranks) - sent,
        "requests": sum(rank.store.requests for rank in ranks) - requests,
        "notes": ranks[0].notes,
        "error": next((rank.error for rank in ranks if rank.error), ""),
    }


# ---------------------------------------------------------------------------------- the benchmark


def hosts_of_processes(size: int) -> list[list[int]]:
    """The numbers of the hosts that each process simulates."""
    hosts = list(range(math.ceil(size / PER_HOST)))
    others = hosts[1:]
    processes = min(PROCESSES, math.ceil(len(others) / HOSTS))
    return [hosts[:1], *[others[number::processes] for number in range(processes)]]


def measure(guard: Path, size: int) -> dict[str, dict]:
    """{part: {fact: figure}} for that number of ranks."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        failure = Path(directory, "failure")
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(size)}
        env |= {"RANK_TIMEOUT": "300", "HANG_TIMEOUT": "540", "FAILURE_FILE": str(failure)}
        env |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCHELASTIC_USE_AGENT_STORE": ""}
        # PyTorch looks up the name of its address; a name server may not answer all at once.
        env["RES_OPTIONS"] = "timeout:1 attempts:1"
        words = [sys.executable, __file__, f"--guard={guard}", f"--port={port}", f"--ranks={size}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        processes = []
        try:
            for hosts in hosts_of_processes(size):
                command = [*words, "--hosts", *map(str, hosts)]
                processes.append(subprocess.Popen(command, **pipes))
            for process in processes:
                process.stdout.readline()  # ready
            results = {part: run_part(processes, part) for part in PARTS}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        expected = f"hang: rank {size - 1} on node{(size - 1) // PER_HOST:05} is at collective "
        verdict = json.loads(failure.read_text())["reason"] if failure.exists() else "none"
        results["hang"]["is right"] = verdict.startswith(expected)
    return results


def run_part(processes: list[subprocess.Popen], part: str) -> dict:
    began = time.time()
    for process in processes:
        process.stdin.write(f"{part}\n")
        process.stdin.flush()
    answers = [process.stdout.readline() for process in processes]
    if "" in answers:
        sys.exit(f"ranks_at_scale.py: error: a process ended in the {part}: see above")
    facts = [json.loads(answer) for answer in answers]
    for fact in facts:
        if fact["error"]:
            sys.exit(f"ranks_at_scale.py: error: a rank failed in the {part}: {fact['error']}")
    return {
        "seconds": max(fact["ended"] for fact in facts) - began,
        "cpu": facts[0]["cpu"],  # rank 0 is in the first process
        "sent": sum(fact["sent"] for fact in facts),
        "requests": sum(fact["requests"] for fact in facts),
        "notes": facts[0]["notes"],
    }


def extrapolate(sizes: list[int], figures: list[float]) -> float:
    """The figure at LARGEST, on the power law through the first and the last."""
    low = figures[0]
    high = figures[-1]
    exponent = math.log(high / low) / math.log(sizes[-1] / sizes[0])
    return high * (LARGEST / sizes[-1]) ** exponent


def print_table(part: str, contestants: dict[str, dict[int, dict]]) -> None:
    print(f"\n| {part} | ranks | seconds | rank 0 | sent | per rank | requests | notes |")
    print("| --- " * 8 + "|")
    for name, results in contestants.items():
        sizes = list(results)
        for size in sizes:
            facts = results[size][part]
            print_row(name, size, facts, notes_read(facts) if part == "hang" else "")
        if len(sizes) > 1:
            facts = {"seconds": math.nan}
            for fact in ("cpu", "sent", "requests"):
                facts[fact] = extrapolate(sizes, [results[size][part][fact] for size in sizes])
            print_row(f"{name}, extrapolated", LARGEST, facts, "")


def notes_read(facts: dict) -> str:
    text = f"{facts['notes']:,}"
    return text if facts["is right"] else f"{text}: wrong rank named"


def print_row(name: str, size: int, facts: dict, notes: str) -> None:
    seconds = facts["seconds"]
    cells = [
        name,
        f"{size:,}",
        "" if math.isnan(seconds) else f"{seconds:.2f} s",
        f"{facts['cpu']:.2f} s",
        f"{facts['sent'] / 1e6:,.1f} MB",
        f"{facts['sent'] / size / 1e3:,.1f} kB",
        f"{facts['requests']:,.0f}",
        notes,
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def plot(contestants: dict[str, dict[int, dict]], output: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 7), layout="constrained")
    for column, part in zip(axes.T, PARTS):
        for panel, (fact, unit) in zip(column, GROWTH.items()):
            for number, (name, results) in enumerate(contestants.items()):
                sizes = list(results)
                figures = [results[size][part][fact] for size in sizes]
                panel.plot(sizes, figures, "o-", color=f"C{number}", label=name)
                if len(sizes) > 1:
                    ends = [figures[-1], extrapolate(sizes, figures)]
                    line = [sizes[-1], LARGEST]
                    panel.plot(line, ends, ":", color=f"C{number}", label=f"{name}, extrapolated")
            panel.set(xscale="log", yscale="log", xlabel="ranks", ylabel=unit)
            panel.set_title(part)
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    default = [64, 256, 1024]
    add("--ranks", type=int, nargs="+", default=default, help=f"[{' '.join(map(str, default))}]")
    add("--before", type=Path, metavar="FILE", help="another guard.py to compare with")
    add("--output", default="ranks_at_scale.png", help="empty: none [ranks_at_scale.png]")
    add("--guard", type=Path, help=argparse.SUPPRESS)
    add("--hosts", type=int, nargs="+", help=argparse.SUPPRESS)
    add("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hosts:
        return run_process(options, options.ranks[0])
    files = {"before": options.before} if options.before else {}
    files["now"] = REPO / "scripts/guard.py"
    contestants: dict[str, dict[int, dict]] = {name: {} for name in files}
    for size in options.ranks:
        for name, file in files.items():
            contestants[name][size] = measure(file.resolve(), size)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for part in PARTS:
        print_table(part, contestants)
    if options.output:
        plot(contestants, options.output)


if __name__ == "__main__":
    main()
