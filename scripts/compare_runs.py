#!/usr/bin/env python3
"""Find where two runs differ: the first record, or the first tensor of two checkpoints.

Usage: python scripts/compare_runs.py A B

A and B are two run directories, two files metrics.jsonl, or two checkpoints (.pt).

Records of the same kind and step are compared, bit for bit, except for the fields time and
samples_per_second; NaN equals NaN. If a file has two records of a step, the last one counts. A
record is a mean over the steps since the one before it: compare runs with the same
--log-every-steps.

Of two checkpoints, all tensors and all other values except the options are compared, bit for bit.

Exit code: 0 equal; 1 different; 2 user error.

Examples:
    python scripts/compare_runs.py runs/one runs/two
    python scripts/compare_runs.py runs/one/checkpoint_epoch_1.pt runs/two/checkpoint_epoch_1.pt
"""

import json
import sys
from pathlib import Path

import torch

# What the trainer records in metrics.jsonl that differs between equal runs.
NOT_COMPARED = {"kind", "step", "time", "samples_per_second", "data_wait", "seconds_left"}
NOT_COMPARED |= {"gpu_memory_gb"}
LONGEST = 200  # characters of a value to print


class UserError(Exception):
    """Something the user can fix: printed as one sentence, without a traceback."""


def main() -> int:
    words = sys.argv[1:]
    if "-h" in words or "--help" in words:
        print(__doc__.strip())
        return 0
    try:
        if len(words) != 2:
            raise UserError("it needs two run directories, two metrics.jsonl or two checkpoints")
        is_equal, lines = compare(Path(words[0]), Path(words[1]))
    except UserError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0 if is_equal else 1


def compare(a: Path, b: Path) -> tuple[bool, list[str]]:
    """(whether they are equal, the lines to print)"""
    for path in (a, b):
        if not path.is_dir() and not path.is_file():
            raise UserError(f"{path} is neither a run directory nor a file: is the path correct?")
    if (a.suffix == ".pt") != (b.suffix == ".pt"):
        raise UserError(f"{a} and {b}: only one of them is a checkpoint; give two of a kind")
    if a.suffix == ".pt":
        return compare_checkpoints(a, b)
    return compare_records(a, b)


# ------------------------------------------------------------------------------------- RECORDS
def compare_records(a: Path, b: Path) -> tuple[bool, list[str]]:
    """The records of the steps that both have."""
    ours = read_records(a)
    theirs = read_records(b)
    common = [key for key in ours if key in theirs]
    common.sort(key=lambda key: key[1])  # stable: in the order of the file within a step
    if not common:
        raise UserError(f"{a} and {b} have no record of the same step")
    for equal, key in enumerate(common):
        kind, step = key
        for name in ours[key] | theirs[key]:
            our_text = exact_text(ours[key].get(name))
            their_text = exact_text(theirs[key].get(name))
            if name not in NOT_COMPARED and our_text != their_text:
                title = f"First difference: {shown(kind)} record of step {step}, field"
                lines = [f"{title} {shown(name)}", *both_values(our_text, their_text, a, b)]
                return False, [*lines, f"Equal before it: {count(equal)}."]
    steps = f"from step {common[0][1]} to step {common[-1][1]}"
    return True, [f"Equal: {count(len(common))}, {steps}."]


def read_records(path: Path) -> dict[tuple[str, int], dict]:
    """{(kind, step): record} of a run directory or a metrics.jsonl; the last one of a step."""
    if path.is_dir():
        path = path / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from None
    records = {}
    for line in lines:
        try:
            record = json.loads(line.decode())
            kind = record["kind"]
            step = record["step"]
        except (ValueError, RecursionError, KeyError, TypeError):
            continue  # half a line after a crash, or another program's
        if isinstance(kind, str) and type(step) is int:
            records[kind, step] = record
    if not records:
        raise UserError(f"{path} has no records: has the run trained --log-every-steps steps?")
    return records


def exact_text(value) -> str:
    """A float in decimal and as float.hex(): the same text means the same bits."""
    return f"{value!r}  {value.hex()}" if isinstance(value, float) else repr(value)


def both_values(ours: str, theirs: str, a: Path, b: Path) -> list[str]:
    """Two lines with the paths, aligned."""
    width = max(len(str(a)), len(str(b)))
    return [f"  {str(a):{width}}  {shown(ours)}", f"  {str(b):{width}}  {shown(theirs)}"]


def shown(text: str) -> str:
    """Shortened, and without control characters."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def count(records: int) -> str:
    return "1 record" if records == 1 else f"{records} records"


# --------------------------------------------------------------------------------- CHECKPOINTS
def compare_checkpoints(a: Path, b: Path) -> tuple[bool, list[str]]:
    """The tensors, then all other values."""
    ours = flatten(load_checkpoint(a))
    theirs = flatten(load_checkpoint(b))
    names = sorted(ours | theirs, key=lambda name: not torch.is_tensor(ours.get(name)))  # stable
    for name in names:
        our_value = ours.get(name)
        their_value = theirs.get(name)
        our_kind = kind_of(our_value)
        if our_kind != kind_of(their_value):
            lines = [f"First difference: {shown(name)}"]
            return False, lines + both_values(our_kind, kind_of(their_value), a, b)
        if torch.is_tensor(our_value):
            is_different = (bytes_of(our_value) != bytes_of(their_value)).any(1)  # [elements]
            if is_different.any():
                lines = [f"First difference: {shown(name)}, {our_kind}"]
                return False, lines + elements(our_value, their_value, is_different, a, b)
    tensors = sum(map(torch.is_tensor, ours.values()))
    return True, [f"Equal: {tensors} tensors and {len(ours) - tensors} other values."]


def load_checkpoint(path: Path):
    """The content of a checkpoint without the options of the run, on the CPU."""
    try:
        content = torch.load(str(path), mmap=True, map_location="cpu", weights_only=True)
    except Exception as error:  # a file can be damaged in many ways
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged or not a checkpoint ({cause})") from None
    if isinstance(content, dict):
        content.pop("config", None)
    return content


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


def kind_of(value) -> str:
    """What two values must have in common: a tensor's type and shape, or all of another value."""
    return f"{value.dtype} {list(value.shape)}" if torch.is_tensor(value) else exact_text(value)


def bytes_of(tensor):
    """[elements, bytes of an element], uint8"""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)


def elements(ours, theirs, is_different, a: Path, b: Path) -> list[str]:
    """The lines about the elements of two tensors that differ."""
    place = is_different.nonzero()[0, 0]
    index = [int(i) for i in torch.unravel_index(place, ours.shape)]
    first = [exact_text(tensor.reshape(-1)[place].item()) for tensor in (ours, theirs)]
    number = int(is_different.sum())
    lines = [f"  {number} of {is_different.numel()} elements differ, the first one at {index}:"]
    return lines + both_values(*first, a, b)


if __name__ == "__main__":
    sys.exit(main())
