"""Each process of a supervised training is killed or stopped at a random moment.

Afterwards nothing is left, the recorded cause is right, no saved step is lost, and the final
weights are those of an undisturbed training, bit for bit. REPEATS=20 runs each case 20 times, which
takes two hours. With -s, pytest prints a line for each.
"""

import pytest
from disturbed import REPEATS, Training, disturb

# What attempts.jsonl may say of the disturbed attempt. "finished": it did not matter.
CAUSES = {
    ("supervisor", "SIGKILL"): {"finished"},  # it could not write a line
    ("launcher", "SIGKILL"): {"killed", "stopped"},
    ("log", "SIGKILL"): {"finished"},
    ("agent", "SIGKILL"): {"killed", "stopped"},
    ("rank 0", "SIGKILL"): {"killed"},
    ("rank 1", "SIGKILL"): {"killed"},
    ("worker", "SIGKILL"): {"exception", "killed"},
    ("supervisor", "SIGSTOP"): {"finished"},
    ("launcher", "SIGSTOP"): {"finished"},
    ("log", "SIGSTOP"): {"finished"},
    ("agent", "SIGSTOP"): {"finished"},
    ("rank 0", "SIGSTOP"): {"hang"},
    ("rank 1", "SIGSTOP"): {"hang"},
    ("worker", "SIGSTOP"): {"hang"},
}


@pytest.mark.long  # ../test_supervise.py has a rank that crashes
@pytest.mark.parametrize("kind, name", CAUSES)
@pytest.mark.parametrize("repeat", range(REPEATS))
def test_a_process_that_is_killed_or_stopped_leaves_nothing_and_costs_nothing_saved(
    tmp_path, images, undisturbed, kind, name, repeat
):
    training = Training(tmp_path, images)
    seed = f"{kind} {name} {repeat}"
    disturb(training, kind, name, seed, CAUSES[kind, name], undisturbed)
