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
from report import own_rank, say, write_event, write_new
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

STEPS = 3  # that are noted at the start and after a save
ELEMENTS = 4096  # of a tensor, in a checksum
ROWS = 64  # samples of a batch that are remembered, and elements of each
PASS_ROWS = 4096  # samples of a pass
PLAN = "plan.json"


def start() -> None:
    directory = Path(os.environ["CHECK_RESUME"])
    if (directory / PLAN).exists():  # from check_resume.py
        import check_resume

        check_resume.start(directory)
    else:
        Recorder(directory)


class Batch(NamedTuple):
    """What a DataLoader has yielded last."""

    number: int = 0  # in its pass
    rows: list[int] = []  # checksums of its first samples
    used: list[int] = []  # the same, of all batches of its pass so far, until it is over


class Recorder:
    """Hooks in the script's threads that write the notes of this rank."""

    elements = ELEMENTS
    notes_all_steps = False

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        command = repr([sys.argv, os.environ.get("WORLD_SIZE")])
        run = zlib.crc32(command.encode())  # others are not compared
        self.file = directory / f"{own_rank()}.{run}.jsonl"
        self.past = read(self.file)  # of earlier attempts
        self.rank_0 = read(directory / f"0.{run}.jsonl")
        self.attempt = 1 + max((note["attempt"] for note in self.past), default=0)
        self.optimizers = weakref.WeakKeyDictionary()  # in the order of their creation
        self.main = lambda: None  # the optimizer whose steps count
        self.loads = 0  # of modules
        self.reading = Batch()
        self.training = Batch()  # that of the last step
        self.steps = 0  # of the training
        self.saves = 0
        self.saved_at = -STEPS
        self.firsts = []  # notes of the first steps of this attempt
        self.rows = []  # samples of these
        self.save = {}  # from which it goes on
        self.findings = []
        after(Optimizer, "__init__", self.on_optimizer)
        after(torch.nn.Module, "load_state_dict", self.on_load)
        after(_BaseDataLoaderIter, "__next__", self.on_batch)
        after(torch, "save", self.on_save)
        register_optimizer_step_pre_hook(hook(self.on_step))

    def write(self, event: str, facts: dict) -> dict:
        note = {"event": event, "attempt": self.attempt, "step": self.steps, **facts}
        with suppress(OSError), open(self.file, "a") as file:
            print(json.dumps(note), file=file)
        return note

    # ------------------------------------------------------------------ in the script's threads

    def on_optimizer(self, _, optimizer, *__, **___) -> None:
        self.optimizers[optimizer] = True

    def on_load(self, result, *_, **__):
        self.loads += 1
        return result

    def on_batch(self, batch, iterator):
        """Returns it."""
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor) and not each.is_cuda]
        rows = checksums_of_rows(max(tensors, key=torch.numel))
        number = iterator._num_yielded
        if number == 1:  # persistent workers keep their iterator
            iterator.used_rows = []
        used = vars(iterator).setdefault("used_rows", [])
        used += rows[: PASS_ROWS - len(used)]
        is_over = True  # or it is unknown whether the pass is
        with suppress(TypeError):
            is_over = number >= len(iterator._index_sampler)
        if is_over:
            used.clear()
        self.reading = Batch(number, rows, used)
        return batch

    def on_save(self, *_, **__) -> None:
        """The script has saved something: once per step, note what this may be."""
        if self.firsts and self.saved_at != self.steps:
            self.saved_at = self.steps
            self.saves += 1
            self.write("save", self.note(with_state=True))
            self.file.with_suffix(".used").write_text(json.dumps(self.training.used))

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
        self.training = self.reading
        if len(self.firsts) < STEPS:
            self.on_first_step()
        elif self.notes_all_steps or self.steps < self.saved_at + STEPS:
            is_after_save = self.saves == 1 and self.steps == self.saved_at
            self.write("step", self.note(with_state=is_after_save))

    def on_first_step(self) -> None:
        note = self.note(with_state=not self.firsts)
        if self.past and not self.firsts:
            self.save, self.findings = judge_start(self.past, self.rank_0, note)
            self.steps = self.save["step"]
        self.firsts.append(self.write("step", note))
        self.rows += self.training.rows
        if self.past and len(self.firsts) == STEPS:
            self.judge()

    def judge(self) -> None:
        saves = [note for note in self.past if note["event"] == "save"]
        if self.save in saves and self.save["weights"] == self.firsts[0]["weights"]:
            self.findings += judge_run(self.past, self.save, self.firsts)
            if self.save == saves[-1]:
                used = json.loads(self.file.with_suffix(".used").read_text())
                self.findings += judge_samples(used, self.rows)
        for text in self.findings:
            if write_new(self.directory / f"{self.attempt} {text}", ""):  # the first rank to say so
                text = f"rank {own_rank()} does not go on where it was stopped: {text}"
                say(f"guard.py: WARNING: {text}")
                write_event("resume", text)

    def note(self, with_state=False) -> dict:
        states = self.states()
        note = {
            "learning rates": [float(group["lr"]) for group in self.main().param_groups],
            "batch": total(self.training.rows),
            "number": self.training.number,
            "entries": sum(map(bool, states.values())),
            "seed": torch.initial_seed(),
            "loads": self.loads,
        }
        if with_state:  # in these checksums, the order of the parameters does not matter
            weights = [self.fingerprint(each) for each in states]
            kept = [self.fingerprint(each) for each in states.values()]
            note["weights"] = total(weights)
            note["optimizer state"] = total(kept)
            note["pairs"] = total(zip(weights, kept))
        return note

    def states(self) -> dict:
        """{parameter: its state}, of all optimizers; if several have it, of the last one."""
        states = {}
        for optimizer in self.optimizers:
            for each in parameters_of(optimizer):
                states[each] = optimizer.state.get(each) or states.get(each) or {}
        return states

    def fingerprint(self, value) -> int:
        """A number for a tensor, or for what has tensors."""
        if isinstance(value, torch.Tensor):
            is_random_state = value.dtype == torch.uint8  # it shows elsewhere whether it matters
            return 0 if is_random_state else checksum(value, self.elements)
        if isinstance(value, dict):
            value = [*value.items()]
        if isinstance(value, (list, tuple)):
            return total(map(self.fingerprint, value))
        return total([repr(value)])


# ------------------------------------------------------------------------------------ judgements


def judge_start(own: list[dict], rank_0: list[dict], first: dict) -> tuple[dict, list[str]]:
    """Compare the note of the first step with those of this rank, and of the saves of rank 0.

    Returns the note from which this attempt goes on, and what is wrong.
    """
    steps = [note for note in own if note["event"] == "step"]
    saves = [note for note in own + rank_0 if note["event"] == "save"]
    past = [note for note in steps if "weights" in note] + saves
    weights = [note for note in past if note["weights"] == first["weights"]]
    states = [note for note in past if note["optimizer state"] == first["optimizer state"]]
    both = [note for note in weights if note in states]
    begin = (both or weights or states or past)[-1]
    findings = []
    if rank_0 and first["seed"] == rank_0[0]["seed"] != own[0]["seed"]:
        findings = ["it has the random state of rank 0; at first, it had its own"]
    begins_again = begin["step"] == 0
    is_fine_tuning = begins_again and begin in states and begin["loads"] and first["loads"]
    if not saves or is_fine_tuning:
        return begin, findings
    if both and not begins_again:
        if first["pairs"] not in [note["pairs"] for note in both]:
            findings.append("the optimizer's state was loaded for parameters in another order")
        return begin, findings
    saved = {(note["attempt"], note["step"]): note["weights"] for note in saves}
    is_swapped = any(  # for a save, as an average may be: what is loaded is not what trains
        note["weights"] != saved.get((note["attempt"], note["step"]), note["weights"])
        for note in past
    )
    is_other = begin["entries"] and states and not is_swapped
    has_fewer = weights and first["entries"] < begin["entries"]
    if begins_again or is_other or has_fewer:
        text = f"the weights are those of {place_of(weights)}, the optimizer's state is that of"
        findings.append(f"{text} {place_of(states)}")
    return begin, findings


def place_of(notes: list[dict]) -> str:
    return f"step {notes[-1]['step']}" if notes else "no step"


def judge_run(past: list[dict], save: dict, firsts: list[dict]):
    """Yield what is wrong in the first steps after a save."""
    steps = [note for note in past if note["event"] == "step"]
    rights = {note["step"]: note for note in steps if note["attempt"] == save["attempt"]}
    yield from judge_rates(steps, rights, save, firsts)
    yield from judge_batches(steps, rights, save, firsts)


def judge_rates(steps: list[dict], rights: dict, save: dict, firsts: list[dict]):
    """rights: {step: note of the run that saved, if it went on}."""
    for note in firsts:
        rates = rights.get(note["step"], save)["learning rates"]
        is_sure = note["step"] in rights or note["learning rates"] == steps[0]["learning rates"]
        for rate, right in zip(note["learning rates"], rates):
            if is_sure and not math.isclose(rate, right):
                step = note["step"] + 1
                yield f"the learning rate of step {step} is {rate:.4g}, not {right:.4g}"
                return


def judge_batches(steps: list[dict], rights: dict, save: dict, firsts: list[dict]):
    """Silent if the batches are always the same, or of no DataLoader."""
    one, other, _ = (note["batch"] for note in firsts)
    begins = [note["batch"] for note in steps if note["number"] == firsts[0]["number"]]
    is_wrong = len(set(begins)) == len(begins) > 1  # if each pass has another order
    if save["step"] in rights:
        is_wrong = rights[save["step"]]["batch"] != one
    for note, following in zip(steps, steps[1:]):
        if is_wrong and [note["batch"], following["batch"]] == [one, other] and one != other:
            yield f"the batch of step {save['step'] + 1} is that of step {note['step'] + 1}"
            return


def judge_samples(used: list[int], new: list[int]):
    """used: in the pass that the save interrupted. Silent if samples are repeated by design."""
    again = len({*new}.intersection(used))
    is_once = len({*used}) == len(used) and len({*new}) == len(new)
    if is_once and again > 1 + len(new) / 100:
        yield f"{again} of its first {len(new)} samples were used in this pass before the save"


# ------------------------------------------------------------------------------------------ tools


def read(file: Path) -> list[dict]:
    """The notes of a rank, of which the last may be half written."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


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


def checksum(tensor, limit: int) -> int:
    """Of at most so many of its elements."""
    flat = local(tensor.detach()).reshape(-1)
    part = flat[:: 1 + flat.numel() // limit].contiguous()
    return zlib.crc32(part.view(torch.uint8).cpu().numpy())


def checksums_of_rows(tensor) -> list[int]:
    """Of the first samples of a batch."""
    rows = tensor.reshape(len(tensor), -1)[:ROWS]
    part = rows[:, :: 1 + rows.shape[1] // ROWS].contiguous()
    return [zlib.crc32(row) for row in part.view(torch.uint8).numpy()]
