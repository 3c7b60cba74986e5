"""Both Slurm launchers on a Slurm newer than Debian 12's, downloaded from deb.debian.org.

SLURM=trixie (or another Debian suite) runs the other tests of this directory on it, too.
"""

import os

import pytest
from conftest import newer_slurm
from machines import Cluster, Path, probed

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes of two GPU slots."""
    suite = os.environ.get("SLURM") or "trixie"
    try:
        slurm = newer_slurm(tmp_path_factory.mktemp("slurm"), suite)
    except AssertionError as error:
        if os.environ.get("SLURM") or os.environ.get("CLUSTER_TESTS") == "required":
            raise
        pytest.skip(f"no Slurm of Debian {suite}: {str(error).splitlines()[-1]}")
    cluster = Cluster(Path(f"/tmp/newer-{os.getpid()}"), 2, 2, **slurm)
    yield cluster
    cluster.down()


def test_trains_to_the_same_weights(cluster, repo, tmp_path, options, check):
    code, version = cluster.on("login", "sinfo", "--version")
    assert code == 0 and int(version.split()[1].split(".")[0]) >= 24, version
    words = ["--nodes=2", "--gpus-per-node=2", f"--output={tmp_path}/made/by/slurm/%j.out"]
    words += ["slurm_train_multinode.sh", *options, f"--checkpoint-dir={tmp_path / 'run'}"]
    code, text = cluster.sbatch(repo, *words, OMP_NUM_THREADS="1")  # as in train()
    assert code == 0, text
    check(text, tmp_path / "run", {"node01": "0-1", "node02": "2-3"})


@pytest.mark.parametrize("launcher", ["run_distributed.slurm", "slurm_train_multinode.sh"])
def test_a_step_has_all_that_the_job_has_whatever_it_requested_per_task(
    cluster, repo, probe, launcher
):
    """srun takes it from SLURM_CPUS_PER_TASK, SLURM_TRES_PER_TASK and SLURM_TRES_BIND, too."""
    words = ["--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=2", "--gpus-per-task=1", "-c2"]
    code, text = cluster.sbatch(repo, *words, launcher, **probe)
    assert code == 0, text
    found = {(r["world_size"], r["cores_of_step"], r["gpus"]) for r in probed(text)}
    assert found == {(4, 4, "0,1")}, text
