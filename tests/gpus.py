"""A stand-in for nvidia-smi, for machines without a GPU: its output has the same form.

It can have several GPUs, memory errors, a lost GPU, and calls that hang.
"""

import json
import os
import sys
from pathlib import Path

PROGRAM = """#!{python} -S
import json, re, sys, time

state = json.load(open({state!r}))
if state["hangs"]:
    time.sleep(1000)
if state["fails"]:
    sys.exit(print(state["fails"]) or 15)
options = " ".join(sys.argv[1:])
fields = re.search(r"--query-gpu=(\\S+)", options)[1].split(",")
for gpu in state["gpus"]:
    print(", ".join(gpu[field] for field in fields))
"""


def gpu(index: int, **more) -> dict:
    """A healthy GPU that nobody uses."""
    facts = {
        "index": str(index),
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "driver_version": "999.1",
        "memory.total": "143771",
        "memory.used": "0",
        "ecc.errors.uncorrected.volatile.total": "0",
        "gpu_recovery_action": "None",
    }
    return facts | more


def nvidia_smi(directory: Path, gpus, hangs=False, fails="") -> str:
    """Write the program; returns a PATH that begins with it.

    gpus: of gpu(), or their number; fails: an error of all queries, as after Xid 79.
    """
    if isinstance(gpus, int):
        gpus = [gpu(index) for index in range(gpus)]
    folder = directory / "bin"
    folder.mkdir(exist_ok=True)
    state = {"gpus": gpus, "hangs": hangs, "fails": fails}
    file = folder / "nvidia-smi.json"
    program = folder / "nvidia-smi"
    replace(file, json.dumps(state))
    replace(program, PROGRAM.format(python=sys.executable, state=str(file)))
    return f"{folder}:{os.environ['PATH']}"


def replace(file: Path, text: str) -> None:
    """Write a program, which may be running."""
    new = file.with_name(f"new {file.name}")
    new.write_text(text)
    new.chmod(0o755)
    new.replace(file)
