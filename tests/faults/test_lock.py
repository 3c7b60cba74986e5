"""Only one job trains in a run directory; an attempt that was replaced writes nothing more."""

import json
import os
import signal

import pytest
from harness import FOREVER, launch, train, wait_for_step

import train_distributed


def test_a_second_job_is_refused_and_the_first_is_named(tmp_path, tiny):
    seen = []

    def during(processes):
        wait_for_step(tmp_path / "run", 3)
        seen.append(launch(tmp_path / "run", 2, *tiny, "--epochs=1", env={"ATTEMPT_ID": "8.1"}))
        assert seen[0].codes[0] == 2
        seen.append(processes[0].pid)
        os.kill(processes[0].pid, signal.SIGTERM)

    run = train(tmp_path / "run", 2, *tiny, FOREVER, during=during, env={"ATTEMPT_ID": "7.1"})
    refused, pid = seen
    assert refused.err[1] == ""
    remedy = "wait for it, stop that process, or choose another --checkpoint-dir"
    assert refused.err[0] == (
        f"train_distributed.py: error: {tmp_path}/run is in use by attempt 7.1, process {pid} on "
        f"{os.uname().nodename}: {remedy}\n"
    )
    assert run.status()["state"] == "stopped"


def test_an_older_attempt_that_was_replaced_writes_nothing_more(tmp_path, tiny):
    """Its node was disconnected and the job requeued elsewhere; then the node is back and saves."""
    options = [*tiny, FOREVER, "--checkpoint-every-steps=100000"]
    seen = []

    def content() -> dict:
        return {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}

    def replace(processes):
        wait_for_step(tmp_path / "run", 30)
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        train(tmp_path / "run", 1, *options, "--stop-at-step=40", env={"ATTEMPT_ID": "7.2"})
        seen.append(content())
        assert seen[0]["lock"].startswith(b"attempt 7.2, process ")
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
        os.kill(processes[1].pid, signal.SIGTERM)

    old = launch(tmp_path / "run", 2, *options, env={"ATTEMPT_ID": "7.1"}, during=replace)
    assert old.codes[0] == 2
    last = old.err[0].splitlines()[-1]
    assert "/run belongs to attempt 7.2, process " in last and last.endswith(" now: not saved")
    now = content()
    assert now.pop("metrics.jsonl").startswith(seen[0].pop("metrics.jsonl"))
    assert now == seen[0]


def test_a_lock_file_that_no_process_holds_does_not_block_a_run(tmp_path, tiny):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").write_text("attempt 3.1, process 7 on elsewhere")
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1")
    assert json.loads((run.directory / "status.json").read_text())["state"] == "finished"
    owner = (run.directory / "lock").read_text()
    assert owner.startswith("process ") and owner.endswith(os.uname().nodename)


def test_a_file_named_lock_of_another_program_is_refused_and_kept(tmp_path, tiny):
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run/lock"
    lock.write_text("[1]")
    refused = launch(tmp_path / "run", 1, *tiny)
    assert refused.codes == [2] and lock.read_text() == "[1]"
    error = f"{lock} is another program's file: delete or move it"
    assert refused.err[0] == f"train_distributed.py: error: {error}\n"


@pytest.mark.parametrize(
    ("owner", "attempt", "newer"),
    [
        ("attempt 7.1, process 5 on here", "7.2", True),
        ("attempt 7.9, process 5 on here", "7.10", True),
        ("attempt 7.2, process 5 on here", "7.2", False),
        ("attempt 7.2, process 5 on here", "7.1", False),
        ("attempt 7.1, process 5 on here", "8.2", False),
        ("attempt 7.1, process 5 on here", "7.x", False),
        ("attempt 7.1, process 5 on here", None, False),
        ("process 5 on here", "7.2", False),
        ("", "7.2", False),
    ],
)
def test_only_a_newer_attempt_of_the_same_job_takes_a_directory_over(
    tmp_path, monkeypatch, owner, attempt, newer
):
    monkeypatch.delenv("ATTEMPT_ID", raising=False)
    if attempt:
        monkeypatch.setenv("ATTEMPT_ID", attempt)
    assert train_distributed.RunDirectory(tmp_path).is_newer_than(owner) == newer


def test_an_attempt_that_took_over_gets_the_lock_when_the_older_process_is_gone(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ATTEMPT_ID", "7.1")
    older = train_distributed.RunDirectory(tmp_path)
    older.lock()
    monkeypatch.setenv("ATTEMPT_ID", "7.2")
    newer = train_distributed.RunDirectory(tmp_path)
    newer.lock()
    older.file.close()  # as when its process exits
    newer.replace_file("status.json", lambda file: file.write(b"{}"))
    monkeypatch.delenv("ATTEMPT_ID")
    with pytest.raises(train_distributed.UserError, match="is in use by attempt 7.2"):
        train_distributed.RunDirectory(tmp_path).lock()
