"""No secret is written down; files get the user's umask; nothing that was sent is executed."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import copy_repository, launch

CANARY = "c4n4ry-s3cr3t"


@pytest.fixture
def copy(tmp_path):
    return copy_repository(tmp_path / "repo")


@pytest.mark.long
def test_secrets_of_the_environment_are_nowhere_to_be_found(tmp_path, tiny, copy):
    """After a training that was supervised, crashed, was started again, and finished."""
    run, names = copy / "run", ("WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD")
    env = os.environ | {name: CANARY for name in names} | {"PYTHON": sys.executable}
    command = [copy / "scripts/supervise.py", copy / "scripts/ssh/launch_singlenode.sh"]
    command += ["configs/default_config.yaml", "2", *tiny, f"--checkpoint-dir={run}", "--epochs=6"]
    command += ["--checkpoint-every-steps=5"]
    before = set(copy.rglob("*"))
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=env,
        umask=0o027,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, killed = "", False
    while process.poll() is None:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes().decode()
                lines += line
                if not killed and str(run) in line and "train_distributed.py" in line:
                    if list(run.glob("checkpoint_*.json")) and "torch.distributed" not in line:
                        if "supervise" not in line and "launch_" not in line:
                            os.kill(int(entry.name), 9)
                            killed = True
            except OSError:
                continue
        time.sleep(0.2)
    text = process.communicate()[0]
    assert process.returncode == 0 and killed, text
    assert "Starting again from step" in text
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert any("logs" in path.parts for path in files)
    assert CANARY not in lines + text
    written = {path for path in files if path not in before}
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert run / "attempts.jsonl" in written
    assert {path.stat().st_mode & 0o777 for path in written} <= {0o640, 0o600}


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch canary", "$(touch canary)", "a;touch canary"]
)
def test_a_host_name_is_not_executed(copy, host):
    command = ["scripts/ssh/launch_torchrun_auto.sh", "configs/default_config.yaml", "2", "a", host]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert not list(copy.rglob("canary"))


def test_a_config_is_not_executed(tmp_path, tiny):
    config = tmp_path / "evil.yaml"
    config.write_text(f"epochs: !!python/object/apply:os.mkdir ['{tmp_path}/canary']\n")
    result = launch(tmp_path / "run", 1, *tiny, f"--config={config}")
    assert result.codes == [2] and not (tmp_path / "canary").exists()
    assert re.search(r"error: .*evil.yaml", result.err[0])
