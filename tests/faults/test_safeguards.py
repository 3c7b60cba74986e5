"""Each safeguard is disabled in turn: its test must then fail, with the expected assertion."""

import os
import re
import subprocess
import sys

import pytest
from harness import REPO, copy_repository

import train_distributed

pytestmark = pytest.mark.long

# safeguard: (its test, what the failing test shows, code that disables it: `t` is the trainer)
TRAINER = {
    "ranks agree on a stop": (
        "faults/test_stop.py -k signal_to_any_rank",
        r"assert \[.*\] == \[0, 0|still ran after",
        """
        def agree(self, *arguments, inner=t.Coordinator.agree):
            _, save = inner(self, *arguments)
            return bool(self.stop_flag.reason), save

        t.Coordinator.agree = agree
        """,
    ),
    "a STOP file is polled": (
        "faults/test_stop.py -k 'clock and STOP'",
        "still ran after",
        """
        def poll(self, inner=t.StopFlag.poll):
            self.files = ()
            return inner(self)

        t.StopFlag.poll = poll
        """,
    ),
    "time is left to save": (
        "faults/test_stop.py -k tenth",
        "assert False == True",
        """
        def poll(self, inner=t.StopFlag.poll):
            self.deadline += 1000
            return inner(self)

        t.StopFlag.poll = poll
        """,
    ),
    "all ranks wait for the last save": (
        "faults/test_stop.py -k last_save",
        "assert 'running' == 'stopped'",
        """
        def on_rank_0(world, function, *arguments, inner=t.on_rank_0):
            if function.__name__ != "write_status" or arguments[1] == "running":
                return inner(world, function, *arguments)
            if world.rank == 0:
                function(*arguments)

        t.on_rank_0 = on_rank_0
        """,
    ),
    "a hang ends with stacks": (
        "faults/test_hang.py -k busy",
        r"still ran after|assert \[.*\] == \[1, 1, 1\]",
        "t.faulthandler.dump_traceback_later = lambda *_, **__: None",
    ),
    "a step with NaN is skipped": (
        "faults/test_nan.py -k skip",
        "error: checkpoint_step_5 not saved: the weights are not finite",
        """
        def step(self, optimizer):
            self.unscale_(optimizer)  # which update() needs
            optimizer.step()

        t.torch.amp.GradScaler.step = step
        """,
    ),
    "the weights of all ranks are compared": (
        "test_replicas.py -k named",
        "assert 0 == 2",
        "t.Coordinator.check_replicas = lambda self, step, digests: None",
    ),
    "NaN ends the run": (
        "faults/test_nan.py -k too_long",
        "assert 0 == 2",
        "t.Coordinator.check_scale = lambda self, scaler, exponent: None",
    ),
    "weights that are not finite are not saved": (
        "faults/test_nan.py -k never_saved",
        "assert 'error: checkpoint_step_6 not saved",
        "t.torch.Tensor.isfinite = lambda self: t.torch.ones_like(self, dtype=t.torch.bool)",
    ),
    "training goes on after a failed save": (
        "faults/test_disk.py -k goes_on",
        r"error: cannot write \S+; is the disk full",
        """
        def save(self, state, learner, final=False, inner=t.CheckpointWriter.save):
            inner(self, state, learner, final=True)

        t.CheckpointWriter.save = save
        """,
    ),
    "three failed saves end the run": (
        "faults/test_disk.py -k three",
        "still ran after",
        """
        def save(self, state, learner, final=False, inner=t.CheckpointWriter.save):
            self.failed_saves = 0
            inner(self, state, learner, final)

        t.CheckpointWriter.save = save
        """,
    ),
    "metrics are kept for later": (
        "faults/test_disk.py -k metrics",
        r"assert \[.*\] == \[1, 2, 3",
        """
        def record(self, kind, step, values, inner=t.MetricsWriter.record):
            inner(self, kind, step, values)
            self.unwritten = b""

        t.MetricsWriter.record = record
        """,
    ),
    "a second job is refused": (
        "faults/test_lock.py -k second_job",
        "assert 0 == 2",
        """
        def lock(self):
            self.path.mkdir(parents=True, exist_ok=True)
            self.file = self.lock_path.open("a+")
            self.lock_path.write_text(self.owner)

        t.RunDirectory.lock = lock
        """,
    ),
    "the owner is checked before each write": (
        "faults/test_lock.py -k replaced",
        "assert 0 == 2",
        """
        t.RunDirectory.check_owner = lambda self: None
        """,
    ),
    "the identity of a run is checked": (
        "test_bad_input.py -k 'identity_of_a_run and samples'",
        "DID NOT RAISE",
        "t.check_identity = lambda checkpoint, identity: None",
    ),
    "CRCs are verified": (
        "faults/test_damage.py -k mutation",
        " differs$|assert <function zero",
        "t.zipfile.ZipFile.testzip = lambda self: None",
    ),
    "files are written under another name first": (
        "faults/test_kills.py -k inside_a_save",
        r"assert [\d.]+ < \([\d.]+ \+ 60\)|no intact checkpoint|assert \d+ >= \d+",
        """
        def replace_file(self, name, write):
            with (self.path / name).open("wb") as file:
                write(file)

        t.RunDirectory.replace_file = replace_file
        """,
    ),
    "gradients are rounded": (
        "test_world_sizes.py -k same_bits_on_any",
        r"AssertionError: \S+ differs$",
        """
        def add_micro_batch(self):
            flat = t.torch.cat([p.grad.flatten() for p in self.parameters])
            self.total = self.total.float() + flat
            self.model.zero_grad()

        t.ExactGradients.add_micro_batch = add_micro_batch
        """,
    ),
    "gradients are divided by the items of all ranks": (
        "test_world_sizes.py -k mean_over_items",
        "Tensor-likes are not close|AssertionError: conv1",
        "t.divide_by_items = lambda run, counts: None",
    ),
    "a filler micro-batch leaves BatchNorm alone": (
        "test_world_sizes.py -k short and batch_norm",
        "AssertionError: bn1.running_mean",
        "t.statistics_kept = lambda model: t.nullcontext()",
    ),
    "frozen BatchNorm stays in evaluation mode": (
        "test_world_sizes.py -k frozen",
        "assert (not )?",
        "t.set_training_mode = lambda model: model.train()",
    ),
    "sums are exact": (
        "test_metrics.py -k hugely",
        r"assert Fraction\(.*\) == Fraction\(",
        """
        def split_pending(self, inner=t.ExactSums.split_pending):
            names = self.pending[0]
            columns = {name: [values[name].double() for values in self.pending] for name in names}
            self.pending = [{name: t.torch.stack(columns[name]).sum() for name in names}]
            inner(self)

        t.ExactSums.split_pending = split_pending
        """,
    ),
    "each sample is seeded": (
        "test_data.py -k random_and_numpy",
        "assert False",
        "t.SeededDataset.__getitem__ = lambda self, key: self.dataset[key % len(self.dataset)]",
    ),
}

# safeguard of a script:
# (the script, its test, what the failing test shows, code that disables it: `s` is the script)
SCRIPTS = {
    "loader workers ignore stop signals": (
        "train_distributed.py",
        "faults/test_stop.py -k whole_process_group",
        r"assert \(.*\) == \(0, ''\)",
        "s.ignore_stop_signals = lambda worker: None",
    ),
    "no restart after three crashes": (
        "scripts/supervise.py",
        "test_supervise.py -k retried_twice",
        r"assert \(?1 == 1 and \['killed', 'k",
        "s.NO_PROGRESS = 9",
    ),
    "no restart if it would not help": (
        "scripts/supervise.py",
        "test_supervise.py -k would_repeat",
        r"assert \d == [12]$|assert \[.*\] == \['configuration'\]",
        "s.WOULD_REPEAT = ()",
    ),
    "the launch ends with the supervisor": (
        "scripts/supervise.py",
        "test_supervise.py -k killed_supervisor",
        "TimeoutExpired",
        "s.die_with_parent = lambda: None",
    ),
}

# Errors of a mutation: it must make the test fail, not crash.
CRASH = re.compile(
    r"^(?:E +)?((?:Type|Attribute|Name|Key|Index|Overflow|UnboundLocal|Import|Syntax)Error\b.*"
    r"|ValueError: (?:not enough|too many) values.*)",
    re.MULTILINE,
)

# Replaces the script, which is renamed to real.py.
WRAPPER = """#!/usr/bin/env python3
import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("s", Path(__file__).with_name("real.py"))
s = importlib.util.module_from_spec(spec)
sys.modules["s"] = s  # for its dataclasses
spec.loader.exec_module(s)
{code}
if __name__ == "__main__":
    sys.exit(s.main())
"""


def assert_fails(tests: str, expected: str, tmp_path, repository, **env) -> None:
    """The test fails, an assertion of it shows the expected text, and nothing has crashed."""
    name, _, words = tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{name}"]
    command += ["-k", words.strip("'")] if words else []
    command += [f"--basetemp={tmp_path / 'pytest'}", "-p", "no:cacheprovider"]
    env = os.environ | {"FAULTS": "", "WITHOUT_SAFEGUARD": ""} | env
    result = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    print(result.stdout[-4000:])
    assert result.returncode == 1 and re.search(r"\d failed", result.stdout), "it did not fail"
    crash = CRASH.search(result.stdout)
    assert not crash, f"the mutation crashed: {crash[1]}"
    shown = "\n".join(re.findall("(?m)^E .*", result.stdout))
    assert re.search(expected, shown, re.MULTILINE), f"it failed differently:\n{shown}"


def without(safeguard: str) -> str:
    lines = [line[8:] if line.startswith(8 * " ") else line for line in safeguard.split("\n")]
    return "\n".join(["import train_distributed as t", *lines])


@pytest.mark.parametrize("safeguard", TRAINER)
def test_without_a_safeguard_of_the_trainer_its_test_fails(tmp_path, safeguard):
    tests, expected, code = TRAINER[safeguard]
    for name in re.findall(r"(?m)^ *(t(?:\.\w+)+) = ", code):
        assert eval(name, {"t": train_distributed}), f"there is no {name} to replace"
    assert_fails(tests, expected, tmp_path, REPO, WITHOUT_SAFEGUARD=without(code))


@pytest.mark.parametrize("safeguard", SCRIPTS)
def test_without_a_safeguard_of_a_script_its_test_fails(tmp_path, safeguard):
    name, tests, expected, code = SCRIPTS[safeguard]
    copy = copy_repository(tmp_path / "repo")
    script = copy / name
    real = script.rename(script.with_name("real.py"))
    replaced = code.split(" = ")[0].removeprefix("s.")
    assert re.search(rf"^(def )?{replaced}\b", real.read_text(), re.MULTILINE), (
        "the name to replace does not exist"
    )
    script.write_text(WRAPPER.format(code=code))
    script.chmod(0o755)
    assert_fails(tests, expected, tmp_path, copy)


def test_a_mutation_that_crashes_is_an_error_of_the_mutation(tmp_path):
    tests = "test_bad_input.py -k 'identity_of_a_run and samples'"
    for code, expected in (
        ("t.check_identity = lambda checkpoint: None", "the mutation crashed: TypeError"),
        ("t.check_identity = t.check_identity", "it did not fail"),
        ("t.check_identity = lambda checkpoint, identity: None", "it failed differently"),
    ):
        with pytest.raises(AssertionError, match=expected):
            assert_fails(tests, "another text", tmp_path, REPO, WITHOUT_SAFEGUARD=without(code))
