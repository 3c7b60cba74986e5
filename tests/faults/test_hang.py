"""A rank that stands still ends the run, with stacks, and is named; a slow one is named."""

import json
import os
import signal
import time

import pytest
from harness import launch, train
from test_stop import FOREVER, wait_for_step

TIMEOUT = 3


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_stopped_rank_is_named_by_the_others_with_their_stacks(tmp_path, tiny, rank):
    ended = []

    def during(processes):
        wait_for_step(tmp_path / "run", 5)
        os.kill(processes[rank].pid, signal.SIGSTOP)
        stopped = time.monotonic()
        for process in processes:
            process.join(TIMEOUT + 10)
        ended.append(time.monotonic() - stopped)

    options, file = [*tiny, FOREVER, f"--hang-timeout={TIMEOUT}"], tmp_path / "failure"
    run = launch(tmp_path / "run", 3, *options, during=during, env={"FAILURE_FILE": str(file)})
    assert ended[0] < TIMEOUT + 5
    assert run.codes[rank] == -signal.SIGKILL and set(run.codes) == {1, -signal.SIGKILL}
    first = run.err[0 if rank else 1]
    told = f"the ranks waited for 1 rank: rank {rank} on {os.uname().nodename} does not answer"
    assert told in first
    for other in {0, 1, 2} - {rank}:
        assert "no progress for 3 s" in run.err[other] and "in train_step" in run.err[other]
    failure = json.loads(file.read_text())
    assert failure["cause"] == "hang" and told in failure["reason"]


STUCK = """if True:
    import os, time
    import train_distributed

    def prepare(*arguments, inner=train_distributed.prepare, calls=[]):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 8:
            time.sleep(1000)
        return inner(*arguments)

    train_distributed.prepare = prepare
"""


def test_a_rank_that_is_busy_elsewhere_is_named(tmp_path, tiny):
    run = launch(tmp_path / "run", 3, *tiny, FOREVER, f"--hang-timeout={TIMEOUT}", before=STUCK)
    assert run.codes == [1, 1, 1]
    assert "waited for 1 rank: rank 1 on" in run.err[0]
    assert "was busy elsewhere, see its stacks" in run.err[0]
    assert "in train_step" in run.err[1]
    status = json.loads((run.directory / "status.json").read_text())
    assert status["state"] == "failed" and "hang at step" in status["reason"]


SLOW = STUCK.replace("len(calls) == 8", "True").replace("sleep(1000)", "sleep(0.05)")
SLOW += "    train_distributed.LOOK_SECONDS = 0.5\n"


def test_a_slow_rank_is_named_with_its_host_once(tmp_path, tiny):
    run = train(tmp_path / "run", 3, *tiny, "--epochs=3", before=SLOW)
    lines = [line for line in run.err[0].splitlines() if "is slow" in line]
    assert len(lines) == 1
    assert f"WARNING: rank 1 on {os.uname().nodename} is slow" in lines[0]
    quick = train(tmp_path / "quick", 2, *tiny, "--epochs=5", before=SLOW.replace('"1"', '"9"'))
    assert "is slow" not in quick.err[0]


BROKEN_LOADER = STUCK.replace("time.sleep(1000)", 'raise OSError("the disk is gone")')


def test_an_exception_on_one_rank_is_told_and_ends_all(tmp_path, tiny):
    file = tmp_path / "failure"
    options = [*tiny, FOREVER, "--checkpoint-every-steps=4"]
    run = launch(
        tmp_path / "run", 3, *options, before=BROKEN_LOADER, env={"FAILURE_FILE": str(file)}
    )
    assert run.codes == [1, 1, 1]
    assert run.err[1].endswith("OSError: the disk is gone\n")
    failure = json.loads(file.read_text())
    assert (failure["cause"], failure["rank"]) == ("exception", 1)
    assert failure["reason"] == "OSError: the disk is gone"
    assert (run.directory / "checkpoint_step_4.json").exists()
    assert all(len(run.err[rank].splitlines()) == 1 for rank in (0, 2))  # "lost the others"
