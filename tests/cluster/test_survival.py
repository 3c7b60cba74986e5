"""Slurm jobs: signals, time limits, preemption, requeue, lost nodes."""

import itertools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import LONG, SLOW_DISK, assert_same_state, newest_in, train

TORCHRUN, SRUN = "run_distributed.slurm", "slurm_train_multinode.sh"
EPOCHS = 30 if LONG else 12  # of 5 steps: long enough to interrupt


@pytest.fixture(scope="session")
def long_options(tiny):
    return [*tiny, f"--epochs={EPOCHS}", "--global-batch-size=48", "--checkpoint-every-steps=20"]


@pytest.fixture(scope="session")
def untouched(tmp_path_factory, long_options):
    run = train(tmp_path_factory.mktemp("untouched") / "run", 4, *long_options, timeout=600)
    return run.newest()


@pytest.fixture
def slow_disk(tmp_path) -> str:
    """For sbatch: after a signal, a write takes so long (Slurm waits 30 s)."""
    seconds = 10 if LONG else 3
    training = "'-m' not in sys.orig_argv and 'train_distributed.py' in sys.orig_argv"
    code = SLOW_DISK.format(seconds=seconds).replace("True", training, 1)
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{code}")
    return f"--export=ALL,PYTHONPATH={tmp_path}"


class Job:
    """A training as a job of two nodes with two GPUs each."""

    def __init__(self, cluster, repo, run, style, options, *flags):
        self.cluster, self.run = cluster, run
        flags = ["--ntasks-per-node=2", "--cpus-per-task=1", *flags]
        flags = ["--nodes=2", "--gpus-per-node=2", *flags, f"--output={run.parent}/%j.out"]
        words = [style, "configs/default_config.yaml", *options, f"--checkpoint-dir={run}"]
        code, text = cluster.on("login", "sbatch", "--parsable", *flags, *words, cwd=repo)
        assert code == 0, text
        self.id = text.split()[-1]

    def slurm(self, *words):
        code, text = self.cluster.on("login", *words)
        assert code == 0, text
        return text

    def facts(self) -> dict:
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm("scontrol", "show", "job", self.id)))

    def status(self) -> dict:
        path = self.run / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait(self, what, seconds=240):
        deadline = time.monotonic() + seconds
        while not (answer := what()):
            assert time.monotonic() < deadline, (self.facts(), self.status(), self.output())
            time.sleep(0.2)
        return answer

    def wait_for_training(self) -> None:
        """Wait until an attempt has saved a checkpoint after step 20."""
        self.wait(lambda: self.status().get("saved_step", 0) > 20)

    def end(self, seconds=300) -> str:
        """Wait for the end; returns the state. A requeued job starts after 3 s, not minutes."""
        hurried = False

        def ended():
            nonlocal hurried
            state = self.facts()["JobState"]
            if state == "PENDING" and not hurried:  # repeated until Slurm accepts it
                soon = f"JobId={self.id}", "StartTime=now+3"
                hurried = self.cluster.on("login", "scontrol", "update", *soon)[0] == 0
            return state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") and state

        return self.wait(ended, seconds)

    def output(self) -> str:
        return "".join(path.read_text() for path in self.run.parent.glob("*.out"))

    def attempts(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "attempts.jsonl").read_text().splitlines()]


def assert_same_end(job, untouched) -> None:
    assert_same_state(newest_in(job.run), untouched)
    assert job.status()["state"] == "finished"


def ranks_on(cluster) -> list:
    return [
        p for p in cluster.processes() if re.search(r"python\S* (-u )?scripts/guard.py", p.line)
    ]


def usr1(job):
    job.slurm("scancel", "--batch", "--signal=USR1", job.id)


def usr1_to_the_steps(job):
    job.slurm("scancel", "--signal=USR1", job.id)


def requeue(job):
    job.slurm("scontrol", "requeue", job.id)


long = pytest.mark.long
CASES = [
    pytest.param(*case, marks=() if case == (SRUN, usr1) else long)
    for case in itertools.product((TORCHRUN, SRUN), (usr1, usr1_to_the_steps, requeue))
]


@pytest.mark.parametrize(("style", "ask"), CASES)
def test_a_job_asked_to_stop_is_requeued_loses_no_step_and_ends_the_same(
    racks, repo, tmp_path, long_options, untouched, style, ask, slow_disk
):
    job = Job(racks, repo, tmp_path / "run", style, long_options, slow_disk)
    job.wait_for_training()
    ask(job)
    stopped = job.wait(lambda: job.status().get("state") == "stopped" and job.status())
    assert job.end() == "COMPLETED", job.output()
    first, last = job.attempts()
    assert (first["cause"], first["recomputed"]) == ("stopped", 0)
    assert last["start_step"] == stopped["global_step"]
    assert job.facts()["Restarts"] == "1"
    assert_same_end(job, untouched)


@long
@pytest.mark.parametrize("style", [TORCHRUN, SRUN])
def test_scancel_saves_and_the_job_is_not_requeued(
    cluster, repo, tmp_path, long_options, untouched, style
):
    job = Job(cluster, repo, tmp_path / "run", style, long_options)
    job.wait_for_training()
    job.slurm("scancel", job.id)
    assert job.end() == "CANCELLED"
    cluster.assert_nothing_left(15)
    status = job.status()
    assert status["state"] == "stopped" and job.attempts()[-1]["reason"] == "SIGTERM"
    again = Job(cluster, repo, tmp_path / "run", style, long_options)
    assert again.end() == "COMPLETED", again.output()
    assert f"at step {status['global_step']}, to step " in again.output()
    assert_same_end(again, untouched)
    assert job.facts()["Restarts"] == "0"


@long
@pytest.mark.parametrize("style", [TORCHRUN, SRUN])
def test_killing_the_supervisor_ends_the_job_but_loses_no_step(
    cluster, repo, tmp_path, long_options, untouched, style, slow_disk
):
    job = Job(cluster, repo, tmp_path / "run", style, long_options, slow_disk)
    job.wait_for_training()
    (supervisor,) = [p.pid for p in cluster.processes() if "supervise.py srun" in p.line]
    os.kill(supervisor, signal.SIGKILL)
    assert job.end() == "FAILED"
    cluster.assert_nothing_left(30)
    step = job.status()["global_step"]
    assert job.status()["state"] == "stopped"
    again = Job(cluster, repo, tmp_path / "run", style, long_options)
    assert again.end() == "COMPLETED", again.output()
    assert {attempt["recomputed"] for attempt in again.attempts()} == {0}
    assert again.attempts()[-1]["start_step"] == step
    assert_same_end(again, untouched)


@long
def test_a_stop_in_the_pause_ends_the_chain(racks, repo, tmp_path, long_options):
    """Of two jobs, of which the second starts when the first has removed the file."""
    flags = ["--dependency=singleton", "--job-name=chain", "--export=ALL,RESTART_PAUSE=1000"]
    first, second = (
        Job(racks, repo, tmp_path / "run", TORCHRUN, long_options, *flags) for _ in range(2)
    )
    first.wait_for_training()
    os.kill(ranks_on(racks)[-1].pid, 9)
    first.wait(lambda: "Restart 1 in 1000 s" in first.output())
    (first.run / "STOP").touch()
    assert (first.end(), second.end()) == ("FAILED", "COMPLETED"), first.output()
    records = first.attempts()
    assert [record["cause"] for record in records] == ["killed", "stopped"]
    assert [record["next"] for record in records] == ["stop", "stop"]
    assert first.status()["state"] == "stopped"


FAKE = """
import json, os, pathlib, socket, sys, time
here = pathlib.Path(__file__).parent
host = socket.gethostname()
bad = here / "bad"
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and not bad.exists():
    (here / "new").write_text(host)
    (here / "new").rename(bad)
while not bad.exists():
    time.sleep(0.05)
is_first = os.environ["ATTEMPT"] == "1" and "SLURM_RESTART_COUNT" not in os.environ
if os.environ["MODE"] == "waits" and is_first:
    time.sleep(1000)
if os.environ["MODE"] == "hangs" and host == bad.read_text():
    failure = {"cause": "hang", "reason": "no answer", "host": host, "hosts": [host]}
    pathlib.Path(os.environ["FAILURE_FILE"]).write_text(json.dumps(failure))
    sys.exit(1)
if os.environ["MODE"] == "bug" and os.environ["RANK"] == "0":
    failure = {"cause": "exception", "reason": "KeyError: 7", "host": host, "hosts": [host]}
    pathlib.Path(os.environ["FAILURE_FILE"]).write_text(json.dumps({**failure, "rank": 0}))
    sys.exit(1)
"""


@pytest.fixture
def fake_job(racks, repo, tmp_path):
    """fake_job(mode, nodes, nnodes): a job of a script without torch; its last node is bad."""

    def fake_job(mode, nodes, nnodes, *more, **env):
        (tmp_path / "fake.py").write_text(FAKE)
        env |= {"TRAIN_SCRIPT": tmp_path / "fake.py", "GUARD": "0", "LOG_DIR": tmp_path}
        env |= {"MODE": mode, "NNODES": nnodes}
        words = ",".join(f"{name}={value}" for name, value in env.items())
        flags = [f"--nodes={nodes}", "--gpus-per-node=1", "--ntasks-per-node=1", *more]
        job = Job(racks, repo, tmp_path / "run", SRUN, [], *flags, f"--export=ALL,{words}")
        job.run = tmp_path / f"supervise_{job.id}"
        return job

    return fake_job


@pytest.mark.parametrize(
    ("nodes", "nnodes", "left"),
    [pytest.param(3, "2", 2, marks=long), (2, "2", 2), (4, "3:4", 3)],
    ids=["a spare", "no spare", "three of four"],
)
def test_a_node_that_hangs_twice_is_left_out(fake_job, tmp_path, nodes, nnodes, left):
    job = fake_job("hangs", nodes, nnodes)
    assert job.end() == "COMPLETED", job.output()
    bad = (tmp_path / "bad").read_text()
    records = job.attempts()
    assert [record["cause"] for record in records] == ["hang", "hang", "ended"]
    assert bad in records[1]["hosts"]
    assert bad not in records[2]["hosts"] and len(records[2]["hosts"]) == left
    is_requeued = nodes == 2
    assert job.facts()["Restarts"] == str(int(is_requeued))
    assert job.facts()["ExcNodeList"] == (bad if is_requeued else "(null)")


@long
def test_a_bug_of_the_script_takes_at_most_one_node_away(fake_job):
    """Until a second host has shown the same: then nobody is blamed."""
    job = fake_job("bug", 4, "2:4", MAX_RESTARTS="4")
    assert job.end() == "FAILED"
    used = [len(record["hosts"]) for record in job.attempts()]
    assert used == [4, 4, 3, 4, 4], job.output()
    assert job.facts()["Restarts"] == "0"


@long
def test_a_job_that_is_preempted_during_imports_is_requeued(fake_job, tmp_path):
    """Nothing handles SIGTERM yet."""
    job = fake_job("waits", 2, "2", "--partition=low", "--exclusive")
    job.wait((tmp_path / "bad").exists)
    preempt(job)
    assert job.end() == "COMPLETED", job.output()
    assert job.facts()["Restarts"] == "1"


@pytest.mark.parametrize("has_spare", [False, pytest.param(True, marks=long)])
def test_a_job_that_loses_a_node_is_requeued_or_goes_on_with_a_spare(fake_job, tmp_path, has_spare):
    job = fake_job("waits", *([3, "2", "--no-kill"] if has_spare else [2, "2"]))
    job.wait((tmp_path / "bad").exists)
    name = f"NodeName={(tmp_path / 'bad').read_text()}"
    job.slurm("scontrol", "update", name, "State=DOWN", "Reason=test")
    try:
        assert job.end() == "COMPLETED", job.output()
    finally:
        job.cluster.on("login", "scontrol", "update", name, "State=RESUME")  # or it is back already
    assert job.facts()["Restarts"] == ("0" if has_spare else "1")
    if has_spare:
        hosts = [record["hosts"] for record in job.attempts()]
        assert (tmp_path / "bad").read_text() not in hosts[-1] and len(hosts[-1]) == 2, hosts


def preempt(job):
    flags = ["--partition=high", "--exclusive", f"--nodes={len(job.cluster.hosts) - 1}"]
    job.slurm("sbatch", *flags, "--wrap=sleep 5", "--output=/dev/null")


# ------------------------------------------------------------------ tests of a minute or more


@long
@pytest.mark.parametrize("style", [TORCHRUN, SRUN])
def test_a_job_out_of_time_saves_is_requeued_and_ends_the_same(
    cluster, repo, tmp_path, tiny, style
):
    """Slurm's shortest time limit is a minute."""
    options = [*tiny, "--epochs=120", "--global-batch-size=48"]
    job = Job(cluster, repo, tmp_path / "run", style, options, "--time=1")
    assert job.wait(lambda: job.facts()["JobState"] == "COMPLETED", 600)
    causes = [(attempt["cause"], attempt["reason"]) for attempt in job.attempts()]
    assert len(causes) > 1 and set(causes[:-1]) == {("stopped", "the end of the job's time")}
    assert sum(attempt["recomputed"] for attempt in job.attempts()) == 0
    straight = train(tmp_path / "straight", 4, *options, timeout=600)
    assert_same_state(newest_in(job.run), straight.newest())


# Does not stop before it is killed; when the job is started again, it ends.
STUBBORN = """
import os, signal, time
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)
"""


@long
def test_a_job_out_of_time_that_does_not_stop_is_requeued(cluster, repo, tmp_path):
    script = tmp_path / "my_train.py"
    script.write_text(STUBBORN)
    flags = ["--time=1", f"--export=ALL,TRAIN_SCRIPT={script},GUARD=0"]
    job = Job(cluster, repo, tmp_path / "run", TORCHRUN, [], *flags)
    assert job.end() == "COMPLETED", job.output()
    assert job.facts()["Restarts"] == "1", job.output()


@long
@pytest.mark.parametrize("style", [TORCHRUN, SRUN])
def test_a_preempted_job_saves_is_requeued_and_ends_the_same(
    racks, repo, tmp_path, long_options, untouched, style, slow_disk
):
    flags = ["--partition=low", "--exclusive", slow_disk]
    job = Job(racks, repo, tmp_path / "run", style, long_options, *flags)
    job.wait_for_training()
    preempt(job)
    stopped = job.wait(lambda: job.status().get("state") == "stopped" and job.status())
    assert job.end() == "COMPLETED", job.output()
    first, last = job.attempts()
    assert (first["cause"], first["reason"], first["recomputed"]) == ("stopped", "SIGTERM", 0)
    assert last["start_step"] == stopped["global_step"]
    assert_same_end(job, untouched)


@long
@pytest.mark.parametrize(("style", "node"), [(TORCHRUN, "node02"), (SRUN, "node01")])
def test_a_job_with_a_disconnected_node_is_requeued_and_ends_the_same(
    repo, tmp_path, tiny, lossy, style, node
):
    """The old ranks on it keep running, and write nothing more. Rank 0 on node01 has the lock."""
    more = ["--epochs=20", "--global-batch-size=48", "--checkpoint-every-steps=10"]
    options = [*tiny, *more, "--reproducible", "--hang-timeout=60"]
    job = Job(lossy, repo, tmp_path / "run", style, options)
    job.wait_for_training()
    on = [Path(__file__).parent / "on.sh", "login"]
    subprocess.run([*on, "ip", "link", "set", node, "down"], env=lossy.env, check=True)
    try:
        job.wait(lambda: job.facts()["Restarts"] == "1")
    finally:
        subprocess.run([*on, "ip", "link", "set", node, "up"], env=lossy.env, check=True)
    assert job.end() == "COMPLETED", job.output()
    straight = train(tmp_path / "straight", 4, *options, timeout=600)
    assert_same_state(newest_in(job.run), straight.newest())
