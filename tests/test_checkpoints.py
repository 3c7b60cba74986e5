"""Damaged checkpoints are named and skipped; nothing that was saved is lost."""

from types import SimpleNamespace

import pytest
import torch
from harness import assert_same_state, launch, train

import train_distributed as trainer


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("straight") / "run", 2, *tiny, "--epochs=3")


def test_the_newest_intact_checkpoint_is_used_and_the_run_ends_the_same(tmp_path, tiny, straight):
    """faults/test_damage.py tries other kinds of damage."""
    options = [*tiny, "--epochs=3"]
    damaged = tmp_path / "run" / "checkpoint_epoch_2.pt"
    train(tmp_path / "run", 2, *options, "--stop-at-step=26")
    flip(damaged)
    run = train(tmp_path / "run", 2, *options)
    assert run.err[0].startswith(f"WARNING: skipped: {damaged} on ")
    assert run.err[0].count("\n") == 1 and "is damaged or not a checkpoint (" in run.err[0]
    assert f"Resuming from {tmp_path}/run/checkpoint_epoch_1.pt at step 13" in run.out[0]
    for name in ("checkpoint_epoch_2", "checkpoint_epoch_3"):
        assert_same_state(run.checkpoint(name), straight.checkpoint(name))
    assert len(run.records("train")) == len(straight.records("train"))


def test_when_all_are_damaged_the_run_does_not_start_over_by_itself(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2")
    for path in run.directory.glob("*.pt"):
        flip(path)
    result = launch(tmp_path / "run", 1, *tiny, "--epochs=2")
    assert result.codes == [2]
    assert result.err[0].count("WARNING: skipped: ") == 2
    assert f"error: no intact checkpoint in {run.directory}" in result.err[0].splitlines()[-1]


def test_a_checkpoint_that_was_asked_for_and_is_damaged_is_refused(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1")
    flip(run.directory / "checkpoint_epoch_1.pt")
    file = f"--resume={run.directory}/checkpoint_epoch_1.pt"
    result = launch(tmp_path / "other", 1, *tiny, "--epochs=2", file)
    assert result.codes == [2]
    assert "checkpoint_epoch_1.pt on " in result.err[0] and " is damaged" in result.err[0]


def test_a_half_written_file_is_deleted_and_a_deleted_checkpoint_does_not_matter(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=2")
    (run.directory / "checkpoint_epoch_2.pt").unlink()
    ours = [".checkpoint_epoch_3.pt.node-1.77.tmp", ".status.json.node-1.77.tmp"]
    of_others = [".checkpoint_best.pt.node-1.77.tmp", ".checkpoint_epoch_3.pt.tmp", "notes.tmp"]
    for name in ours + of_others:
        (run.directory / name).write_text("half written when it was killed")
    run = train(tmp_path / "run", 1, *tiny, "--epochs=3")
    assert "checkpoint_epoch_1.pt at step 26" in run.out[0] and run.err == [""]
    left = {path.name for path in run.directory.glob("*.tmp")}
    assert left == set(of_others)


def test_a_checkpoint_holds_plain_types_and_its_position(tmp_path, tiny):
    state = train(tmp_path / "run", 1, *tiny, "--stop-at-step=3").newest()  # with weights_only
    assert (state["name"], state["global_step"]) == ("checkpoint_step_3", 3)
    assert state["config"]["batch_size"] == 8 and state["config"]["seed"] == 42
    assert (state["task"], state["samples"], state["optimizer_class"]) == ("Task", 203, "SGD")
    assert len(state["spec"]["classes"]) == 10 and state["optimizer_groups"] == [8]


def test_half_a_record_in_the_metrics_is_dropped(tmp_path, tiny):
    run = train(tmp_path / "run", 1, *tiny, "--batch-size=64", "--epochs=1")
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run = train(tmp_path / "run", 1, *tiny, "--batch-size=64", "--epochs=2")
    assert [record["epoch"] for record in run.records("epoch")] == [1, 2]


# Automatic saves as often as possible; rank 0 crashes after a step.
HURRY = """
import os, time, train_distributed as trainer
trainer.FIRST_AUTO_SECONDS = 0.0
trainer.MIN_AUTO_SECONDS = 0.0
trainer.AUTO_SHARE = 1.0
def train_step(run, batches, sums, inner=trainer.train_step):
    inner(run, batches, sums)
    time.sleep(0.05)
    if run.state.step == {last} and os.environ.get("RANK", "0") == "0":
        os._exit(1)
trainer.train_step = train_step
"""


def test_automatic_saves_replace_one_another_and_a_crash_loses_little(tmp_path, tiny, straight):
    options = [*tiny, "--epochs=3", "--keep=1"]
    crashed = launch(tmp_path / "run", 2, *options, before=HURRY.format(last=22))
    assert crashed.codes[0] == 1
    assert crashed.checkpoints() == {"checkpoint_auto", "checkpoint_epoch_1"}
    step = crashed.checkpoint("checkpoint_auto")["global_step"]
    assert 13 < step <= 22
    resumed = train(tmp_path / "run", 2, *options)
    assert f"checkpoint_auto.pt at step {step}" in resumed.out[0]
    assert resumed.checkpoints() == {"checkpoint_epoch_3"}
    assert_same_state(resumed.newest(), straight.newest())


def test_with_checkpoint_every_steps_there_are_no_automatic_saves(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--checkpoint-every-steps=1000"]
    crashed = launch(tmp_path / "run", 2, *options, before=HURRY.format(last=8))
    assert crashed.checkpoints() == set()


@pytest.mark.parametrize(("seconds", "interval"), [(0.01, 10), (0.1, 10), (0.5, 50), (30, 3000)])
def test_automatic_saves_take_one_percent_of_the_time(tmp_path, monkeypatch, seconds, interval):
    """Seconds that a save takes -> seconds until the next. The first comes after a minute."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(trainer.time, "monotonic", lambda: clock.now)

    def save_file(content):
        clock.now += seconds

    writer, learner = writer_that_saves(tmp_path, monkeypatch, save_file)
    for wait in (60, interval, interval):
        clock.now += wait - 0.001
        assert not writer.auto_save_due()
        clock.now += 0.002
        assert writer.auto_save_due()
        writer.save(trainer.State(step=5), learner, automatic=True)


def test_an_automatic_save_leaves_a_request_to_save(tmp_path, monkeypatch):
    """A file SAVE that was made while the ranks agreed on the automatic save."""
    (tmp_path / "SAVE").touch()
    writer, learner = writer_that_saves(tmp_path, monkeypatch, lambda content: None)
    writer.save(trainer.State(step=5), learner, automatic=True)
    assert (tmp_path / "SAVE").exists()
    writer.save(trainer.State(step=6), learner)
    assert not (tmp_path / "SAVE").exists()


def test_automatic_saves_that_fail_become_rarer_and_do_not_end_the_run(
    tmp_path, monkeypatch, capsys
):
    def fail(content):
        raise trainer.UserError("is the disk full?", "disk")

    writer, learner = writer_that_saves(tmp_path, monkeypatch, fail)
    intervals = []
    for step in range(1, 6):
        writer.save(trainer.State(step=step), learner, automatic=True)
        intervals.append(round(writer.auto_interval))
    assert intervals == [20, 40, 80, 160, 320]
    assert capsys.readouterr().err.count("training continues") == 5


def writer_that_saves(directory, monkeypatch, save_file):
    """(a CheckpointWriter that calls save_file(content), a learner for its save())"""
    monkeypatch.setattr(
        trainer.CheckpointWriter, "save_file", lambda self, content: save_file(content)
    )
    content = lambda self, name, *_: {"name": name, "model": {}}  # noqa: E731
    monkeypatch.setattr(trainer.CheckpointWriter, "content", content)
    run_directory = trainer.RunDirectory(str(directory))
    sampler = SimpleNamespace(steps_per_epoch=100)
    cfg = trainer.parse_config([])
    writer = trainer.CheckpointWriter(run_directory, cfg, trainer.World(), {}, sampler, 0)
    return writer, SimpleNamespace(model=torch.nn.Linear(1, 1))
