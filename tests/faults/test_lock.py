"""Only one job trains in a run directory; an attempt that was replaced writes nothing more."""

import json
import os
import signal

import pytest
from harness import FOREVER, launch, train, wait_for_step


@pytest.mark.parametrize("first, second", [("7.1", "8.1"), (None, None)])
def test_a_second_job_is_refused_and_the_first_is_named(tmp_path, tiny, first, second):
    seen = []

    def env(attempt) -> dict[str, str]:
        return {"ATTEMPT_ID": attempt} if attempt else {}

    def during(processes):
        wait_for_step(tmp_path / "run", 3)
        seen.append(launch(tmp_path / "run", 2, *tiny, FOREVER, env=env(second)))
        seen.append(processes[0].pid)
        os.kill(processes[0].pid, signal.SIGTERM)

    run = train(tmp_path / "run", 2, *tiny, FOREVER, during=during, env=env(first))
    refused, pid = seen
    assert refused.codes[0] == 2 and refused.err[1] == ""
    assert refused.err[0] == (
        f"train_distributed.py: error: {tmp_path}/run is in use by attempt {first or '?'}, "
        f"process {pid} on {os.uname().nodename}: choose another\n"
    )
    assert run.status()["state"] == "stopped"


def test_a_process_that_was_killed_leaves_the_directory_free(tmp_path, tiny):
    def kill(processes):
        wait_for_step(tmp_path / "run", 3)
        os.kill(processes[0].pid, signal.SIGKILL)

    killed = launch(tmp_path / "run", 2, *tiny, FOREVER, during=kill)
    assert killed.codes[0] == -signal.SIGKILL and killed.status()["state"] == "running"
    train(tmp_path / "run", 2, *tiny, "--epochs=1")


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


@pytest.mark.parametrize("content", ["", "[1]", "attempt 3.1, process 7 on elsewhere"])
def test_a_lock_file_that_no_process_holds_does_not_block_a_run(tmp_path, tiny, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").write_text(content)
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1")
    assert json.loads((run.directory / "status.json").read_text())["state"] == "finished"
    owner = (run.directory / "lock").read_text()
    assert owner.startswith("attempt ?, process ") and owner.endswith(os.uname().nodename)
