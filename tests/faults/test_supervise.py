"""What supervise.py does about each end of a training, and what it tells."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from harness import REPO, SLOW_TO_SAVE, load
from test_stop import FOREVER, wait_for_step

SUPERVISE = REPO / "scripts" / "supervise.py"
TRAIN = [sys.executable, REPO / "train_distributed.py"]


def start(run, *command, **env):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    return subprocess.Popen(
        [sys.executable, SUPERVISE, *map(str, command)],
        cwd=REPO,
        env=inherited | {"RUN_DIR": str(run), "OMP_NUM_THREADS": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def supervise(run, *command, **env):
    process = start(run, *command, **env)
    text, _ = process.communicate(timeout=120)
    return process.returncode, text


def attempts(run) -> list[dict]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def causes(run) -> list[str]:
    return [attempt["cause"] for attempt in attempts(run)]


def test_a_crash_without_progress_is_tried_three_times(tmp_path):
    run = tmp_path / "run"
    code, text = supervise(run, sys.executable, "-c", "raise SystemExit(1)")
    assert code == 1 and causes(run) == ["killed"] * 3
    assert "error: killed at step 0: without a word of its own (exit code 1). Given up, " in text
    assert "crashed 3 times without a new checkpoint; once mended, to go on: " in text


def test_not_more_often_than_max_restarts(tmp_path):
    code, text = supervise(tmp_path, sys.executable, "-c", "raise SystemExit(1)", MAX_RESTARTS="1")
    assert code == 1 and causes(tmp_path) == ["killed"] * 2
    assert "Given up, after 1 restarts" in text


@pytest.mark.parametrize(
    ("options", "cause", "said"),
    [
        (["--epochs=nil"], "configuration", "'nil' is not a whole number"),
        (["--lr=1e18", "--warmup-epochs=0", "--max-bad-steps=2"], "NaN", "lower --lr"),
        (["--lr=1e18", "--warmup-epochs=0", "--epochs=1"], "NaN", "lower --lr"),
    ],
)
def test_what_would_happen_again_is_not_tried_again(tmp_path, tiny, options, cause, said):
    run = tmp_path / "run"
    command = [*TRAIN, *tiny, f"--checkpoint-dir={run}", *options]
    code, text = supervise(run, *command)
    assert code == (2 if cause == "configuration" else 1)
    assert causes(run) == [cause]
    last = text.splitlines()[-1]
    assert f"supervise.py: error: {cause} at step " in last and said in last
    assert "that would happen again" in last


def test_ctrl_c_stops_saves_and_tells_how_to_go_on(tmp_path, tiny):
    run = tmp_path / "run"
    command = [*TRAIN, *tiny, f"--checkpoint-dir={run}"]
    process = start(run, *command, FOREVER)
    wait_for_step(run, 5)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 0, text
    assert "SIGINT: the training saves and stops; Ctrl-C again ends it at once" in text
    assert f"supervise.py: stopped (SIGINT); to go on: {SUPERVISE} {sys.executable} " in text
    assert causes(run) == ["stopped"] and not (run / "STOP").exists()
    step = json.loads((run / "status.json").read_text())["global_step"]
    code, text = supervise(run, *command, FOREVER, f"--stop-at-step={step + 3}")
    assert code == 0 and f"at step {step}\n" in text


def test_a_terminal_that_closes_is_a_stop_and_goes_into_the_ledger(tmp_path, tiny):
    process = start(tmp_path, *TRAIN, *tiny, f"--checkpoint-dir={tmp_path}", FOREVER)
    wait_for_step(tmp_path, 5)
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 0
    (attempt,) = attempts(tmp_path)
    assert (attempt["cause"], attempt["reason"]) == ("stopped", "SIGHUP")


def test_a_second_ctrl_c_ends_what_does_not_stop(tmp_path):
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(99)"
    process = start(tmp_path, sys.executable, "-u", "-c", deaf)
    assert process.stdout.readline() == "deaf\n"
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "Given up, as you asked" in text


def test_a_scheduler_that_ends_the_shell_around_it_lets_the_training_save(tmp_path):
    script, launcher = tmp_path / "slow_to_save.py", tmp_path / "launch.sh"
    script.write_text(SLOW_TO_SAVE)
    launcher.write_text(f"{sys.executable} {script} --to={tmp_path}\n: or bash would become it\n")
    env = {"RANK": "0", "SAVE_SECONDS": "4", "TRAIN_SCRIPT": str(script)}
    process = start(tmp_path, "bash", launcher, **env)
    assert process.stdout.readline() == "ready\n"
    shell = int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))
    process.send_signal(signal.SIGTERM)
    os.killpg(shell, signal.SIGTERM)
    process.communicate(timeout=30)
    assert (tmp_path / "saved0").exists()


def test_a_killed_supervisor_leaves_no_training_behind(tmp_path, tiny):
    run = tmp_path / "run"
    process = start(run, *TRAIN, *tiny, f"--checkpoint-dir={run}", FOREVER)
    wait_for_step(run, 5)
    training = json.loads((run / "status.json").read_text())["pid"]
    process.kill()
    try:
        process.communicate(timeout=15)  # the training has the other end of the pipe
    finally:
        with suppress(ProcessLookupError):
            os.kill(training, signal.SIGKILL)
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "stopped" and not (run / "attempts.jsonl").exists()
    step = status["global_step"]
    code, text = supervise(run, *TRAIN, *tiny, f"--checkpoint-dir={run}", f"--stop-at-step={step}")
    assert code == 0 and causes(run)[0] == "stopped", text  # the next one has made up for it


ORPHANED = """#!/usr/bin/env bash
"$@" --stop-at-step=20 &
if [[ "$ATTEMPT" == 1 ]]; then
  until [[ "$(wc -l <"$RUN_DIR/metrics.jsonl")" -gt 2 ]] 2>/dev/null; do sleep 0.1; done
  kill -TERM $!  # as its kernel does when its launcher dies
  wait
  kill -KILL $$
fi
wait
"""


def test_a_training_that_stopped_because_its_launcher_was_killed_goes_on(tmp_path, tiny):
    run, launcher = tmp_path / "run", tmp_path / "launcher.sh"
    launcher.write_text(ORPHANED)
    code, text = supervise(run, "bash", launcher, *TRAIN, *tiny, f"--checkpoint-dir={run}")
    assert code == 0 and causes(run) == ["killed", "stopped"], text


def test_a_second_supervisor_leaves_the_ledger_of_the_first_alone(tmp_path, tiny):
    run = tmp_path / "run"
    command = [*TRAIN, *tiny, f"--checkpoint-dir={run}", FOREVER]
    first = start(run, *command)
    wait_for_step(run, 5)
    code, text = supervise(run, *command)
    assert code == 2 and "is in use by" in text and "Given up, that would happen again" in text
    assert not (run / "attempts.jsonl").exists()
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)
    assert first.returncode == 0 and causes(run) == ["stopped"]


def test_a_command_that_does_not_exist_touches_nobodys_run(tmp_path):
    code, text = supervise(tmp_path / "run", "no-such-command")
    assert text == "supervise.py: error: cannot start no-such-command: there is no such program\n"
    assert code == 2 and not (tmp_path / "run").exists()


def test_the_run_directory_is_found_in_the_command_or_its_config(tmp_path):
    run_directory_of = load(SUPERVISE).run_directory_of
    config = tmp_path / "my config.yaml"
    config.write_text("epochs: 3\ncheckpoint_dir: 'runs/x'  # here\n")
    assert run_directory_of(["a.sh", str(config), "2"]) == "runs/x"
    assert run_directory_of(["a.py", f"--config={config}"]) == "runs/x"
    assert run_directory_of(["a.sh", str(config), "--checkpoint-dir", "y z"]) == "y z"
    assert run_directory_of(["a.sh", str(config), "--save-dir=z"]) == "z"
    assert run_directory_of(["torchrun", "train_distributed.py"]) == "checkpoints"


def test_a_mistake_is_a_mistake_even_while_slurm_does_not_hear_from_a_node(monkeypatch, tmp_path):
    supervisor = load(SUPERVISE)
    monkeypatch.setattr(supervisor, "nodes_of_job", lambda: ["n1", "n2"])
    launch = supervisor.Launch(["true"], supervisor.RunDirectory(tmp_path), tmp_path, 1)
    monkeypatch.setattr(supervisor, "nodes_lost", lambda nodes: ["n2"])
    why = {"cause": "configuration", "reason": "no", "host": "n1", "rank": 0}
    assert launch.cause(2, {}, why, 0)[0] == "configuration"
    assert launch.nodes == ["n1", "n2"]
    assert launch.cause(1, {}, why | {"cause": "exception"}, 0) == ("node lost", "n2")
    assert launch.nodes == ["n1"]


def test_the_node_that_it_runs_on_is_not_lost(monkeypatch):
    supervisor = load(SUPERVISE)
    monkeypatch.setattr(supervisor, "slurm", lambda *_: "n1 allocated*\nn2 down*\nn3 mixed\n")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert supervisor.nodes_lost(["n1", "n2", "n3"]) == ["n2"]
