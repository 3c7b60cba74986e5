"""scripts/compare_runs.py finds injected differences, by name and step."""

import json
import math
import re
import shutil
import sys

import pytest
import torch
from harness import REPO, load, train

SCRIPT = REPO / "scripts/compare_runs.py"
compare_runs = load(SCRIPT)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):
    """A real run: 51 steps, with a record of each, and two epochs."""
    directory = tmp_path_factory.mktemp("compare") / "run"
    return train(directory, 1, *tiny, "--epochs=2").directory


def read(directory) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write(path, records: list[dict]):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def compare(capsys, monkeypatch):
    def call(*words) -> tuple[int, str, str]:
        """(exit code, standard output, standard error) of the command"""
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", *map(str, words)])
        try:
            code = compare_runs.main()
        except SystemExit as error:
            code = error.code
        return (code, *capsys.readouterr())

    return call


def test_equal_runs_are_equal_although_their_times_differ(run, tmp_path, compare):
    records = read(run)
    for record in records:
        for name in {"time", "samples_per_second", "data_wait", "seconds_left"} & set(record):
            record[name] *= 1.5
    (tmp_path / "copy").mkdir()
    write(tmp_path / "copy/metrics.jsonl", records)
    code, out, _ = compare(run, tmp_path / "copy")
    assert code == 0 and "53 records" in out and "of step 51 (" in out


@pytest.mark.parametrize("change", ["last bit", "nan", "sign", "absent"])
@pytest.mark.parametrize("place", [0, 30, 52])
def test_an_injected_difference_is_found_at_its_step_and_field(run, tmp_path, place, change):
    records = read(run)
    for record in records[place:]:  # as in a run, all later ones differ too
        name = "loss"
        if change == "absent":
            del record[name]
        else:
            before = record[name]
            changed = {"last bit": math.nextafter(before, math.inf), "nan": math.nan}
            record[name] = changed.get(change, -before)
    is_equal, text = compare_runs.compare(run, write(tmp_path / "other.jsonl", records))
    kind = records[place]["kind"]
    step = records[place]["step"]
    assert not is_equal
    assert text.startswith(f"First difference: ['{kind} record of step {step}']['{name}']: ")


def test_the_last_record_of_a_step_counts_nan_equals_nan_and_damaged_lines_are_skipped(
    run, tmp_path
):
    records = read(run)
    records[5]["loss"] = math.nan
    ours = write(tmp_path / "ours.jsonl", records)
    # As after a crash: the file begins later, and a step is recorded again.
    again = [*records[5:9], records[9] | {"loss": 9.0}, *records[9:]]
    theirs = write(tmp_path / "theirs.jsonl", again)
    with theirs.open("a") as file:
        file.write('\0\0\n[]\n{"kind": "train", "step": true}\n{"kind": "tr')
    is_equal, text = compare_runs.compare(ours, theirs)
    assert is_equal and "48 records" in text, text


def test_the_first_tensor_that_differs_is_found(run, tmp_path, compare):
    path = run / "checkpoint_step_51.pt"
    content = torch.load(path, weights_only=True)
    content["config"]["lr"] = 0.1  # options are not compared
    content["run_id"] = "another run"
    same = tmp_path / "same.pt"
    torch.save(content, same)
    assert compare_runs.compare(path, same)[0]

    tensor = content["model"]["network.conv2.bias"]
    tensor.view(torch.int32)[17] ^= 1
    tensor.view(torch.int32)[40] ^= 1 << 22
    content["samples"] = 7  # comes after the tensors
    other = tmp_path / "other.pt"
    torch.save(content, other)
    code, out, _ = compare(path, other)
    assert code == 1 and "['model']['network.conv2.bias']: " in out
    assert "torch.float32 [64]" in out
    assert "2 of 64 elements differ" in out


def test_tensors_of_any_type_are_compared_bit_for_bit(tmp_path):
    nan = torch.tensor([math.nan, 0.0])
    half = torch.ones(2, 3).bfloat16()
    equal = {"a": nan, "b": half, "empty": torch.empty(0), "n": 1}
    for place, (expected, change) in enumerate(
        [
            ("Equal: the checkpoints (4 values)", {}),
            ("['a']", {"a": torch.tensor([math.nan, -0.0])}),
            ("['b']", {"b": half.reshape(3, 2)}),
            ("['b']", {"b": None}),
            ("['b']", {"b": torch.tensor([[1, 1, 1], [1, math.nan, 1]]).bfloat16()}),
            ("['n']", {"n": 2}),
        ]
    ):
        torch.save(equal, tmp_path / "equal.pt")
        torch.save(equal | change, tmp_path / f"{place}.pt")
        paths = tmp_path / "equal.pt", tmp_path / f"{place}.pt"
        is_equal, text = compare_runs.compare(*paths)
        assert expected in text and is_equal == (not change)
        assert compare_runs.compare(*reversed(paths))[0] == is_equal


def test_options_that_differ_are_named_first(run, tmp_path, compare):
    (tmp_path / "other").mkdir()
    shutil.copy(run / "metrics.jsonl", tmp_path / "other")
    options = (run / "config.yaml").read_text()
    lr = re.search(r"(?m)^lr: (.*)$", options)[1]
    options = options.replace(f"\nlr: {lr}\n", "\nlr: 0.7\n").replace(str(run), "elsewhere")
    (tmp_path / "other/config.yaml").write_text(options)
    code, out, _ = compare(run, tmp_path / "other")
    first, second = out.splitlines()
    assert first == f"Options that differ: lr {lr} in A, 0.7 in B"
    assert code == 0 and second.startswith("Equal: ")
    checkpoint = run / "checkpoint_step_51.pt"
    content = torch.load(checkpoint, weights_only=True)
    content["config"]["seed"] += 1
    torch.save(content, tmp_path / "other.pt")
    _, out, _ = compare(checkpoint, tmp_path / "other.pt")
    assert out.startswith("Options that differ: seed ") and out.count("\n") == 2


def test_user_errors_are_one_sentence(tmp_path, run, compare):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "no_records.jsonl", [{"kind": "train", "loss": 1}])
    write(tmp_path / "later.jsonl", [{"kind": "train", "step": 99}])
    checkpoint = run / "checkpoint_step_26.pt"
    damaged = tmp_path / "damaged.pt"
    shutil.copy(checkpoint, damaged)
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size - 99)
    for words, value in (
        ([run, tmp_path / "absent"], f"{tmp_path}/absent"),
        ([run, tmp_path / "empty"], f"{tmp_path}/empty/metrics.jsonl"),
        ([run, tmp_path / "no_records.jsonl"], "no records"),
        ([run, tmp_path / "later.jsonl"], "no record of the same step"),
        ([run, checkpoint], f"{checkpoint} has no records"),
        ([checkpoint, run], f"{run} is damaged or not a checkpoint"),
        ([checkpoint, damaged], f"{damaged} is damaged"),
    ):
        code, out, error = compare(*words)
        assert (code, out) == (2, "")
        assert error.startswith("compare_runs.py: error: ") and value in error
        assert error.count("\n") == 1
