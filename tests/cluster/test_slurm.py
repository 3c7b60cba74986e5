"""The Slurm launchers on a real Slurm: which rank runs where. The guide: test_guide.py."""

import json
import os
import re
import shutil
import sys
import time

import pytest
from machines import probed, wait_until

LAUNCHERS = ["run_distributed.slurm", "slurm_train_multinode.sh"]
TWO_BY_TWO = ["--nodes=2", "--gpus-per-node=2"]
ELSEWHERE = "--output=slurm-%j.out"  # logs/ is in the repository


SRUN_ONLY = [pytest.param(LAUNCHERS[0], marks=pytest.mark.long), LAUNCHERS[1]]


@pytest.mark.parametrize("launcher", ["run_distributed.slurm", "slurm_train_multinode.sh"])
def test_two_nodes_of_four_as_shipped(cluster, repo, probe, launcher):
    words = ["configs/default_config.yaml", "--mine", "a b"]
    code, text = cluster.sbatch(repo, launcher, *words, **probe, QUOTED='it\'s "so"')
    assert code == 0, text
    records = probed(text)
    where = [(r["rank"], r["local_rank"], r["host"], r["world_size"]) for r in records]
    assert where == [(n, n % 4, f"node{n // 4 + 1:02}", 8) for n in range(8)]
    assert {r["quoted"] for r in records} == {'it\'s "so"'}
    assert [r["argv"][-2:] for r in records] == [["--mine", "a b"]] * 8


def test_one_node_of_four_without_torchrun(cluster, repo, probe):
    code, text = cluster.sbatch(repo, "slurm_train_single_node.sh", **probe)
    assert code == 0, text
    assert [(r["local_rank"], r["world_size"]) for r in probed(text)] == [(n, 4) for n in range(4)]


@pytest.mark.parametrize("launcher", SRUN_ONLY)
@pytest.mark.parametrize(
    "words",
    [
        ["--gpus-per-node=2", "--ntasks-per-node=2", "--gpus-per-task=1"],
        ["--gres=gpu:2", "--gpu-bind=single:1", "--ntasks-per-node=3", "-c1"],
    ],
    ids=str,
)
def test_one_rank_per_gpu_whatever_the_job_requests_per_task(cluster, repo, probe, launcher, words):
    """Also if it was submitted from within a job that requested something else."""
    outer = {"SLURM_GPUS_PER_SOCKET": "4", "SLURM_THREADS_PER_CORE": "1", "SLURM_MEM_PER_GPU": "9"}
    code, text = cluster.sbatch(repo, "--nodes=2", *words, launcher, **probe, **outer)
    assert code == 0, text
    records = probed(text)
    where = [(r["rank"], r["local_rank"], r["host"], r["gpus"]) for r in records]
    assert where == [(n, n % 2, f"node{n // 2 + 1:02}", "0,1") for n in range(4)]


@pytest.mark.parametrize("launcher", SRUN_ONLY)
def test_nodes_with_different_numbers_of_gpus(cluster, repo, tmp_path, probe, launcher):
    script = tmp_path / launcher
    script.write_text((repo / launcher).read_text().replace("#SBATCH --gpus-per-node=4", ""))
    code, text = cluster.sbatch(repo, "--gpus=6", script, **probe)
    if launcher == LAUNCHERS[0]:
        ranks = [(record["host"], record["local_rank"]) for record in probed(text)]
        assert ranks == [*(("node01", n) for n in range(5)), ("node02", 0)]
    else:
        assert code == 2
        assert "the nodes have different numbers of GPUs (1 5): use run_distributed" in text


@pytest.mark.parametrize("launcher", SRUN_ONLY)
def test_steps_get_the_environment_of_the_launcher(cluster, repo, tmp_path, probe, launcher):
    """Whatever `sbatch --export` passes to the job: srun would pass just that to its tasks."""
    variables = {"PYTHON": sys.executable, **probe}
    export, script = f"--export={','.join(map('='.join, variables.items()))}", repo / launcher
    if launcher == LAUNCHERS[1]:
        exports = "".join(f"export {name}={value}\n" for name, value in variables.items())
        text, export, script = script.read_text(), "--export=NONE", tmp_path / launcher
        first = 'REPO_ROOT="${REPO_ROOT:-}"\n'
        script.write_text(text.replace(first, exports + first))
    code, text = cluster.sbatch(repo, *TWO_BY_TWO, export, script)
    assert code == 0, text
    attempts = [record["attempt"] for record in probed(text)]
    assert len(attempts) == 4 and set(attempts) == {attempts[0]} != {None}, text


@pytest.mark.parametrize("launcher", SRUN_ONLY)
def test_a_node_without_scontrol_as_in_a_container(cluster, repo, probe, launcher):
    scontrol = shutil.which("scontrol")
    assert cluster.on("node02", "mount", "--bind", "/bin/false", scontrol)[0] == 0
    try:
        code, text = cluster.sbatch(repo, *TWO_BY_TWO, launcher, **probe)
    finally:
        assert cluster.on("node02", "umount", scontrol)[0] == 0
    assert code == 0 and "error" not in text, text
    assert [record["rank"] for record in probed(text)] == [0, 1, 2, 3]


@pytest.mark.parametrize("launcher", SRUN_ONLY)
def test_options_of_site_sh_reach_every_step(cluster, repo, probe, launcher):
    """As --container-image of Pyxis, which cannot be installed here."""
    site = repo / "scripts/site.sh"
    before = site.read_text()
    site.write_text(f"{before}\nsrun+=(--label)\n")
    try:
        code, text = cluster.sbatch(repo, *TWO_BY_TWO, launcher, **probe)
    finally:
        site.write_text(before)
    assert code == 0 and len(re.findall("(?m)^[0-3]: PROBE", text)) == 4, text


def test_options_in_the_script_come_before_those_of_the_command_line(cluster, repo, tmp_path):
    """In a job array, %a is the task's number."""
    shutil.copy(repo / "configs/default_config.yaml", repo / "configs/task7.yaml")
    words = [*TWO_BY_TWO, "--array=7"]
    for launcher in LAUNCHERS:
        script, in_script = repo / launcher, ""
        if launcher == LAUNCHERS[0]:
            script, in_script = tmp_path / launcher, "--epochs 90 --checkpoint-dir runs/7 "
            text = (repo / launcher).read_text()
            text = text.replace("# --epochs 90", "--epochs 90")
            script.write_text(
                text.replace("# --checkpoint-dir runs/my_run", "--checkpoint-dir runs/%a")
            )
        options = ["configs/task%a.yaml", "--epochs=2", "--seed=%a", "--name", "a b"]
        code, text = cluster.sbatch(repo, *words, script, *options, DRY_RUN="1")
        assert code == 0 and "supervise.py srun " in text and text.count("\n") == 1, text
        expected = f"configs/task7.yaml {in_script}--epochs=2 --seed=7 --name a\\ b\n"
        assert text.endswith(expected), text


@pytest.mark.parametrize("launcher", SRUN_ONLY)
def test_submitted_from_another_directory(cluster, repo, tmp_path, probe, launcher):
    words = [*TWO_BY_TWO, ELSEWHERE, repo / launcher]
    code, text = cluster.sbatch(tmp_path, *words, **probe)
    assert code == 2 and f"error: no train_distributed.py in {tmp_path}: submit" in text, text
    code, text = cluster.sbatch(tmp_path, f"--chdir={repo}", *words, DRY_RUN="1")
    assert code == 0 and "supervise.py srun " in text, text
    relative = os.path.relpath(repo, tmp_path)
    code, text = cluster.sbatch(tmp_path, *words, REPO_ROOT=relative, **probe)
    assert code == 0 and len(probed(text)) == 4, text


@pytest.mark.long
def test_a_chain_of_jobs_that_slurm_does_not_requeue(cluster, repo, tmp_path, tiny):
    """Each is asked to stop, as before the end of its time."""
    metrics = tmp_path / "run/metrics.jsonl"
    words = ["--array=1-2%1", "--no-requeue", "--nodes=2", "--gres=gpu:1", LAUNCHERS[1]]
    options = [*tiny, "--epochs=2000", f"--checkpoint-dir={metrics.parent}"]
    env = {"STOPPED_EXIT_CODE": "75"}
    code, text = cluster.on("login", "sbatch", "--parsable", *words, *options, cwd=repo, **env)
    assert code == 0, text
    array = text.strip()
    size = 0
    for task in (1, 2):
        wait_until(lambda old=size: metrics.exists() and metrics.stat().st_size > old + 1000)
        cluster.on("login", "scancel", "--batch", "--signal=USR1", f"{array}_{task}")
        code, text = cluster.end_of_job(f"{array}_{task}")
        assert code == 75 and "stopped (SIGUSR1); the same command" in text, text
        size = metrics.stat().st_size
    log = (metrics.parent / "attempts.jsonl").read_text().splitlines()
    first, second = json.loads(log[0]), json.loads(log[-1])
    assert second["start_step"] == first["end_step"] > 0


@pytest.mark.long
def test_tasks_of_an_array_are_requeued_one_by_one(cluster, repo, tmp_path, tiny):
    words = ["--array=1-2", "--nodes=1", "--gres=gpu:1", LAUNCHERS[0]]
    runs = [tmp_path / "run1", tmp_path / "run2"]
    options = [*tiny, "--epochs=2000", f"--checkpoint-dir={tmp_path}/run%a"]
    code, text = cluster.on("login", "sbatch", "--parsable", *words, *options, cwd=repo)
    assert code == 0, text
    job, facts = text.strip(), {}
    metrics = [run / "metrics.jsonl" for run in runs]
    wait_until(lambda: all(file.exists() and file.stat().st_size > 1000 for file in metrics))
    # Slurm gives the id of the array itself to its last task.
    assert cluster.on("login", "scancel", "--batch", "--signal=USR1", f"{job}_2")[0] == 0
    deadline = time.monotonic() + 120
    while facts.get("2", {}).get("Restarts") != "1":
        assert time.monotonic() < deadline, facts
        for task in "12":
            _, text = cluster.on("login", "scontrol", "show", "job", f"{job}_{task}")
            facts[task] = dict(re.findall(r"(\w+)=(\S*)", text))
    cluster.on("login", "scancel", job)
    assert (facts["1"]["Restarts"], facts["1"]["JobState"]) == ("0", "RUNNING")
    cluster.assert_nothing_left()
    logs = [(run / "attempts.jsonl").read_text().splitlines() for run in runs]
    causes = [json.loads(log[-1])["cause"] for log in logs]
    assert causes == ["stopped", "stopped"]


def test_an_allocation_with_fewer_cores_than_ranks_is_refused_at_once(cluster, repo, tmp_path):
    """salloc gives one core per task, and one task per node; srun would refuse three attempts."""
    words = ["salloc", "--nodes=1", "--gpus-per-node=2", "bash", "slurm_train_multinode.sh"]
    options = ["configs/default_config.yaml", f"--checkpoint-dir={tmp_path}/run"]
    code, text = cluster.on("login", *words, *options, cwd=repo)
    error = "the job has too few cores on a node (1) for 2 ranks: request --ntasks-per-node=2"
    assert code == 2 and text.count(error) == 1 and "Restart" not in text, text


@pytest.mark.parametrize("launcher", SRUN_ONLY)
def test_a_rank_that_fails_ends_the_job_and_its_node_is_named(cluster, repo, tmp_path, launcher):
    script = tmp_path / "my_train.py"  # the others would wait for it forever
    script.write_text(
        "import os, socket, sys, time\n"
        "if socket.gethostname() == 'node02':\n"
        "    sys.exit(3)\n"
        "time.sleep(1000)\n"
    )
    words = ["--nodes=2", "--gpus-per-node=1", launcher]
    code, text = cluster.sbatch(repo, *words, TRAIN_SCRIPT=str(script), MAX_RESTARTS="0", GUARD="0")
    assert code != 0
    cluster.assert_nothing_left()
    assert re.search(r"srun: error: (node\d+): task", text)[1] == "node02", text


@pytest.mark.long
@pytest.mark.parametrize("cpus", [[], ["--cpus-per-task=1"]])
@pytest.mark.skipif(os.cpu_count() < 2, reason="binds two tasks to cores of their own")
def test_each_rank_has_its_cores(racks, repo, tmp_path, probe, cpus):
    # As shipped, but for the directive that asks for more cores than there are here, and submitted
    # in an interactive step that is bound to the first core.
    bound = {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x1"}
    bound |= {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_VERBOSE": "quiet"}
    probe["GUARD"] = "1"  # it divides the cores
    for name in LAUNCHERS:
        script = tmp_path / name
        text = (repo / name).read_text()
        script.write_text(re.sub(r"(?m)^#SBATCH --cpus.*\n", "", text))
        words = [*TWO_BY_TWO, "--ntasks-per-node=2", *cpus, "--output=racks-%j.out", script]
        code, text = racks.sbatch(repo, *words, **probe, **bound)
        assert code == 0, text
        records = probed(text)
        assert [record["local_rank"] for record in records] == [0, 1] * 2
        share = 1 if cpus else os.cpu_count() // 2
        for first, second in (records[:2], records[2:]):
            # srun binds no task; guard.py divides the cores among the ranks.
            assert len(first["cores"]) == len(second["cores"]) == share, text
            assert not set(first["cores"]) & set(second["cores"]), text
