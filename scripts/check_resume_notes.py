"""Says what an attempt has not got back from the one before: for guard.py and check_resume.py.

Each rank notes the first steps, the saves and the steps after them in the directory CHECK_RESUME,
which outlives the attempt. A later attempt compares, and says only what equal checksums make sure.
It calls no collective, and changes no result.
"""

from __future__ import annotations

import json
import math
import os
import sys
import weakref
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from check_training import after, hook, parameters_of
from report import own_rank, say, write_event
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

STEPS = 3  # that are noted at the start and after a save
ELEMENTS = 4096  # of a tensor, in a checksum
ROWS = 8  # samples of a batch that are remembered
FIRST_ROWS = 256  # of a batch of the first steps
ALL_ROWS = 2000  # of a pass
PLAN = "plan.json"
PASSES = 9  # whose first batches are remembered


def start() -> None:
    directory = Path(os.environ["CHECK_RESUME"])
    if (directory / PLAN).exists():  # from check_resume.py
        import check_resume

        check_resume.start(directory)
    else:
        Recorder(directory)


class Batch(NamedTuple):
    """What is noted of a batch of a DataLoader."""

    facts: dict
    rows: list[int]  # checksums of its first samples
    of_pass: list[int]  # the same, of the batches of the pass


class Recorder:
    """Hooks in the script's threads that write the notes of this rank."""

    elements = ELEMENTS
    notes_all_steps = False

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.file = directory / f"rank{own_rank()}.jsonl"
        self.past = read(self.file)  # of earlier attempts of this run
        self.rank_0 = read(directory / "rank0.jsonl") if own_rank() else []
        run = [sys.argv, os.environ.get("WORLD_SIZE")]
        runs = [note["run"] for note in self.past if note["event"] == "start"]
        self.attempt = len(runs) + 1
        if any(each != run for each in runs):
            self.past = []
        self.optimizers = weakref.WeakKeyDictionary()  # in the order of their creation
        self.scalers = weakref.WeakSet()
        self.main = lambda: None  # the optimizer whose steps count
        self.loads = 0
        self.steps = 0  # of the training
        self.saved_at = -STEPS
        self.save = None  # from which this attempt goes on
        self.findings = []
        self.firsts = []  # notes of the first steps of this attempt
        self.batch = Batch({"number": 0, "length": 0, "batch": None}, [], [])  # the last one
        self.used = self.batch  # that of the last step
        self.begins = []  # first batches of passes
        after(Optimizer, "__init__", self.on_optimizer)
        after(torch.amp.GradScaler, "__init__", self.on_scaler)
        after(torch.nn.Module, "load_state_dict", self.on_load)
        after(_BaseDataLoaderIter, "__next__", self.on_batch)
        after(torch, "save", self.on_save)
        register_optimizer_step_pre_hook(hook(self.on_step))
        self.write("start", run=run)

    def write(self, event: str, **facts) -> dict:
        note = {"event": event, "attempt": self.attempt, "step": self.steps, **facts}
        with suppress(OSError), open(self.file, "a") as file:
            print(json.dumps(note), file=file)
        return note

    # ------------------------------------------------------------------ in the script's threads

    def on_optimizer(self, _, optimizer, *__, **___) -> None:
        self.optimizers[optimizer] = True

    def on_scaler(self, _, scaler, *__, **___) -> None:
        self.scalers.add(scaler)

    def on_load(self, result, *_, **__):
        self.loads += 1
        return result

    def on_batch(self, batch, iterator):
        """A DataLoader yields a batch. Returns it."""
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor) and not each.is_cuda]
        largest = torch.atleast_1d(max(tensors, key=torch.numel))
        count = FIRST_ROWS if len(self.firsts) < STEPS else ROWS
        rows = [checksum(each, 64) for each in largest[:count]]
        number = iterator._num_yielded
        of_pass = vars(iterator).setdefault("noted_rows", [])
        if number == 1:  # persistent workers keep their iterator
            of_pass.clear()
        if len(of_pass) < ALL_ROWS:
            of_pass += rows[:ROWS]
        sampler = iterator._index_sampler
        length = 0  # unknown
        with suppress(TypeError):
            length = len(sampler)
        is_random = getattr(getattr(sampler, "sampler", None), "generator", 0) is None
        facts = {"number": number, "length": length, "is_random": is_random}
        facts["batch"] = total(map(checksum, tensors))
        self.batch = Batch(facts, rows, of_pass)
        return batch

    def on_save(self, *_, **__) -> None:
        """The script has saved something: once per step, note what this may be."""
        if self.firsts and self.saved_at != self.steps:
            self.saved_at = self.steps
            self.write("save", **self.light_note(), **self.state(), begins=self.begins)
            rows = [self.attempt, self.steps, *self.used.of_pass]
            self.file.with_suffix(".rows").write_text(json.dumps(rows))

    def on_step(self, optimizer, arguments: tuple, more: dict) -> None:
        """Any optimizer's step() begins. A closure, as Lightning's, makes the gradients in it."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        has_closure = any(map(callable, (*arguments[1:], *more.values())))
        if self.main() is None and (has_closure or has_gradient(optimizer)):
            self.main = weakref.ref(optimizer)
        if self.main() is optimizer:
            self.on_main_step()
            self.steps += 1

    def on_main_step(self) -> None:
        facts = self.batch.facts
        is_begin = not self.begins or facts["number"] <= self.used.facts["number"]
        if is_begin and len(self.begins) < PASSES:
            self.begins.append(facts["batch"])
        self.used = self.batch
        is_early = len(self.firsts) < STEPS
        if not is_early and self.steps >= self.saved_at + STEPS and not self.notes_all_steps:
            return
        note = self.light_note()
        if not self.firsts or self.notes_all_steps:
            note.update(self.state())
        if self.past and not self.firsts:
            self.save, self.findings = judge_start(self.past, self.rank_0, note)
            self.steps = self.save["step"]
        note = self.write("step", **note)
        if is_early:
            self.firsts.append({**note, "rows": self.used.rows})
        if self.past and len(self.firsts) == 2:
            self.judge()

    def judge(self) -> None:
        """At step 2: before it, a library may have made a step and loaded nothing yet."""
        if self.loads > self.firsts[0]["loads"]:
            return
        is_known = self.save.get("weights") == self.firsts[0]["weights"]
        if is_known and self.save["event"] == "save" and self.save in self.past:
            rows = json.loads(self.file.with_suffix(".rows").read_text())
            self.findings += judge_run(self.past, self.save, self.firsts, rows)
        for kind, text in self.findings:
            self.write("finding", kind=kind, text=text)
            with suppress(FileExistsError):  # another rank has said so
                (self.directory / f"{kind}.{self.attempt}").touch(exist_ok=False)
                text = f"rank {own_rank()} does not go on where it was stopped: {text}"
                say(f"guard.py: WARNING: {text}")
                write_event("resume", text, kind=kind)

    def light_note(self) -> dict:
        return {
            **self.used.facts,
            "rates": [float(group["lr"]) for group in self.main().param_groups],
            "scales": [float(scaler.get_scale()) for scaler in self.scalers],
            "entries": sum(map(bool, self.states().values())),
            "seed": torch.initial_seed(),
            "loads": self.loads,
        }

    def states(self) -> dict:
        """{parameter: its state}, of all optimizers; if several have it, of the last one."""
        states = {}
        for optimizer in self.optimizers:
            for each in parameters_of(optimizer):
                states[each] = optimizer.state.get(each) or states.get(each) or {}
        return states

    def state(self) -> dict:
        """Checksums, in which the order of the parameters does not matter."""
        states = self.states()
        weights = [self.fingerprint(each) for each in states]
        kept = [self.fingerprint(each) for each in states.values()]
        return {"weights": total(weights), "state": total(kept), "pairs": total(zip(weights, kept))}

    def fingerprint(self, value) -> int:
        """A number for a tensor, or for what has tensors."""
        if isinstance(value, torch.Tensor):
            return checksum(value, self.elements)
        if isinstance(value, dict):
            value = [*value.items()]
        if isinstance(value, (list, tuple)):
            return total(map(self.fingerprint, value))
        return total([repr(value)])


# ------------------------------------------------------------------------------------ judgements


def judge_start(own: list[dict], rank_0: list[dict], note: dict) -> tuple[dict, list]:
    """Compare the state before the first step with notes of this rank, and saves of rank 0.

    Returns the note from which this attempt goes on, and [(kind, what is wrong)].
    """
    steps = [each for each in own if each["event"] == "step"]
    saves = [each for each in own + rank_0 if each["event"] == "save"]
    past = [each for each in steps if "weights" in each] + saves
    weights = [each for each in past if each["weights"] == note["weights"]]
    states = [each for each in past if each["state"] == note["state"]]
    both = [each for each in weights if each["state"] == note["state"]]
    begin = (both or weights or states or past)[-1]
    findings = []
    seeds = [each["seed"] for each in rank_0 if each["event"] == "step"]
    if seeds and note["seed"] == seeds[0] != steps[0]["seed"]:
        findings = [("random", "it has the random state of rank 0; at first, it had its own")]
    if begin["step"] and begin in both:
        if all(each["pairs"] != note["pairs"] for each in both):
            text = "the optimizer's state was loaded for parameters in another order"
            findings.append(("state", text))
        return begin, findings
    if not saves or (begin in both and begin["loads"] and note["loads"]):  # starts with weights
        return begin, findings
    if all(each["state"] == note["state"] for each in saves):
        states = []  # of an optimizer that has none
    entries = max(each["entries"] for each in own if each in weights or each in steps)
    has_fewer = note["entries"] < entries
    is_start = any(each["step"] == 0 for each in weights)
    if is_start or states or (weights and has_fewer):
        text = f"the weights are those of {place_of(weights)}, the optimizer"
        if has_fewer:
            text += f" has state for {note['entries']} of {entries} parameters"
        else:
            text += f"'s state is that of {place_of(states)}"
        findings.append(("state", text))
    return begin, findings


def place_of(notes: list[dict]) -> str:
    if not notes:
        return "no save"
    step = notes[-1]["step"]
    return f"step {step}" if step else "the first start"


def judge_run(past: list[dict], save: dict, firsts: list[dict], rows: list[int]):
    """Yield (kind, what is wrong) in the first two steps after a save, see Recorder.on_save()."""
    steps = [each for each in past if each["event"] == "step"]
    later = {each["step"]: each for each in steps if each["attempt"] == save["attempt"]}
    yield from judge_rates(steps, later, save, firsts)
    begin = steps[0]["scales"]
    if save["scales"] != begin == firsts[0]["scales"]:
        yield "scale", f"GradScaler's scale is {begin[0]:g}, as at first, not {save['scales'][0]:g}"
    yield from judge_data(steps, later, save, firsts, rows)


def judge_rates(steps: list[dict], later: dict, save: dict, firsts: list[dict]):
    """later: {step: the note of the run that saved, if it went on}."""
    rates = [each["rates"] for each in steps]
    begin = rates[0]
    comes_back = any(one != begin == other for one, other in zip(rates, rates[1:]))  # by design
    for each in firsts:
        if each["step"] in later:
            right = later[each["step"]]["rates"]
            is_wrong = not all(map(math.isclose, each["rates"], right))
        else:
            right = save["rates"]
            is_wrong = each["rates"] == begin != right and not comes_back
        if is_wrong:
            text = f"the learning rate of step {each['step'] + 1} is {each['rates'][0]:.4g}"
            yield "rate", f"{text}, not {right[0]:.4g}"
            return


def judge_data(steps: list[dict], later: dict, save: dict, firsts: list[dict], rows: list[int]):
    """Silent if the batches are always the same, or of no DataLoader."""
    batches = [each["batch"] for each in steps]
    right = later.get(save["step"])
    now = [each["batch"] for each in firsts]
    if len(set(batches[:STEPS])) < STEPS or (right and right["batch"] == now[0]):
        return
    begins = save["begins"]
    is_shuffled = len(set(begins)) == len(begins) > (1 if save["is_random"] else 2)
    for each, *pair in zip(steps, batches, batches[1:]):
        if pair == now and (right or is_shuffled):
            text = f"the batch of step {save['step'] + 1} is that of step {each['step'] + 1}"
            yield "data", text
            return
    used = rows[2:]
    new = [row for each in firsts for row in each["rows"]]
    again = len({*new}.intersection(used))
    is_within = save["number"] < save["length"] and rows[:2] == [save["attempt"], save["step"]]
    if is_within and len({*used}) == len(used) and again > 1 + len(new) / 100:
        text = f"{again} of the first {len(new)} samples have been used in this pass before"
        yield "data", f"{text} the save"


# ------------------------------------------------------------------------------------------ tools


def read(file: Path) -> list[dict]:
    """The notes of a rank, of which the last may be half written."""
    notes = []
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            notes.append(json.loads(line))
    return notes


def has_gradient(optimizer) -> bool:
    """PyTorch's get_state_dict() makes a step without, to create the state that it loads."""
    gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
    return any(local(each).any() for each in gradients)


def total(numbers) -> int:
    """A number for all of them, in any order."""
    return zlib.crc32(repr(sorted(numbers)).encode())


def local(tensor):
    """This rank's part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def checksum(tensor, limit: int = ELEMENTS) -> int:
    """Of at most so many of its elements."""
    flat = local(tensor.detach()).reshape(-1)
    part = flat[:: 1 + flat.numel() // limit].contiguous()
    return zlib.crc32(part.view(torch.uint8).cpu().numpy())
