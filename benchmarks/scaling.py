#!/usr/bin/env python3
"""Compare the all_reduce times that scripts/plan.py predicts with gloo's, on links of known speed.

    sudo python benchmarks/scaling.py             # a Markdown table, and scaling.png; 10 minutes

Hosts are network namespaces of this machine on a bridge, with one or two ranks each. `tc` (token
bucket filter) limits their links to --mbits, slow enough for two cores to simulate 16 hosts. The
prediction takes the bandwidth from that setting, the latency of a hop from a small all_reduce on 2
hosts, and the rest from scripts/plan.py. The second part shows the limits of the model: processes
on one host that communicate through memory and soon outnumber the cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

from ranks import REPO, run_ranks

sys.path.insert(0, str(REPO / "scripts"))

SMALL, SIZES = 8 << 10, (256 << 10, 1 << 20, 4_800_000)  # bytes; last: SimpleConvNet's gradients
SHAPES = ((2, 1), (3, 1), (4, 1), (4, 2), (8, 1), (16, 1), (16, 2))  # hosts x ranks on each
PAYLOAD = 1448 / 1514  # share of a full Ethernet frame that is not TCP, IP or Ethernet header


def worker() -> None:
    """Run in each rank: print the median seconds of an all_reduce, by size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    seconds = {}
    for size in (SMALL, *SIZES):
        data, times = torch.zeros(size // 4), []
        dist.all_reduce(data)
        for _ in range(3 if size == SIZES[-1] else 7):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(data)
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times.append(slowest.item())
        seconds[size] = statistics.median(times)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


@contextmanager
def hosts(number: int, mbits: float):
    """Create namespaces on a bridge. mbits: their sending rate; 0: no limit. Yields their names."""
    tag = f"plan{os.getpid()}"
    names, switch = [f"{tag}h{n}" for n in range(number)], f"{tag}s"
    try:
        run(f"ip netns add {switch}")
        run(f"ip -n {switch} link add bridge up type bridge")
        for n, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link add eth0 type veth peer name port{n} netns {switch}")
            run(f"ip -n {switch} link set port{n} master bridge up")
            run(f"ip -n {name} address add 10.111.0.{n + 1}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up")
            bucket = f"tbf rate {mbits}mbit burst 16kb latency 500ms"
            if mbits:
                run(f"tc -n {name} qdisc add dev eth0 root {bucket}")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def measure(places: list[list[str]], master: str, interface: str) -> dict[int, float]:
    """Seconds by size, with one rank for each of the places (command prefixes)."""
    env = {"MASTER_ADDR": master, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise c10d warns that host names are unknown
    out = run_ranks([__file__, "--worker"], len(places), places, **env)
    return {int(size): seconds for size, seconds in json.loads(out[0]).items()}


def compare(mbits: float, most: int) -> list[tuple[str, str, int, float, float]]:
    """Rows (part, hosts x ranks, bytes, predicted, measured) for hosts with links of that speed."""
    from plan import Links, all_reduce_seconds

    rows, links = [], None
    with hosts(most, mbits) as names:
        for number, each in [shape for shape in SHAPES if shape[0] <= most]:
            places = [["ip", "netns", "exec", n] for n in names[:number] for _ in range(each)]
            measured = measure(places, "10.111.0.1", "eth0")
            if links is None:
                bandwidth = mbits * 1e6 / 8 * PAYLOAD
                # 2 hosts: 2 x 1/2 x (2 latencies + bytes / bandwidth)
                latency = max((measured[SMALL] - SMALL / bandwidth) / 2, 1e-6)
                links = Links(latency, float("inf"), latency, bandwidth)
            for size in SIZES:
                predicted = all_reduce_seconds(size, number, each, links)["ring"]
                shape = f"{number} x {each}"
                rows.append((f"{mbits:g} Mbit/s", shape, size, predicted, measured[size]))
    return rows


def compare_processes(most: int) -> list[tuple[str, str, int, float, float]]:
    from plan import Links, all_reduce_seconds

    rows, both = [], None
    cores = len(os.sched_getaffinity(0))
    for number in [n for n in (2, 4, 8, 16, 32) if n <= most]:
        measured = measure([[]] * number, "127.0.0.1", "lo")
        both = both or measured
        latency = both[SMALL] / 2
        bandwidth = (SIZES[-1] - SMALL) / (both[SIZES[-1]] - both[SMALL])
        share = max(1, number / cores)  # ranks per core, which share its memory bandwidth
        links = Links(latency, bandwidth / share, 0.0, float("inf"))
        for size in SIZES:
            predicted = all_reduce_seconds(size, 1, number, links)["ring"]
            rows.append(("one host", f"1 x {number}", size, predicted, measured[size]))
    return rows


def plot(rows, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    ends = [min(min(r[3:]) for r in rows) / 2, max(max(r[3:]) for r in rows) * 2]
    axes.plot(ends, ends, color="gray", linewidth=1, label="predicted = measured")
    for part in dict.fromkeys(row[0] for row in rows):
        points = [row for row in rows if row[0] == part]
        axes.scatter([r[3] for r in points], [r[4] for r in points], s=18, label=part)
    axes.set(xscale="log", yscale="log", xlabel="predicted, s", ylabel="measured, s")
    axes.set_title("all_reduce: scripts/plan.py and gloo")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "description": __doc__}
    parser = argparse.ArgumentParser(**style)
    add = parser.add_argument
    add("--mbits", type=float, nargs="*", default=[20, 50], help="link speeds [20 50]")
    add("--hosts", type=int, default=16, help="maximum number of hosts [16]")
    add("--processes", type=int, default=32, help="maximum number of processes on one host [32]")
    add("--output", default="scaling.png", help="[scaling.png]")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker()
    if options.mbits and os.geteuid():
        sys.exit("scaling.py: error: namespaces need root: use sudo, or --mbits without values")
    rows = [row for mbits in options.mbits for row in compare(mbits, options.hosts)]
    rows += compare_processes(options.processes)
    print("| links | hosts x ranks | bytes | predicted | measured | measured / predicted |")
    print("| --- | --- | --- | --- | --- | --- |")
    for part, shape, size, predicted, measured in rows:
        figures = f"{1e3 * predicted:.1f} ms | {1e3 * measured:.1f} ms"
        print(f"| {part} | {shape} | {size} | {figures} | {measured / predicted:.2f} |")
    for part in dict.fromkeys(row[0] for row in rows):
        errors = [abs(r[4] / r[3] - 1) for r in rows if r[0] == part]
        middle = statistics.median(errors)
        print(f"{part}: median error {100 * middle:.0f} %, largest {100 * max(errors):.0f} %")
    plot(rows, options.output)


if __name__ == "__main__":
    main()
