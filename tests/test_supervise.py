"""supervise.py: each way in which training can end, what it then does, prints and writes.

A script without torch stands for the training, except in three tests of the trainer itself.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import scheduler
from harness import (
    FOREVER,
    OLD_PYTHONS,
    REPO,
    load,
    processes_with,
    wait_for_step,
    wait_until,
    write_program,
)

SUPERVISE = REPO / "scripts" / "supervise.py"
TRAIN = [sys.executable, REPO / "scripts/guard.py", REPO / "train_distributed.py"]

# Arguments: the run directory, and whether to crash after two steps in each attempt.
FAKE = """
import json, os, signal, sys, time
requests = []
signal.signal(signal.SIGTERM, lambda *_: requests.append("SIGTERM"))
run, crashes = sys.argv[1], "crash" in sys.argv
saved = os.path.join(run, "step")
start = int(open(saved).read()) if os.path.exists(saved) else 0
for step in range(start, 10000):
    open(saved, "w").write(str(step))
    is_asked = requests or os.path.exists(os.environ["STOP_FILE"])
    status = {"run_dir": run, "state": "stopped" if is_asked else "running", "start_step": start}
    status.update(reason=(requests or ["STOP file"])[0], global_step=step, saved_step=step, world_size=1)
    open(os.environ["STATUS_FILE"] + ".new", "w").write(json.dumps(status))
    os.replace(os.environ["STATUS_FILE"] + ".new", os.environ["STATUS_FILE"])
    if is_asked or (crashes and step == start + 2):
        sys.exit(not is_asked)
    time.sleep(0.05)
"""  # noqa: E501


@pytest.fixture
def fake(tmp_path):
    """The command of a training that runs until it is stopped."""
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "run").mkdir()
    return [sys.executable, tmp_path / "fake.py", tmp_path / "run"]


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
            env=inherited | env | {"MARK": str(tmp_path)},
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
    for pid in processes_with("MARK", tmp_path):  # if the test has failed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def supervise(start):
    """supervise(*command, **environment): (exit code, output)"""

    def supervise(*command, **more):
        process = start(*command, **more)
        text, _ = process.communicate(timeout=300)
        return process.returncode, text

    return supervise


SCONTROL = """case "$*" in
  "show job"*) echo "JobId=7 JobState=RUNNING EndTime=$END" ;;
  requeue*) echo requeue >>{} ;;
esac
"""


@pytest.fixture
def job(tmp_path):
    """The environment of a Slurm job, in which scontrol notes each requeue."""
    (tmp_path / "requeues").touch()
    write_program(tmp_path / "bin/scontrol", SCONTROL.format(tmp_path / "requeues"))
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def requeues(tmp_path) -> int:
    return (tmp_path / "requeues").read_text().count("requeue")


def attempts(directory) -> list[dict]:
    (file,) = directory.rglob("attempts.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def causes(directory) -> list[str]:
    return [attempt["cause"] for attempt in attempts(directory)]


def names_in(directory) -> list[str]:
    return [path.name for path in directory.rglob("*") if path.is_file()]


def wait_for_attempt(directory, number: int = 1) -> None:
    """Until the attempt log of the run has this many attempts; the last one is running."""
    run = directory / "run"
    log = run / "attempts.jsonl"
    wait_until(lambda: log.exists() and len(attempts(run)) == number, "no attempt")


CRASH = [sys.executable, "-c", "raise SystemExit(1)"]


def test_crashes_with_progress_are_retried_until_max_restarts(tmp_path, fake, supervise):
    code, text = supervise(*fake, "crash", MAX_RESTARTS="4")
    assert code == 1 and "MAX_RESTARTS=4 is reached" in text, text
    steps = [(attempt["start_step"], attempt["saved_step"]) for attempt in attempts(tmp_path)]
    assert steps == [(2 * number, 2 * number + 2) for number in range(5)]


@pytest.mark.parametrize("code", [-9, 137, -6, 134, 255, 1])
def test_only_a_process_that_was_killed_may_be_out_of_memory(supervisor, code):
    _, us = supervisor
    cause, reason = us.cause(code, {})
    assert cause == "killed" and ("out of memory" in reason) == (code in (-9, 137))


FAILS = """
import json, os, sys
with open(os.environ["FAILURE_FILE"], "w") as file:
    json.dump({"cause": sys.argv[1], "reason": "why", "host": "n1"}, file)
sys.exit(1)
"""


@pytest.mark.parametrize("cause", ["configuration", "NaN"])
def test_an_error_that_would_repeat_is_not_retried(tmp_path, supervise, cause):
    code, text = supervise(sys.executable, "-c", FAILS, cause)
    assert code == 2
    assert causes(tmp_path) == [cause]
    assert "a restart would not help" in text


def test_a_user_error_of_the_trainer_is_not_retried(tmp_path, tiny, supervise):
    code, text = supervise(*TRAIN, *tiny, f"--checkpoint-dir={tmp_path}/run", "--epochs=nil")
    assert code == 2 and causes(tmp_path) == ["configuration"]
    assert "--epochs" in text.splitlines()[-1]


def test_ctrl_c_stops_saves_and_prints_how_to_resume(tmp_path, tiny, start, supervise):
    """The attempt log is in the run directory, which only the trainer knows."""
    (tmp_path / "elsewhere").mkdir()
    launch = ["bash", "-c", 'cd "$0" && exec "$@"', tmp_path / "elsewhere"]
    command = [*launch, *TRAIN, *tiny, "--checkpoint-dir=my run"]
    run = tmp_path / "elsewhere/my run"
    process = start(*command, FOREVER, STOPPED_EXIT_CODE="75")
    wait_for_step(run, 5)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 75, text
    assert f"supervise.py: stopped (SIGINT); to resume: {SUPERVISE} bash -c " in text
    assert causes(tmp_path) == ["stopped"] and not (run / "STOP").exists()
    step = json.loads((run / "status.json").read_text())["global_step"]
    code, text = supervise(*command, FOREVER, f"--stop-at-step={step + 3}")
    assert code == 0 and f" at step {step}, to step {step + 3}\n" in text
    assert not list((tmp_path / "logs").iterdir())  # nothing is left but the run directory's log


def test_a_closed_terminal_stops_the_training_and_is_logged(tmp_path, fake, start):
    process = start(*fake)
    wait_for_attempt(tmp_path)
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
    (attempt,) = attempts(tmp_path)
    assert (attempt["cause"], attempt["reason"]) == ("stopped", "SIGHUP")


def test_a_stop_reaches_the_training_although_log_dir_cannot_be_written(tmp_path, fake, start):
    (tmp_path / "file").touch()
    process = start(*fake, LOG_DIR=tmp_path / "file")
    wait_for_attempt(tmp_path)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "WARNING: cannot write to" in text, text
    (attempt,) = attempts(tmp_path)
    assert attempt["cause"] == "stopped"


def test_the_files_of_a_killed_supervisor_do_not_stop_the_next_one(supervisor, tmp_path):
    """In a container, each of them has the same process id."""
    module, us = supervisor
    left = us.directory / f"{module.HOST}_{os.getpid()}_1"
    left.mkdir(parents=True)
    (left / "STOP_FILE").touch()
    us.command = ["bash", "-c", '[[ ! -e "$STOP_FILE" ]]']
    assert us.attempt()["cause"] == "ended"


def test_a_training_without_a_deadline_of_its_own_is_stopped_in_time(tmp_path, fake, supervise):
    code, text = supervise(*fake, MAX_DURATION="2")
    assert code == 0, text
    (attempt,) = attempts(tmp_path)
    assert (attempt["cause"], attempt["reason"]) == ("stopped", "time limit")


IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_second_ctrl_c_kills_what_does_not_stop(start):
    process = start(sys.executable, "-c", IGNORES_SIGTERM)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert "saving and stopping" in process.stdout.readline()
    time.sleep(1.1)  # an impatient second one within a second does not count
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "Giving up: a stop was requested" in text


def test_what_does_not_stop_in_stop_seconds_is_killed(tmp_path, start):
    process = start(sys.executable, "-c", IGNORES_SIGTERM, STOP_SECONDS="1")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 1 and causes(tmp_path) == ["killed"]


def test_exit_code_0_after_a_stop_counts_as_stopped_without_a_status(tmp_path, start, job):
    """Slurm is asked to requeue; scontrol stands for it."""
    process = start(sys.executable, "-c", SAVES_SLOWLY, tmp_path / "saved", **job)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and requeues(tmp_path) == 1, text
    assert (tmp_path / "saved").exists() and causes(tmp_path / "logs") == ["stopped"]


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (0, {}, "ended"),
        (0, {"state": "running"}, "killed"),  # train.py | tee log
        (0, {"state": "failed"}, "killed"),
        (0, {"state": "finished"}, "finished"),
        (143, {}, "killed"),  # of ranks that srun ends because one has failed
        (2, {}, "configuration"),
    ],
)
def test_the_cause_without_an_error_report(supervisor, code, status, expected):
    _, us = supervisor
    assert us.cause(code, status)[0] == expected


@pytest.mark.parametrize(
    ("code", "received", "is_preempted", "ended_by", "cause"),
    [
        (0, "SIGUSR1", False, "a stop by the scheduler", "stopped"),
        (0, "SIGINT", False, "a stop by you", "stopped"),
        (0, "", True, "a stop by the scheduler", "stopped"),
        (1, "", True, "a stop by the scheduler", "killed"),  # its save has failed
        (143, "", True, "a stop by the scheduler", "stopped"),
        (1, "SIGTERM", False, "a crash", "killed"),  # srun ends the ranks, because one has failed
        (143, "SIGTERM", False, "a crash", "killed"),
        (0, "", False, "success", "ended"),
    ],
)
def test_a_stop_that_only_the_ranks_were_asked_for(
    supervisor, monkeypatch, tmp_path, code, received, is_preempted, ended_by, cause
):
    """run_torchrun.py and guard.py write the signal to STOP_FILE; Slurm knows of a preemption."""
    _, us = supervisor
    facts = {"JobState": "RUNNING", "PreemptTime": "now" if is_preempted else "None"}
    monkeypatch.setattr(scheduler, "slurm_job", lambda: facts)
    us.command = ["bash", "-c", f'echo -n "{received}" >"$STOP_FILE"; exit {code}']
    attempt = us.attempt()
    assert (us.ended_by(attempt), attempt["cause"]) == (ended_by, cause)


SAVES_SLOWLY = """
import signal, sys, time
def save(*_):
    time.sleep(2)
    open(sys.argv[1], "w")
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_scheduler_that_kills_the_shell_around_it_lets_the_training_save(tmp_path, start):
    command = [sys.executable, "-c", SAVES_SLOWLY, tmp_path / "saved"]
    process = start("bash", "-c", '"$@"; :', "bash", *command)  # bash would exec the last command
    assert process.stdout.readline() == "ready\n"
    shell = int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))
    process.send_signal(signal.SIGTERM)
    os.killpg(shell, signal.SIGTERM)
    process.communicate(timeout=120)
    assert (tmp_path / "saved").exists()


# Each process that handles SIGTERM writes a line when it gets it.
TOLD = """
import os, signal, sys, time
def told(*_):
    print(name, "saves", flush=True)
    time.sleep(1)
    print(name, "has saved", flush=True)
    os.kill(worker, 9)
    os._exit(int(sys.argv[2:] == ["fails"]))
name = sys.argv[1]
signal.signal(signal.SIGTERM, told)
if name == "torchrun":
    signal.signal(signal.SIGTERM, lambda *_: print("torchrun ends its ranks", flush=True))
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    sys.exit(os.spawnv(os.P_WAIT, sys.executable, ["python", "-c", os.environ["CODE"], "rank"]))
worker = os.fork()
if worker == 0:
    name = "a loader worker"
time.sleep(1000)
"""
TRAINING = f'{sys.executable} -c "$CODE"'


@pytest.mark.parametrize("local_rank", [None, "0"])  # of a rank that has started supervise.py
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (f"{TRAINING} rank", 0),
        (f"{TRAINING} rank | tee $LOG", 0),
        (f"set -o pipefail; {TRAINING} rank fails | tee $LOG", 1),
        (f"trap 'echo the end' EXIT; {TRAINING} rank; :", 0),
        (f"{TRAINING} torchrun", 0),
    ],
)
def test_a_stop_is_for_the_processes_that_handle_it(tmp_path, supervise, command, code, local_rank):
    """Not for a `tee`, which would lose the last lines, nor for torchrun or loader workers."""
    env = {"CODE": TOLD, "LOG": str(tmp_path / "log"), "MAX_DURATION": "3"}
    env |= {"LOCAL_RANK": local_rank} if local_rank else {}
    exit_code, text = supervise("bash", "-c", command, **env)
    lines = [line for line in text.splitlines() if " save" in line and "supervise.py" not in line]
    assert lines == ["rank saves", "rank has saved"] and "ends its ranks" not in text, text
    assert exit_code == code, text
    if "tee" in command:
        assert (tmp_path / "log").read_text() == "".join(f"{line}\n" for line in lines)


def test_a_killed_supervisor_leaves_no_training_behind_and_the_next_one_logs_it(
    tmp_path, fake, start, supervise
):
    process = start(*fake)
    wait_for_attempt(tmp_path)
    process.kill()
    process.communicate(timeout=30)  # the training has the other end of the pipe
    step = int((tmp_path / "run/step").read_text())
    code, text = supervise(*fake, MAX_DURATION="1")
    assert code == 0, text
    first, second = attempts(tmp_path)
    assert first["cause"] == "killed" and second["start_step"] == step


# Its training, in a session of its own, stops after SIGTERM, as when the launcher dies.
ORPHANED = """
setsid "$@" &
if [[ "$ATTEMPT" == 1 ]]; then
  until [[ -s "$LOG" ]]; do sleep 0.1; done
  kill -TERM $!
  wait
  END
fi
wait
"""


@pytest.mark.parametrize("end", ["kill -KILL $$", "exit 255"], ids=["killed", "connection lost"])
def test_a_training_that_stopped_because_its_launcher_failed_is_resumed(tmp_path, fake, start, end):
    launcher = ["bash", "-c", ORPHANED.replace("END", end), "bash"]
    process = start(*launcher, *fake, LOG=str(tmp_path / "run/attempts.jsonl"))
    wait_for_attempt(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=120)
    assert causes(tmp_path) == ["killed", "stopped"], text


LAUNCHES_A_SESSION = 'if [[ "$ATTEMPT" == 2 ]]; then exec "${@:4}"; fi; setsid "${@:1:3}"; :'


def test_ranks_whose_launcher_was_killed_end_before_the_restart(tmp_path, fake, start):
    """They are in a session of their own, as the ranks of torchrun are."""
    rank = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(1000)"]
    process = start("bash", "-c", LAUNCHES_A_SESSION, "bash", *rank, *fake)
    assert process.stdout.readline() == "ready\n"
    (launcher,) = map(int, subprocess.check_output(["pgrep", "-P", str(process.pid)]).split())
    (rank,) = map(int, subprocess.check_output(["pgrep", "-P", str(launcher)]).split())
    os.kill(launcher, signal.SIGKILL)
    wait_for_attempt(tmp_path)
    assert not {launcher, rank} & set(processes_with("MARK", tmp_path))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert not processes_with("MARK", tmp_path)


CRASH_FIRST = 'if [[ "$ATTEMPT" == 1 ]]; then exit 1; fi; exec "$@"'  # its next attempt is newer


@pytest.mark.long  # the trainer waits two minutes for the lock
def test_a_second_supervisor_in_one_job_leaves_the_run_of_the_first_alone(
    tmp_path, tiny, start, supervise
):
    job = {"SLURM_JOB_ID": str(os.getpid())}
    command = [*TRAIN, *tiny, f"--checkpoint-dir={tmp_path}/run", FOREVER]
    first = start(*command, **job)
    wait_for_attempt(tmp_path)
    log_before = (tmp_path / "run/attempts.jsonl").read_text()
    code, text = supervise("bash", "-c", CRASH_FIRST, "bash", *command, **job)
    assert code == 2 and "is in use by" in text and "a restart would not help" in text
    assert (tmp_path / "run/attempts.jsonl").read_text() == log_before
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=120)
    assert first.returncode == 0 and causes(tmp_path / "run") == ["stopped"]


def test_two_supervised_runs_in_one_job_are_both_logged(tmp_path, fake, supervise):
    """Their attempts have the same name, JOB.1, if the first supervisor has ended."""
    for _ in range(2):
        code, text = supervise(*fake, PBS_JOBID="7", MAX_DURATION="1")
        assert code == 0, text
    assert [record["attempt"] for record in attempts(tmp_path)] == ["7.1", "7.1"]


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


@pytest.mark.parametrize("status", [{"saved_step": "5", "global_step": None}, {"run_dir": "a\0b"}])
def test_records_that_are_malformed_or_of_another_program_end_nothing(tmp_path, supervise, status):
    command = [sys.executable, "-c", MALFORMED, tmp_path, json.dumps(status)]
    code, text = supervise(*command)
    assert code == 0 and text.count("Restart 1 of 10") == 1 and "Traceback" not in text, text


@pytest.mark.parametrize("value", ["junk", "nan", "-1"])
def test_a_variable_that_is_not_a_number_is_named(tmp_path, supervise, value):
    code, text = supervise("true", MAX_RESTARTS=value)
    assert code == 2 and not list(tmp_path.iterdir())
    assert "MAX_RESTARTS" in text and value in text


def test_a_command_that_does_not_exist_touches_nothing(tmp_path, supervise):
    code, text = supervise("no-such-command")
    assert "no-such-command" in text
    assert code == 2 and not list(tmp_path.iterdir())


def test_a_dry_run_touches_nothing(tmp_path, supervise):
    code, _ = supervise(*CRASH, DRY_RUN="1")
    assert code == 1 and not list(tmp_path.iterdir())


def test_an_old_python_is_reported_in_one_sentence():
    code = "import runpy, sys; sys.version_info = (3, 6, 8); sys.argv = sys.argv[1:]; "
    code += f"sys.path[0] = {str(SUPERVISE.parent)!r}; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    commands = [[sys.executable, "-c", code], *([python] for python in OLD_PYTHONS)]
    for command in commands:
        words = [*command, SUPERVISE, "true"]
        result = subprocess.run(words, capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (2, "")
        assert "is not Python 3.8 or newer" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("file", ["supervise.py", "scheduler.py", "ssh/launch.py", "ssh/node.py"])
def test_python_3_6_can_read_the_file(file):
    ast.parse((REPO / "scripts" / file).read_text(), feature_version=(3, 6))


# ------------------------------------------------------------------------------ events, ON_EVENT

REPORTS_EVENTS = """
import os
with open(os.environ["EVENTS_FILE"], "w") as file:
    file.write('{"event": "slow_rank", "ranks": [1]}\\n{"event": "half')
"""


def test_events_of_the_ranks_are_recorded(tmp_path, supervise):
    code, text = supervise(sys.executable, "-c", REPORTS_EVENTS)
    assert code == 0, text
    (attempt,) = attempts(tmp_path / "logs")
    assert attempt["events"] == [{"event": "slow_rank", "ranks": [1]}]
    assert names_in(tmp_path / "logs") == ["attempts.jsonl"]


def test_a_command_is_run_after_each_attempt(tmp_path, supervise):
    supervise(*CRASH, ON_EVENT=f"cat >>{tmp_path}/events; echo >>{tmp_path}/events")
    lines = (tmp_path / "events").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["next"] for record in records] == [*["restart"] * 4, CRASHES]
    logged = attempts(tmp_path / "logs")
    assert [record | attempt for record, attempt in zip(records, logged)] == records


def test_neither_the_training_nor_ps_shows_a_secret_of_on_event(tmp_path, supervise):
    seen = tmp_path / "seen"
    look = f"cat /proc/[0-9]*/cmdline 2>/dev/null | grep -ac 'SECRE[T]' >{seen}"
    hook = write_program(tmp_path / "hook", f"cat >/dev/null\n{look}")
    code, text = supervise("env", ON_EVENT=f"export URL=SECRET; sh {hook}")
    assert code == 0 and seen.read_text() == "0\n" and "SECRET" not in text, text


RUN_ON_EVENT = """
import supervise
supervise.ON_EVENT_SECONDS = 1
supervise.prctl(supervise.PR_SET_CHILD_SUBREAPER, 1)
supervise.run_on_event({"reason": "x" * 200_000})
"""


@pytest.mark.parametrize("command", ["exit 3", "sleep 1000 & wait"])
def test_a_command_that_fails_or_hangs_is_one_warning(tmp_path, command):
    env = os.environ | {"ON_EVENT": command, "MARK": str(tmp_path)}
    words = [sys.executable, "-c", RUN_ON_EVENT]
    result = subprocess.run(words, cwd=SUPERVISE.parent, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.count("\n") == 1
    assert not processes_with("MARK", tmp_path)


# ------------------------------------------------------------------------------------ decisions


HELPLESS = "a restart would not help"
ASKED = "a stop was requested"
CRASHES = "5 crashes without progress"
STARTS = "in 3 starts of this job in a row, no new step was saved"
FIVE = "MAX_RESTARTS=5 is reached"
HANG = {"silent_hosts": ["n2"]}
LOST = {"cause": "node lost", **HANG}
SPARE = {"wanted": 1}


@pytest.mark.parametrize(
    ("decision", "if_refused", "cause", "facts"),
    [
        ("finish", "finish", "finished", {}),
        ("finish", "finish", "ended", {}),
        ("stop", "stop", "stopped", {"reason": ""}),  # --stop-at-step
        ("stop", "stop", "stopped", {"reason": "SIGINT"}),
        ("requeue", "stop", "stopped", {"reason": "time limit"}),
        ("requeue", "stop", "stopped", {"reason": "SIGCONT, SIGTERM"}),
        ("restart", "restart", "stopped", {"reason": "time limit", "time_left": 500}),  # was raised
        (STARTS, STARTS, "stopped", {"reason": "time limit", "starts": 3}),
        ("restart", "restart", "exception", {}),
        ("restart", "restart", "hang", {"crashes": 4}),
        ("requeue", CRASHES, "hang", {"crashes": 5}),
        ("requeue", CRASHES, "exception", {"failure": {"host": "n2"}, "crashes": 5}),
        (STARTS, STARTS, "hang", {"crashes": 5, "starts": 3}),
        (FIVE, FIVE, "disk", {"count": 6}),
        (HELPLESS, HELPLESS, "NaN", {"signals": ["SIGTERM"]}),
        (HELPLESS, HELPLESS, "configuration", {}),
        (HELPLESS, HELPLESS, "in use", {}),
        (ASKED, ASKED, "killed", {"signals": ["SIGINT"]}),
        (ASKED, ASKED, "hang", {"signals": ["SIGTERM", "SIGINT"]}),
        ("requeue", ASKED, "exception", {"signals": ["SIGUSR1"]}),
        ("requeue", ASKED, "killed", {"stopping_since": 1}),  # at the time limit
        # The node n2 is suspect from the second time on.
        ("restart", "restart", "node lost", {"failure": LOST}),
        ("requeue", "restart", "node lost", {"failure": LOST, "strikes": ["n2"]}),
        ("spare", "spare", "node lost", {"failure": LOST, "strikes": ["n2"], **SPARE}),
        (CRASHES, CRASHES, "node lost", {"crashes": 5, "starts": 3}),
        ("restart", "restart", "hang", {"failure": HANG}),
        ("requeue", "restart", "hang", {"failure": HANG, "strikes": ["n2"]}),
        ("spare", "spare", "hang", {"failure": HANG, "strikes": ["n2"], **SPARE}),
        ("spare", "spare", "exception", {"failure": {"host": "n2"}, "strikes": ["n2"], **SPARE}),
        ("restart", "restart", "port", {"failure": {"host": "n2"}, "strikes": ["n2"], **SPARE}),
        ("restart", "restart", "exception", {"failure": {"host": "n2"}, **SPARE}),
        ("requeue", "restart", "exception", {"gpu": "n2"}),
        ("spare", "spare", "configuration", {"gpu": "n2", **SPARE}),
    ],
)
@pytest.mark.parametrize("is_refused", [False, True])
def test_the_decision_after_each_kind_of_end(
    supervisor, monkeypatch, is_refused, decision, if_refused, cause, facts
):
    """What the table says."""
    module, us = supervisor
    facts = {**facts}
    monkeypatch.setenv("MAX_RESTARTS", "5")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    us.job_nodes = us.nodes = ["n1", "n2"]
    us.count, us.crashes, us.failure = 1, 1, {}
    starts, left, gpu = (facts.pop(n, d) for n, d in (("starts", 1), ("time_left", 9), ("gpu", 0)))
    us.starts_without = lambda *kinds: starts
    us.time_left = lambda: left
    us.record = lambda attempt: None
    excluded = []
    answer = "refused" if is_refused else "requeued"
    monkeypatch.setattr(module, "requeue", lambda nodes: excluded.extend(nodes) or answer)
    attempt = {"cause": cause, "reason": facts.pop("reason", ""), "events": []}
    if gpu:
        attempt["events"] = [{"event": "gpu_failed", "host": gpu}]
    vars(us).update(facts)
    us.refused = True  # earlier
    assert us.decide(attempt) == (if_refused if is_refused else decision)
    is_suspect = gpu or "strikes" in facts
    assert excluded == (["n2"] if is_suspect and decision == "requeue" else [])
    assert us.refused == (is_refused and decision == "requeue")


def test_the_documentation_has_the_same_table():
    page = (REPO / "docs/RELIABILITY.md").read_text()
    for name, row in load(SUPERVISE).TABLE.items():
        cells = (name, row.evidence, row.first, ", ".join(row.then), row.gives_up)
        assert f"| {' | '.join(cells)} |".replace("|  ", "| ") in page, name


STARTS_SLOWLY = "import time; time.sleep(30)"


@pytest.mark.parametrize("kind", ["stops", "is killed"])
def test_a_job_that_saves_no_new_step_in_three_starts_is_not_requeued(
    tmp_path, fake, supervise, kind, job
):
    """Its time is shorter than its start-up. scontrol stands for Slurm."""
    command = [sys.executable, "-c", STARTS_SLOWLY]
    if kind == "stops":
        (tmp_path / "fake.py").write_text(FAKE.replace("saved_step=step", "saved_step=start"))
        command = [*fake, tmp_path / "run"]
    for start in range(4):
        code, text = supervise(
            *command, **job, MAX_DURATION="1", STOP_SECONDS="1", SLURM_RESTART_COUNT=str(start)
        )
        assert requeues(tmp_path) == min(start + 1, 2), text
        gave_up = "in 3 starts of this job in a row, no new step was saved" in text
        assert gave_up == (start >= 2), text


def test_a_training_that_does_not_stop_at_the_time_limit_is_killed_in_time_for_the_requeue(
    tmp_path, supervise, job
):
    """Although STOP_SECONDS, 300 by default, would end after the job."""
    end = time.time() + 20
    command = [sys.executable, "-c", IGNORES_SIGTERM.replace("1000", "40")]
    code, text = supervise(*command, **job, END=time.strftime("%FT%T", time.localtime(end)))
    (attempt,) = attempts(tmp_path / "logs")
    assert attempt["cause"] == "killed" and requeues(tmp_path) == 1, text
    assert attempt["end"] < end + 9  # kill_command() takes some seconds if SIGTERM is ignored


def test_a_job_that_saves_new_steps_is_requeued_without_a_limit(tmp_path, fake, supervise, job):
    for start in range(4):
        code, text = supervise(*fake, **job, MAX_DURATION="1", SLURM_RESTART_COUNT=str(start))
        assert code == 0, text
    assert requeues(tmp_path) == 4


def test_the_command_that_resumes_does_not_stop_at_the_same_step_again(monkeypatch):
    module = load(SUPERVISE)
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    for option in (["--stop-at-step", "5"], ["--stop-at-step=5"]):
        monkeypatch.setattr(sys, "argv", ["supervise.py", "my train", *option, "--lr=1"])
        assert module.how_to_resume() == "supervise.py 'my train' --lr=1"


def test_restarts_without_progress_are_further_and_further_apart(supervisor, monkeypatch):
    _, us = supervisor
    monkeypatch.delenv("RESTART_PAUSE")
    pauses = []
    for us.crashes in range(6):  # 0: it has made progress
        pauses.append(us.pause())
    assert pauses == [10, 10, 30, 90, 300, 300]


def test_a_stop_request_ends_the_pause(tmp_path, start):
    hook = f"cat >>{tmp_path}/events; echo >>{tmp_path}/events"
    process = start(*CRASH, RESTART_PAUSE="1000", ON_EVENT=hook)
    assert "Restart 1 of 10 in 1000 s" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and ASKED in text
    (event,) = (tmp_path / "events").read_text().splitlines()  # what has happened
    assert json.loads(event)["next"] == ASKED


@pytest.mark.parametrize(
    ("answers", "is_done", "exit_code"),
    [
        (["no answer", "no answer", "requeued"], True, 0),
        (["no answer", "refused"], False, 1),
        (["failed"] * 30, False, 1),
        (["ended"], False, 0),  # scancel
    ],
)
def test_a_requeue_is_tried_until_slurm_answers(
    supervisor, monkeypatch, answers, is_done, exit_code
):
    module, us = supervisor
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(module, "REQUEUE_SECONDS", 0)
    monkeypatch.setattr(module, "requeue", lambda _: answers.pop(0))
    assert (us.obstacle_to_requeue({"cause": "stopped"}, []) is None) == is_done and not answers
    assert us.exit_code("requeue" if is_done else "stop", "stopped") == exit_code


def test_a_file_shows_the_progress_of_a_script_without_a_status(supervisor, monkeypatch, tmp_path):
    module, _ = supervisor
    attempt = {"world_size": None, "start": 0, "end": 1000}
    assert module.progress(attempt, 0) == "time"
    monkeypatch.setenv("PROGRESS_FILE", f"{tmp_path}/**/*.pt")
    before = module.last_change()
    assert module.progress(attempt, before) == ""
    (tmp_path / "epoch 1").mkdir()
    (tmp_path / "epoch 1/model.pt").touch()
    assert module.progress(attempt, before) == "file"


def test_starts_that_show_no_progress_end(supervisor):
    _, us = supervisor
    records = [{"attempt": f"{us.job}.{n}001", "end": 1, "progress": "time"} for n in range(12)]
    us.log_records = lambda: records
    assert us.starts_without("step", "file", "time") == 0
    assert us.starts_without("step", "file") == 12
    records[5]["progress"] = "file"
    assert us.starts_without("step", "file") == 6


def test_the_end_of_the_job_is_asked_again_and_kept_if_slurm_does_not_answer(
    supervisor, monkeypatch
):
    module, us = supervisor
    now = time.time()
    for answer, left, reserve in (
        (now + 10_000, 9_880, ""),
        (now + 5_000, 4_880, ""),  # scontrol update TimeLimit
        (None, 4_880, ""),
        (None, 4_000, "1000"),
    ):
        monkeypatch.setattr(module, "end_of_job", lambda answer=answer: answer)
        monkeypatch.setenv("RESERVE_SECONDS", reserve)
        us.asked_at = 0
        assert us.time_left() == pytest.approx(left, abs=10)


# ----------------------------------------------------------------------- the state of Slurm, PBS


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("", "refused"),
        ("exit 1", "no answer"),
        ("[ $1 = show ] && echo JobState=RUNNING && exit; exit 1", "failed"),
        ("echo operation is presently disabled >&2; exit 1", "refused"),
    ],
)
def test_a_slurm_that_does_not_answer_does_not_count_as_requeued(
    monkeypatch, tmp_path, program, answer
):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    if program:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "scontrol").chmod(0o755)
    assert scheduler.requeue() == answer


@pytest.mark.parametrize(
    ("facts", "minutes"),
    [
        ("    Resource_List.walltime = 01:30:00\n    stime = {}\n", 90),  # OpenPBS
        ("    Resource_List.walltime = 1:00:01:00\n    start_time = {}\n", 24 * 60 + 1),  # Torque
        ("    stime = {}", None),
        ("", None),
    ],
)
def test_the_deadline_comes_from_qstat(monkeypatch, facts, minutes):
    start = int(time.time())
    text = f"Job Id: 7.server\n{facts.format(time.ctime(start))}\n\n" if facts else None
    monkeypatch.setattr(scheduler, "output_of", lambda *words: text)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PBS_JOBID", "7.server")
    assert scheduler.end_of_job() == (start + 60 * minutes if minutes else None)


# ------------------------------------------------------------------------ nodes that are left out

LAUNCHER = """
import json, os, sys
env = os.environ
failures = json.loads(sys.argv[1])
with open(env["NODES_FILE"], "w") as file:
    file.write("n1.site\\nn2.site\\nn3.site")
number = int(env["ATTEMPT"])
print("attempt", number, "without", env.get("EXCLUDED_NODES"), flush=True)
if number > len(failures):
    sys.exit()
failure = {"cause": "hang", "reason": "it is", "host": "n1", "rank": 0, **failures[number - 1]}
with open(env["FAILURE_FILE"], "w") as file:
    json.dump(failure, file)
sys.exit(1)
"""
SILENT = {"silent_hosts": ["n2"]}


def test_a_node_that_did_not_answer_in_two_hangs_is_replaced_by_a_spare(tmp_path, supervise):
    command = [sys.executable, "-c", LAUNCHER, json.dumps([SILENT, SILENT])]
    code, text = supervise(*command, NNODES="2")
    assert code == 0, text
    assert "attempt 2 without None\n" in text and "attempt 3 without n2.site\n" in text
    events = [attempt["events"] for attempt in attempts(tmp_path)]
    assert events == [[], [], []]
    assert names_in(tmp_path / "logs") == ["attempts.jsonl"]


@pytest.fixture
def supervisor(monkeypatch, tmp_path):
    """A Supervisor that has not started anything, and its module."""
    module = load(SUPERVISE)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("EXCLUDED_NODES", "NNODES", "SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LOG_DIR", str(tmp_path))
    us = module.Supervisor(["true"])
    us.files, us.failure = tmp_path, {}
    return module, us


def left_out_after(us, *failures, nnodes: int = 1) -> list[str]:
    """The hosts left out after attempts of a launcher with three hosts that failed like this."""
    us.wanted, us.launcher_hosts = nnodes, ["n1.site", "n2.site", "n3.site"]
    us.record = lambda attempt: None
    for failure in failures:
        us.failure = failure
        events = [{"event": "gpu_failed", "host": failure["gpu"]}] if "gpu" in failure else []
        attempt = {"cause": failure.get("cause", "hang"), "events": events, "world_size": 4}
        us.crashes = us.count = 1
        us.decide({**attempt, "reason": "", "saved_step": 0, "start_step": 0})
    return us.left_out


@pytest.mark.parametrize(
    ("failures", "nnodes", "expected"),
    [
        ([SILENT] * 2, 2, ["n2.site"]),
        ([SILENT] * 3, 3, []),  # no spare
        ([SILENT] * 3, 0, []),  # no NNODES
        ([{"silent_hosts": ["n2", "n3"]}] * 3, 1, []),
        ([{"silent_hosts": ["n9"]}] * 3, 1, []),  # another host
        ([SILENT] * 2 + [{"silent_hosts": ["n3"]}] * 3, 2, ["n2.site"]),  # the spare is in use
        # The last node is not left out.
        ([{"gpu": "n1"}, {"gpu": "n2"}, {"gpu": "n3"}], 1, ["n1.site", "n2.site"]),
    ],
)
def test_a_node_is_left_out_only_for_certain_evidence_and_if_there_is_a_spare(
    supervisor, failures, nnodes, expected
):
    _, us = supervisor
    assert left_out_after(us, *failures, nnodes=nnodes) == expected


def test_no_node_is_left_out_for_errors_without_evidence(supervisor):
    _, us = supervisor
    failures = [
        {"cause": "port", "reason": "cannot reach", "host": "n2", "rank": 3},
        {"cause": "configuration", "reason": "no such file", "host": "n2"},
        {"cause": "hang", "reason": "rank 3 is at", "host": "n1", "silent_hosts": []},
        {},  # killed
    ]
    assert left_out_after(us, *failures * 4) == []


@pytest.mark.parametrize(
    ("reporting", "expected"),
    [(["n1"], "configuration"), (["n2"], "node lost"), (["n1", "n2"], "configuration")],
)
def test_a_user_error_of_one_other_node_alone_is_that_nodes(supervisor, reporting, expected):
    """A mount, Python or a package is missing there."""
    _, us = supervisor
    us.job_nodes = ["n1", "n2", "n3"]
    for host in reporting:
        failure = {"cause": "configuration", "reason": "no torch", "host": host}
        (us.files / f"FAILURE_FILE.{host}").write_text(json.dumps(failure))
    us.failure = failure
    assert us.cause(2, {})[0] == expected
    assert sorted(us.evidence("node lost")) == reporting


def test_the_node_whose_ranks_never_came_is_found(supervisor):
    _, us = supervisor
    us.job_nodes = ["n1", "n2", "n3"]
    us.failure = {"cause": "node lost", "reason": "ranks 2-3", "host": "n1", "rank": 0}
    us.failure["started_hosts"] = ["n1.site", "n3.site"]
    assert us.cause(2, {})[0] == "node lost" and us.evidence("node lost") == ["n2"]


def test_the_node_that_does_not_start_the_program_is_found(supervisor, monkeypatch, tmp_path):
    """A stand-in for srun, which exits with 2 if a node cannot execute the program."""
    _, us = supervisor
    write_program(tmp_path / "bin/srun", 'case "$*" in *=n2*) exit 2;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    us.job_nodes = us.nodes = ["n1", "n2", "n3"]
    us.command = ["srun", "--export=ALL", "scripts/cluster_train.sh"]
    assert us.cause(2, {})[0] == "node lost" and us.evidence("node lost") == ["n2"]
    us.nodes = ["n1", "n3"]
    assert us.lost_nodes() == []


def test_all_nodes_are_asked_together_whether_they_start_the_program(monkeypatch, tmp_path):
    """The stand-in for srun answers once it has been started for both nodes."""
    wait = f"until set -- {tmp_path}/[0-9]*; [ $# = 2 ]; do sleep 0.1; done"
    write_program(tmp_path / "bin/srun", f"touch {tmp_path}/$$; {wait}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert scheduler.nodes_without("train", ["n1", "n2"]) == []  # it gives each 20 s


@pytest.mark.parametrize(("name", "is_reached"), [("srun", False), ("python", True)])
def test_sigquit_reaches_our_launchers_but_not_srun(tmp_path, start, name, is_reached):
    """It would end the step of srun."""
    told = "trap 'exit 3' QUIT; sleep 0.5; echo runs; sleep 3 & wait"  # known by then
    program = write_program(tmp_path / name, told)
    process = start(program, "scripts/cluster_train.sh", MAX_RESTARTS="0")
    assert "runs" in process.stdout.readline()
    process.send_signal(signal.SIGQUIT)
    text, _ = process.communicate(timeout=60)
    assert (process.returncode != 0) == ("exit code 3" in text) == is_reached, text


def test_only_srun_is_told_the_nodes_and_the_master(supervisor, monkeypatch):
    """A launcher that uses ssh, inside an allocation, has hosts of its own."""
    _, us = supervisor
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    us.job_nodes = us.nodes = ["n1", "n2"]
    assert us.command_on_nodes() == ["true"] and "MASTER_ADDR" not in us.environment()
    us.command = ["srun", "x"]
    assert us.command_on_nodes() == ["srun", "--nodes=2", "--nodelist=n1,n2", "x"]
    assert us.environment()["MASTER_ADDR"] == "n1" and us.environment()["MASTER_PORT"]


def test_the_nodes_beyond_nnodes_are_spares():
    module = load(SUPERVISE)
    assert module.choose_nodes(["a", "b", "c"], [], 2) == ["a", "b"]
    assert module.choose_nodes(["a", "b", "c"], ["a"], 2) == ["b", "c"]
    assert module.choose_nodes(["a", "b", "c"], ["a", "b"], 2) == ["a", "b"]  # too few are left
    assert module.choose_nodes(["a", "b"], ["a"], 0) == ["b"]


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        (["scripts/ssh/launch_singlenode.sh", "a.yaml"], True),
        (["bash", "scripts/cluster_train.sh"], True),
        (["python", "scripts/guard.py", "train.py"], False),
        (["python", "/home/me/scripts/train.py"], False),
        (["srun", "scripts/cluster_train.sh"], False),
    ],
)
def test_only_launchers_of_this_repository_forward_a_stop_themselves(monkeypatch, command, ours):
    monkeypatch.chdir(REPO)
    assert load(SUPERVISE).is_ours(command) == ours


def test_a_limit_that_was_taken_away_has_no_end(monkeypatch):
    monkeypatch.setattr(scheduler, "slurm_id", lambda: "7")
    monkeypatch.setattr(scheduler, "slurm_job", lambda: {"EndTime": "Unknown"})
    assert scheduler.end_of_job() == float("inf")
