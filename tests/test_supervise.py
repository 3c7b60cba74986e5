"""supervise.py: each way in which training can end, what it then does, prints and writes."""

import ast
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from harness import (
    FOREVER,
    OLD_PYTHONS,
    REPO,
    SLOW_TO_SAVE,
    load,
    processes_with,
    wait_for_step,
    wait_until,
    write_program,
)

SUPERVISE = REPO / "scripts" / "supervise.py"
TRAIN = [sys.executable, REPO / "scripts/guard.py", REPO / "train_distributed.py"]


@pytest.fixture
def start(tmp_path):
    """start(*command, **environment): a running supervise.py, killed when the test ends."""
    processes = []

    def start(*command, cwd=REPO, **env):
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_"))}
        env = {"OMP_NUM_THREADS": "1", "LOG_DIR": str(tmp_path / "logs")} | env
        process = subprocess.Popen(
            [sys.executable, SUPERVISE, *map(str, command)],
            cwd=cwd,
            env=inherited | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.stdout.close()


@pytest.fixture
def supervise(start):
    """supervise(*command, **environment): (exit code, output)"""

    def supervise(*command, **more):
        process = start(*command, **more)
        text, _ = process.communicate(timeout=180)
        return process.returncode, text

    return supervise


def attempts(directory) -> list[dict]:
    (file,) = directory.rglob("attempts.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def causes(directory) -> list[str]:
    return [attempt["cause"] for attempt in attempts(directory)]


CRASH = [sys.executable, "-c", "raise SystemExit(1)"]


def test_crashes_without_progress_are_retried_twice(tmp_path, supervise):
    code, text = supervise(*CRASH)
    assert code == 1 and causes(tmp_path / "logs") == ["killed"] * 3
    assert "error: killed: exit code 1 and no error report" in text
    assert "Giving up: 3 crashes without progress. After fixing it, resume with: " in text


ABORT_IN_A_THREAD = (
    "import ctypes, threading\nthreading.Thread(target=ctypes.CDLL(None).abort).start()"
)


@pytest.mark.parametrize(
    ("code", "cause", "reason"),
    [
        (ABORT_IN_A_THREAD, "exception", "aborted (SIGABRT), as by NCCL's watchdog: see the"),
        ("import os\nos.kill(os.getpid(), 9)", "killed", "out of memory? (see dmesg)"),
        ("raise SystemExit(1)", "killed", "exit code 1 and no error report: see the errors above"),
    ],
)
@pytest.mark.parametrize("by", ["python", "bash"])
def test_only_a_process_that_was_killed_may_be_out_of_memory(
    tmp_path, supervise, by, code, cause, reason
):
    command = [sys.executable, "-c", code]
    if by == "bash":
        command = ["bash", "-c", '"$@"; exit', "bash", *command]
    _, text = supervise(*command, MAX_RESTARTS="0")
    (attempt,) = attempts(tmp_path / "logs")
    assert attempt["cause"] == cause and reason in attempt["reason"]
    assert ("out of memory" in text) == ("out of memory" in reason)


def test_there_are_no_more_restarts_than_max_restarts(tmp_path, supervise):
    code, text = supervise(*CRASH, MAX_RESTARTS="1")
    assert code == 1 and causes(tmp_path / "logs") == ["killed"] * 2
    assert "Giving up: MAX_RESTARTS=1 is reached" in text


@pytest.mark.parametrize(
    ("options", "cause", "end", "expected"),
    [
        (["--epochs=nil"], "configuration", ": ", "--epochs"),
        (["--lr=1e18", "--warmup-epochs=0"], "NaN", " at step ", "lower --lr"),
    ],
)
def test_an_error_that_would_repeat_is_not_retried(
    tmp_path, tiny, supervise, options, cause, end, expected
):
    command = [*TRAIN, *tiny, f"--checkpoint-dir={tmp_path}/run", *options]
    code, text = supervise(*command)
    assert code == (2 if cause == "configuration" else 1), text
    assert causes(tmp_path) == [cause]
    last = text.splitlines()[-1]
    assert last.startswith(f"supervise.py: error: {cause}{end}") and expected in last
    assert "a restart would not help" in last


def test_ctrl_c_stops_saves_and_prints_how_to_resume(tmp_path, tiny, start, supervise):
    command = [*TRAIN, *tiny, f"--checkpoint-dir={tmp_path}/run"]
    process = start(*command, FOREVER, STOPPED_EXIT_CODE="75")
    wait_for_step(tmp_path / "run", 5)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "SIGINT: saving and stopping; press Ctrl-C again to kill the training" in text
    assert f"supervise.py: stopped (SIGINT); to resume: {SUPERVISE} {sys.executable} " in text
    assert causes(tmp_path) == ["stopped"] and not (tmp_path / "run/STOP").exists()
    step = json.loads((tmp_path / "run/status.json").read_text())["global_step"]
    code, text = supervise(*command, FOREVER, f"--stop-at-step={step + 3}")
    assert code == 0 and f"at step {step}\n" in text
    assert not list((tmp_path / "logs").iterdir())  # nothing is left but the run directory's log


def test_a_closed_terminal_stops_the_training_and_is_logged(tmp_path, tiny, start):
    process = start(*TRAIN, *tiny, f"--checkpoint-dir={tmp_path}/run", FOREVER)
    wait_for_step(tmp_path / "run", 5)
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0
    (attempt,) = attempts(tmp_path)
    assert (attempt["cause"], attempt["reason"]) == ("stopped", "SIGHUP")


IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(99)
"""


def test_a_second_ctrl_c_kills_what_does_not_stop(start):
    process = start(sys.executable, "-c", IGNORES_SIGTERM)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "Giving up: a stop was requested" in text


def test_a_scheduler_that_kills_the_shell_around_it_lets_the_training_save(tmp_path, start):
    script, launcher = tmp_path / "slow_to_save.py", tmp_path / "launch.sh"
    script.write_text(SLOW_TO_SAVE)
    launcher.write_text(f"{sys.executable} {script} --to={tmp_path}\n: or bash would exec it\n")
    env = {"RANK": "0", "SAVE_SECONDS": "4", "TRAIN_SCRIPT": str(script)}
    process = start("bash", launcher, **env)
    assert process.stdout.readline() == "ready\n"
    shell = int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))
    process.send_signal(signal.SIGTERM)
    os.killpg(shell, signal.SIGTERM)
    process.communicate(timeout=30)
    assert (tmp_path / "saved0").exists()


def test_a_killed_supervisor_leaves_no_training_behind_and_the_next_one_logs_it(
    tmp_path, tiny, start, supervise
):
    run = tmp_path / "run"
    process = start(*TRAIN, *tiny, f"--checkpoint-dir={run}", FOREVER)
    wait_for_step(run, 5)
    wait_until((run / "attempts.jsonl").exists, "no attempt log")
    (training,) = map(int, subprocess.check_output(["pgrep", "-P", str(process.pid)]).split())
    process.kill()
    try:
        process.communicate(timeout=30)  # the training has the other end of the pipe
    finally:
        with suppress(ProcessLookupError):
            os.kill(training, signal.SIGKILL)
    step = json.loads((run / "status.json").read_text())["global_step"]
    code, text = supervise(*TRAIN, *tiny, f"--checkpoint-dir={run}", f"--stop-at-step={step}")
    assert code == 0, text
    first, second = attempts(run)
    assert (first["cause"], first["saved_step"]) == ("killed", step)
    assert first["reason"] == "together with its supervisor"
    assert second["start_step"] == step


ORPHANED = """#!/usr/bin/env bash
"$@" --stop-at-step=20 &
if [[ "$ATTEMPT" == 1 ]]; then
  until [[ "$(wc -l <"$METRICS")" -gt 2 ]] 2>/dev/null; do sleep 0.1; done
  kill -TERM $!  # as its kernel does when its launcher dies
  wait
  END
fi
wait
"""


@pytest.mark.parametrize("end", ["kill -KILL $$", "exit 255"], ids=["killed", "connection lost"])
def test_a_training_that_stopped_because_its_launcher_failed_is_resumed(
    tmp_path, tiny, supervise, end
):
    run, launcher = tmp_path / "run", tmp_path / "launcher.sh"
    launcher.write_text(ORPHANED.replace("END", end))
    command = ["bash", launcher, *TRAIN, *tiny, f"--checkpoint-dir={run}"]
    code, text = supervise(*command, METRICS=str(run / "metrics.jsonl"))
    assert code == 0 and causes(run) == ["killed", "stopped"], text


CRASH_FIRST = 'if [[ "$ATTEMPT" == 1 ]]; then exit 1; fi; exec "$@"'  # its next attempt is newer


JOB = {"SLURM_JOB_ID": str(os.getpid())}


@pytest.mark.parametrize(
    ("job", "before"),
    [({}, []), (JOB, []), (JOB, ["bash", "-c", CRASH_FIRST, "bash"])],
    ids=["no job", "in one job", "in one job, a newer attempt"],
)
def test_a_second_supervisor_leaves_the_run_of_the_first_alone(
    tmp_path, tiny, start, supervise, job, before
):
    run = tmp_path / "run"
    command = [*TRAIN, *tiny, f"--checkpoint-dir={run}", FOREVER]
    first = start(*command, **job)
    wait_until((run / "attempts.jsonl").exists, "no attempt log")
    log_before = (run / "attempts.jsonl").read_text()
    code, text = supervise(*before, *command, **job)
    assert code == 2 and "is in use by" in text and "a restart would not help" in text
    assert (run / "attempts.jsonl").read_text() == log_before
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 0 and causes(run) == ["stopped"]


MALFORMED = """
import json, os, pathlib, sys
run = pathlib.Path(sys.argv[1])
status = {"state": "running", "run_dir": str(run), "start_step": 0, "global_step": 5}
status |= json.loads(sys.argv[2])
pathlib.Path(os.environ["STATUS_FILE"]).write_text(json.dumps(status))
(run / "metrics.jsonl").write_text('{"step": 3, "time": "10:30"}\\nnull\\n')
(run / "attempts.jsonl").write_text('{"attempt": 7}\\n[]\\n{"attempt": "a", "cause": "hang"}\\n')
import time
time.sleep(1)
if os.environ["ATTEMPT"] == "1":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"global_step": None, "saved_step": "5", "time": []},
        {"run_dir": 5},
        {"run_dir": "a\0b"},
        {"state": ["running"]},
    ],
    ids=json.dumps,
)
def test_records_that_are_malformed_or_of_another_program_end_nothing(tmp_path, supervise, status):
    run = tmp_path / "run"
    run.mkdir()
    script = tmp_path / "script.py"
    script.write_text(MALFORMED)
    command = [sys.executable, script, run, json.dumps(status)]
    code, text = supervise(*command)
    assert code == 0 and text.count("Restart 1 of 10") == 1 and "Traceback" not in text, text


def test_ranks_whose_torchrun_was_killed_end_before_the_restart(tmp_path, tiny, start):
    run = tmp_path / "run"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [REPO / "train_distributed.py", *tiny, f"--checkpoint-dir={run}", FOREVER]
    process = start(sys.executable, *words, *script, MARK=str(tmp_path), OMP_NUM_THREADS="1")
    wait_for_step(run, 3)
    wait_until((run / "attempts.jsonl").exists, "no attempt log")
    marked = processes_with("MARK", tmp_path)
    (torchrun,) = [pid for pid, line in marked.items() if "distributed.run" in line and
                   "supervise.py" not in line]  # fmt: skip
    ranks = [pid for pid, line in marked.items() if "distributed.run" not in line]
    os.kill(torchrun, signal.SIGKILL)
    wait_until(lambda: len(attempts(run)) == 2, "no second attempt")
    assert len(ranks) == 2 and not set(ranks) & set(processes_with("MARK", tmp_path))
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    first, second = attempts(run)
    assert second["start_step"] == first["saved_step"], text
    assert not processes_with("MARK", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("MAX_RESTARTS", "MAX_DURATION", "STOP_SECONDS", "STOPPED_EXIT_CODE"),
        *("SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT"),
    ],
)
@pytest.mark.parametrize("value", ["junk", "nan", "-1"])
def test_a_variable_that_is_not_a_number_is_named(tmp_path, supervise, name, value):
    code, text = supervise("true", **{name: value})
    assert code == 2 and not list(tmp_path.iterdir())
    expected = f"{name} is '{value}', not a number from 0 on: correct or unset it"
    assert text == f"supervise.py: error: {expected}\n"


def test_a_command_that_does_not_exist_touches_nothing(tmp_path, supervise):
    code, text = supervise("no-such-command")
    assert text == "supervise.py: error: cannot start no-such-command: there is no such program\n"
    assert code == 2 and not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------- events

REPORTS_EVENTS = """
import json, os, sys, time
file = os.environ["EVENTS_FILE"]
def add(text):
    with open(file, "a") as events:
        events.write(text)
slow = {"time": time.time(), "event": "slow_rank", "text": "rank 1 is late", "ranks": [1]}
add("[" * 9000 + "\\n" + "x" * 40000 + '\\n{"event": 5, "time": 1, "text": "no"}\\nnull\\n\\xff\\n')
add(json.dumps({**slow, "seconds_late": 0.1, "nested": {"a": [[]]}}) + "\\n")
time.sleep(2)
add(json.dumps({**slow, "seconds_late": 0.2, "time": 5}) + "\\n")
add('{"event": "incomplete')
time.sleep(1.5)
if os.environ["ATTEMPT"] == "1":
    os.kill(os.getpid(), 9)
"""


def test_events_are_printed_and_recorded_whatever_else_is_in_the_file(tmp_path, supervise):
    """Both of the first attempt; the second attempt reports the same ones again."""
    command = [sys.executable, "-c", REPORTS_EVENTS]
    save = f"line=$(cat); printf '%s\\n' \"$line\" >>{tmp_path}/alerts"
    code, text = supervise(*command, ON_EVENT=save)
    assert code == 0 and "WARNING" not in text, text
    assert text.count("supervise.py: rank 1 is late\n") == 2
    for attempt in attempts(tmp_path / "logs"):
        assert [event["seconds_late"] for event in attempt["events"]] == [0.1, 0.2]
        assert all(event["ranks"] == [1] for event in attempt["events"])
    alerts = [json.loads(line) for line in (tmp_path / "alerts").read_text().split("\n") if line]
    events = [alert["event"] for alert in sorted(alerts, key=lambda alert: alert["time"])]
    assert events == ["slow_rank", "slow_rank", "attempt_ended", "attempt_ended", "finished"]
    assert [alert["cause"] for alert in alerts if alert["event"] == "attempt_ended"] == [
        "killed",
        "ended",
    ]
    assert not list(tmp_path.rglob("events_*"))


def test_a_command_for_events_that_fails_or_hangs_delays_nothing(tmp_path, supervise, monkeypatch):
    save = f"printf '%s\\n' \"$EVENT\" >>{tmp_path}/alerts"
    command = f"{save}; echo the reason; sleep 1000 & exit 3"
    code, text = supervise(*CRASH, ON_EVENT=command, MAX_RESTARTS="1")
    assert code == 1 and text.count("WARNING: ON_EVENT failed with exit code 3\n") == 1, text
    assert "the reason\n" in text
    alerts = [json.loads(line) for line in (tmp_path / "alerts").read_text().splitlines()]
    last = max(alerts, key=lambda alert: alert["time"])
    assert last["event"] == "gave_up" and "MAX_RESTARTS=1 is reached" in last["text"]
    module = load(SUPERVISE)
    messages = []
    monkeypatch.setattr(module, "log", messages.append)
    alerts = module.Alerts("sleep 1000")
    for number in range(6):
        alerts.send({"event": str(number)})
    assert len(alerts.running) == module.MAX_COMMANDS and len(alerts.waiting) == 2
    processes = [process for process, _ in alerts.running]
    alerts.finish(0.3)
    assert [process.wait(10) for process in processes] == [-signal.SIGKILL] * 4
    assert messages == ["WARNING: ON_EVENT was ended after 0.3 s"]


def test_what_a_command_for_events_leaves_running_may_end(tmp_path):
    """As `mail` leaves a process that sends the mail."""
    alerts = load(SUPERVISE).Alerts(f"(sleep 0.5; touch {tmp_path}/sent) & true")
    alerts.send({"event": "finished"})
    deadline = time.monotonic() + 20
    while alerts.running and time.monotonic() < deadline:
        alerts.poll()
        time.sleep(0.1)
    assert (tmp_path / "sent").exists() and not alerts.running


# ------------------------------------------------------------------------------------ decisions


@pytest.mark.parametrize(
    ("decision", "if_refused", "facts"),
    [
        ("FINISH", "FINISH", {"cause": "finished"}),
        ("FINISH", "FINISH", {"cause": "ended"}),
        ("STOP", "STOP", {"cause": "stopped", "reason": ""}),  # --stop-at-step
        ("STOP", "STOP", {"cause": "stopped", "reason": "SIGINT"}),
        ("REQUEUE", "STOP", {"cause": "stopped", "reason": "time limit"}),
        ("REQUEUE", "STOP", {"cause": "stopped", "reason": "SIGCONT, SIGTERM"}),
        ("RESTART", "RESTART", {"cause": "exception"}),
        ("RESTART", "RESTART", {"cause": "node lost", "lost_nodes": True, "crashes": 2}),
        ("NO_PROGRESS", "NO_PROGRESS", {"cause": "hang", "crashes": 3}),
        ("NO_PROGRESS", "NO_PROGRESS", {"cause": "hang", "crashes": 3, "restarts": 5}),
        ("TOO_MANY_RESTARTS", "TOO_MANY_RESTARTS", {"cause": "disk", "restarts": 5}),
        ("WOULD_REPEAT", "WOULD_REPEAT", {"cause": "NaN", "signals": ["SIGTERM"]}),
        ("WOULD_REPEAT", "WOULD_REPEAT", {"cause": "configuration"}),
        ("REQUEUE", "WOULD_REPEAT", {"cause": "configuration", "lost_nodes": True}),
        ("WOULD_REPEAT", "WOULD_REPEAT", {"cause": "replaced", "lost_nodes": True}),
        ("STOP_REQUESTED", "STOP_REQUESTED", {"cause": "killed", "signals": ["SIGINT"]}),
        ("STOP_REQUESTED", "STOP_REQUESTED", {"cause": "hang", "signals": ["SIGTERM", "SIGINT"]}),
        ("REQUEUE", "STOP_REQUESTED", {"cause": "exception", "signals": ["SIGUSR1"]}),
        ("REQUEUE", "STOP_REQUESTED", {"cause": "killed", "killed": True}),  # at the time limit
        ("STOP_REQUESTED", "STOP_REQUESTED", {"cause": "killed", "killed": True, "crashes": 3}),
    ],
)
def test_the_decision_after_each_kind_of_end(decision, if_refused, facts):
    module = load(SUPERVISE)
    first = {"reason": "", "signals": [], "killed": False, "lost_nodes": False}
    first |= {"crashes": 1, "restarts": 0, "max_restarts": 5}
    facts = module.Facts(**first | facts)
    assert module.decide(facts).name == decision
    assert module.decide(facts, can_requeue=False).name == if_refused


# ------------------------------------------------------------------------ reports of the training


@pytest.mark.parametrize("python", ["simulated", *OLD_PYTHONS])
def test_an_old_python_is_reported_in_one_sentence(python):
    command = [python, SUPERVISE, "true"]
    if python == "simulated":
        code = "import runpy, sys; sys.version_info = (3, 6, 8); sys.argv = sys.argv[1:]; "
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", code, SUPERVISE, "true"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    text = (
        f"supervise.py: error: {command[0]} is not Python 3.8 or newer: set PYTHON to a newer one\n"
    )
    assert result.stderr.startswith(text) and result.stderr.count("\n") == 1


@pytest.mark.parametrize("file", ["supervise.py", "ssh/launch.py", "ssh/node.py"])
def test_python_3_6_can_read_the_file(file):
    ast.parse((REPO / "scripts" / file).read_text(), feature_version=(3, 6))


def test_the_attempt_log_is_in_the_run_directory_wherever_supervise_is_called(
    tmp_path, tiny, supervise
):
    """With a relative --checkpoint-dir, which only the training can resolve."""
    (tmp_path / "elsewhere").mkdir()
    launcher = tmp_path / "launcher.sh"
    launcher.write_text(f'cd {tmp_path}/elsewhere && exec "$@"\n')
    command = ["bash", launcher, *TRAIN, *tiny, "--epochs=1", "--save-dir=my run"]
    code, text = supervise(*command, cwd=tmp_path)
    assert code == 0, text
    assert [file.parent for file in tmp_path.rglob("attempts.jsonl")] == [
        tmp_path / "elsewhere" / "my run"
    ]


def test_two_supervised_runs_in_one_job_are_both_logged(tmp_path, tiny, supervise):
    """Their attempts have the same name, JOB.1, if the first supervisor has ended."""
    command = [*TRAIN, *tiny, f"--checkpoint-dir={tmp_path}/run"]
    for stop_at in (1, 2):
        code, text = supervise(*command, f"--stop-at-step={stop_at}", PBS_JOBID="7")
        assert code == 0, text
    assert [record["attempt"] for record in attempts(tmp_path)] == ["7.1", "7.1"]


def test_a_dry_run_writes_no_attempt_log(tmp_path, supervise):
    launcher = REPO / "scripts/ssh/launch_singlenode.sh"
    words = [launcher, "configs/default_config.yaml", "2", f"--checkpoint-dir={tmp_path}/run"]
    code, text = supervise(*words, DRY_RUN="1", PYTHON=sys.executable)
    assert code == 0 and "train_distributed.py" in text
    assert not list(tmp_path.rglob("*attempts*")) and not (tmp_path / "run").exists()


def test_exit_code_0_without_a_status_is_not_called_finished(tmp_path, supervise):
    code, text = supervise(sys.executable, "-c", "print('no status')")
    assert code == 0 and "finished" not in text
    assert causes(tmp_path / "logs") == ["ended"]


OWN_SCRIPT = """
import json, os, sys, time
step = int(open("step").read()) if os.path.exists("step") else 0
def write_status(state, reason=""):
    status = dict(run_dir=os.getcwd(), state=state, reason=reason, start_step=step)
    status.update(global_step=now, saved_step=now, world_size=1, began=0, time=time.time())
    open(os.environ["STATUS_FILE"], "w").write(json.dumps(status))
for now in range(step, 1000):
    write_status("running")
    if os.path.exists(os.environ["STOP_FILE"]):
        open("step", "w").write(str(now))
        write_status("stopped", "STOP file")
        sys.exit()
    if len(sys.argv) > 1 and now == step + 2:
        open("step", "w").write(str(now))
        write_status("running")
        sys.exit(1)
    time.sleep(0.05)
"""


def test_a_script_that_ignores_the_deadline_is_stopped_by_its_stop_file(tmp_path, supervise):
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    command = [sys.executable, tmp_path / "own.py"]
    code, text = supervise(*command, cwd=tmp_path, MAX_DURATION="2")
    assert code == 0 and "time limit: saving and stopping" in text
    (attempt,) = attempts(tmp_path)
    assert (attempt["cause"], attempt["reason"]) == ("stopped", "time limit")
    assert (tmp_path / "step").exists()


def test_the_goodput_is_split_by_cause(tmp_path, tiny, supervise):
    code, text = supervise(*TRAIN, *tiny, f"--checkpoint-dir={tmp_path / 'run'}", "--epochs=2")
    assert code == 0, text
    parts = ["of useful steps", "of lost steps", "of start-up", "of evaluation", "of saves"]
    split = ", ".join(rf"\d+ s {part}" for part in [*parts, "of waiting"])
    assert re.search(rf"goodput [\d.]+%: of \d+ s in 1 attempt, {split}, the rest hangs, ", text)
    (attempt,) = attempts(tmp_path)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    epochs = [record for record in map(json.loads, lines) if record["kind"] == "epoch"]
    evaluations = [record["evaluation_seconds"] for record in epochs]
    assert len(evaluations) == 2 and min(evaluations) > 0
    assert attempt["evaluation_seconds"] == pytest.approx(sum(evaluations))
    assert 0 < attempt["save_seconds"] < attempt["train_seconds"]
    began = json.loads((tmp_path / "run/status.json").read_text())["began"]
    assert attempt["startup_seconds"] == pytest.approx(began - attempt["start"])


def test_a_script_without_evaluations_and_saves_has_a_goodput_without_them(tmp_path, supervise):
    script = OWN_SCRIPT.replace("began=0", "began=began").replace(
        "step =", "began, step = time.time(),", 1
    )
    (tmp_path / "own.py").write_text(script)
    code, text = supervise(sys.executable, tmp_path / "own.py", cwd=tmp_path, MAX_DURATION="2")
    assert code == 0, text
    split = r"\d+ s of useful steps, 0 s of lost steps, \d+ s of start-up, 0 s of waiting, the rest"
    assert re.search(
        rf"goodput [\d.]+%: of \d+ s in 1 attempt, {split} hangs, shutdown or unknown", text
    )


def ended(start, end, **facts) -> dict:
    """An attempt as in the attempt log: 10 steps, if nothing else is said."""
    attempt = {"attempt": f"7.{start}", "start": start, "end": end, "cause": "killed"}
    attempt |= {"start_step": 0, "end_step": 10, "recomputed": 0, "train_seconds": 0}
    return attempt | facts


REST = "the rest hangs, shutdown or unknown"
GOODPUT = {
    # Half of the 60 s of steps are lost; 40 s in the queue; of the second attempt, 10 s of exit.
    "goodput 35.0%: of 200 s in 2 attempts, 70 s of useful steps, 30 s of lost steps, "
    f"30 s of start-up, 15 s of evaluation, 5 s of saves, 40 s of waiting, {REST}": [
        ended(0, 100, train_seconds=80, recomputed=5, startup_seconds=20)
        | {"evaluation_seconds": 15, "save_seconds": 5},
        ended(140, 200, train_seconds=40, startup_seconds=10)
        | {"evaluation_seconds": 0, "save_seconds": 0},
    ],
    # Of an earlier version; of a supervisor that was killed; of one that crashed at once.
    "goodput 50.0%: of 100 s in 3 attempts, 50 s of useful steps, 0 s of lost steps, "
    f"7 s of start-up, 3 s of waiting, {REST}": [
        ended(0, 60, train_seconds=50),
        ended(60, 90, end_step=0),
        ended(93, 100, end_step=0, startup_seconds=7),
    ],
    # The clock went back, and the values are damaged.
    "goodput 0.0%: of 10 s in 2 attempts, 0 s of useful steps, 0 s of lost steps, "
    f"4 s of start-up, 0 s of waiting, {REST}": [
        ended(0, 20, startup_seconds="long", save_seconds=[]),
        ended(5, 10, startup_seconds=4),
    ],
}


@pytest.mark.parametrize("text", GOODPUT)
def test_each_second_is_counted_once(text):
    assert load(SUPERVISE).goodput(GOODPUT[text]) == text


def test_evaluations_of_earlier_attempts_are_not_counted_again(tmp_path):
    module = load(SUPERVISE)
    us = module.Supervisor("7", [], tmp_path, tmp_path, 1, float("inf"))
    us.run_dir = str(tmp_path)
    epoch = {"kind": "epoch", "step": 5, "time": 90.0, "evaluation_seconds": 3.0}
    records = [epoch, epoch | {"time": 110.0}, epoch | {"time": 120.0, "evaluation_seconds": 2.0}]
    records += [epoch | {"time": 125.0, "evaluation_seconds": text} for text in ("long", -9, 1e9)]
    records += [{"kind": "train", "step": 9, "time": 130.0}]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    status = {"began": 100.0, "save_seconds": 4.0}
    found = us.seconds_without_steps(95.0, 135.0, status)
    assert found == {"startup_seconds": 5, "save_seconds": 4, "evaluation_seconds": 5}
    damaged = {"began": float("nan"), "save_seconds": 1e300}
    found = us.seconds_without_steps(95.0, 135.0, damaged)
    assert found == {"startup_seconds": 0, "save_seconds": 40}
    assert us.seconds_without_steps(95.0, 135.0, {}) == {}


def test_the_first_restart_is_at_once_and_a_second_crash_without_progress_waits():
    module = load(SUPERVISE)
    assert [module.pause_before_restart(crashes) for crashes in range(3)] == [0, 0, 2]


def test_crashes_with_progress_are_retried_until_max_restarts(tmp_path, supervise):
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    command = [sys.executable, tmp_path / "own.py", "crash"]
    code, text = supervise(*command, cwd=tmp_path, MAX_RESTARTS="5")
    assert code == 1 and "Giving up: MAX_RESTARTS=5 is reached" in text, text
    assert [(a["start_step"], a["saved_step"]) for a in attempts(tmp_path)] == [
        (2 * n, 2 * n + 2) for n in range(6)
    ]


# --------------------------------------------------------------------------- the state of Slurm


@pytest.fixture
def supervisor(monkeypatch, tmp_path):
    """A Supervisor that has not started anything, on two nodes."""
    module = load(SUPERVISE)
    monkeypatch.setattr(module, "nodes_of_job", lambda: ["n1", "n2"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return module, module.Supervisor("7", ["true"], tmp_path, tmp_path, 1, 1e9)


def test_a_user_error_remains_one_even_if_a_node_does_not_respond(supervisor, monkeypatch):
    module, us = supervisor
    monkeypatch.setattr(module, "nodes_lost", lambda nodes: ["n2"])
    failure = {"cause": "configuration", "reason": "no", "host": "n1", "rank": 0}
    assert us.cause(2, {}, failure)[0] == "configuration"
    assert us.nodes == ["n1", "n2"]
    assert us.cause(1, {}, failure | {"cause": "exception"}) == ("node lost", "n2")
    assert us.nodes == ["n1"]


def test_its_own_node_never_counts_as_lost(supervisor, monkeypatch):
    module, _ = supervisor
    monkeypatch.setattr(module, "slurm", lambda *_: "n1 allocated*\nn2 down*\nn3 mixed\n")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert module.nodes_lost(["n1", "n2", "n3"]) == ["n2"]


def test_slurm_is_asked_for_lost_nodes_only_if_the_training_is_silent_or_a_rank_has_failed(
    supervisor, monkeypatch, tmp_path
):
    module, us = supervisor
    asked, now = [], time.time()
    monkeypatch.setattr(module, "nodes_lost", lambda nodes: asked.append(nodes) or [])
    monkeypatch.setattr(module.time, "time", lambda: now)
    us.run_dir, us.status_file = str(tmp_path), tmp_path / "status.json"
    us.failure_file, us.written_at = tmp_path / "failure.json", now
    us.patience = module.SILENT_SECONDS
    for _ in range(30):  # a training that writes a record every 40 s
        now += 20
        if now % 40 < 20:
            (tmp_path / "metrics.jsonl").touch()
            os.utime(tmp_path / "metrics.jsonl", (now, now))
        us.poll_for_lost_nodes(None)
    assert not asked
    now += 80
    us.poll_for_lost_nodes(None)
    assert asked == [["n1", "n2"]]
    for _ in range(30):  # ten minutes of silence
        now += 20
        us.poll_for_lost_nodes(None)
    assert len(asked) == 4
    us.written_at = now
    us.failure_file.touch()
    us.poll_for_lost_nodes(None)
    assert len(asked) == 5


def test_a_slurm_that_does_not_answer_does_not_count_as_requeued(monkeypatch, tmp_path):
    module, messages = load(SUPERVISE), []
    monkeypatch.setattr(module, "log", messages.append)
    monkeypatch.setattr(module, "slurm", lambda *_: None)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no scontrol
    assert not module.requeue()
    assert messages[-1].startswith("Slurm does not requeue job 12: ")
    assert module.resume_command() == "call sbatch again with the same arguments"


ARGUMENTS = ["a.yaml", "--epochs", "9", "--name", "a b"]  # of which --epochs is from EPOCHS


@pytest.mark.parametrize(
    ("words", "script", "arguments"),
    [
        (["bash", "/spool/job12/slurm_script"], "run_distributed.slurm", "--epochs 9 --name 'a b'"),
        (  # the script for one node executes the one for several
            ["bash", "/repo/slurm_train_multinode.sh"],
            "slurm_train_single_node.sh",
            "--epochs 9 --name 'a b'",
        ),
        (["torchrun", "/repo/my_train.py"], "own.sh", "--name a b"),
        (["my_train"], "own.sh", "--name a b"),
        (["bash"], "own.sh", "--name a b"),
    ],
)
def test_the_sbatch_command_that_resumes(monkeypatch, tmp_path, words, script, arguments):
    module, script = load(SUPERVISE), tmp_path / script
    script.touch()
    facts = f"JobId=12\n   Partition=all\n   Command={script} a.yaml --name a b\n   Power=\n"
    monkeypatch.setattr(module, "slurm", lambda *_: facts)
    more = [] if len(words) == 1 else ARGUMENTS
    monkeypatch.setattr(sys, "argv", ["scripts/supervise.py", *words, *more])
    monkeypatch.delenv("PBS_ENVIRONMENT", raising=False)
    env = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    expected = f"sbatch --nodes=2 --partition=all {script} a.yaml {arguments}"
    assert module.resume_command() == expected


@pytest.mark.parametrize(
    ("state", "freed"),
    [
        ("", True),
        (None, True),
        ("COMPLETED\n", True),
        ("RUNNING\n", False),
        ("PENDING\nRUNNING\n", False),  # of a job array
    ],
)
def test_the_lock_of_a_job_that_has_ended_is_removed(
    supervisor, monkeypatch, tmp_path, state, freed
):
    module, us = supervisor
    us.run_dir, lock = str(tmp_path), tmp_path / "lock"
    lock.write_text("attempt 123.2, process 77 on n9")
    monkeypatch.setattr(module, "slurm", lambda *words: state if words[0] == "squeue" else "idle")
    assert us.free_stale_lock() == freed
    assert lock.exists() != freed


def test_a_run_directory_locked_for_a_job_that_is_gone_is_taken_over(tmp_path, tiny, supervise):
    """The trainer writes its run directory to STATUS_FILE before it is refused."""
    for name in ("sinfo", "squeue"):  # a Slurm that knows of no jobs
        write_program(tmp_path / name, "")
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("attempt 123.2, process 77 on n9", end="", file=lock, flush=True)
        command = [*TRAIN, *tiny, f"--checkpoint-dir={tmp_path}/run", "--stop-at-step=2"]
        code, text = supervise(*command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 0, text
    assert f"job 123 is gone, but still holds {tmp_path}/run/lock: removing it" in text
    assert causes(tmp_path / "run") == ["stopped"]


def test_a_lock_is_not_removed_while_slurm_does_not_answer_or_knows_nothing_of_its_owner(
    supervisor, monkeypatch, tmp_path
):
    module, us = supervisor
    us.run_dir, lock = str(tmp_path), tmp_path / "lock"
    monkeypatch.setattr(module, "slurm", lambda *words: None)
    for owner in ("attempt 123.2, process 77 on n9", "attempt laptop-7.1, process 8 on laptop"):
        lock.write_text(owner)
        assert not us.free_stale_lock() and lock.exists()
        monkeypatch.setattr(module, "slurm", lambda *words: "")


# ----------------------------------------------------------------------------- the state of PBS


@pytest.mark.parametrize(
    ("facts", "minutes", "command"),
    [
        (  # OpenPBS wraps long lines
            "    Resource_List.walltime = 01:30:00\n    stime = {}\n"
            "    Submit_arguments = -l select=2 -v ARGS=a.yaml --lr 1,X=2 pb\n\ts_train.sh",
            90,
            "qsub -l select=2 -v 'ARGS=a.yaml --lr 1,X=2' pbs_train.sh",
        ),
        (  # Torque
            "    Resource_List.walltime = 1:00:01:00\n    start_time = {}\n"
            "    run_count = 3\n    submit_args = -v X=2,WANDB_API_KEY=abc -l nodes=2 pbs_train.sh",
            24 * 60 + 1,
            "qsub -v X=2,WANDB_API_KEY=... -l nodes=2 pbs_train.sh",
        ),
        ("    stime = {}", None, "call qsub again with the same arguments"),
        ("", None, "call qsub again with the same arguments"),
    ],
)
def test_the_deadline_and_the_qsub_command_come_from_qstat(monkeypatch, facts, minutes, command):
    module, start = load(SUPERVISE), int(time.time())
    text = f"Job Id: 7.server\n{facts.format(time.ctime(start))}\n\n" if facts else None
    monkeypatch.setattr(module, "slurm", lambda *words: text)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PBS_JOBID", "7.server")
    assert module.end_of_job() == (start + 60 * minutes if minutes else None)
    assert module.qsub_command() == command
    assert module.requeues_of_job() == (2 if "run_count" in facts else 0)


# ------------------------------------------------------------------------ nodes that are left out

LAUNCHER = """
import json, os, sys
env = os.environ
failures = json.loads(sys.argv[1])
hosts = ["n1.site", "n2.site", "n3.site"]
with open(env["NODES_FILE"], "w") as file:
    file.write("\\n".join(hosts))
number = int(env["ATTEMPT"])
print("attempt", number, "without", env.get("EXCLUDED_NODES"), flush=True)
if number > len(failures):
    sys.exit()
failure = {"cause": "hang", "reason": "it is", "host": "n1", "rank": 0, **failures[number - 1]}
if failure.pop("gpu", None):
    event = {"time": 1, "event": "gpu_failed", "text": "bad", "host": failure["host"]}
    with open(env["EVENTS_FILE"], "w") as events:
        print(json.dumps(event), file=events)
with open(env["FAILURE_FILE"], "w") as file:
    json.dump(failure, file)
sys.exit(1)
"""
SILENT = {"silent_hosts": ["n2"]}


def launch(supervise, *failures, **env):
    """(exit code, output) of a launcher of three hosts whose attempts fail in these ways."""
    return supervise(sys.executable, "-c", LAUNCHER, json.dumps(failures), **env)


def left_out(directory) -> list[list[str]]:
    """The hosts that were left out after each attempt."""
    return [
        [host for event in attempt["events"] for host in event.get("hosts", [])]
        for attempt in attempts(directory)
    ]


def test_a_node_that_did_not_answer_in_two_hangs_is_replaced_by_a_spare(tmp_path, supervise):
    save = f"cat >>{tmp_path}/alerts; echo >>{tmp_path}/alerts"
    code, text = launch(supervise, SILENT, SILENT, NNODES="2", ON_EVENT=save)
    assert code == 0, text
    sentence = "n2.site is left out: a rank on it did not answer in 2 hangs; a spare node takes its"
    assert text.count(f"supervise.py: {sentence} place\n") == 1, text
    assert "attempt 2 without None\n" in text and "attempt 3 without n2.site\n" in text
    assert left_out(tmp_path) == [[], ["n2.site"], []]
    alerts = (tmp_path / "alerts").read_text()
    assert alerts.count('"event": "node_left_out"') == 1 and sentence in alerts
    assert not list(tmp_path.rglob("nodes_*"))


def test_a_node_whose_gpu_has_failed_is_replaced_at_once(tmp_path, supervise):
    failure = {"cause": "configuration", "gpu": True, "host": "n3"}
    code, text = launch(supervise, failure, NNODES="2")
    assert code == 0 and "n3.site is left out: its GPU has failed; a spare" in text, text
    assert left_out(tmp_path) == [["n3.site"], []]


@pytest.mark.parametrize(
    ("failures", "env", "expected"),
    [
        ([SILENT] * 3, {"NNODES": "3"}, "n2.site may be defective"),
        ([SILENT] * 3, {}, "n2.site may be defective"),
        ([{"silent_hosts": ["n2", "n3"]}] * 3, {"NNODES": "1"}, "3 crashes without"),
        ([{"silent_hosts": ["n9"]}] * 3, {"NNODES": "1"}, "3 crashes without"),
        ([{"silent_hosts": [[]]}, {"silent_hosts": 5}, SILENT], {"NNODES": "1"}, "3 crashes"),
    ],
    ids=["no spare", "no NNODES", "two nodes", "another host", "malformed"],
)
def test_without_a_spare_or_certain_evidence_no_node_is_left_out(
    tmp_path, supervise, failures, env, expected
):
    code, text = launch(supervise, *failures, **env)
    assert code == 1 and expected in text, text
    assert "is left out" not in text and left_out(tmp_path) == [[], [], []]


def test_hangs_that_follow_the_rank_to_the_spare_are_the_fault_of_the_script(tmp_path, supervise):
    hangs = [SILENT] * 2 + [{"silent_hosts": ["n3"]}] * 3
    code, text = launch(supervise, *hangs, NNODES="1")
    assert code == 1 and "3 crashes without progress" in text, text
    assert left_out(tmp_path) == [[], ["n2.site"], [], [], []]


def test_the_last_node_is_not_left_out(tmp_path, supervise):
    failures = [
        {"cause": "configuration", "gpu": True, "host": host} for host in ("n1", "n2", "n3")
    ]
    code, text = launch(supervise, *failures, NNODES="1")
    assert code == 2 and "WARNING: n3.site may be defective: its GPU has failed" in text, text
    assert left_out(tmp_path) == [["n1.site"], ["n2.site"], []]


def test_no_node_is_left_out_for_twenty_errors_of_the_script(supervisor):
    module, us = supervisor
    failures = [
        {"cause": "exception", "reason": "ValueError: no", "host": "n2", "rank": 3},
        {"cause": "out of memory", "reason": "CUDA out of memory", "host": "n2", "rank": 3},
        {"cause": "configuration", "reason": "no such file", "host": "n2"},
        {"cause": "hang", "reason": "rank 3 is at", "host": "n1", "silent_hosts": []},
        {},  # killed
    ]
    us.wanted = 1
    for failure in failures * 4:
        us.failure = failure
        attempt = {"cause": failure.get("cause", "killed"), "events": [], "world_size": 4}
        us.leave_out_bad_nodes({**attempt, "saved_step": 5, "start_step": 0})
        assert us.bad_node == "" and us.left_out == [] and us.nodes == ["n1", "n2"]


def test_a_job_without_a_spare_is_requeued_without_the_node(supervisor, monkeypatch):
    module, us = supervisor
    us.begun = {}
    attempt = {"cause": "hang", "events": [], "world_size": None, "start": 0, "end": 1}
    us.failure = SILENT
    us.leave_out_bad_nodes(attempt)
    assert us.bad_node == ""
    monkeypatch.setenv("EXCLUDED_NODES", "")
    us.leave_out_bad_nodes(attempt)
    assert us.bad_node == "no spare" and us.left_out == ["n2"] and us.nodes == ["n1", "n2"]
    facts = us.facts({**attempt, "reason": ""}, 10)
    assert module.decide(facts) == module.Decision.REQUEUE
    assert module.decide(facts, can_requeue=False) == module.Decision.RESTART
    assert module.decide(facts._replace(signals=["SIGINT"])) == module.Decision.STOP_REQUESTED
    monkeypatch.setattr(module, "slurm_job", dict)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "--exclude=n2" in module.sbatch_options({})


def test_the_nodes_beyond_nnodes_are_spares(monkeypatch, tmp_path):
    module = load(SUPERVISE)
    assert module.choose_nodes(["a", "b", "c"], [], 2) == ["a", "b"]
    assert module.choose_nodes(["a", "b", "c"], ["a"], 2) == ["b", "c"]
    assert module.choose_nodes(["a", "b", "c"], ["a", "b"], 2) == ["a", "b"]  # too few are left
    assert module.choose_nodes(["a", "b"], ["a"], 0) == ["b"]
