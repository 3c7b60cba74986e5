"""scripts/check_resume.py and check_resume_notes.py: what a resumed run has not got back."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from check_resume import compare
from check_resume_notes import PLAN, judge_batches, judge_rates, judge_samples, judge_start
from harness import NO_LAUNCHER, REPO, processes_with, run_ranks, wait_until

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
STATE = "optimizer_state"  # a fact of a note
BEGIN_AGAIN = ("order[done * 16 :]", "order")


def write_script(path: Path, *lines: tuple[str, str]) -> Path:
    text = SCRIPT
    for old, new in lines:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def run(tmp_path: Path, script: Path, attempt: str):
    env = {"CHECK_RESUME": tmp_path / "notes", "EVENTS_FILE": tmp_path / "events"}
    env = {**NO_LAUNCHER, **env, "ATTEMPT": attempt}
    return run_ranks(1, REPO / "scripts/guard.py", script, tmp_path, env=lambda _: env)


def run_attempts(tmp_path: Path, script: Path) -> list[dict]:
    """A crash at step 24, and an attempt after it. Returns the events of kind `resume`."""
    for attempt in ("1", "2"):
        done = run(tmp_path, script, attempt)
        assert done.codes == [attempt == "1"], done.err
    events = tmp_path / "events"
    lines = events.read_text().splitlines() if events.exists() else []
    assert done.err[0].count("WARNING") == len(lines)
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
    plain = ("step = 0\n", "step = 0\nassert not set('{}=,') & set(path)\n")  # for Hydra's grammar
    done = check(tmp_path, write_script(tmp_path / "train.py", plain), "--kill")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "went on from step 20 of 40" in done.stdout
    assert "equal, bit for bit" in done.stdout


def test_data_that_begin_again_are_reported(tmp_path):
    script = write_script(tmp_path / "train.py", BEGIN_AGAIN, ("# END OF A STEP", CRASH))
    texts = [event["text"] for event in run_attempts(tmp_path, script)]
    assert "the batch of step 21 is that of step 1" in texts[0]


def notes_of(**facts) -> dict:
    return {(step, 0, "step"): {"attempt": 1, "batch": 0, **facts} for step in (20, 21)}


@pytest.mark.parametrize(
    "stopped, resumed, noise, differs",
    [
        ({}, {"attempt": 2}, set(), False),
        ({}, {"batch": 1}, set(), True),
        ({"batch": 5}, {"batch": 1}, {"batch"}, False),  # also without a stop
        ({"batch": 5}, {"batch": 1, "weights": 1}, {"batch"}, True),
    ],
)
def test_runs_are_compared(stopped, resumed, noise, differs):
    found, texts = compare(notes_of(), notes_of(**stopped), notes_of(**resumed))
    assert found == noise
    assert bool(texts) == differs
    assert all("after step 20" in text for text in texts)


@pytest.mark.long
def test_an_average_that_is_not_restored_is_found_in_a_saved_file(tmp_path):
    lines = (LOAD, "for name in parts.keys() - {'average'}:")
    done = check(tmp_path, write_script(tmp_path / "train.py", lines))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rank 0 differs after step 30: saved average" in done.stdout


def note(event: str, step: int, **facts) -> SimpleNamespace:
    """Of a run in which each fact differs from step to step, and passes of 10 steps are shuffled.

    facts: those that differ from this. The learning rate is set before a save for the step after.
    """
    right = {"event": event, "attempt": 1, "step": step, "number": step % 10 + 1, "batch": step}
    right.update(seed=7, loads=0, entries=4 if step else 0, learning_rate=rate_of(step))
    if event == "save":
        right["last_rate"] = rate_of(step - 1)
    if event == "save" or step in (0, 10):
        right.update({"weights": step, STATE: step, "pairs": step})
    return SimpleNamespace(**{**right, **facts})


def rate_of(step: int) -> float:
    return 1 - step**2 / 10000


def steps(*numbers: int, **facts) -> list[SimpleNamespace]:
    return [note("step", number, **facts) for number in numbers]


CRASHED = [*steps(0, 1, 2), note("save", 10), *steps(10, 11, 12), note("save", 20), *steps(20, 21)]
STOPPED = CRASHED[:-2]  # right after the save
LOADED = steps(0, 1, 2, loads=1)  # weights of another run
SWAPPED = [*steps(0, 1, 2), note("save", 10), *steps(10, weights=11), note("save", 20)]

# {what: (notes of the attempt before, what is other in the first step after a start, a pattern)}
STARTS = {
    "all is restored": (CRASHED, {}, None),
    "an older save is": (CRASHED, {"weights": 10, STATE: 10, "pairs": 10}, None),
    "nothing is saved": (steps(0, 1, 2), {"weights": 0, STATE: 0, "pairs": 0}, None),
    "nothing is restored": (CRASHED, {"weights": 0, STATE: 0}, "weights are those of step 0"),
    "nothing is, with other weights": (CRASHED, {"weights": 99, STATE: 0}, "those of no step"),
    "weights of another run": (LOADED + CRASHED[3:], {"weights": 0, STATE: 0, "loads": 1}, None),
    "other weights, converted state": (CRASHED, {"weights": 99, STATE: 99}, None),
    "weights that are swapped for a save": (SWAPPED, {"weights": 99}, None),
    "no weights": (CRASHED, {"weights": 0}, "weights .* step 0, .* state is that of step 20"),
    "no state": (CRASHED, {STATE: 0, "entries": 0}, "weights .* step 20, .* that of step 0"),
    "a part of the state": (CRASHED, {STATE: 99, "entries": 3}, "step 20, .* that of no step"),
    "the state of another save": (CRASHED, {STATE: 10}, "step 20, .* that of step 10"),
    "another order of the state": (CRASHED, {"pairs": 99}, "in another order"),
}


@pytest.mark.parametrize("name", STARTS)
def test_verdicts_on_the_state(name):
    past, facts, pattern = STARTS[name]
    first = note("step", 20, **{"weights": 20, STATE: 20, "pairs": 20, **facts})
    begin, texts = judge_start(past, [], first)
    if pattern:
        assert re.search(pattern, *texts)
    else:
        assert texts == []
        assert begin.step in (first.weights, 20)


def test_another_rank_with_the_random_state_of_rank_0_is_reported():
    own = steps(0, 1, 2, seed=8)
    rank_0 = [*CRASHED]
    right = {"weights": 20, STATE: 20, "pairs": 20}
    assert judge_start(own, rank_0, note("step", 20, seed=8, **right))[1] == []
    assert judge_start(own, rank_0, note("step", 20, seed=7, **right))[1]
    assert judge_start(steps(0, 1, 2), rank_0, note("step", 20, **right))[1] == []  # all have one


def other_batches(*batches: int) -> list[SimpleNamespace]:
    return [note("step", step, batch=batch) for step, batch in zip((20, 21, 22), batches)]


def other_rates(*rates: float) -> list[SimpleNamespace]:
    return [note("step", step, learning_rate=rate) for step, rate in enumerate(rates, 20)]


def changed(notes: list, **facts) -> list[SimpleNamespace]:
    """facts: functions of the step."""
    return [
        SimpleNamespace(**{**vars(each), **{name: f(each.step) for name, f in facts.items()}})
        for each in notes
    ]


SAME_ORDER = changed(STOPPED, batch=lambda step: step % 10)
SAME_BATCH = changed(CRASHED, batch=lambda step: 5)
CONSTANT = changed(STOPPED, learning_rate=lambda step: 1, last_rate=lambda step: 1)
EXPONENTIAL = changed(STOPPED, learning_rate=lambda step: 0.9**step)
LATE = changed(STOPPED, last_rate=rate_of)  # a schedule that steps after a save
AGAIN = [rate_of(20) * rate_of(step) for step in range(3)]

# {what: (notes before, the first steps after the start, a pattern)}
RUNS = {
    "it goes on": (CRASHED, steps(20, 21, 22), None),
    "it goes on after a stop": (STOPPED, steps(20, 21, 22), None),
    "other batches": (CRASHED, other_batches(90, 91, 92), None),
    "the batches of the first steps": (CRASHED, other_batches(0, 1, 2), "step 21 .* of step 1$"),
    "a batch again": (CRASHED, other_batches(11, 12, 13), "step 21 .* of step 12$"),
    "the first order, after a stop": (STOPPED, other_batches(0, 1, 2), "step 21 .* of step 1$"),
    "always the same order": (SAME_ORDER, other_batches(0, 1, 2), None),
    "always the same batch": (SAME_BATCH, changed(steps(20, 21, 22), batch=lambda _: 5), None),
    "the first rate": (CRASHED, other_rates(1, 0.99, 0.98), "step 21 is 1, not 0.96"),
    "the first rate, after a stop": (LATE, other_rates(1, 0.99, 0.98), "step 21 is 1, not 0.96"),
    "a rate ahead": (CRASHED, other_rates(*map(rate_of, (21, 22, 23))), "21 is 0.9559, not 0.96"),
    "a rate ahead, after a stop": (STOPPED, other_rates(0.95, 0.94, 0.93), "21 is 0.95, not 0.96"),
    "the second rate": (CRASHED, other_rates(0.96, 0.96, 0.95), "step 22 is 0.96, not 0.9559"),
    "a schedule begins again": (STOPPED, other_rates(*AGAIN), "after step 21 as after step 1"),
    "it begins again, set later": (STOPPED, other_rates(0.96, rate_of(1), rate_of(2)), "after"),
    "a schedule that steps after a save": (LATE, other_rates(0.95, 0.94, 0.93), None),
    "a cycle begins again": (CONSTANT, other_rates(*map(rate_of, range(3))), None),
    "a constant rate": (CONSTANT, other_rates(1, 1, 1), None),
    "an exponential rate": (EXPONENTIAL, other_rates(*(0.9**step for step in (20, 21, 22))), None),
}


@pytest.mark.parametrize("name", RUNS)
def test_verdicts_on_rates_and_batches(name):
    past, firsts, pattern = RUNS[name]
    notes = [each for each in past if each.event == "step"]
    (save,) = [each for each in past if each.event == "save" and each.step == 20]
    more = [notes, {each.step: each for each in notes}, save, firsts]
    texts = [*judge_rates(*more), *judge_batches(*more)]
    assert re.search(pattern, *texts) if pattern else texts == []


@pytest.mark.parametrize(
    "used, new, is_wrong",
    [
        (range(300), range(250, 350), True),
        (range(300), range(300, 400), False),
        ([], range(100), False),
        (range(300), [*range(298, 398)], False),  # two equal samples
        ([*range(300), 5], range(100), False),  # drawn with replacement
    ],
)
def test_verdicts_on_samples(used, new, is_wrong):
    assert bool(list(judge_samples([*used], [*new]))) == is_wrong


SAVES = {
    "torch.save": "torch.save({}, place + '/a.pt')",
    "safetensors": "__import__('safetensors.torch').torch.save_file({}, place + '/a.safetensors')",
    "open": "open(place + '/a.json', 'w')",
    "os.remove": "os.remove(place + '/real.pt')",
}


@pytest.mark.parametrize("name", SAVES)
def test_files_elsewhere_are_not_changed(name, tmp_path):
    """A rank of check_resume.py."""
    if name == "safetensors":
        pytest.importorskip("safetensors", reason="NOT INSTALLED")
    real, place = tmp_path / "real", tmp_path / "place"
    for each in (real, place / "notes"):
        each.mkdir(parents=True)
    (place / "notes" / PLAN).write_text("[40, null, 15]")
    (real / "real.pt").write_text("a checkpoint")
    lines = f"place = {str(real)!r}; {SAVES[name]}"
    script = write_script(tmp_path / "train.py", ("# END OF A STEP", lines))
    done = run(place, script, "1")
    assert done.codes == [2], done.err
    assert f"it would change {real}/" in done.err[0]
    assert [path.name for path in real.iterdir()] == ["real.pt"]


def test_ctrl_c_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MARK", str(tmp_path))
    lines = "open(sys.argv[1] + '/begun', 'w'); import time; time.sleep(1)"
    script = write_script(tmp_path / "train.py", ("# END OF A STEP", lines))
    command = [sys.executable, REPO / "scripts/check_resume.py", "--"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([*command, sys.executable, script, "{dir}"], env=env, cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob("check_resume_*/*/*/begun")), "no step")
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    assert processes_with("MARK", tmp_path) == {}
    assert list(tmp_path.glob("check_resume_*")) == []
