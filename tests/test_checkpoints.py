"""Damaged checkpoints are passed over aloud; nothing that was saved is lost."""

import json

import pytest
from harness import assert_same_state, launch, train


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "zeroed page": lambda path: path.write_bytes(
        path.read_bytes()[:40960] + bytes(4096) + path.read_bytes()[45056:]
    ),
    "manifest cut": lambda path: path.with_suffix(".json").write_text('{"step": 2'),
    "manifest of nothing": lambda path: path.with_suffix(".json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_intact_checkpoint_is_taken_and_the_run_ends_the_same(tmp_path, tiny, damage):
    options = [*tiny, "--epochs=3"]
    train(tmp_path / "run", 2, *options, "--stop-at-step=26")
    DAMAGE[damage](tmp_path / "run" / "checkpoint_epoch_2.pt")
    run = train(tmp_path / "run", 2, *options)
    assert "WARNING: passed over: " in run.err[0]
    assert "checkpoint_epoch_2" in run.err[0]
    assert "Resuming from" in run.out[0] and "checkpoint_epoch_1.pt at step 13" in run.out[0]
    straight = train(tmp_path / "straight", 2, *options)
    end = "checkpoint_epoch_3"
    assert_same_state(run.checkpoint(end), straight.checkpoint(end))
    assert len(run.records("train")) == len(straight.records("train"))
    again = train(tmp_path / "run", 2, *options)
    assert again.err[0] == "", "once passed over, it is not complained about again"


def test_when_all_are_damaged_the_run_does_not_start_over_by_itself(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2")
    for path in run.directory.glob("*.pt"):
        flip(path)
    result = launch(tmp_path / "run", 1, *tiny, "--epochs=2")
    assert result.codes == [2]
    assert result.err[0].count("WARNING: passed over: ") == 2
    assert "no checkpoint in" in result.err[0].splitlines()[-1]


def test_an_explicit_checkpoint_that_is_damaged_is_refused(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1")
    flip(run.directory / "checkpoint_epoch_1.pt")
    file = f"--resume={run.directory}/checkpoint_epoch_1.pt"
    result = launch(tmp_path / "other", 1, *tiny, "--epochs=2", file)
    assert result.codes == [2]
    assert "checkpoint_epoch_1.pt is damaged" in result.err[0]


def test_a_checkpoint_without_its_manifest_does_not_count(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2")
    (run.directory / "checkpoint_epoch_2.json").unlink()
    (run.directory / ".checkpoint_epoch_3.pt.tmp").write_text("half written when it was killed")
    run = train(tmp_path / "run", 1, *tiny, "--epochs=3")
    assert "checkpoint_epoch_1.pt at step 26" in run.out[0]
    assert not list(run.directory.glob(".*.tmp"))


def test_a_manifest_states_step_size_and_checksum(tmp_path, tiny):
    import hashlib

    run = train(tmp_path / "run", 1, *tiny, "--stop-at-step=3")
    content = (run.directory / "checkpoint_step_3.pt").read_bytes()
    manifest = json.loads((run.directory / "checkpoint_step_3.json").read_text())
    assert manifest.pop("check")  # of the other three
    assert manifest == {
        "step": 3,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_half_a_record_in_the_metrics_is_dropped(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1")
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2")
    assert [record["epoch"] for record in run.records("epoch")] == [1, 2]
