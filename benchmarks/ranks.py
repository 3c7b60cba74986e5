"""The processes of one launch on this machine, as torchrun would start them."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run_ranks(words: list[str], ranks: int, places=None, **env: str) -> list[str]:
    """Starts this Python with these words once per rank. Returns what each has printed to stdout.

    places: by rank, words that go before the command. env: variables of all of them.

    If one fails, the others are killed and this process exits, with what the first to fail said.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = len(os.sched_getaffinity(0))
    shared = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    shared |= {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "TORCHELASTIC_RUN_ID": "bench"} | env
    with tempfile.TemporaryDirectory() as directory:
        streams = [[Path(directory, f"{rank}.{name}") for name in "oe"] for rank in range(ranks)]
        processes = []
        for rank, (place, (out, err)) in enumerate(zip(places or [[]] * ranks, streams)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "BEGAN": str(time.time())}
            with out.open("w") as to_out, err.open("w") as to_err:
                processes.append(
                    subprocess.Popen(
                        [*place, sys.executable, *words],
                        env=shared | own,
                        stdout=to_out,
                        stderr=to_err,
                    )
                )
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for code, (out, err) in zip(codes, streams):
            if code:
                said = out.read_text() + err.read_text()
                sys.exit(f"error: {' '.join(words)}: exit code {code}\n{said}")
        return [out.read_text() for out, _ in streams]
