"""train_minimal.py: killed, stopped and resumed on other numbers of ranks, it trains one model.

Between numbers of ranks, sums are rounded differently: after 40 steps, printed losses differ by up
to 1e-3, and weights by up to 1e-4.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import (
    NO_LAUNCHER,
    REPO,
    Result,
    parent_of,
    run_ranks,
    running,
    wait_until,
    write_mnist,
)

MINIMAL = REPO / "train_minimal.py"
OPTIONS = ["--global-batch-size=10", "--epochs=2", "--save-every=4", "--lr=0.01"]  # 40 steps

# Rank {rank} does something after {step} steps of its process.
AFTER_STEP = """if True:
    import multiprocessing, os, signal, torch
    done = []

    def step(self, *arguments, inner=torch.optim.SGD.step):
        inner(self, *arguments)
        done.append(1)
        if len(done) == {step} and os.environ.get("RANK", "0") in "{rank}":
            {act}

    torch.optim.SGD.step = step
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
MAKE_FILE = "open(os.environ['STOP_FILE'], 'w').close()"
SIGNAL = "os.kill(os.getpid(), signal.{})"
WORKERS = "multiprocessing.active_children()"
TO_ALL = f"[os.kill(p, signal.SIGTERM) for p in (*[w.pid for w in {WORKERS}], os.getpid())]"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """203 for training, 103 for tests: no multiple of the batch or of a number of ranks."""
    return write_mnist(tmp_path_factory.mktemp("digits"), train=203, test=103)


@pytest.fixture(scope="module")
def run(digits):
    """run(directory, ranks): one launch, as with guard.py under torchrun or srun."""

    def run_once(directory, ranks: int, *options: str, env: dict | None = None, **more) -> Result:
        variables = (NO_LAUNCHER if ranks == 1 else {}) | (env or {})
        words = [REPO / "scripts/guard.py", MINIMAL, f"--checkpoint-dir={directory}", *OPTIONS]
        words += [f"--data-dir={digits}", *options]
        return run_ranks(ranks, *words, env=lambda _: variables, directory=directory, **more)

    return run_once


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory) -> Result:
    """One process, without a launcher."""
    return run(tmp_path_factory.mktemp("undisturbed") / "run", 1)


def metrics(*results: Result) -> dict[str, list[float]]:
    """{"epoch 1": [loss, accuracy], ...} of the tests, as printed."""
    found = {}
    for result in results:
        for when, loss, accuracy in re.findall(
            r"^(epoch \d+): test_loss ([\d.]+) test_accuracy ([\d.]+)", result.out[0], re.M
        ):
            found[when] = [float(loss), float(accuracy)]
    return found


def state_of(result: Result) -> dict:
    return torch.load(result.directory / "checkpoint.pt", weights_only=True)


def check_same(results: list[Result], expected: Result) -> None:
    found, wanted = metrics(*results), metrics(expected)
    assert found.keys() == wanted.keys()
    for when, values in wanted.items():
        assert found[when] == pytest.approx(values, abs=1e-3), when
    found, wanted = state_of(results[-1]), state_of(expected)
    assert found["step"] == wanted["step"]
    for name, weight in wanted["model"].items():
        torch.testing.assert_close(found["model"][name], weight, rtol=0, atol=1e-4)


def test_any_number_of_ranks_trains_the_same_model(run, undisturbed, tmp_path):
    assert len(metrics(undisturbed)) == 2  # epochs
    for ranks in (2, 3):  # 3 do not divide the batch
        result = run(tmp_path / str(ranks), ranks)
        assert result.codes == [0] * ranks, result.err
        check_same([result], undisturbed)


def test_killed_stopped_and_resumed_on_other_numbers_of_ranks(run, undisturbed, tmp_path):
    directory, stop_file = tmp_path / "run", tmp_path / "STOP"
    killed = run(directory, 2, before=AFTER_STEP.format(step=7, rank="1", act=KILL))
    assert killed.codes[1] == -signal.SIGKILL and state_of(killed)["step"] == 4
    # As scancel and a terminal do it: all processes, also the loader workers.
    stopped = run(directory, 1, before=AFTER_STEP.format(step=9, rank="0", act=TO_ALL))
    assert stopped.codes == [0] and "stopped at step" in stopped.out[0], stopped.err
    by_file = AFTER_STEP.format(step=5, rank="0", act=MAKE_FILE)
    by_file = run(directory, 3, env={"STOP_FILE": stop_file}, before=by_file)
    assert by_file.codes == [0] * 3 and "stopped at step" in by_file.out[0], by_file.err
    by_rank = AFTER_STEP.format(step=1, rank="1", act=SIGNAL.format("SIGUSR1"))
    by_rank = run(directory, 2, before=by_rank)
    assert by_rank.codes == [0] * 2 and "stopped at step" in by_rank.out[0], by_rank.err
    last = run(directory, 2)
    assert "finished at step 40 of 40" in last.out[0]
    check_same([killed, stopped, by_file, by_rank, last], undisturbed)

    again = run(directory, 1)  # evaluates
    assert list(metrics(again)) == ["epoch 2"] and "finished at step 40 of 40" in again.out[0]
    longer = run(directory, 2, "--epochs=3")
    assert "finished at step 60 of 60" in longer.out[0] and "epoch 3" in metrics(longer)


def test_a_stop_at_the_end_of_an_epoch_leaves_its_evaluation_to_the_resumed_run(
    run, undisturbed, tmp_path
):
    signals = AFTER_STEP.format(step=19, rank="01", act=SIGNAL.format("SIGINT"))
    stopped = run(tmp_path / "run", 2, before=signals)
    assert stopped.codes == [0, 0] and "stopped at step" in stopped.out[0]
    assert "epoch 1" not in metrics(stopped)
    check_same([stopped, run(tmp_path / "run", 2)], undisturbed)


def test_loader_workers_end_with_a_rank_that_is_killed(digits, tmp_path):
    """Also the one that evaluates, if there is one at that time."""
    command = [sys.executable, MINIMAL, "--epochs=9999", "--data-dir", digits]
    with running(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "runs/minimal/checkpoint.pt").exists, "it has not saved")
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        workers = [pid for pid in pids if parent_of(pid) == process.pid]
        assert workers
        process.kill()
        wait_until(lambda: not any(map(is_alive, workers)), "a worker is left")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists()


WRONG_BATCH = "--global-batch-size is not from ranks x --accumulate to 203"


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, ["--data-dir=absent"], "cannot read MNIST/raw in --data-dir absent"),
        (1, ["--global-batch-size=204"], WRONG_BATCH),
        (2, ["--accumulate=6"], WRONG_BATCH),
        (1, ["--lr=1e30"], "a weight is not finite at step "),
        (1, ["--config=a.yaml"], "unrecognized arguments: --config=a.yaml"),
        (1, ["--checkpoint-dir=/dev/null/run"], "cannot write to --checkpoint-dir"),
    ],
)
def test_a_mistake_is_one_sentence(run, tmp_path, ranks, options, message):
    result = run(tmp_path / "run", ranks, *options)
    assert result.codes == [2] * ranks
    assert result.err[0].startswith(f"train_minimal.py: error: {message}"), result.err
    assert "Traceback" not in result.err[0] and not (tmp_path / "run/checkpoint.pt").exists()


def test_an_error_ends_many_workers_without_a_traceback(digits, tmp_path):
    words = [MINIMAL, *OPTIONS, f"--data-dir={digits}", "--lr=1e30", "--num-workers=8"]
    result = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr


def test_accumulation_clipping_and_warm_up_are_the_same_on_any_number_of_ranks(run, tmp_path):
    options = ["--accumulate=3", "--clip-grad-norm=0.5", "--warmup-steps=10", "--num-workers=0"]
    one = run(
        tmp_path / "1", 1, *options[1:]
    )  # parts of 4, 3 and 3 samples; on 2 ranks, of 2 and 1
    stop = AFTER_STEP.format(step=7, rank="1", act=SIGNAL.format("SIGTERM"))
    two = [run(tmp_path / "2", 2, *options, before=stop), run(tmp_path / "2", 1, *options)]
    assert [result.codes for result in (one, *two)] == [[0], [0, 0], [0]], two[0].err
    check_same(two, one)
    assert "for a new run, set another --checkpoint-dir" in two[1].out[0]


def test_another_seed_is_another_run_and_bf16_learns(run, tmp_path):
    other = run(tmp_path / "run", 1, "--seed=1", "--epochs=1")
    bf16 = run(tmp_path / "bf16", 1, "--amp=bf16", "--lr=0.02")
    assert bf16.codes == [0] and metrics(bf16)["epoch 2"][1] > 0.5, bf16.err
    refused = run(tmp_path / "run", 1)
    assert other.codes == [0] and refused.codes == [2], refused.err


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    path = run(tmp_path / "run", 1, "--epochs=1").directory / "checkpoint.pt"
    content = path.read_bytes()
    half = len(content) // 2
    flipped = bytes([content[half] ^ 1])
    for damaged in (content[:half] + flipped + content[half + 1 :], content[:half]):
        path.write_bytes(damaged)
        result = run(tmp_path / "run", 1)
        assert result.codes == [2] and f"{path} is damaged" in result.err[0], result.err


def test_a_resume_with_another_batch_or_unshared_checkpoints_is_refused(run, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    elsewhere = f"import os; os.chdir(f'{tmp_path}/' + os.environ.get('RANK', '0'))"
    stop = AFTER_STEP.format(step=3, rank="0", act=SIGNAL.format("SIGTERM"))
    first = run("run", 2, before=f"{elsewhere}\n{stop}")
    assert first.codes == [0, 0]
    second = run("run", 2, before=elsewhere)
    assert second.codes == [2, 2]
    assert re.search(r"the ranks see run/checkpoint.pt at the steps \[[34], 0\]", second.err[0])
    third = run("run", 1, "--global-batch-size=20", before=elsewhere)
    assert third.codes == [2] and "set another --checkpoint-dir" in third.err[0]
