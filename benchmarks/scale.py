#!/usr/bin/env python3
"""What guard.py and doctor.py cost on many ranks: all clients of one store in this process.

    python benchmarks/scale.py --ranks 64                    # 8 per node
    unshare -rn sh -c "ip link set lo up; python benchmarks/scale.py"    # 64, 512 and 2,400

The store is PyTorch's, with a connection for each rank; the functions are those of scripts/. The
store asks for the name of each client's address: without a network, that takes no time. All bytes
pass through rank 0, whose node has the store. Prints, for each number of ranks:
    rank check    seconds that rank 0 needs once all ranks have come; bytes of keys and values
    hang          the same for a hang that all ranks report, one of which is late
    never comes   requests per second at rank 0 while all ranks wait 300 s for one that never comes
    doctor        bytes when the ranks meet, and of a check
"""

import argparse
import contextlib
import io
import json
import os
import resource
import sys
import time

from ranks import REPO, free_port

sys.path.append(str(REPO / "scripts"))
import doctor  # noqa: E402
import guard  # noqa: E402
import hang  # noqa: E402
import report  # noqa: E402

RANKS_PER_NODE = 8
NAME = "gloo:all_reduce [[11]]"


class Counted:
    """A store that counts the bytes of its keys and values, and its requests."""

    bytes = 0
    requests = 0

    def __init__(self, store):
        self.store = store

    def count(self, *texts) -> None:
        Counted.requests += 1
        Counted.bytes += sum(len(text) for text in texts)

    def set(self, key, value):
        self.count(key, value)
        self.store.set(key, value)

    def get(self, key):
        value = self.store.get(key)
        self.count(key, value)
        return value

    def check(self, keys):
        self.count(*keys)
        return self.store.check(keys)

    def add(self, key, number):
        self.count(key, "8 bytes.")
        return self.store.add(key, number)


class Clock:
    """In place of the module `time`: a pause takes no time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def measure(function, *arguments) -> tuple[float, int]:
    """Seconds and bytes."""
    before = Counted.bytes
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        function(*arguments)
    return time.perf_counter() - began, Counted.bytes - before


def connect(count: int) -> list[Counted]:
    """A client for each rank. Rank 0's has the server."""
    port = free_port()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files for each
    worlds = [{"MASTER_PORT": port, "RANK": rank} for rank in range(count)]
    return [Counted(guard.open_store(world, 60)) for world in worlds]


def info_of(rank: int) -> dict:
    info = guard.rank_info(["train_distributed.py", "--config", "configs/default_config.yaml"])
    return {**info, "host": f"node{rank // RANKS_PER_NODE:03}.example.org"}


def rank_check(stores: list[Counted]) -> tuple[float, int]:
    """All ranks have come; rank 0 compares them, and all read the result."""
    _, sent = measure(send_all, stores, "rank", info_of)
    deadline = time.monotonic() + 300
    seconds, read = measure(guard.compare_ranks, stores[0], len(stores), 300, deadline)
    _, answered = measure(get_all, stores, "problems")
    return seconds, sent + read + answered


def send_all(stores: list[Counted], name: str, value) -> None:
    for rank, store in enumerate(stores):
        store.set(f"{name} {rank}", json.dumps(value(rank)))


def get_all(stores: list[Counted], name: str) -> None:
    for store in stores:
        store.get(name)


def note_of(rank: int) -> dict:
    position = {"enqueued": 25, "completed": 24, "started": -1, "names": {"25": NAME}}
    if rank == 7:
        position = {"enqueued": 24, "completed": 24, "started": -1, "names": {}}
    line = "in train() at train_distributed.py:412"
    return {"quiet": 540, "waits": NAME, "groups": {"gloo 0": position}, "line": line}


class Watch(hang.HangWatch):
    """Without threads."""

    def __init__(self, rank: int, stores: list[Counted]):
        self.rank = rank
        self.size = len(stores)
        self.store = stores[rank]
        self.infos = hang.RankInfos(self.store)


def hang_report(stores: list[Counted]) -> tuple[float, int]:
    """Each rank sends its note; the first reports; the others wait until it has."""
    watches = [Watch(rank, stores) for rank in range(len(stores))]
    _, sent = measure(lambda: [watch.publish(note_of(watch.rank)) for watch in watches])
    seconds, read = measure(watches[0].collect)
    _, answered = measure(lambda: [watch.collect() for watch in watches[1:]])
    return seconds, sent + read + answered


def requests_in_vain(stores: list[Counted]) -> float:
    """Requests per second of all ranks that wait for what never comes."""
    before = Counted.requests
    real_time = report.time
    report.time = Clock()
    report.wait_for(stores[-1], "never", 300)
    report.time = real_time
    return (Counted.requests - before) * len(stores) / 300


def doctor_bytes(stores: list[Counted]) -> tuple[int, int]:
    """Of what all ranks send and read when they meet; of a check."""
    rank = doctor.Rank.__new__(doctor.Rank)
    rank.__dict__.update(
        rank=0, size=len(stores), store=stores[0], limit=300, findings=[], hosts=[]
    )

    def info(number: int) -> dict:
        host = f"node{number // RANKS_PER_NODE:03}.example.org"
        place = {"host": host, "address": "10.0.0.1", "port": 40000}
        return {**place, "findings": [], "mark": f"/scratch/run/.mark_{host}_{number}"}

    _, sent = measure(send_all, stores, "info", info)
    _, on_first = measure(rank.exchange, "info", info(0), rank.collect)
    _, on_others = measure(get_all, stores[1:], "info")
    _, on_leaders = measure(get_all, stores[::RANKS_PER_NODE], "nodes")
    outcome = [True, "each node connects to each other node by TCP"]
    _, check = measure(send_all, stores[1:], "check", lambda _: outcome)
    return sent + on_first + on_others + on_leaders, check


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[64, 512, 2400], help="[64 512 2400]"
    )
    args = parser.parse_args()
    print("| ranks | rank check | hang | never comes | doctor |\n| --- | --- | --- | --- | --- |")
    for count in args.ranks:
        os.environ["ATTEMPT_ID"] = f"scale.{count}"
        stores = connect(count)
        check_seconds, check_bytes = rank_check(stores)
        hang_seconds, hang_bytes = hang_report(stores)
        cells = [
            f"{count}",
            f"{check_seconds:.2f} s, {check_bytes / 1e6:.2f} MB",
            f"{hang_seconds:.2f} s, {hang_bytes / 1e6:.2f} MB",
            f"{requests_in_vain(stores):.0f} per s",
            " + ".join(f"{size / 1e6:.2f}" for size in doctor_bytes(stores)) + " MB",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
