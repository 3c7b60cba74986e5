"""scripts/compare_runs.py finds injected differences, and a replayed run equal."""

import json
import math
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from harness import REPO, load, train

SCRIPT = REPO / "scripts/compare_runs.py"
compare_runs = load(SCRIPT)
EXPECTED = ("time", "samples_per_second", "evaluation_seconds")  # they differ between equal runs


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):
    """A real run: 52 steps, with a record of each, and two epochs."""
    directory = tmp_path_factory.mktemp("compare") / "run"
    return train(directory, 1, *tiny, "--epochs=2").directory


@pytest.fixture
def copy(tmp_path, run):
    """A copy whose times and throughputs differ, as those of a second run."""
    (tmp_path / "copy").mkdir()
    for path in run.iterdir():
        duplicate = os.link if path.suffix == ".pt" else shutil.copyfile  # checkpoints are large
        duplicate(path, tmp_path / "copy" / path.name)
    records = read(run)
    for record in records:
        for name in set(EXPECTED) & set(record):
            record[name] *= 1.5
    write(tmp_path / "copy", records)
    return tmp_path / "copy"


def read(directory) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write(directory, records: list[dict]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text)


def compare(a, b) -> tuple[int, list[str]]:
    """(exit code, lines printed)"""
    command = [sys.executable, SCRIPT, a, b]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stderr == "", done.stderr
    return done.returncode, done.stdout.splitlines()


def inject(draw: random.Random, records: list[dict]) -> tuple[int, str]:
    """Change a field of a record, and of some later ones: (its index, the name of the field)."""
    first = draw.randrange(len(records))
    names = [name for name in records[first] if name not in ("kind", "step", *EXPECTED)]
    field = draw.choice(names)
    later = range(first + 1, len(records))
    for index in [first, *draw.sample(later, k=min(2, len(later)))]:
        change(draw, records[index], field)
    return first, field


def change(draw: random.Random, record: dict, name: str) -> None:
    value = record.get(name, 0)
    kind = draw.choice(["last bit", "last bit", "nan", "absent", "sign"])
    if kind == "absent":
        record.pop(name, None)
    elif kind == "nan":
        record[name] = math.nan
    elif isinstance(value, str):  # the digest of the weights
        record[name] = value[:-1] + ("1" if value[-1] == "0" else "0")
    elif kind == "sign":
        record[name] = -value or -0.0
    else:
        record[name] = math.nextafter(value, math.inf)


@pytest.mark.parametrize("seed", range(50))
def test_an_injected_difference_is_found_at_the_exact_record(tmp_path, run, copy, seed):
    before = read(run)
    after = read(copy)
    first, field = inject(random.Random(seed), after)
    write(copy, after)
    differing = 0
    for one, other in zip(before, after, strict=True):
        texts = [{k: repr(v) for k, v in r.items() if k not in EXPECTED} for r in (one, other)]
        differing += texts[0] != texts[1]

    is_equal, lines = compare_runs.compare(run, copy)

    assert not is_equal
    kind = before[first]["kind"]
    step = before[first]["step"]
    place = lines.index(f"First difference: {kind} record of step {step}, field {field}")
    for line, record in zip(lines[place + 1 :], (before[first], after[first])):
        decimal = line.split()[1]
        assert decimal == repr(record[field]) if field in record else decimal == "absent"
        if isinstance(record.get(field), float) and math.isfinite(record[field]):
            assert float.fromhex(line.split()[2]) == record[field]
    later = compare_runs.count(len(before) - first - 1)
    assert f"Of {later} after it, {differing - 1} differ." in lines
    if first:
        last = before[first - 1]
        text = f"Equal up to the {last['kind']} record of step {last['step']}"
        assert lines[0] == f"{text} ({compare_runs.count(first)})."
    else:
        assert lines[0] == "No record before the first difference is equal."


def test_equal_runs_are_equal_although_their_times_differ(run, copy):
    assert (run / "metrics.jsonl").read_text() != (copy / "metrics.jsonl").read_text()
    code, lines = compare(run, copy)
    name = "checkpoint_epoch_2.pt"
    hint = f"python scripts/compare_runs.py {run / name} {copy / name}"
    equal = "Equal: 54 records, from step 1 to step 52."
    assert (code, lines) == (0, [equal, f"To compare the weights: {hint}"])


def test_only_steps_that_both_have_are_compared_and_the_last_record_of_a_step_counts(run, copy):
    records = read(copy)
    wrong = [records[30] | {"loss": 9.0}, records[31] | {"loss": math.nan}]
    # As after a crash: steps 31 and 32 are recorded, and recorded again.
    write(copy, [*records[20:26], *wrong, *records[27:]])
    _, lines = compare_runs.compare(run, copy)
    assert lines[:2] == [
        "Equal: 33 records, from step 21 to step 52.",
        f"Not compared: 21 records that only {run} has.",
    ]
    write(copy, [*records, *wrong])
    is_equal, lines = compare_runs.compare(run, copy)
    assert not is_equal and "Of 23 records after it, 1 differ." in lines


def test_nan_equals_nan(run, copy):
    both = []
    for directory in (run, copy):
        records = read(directory)
        records[5]["loss"] = math.nan
        other = directory.parent / f"{directory.name}-nan"
        other.mkdir()
        write(other, records)
        both.append(other)
    assert compare_runs.compare(*both)[0]


def test_options_and_world_sizes_that_differ_are_printed(run, copy):
    text = (copy / "config.yaml").read_text()
    assert "\nlr: 0.05\n" in text
    (copy / "config.yaml").write_text(text.replace("\nlr: 0.05\n", "\nlr: 0.1\nclasses:\n- a\n"))
    attempts = [{"attempt": "1.1", "world_size": 4}, {"attempt": "1.2", "world_size": 3}]
    (copy / "attempts.jsonl").write_text("\n".join(map(json.dumps, attempts)) + "\n{")
    status = json.loads((copy / "status.json").read_text())
    (copy / "status.json").write_text(json.dumps(status | {"pytorch": "2.4.1"}))
    code, lines = compare(run, copy)
    assert code == 0  # the records are equal
    assert lines[1:6] == [
        "Options that differ:",
        "  lr: 0.05 and 0.1",
        "  classes: absent and - a",
        f"PyTorch: {torch.__version__} and 2.4.1",
        "World sizes: 1 and 4, then 3, then 1",
    ]
    (copy / "config.yaml").write_text(text.replace("log_every_steps: 1", "log_every_steps: 2"))
    text = "The records are means over different numbers of steps: log_every_steps."
    assert text in compare_runs.compare(run, copy)[1]
    (copy / "config.yaml").unlink()
    text = f"Options: not compared, because {copy} has no config.yaml."
    assert text in compare_runs.compare(run, copy)[1]


def flip_bit(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Of an element of a float32 tensor, in place."""
    bits = tensor.reshape(-1).view(torch.int32)
    bits[index] ^= 1 << bit


def test_the_first_tensor_that_differs_is_found(run, tmp_path):
    path = run / "checkpoint_epoch_2.pt"
    content = torch.load(path, weights_only=True)
    tensor = content["model"]["conv2.bias"]
    before = tensor.clone()
    flip_bit(tensor, 17, 0)
    flip_bit(tensor, 40, 22)
    flip_bit(content["optimizer"]["state"][3]["momentum_buffer"], 5, 1)
    content["config"]["lr"] = 0.1
    content["config"]["checkpoint_dir"] = "elsewhere"
    other = tmp_path / "other.pt"
    torch.save(content, other)
    code, lines = compare(path, other)
    assert code == 1
    largest = (before.double() - tensor.double()).abs().max().item()
    width = max(len(str(path)), len(str(other)))
    values = [before[17].item(), tensor[17].item()]
    assert lines == [
        "First tensor that differs: ['model']['conv2.bias'], torch.float32 [64]",
        f"  2 of 64 elements differ, by {largest:.3g} at most",
        "  The first one is at [17]:",
        f"  {str(path):{width}}  {values[0]!r}  {values[0].hex()}",
        f"  {str(other):{width}}  {values[1]!r}  {values[1].hex()}",
        "Of 16 tensors, 2 differ.",
        "Options that differ:",
        "  lr: 0.05 and 0.1",
    ]


def test_tensors_of_any_type_are_compared_bit_for_bit(tmp_path):
    nan = torch.tensor([math.nan, 0.0])
    contents = [
        {"a": nan, "b": torch.ones(2, 3).bfloat16(), "n": 1},
        {"a": nan.clone(), "b": torch.ones(2, 3).bfloat16(), "n": 1},
        {"a": torch.tensor([math.nan, -0.0]), "b": torch.ones(2, 3).bfloat16(), "n": 1},
        {"a": nan, "b": torch.ones(3, 2).bfloat16(), "n": 1},
        {"a": nan, "n": 1},
        {"a": nan, "b": torch.ones(2, 3).bfloat16(), "n": 2},
        {"a": nan, "b": torch.tensor([[1, 1, 1], [1, math.nan, 1]]).bfloat16(), "n": 1},
    ]
    found = []
    for number, content in enumerate(contents):
        torch.save(content, tmp_path / f"{number}.pt")
        paths = tmp_path / "0.pt", tmp_path / f"{number}.pt"
        is_equal, lines = compare_runs.compare(*paths)
        assert is_equal == (number < 2)
        found.append(" ".join(lines).replace(f"{tmp_path}/", ""))
    assert found == [
        "Equal: all 2 tensors and 1 other values.",
        "Equal: all 2 tensors and 1 other values.",
        "First tensor that differs: ['a'], torch.float32 [2]   1 of 2 elements differ, by 0 at most"
        "   The first one is at [1]:   0.pt  0.0  0x0.0p+0   2.pt  -0.0  -0x0.0p+0"
        " Of 2 tensors, 1 differ.",
        "First tensor that differs: ['b']   0.pt  torch.bfloat16 [2, 3]   3.pt  torch.bfloat16"
        " [3, 2] Of 2 tensors, 1 differ.",
        "First tensor that differs: ['b']   0.pt  torch.bfloat16 [2, 3]   4.pt  not a tensor"
        " Of 2 tensors, 1 differ.",
        "Equal: all 2 tensors. Values that differ:   ['n']: 1 and 2",
        "First tensor that differs: ['b'], torch.bfloat16 [2, 3]   1 of 6 elements differ, by nan"
        " at most   The first one is at [1, 1]:   0.pt  1.0  0x1.0000000000000p+0   6.pt  nan"
        " Of 2 tensors, 1 differ.",
    ]


def test_user_errors_are_one_sentence(tmp_path, run):
    empty = tmp_path / "empty"
    empty.mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "no_records.jsonl").write_text('{"kind": "train", "loss": 1}\n')
    (tmp_path / "early.jsonl").write_text('{"kind": "train", "step": 99}\n')
    (tmp_path / "damaged.pt").write_bytes((run / "checkpoint_epoch_1.pt").read_bytes()[:-99])
    checkpoint = run / "checkpoint_epoch_1.pt"
    flipped = bytearray(checkpoint.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (tmp_path / "flipped.pt").write_bytes(flipped)
    for words, message in (
        ([run], "it needs two run directories, two metrics.jsonl or two checkpoints"),
        ([run, tmp_path / "absent"], f"{tmp_path}/absent does not exist: "),
        ([run, empty], f"{empty}/metrics.jsonl does not exist: give a directory that a run "),
        ([run, tmp_path / "fifo"], f"{tmp_path}/fifo is neither a run directory nor a file: "),
        ([run, tmp_path / "no_records.jsonl"], f"{tmp_path}/no_records.jsonl has no records: "),
        ([run, tmp_path / "early.jsonl"], f"{run} and {tmp_path}/early.jsonl have no record of "),
        ([run, checkpoint], f"{run} and {checkpoint}: only one of them is a checkpoint; "),
        ([checkpoint, tmp_path / "damaged.pt"], f"{tmp_path}/damaged.pt is damaged or not a "),
        ([tmp_path / "flipped.pt", checkpoint], f"{tmp_path}/flipped.pt is damaged: its record "),
    ):
        command = [sys.executable, SCRIPT, *words]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        last = result.stderr.splitlines()[-1]
        assert last.startswith(f"compare_runs.py: error: {message}")
        assert result.stderr.count("\n") == 1 or "no_records" in message


def test_damaged_lines_are_skipped_with_a_warning(run, copy, capsys):
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"\0\0\0\n", *lines[3:]]))
    is_equal, _ = compare_runs.compare(run, copy)
    text = "skipped line 4, which is not a record"
    assert is_equal and capsys.readouterr().err == f"WARNING: {path}: {text}\n"
    half_a_line = lines[9][:20]
    path.write_bytes(b"".join([*lines[:3], b"\xff\n", *lines[3:], half_a_line]))
    is_equal, _ = compare_runs.compare(run, copy)
    text = "skipped 2 lines that are not records; the first is 4"
    assert is_equal and capsys.readouterr().err == f"WARNING: {path}: {text}\n"


def test_the_help_is_the_header():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == compare_runs.__doc__.strip()


def test_a_part_of_a_run_on_five_ranks_is_replayed_on_one(tmp_path, tiny):
    """As after a loss spike: from the checkpoint before it, in a new directory, on one process."""
    options = [*tiny, "--reproducible", "--epochs=1"]  # six steps
    more = ["--global-batch-size=40", "--checkpoint-every-steps=2", "--keep=9"]
    run = train(tmp_path / "run", 5, *options, *more).directory
    start = f"--resume={run}/checkpoint_step_2.pt"
    replay = train(tmp_path / "replay", 1, *options, start, "--stop-at-step=4").directory
    code, lines = compare(run, replay)
    assert (code, lines[0]) == (0, "Equal: 2 records, from step 3 to step 4.")
    assert "World sizes: 5 and 1" in lines
    name = "checkpoint_step_4.pt"
    assert f"compare_runs.py {run / name} {replay / name}" in lines[-1]
    assert compare(run / name, replay / name)[0] == 0
