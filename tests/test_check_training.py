"""scripts/check_training.py: it reports broken scripts, and no healthy ones."""

import json
import queue
import re
import threading
from types import SimpleNamespace

import check_training
import pytest
import torch
from test_guard import run

# A healthy script on two or three ranks; each test replaces some lines.
SCRIPT = """
import io, os
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
data = TensorDataset(torch.arange(2048.0).reshape(128, 16).sin(), torch.arange(128) % 4)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss_of(x, y):
    return nn.functional.cross_entropy(model(x), y)


def after_step(step):
    pass


step = 0
for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        after_step(step)
    # SAVE
dist.destroy_process_group()
"""

INIT = 'dist.init_process_group("gloo")'
RANK = "rank, size = dist.get_rank(), dist.get_world_size()"
BACKWARD = """loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()"""
ACCUMULATION = """with nullcontext() if step % 4 == {} else model.no_sync():
            (loss_of(x, y) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()"""
LOCAL_SGD = """with nullcontext() if step % 4 == 1 else model.no_sync():
            loss = loss_of(x, y)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()"""
AVERAGE = """if step % 4 == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= size"""
GONE = ("model = DDP", 'DDP(nn.Linear(4, 4))\n__import__("gc").collect()\nmodel = DDP')
SECOND_MODEL = """second = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD([*model.parameters(), *second.parameters()], lr=0.05)"""
WITHOUT_GROUP = [(INIT, ""), (RANK, ""), ("(rank)", "(os.getpid())"), ("sampler=sampler", "")]
WITHOUT_GROUP += [("DistributedSampler(data)", "None"), ("sampler.set_epoch(epoch)", "pass")]
WITHOUT_GROUP += [("DDP(network)", "network"), ("dist.destroy_process_group()", "")]
OWN_GROUP = """file = "file://" + os.path.abspath("group" + os.environ["RANK"])
dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)"""
OPTIMIZER = "optimizer = torch.optim"
SGD = f"{OPTIMIZER}.SGD(model.parameters(), lr=0.05)"
CALL = ("model(x)", "network(x)")
AVERAGED = "parameters of the DDP module .* not averaged"
FROZEN = ("model = DDP", "network[2].requires_grad_(False)\nmodel = DDP")
LOADS = f"rank or nn.init.ones_(network[2].weight)\n{OPTIMIZER}"
FOR_ONE_GPU = ("data = ", "local_rank = os.environ['LOCAL_RANK']\ndata = ")
UNFROZEN = (OPTIMIZER, f"network[2].requires_grad_(True)\n{OPTIMIZER}")
SECOND = [(SGD, SECOND_MODEL), ("model(x)", "second.module(model(x))")]
PART = ("DistributedSampler(data)", "DistributedSampler(data, size, 0)")
NO_SAMPLER = [("manual_seed(rank)", "manual_seed(0)"), ("sampler=sampler", "shuffle=True")]
NO_EPOCH = [("sampler.set_epoch(epoch)", "pass"), ("sampler=s", "num_workers=1, sampler=s")]
SAVE = ("# SAVE", 'torch.save(obj=network.state_dict(), f="weights.pt")')


def fault(kind: str, text: str, *replaced: tuple[str, str]) -> tuple:
    """The kind of the event, what the line says, (lines, what replaces them)."""
    return kind, text, replaced


BROKEN = {
    "DDP is not called": fault("parameters", f"4 of 4 {AVERAGED}", CALL),
    "another DDP module is gone": fault("parameters", f"4 of 4 {AVERAGED}", CALL, GONE),
    "the second DDP module is not called": fault("parameters", f"2 of 2 {AVERAGED}", *SECOND),
    "gradients are averaged before the last micro-batch": fault(
        "parameters", f"4 of 4 {AVERAGED}", (BACKWARD, ACCUMULATION.format(2))
    ),
    "a layer is unfrozen after DDP": fault(
        "parameters", r"2 of 4 parameters of the DDP module \(2.weight", FROZEN, UNFROZEN
    ),
    "rank 0 alone loads weights": fault("parameters", "before step 1", (OPTIMIZER, LOADS)),
    "no sampler, one seed": fault("batch", "ranks 0-1 .*; use DistributedSampler", *NO_SAMPLER),
    "all have the part of rank 0": fault("batch", "ranks 0-1 train on the same", PART),
    "no set_epoch": fault("epoch", "repeats the order of epoch 0: call its set_epoch", *NO_EPOCH),
    "a script for one process": fault("alone", "no process group .* 2 separate t", *WITHOUT_GROUP),
    "a script for one process that chooses its GPU": fault(
        "alone", "there is no process group", *WITHOUT_GROUP, ("(os.getpid())", "(0)"), FOR_ONE_GPU
    ),
    "each rank is in a group of its own": fault("groups", "has size 1, but", (INIT, OWN_GROUP)),
    "all save one file": fault("save", "several ranks on .*weights.pt: let rank 0", SAVE),
}


def run_script(directory, ranks, replaced, **env):
    """The lines of guard.py, and the events. The script runs in that directory."""
    text = SCRIPT
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    script = directory / "my_train.py"
    script.write_text(f"import os\nos.chdir({str(directory)!r})\n{text}")
    events = directory / "events"
    result = run(ranks, script, env={"EVENTS_FILE": events, **env})
    assert result.codes == [0] * ranks, result.err
    printed = "".join(result.err)
    lines = [line for line in printed.splitlines() if line.startswith("guard.py: ")]
    return lines, list(map(json.loads, events.open())) if events.exists() else []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_is_reported_in_one_line(tmp_path, name):
    kind, text, replaced = BROKEN[name]
    lines, events = run_script(tmp_path, 2, replaced)
    assert len(lines) == 1 and re.search(text, lines[0]), lines
    assert [(event["event"], event["kind"]) for event in events] == [("training", kind)]
    assert lines == [f"guard.py: WARNING: {events[0]['text']}"]


def test_two_of_three_ranks_with_the_same_batches_are_named(tmp_path):
    replaced = [("DistributedSampler(data)", "DistributedSampler(data, size, rank % 2)")]
    lines, _ = run_script(tmp_path, 3, replaced)
    assert len(lines) == 1 and "ranks 0,2 train on the same batches" in lines[0]


def test_the_check_can_be_switched_off(tmp_path):
    assert run_script(tmp_path, 2, [CALL], CHECK_TRAINING="0") == ([], [])


SAVES = """if rank == 0:
        for name in ("last.pt", "best.pt", "last.pt"):
            torch.save(network.state_dict(), name)
    for file in (f"{rank}.pt", os.devnull, io.BytesIO()):
        torch.save(optimizer.state_dict(), file)
    next(iter(loader))"""
NOISE = "network[0].weight.data += 0.01 * torch.randn(32, 16)"
GATHERED_HEAD = """optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
head = DDP(nn.Linear(4, 4))
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.05)


def after_step(step):
    features = [torch.empty(4, 4) for _ in range(size)]
    labels = [torch.empty_like(y) for _ in range(size)]
    dist.all_gather(features, network(x).detach())
    dist.all_gather(labels, y)
    head_optimizer.zero_grad()
    nn.functional.cross_entropy(head(torch.cat(features)), torch.cat(labels)).backward()
    head_optimizer.step()

"""
PERSONAL = """tuned = torch.optim.SGD(network.parameters(), lr=0.05)
for x, y in loader:
    tuned.zero_grad()
    nn.functional.cross_entropy(network(x), y).backward()
    tuned.step()
dist.destroy"""
EVALUATION = """for x, y in loader:
        with torch.no_grad():
            network(x)"""
ROLLOUTS = (
    """import time, sys
if os.environ["RANK"] == "1":
    time.sleep(2)
    sys.exit()
"""
    + OWN_GROUP
)

HEALTHY = {
    "saves, noise, a look at a batch": [("# SAVE", SAVES), ("    pass", f"    {NOISE}")],
    "accumulation": [(BACKWARD, ACCUMULATION.format(3))],
    "local SGD": [(BACKWARD, LOCAL_SGD), ("    pass", f"    {AVERAGE}")],
    "a head on the features of all ranks": [
        (SGD, GATHERED_HEAD),
        ("def after_step(step):\n    pass", ""),
        ("sampler=sampler", "shuffle=True"),
    ],
    "each rank tunes its weights afterwards": [("dist.destroy", PERSONAL)],
    "fewer samples than ranks": [("r(data)", "r([0])"), ("r(data,", "r([data[0]],")],
    "passes over the data before and after the only epoch": [
        ("range(4)", "range(1)"),
        ("sampler.set_epoch(epoch)", "list(loader)"),
        ("# SAVE", EVALUATION),
    ],
    "a sweep over ranks": [
        *WITHOUT_GROUP,
        ("batch_size=4", "batch_size=4 * (1 + int(os.environ['RANK']))"),
    ],
    "a random search": [*WITHOUT_GROUP, ("lr=0.05", "lr=0.05 + os.getpid() % 90 / 1000")],
    "a rank that does not train": [(INIT, ROLLOUTS)],
}


@pytest.mark.parametrize("program", HEALTHY)
def test_a_healthy_script_is_not_reported(tmp_path, program):
    assert run_script(tmp_path, 2, HEALTHY[program]) == ([], [])


# --------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_ignores_rounding_but_not_a_step(monkeypatch, dtype):
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(300, 100, dtype=torch.float64, generator=generator)
    noise = 1e-7 * torch.randn(300, 100, dtype=torch.float64, generator=generator)
    number = check_training.digest(exact.to(dtype))
    monkeypatch.setattr(check_training, "CHUNK", 1000)
    assert abs(check_training.digest((exact * (1 + noise)).to(dtype)) - number) < 1
    assert abs(check_training.digest(exact.to(dtype).t().contiguous().t()) - number) < 1
    assert abs(check_training.digest((exact + 0.01).to(dtype)) - number) > 1


def test_an_error_in_a_comparison_does_not_end_the_others():
    done = []
    watch = SimpleNamespace(over=threading.Event())
    check = object.__new__(check_training.TrainingCheck)
    check.watch, check.calls = watch, queue.SimpleQueue()
    for number in (1, 0, 2):
        check.call(lambda number: done.append(1 / number), number)
    watch.over.set()
    check.run()
    assert done == [1, 0.5]


def test_an_error_of_a_hook_does_not_reach_the_script():
    class Owner:
        def function(self, number):
            return number + 1

    def fail(*_):
        raise ValueError

    check_training.after(Owner, "function", fail)
    assert Owner().function(1) == 2
    assert check_training.hook(fail)(1) is None
