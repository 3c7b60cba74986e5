"""One job at a time in a run directory; who was superseded writes nothing more."""

import json
import os
import signal
import time

import pytest
from harness import assert_same_state, launch, train
from test_stop import FOREVER, wait_for_step


def test_a_second_job_is_refused_and_told_of_the_first(tmp_path, tiny):
    seen = []

    def second(processes):
        wait_for_step(tmp_path / "run", 3)
        seen.append(launch(tmp_path / "run", 2, *tiny, FOREVER, env={"RUN_NONCE": "8.1"}))
        seen.append(processes[0].pid)
        os.kill(processes[0].pid, signal.SIGTERM)

    train(tmp_path / "run", 2, *tiny, FOREVER, during=second, env={"RUN_NONCE": "7.1"})
    refused, pid = seen
    assert refused.codes == [2, 2]
    host = os.uname().nodename
    assert refused.err[0] == (
        f"train_distributed.py: error: {tmp_path}/run is in use by job 7.1, process {pid} on "
        f"{host}: end that, or take another --checkpoint-dir (if it is dead, remove"
        f" {tmp_path}/run/status.json)\n"
    )
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["job"], status["state"]) == ("7.1", "stopped")


def write_status(directory, **facts) -> None:
    path = directory / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize("silent", [False, True])
def test_a_job_on_another_host_counts_as_dead_after_a_minute_of_silence(tmp_path, tiny, silent):
    run = train(tmp_path / "run", 1, *tiny, "--epochs=1")
    write_status(run.directory, state="running", host="elsewhere", job="7.1")
    ago = time.time() - (61 if silent else 40)
    os.utime(run.directory / "status.json", (ago, ago))
    result = launch(run.directory, 1, *tiny, "--epochs=2")
    assert result.codes == [0 if silent else 2]
    assert silent or "in use by job 7.1, process" in result.err[0]


def test_a_process_that_was_killed_leaves_the_directory_free(tmp_path, tiny):
    def kill(processes):
        wait_for_step(tmp_path / "run", 3)
        os.kill(processes[0].pid, signal.SIGKILL)

    launch(tmp_path / "run", 2, *tiny, FOREVER, during=kill)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "running"
    train(tmp_path / "run", 2, *tiny, "--epochs=1")


@pytest.mark.parametrize("way", ["--no-async-checkpoint", "--async-checkpoint"])
def test_who_was_superseded_commits_nothing_more(tmp_path, tiny, way):
    """Its node was cut off, the job was requeued elsewhere; now it is back and wants to save."""
    options = [*tiny, FOREVER, "--checkpoint-every-steps=100000", way]
    seen = []

    def supersede(_processes):
        wait_for_step(tmp_path / "run", 30)
        again = train(tmp_path / "run", 1, *options, "--max-duration=1", env={"RUN_NONCE": "7.2"})
        seen.append({file.name: file.read_bytes() for file in again.directory.iterdir()})
        assert json.loads(seen[0]["status.json"])["job"] == "7.2"

    old = launch(tmp_path / "run", 2, *options, env={"RUN_NONCE": "7.1"}, during=supersede)
    assert old.codes[0] == 2
    last = old.err[0].splitlines()[-1]
    assert "/run belongs to process" in last and last.endswith("nothing more is written to it")
    now = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    assert now == seen[0]


def test_saving_in_the_background_ends_in_the_same_files(tmp_path, tiny):
    options = [*tiny, "--epochs=2", "--checkpoint-every-steps=4", "--keep=0"]
    ends = [
        train(tmp_path / way, 2, *options, f"--{way}")
        for way in ("async-checkpoint", "no-async-checkpoint")
    ]
    names = {file.stem for file in ends[0].directory.glob("*.pt")}
    assert names == {file.stem for file in ends[1].directory.glob("*.pt")} and len(names) == 8
    for name in names:
        assert_same_state(ends[0].checkpoint(name), ends[1].checkpoint(name))


@pytest.mark.parametrize("content", ["", "[1]", '{"state": "running"}', '{"state": "run'])
def test_a_status_that_nobody_understands_is_in_nobodys_way(tmp_path, tiny, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/status.json").write_text(content)
    train(tmp_path / "run", 1, *tiny, "--epochs=1")
