"""The PBS launcher, with processes that its pbsdsh starts on two hosts."""

import json
import os
import signal
import sys
import time
from contextlib import suppress

import pytest
from hosts import HERE, probed

SCRIPT = "scripts/pbs/pbs_train.sh"


@pytest.fixture
def qsub(cluster, repo):
    """qsub(hosts, slots, script, NAME=VALUE ...): (exit code, output) of the job."""

    def qsub(hosts, slots, script, cwd=repo, **env):
        variables = ",".join(f"{k}={v}" for k, v in ({"PYTHON": sys.executable} | env).items())
        pbs = [sys.executable, HERE / "pbs.py", "qsub", ",".join(hosts), slots]
        code, text = cluster.on("login", *pbs, "-W", "block=true", "-v", variables, script, cwd=cwd)
        cluster.assert_nothing_left()
        assert not list((repo / "logs").glob("pbs_*"))  # it holds the environment
        return code, (cwd / f"train.o{text.split('.')[0]}").read_text()

    return qsub


def test_every_node_is_started_once_however_often_pbs_names_it(
    qsub, repo, tmp_path, probe, options, check
):
    words = ["configs/default_config.yaml", *options, f"--checkpoint-dir={tmp_path / 'run'}"]
    env = {"NPROC_PER_NODE": "2", "ARGS": " ".join(words)}
    code, text = qsub(["node01", "node02"], 4, repo / SCRIPT, **env)
    assert code == 0, text
    check(text, tmp_path / "run", {"node01": "0-1", "node02": "2-3"})
    code, text = qsub(["node02"], 3, repo / SCRIPT, NPROC_PER_NODE="4", **probe)
    assert code == 0 and [r["host"] for r in probed(text)] == ["node02"] * 4, text


def test_arguments_in_a_variable_and_a_script_of_the_users_own(qsub, repo, probe):
    env = {"NPROC_PER_NODE": "2", **probe, "QUOTED": 'it\'s "so"'}
    arguments = "configs/default_config.yaml --mine 1"
    code, text = qsub(["node02", "node01"], 2, repo / SCRIPT, ARGS=arguments, **env)
    assert code == 0, text
    records = probed(text)
    assert [r["rank"] for r in records] == [0, 1, 2, 3]
    assert [r["host"] for r in records] == ["node02"] * 2 + ["node01"] * 2
    assert {r["quoted"] for r in records} == {'it\'s "so"'}
    assert records[0]["argv"][-2:] == ["--mine", "1"]


def test_a_node_that_fails_is_named_and_ends_the_job(qsub, cluster, repo, tmp_path, options):
    hide = ["mount", "-t", "tmpfs", "tmpfs", repo / "configs"]
    assert cluster.on("node02", *hide)[0] == 0
    try:
        arguments = " ".join([*options, f"--checkpoint-dir={tmp_path / 'run'}"])
        code, text = qsub(["node01", "node02"], 2, repo / SCRIPT, ARGS=arguments)
    finally:
        assert cluster.on("node02", "umount", repo / "configs")[0] == 0
    assert code == 2
    assert f"error: node02: there is no config configs/default_config.yaml in {repo}" in text
    assert "pbs_train.sh: error: node02 failed (exit code 2), so all nodes were stopped" in text
    assert "supervise.py: error: configuration: node02: there is no config" in text


ALONE = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[-1][5:])
if os.environ["RANK"] == "1":
    time.sleep(2)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for path in here.glob("[0-9]*"):
    line = pathlib.Path(f"/proc/{path.name}/cmdline")
    if line.exists() and line.read_bytes():
        (here / "overlap").touch()
(here / str(os.getpid())).touch()
time.sleep(1000)
"""


@pytest.mark.long
def test_ranks_that_wait_for_a_failed_one_are_gone_before_the_next_attempt(qsub, repo, tmp_path):
    script, pids = tmp_path / "alone.py", tmp_path / "pids"
    script.write_text(ALONE)
    pids.mkdir()
    env = {"TRAIN_SCRIPT": str(script), "NPROC_PER_NODE": "1", "MAX_RESTARTS": "1"}
    arguments = f"configs/default_config.yaml --to={pids}"
    code, text = qsub(["node01", "node02"], 1, repo / SCRIPT, ARGS=arguments, **env)
    assert code == 1 and "pbs_train.sh: error: node02 failed (exit code " in text
    names = sorted(path.name for path in pids.iterdir())
    assert len(names) == 2 and "overlap" not in names, text  # attempts


def test_qdel_lets_the_ranks_save(cluster, repo, tmp_path, tiny):
    run = tmp_path / "run"
    arguments = " ".join(["configs/default_config.yaml", *tiny, "--epochs=2000"])
    variables = f"PYTHON={sys.executable},NPROC_PER_NODE=1,ARGS={arguments} --checkpoint-dir={run}"
    pbs = [sys.executable, HERE / "pbs.py", "qsub", "node01,node02", "2", "-W", "block=true"]
    job = cluster.start("login", *pbs, "-v", variables, repo / SCRIPT, cwd=repo)
    deadline = time.monotonic() + 60
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 1000):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    for process in cluster.processes():
        if any(variable.startswith("PBS_JOBID=") for variable in process.env):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)  # as PBS does, on all nodes
    job.communicate(timeout=60)
    cluster.assert_nothing_left()
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert not list((repo / "logs").glob("pbs_*"))


def test_dry_run_and_the_wrong_place(qsub, repo, tmp_path):
    code, text = qsub(["node01", "node02"], 2, repo / SCRIPT, ARGS="--lr=0.1", DRY_RUN="1")
    assert code == 0 and text.count("\n") == 2
    assert text.startswith(
        "$ pbsdsh -n 0 -- scripts/cluster_train.sh configs/default_config.yaml 2 0 "
    )
    assert "\n$ pbsdsh -n 2 -- " in text and text.endswith(" --lr=0.1\n")
    code, text = qsub(["node01"], 1, repo / SCRIPT, cwd=tmp_path)
    assert (code, text) == (
        2,
        f"pbs_train.sh: error: no train_distributed.py in {tmp_path}: call qsub from the "
        "repository, or set REPO_ROOT\n",
    )
