#!/usr/bin/env python3
"""Find out whether a training script goes on exactly where it was stopped.

Usage: scripts/check_resume.py [OPTION ...] -- COMMAND [ARGUMENT ...]

COMMAND starts the unchanged script on this machine, such as
`torchrun --standalone --nproc-per-node 2 train.py --output-dir {dir}`. It runs once without a stop;
then in another directory, until it is stopped, and again. What differs in the first step that
differs is printed.
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
from report import end_now

GUARD = Path(__file__).resolve().with_name("guard.py")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.remove", "os.rename", "os.truncate", "shutil.rmtree")
COMPARED = ("learning rates", "batch", "weights", "optimizer state", "saved ")  # facts of notes


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
        if self.steps == stop:
            os.kill(os.getpid(), number)

    def on_save(self, _, value, *__, **___) -> None:
        super().on_save()
        if isinstance(value, dict):
            entries = {f"saved {key}": self.fingerprint(each) for key, each in value.items()}
            self.write("file", entries)

    def note(self, **_) -> dict:
        return super().note(with_state=True)


def protect_files(place: Path) -> None:
    """End this rank before it changes a file elsewhere: the run may be that of real checkpoints."""
    caches = [path for name, path in os.environ.items() if path and "_CACHE" in name]
    changeable = (f"{place}/", "/dev/", "/proc/", f"{Path.home()}/.", *caches)

    def refuse_outside(*values) -> None:
        for value in values:
            if isinstance(value, (str, bytes, os.PathLike)):
                path = os.path.realpath(os.fsdecode(value))
                if not path.startswith(changeable):
                    end_now(f"it would change {path}: name {{dir}} in COMMAND in its place")

    def refuse_ranks(*_) -> None:
        end_now("it starts ranks itself, which cannot be checked: start one rank")

    def audit(event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & WRITES:
            refuse_outside(arguments[0])
        if event in CHANGES:
            refuse_outside(*arguments)

    sys.addaudithook(audit)
    before(torch, "save", refuse_outside)  # the hook does not see these
    with suppress(ImportError):
        import safetensors

        before(safetensors, "serialize_file", refuse_outside)
    before(torch.multiprocessing, "spawn", refuse_ranks)
    before(torch.multiprocessing, "start_processes", refuse_ranks)


def before(owner, name: str, check) -> None:
    """Before each call of owner.name(), call check() with its arguments."""
    function = getattr(owner, name)

    def checked(*args, **kwargs):
        check(*args, *kwargs.values())
        return function(*args, **kwargs)

    setattr(owner, name, checked)


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
    whole = launch(args.command, place / "whole", 1, [args.steps, None, number])
    last = steps_of(whole)[-1]  # the script may end before
    stop = args.stop_at if args.stop_at < last else last // 2 + 1
    stopped = launch(args.command, place / "stopped", 1, [last, stop, number])
    if last in steps_of(stopped):
        give_up(f"it did not stop after step {stop}")
    resumed = launch(args.command, place / "stopped", 2, [last, None, number])
    begin = steps_of(resumed)[0]
    how = f"went on from step {begin} of {last}" if begin else "began again"
    print(f"check_resume.py: stopped after step {stop}, {how}")
    findings = [event["text"] for event in read(place / "events") if event["event"] == "resume"]
    noise, difference = compare(whole, stopped, resumed)
    findings += difference
    for text in findings:
        print(f"check_resume.py: {text}")
    if noise:
        names = ", ".join(sorted(noise))
        print(f"check_resume.py: not compared, as two runs without a stop differ: {names}")
    if not findings:
        print(f"check_resume.py: {'all else is ' if noise else ''}equal, bit for bit")
    return 1 if findings else 2 if noise and not begin else 0


def launch(command: list[str], place: Path, attempt: int, plan: list) -> list[dict]:
    """Run it in the directory `place`. Returns {(event, step): note} of each rank."""
    notes = place.with_suffix(".notes")
    checkpoints = place.with_suffix(".dir")
    if attempt == 1:
        for each in (place, notes, checkpoints):
            each.mkdir()
        for path in Path.cwd().iterdir():
            if path.suffix not in (".pt", ".pth", ".ckpt"):
                (place / path.name).symlink_to(path)
    (notes / PLAN).write_text(json.dumps(plan))
    env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    files = {"CHECK_RESUME": notes, "TMPDIR": place.parent, "EVENTS_FILE": place.parent / "events"}
    env.update({name: str(path) for name, path in files.items()})
    words = [word.replace("{dir}", str(checkpoints)) for word in with_guard(command)]
    log = place.with_suffix(".log")
    with log.open("w") as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "env": env}
        code = subprocess.call(words, cwd=place, start_new_session=True, **options)
    kill_descendants()
    files = sorted(notes.glob("*.jsonl"), key=lambda file: int(file.name.split(".")[0]))
    ranks = []
    for file in files:
        notes = [note for note in read(file) if note["attempt"] == attempt]
        ranks.append({(note["event"], note["step"]): note for note in notes})
    last, stop, _ = plan
    steps = steps_of(ranks)
    if not steps or (code and not stop and last not in steps):
        print("".join(log.read_text().splitlines(True)[-20:]))
        give_up("COMMAND failed, or made no step of an optimizer that guard.py sees")
    return ranks


def steps_of(ranks: list[dict]) -> list[int]:
    return [step for notes in ranks[:1] for event, step in notes if event == "step"]


def give_up(text: str) -> None:
    print(f"check_resume.py: error: {text}")
    sys.exit(2)


def with_guard(command: list[str]) -> list[str]:
    """COMMAND with guard.py before the script; launchers of scripts/ add it themselves."""
    for number, word in enumerate(command):
        if word.endswith(".py"):
            guard = [] if word.endswith("guard.py") else [str(GUARD)]
            return [*command[:number], *guard, *command[number:]]
    return command


# ----------------------------------------------------------------------------------- comparison


def compare(whole: list, stopped: list, resumed: list) -> tuple[set, list[str]]:
    """Each: the notes of all ranks. Returns what differs before the stop; and a sentence about the
    first step at which anything else does.
    """
    noise = set()
    for rights, notes in zip(whole, stopped):
        for key, note in notes.items():
            noise |= names_that_differ(note, rights.get(key, note))
    found = []
    for rank, (rights, notes) in enumerate(zip(whole, resumed)):
        for key, note in notes.items():
            names = names_that_differ(note, rights.get(key, note)) - noise
            if names:
                found.append((note["step"], rank, ", ".join(sorted(names))))
    if not found:
        return noise, []
    step, rank, names = min(found)
    return noise, [f"rank {rank} differs after step {step}: {names}"]


def names_that_differ(note: dict, right: dict) -> set[str]:
    names = [name for name in note if name.startswith(COMPARED)]
    return {name for name in names if right.get(name) != note[name]}


if __name__ == "__main__":
    sys.exit(main())
