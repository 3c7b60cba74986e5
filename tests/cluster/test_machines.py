"""The cluster of up.sh itself: it ends with its owner, and leaves another cluster alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import wait_until
from machines import HERE

OWNER = """
import sys, time
sys.path.insert(0, {here!r})
sys.path.insert(0, {tests!r})
from pathlib import Path
from machines import Cluster
cluster = Cluster(Path({directory!r}), 1, 1)
cluster.start("node01", "sleep", "1000")
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.long
def test_a_cluster_ends_with_the_process_that_started_it(cluster):
    """As when the tests are killed."""
    directory = Path(f"/tmp/owned-{os.getpid()}")
    code = OWNER.format(here=str(HERE), tests=str(HERE.parent), directory=str(directory))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "up\n"
    owner.kill()
    owner.communicate()
    wait_until(lambda: not directory.exists(), "the cluster is still there")
    assert cluster.on("login", "srun", "--nodes=2", "hostname")[0] == 0  # another cluster
