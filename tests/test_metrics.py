"""compare_runs.py finds injected differences, by name and step; plot_metrics.py draws."""

import json
import math
import re
import shutil
import sys

import pytest
import torch
from harness import REPO, load, train

compare_runs = load(REPO / "scripts/compare_runs.py")
plot_metrics = load(REPO / "scripts/plot_metrics.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):
    """A real run: 51 steps, with a record of each, and two epochs."""
    directory = tmp_path_factory.mktemp("compare") / "run"
    return train(directory, 1, *tiny, "--epochs=2").directory


def read(directory) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write(directory, records: list[dict]):
    directory.mkdir()
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text)
    return directory


@pytest.fixture
def call(capsys, monkeypatch):
    def call(script, *words) -> tuple[int, str, str]:
        """(exit code, standard output, last line of standard error) of the command"""
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, words)])
        try:
            code = script.main()
        except SystemExit as error:
            code = error.code
        out, error = capsys.readouterr()
        return code, out, (error.splitlines() or [""])[-1]

    return call


def test_equal_runs_are_equal_although_their_times_differ(run, tmp_path, call):
    records = read(run)
    for record in records:
        for name in {"time", "samples_per_second", "data_wait", "seconds_left"} & set(record):
            record[name] *= 1.5
    code, out, _ = call(compare_runs, run, write(tmp_path / "copy", records))
    assert code == 0 and "53 records, up to the epoch record of step 51\nEqual: " in out


@pytest.mark.parametrize("change", ["last bit", "nan", "sign", "absent"])
@pytest.mark.parametrize("place", [0, 52])
def test_an_injected_difference_is_found_at_its_step_and_field(run, tmp_path, place, change):
    records = read(run)
    for record in records[place:]:  # as in a run, all later ones differ too
        before = record.pop("loss")
        changed = {"last bit": math.nextafter(before, math.inf), "nan": math.nan, "sign": -before}
        record |= {"loss": changed[change]} if change in changed else {}
    is_equal, text = compare_runs.compare(run, write(tmp_path / "other", records))
    kind = records[place]["kind"]
    step = records[place]["step"]
    assert not is_equal
    assert f"\nFirst difference: ['{kind} record of step {step}']['loss']: " in text


def test_the_last_record_of_a_step_counts_nan_equals_nan_and_damaged_lines_are_skipped(
    run, tmp_path
):
    records = read(run)
    records[5]["loss"] = math.nan
    ours = write(tmp_path / "ours", records)
    # As after a crash: the file begins later, and a step is recorded again.
    again = [*records[5:9], records[9] | {"loss": 9.0}, *records[9:]]
    theirs = write(tmp_path / "theirs", again) / "metrics.jsonl"
    with theirs.open("a") as file:
        file.write('\0\0\n[]\n{"kind": "train", "step": true}\n{"kind": "tr')
    is_equal, text = compare_runs.compare(ours, theirs)
    assert is_equal and "48 records" in text, text


def test_the_first_tensor_that_differs_is_found(run, tmp_path, call):
    path = run / "checkpoint_step_51.pt"
    content = torch.load(path, weights_only=True)
    content["config"]["lr"] = 0.7  # options are not compared
    content["run_id"] = "another run"
    same = tmp_path / "same.pt"
    torch.save(content, same)
    code, out, _ = call(compare_runs, path, same)
    assert code == 0 and re.fullmatch(r"Equal: .*\n", out)

    tensor = content["model"]["network.conv2.bias"]
    tensor.view(torch.int32)[17] ^= 1
    tensor.view(torch.int32)[40] ^= 1 << 22
    other = tmp_path / "other.pt"
    torch.save(content, other)
    code, out, _ = call(compare_runs, path, other)
    assert code == 1 and "['model']['network.conv2.bias']: " in out
    assert "2 of 64 elements differ (torch.float32 [64])" in out


def test_tensors_of_any_type_are_compared_bit_for_bit(tmp_path):
    nan = torch.tensor([math.nan, 0.0])
    half = torch.ones(2, 3).bfloat16()
    equal = {"a": nan, "b": half, "empty": torch.empty(0), "n": 1}
    torch.save(equal, tmp_path / "equal.pt")
    for expected, change in (
        ("Equal: 4 values", {}),
        ("['a']", {"a": torch.tensor([math.nan, -0.0])}),
        ("['b']", {"b": half.reshape(3, 2)}),
        ("['b']", {"b": None}),
        ("['b']", {"b": torch.tensor([[1, 1, 1], [1, math.nan, 1]]).bfloat16()}),
        ("['n']", {"n": 2}),
    ):
        torch.save(equal | change, tmp_path / "other.pt")
        paths = tmp_path / "equal.pt", tmp_path / "other.pt"
        is_equal, text = compare_runs.compare(*paths)
        assert expected in text and is_equal == (not change)
        assert compare_runs.compare(*reversed(paths))[0] == is_equal


def test_the_last_record_of_a_step_is_drawn(tmp_path):
    """Of a run that crashed after step 120."""
    steps = [(100, 9.0), (120, 9.0), (100, 1.0), (120, 2.0)]
    run = [{"kind": "train", "step": step, "loss": loss} for step, loss in steps]
    points = plot_metrics.Run(write(tmp_path / "run", run)).points("loss", "train")
    assert points == [(100, 1.0), (120, 2.0)]


def test_two_runs_are_drawn_into_one_file(run, tmp_path, call):
    code, out, _ = call(plot_metrics, run, run, "-o", tmp_path / "2.png")
    assert out == f"Wrote {tmp_path}/2.png\n" and not code
    assert (tmp_path / "2.png").read_bytes().startswith(b"\x89PNG")


def test_user_errors_are_one_sentence(tmp_path, run, call):
    empty = write(tmp_path / "empty", [])
    later = write(tmp_path / "later", [{"kind": "train", "step": 99}])
    checkpoint = run / "checkpoint_step_26.pt"
    damaged = tmp_path / "damaged.pt"
    shutil.copy(checkpoint, damaged)
    with damaged.open("r+b") as file:
        file.truncate(damaged.stat().st_size - 99)
    for script, words, value in (
        (compare_runs, [run, tmp_path / "absent"], f"cannot read {tmp_path}/absent"),
        (compare_runs, [run, empty], "no records"),
        (compare_runs, [run, later], "no record of the same step"),
        (compare_runs, [run, checkpoint], f"{checkpoint} has no records"),
        (compare_runs, [checkpoint, run], f"{run} is damaged or not a checkpoint"),
        (compare_runs, [checkpoint, damaged], f"{damaged} is damaged"),
        (plot_metrics, [empty], "no records"),
        (plot_metrics, [run, tmp_path / "absent"], f"No such file or directory: '{tmp_path}"),
        (plot_metrics, [run, "-o", tmp_path / "absent/plot.png"], "No such file or directory: "),
        (plot_metrics, [run, "-o", tmp_path / "plot.doc"], "Format 'doc' is not supported"),
    ):
        code, out, error = call(script, *words)
        assert (code, out) == (2, "")
        assert re.match(r"(compare_runs|plot_metrics)\.py: error: ", error) and value in error
