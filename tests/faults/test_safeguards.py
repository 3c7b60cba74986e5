"""Each safeguard is disabled in turn: its test must then fail."""

import os
import re
import subprocess
import sys

import pytest
from harness import REPO, context, copy_repository

# safeguard: (its test, code that disables it: `t` is the trainer)
TRAINER = {
    "ranks agree on a stop": (
        "test_stop.py -k signal_to_any_rank",
        """
        def sync(run, metrics, inner=t.sync):
            return inner(run, metrics)[0], bool(run.stop.reason)

        t.sync = sync
        """,
    ),
    "a STOP file is polled": (
        "test_stop.py -k 'clock and STOP'",
        """
        def poll(self, inner=t.StopFlag.poll):
            self.files = ()
            return inner(self)

        t.StopFlag.poll = poll
        """,
    ),
    "time is left to save": (
        "test_stop.py -k tenth",
        """
        def poll(self, inner=t.StopFlag.poll):
            self.deadline += 1000
            return inner(self)

        t.StopFlag.poll = poll
        """,
    ),
    "all ranks wait for the last save": (
        "test_stop.py -k last_save",
        """
        def on_rank_0(world, function, *arguments, inner=t.on_rank_0):
            return None if "lambda" in repr(function) else inner(world, function, *arguments)

        t.on_rank_0 = on_rank_0
        """,
    ),
    "a hang ends with stacks": (
        "test_hang.py -k 'stopped_rank or busy'",
        "t.faulthandler.dump_traceback_later = lambda *_, **__: None",
    ),
    "a step with NaN is skipped": (
        "test_nan.py -k skip",
        "t.torch.amp.GradScaler.step = lambda self, optimizer: optimizer.step()",
    ),
    "NaN ends the run": (
        "test_nan.py -k too_long",
        "t.torch.amp.GradScaler.get_scale = lambda self: 1.0",
    ),
    "weights that are not finite are not saved": (
        "test_nan.py -k never_saved",
        "t.torch.Tensor.isfinite = lambda self: t.torch.ones_like(self, dtype=t.torch.bool)",
    ),
    "training goes on after a failed save": (
        "test_disk.py -k goes_on",
        """
        def save_checkpoint(run, final, inner=t.save_checkpoint):
            inner(run, final=True)

        t.save_checkpoint = save_checkpoint
        """,
    ),
    "three failed saves end the run": (
        "test_disk.py -k three",
        """
        def save_checkpoint(run, final, inner=t.save_checkpoint):
            run.failed_saves = 0
            inner(run, final)

        t.save_checkpoint = save_checkpoint
        """,
    ),
    "metrics are kept for later": (
        "test_disk.py -k metrics",
        """
        def write_record(run, kind, inner=t.write_record, **values):
            inner(run, kind, **values)
            run.unwritten = b""

        t.write_record = write_record
        """,
    ),
    "a second job is refused": (
        "test_lock.py -k second_job",
        """
        def lock(self):
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "lock").write_text(self.owner)

        t.RunDirectory.lock = lock
        """,
    ),
    "the owner is checked before each write": (
        "test_lock.py -k replaced",
        """
        def write(self, name, write, inner=t.RunDirectory.write):
            (self.path / "lock").write_text(self.owner)
            inner(self, name, write)

        t.RunDirectory.write = write
        """,
    ),
    "CRCs are verified": (
        "test_damage.py -k mutation",
        "t.zipfile.ZipFile.testzip = lambda self: None",
    ),
    "files are written under another name first": (
        "test_kills.py -k inside_a_save",
        """
        def write(self, name, write):
            with (self.path / name).open("wb") as file:
                write(file)

        t.RunDirectory.write = write
        """,
    ),
    "gradients are rounded": (
        "test_kills.py -k 'ranks_are_killed and reproducible'",
        """
        def add_exactly(run, last, inner=t.add_exactly):
            for p in run.model.parameters():
                p.grad.mul_(1 + 2**-20 * run.world.rank)
            inner(run, last)

        t.add_exactly = add_exactly
        """,
    ),
}

# safeguard of a script: (the script, its test, code that disables it: `s` is the script)
SCRIPTS = {
    "loader workers ignore stop signals": (
        "train_distributed.py",
        "faults/test_stop.py -k whole_process_group",
        "s.ignore_stop_signals = lambda worker: None",
    ),
    "no restart after three crashes": (
        "scripts/supervise.py",
        "test_supervise.py -k retried_twice",
        "s.NO_PROGRESS = 9",
    ),
    "no restart if it would not help": (
        "scripts/supervise.py",
        "test_supervise.py -k would_repeat",
        "s.WOULD_REPEAT = ()",
    ),
    "the launch ends with the supervisor": (
        "scripts/supervise.py",
        "test_supervise.py -k killed_supervisor",
        "s.die_with_parent = lambda: None",
    ),
}

# Replaces the script, which is renamed to real.py.
WRAPPER = """#!/usr/bin/env python3
import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("s", Path(__file__).with_name("real.py"))
s = importlib.util.module_from_spec(spec)
spec.loader.exec_module(s)
{code}
if __name__ == "__main__":
    sys.exit(s.main())
"""


def assert_fails(tests: str, tmp_path, repository, **env) -> None:
    name, *more = tests.split(" -k ")
    words = ["-k", more[0].strip("'")] if more else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{name}", *words]
    command += [f"--basetemp={tmp_path / 'pytest'}", "-p", "no:cacheprovider"]
    env = os.environ | {"FAULTS": ""} | env
    result = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    print(result.stdout[-2000:])
    assert result.returncode == 1 and re.search(r"\d failed", result.stdout)


def without(safeguard: str) -> str:
    lines = [line[8:] if line.startswith(8 * " ") else line for line in safeguard.split("\n")]
    return "\n".join(["import train_distributed as t", *lines])


@pytest.mark.long
@pytest.mark.parametrize("safeguard", TRAINER)
def test_without_a_safeguard_of_the_trainer_its_test_fails(tmp_path, safeguard):
    tests, code = TRAINER[safeguard]
    process = context.Process(target=exec, args=(without(code),))
    process.start()
    process.join()
    assert process.exitcode == 0, "the code to replace does not exist"
    assert_fails(f"faults/{tests}", tmp_path, REPO, WITHOUT_SAFEGUARD=without(code))


@pytest.mark.long
@pytest.mark.parametrize("safeguard", SCRIPTS)
def test_without_a_safeguard_of_a_script_its_test_fails(tmp_path, safeguard):
    name, tests, code = SCRIPTS[safeguard]
    copy = copy_repository(tmp_path / "repo")
    script = copy / name
    real = script.rename(script.with_name("real.py"))
    replaced = code.split(" = ")[0].removeprefix("s.")
    assert re.search(rf"^(def )?{replaced}\b", real.read_text(), re.MULTILINE), (
        "the name to replace does not exist"
    )
    script.write_text(WRAPPER.format(code=code))
    script.chmod(0o755)
    assert_fails(tests, tmp_path, copy)
