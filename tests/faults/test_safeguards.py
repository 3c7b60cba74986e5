"""Each safeguard of the trainer is disabled in turn: its test must then fail, as expected."""

import os
import re
import subprocess
import sys

import pytest
from harness import REPO

import train_distributed

pytestmark = pytest.mark.long

# safeguard: (its test, what the failing test shows, code that disables it: `t` is the trainer)
TRAINER = {
    "ranks agree on a stop": (
        "faults/test_stop.py -k 'signal_to_any_rank and SIGUSR1'",
        r"exit codes \[.*[1-9]|still ran after",
        """
        def agree(*arguments, inner=t.agree):
            _, *others = inner(*arguments)
            return (arguments[-1].signals or [""])[0], *others  # of this rank

        t.agree = agree
        """,
    ),
    "a STOP file is polled": (
        "faults/test_stop.py -k 'clock and STOP'",
        "still ran after",
        """
        def poll(self, seconds, inner=t.Requests.poll):
            self.stop_files = []
            return inner(self, seconds)

        t.Requests.poll = poll
        """,
    ),
    "time is left to save": (
        "faults/test_stop.py -k tenth",
        "== 'time limit'$",
        """
        def poll(self, seconds, inner=t.Requests.poll):
            self.deadline += 1000
            return inner(self, seconds)

        t.Requests.poll = poll
        """,
    ),
    "all ranks wait for the last save": (
        "faults/test_stop.py -k last_save",
        "assert 'running' == 'stopped'",
        """
        def on_rank_0(function, *arguments, inner=t.on_rank_0):
            if function.__name__ != "finish":
                return inner(function, *arguments)
            if t.is_rank_0():
                function(*arguments)

        def gather(value, inner=t.gather):
            return inner(value) if value != "done" else [value]

        t.on_rank_0 = on_rank_0
        t.gather = gather
        """,
    ),
    "the weights of all ranks are compared": (
        "test_replicas.py -k named",
        "assert 0 == 2|assert \\(0 == 2",
        "t.check_replicas = lambda model: None",
    ),
    "a loss that is not finite ends the run": (
        "test_loss.py -k not_finite_ends",
        "'the loss of the samples' in",
        "t.torch.Tensor.isfinite = lambda tensor: tensor == tensor.nan_to_num(0)",
    ),
    "weights that are not finite are not saved": (
        "test_checkpoints.py -k 'never_saved and unused'",
        r"assert \(?\[0\] == \[2\]",
        "t.names_not_finite = lambda model: set()",
    ),
    "training goes on after a failed save": (
        "faults/test_disk.py -k goes_on",
        r"error: cannot write \S+",
        """
        def save(self, inner=t.RunDirectory.save):
            self.save_has_failed = True
            inner(self)

        t.RunDirectory.save = save
        """,
    ),
    "two failed saves end the run": (
        "test_checkpoints.py -k failed_save",
        r"assert \(\[0\], .*\) == \(\[2\], ",
        """
        def save(self, inner=t.RunDirectory.save):
            self.save_has_failed = False
            inner(self)

        t.RunDirectory.save = save
        """,
    ),
    "a second process is refused": (
        "test_checkpoints.py -k second_process",
        "DID NOT RAISE",
        """
        def lock_directory(cfg):
            (t.Path(cfg.checkpoint_dir) / "lock").write_text("")

        t.lock_directory = lock_directory
        """,
    ),
    "the identity of a run is checked": (
        "test_bad_input.py -k other_data",
        "DID NOT RAISE|assert 'samples",
        "t.FIXED = set()",
    ),
    "damaged weights are found": (
        "faults/test_damage.py",
        " differs$|assert ",
        "t.is_damaged = lambda path: False",
    ),
    "files are written under another name first": (
        "faults/test_kills.py -k inside_a_save",
        r"assert [\d.]+ < \([\d.]+ \+ 60\)|no intact checkpoint|assert \d+ >= \d+",
        """
        def write_file(path, write):
            with path.open("wb") as file:
                write(file)

        t.write_file = write_file
        """,
    ),
    "gradients are rounded": (
        "test_world_sizes.py -k same_bits_on_any",
        r"AssertionError: \S+ differs$",
        """
        def zeros_like(tensor, dtype=None, inner=t.torch.zeros_like):
            return inner(tensor)

        t.torch.zeros_like = zeros_like  # sums of float32, as DDP's
        t.torch.Tensor.round = lambda self: self
        """,
    ),
    "the buckets of DDP are settled": (
        "test_resume.py -k stopped_and_resumed",
        r"AssertionError: \S+ differs$",
        "setattr(t.LossOf, 'sparse', True)",
    ),
    "frozen BatchNorm stays in evaluation mode": (
        "test_loss.py -k frozen",
        "assert not ",
        "t.frozen_parts = lambda model: []",
    ),
    "each micro-batch is seeded": (
        "test_data.py -k seeded_for_each_micro_batch",
        r"assert \(.*\) == \(",
        "t.seed_generators = lambda seed, device=None: None",
    ),
}

# Errors of a mutation: it must make the test fail, not crash.
CRASH = re.compile(
    r"^(?:E +)?((?:Type|Attribute|Name|Key|Index|Overflow|UnboundLocal|Import|Syntax)Error\b.*"
    r"|ValueError: (?:not enough|too many) values.*)",
    re.MULTILINE,
)


def without(safeguard: str) -> str:
    lines = [line[8:] if line.startswith(8 * " ") else line for line in safeguard.split("\n")]
    return "\n".join(["import train_distributed as t", *lines])


@pytest.mark.parametrize("safeguard", TRAINER)
def test_without_a_safeguard_its_test_fails(tmp_path, safeguard):
    """As expected: an assertion of it shows this text, and nothing has crashed."""
    tests, expected, code = TRAINER[safeguard]
    for name in re.findall(r"(?m)^ *(t(?:\.\w+)+) = ", code):
        assert eval(name, {"t": train_distributed}), f"there is no {name} to replace"
    name, _, words = tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{name}"]
    command += ["-k", words.strip("'")] if words else []
    short = tmp_path.with_name("inner")  # sockets of loader workers need a short TMPDIR
    command += [f"--basetemp={short}", "-p", "no:cacheprovider"]
    env = os.environ | {"FAULTS": "", "WITHOUT_SAFEGUARD": without(code)}
    result = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    print(result.stdout[-4000:])
    assert result.returncode == 1 and re.search(r"\d failed", result.stdout), "it did not fail"
    crash = CRASH.search(result.stdout)
    assert not crash, f"the mutation crashed: {crash[1]}"
    shown = "\n".join(re.findall("(?m)^E .*", result.stdout))
    assert re.search(expected, shown, re.MULTILINE), f"it failed differently:\n{shown}"
