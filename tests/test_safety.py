"""Secrets are not written to files, and the user's umask applies."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness import copy_repository

CANARY = "c4n4ry-s3cr3t"


@pytest.mark.long
def test_secrets_of_the_environment_are_written_nowhere(tmp_path, tiny):
    """After a training under supervise.py that crashed, was restarted, and finished."""
    copy = copy_repository(tmp_path / "repo")
    run, names = copy / "run", ("WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD")
    env = os.environ | {name: CANARY for name in names} | {"PYTHON": sys.executable}
    command = [copy / "scripts/supervise.py", copy / "scripts/ssh/launch_singlenode.sh"]
    command += ["configs/default_config.yaml", "2", *tiny, f"--checkpoint-dir={run}", "--epochs=6"]
    command += ["--checkpoint-every-steps=5"]
    before = set(copy.rglob("*"))
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=copy, env=env, umask=0o027, **streams)
    lines, killed = "", False
    while process.poll() is None:
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                line = (entry / "cmdline").read_bytes().decode()
                lines += line
                is_rank = str(run) in line and "guard.py" in line and "torch.distr" not in line
                if is_rank and not killed and list(run.glob("checkpoint_*.pt")):
                    os.kill(int(entry.name), 9)
                    killed = True
        time.sleep(0.2)
    text = process.communicate()[0]
    assert process.returncode == 0 and killed, text
    assert "Restart 1 of " in text
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert any("logs" in path.parts for path in files)
    assert CANARY not in lines + text
    written = {path for path in files if path not in before}
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert run / "attempts.jsonl" in written
    assert {path.stat().st_mode & 0o777 for path in written} <= {0o640, 0o600}
