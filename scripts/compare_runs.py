#!/usr/bin/env python3
"""Find where two runs differ: the first record, or the first tensor of two checkpoints.

Usage: python scripts/compare_runs.py A B

A and B are two run directories, two files metrics.jsonl, or two checkpoints (.pt).

Records of the same kind and step are compared, bit for bit, except for fields such as time and
samples_per_second; NaN equals NaN. If a file has two records of a step, the last one counts. A
record is a mean over the steps since the one before it: compare runs with the same
--log-every-steps.

Of two checkpoints, all tensors and all other values are compared, bit for bit, except for the
options and what names the run and its code. `diff A/config.yaml B/config.yaml` compares options.

Exit code: 0 equal; 1 different; 2 user error.

Examples:
    python scripts/compare_runs.py runs/one runs/two
    python scripts/compare_runs.py runs/one/best.pt runs/two/best.pt
"""

import sys
from pathlib import Path

import torch
from plot_metrics import read_records

# What the trainer records in metrics.jsonl that differs between equal runs.
NOT_COMPARED = {"time", "samples_per_second", "data_wait", "seconds_left", "gpu_memory_gb"}
NAMES = {"config", "run_id", "code"}  # in a checkpoint: what led to it
LONGEST = 200  # characters of a value to print


def main() -> int:
    words = sys.argv[1:]
    if len(words) != 2:
        print(__doc__.strip())
        return 0 if "-h" in words or "--help" in words else 2
    is_equal, text = compare(Path(words[0]), Path(words[1]))
    print(text)
    return 0 if is_equal else 1


def fail(text: str) -> None:
    print(f"compare_runs.py: error: {text}", file=sys.stderr)
    sys.exit(2)


def compare(a: Path, b: Path) -> tuple[bool, str]:
    """(whether they are equal, the lines to print)"""
    read = read_checkpoint if a.suffix == ".pt" else read_run
    ours = read(a)
    theirs = read(b)
    lines = []
    if read == read_run:  # one may be longer
        common = [name for name in ours if name in theirs]
        if not common:
            fail(f"{a} and {b} have no record of the same step")
        ours = {name: ours[name] for name in common}
        theirs = {name: theirs[name] for name in common}
        lines.append(f"Compared {len(common)} records, up to the {common[-1]}")
    ours = flatten(ours)
    theirs = flatten(theirs)
    for name in ours | theirs:
        difference = find_difference(ours.get(name), theirs.get(name))
        if difference:
            return False, "\n".join([*lines, f"First difference: {name}: {difference}"])
    return True, "\n".join([*lines, f"Equal: {len(ours)} values"])


def read_run(path: Path) -> dict[str, dict]:
    """{kind and step: record} of a run directory or a metrics.jsonl."""
    try:
        found = read_records(path)
    except OSError as error:
        fail(f"cannot read {error.filename} ({error.strerror})")
    if not found:
        fail(f"{path} has no records: has the run trained --log-every-steps steps?")
    records = {}
    for (step, kind), record in found.items():
        fields = {name: record[name] for name in record if name not in NOT_COMPARED}
        records[f"{kind} record of step {step}"] = fields
    return records


def read_checkpoint(path: Path) -> dict:
    """What it holds of the training, on the CPU."""
    try:
        content = torch.load(str(path), mmap=True, map_location="cpu", weights_only=True)
        return {name: content[name] for name in content if name not in NAMES}
    except Exception as error:  # a file can be damaged in many ways
        fail(f"{path} is damaged or not a checkpoint ({type(error).__name__}: {error})")


def flatten(value, name: str = "") -> dict:
    """{"['model']['fc.bias']": tensor, ...}: what nested dicts and lists hold, with its place."""
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and value:
        items = enumerate(value)
    else:
        return {name: value}
    found = {}
    for key, inner in items:
        found |= flatten(inner, f"{name}[{key!r}]")
    return found


def find_difference(ours, theirs) -> str:
    """In words; "" if they are equal."""
    our_text = text_of(ours)
    their_text = text_of(theirs)
    if our_text != their_text:
        return f"{our_text[:LONGEST]} in A, {their_text[:LONGEST]} in B"
    if torch.is_tensor(ours):
        is_different = (bytes_of(ours) != bytes_of(theirs)).any(1)  # [elements]
        if is_different.any():
            number = int(is_different.sum())
            return f"{number} of {len(is_different)} elements differ ({our_text})"
    return ""


def text_of(value) -> str:
    """A tensor's type and shape; another value, of a float all its bits."""
    return f"{value.dtype} {list(value.shape)}" if torch.is_tensor(value) else repr(value)


def bytes_of(tensor):
    """[elements, bytes of an element], uint8"""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
