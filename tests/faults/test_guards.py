"""Each guard, switched off, turns its test red: a test that cannot fail would prove nothing."""

import os
import re
import subprocess
import sys

import pytest
from harness import copy_repository

TRAINER, SUPERVISE = "train_distributed.py", "scripts/supervise.py"
STOP, HANG, NAN = "test_stop.py", "test_hang.py", "test_nan.py"
DISK, CLAIM, DAMAGE = "test_disk.py", "test_claim.py", "test_damage.py"
SUP, KILLS = "test_supervise.py", "test_kills.py"

# file, what stands there, what a careless hand makes of it, the tests that notice
GUARDS = {
    "a rank stops by itself": (
        TRAINER,
        "        return totals, [name for name, count in zip(run.stop.NAMES, wishes) if count]",
        "        return totals, sorted(run.stop.heard)",
        f"{STOP} -k signal_to_any_rank",
    ),
    "no look in the evaluation": (
        TRAINER,
        "if number + 1 >= lookout.next and (stop :=",
        "if number < 0 and (stop :=",
        f"{STOP} -k during_evaluation",
    ),
    "STOP is not looked for": (
        TRAINER,
        "            if self.stop_in_directory.exists():",
        "            if False:",
        f"{STOP} -k 'clock and STOP'",
    ),
    "no time left to save": (
        TRAINER,
        "        self.reserve = min(120.0, max(0.0, self.end - self.began) / 10)",
        "        self.reserve = -1.0",
        f"{STOP} -k DEADLINE",
    ),
    "nobody watches": (TRAINER, "    run.watch.start()", "    pass", f"{HANG} -k named_by"),
    "who waits is not asked": (
        TRAINER,
        '        note = {"waits": self.waits(),',
        '        note = {"waits": True,',
        f"{HANG} -k busy_elsewhere",
    ),
    "speed is not compared": (
        TRAINER,
        "        run.watch.compare(rest[1:])",
        "        pass",
        f"{HANG} -k slow",
    ),
    "a step with NaN counts": (
        TRAINER,
        "    bad = size.sub_(size).ne_(0)",
        "    bad = torch.zeros_like(size)",
        f"{NAN} -k left_out",
    ),
    "NaN for ever": (
        TRAINER,
        "    if run.bad_in_a_row >= run.cfg.max_bad_steps:",
        "    if False:",
        f"{NAN} -k too_long",
    ),
    "weights are saved as they are": (
        TRAINER,
        '    if not all(value.isfinite().all() for value in state["model"].values()):',
        "    if False:",
        f"{NAN} -k never_saved",
    ),
    "a full disk ends it": (
        TRAINER,
        "    MOST_FAILURES = 3",
        "    MOST_FAILURES = 1",
        f"{DISK} -k goes_on",
    ),
    "saves may fail for ever": (
        TRAINER,
        "    MOST_FAILURES = 3",
        "    MOST_FAILURES = 10**9",
        f"{DISK} -k three",
    ),
    "metrics are lost": (
        TRAINER,
        "            self.pending = self.pending[self.file.write(self.pending) :]",
        "            line, self.pending = self.pending, b''\n            self.file.write(line)",
        f"{DISK} -k metrics",
    ),
    "anybody may come": (
        TRAINER,
        'if other.get("state") == "running" and not same_job and self.is_alive(other):',
        "if False:",
        f"{CLAIM} -k second_job",
    ),
    "who was superseded saves on": (
        TRAINER,
        "            if claim:\n                claim.check()",
        "            pass",
        f"{CLAIM} -k superseded",
    ),
    "sha256 is not compared": (
        TRAINER,
        '        sound = sound and sha256_of(checkpoint) == facts["sha256"]',
        "        pass",
        f"{DAMAGE} -k mutation",
    ),
    "a manifest is believed": (
        TRAINER,
        '        if facts.pop("check") == fingerprint(path, facts):',
        '        if facts.pop("check"):',
        f"{DAMAGE} -k mutation",
    ),
    "anybody's checkpoint": (
        TRAINER,
        "!= os.getuid() and not cfg.trust_checkpoint:",
        "!= os.getuid() and False:",
        f"{DAMAGE} -k another_user",
    ),
    "saved in place": (
        TRAINER,
        "    temporary = path.with_name("
        'f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")\n    with writing(path):\n',
        "    temporary = path\n    path.with_suffix('.json').unlink(missing_ok=True)\n"
        "    with writing(path):\n",
        f"{KILLS} -k inside_a_save",
    ),
    "gradients in the order of ranks": (
        TRAINER,
        "            flat, distance = flat + other, 2 * distance",
        "            flat, distance = flat + other * (1 + 2**-23), 2 * distance",
        f"{KILLS} -k again_and_again",
    ),
    "tried for ever": (SUPERVISE, "NO_PROGRESS = 3", "NO_PROGRESS = 9", f"{SUP} -k three_times"),
    "hopeless is tried again": (
        SUPERVISE,
        'HOPELESS = ("configuration", "NaN", "superseded", "in use")',
        "HOPELESS = ()",
        f"{SUP} -k would_happen_again",
    ),
    "the launch outlives us": (
        SUPERVISE,
        "        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG",
        "        pass",
        f"{SUP} -k killed_supervisor",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("guard", GUARDS)
def test_without_the_guard_its_test_is_red(tmp_path, guard):
    file, there, instead, tests = GUARDS[guard]
    copy = copy_repository(tmp_path / "repo")
    text = (copy / file).read_text()
    assert text.count(there) == 1, "the guard has moved: mend this list"
    (copy / file).write_text(text.replace(there, instead))
    name, *more = tests.split(" -k ")
    words = ["-k", more[0].strip("'")] if more else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/faults/{name}", *words]
    command += [f"--basetemp={tmp_path / 'pytest'}"]
    env = os.environ | {"FAULTS": ""}
    result = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    print(result.stdout[-2000:])
    assert result.returncode == 1 and re.search(r"\d failed", result.stdout)
