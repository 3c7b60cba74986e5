"""Directories at a known path in /tmp, which another user may have made first."""

import os
import subprocess

import pytest
from harness import REPO

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to act as another user")
BEFORE = ["missing", "own", "writable", "link", pytest.param("other user's", marks=needs_root)]


def prepare(path, before: str) -> bool:
    """Make what another user could find or make at this path. Returns whether it is safe."""
    if before == "link":
        path.with_name("elsewhere").mkdir(mode=0o700)
        path.symlink_to("elsewhere")
    elif before != "missing":
        path.mkdir(mode=0o700)
    if before == "writable":
        path.chmod(0o770)
    if before == "other user's":
        os.chown(path, 65534, 65534)
    return before in ("missing", "own")


@pytest.mark.parametrize("before", BEFORE)
def test_data_are_copied_to_a_directory_of_this_user_only(tmp_path, before):
    """The function that docs/LAUNCH.md uses on each node."""
    is_safe = prepare(tmp_path / "data", before)
    command = f"source scripts/common.sh; own_directory {tmp_path}/data; echo copied"
    result = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True)
    assert (result.stdout == "copied\n") == is_safe
    assert is_safe or result.returncode == 2 and result.stderr.count("\n") == 1
