"""Start the ranks of a launch on this machine, as the launchers of this repository do."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
# What makes malloc keep freed memory, as the trainer does, for all contestants.
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=2147483647:glibc.malloc.mmap_max=0"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(words: list, ranks: int, **env: str | None) -> list[str]:
    """Run Python with these arguments once per rank. Returns the stdout of each rank.

    env: variables for all ranks; None removes a variable.
    If a rank fails, the others are killed and this process exits with the output of that rank.
    """
    port = free_port()
    cores = len(os.sched_getaffinity(0))
    shared = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    shared |= {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "TORCHELASTIC_RUN_ID": "bench"} | env
    shared = {name: value for name, value in shared.items() if value is not None}
    words = [sys.executable, *map(str, words)]
    with tempfile.TemporaryDirectory() as directory:
        streams = [[Path(directory, f"{rank}.{name}") for name in "oe"] for rank in range(ranks)]
        processes = []
        for rank, (out, err) in enumerate(streams):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "BEGAN": str(time.time())}
            with out.open("w") as to_out, err.open("w") as to_err:
                more = {"env": shared | own, "stdout": to_out, "stderr": to_err}
                processes.append(subprocess.Popen(words, **more))
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for code, (out, err) in zip(codes, streams):
            if code:
                sys.exit(f"error: {' '.join(words)}: exit code {code}\n{out.read_text()}"
                         f"{err.read_text()}")  # fmt: skip
        return [out.read_text() for out, _ in streams]
