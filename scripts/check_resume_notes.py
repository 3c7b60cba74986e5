"""Says what an attempt has not got back from the one before: for guard.py and check_resume.py.

Each rank notes the first steps, the saves and the steps after them in the directory CHECK_RESUME,
which outlives the attempt. A later attempt compares, and says only what equal checksums make sure.
It calls no collective, and changes no result.
"""

import json
import math
import os
import sys
import weakref
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace as Record

import torch
from check_training import after, hook, parameters_of
from report import own_rank, say, write_event, write_new
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

STEPS = 3  # that are noted at the start and after a save
ROWS = 64  # samples of a batch that are remembered, and elements of each
PASS_ROWS = 4096  # samples of a pass
PLAN = "plan.json"
Notes = list[Record]


def start() -> None:
    directory = Path(os.environ["CHECK_RESUME"])
    if (directory / PLAN).exists():  # from check_resume.py
        import check_resume

        check_resume.start(directory)
    else:
        Recorder(directory)


class Recorder:
    """Hooks in the script's threads that write the notes of this rank."""

    elements = 4096  # of a tensor, in a checksum
    notes_all_steps = False

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        command = repr([sys.argv, os.environ.get("WORLD_SIZE")])
        run = zlib.crc32(command.encode())  # others are not compared
        self.file = directory / f"{own_rank()}.{run}.jsonl"
        self.past = read(self.file)  # of earlier attempts
        self.rank_0 = read(directory / f"0.{run}.jsonl")
        self.attempt = self.past[-1].attempt + 1 if self.past else 1
        self.optimizers = weakref.WeakKeyDictionary()  # in the order of their creation
        self.main = lambda: None  # the optimizer whose steps count
        self.rate = 0  # at its last step
        self.loads = 0  # of modules
        self.reading = Record(number=0, rows=[], used=[])  # the last batch, see on_batch()
        self.training = self.reading  # that of the last step
        self.steps = 0  # of the training
        self.saves = 0
        self.saved_at = -STEPS
        self.firsts = []  # notes of the first steps of this attempt
        self.rows = []  # samples of these
        self.verdict = None  # see judge_start()
        after(Optimizer, "__init__", self.on_optimizer)
        after(torch.nn.Module, "load_state_dict", self.on_load)
        after(_BaseDataLoaderIter, "__next__", self.on_batch)
        after(torch, "save", self.on_save)
        register_optimizer_step_pre_hook(hook(self.on_step))

    def write(self, event: str, facts: dict) -> Record:
        place = {"attempt": self.attempt, "step": self.steps, "rank": own_rank(), "event": event}
        note = Record(**place, **facts)
        with suppress(OSError), open(self.file, "a") as file:
            print(json.dumps(vars(note)), file=file)
        return note

    # ------------------------------------------------------------------ in the script's threads

    def on_optimizer(self, _, optimizer, *__, **___) -> None:
        self.optimizers[optimizer] = True

    def on_load(self, result, *_, **__):
        self.loads += 1
        return result

    def on_batch(self, batch, iterator):
        """Returns it. Keeps its number in the pass, checksums of its first samples (rows), and
        those of all batches of the pass (used), until that is over.
        """
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor) and not each.is_cuda]
        tensor = max(tensors, key=torch.numel)
        rows = checksums(tensor.reshape(len(tensor), -1)[:ROWS], ROWS)
        number = iterator._num_yielded
        used = vars(iterator).setdefault("used_rows", [])
        used += rows[: PASS_ROWS - len(used)]
        length = 0  # of the pass, or it is unknown
        with suppress(TypeError):
            length = len(iterator._index_sampler)
        if number >= length:
            used.clear()
        self.reading = Record(number=number, rows=rows, used=used)
        return batch

    def on_save(self, *_, **__) -> None:
        """The script has saved something: once per step, note what this may be."""
        if self.saved_at != self.steps:
            facts = self.facts(with_state=True)  # an error before the first step
            self.saved_at = self.steps
            self.saves += 1
            self.write("save", {**facts, "last_rate": float(self.rate)})
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
        if self.reading.number < self.training.number:  # the pass before need not be over
            self.reading.used.extend(self.training.used)
        self.training = self.reading
        self.rate = self.main().param_groups[0]["lr"]
        if len(self.firsts) < STEPS:
            self.on_first_step()
        elif self.notes_all_steps or self.steps < self.saved_at + STEPS:
            is_after_save = self.saves == 1 and self.steps == self.saved_at
            self.write("step", self.facts(with_state=is_after_save))

    def on_first_step(self) -> None:
        facts = self.facts(with_state=not self.firsts)
        if self.past and not self.firsts:
            self.verdict = judge_start(self.past, self.rank_0, Record(**facts))
            self.steps = self.verdict[0].step
        self.firsts.append(self.write("step", facts))
        self.rows += self.training.rows
        if self.past and len(self.firsts) == STEPS:
            self.judge()

    def judge(self) -> None:
        save, findings = self.verdict
        saves = [note for note in self.past if note.event == "save"]
        if save in saves and save.weights == self.firsts[0].weights:
            steps = [note for note in self.past if note.event == "step"]
            run = {note.step: note for note in steps if note.attempt == save.attempt}
            findings += judge_rates(steps, run, save, self.firsts)
            findings += judge_batches(steps, run, save, self.firsts)
            if save == saves[-1]:
                used = json.loads(self.file.with_suffix(".used").read_text())
                findings += judge_samples(used, self.rows)
        for text in findings:
            if write_new(self.directory / f"{self.attempt} {text}", ""):  # the first rank to say so
                text = f"rank {own_rank()} does not go on where it was stopped: {text}"
                say(f"guard.py: WARNING: {text}")
                write_event("resume", text)

    def facts(self, with_state=False) -> dict:
        states = self.states()
        facts = {
            "learning_rate": float(self.main().param_groups[0]["lr"]),
            "batch": total(self.training.rows),
            "number": self.training.number,
            "entries": sum(map(bool, states.values())),
            "seed": torch.initial_seed(),
            "loads": self.loads,
        }
        if with_state or self.notes_all_steps:  # the order of the parameters does not matter
            weights = [self.fingerprint(each) for each in states]
            kept = [self.fingerprint(each) for each in states.values()]
            facts["weights"] = total(weights)
            facts["optimizer_state"] = total(kept)
            facts["pairs"] = total(zip(weights, kept))
        return facts

    def states(self) -> dict:
        """{parameter: its state}, of all optimizers."""
        states = {}
        for optimizer in self.optimizers:
            for each in parameters_of(optimizer):
                states[each] = optimizer.state.get(each, {})
        return states

    def fingerprint(self, value) -> int:
        """A number for a tensor, or for what has tensors."""
        numbers = []
        for leaf in tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                numbers.append(zlib.crc32(repr(leaf).encode()))
            elif leaf.dtype != torch.uint8:  # a random state: it shows elsewhere whether it matters
                numbers += checksums(local(leaf.detach()).reshape(-1)[None], self.elements)
        return total(numbers)


# ------------------------------------------------------------------------------------ judgements


def judge_start(own: Notes, rank_0: Notes, first: Record):
    """Compare the note of the first step with those of this rank, and of the saves of rank 0.

    Returns the note from which this attempt goes on, and what is wrong.
    """
    saves = [note for note in own + rank_0 if note.event == "save"]
    steps = [note for note in own if note.event == "step" and hasattr(note, "weights")]
    past = steps + saves
    weights = [note for note in past if note.weights == first.weights]
    states = [note for note in past if note.optimizer_state == first.optimizer_state]
    both = [note for note in weights if note in states]
    begin = (both or weights or states or past)[-1]
    findings = []
    if rank_0 and first.seed == rank_0[0].seed != own[0].seed:
        findings.append("it has the random state of rank 0; at first, it had its own")
    begins_again = begin.step == 0
    is_fine_tuning = begins_again and begin in states and begin.loads and first.loads
    saved = [note.weights for note in saves]  # others if an average is swapped in for a save
    trains_what_it_saves = any(note.step and note.weights in saved for note in steps)
    is_other = begin.entries and states and trains_what_it_saves
    has_fewer = weights and first.entries < begin.entries
    if not saves or is_fine_tuning:
        return begin, findings
    if begins_again or (not both and (is_other or has_fewer)):
        text = f"the weights are those of {place_of(weights)}, the optimizer's state is that of"
        findings.append(f"{text} {place_of(states)}")
    elif both and first.pairs not in [note.pairs for note in both]:
        findings.append("the optimizer's state was loaded for parameters in another order")
    return begin, findings


def place_of(notes: Notes) -> str:
    return f"step {notes[-1].step}" if notes else "no step"


def judge_rates(steps: Notes, run: dict, save: Record, firsts: Notes):
    """run: {step: note} of the attempt that has saved. It need not have gone on."""
    a, b, c = (note.learning_rate for note in steps[:STEPS])
    x, y, z = (note.learning_rate for note in firsts)
    if x == a or save.last_rate != save.learning_rate:  # it was set for the next step
        run = {save.step: save, **run}
    for note in firsts:
        rate = note.learning_rate
        right = run.get(note.step, note).learning_rate
        if not math.isclose(rate, right):
            yield f"the learning rate of step {note.step + 1} is {rate:.4g}, not {right:.4g}"
            return
    changes_alike = math.isclose(b * z, c * y, rel_tol=1e-12) and not math.isclose(a * c, b * b)
    if changes_alike and x != a:
        yield f"the learning rate changes after step {save.step + 1} as after step 1"


def judge_batches(steps: Notes, run: dict, save: Record, firsts: Notes):
    """Silent if the batches are always the same, or of no DataLoader."""
    one, other, _ = (note.batch for note in firsts)
    begins = [note.batch for note in steps if note.number == firsts[0].number]
    is_wrong = len(set(begins)) == len(begins) > 1  # if each pass has another order
    if save.step in run:
        is_wrong = run[save.step].batch != one
    for note, following in zip(steps, steps[1:]):
        if is_wrong and [note.batch, following.batch] == [one, other]:
            yield f"the batch of step {save.step + 1} is that of step {note.step + 1}"
            return


def judge_samples(used: list, new: list):
    """used: in the pass that the save interrupted. Silent if samples are repeated by design."""
    again = len({*new}.intersection(used))
    is_once = len({*used}) + len({*new}) == len(used) + len(new)
    if is_once and again > 1 + len(new) / 100:
        yield f"{again} of its first {len(new)} samples were used in this pass before the save"


# ------------------------------------------------------------------------------------------ tools


def read(file: Path) -> Notes:
    """The notes of a rank, of which the last may be half written."""
    text = file.read_text() if file.exists() else ""
    return [Record(**json.loads(line)) for line in text.splitlines() if line.endswith("}")]


def has_gradient(optimizer) -> bool:
    """PyTorch's get_state_dict() makes a step without, to create the state that it loads."""
    gradients = [each.grad for each in parameters_of(optimizer)]
    return any(local(each).any() for each in gradients if each is not None)


def total(numbers) -> int:
    """A number for all of them, in any order."""
    return zlib.crc32(repr(sorted(numbers)).encode())


def local(tensor):
    """This rank's part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def checksums(rows, limit: int) -> list[int]:
    """Of at most so many elements of each."""
    part = rows[:, :: 1 + rows.shape[1] // limit].contiguous()
    return [zlib.crc32(row) for row in part.view(torch.uint8).cpu().numpy()]
