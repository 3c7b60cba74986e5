"""The PBS launcher on two hosts, with the PBS that pbs.py simulates."""

import json
import os
import re
import signal
import sys

import pytest
from machines import HERE, probed, wait_until

SCRIPT = "scripts/pbs/pbs_train.sh"


@pytest.fixture
def qsub(cluster, repo):
    """qsub(hosts, slots, script, NAME=VALUE ...): (exit code, output) of the job."""

    def qsub(hosts, slots, script, **env):
        variables = ",".join(f"{k}={v}" for k, v in ({"PYTHON": sys.executable} | env).items())
        pbs = [sys.executable, HERE / "pbs.py", "qsub", ",".join(hosts), slots, "-W", "block=true"]
        code, text = cluster.on("login", *pbs, "-v", variables, script, cwd=repo)
        cluster.assert_nothing_left()
        assert not list((repo / "logs").glob("launch-*"))  # it holds the environment
        return code, (repo / f"train.o{text.split('.')[0]}").read_text()

    return qsub


def test_each_node_is_started_once_with_the_arguments_and_the_environment(qsub, repo, probe):
    """Training: test_guide.py."""
    env = {"NPROC_PER_NODE": "2", **probe, "QUOTED": 'it\'s "so"'}
    arguments = "configs/default_config.yaml --mine 1"
    hosts = ["node02", "node01"]  # PBS names each once per slot
    code, text = qsub(hosts, 4, repo / SCRIPT, ARGS=arguments, **env)
    assert code == 0, text
    records = probed(text)
    assert [r["rank"] for r in records] == [0, 1, 2, 3]
    assert [r["host"] for r in records] == ["node02"] * 2 + ["node01"] * 2
    assert {r["quoted"] for r in records} == {'it\'s "so"'}
    assert records[0]["argv"][-2:] == ["--mine", "1"]
    assert {r["threads"] for r in records} == {str(max(1, os.cpu_count() // 2))}  # PBS said 64


@pytest.mark.long
def test_a_node_that_fails_is_named_and_ends_the_job(qsub, cluster, repo, tmp_path, options):
    hide = ["mount", "-t", "tmpfs", "tmpfs", repo / "configs"]
    assert cluster.on("node02", *hide)[0] == 0
    try:
        words = ["configs/default_config.yaml", *options, f"--checkpoint-dir={tmp_path / 'run'}"]
        env = {"ARGS": " ".join(words), "MAX_RESTARTS": "0"}
        code, text = qsub(["node01", "node02"], 2, repo / SCRIPT, **env)
    finally:
        assert cluster.on("node02", "umount", repo / "configs")[0] == 0
    assert code == 2
    assert f"error: node02: there is no config configs/default_config.yaml in {repo}" in text
    assert "launch.py: error: node02 failed (exit code 2), so all nodes were stopped" in text
    assert "supervise.py: error: configuration: node02: there is no config" in text


STAYS = """
import os, time
attempt = os.environ["ATTEMPT_ID"].rpartition(".")[2]
line = f"attempt {attempt} rank {os.environ['RANK']}\\n"
os.write(1, line.encode())  # at once: print() would mix the words of both ranks
time.sleep(1000 if attempt == "1" else 0)
"""


@pytest.mark.parametrize(
    "victim",
    [
        r"^\S+ \S+launch.py --pbs",
        pytest.param(r"(?s)^bash -c .* connect 2 .*/1 ", marks=pytest.mark.long),
    ],
)
def test_after_a_kill_of_the_launcher_nothing_is_left_and_the_next_attempt_runs(
    start_job, cluster, repo, tmp_path, victim
):
    (script := tmp_path / "my_train.py").write_text(STAYS)
    env = {"TRAIN_SCRIPT": str(script), "GUARD": "0", "NPROC_PER_NODE": "1"}
    job = start_job(**env)
    output = repo / f"train.o{job.pid}"
    wait_until(lambda: output.exists() and output.read_text().count("attempt 1") == 2, job)
    pids = [p.pid for p in cluster.processes() if re.search(victim, p.line)]
    os.kill(min(pids), signal.SIGKILL)  # one of bash may have a fork, which sends its input
    job.communicate(timeout=300)
    text = output.read_text()
    assert job.returncode == 0 and text.count("attempt 2 rank") == 2, text
    cluster.assert_nothing_left()
    assert not list((repo / "logs").glob("launch-*"))


def test_qdel_lets_the_ranks_save(start_job, cluster, repo, tmp_path, tiny):
    run = tmp_path / "run"
    arguments = ["configs/default_config.yaml", *tiny, "--epochs=2000", f"--checkpoint-dir={run}"]
    job = start_job(NPROC_PER_NODE="1", ARGS=" ".join(arguments))
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, job)
    output = repo / f"train.o{job.pid}"
    os.kill(job.pid, signal.SIGTERM)
    job.communicate(timeout=300)
    cluster.assert_nothing_left()
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert {path.stat().st_mode & 0o777 for path in run.glob("*.pt")} == {0o644}
    assert "stopped (SIGTERM)" in output.read_text()
    assert not list((repo / "logs").glob("launch-*"))


@pytest.fixture
def start_job(cluster, repo):
    """start_job(NAME=VALUE ...): the process of qsub."""

    def start_job(**env):
        variables = ",".join(f"{k}={v}" for k, v in ({"PYTHON": sys.executable} | env).items())
        pbs = [sys.executable, HERE / "pbs.py", "qsub", "node01,node02", "2"]
        return cluster.start("login", *pbs, "-v", variables, SCRIPT, cwd=repo)

    return start_job
