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

import argparse
import json
import os
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
CHANGES = ("os.remove", "os.rename", "shutil.rmtree")
COMPARED = ("learning_rate", "batch", "weights", "optimizer_state", "saved ")  # facts of notes


# --------------------------------------------------------------------------------- in each rank


def start(notes: Path) -> None:
    """Take notes of all steps, and follow the plan: last step, step of a signal, signal."""
    protect_files(notes.parent)
    recorder = Rehearsal(notes)
    # A script that sets no seed gets the same in both runs, and another one when it resumes.
    torch.manual_seed(recorder.attempt)
    torch.use_deterministic_algorithms(True, warn_only=True)


class Rehearsal(Recorder):
    elements = 1 << 62
    notes_all_steps = True

    def on_main_step(self) -> None:
        super().on_main_step()
        last, stop, number = json.loads((self.directory / PLAN).read_text())
        if self.steps == last:
            os._exit(0)
        if self.steps == stop:
            os.kill(os.getpid(), number)

    def on_save(self, _, value, *__, **___) -> None:
        super().on_save()
        if isinstance(value, dict):
            self.write(
                "file", {f"saved {key}": self.fingerprint(each) for key, each in value.items()}
            )


def protect_files(place: Path) -> None:
    """End this rank before it changes a file elsewhere: the run may be that of real checkpoints."""
    caches = [path for name, path in os.environ.items() if path and "_CACHE" in name]
    changeable = (f"{place}/", "/dev/", "/proc/", f"{Path.home()}/.", *caches)

    def refuse_outside(*values) -> None:
        for value in values:
            with suppress(TypeError):  # it is no path
                path = os.path.realpath(os.fsdecode(value))
                if not path.startswith(changeable):
                    end_now(f"it would change {path}: name {{dir}} in COMMAND in its place")

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
    own_ranks = "it starts ranks itself, which cannot be checked: start one rank"
    before(torch.multiprocessing, "spawn", lambda *_: end_now(own_ranks))


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
    with tempfile.TemporaryDirectory(prefix="check_resume_") as place:
        try:
            return check(args, Path(place).resolve())
        except KeyboardInterrupt:
            return 130
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            kill_descendants()


def check(args, place: Path) -> int:
    """Make the three runs, and compare them. Returns the exit code."""
    number = signal.SIGKILL if args.kill else signal.SIGTERM
    whole = launch(args.command, place / "whole", 1, [args.steps, None, number])
    last = max(steps_of(whole))  # the script may end before
    stop = args.stop_at if args.stop_at < last else last // 2 + 1
    stopped = launch(args.command, place / "stopped", 1, [last, stop, number])
    if last in steps_of(stopped):
        give_up(f"it did not stop after step {stop}")
    resumed = launch(args.command, place / "stopped", 2, [last, None, number])
    begin = min(steps_of(resumed))
    findings = [event.text for event in read(place / "events") if event.event == "resume"]
    noise, difference = compare(whole, stopped, resumed)
    findings += difference
    texts = [f"stopped after step {stop}, went on from step {begin} of {last}", *findings]
    if noise:
        names = ", ".join(sorted(noise))
        texts.append(f"not compared, as two runs without a stop differ: {names}")
    if not findings:
        texts.append("all that was compared is equal, bit for bit")
    for text in texts:
        print(f"check_resume.py: {text}")
    return 1 if findings else 2 if noise and not begin else 0


def launch(command: list[str], place: Path, attempt: int, plan: list) -> dict:
    """Run it in the directory `place`. Returns {(step, rank, event): note}."""
    notes = place.with_suffix(".notes")
    checkpoints = place / "check_resume_dir"
    if attempt == 1:
        checkpoints.mkdir(parents=True)
        notes.mkdir()
        for path in Path.cwd().iterdir():
            if path.suffix not in (".pt", ".pth", ".ckpt"):
                (place / path.name).symlink_to(path)
    (notes / PLAN).write_text(json.dumps(plan))
    env = {
        **os.environ,
        "CHECK_RESUME": str(notes),
        "EVENTS_FILE": str(place.parent / "events"),
        "TMPDIR": str(place.parent),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    words = [word.replace("{dir}", str(checkpoints)) for word in with_guard(command)]
    log = place.with_suffix(".log")
    with log.open("w") as output:
        streams = {"stdout": output, "stderr": output}
        code = subprocess.call(words, cwd=place, env=env, stdin=subprocess.DEVNULL, **streams)
    kill_descendants()
    found = {}
    for file in notes.glob("*.jsonl"):
        for note in read(file):
            if note.attempt == attempt:
                found[note.step, note.rank, note.event] = vars(note)
    last, stop, _ = plan
    if not steps_of(found) or (code and not stop and last not in steps_of(found)):
        print(*log.read_text().splitlines()[-20:], sep="\n")
        give_up("COMMAND failed, or made no step of an optimizer that guard.py sees")
    return found


def steps_of(notes: dict) -> set:
    return {step for step, _, event in notes if event == "step"}


def give_up(text: str) -> None:
    print(f"check_resume.py: error: {text}")
    sys.exit(2)


def with_guard(command: list) -> list:
    """COMMAND with guard.py before the script; launchers of scripts/ add it themselves."""
    for number, word in enumerate(command):
        if word.endswith("guard.py"):
            return command
        if word.endswith(".py"):
            return [*command[:number], str(GUARD), *command[number:]]
    return command


# ----------------------------------------------------------------------------------- comparison


def compare(whole: dict, stopped: dict, resumed: dict):
    """Returns what differs before the stop; and a sentence about the first step at which anything
    else does.
    """
    noise = set()
    for key, note in stopped.items():
        noise |= names_that_differ(note, whole.get(key, note))
    for key, note in sorted(resumed.items()):
        names = names_that_differ(note, whole.get(key, note)) - noise
        if names:
            step, rank, _ = key
            return noise, [f"rank {rank} differs after step {step}: {', '.join(sorted(names))}"]
    return noise, []


def names_that_differ(note: dict, right: dict) -> set[str]:
    names = {name for name in note if right.get(name) != note[name]}
    return {name for name in names if name.startswith(COMPARED)}


if __name__ == "__main__":
    sys.exit(main())
