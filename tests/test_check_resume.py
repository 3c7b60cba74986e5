"""scripts/check_resume.py and check_resume_notes.py: what a resumed run has not got back."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPO, processes_with, wait_until

# A healthy script; each test replaces some lines. It saves after each ten steps, within a pass.
SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

path = os.path.join(sys.argv[1], "last.pt")
torch.manual_seed(0)
inputs = torch.randn(480, 12)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "average": average}
step = 0
if os.path.exists(path):
    state = torch.load(path)
    for name in parts:
        parts[name].load_state_dict(state[name])
    step = state["step"]
while step < 60:
    epoch, done = divmod(step, 30)
    order = torch.randperm(480, generator=torch.Generator().manual_seed(epoch)).tolist()
    for x, y in DataLoader(Subset(data, order[done * 16 :]), batch_size=16):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        step += 1
        if step % 10 == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "step": step}, path)
        # END OF A STEP
"""
LOAD = "for name in parts:"
CRASH = 'if step == 24 and os.environ["ATTEMPT"] == "1":\n            os._exit(1)'

# {what is wrong: (what is said by the attempt after a crash, by check_resume.py, replaced lines)}
BROKEN = {
    "nothing is loaded": (
        "the weights are those of the first start, the optimizer has state for 0 of 4 parameters",
        "the first start",
        ("exists(path)", "exists(path + 's')"),
    ),
    "the optimizer's state is not loaded": (
        "the weights are those of step 20, the optimizer has state for 0 of 4 parameters",
        "another optimizer state",
        (LOAD, "for name in parts.keys() - {'optimizer'}:"),
    ),
    "the schedule begins again": (
        "the learning rate of step 22 is 0.00749., not 0.00727",
        "step 22 of rank 0: another learning rate",
        (LOAD, "for name in parts.keys() - {'schedule'}:"),
    ),
    "the data begin again": (
        "the batch of step 21 is that of step 1",
        r"another batch \(that of step 1\)",
        ("order[done * 16 :]", "order"),
    ),
    "the order of the data is another": (
        "samples have been used in this pass before the save",
        "another batch",
        ("manual_seed(epoch)", "manual_seed(epoch + 9 * (done > 0))"),
    ),
    "the average of the weights begins again": (
        None,
        "last.pt of step 30 differs in average",
        (LOAD, "for name in parts.keys() - {'average'}:"),
    ),
}


def write_script(path: Path, *lines: tuple[str, str]) -> Path:
    text = SCRIPT
    for old, new in lines:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def run_attempts(tmp_path: Path, script: Path, **more: str) -> list[dict]:
    """A crash at step 24, and an attempt after it. Returns the events of kind `resume`."""
    env = {"CHECK_RESUME": str(tmp_path / "notes"), "EVENTS_FILE": str(tmp_path / "events")}
    command = [sys.executable, REPO / "scripts/guard.py", script, tmp_path]
    for attempt in ("1", "2"):
        env = {**os.environ, **env, **more, "ATTEMPT": attempt}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == (attempt == "1"), done.stderr
    events = tmp_path / "events"
    lines = events.read_text().splitlines() if events.exists() else []
    assert done.stderr.count("WARNING") == len(lines)
    return [json.loads(line) for line in lines]


def check(tmp_path: Path, script: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, REPO / "scripts/check_resume.py", "--stop-at", "24", *options]
    command += ["--", sys.executable, script, "{dir}"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert list(tmp_path.glob("check_resume_*")) == []
    return done


def test_a_healthy_script_goes_on(tmp_path):
    script = write_script(tmp_path / "train.py", ("# END OF A STEP", CRASH))
    assert run_attempts(tmp_path, script) == []
    done = check(tmp_path, write_script(tmp_path / "train.py"), "--kill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "went on from step 20 of 40" in done.stdout
    assert "equal, bit for bit" in done.stdout


def some_are_long(names, quick: set[str]) -> list:
    """Half a minute each: by default, only those that are named."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", some_are_long(BROKEN, {"the data begin again"}))
def test_what_is_not_restored_is_said(name, tmp_path):
    passive, active, lines = BROKEN[name]
    script = write_script(tmp_path / "train.py", lines, ("# END OF A STEP", CRASH))
    texts = [event["text"] for event in run_attempts(tmp_path, script)]
    if passive is None:
        assert texts == []
    else:
        assert any(re.search(passive, text) for text in texts), texts
    done = check(tmp_path, write_script(tmp_path / "train.py", lines))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(active, done.stdout)


SAVES = {
    "torch.save": "torch.save({}, place + '/a.pt')",
    "safetensors": "__import__('safetensors.torch').torch.save_file({}, place + '/a.safetensors')",
    "open": "open(place + '/a.json', 'w')",
    "os.remove": "os.remove(place + '/real.pt')",
}


@pytest.mark.parametrize("name", some_are_long(SAVES, {"torch.save"}))
def test_files_elsewhere_are_not_changed(name, tmp_path):
    if name == "safetensors":
        pytest.importorskip("safetensors", reason="NOT INSTALLED")
    (tmp_path / "real").mkdir()
    (tmp_path / "real/real.pt").write_text("a checkpoint")
    lines = f"place = {str(tmp_path / 'real')!r}; {SAVES[name]}"
    done = check(tmp_path, write_script(tmp_path / "train.py", ("# END OF A STEP", lines)))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"it would change {tmp_path}/real/" in done.stdout
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["real.pt"]


def test_ctrl_c_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path))
    lines = "open(sys.argv[1] + '/begun', 'w'); import time; time.sleep(1)"
    script = write_script(tmp_path / "train.py", ("# END OF A STEP", lines))
    command = [sys.executable, REPO / "scripts/check_resume.py", "--"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([*command, sys.executable, script, "{dir}"], env=env, cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob("check_resume_*/*/begun")), "no step")
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    assert processes_with("MARK", tmp_path) == {}
    assert list(tmp_path.glob("check_resume_*")) == []
