#!/usr/bin/env python3
"""Find where two runs differ: the first record, or the first tensor of two checkpoints.

Usage: python scripts/compare_runs.py A B

A and B are two run directories, two files metrics.jsonl, or two checkpoints.

Records of the same kind and step are compared, bit for bit, except for the fields time,
samples_per_second and evaluation_seconds; NaN equals NaN. If a file has two records of a step, the
last one counts. A record is a mean over the steps since the one before it: compare runs with the
same --log-every-steps. Of two run directories, the options (config.yaml), PyTorch versions
(status.json) and world sizes (attempts.jsonl, status.json) that differ are also printed: of their
last launches, world sizes of all. They do not change the exit code.

Of two checkpoints, all tensors and all other values are compared, bit for bit.

Exit code: 0 equal; 1 different; 2 user error.

Examples:
    python scripts/compare_runs.py runs/one runs/two
    python scripts/compare_runs.py runs/one/checkpoint_epoch_1.pt runs/two/checkpoint_epoch_1.pt
"""

import json
import math
import re
import sys
import zipfile
from pathlib import Path

# What the trainer records in metrics.jsonl that differs between equal runs.
NOT_COMPARED = ("kind", "step", "time", "samples_per_second", "evaluation_seconds")
LONGEST = 200  # characters of a value to print
MOST = 20  # values to print


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
    try:
        are_checkpoints = is_checkpoint(a)
        if is_checkpoint(b) != are_checkpoints:
            raise UserError(f"{a} and {b}: only one of them is a checkpoint; give two of a kind")
        if are_checkpoints:
            return compare_checkpoints(a, b)
        is_equal, lines = compare_records(a, b)
        if a.is_dir() and b.is_dir():
            lines += compare_launches(a, b)
            if is_equal:
                lines += hint(a, b)
        return is_equal, lines
    except OSError as error:
        raise UserError(f"cannot read {error.filename} ({error.strerror})") from None


def is_checkpoint(path: Path) -> bool:
    """UserError if there is nothing to read."""
    if not path.exists():
        raise UserError(f"{path} does not exist: is the path correct?")
    if path.is_dir():
        return False
    if not path.is_file():
        raise UserError(f"{path} is neither a run directory nor a file: is the path correct?")
    return path.suffix == ".pt" or zipfile.is_zipfile(path)


# ------------------------------------------------------------------------------------- RECORDS
def compare_records(a: Path, b: Path) -> tuple[bool, list[str]]:
    """The records of the steps that both have: (whether they are equal, the lines to print)."""
    ours = read_records(a)
    theirs = read_records(b)
    common = [key for key in ours if key in theirs]
    common.sort(key=lambda key: key[1])  # stable: in the order of the file within a step
    if not common:
        text = f"{steps_of(ours)} and {steps_of(theirs)}"
        raise UserError(f"{a} and {b} have no record of the same step: they have steps {text}")
    different = [key for key in common if differences(ours[key], theirs[key])]
    if different:
        first = different[0]
        number = common.index(first)  # of equal records before it
        lines = equal_until(common[:number])
        lines += first_difference(first, ours[first], theirs[first], a, b)
        later = len(common) - number - 1
        lines.append(f"Of {count(later)} after it, {len(different) - 1} differ.")
    else:
        first_step = common[0][1]
        last_step = common[-1][1]
        lines = [f"Equal: {count(len(common))}, from step {first_step} to step {last_step}."]
    for path, records in ((a, ours), (b, theirs)):
        only = len(records) - len(common)
        if only:
            lines.append(f"Not compared: {count(only)} that only {path} has.")
    return not different, lines


def read_records(path: Path) -> dict[tuple[str, int], dict]:
    """{(kind, step): record} of a run directory or a metrics.jsonl; the last one of a step."""
    if path.is_dir():
        path = path / "metrics.jsonl"
        if not path.exists():
            raise UserError(f"{path} does not exist: give a directory that a run has written to")
        if not path.is_file():
            raise UserError(f"{path} is not a file: delete or move it")
    records = {}
    damaged = []  # line numbers
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        record = parse_record(line)
        if record is None:
            damaged.append(number)
        else:
            records[record["kind"], record["step"]] = record
    if damaged:
        text = f"skipped line {damaged[0]}, which is not a record"
        if len(damaged) > 1:
            text = f"skipped {len(damaged)} lines that are not records; the first is {damaged[0]}"
        print(f"WARNING: {path}: {text}", file=sys.stderr)
    if not records:
        raise UserError(f"{path} has no records: has the run trained --log-every-steps steps?")
    return records


def parse_record(line: bytes) -> dict | None:
    """None if it is not a record: half a line, NUL bytes, or another program's."""
    record = parse_object(line)
    if not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    return record


def differences(ours: dict, theirs: dict) -> list[str]:
    """The names of the fields that differ, in the order of the record."""
    found = []
    for name in names_of(ours, theirs):
        if name not in NOT_COMPARED and exact(ours, name) != exact(theirs, name):
            found.append(name)
    return found


def exact(values: dict, name: str) -> str:
    """The value in full, in decimal and as float.hex(): the same text means the same bits."""
    return exact_text(values[name]) if name in values else "absent"


def exact_text(value) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value!r}  {value.hex()}"
    return repr(value)


def first_difference(key: tuple[str, int], ours: dict, theirs: dict, a: Path, b: Path):
    """The lines about the first record that differs."""
    kind, step = key
    first, *others = differences(ours, theirs)
    lines = [f"First difference: {shown(kind)} record of step {step}, field {shown(first)}"]
    lines += both_values(exact(ours, first), exact(theirs, first), a, b)
    if others:
        names = ", ".join(shown(name) for name in others)
        lines.append(f"  This record also differs in {names}.")
    return lines


def both_values(ours: str, theirs: str, a: Path, b: Path) -> list[str]:
    """Two lines with the paths, aligned."""
    width = max(len(str(a)), len(str(b)))
    return [f"  {str(a):{width}}  {shown(ours)}", f"  {str(b):{width}}  {shown(theirs)}"]


def shown(text: str) -> str:
    """Shortened, and without control characters."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def equal_until(equal: list[tuple[str, int]]) -> list[str]:
    if not equal:
        return ["No record before the first difference is equal."]
    kind, step = equal[-1]
    return [f"Equal up to the {shown(kind)} record of step {step} ({count(len(equal))})."]


def count(records: int) -> str:
    return "1 record" if records == 1 else f"{records} records"


def steps_of(records: dict[tuple[str, int], dict]) -> str:
    steps = [step for _, step in records]
    return f"{min(steps)} to {max(steps)}"


# ------------------------------------------------------------------------------------ LAUNCHES
def compare_launches(a: Path, b: Path) -> list[str]:
    """The lines about the options and world sizes of two run directories that differ."""
    lines = []
    ours = read_options(a)
    theirs = read_options(b)
    if ours and theirs:
        lines += values_that_differ("Options", ours, theirs, names_of(ours, theirs))
        if ours.get("log_every_steps") != theirs.get("log_every_steps"):
            lines.append("The records are means over different numbers of steps: log_every_steps.")
    else:
        missing = b if ours else a
        lines.append(f"Options: not compared, because {missing} has no config.yaml.")
    our_version = read_status(a).get("pytorch", "unknown")
    their_version = read_status(b).get("pytorch", "unknown")
    if our_version != their_version:
        lines.append(f"PyTorch: {shown(str(our_version))} and {shown(str(their_version))}")
    our_sizes = world_sizes(a)
    their_sizes = world_sizes(b)
    if our_sizes != their_sizes:
        lines.append(f"World sizes: {our_sizes} and {their_sizes}")
    return lines


def read_options(directory: Path) -> dict[str, str]:
    """{name: its lines in config.yaml}; nothing without that file.

    The trainer writes the file itself. An option begins in the first column; a text of several
    lines and the items of a list follow below it.
    """
    path = directory / "config.yaml"
    if not path.is_file():
        return {}
    options = {}
    name = ""
    for line in path.read_text(errors="replace").splitlines():
        begins = re.match(r"([A-Za-z_]\w*):(.*)", line)
        if begins:
            name = begins[1]
            options[name] = begins[2].strip()
        elif name:
            options[name] = f"{options[name]} {line.strip()}".strip()
    options.pop("checkpoint_dir", None)  # differs in any case
    return options


def world_sizes(directory: Path) -> str:
    """Those of all attempts under supervise.py, and of the last launch: "5, then 1"."""
    path = directory / "attempts.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records = [parse_object(line) for line in lines]
    sizes = []
    for record in [*records, read_status(directory)]:
        size = record.get("world_size")
        if isinstance(size, int) and sizes[-1:] != [size]:
            sizes.append(size)
    return ", then ".join(str(size) for size in sizes) or "unknown"


def read_status(directory: Path) -> dict:
    """status.json; nothing if it is absent or damaged."""
    path = directory / "status.json"
    return parse_object(path.read_bytes()) if path.is_file() else {}


def parse_object(line: bytes) -> dict:
    """The JSON object; nothing if it is another program's, or damaged."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def names_of(ours: dict, theirs: dict) -> list[str]:
    """The keys of both, in their order."""
    return list(ours | theirs)


def values_that_differ(title: str, ours: dict, theirs: dict, names: list[str]) -> list[str]:
    """A title and a line for each value; nothing if they are equal."""
    lines = []
    for name in names:
        if exact(ours, name) != exact(theirs, name):
            both = f"{shown(text_of(ours, name))} and {shown(text_of(theirs, name))}"
            lines.append(f"  {shown(name)}: {both}")
    if len(lines) > MOST:
        lines[MOST:] = [f"  and {len(lines) - MOST} more"]
    return [f"{title} that differ:", *lines] if lines else []


def text_of(values: dict, name: str) -> str:
    """The value for people: a text, such as a line of config.yaml, without quotes."""
    if name not in values:
        return "absent"
    value = values[name]
    return value if isinstance(value, str) else repr(value)


def hint(a: Path, b: Path) -> list[str]:
    """How to compare the newest checkpoints that both directories have."""
    names = [path.name for path in a.glob("checkpoint_*_*.pt") if (b / path.name).is_file()]
    if not names:
        return []
    newest = max(names, key=lambda name: (a / name).stat().st_mtime)
    command = f"python scripts/compare_runs.py {a / newest} {b / newest}"
    return [f"To compare the weights: {command}"]


# --------------------------------------------------------------------------------- CHECKPOINTS
def compare_checkpoints(a: Path, b: Path) -> tuple[bool, list[str]]:
    """(whether they are equal, the lines to print). Options that differ do not count."""
    our_content = load_checkpoint(a)
    their_content = load_checkpoint(b)
    our_options = pop_options(our_content)
    their_options = pop_options(their_content)
    ours = flatten(our_content)
    theirs = flatten(their_content)
    tensors = []  # names
    values = []  # names
    for name in names_of(ours, theirs):
        if is_tensor(ours.get(name)) or is_tensor(theirs.get(name)):
            tensors.append(name)
        else:
            values.append(name)
    different = [name for name in tensors if not same_bits(ours.get(name), theirs.get(name))]
    value_lines = values_that_differ("Values", ours, theirs, values)
    if different:
        name = different[0]
        lines = first_tensor(name, ours.get(name), theirs.get(name), a, b)
        lines.append(f"Of {len(tensors)} tensors, {len(different)} differ.")
    else:
        others = "" if value_lines else f" and {len(values)} other values"
        lines = [f"Equal: all {len(tensors)} tensors{others}."]
    lines += value_lines
    options = names_of(our_options, their_options)
    lines += values_that_differ("Options", our_options, their_options, options)
    return not different and not value_lines, lines


def load_checkpoint(path: Path):
    """The content of a checkpoint, on the CPU; tensors are read from the file when needed."""
    try:
        import torch
    except ImportError:
        text = "to compare checkpoints, it needs PyTorch: activate your environment"
        raise UserError(text) from None
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load() ignores the CRC-32
        content = torch.load(str(path), mmap=True, map_location="cpu", weights_only=True)
    except Exception as error:  # a file can be damaged in many ways
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged or not a checkpoint ({cause})") from None
    if damaged:
        raise UserError(f"{path} is damaged: its record {damaged} has the wrong CRC-32")
    return content


def pop_options(content) -> dict:
    """Take the options of the run out of the content of a checkpoint; nothing if it has none."""
    options = content.pop("config", {}) if isinstance(content, dict) else {}
    if not isinstance(options, dict):
        return {}
    options.pop("checkpoint_dir", None)  # differs in any case
    return options


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


def is_tensor(value) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def kind_of(value) -> str:
    return f"{value.dtype} {list(value.shape)}" if is_tensor(value) else "not a tensor"


def same_bits(ours, theirs) -> bool:
    """Whether two tensors have the same type, shape and bits. None: a tensor that is absent."""
    import torch

    if kind_of(ours) != kind_of(theirs):
        return False
    return torch.equal(bytes_of(ours), bytes_of(theirs))


def bytes_of(tensor):
    """[elements, bytes of an element], uint8"""
    import torch

    if tensor.numel() == 0:
        return torch.empty(0, 1, dtype=torch.uint8)
    elements = tensor.detach().reshape(-1, 1).contiguous()
    return elements.view(torch.uint8)


def first_tensor(name: str, ours, theirs, a: Path, b: Path) -> list[str]:
    """The lines about the first tensor that differs."""
    import torch

    kind = kind_of(ours)
    if kind != kind_of(theirs):
        lines = [f"First tensor that differs: {shown(name)}"]
        return lines + both_values(kind, kind_of(theirs), a, b)
    is_different = (bytes_of(ours) != bytes_of(theirs)).any(1)  # [elements]
    our_elements = ours.detach().reshape(-1)[is_different]
    their_elements = theirs.detach().reshape(-1)[is_different]
    wide = torch.complex128 if ours.is_complex() else torch.float64
    largest = (our_elements.to(wide) - their_elements.to(wide)).abs().max().item()
    place = is_different.nonzero()[0, 0]
    index = [int(i) for i in torch.unravel_index(place, ours.shape)]
    lines = [f"First tensor that differs: {shown(name)}, {kind}"]
    lines.append(
        f"  {len(our_elements)} of {ours.numel()} elements differ, by {largest:.3g} at most"
    )
    lines.append(f"  The first one is at {index}:")
    our_text = exact_text(our_elements[0].item())
    their_text = exact_text(their_elements[0].item())
    return lines + both_values(our_text, their_text, a, b)


if __name__ == "__main__":
    sys.exit(main())
