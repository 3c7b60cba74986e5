#!/usr/bin/env python3
"""Find out whether a training script goes on exactly where it was stopped.

Usage: scripts/check_resume.py [OPTION ...] -- COMMAND [ARGUMENT ...]

COMMAND starts the unchanged script on this machine, such as
`torchrun --standalone --nproc-per-node 2 train.py --output-dir {dir}`. It runs once without a stop;
then in another directory, until it is stopped, and again. What differs in the first step that
differs is printed, or the entries of saved files that differ.
{dir} in COMMAND is the directory of the checkpoints. The working directory has links to all files
of this one but checkpoints. A run that would write elsewhere is ended before it does.

    --steps N      the last step                                                 [40]
    --stop-at N    after this step, each rank gets SIGTERM, as from supervise.py [20]
    --kill         it gets SIGKILL instead

Exit code: 0 nothing differs; 1 something differs; 2 the script cannot be checked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from check_resume_notes import PLAN, Recorder, read
from processes import adopt_orphans, kill_descendants
from report import end_now, format_ranges

GUARD = Path(__file__).resolve().with_name("guard.py")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
KINDS = {  # what must be equal in each step
    "rates": "another learning rate",
    "batch": "another batch",
    "weights": "other weights",
    "state": "another optimizer state",
    "scales": "another scale of GradScaler",
}


# --------------------------------------------------------------------------------- in each rank


def start(notes: Path) -> None:
    """Take notes of all steps, and follow the plan: last step, step of a signal, signal."""
    protect_files(notes.parent)
    recorder = Rehearsal(notes)
    # A script that sets no seed gets the same in both runs, and another one when it resumes.
    random.seed(recorder.attempt)
    torch.manual_seed(recorder.attempt)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


class Rehearsal(Recorder):
    elements = 1 << 62
    notes_all_steps = True

    def on_main_step(self) -> None:
        super().on_main_step()
        last, stop, number = json.loads((self.directory / PLAN).read_text())
        if self.steps == last:
            sys.stdout.flush()
            os._exit(0)
        if self.steps == stop and self.attempt == 1:
            os.kill(os.getpid(), number)

    def on_save(self, _, value, file, *__, **___) -> None:
        super().on_save()
        if isinstance(value, dict) and isinstance(file, (str, os.PathLike)):
            entries = {str(key): self.fingerprint(each) for key, each in value.items()}
            self.write("file", name=os.path.basename(file), entries=entries)

    def fingerprint(self, value) -> int:
        """Random states do not count: it shows elsewhere whether they matter."""
        is_random = isinstance(value, torch.Tensor) and value.dtype == torch.uint8
        return 0 if is_random else super().fingerprint(value)


def protect_files(place: Path) -> None:
    """End this rank before it changes a file elsewhere: the run may be that of real checkpoints."""
    caches = [path for name, path in os.environ.items() if path and "_CACHE" in name]
    changeable = (f"{place}/", "/dev/", "/proc/", f"{Path.home()}/.", *caches)

    def refuse_outside(allowed, path) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            real = os.path.realpath(os.fsdecode(path))
            if not real.startswith(allowed):
                end_now(f"it would change {real}: name {{dir}} in COMMAND in its place")

    def audit(event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & WRITES:
            refuse_outside(changeable, arguments[0])
        if event in ("os.remove", "os.rename", "os.truncate", "shutil.rmtree"):
            refuse_outside(changeable, arguments[0])
            refuse_outside(changeable, arguments[1])

    def check_arguments(owner, name: str) -> None:
        function = getattr(owner, name)

        def checked(*args, **kwargs):
            for each in (*args, *kwargs.values()):
                refuse_outside(f"{place}/", each)
            return function(*args, **kwargs)

        setattr(owner, name, checked)

    sys.addaudithook(audit)
    check_arguments(torch, "save")  # these two are not seen by the hook
    with suppress(ImportError):
        import safetensors

        check_arguments(safetensors, "serialize_file")
    torch.multiprocessing.spawn = refuse_ranks
    torch.multiprocessing.start_processes = refuse_ranks


def refuse_ranks(*_, **__) -> None:
    end_now("it starts ranks itself, which cannot be checked: start one rank")


# ------------------------------------------------------------------------------------- the runs


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__.split("Usage: ")[1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stop-at", type=int, default=20)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    if not shutil.which(args.command[0]):
        give_up(f"there is no program {args.command[0]!r}")
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = Path(tempfile.mkdtemp(prefix="check_resume_")).resolve()
    try:
        return check(args, place)
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        kill_descendants()
        shutil.rmtree(place)


def check(args, place: Path) -> int:
    """Make the three runs, and compare them. Returns the exit code."""
    number = signal.SIGKILL if args.kill else signal.SIGTERM
    whole = launch(args.command, place / "whole", [args.steps, None, number], 1)
    last = max(steps_of(whole[0], 1))  # the script may end before
    stop = args.stop_at if args.stop_at < last else last // 2 + 1
    stopped = launch(args.command, place / "stopped", [last, stop, number], 1)
    if last in steps_of(stopped[0], 1):
        give_up(f"it did not stop after step {stop}")
    stopped = launch(args.command, place / "stopped", [last, None, number], 2)
    begin = min(steps_of(stopped[0], 2))
    print(f"check_resume.py: stopped after step {stop}, went on from step {begin} of {last}")
    found, noise = compare(whole, stopped)
    first = min((step for step, _ in found if step), default=0)
    for (step, text), ranks in found.items():
        if step in (0, first):
            where = f"step {step} of rank" if step else "rank"
            print(f"check_resume.py: {where} {format_ranges(ranks)}: {text}")
    if not found:
        found = compare_files(whole[0], stopped[0])
        print(*(f"check_resume.py: {text}\n" for text in found), sep="", end="")
    if noise:
        what = ", ".join(KINDS[kind] for kind in noise)
        print(f"check_resume.py: not compared, as two runs without a stop have {what}")
    if not found and not noise:
        print("check_resume.py: equal, bit for bit")
    return 1 if found else 2 if noise and not begin else 0


def launch(command: list[str], place: Path, plan: list, attempt: int) -> list[list[dict]]:
    """Run it in the directory `place`. Returns the notes of all ranks."""
    notes = place.with_suffix(".notes")
    checkpoints = place.with_suffix(".dir")
    if attempt == 1:
        for each in (place, notes, checkpoints):
            each.mkdir()
        for path in Path.cwd().iterdir():
            if path.suffix not in (".pt", ".pth", ".ckpt"):
                (place / path.name).symlink_to(path)
    (notes / PLAN).write_text(json.dumps(plan))
    env = {**os.environ, "CHECK_RESUME": str(notes), "TMPDIR": str(place.parent)}
    env.update(PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1")
    words = [word.replace("{dir}", str(checkpoints)) for word in with_guard(command)]
    log = place.with_suffix(".log")
    with log.open("w") as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "env": env}
        code = subprocess.call(words, cwd=place, start_new_session=True, **options)
    kill_descendants()
    files = sorted(notes.glob("rank*.jsonl"), key=lambda file: int(file.stem[4:]))
    ranks = [read(file) for file in files]
    steps = steps_of(ranks[0], attempt) if ranks else {}
    if not steps or (code and not plan[1] and plan[0] not in steps):
        print("".join(log.read_text().splitlines(True)[-20:]))
        give_up("COMMAND failed, or made no step of an optimizer that guard.py sees")
    return ranks


def give_up(text: str) -> None:
    print(f"check_resume.py: error: {text}")
    sys.exit(2)


def with_guard(command: list[str]) -> list[str]:
    """COMMAND with guard.py before the script; launchers of scripts/ add it themselves."""
    scripts = [n for n, word in enumerate(command) if word.endswith(".py")]
    modules = [n for n, word in enumerate(command) if word == "-m"]
    for begin in (*scripts, *modules[-1:]):
        guard = [] if Path(command[begin]).name == "guard.py" else [str(GUARD)]
        return [*command[:begin], *guard, *command[begin:]]
    return command


# ----------------------------------------------------------------------------------- comparison


def steps_of(notes: list[dict], attempt: int) -> dict[int, dict]:
    """{steps done before: note}"""
    steps = [note for note in notes if note["event"] == "step" and note["attempt"] == attempt]
    return {note["step"]: note for note in steps}


def compare(whole: list[list[dict]], stopped: list[list[dict]]) -> tuple[dict, set]:
    """Returns {(step, what differs): ranks}, and what differs before the stop and is not compared.

    Each has the notes of all ranks. Step 0: what the resumed run has found itself.
    """
    noise = set()
    for one, other in zip(whole, stopped):
        right = steps_of(one, 1)
        for step, note in steps_of(other, 1).items():
            noise.update(kinds_that_differ(note, right[step]))
    found = {}
    for rank, (one, other) in enumerate(zip(whole, stopped)):
        right = steps_of(one, 1)
        for note in other:
            if note["event"] == "finding":
                found.setdefault((0, note["text"]), []).append(rank)
        for step, note in steps_of(other, 2).items():
            kinds = [kind for kind in kinds_that_differ(note, right[step]) if kind not in noise]
            if kinds:
                text = ", ".join(describe(kind, note, right) for kind in kinds)
                found.setdefault((step + 1, text), []).append(rank)
                break
    return found, noise


def kinds_that_differ(note: dict, right: dict) -> list[str]:
    return [kind for kind in KINDS if note[kind] != right[kind]]


def describe(kind: str, note: dict, steps: dict[int, dict]) -> str:
    """steps: those of the run without a stop."""
    right = steps[note["step"]][kind]
    same = [step for step in steps if steps[step][kind] == note[kind]]
    if kind in ("rates", "scales"):
        return f"{KINDS[kind]} ({note[kind]}, not {right})"
    return KINDS[kind] + (f" (that of step {same[0] + 1})" if same else "")


def compare_files(whole: list[dict], stopped: list[dict]) -> list[str]:
    """How the first saved file differs of those that both have saved after the same step."""
    files = {(note["step"], note["name"]): note for note in whole if note["event"] == "file"}
    noise = set()
    for note in stopped:
        other = files.get((note["step"], note.get("name")))
        if other:
            entries = note["entries"].items() ^ other["entries"].items()
            names = {name for name, _ in entries} - noise
            if note["attempt"] == 1:
                noise |= names
            elif names:
                names = ", ".join(sorted(names))
                return [f"{note['name']} of step {note['step']} differs in {names}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
