"""supervise.py: what it starts, stops, reads, prints and writes. What it decides: test_policy.py.

A script without torch stands for the training, except in one test of the trainer itself.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import scheduler
from harness import OLD_PYTHONS, REPO, load, processes_with, wait_until, write_program
from policy import END, Attempt, Decision, Report

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


def wait_for_training(directory) -> None:
    """Until supervise.py knows the run directory of the fake training."""
    step = directory / "run/step"
    wait_until(lambda: step.exists() and int(step.read_text() or 0) > 30, "no training")


DECISION = Decision("killed", "", (), "requeue", 0, "")
CRASH = [sys.executable, "-c", "raise SystemExit(1)"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_is_logged_in_the_run_directory(tmp_path, fake, start, supervise, number):
    """Only the training knows which that is. At SIGHUP, the terminal is closed."""
    process = start(*fake, STOPPED_EXIT_CODE="75")
    wait_for_training(tmp_path)
    if number == signal.SIGHUP:
        process.stdout.close()
    process.send_signal(number)
    assert process.wait(timeout=120) == 75
    (attempt,) = attempts(tmp_path / "run")
    assert (attempt["cause"], attempt["reason"]) == ("stopped", number.name)
    assert attempt["saved_step"] > 30 and attempt["recomputed"] == 0
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize(
    ("received", "facts", "requests"),
    [
        ("SIGUSR1", {"PreemptTime": "None"}, []),
        ("SIGTERM", {"PreemptTime": "2026-11-28T20:00:00"}, ["preempted"]),
        ("", {"JobState": "COMPLETING"}, ["preempted"]),
        ("", {"JobState": "CANCELLED"}, ["scancel"]),
        ("", {}, []),  # no answer
    ],
)
def test_a_stop_that_only_the_ranks_were_asked_for(
    supervisor, monkeypatch, received, facts, requests
):
    """run_torchrun.py and guard.py write the signal to STOP_FILE; Slurm knows of a preemption."""
    _, us = supervisor
    monkeypatch.setattr(scheduler, "slurm_job", lambda: facts)
    us.command = ["bash", "-c", f'echo -n "{received}" >"$STOP_FILE"; exit 143']
    attempt = us.attempt()
    assert (attempt.exit_code, attempt.of_ranks) == (-signal.SIGTERM, received)
    assert [*attempt.requests] == requests


def test_a_time_limit_that_the_training_knows_is_the_nearest(supervisor):
    _, us = supervisor
    us.requests.ends.update(DEADLINE=time.time() + 9e4, MAX_DURATION=time.time() + 9e5)
    us.add_requests_of({"state": "stopped", "reason": "time limit"}, "")
    assert [*us.requests.made] == ["DEADLINE"]
    us.requests.made.clear()
    us.add_requests_of({"state": "stopped", "reason": "STOP file"}, "")
    assert [*us.requests.made] == ["STOP"]


def test_a_stop_waits_for_no_disk_and_no_scheduler(supervisor, monkeypatch, tmp_path):
    """Both never answer. The training is stopped nevertheless, and killed once its time is over."""
    module, us = supervisor
    never = threading.Event()
    no_status = module.read_status(tmp_path)
    monkeypatch.setattr(module, "read_status", lambda _: never.wait() and no_status)
    monkeypatch.setattr(module.Path, "touch", lambda _: never.wait())
    monkeypatch.setattr(module, "ASK_SECONDS", 0.1)
    us.command = [sys.executable, "-c", SAVES_SLOWLY, tmp_path / "saved"]

    def stop_when_ready():
        wait_until((tmp_path / "saved ready").exists, "no handler")
        us.requests.on_signal(signal.SIGTERM, None)

    threading.Thread(target=stop_when_ready).start()
    files = {name: tmp_path / name for name in module.FILES}
    code = us.run({**os.environ}, files)
    never.set()
    wait_until(lambda: threading.active_count() == 1, "a thread runs on")
    assert code == 0 and (tmp_path / "saved").exists()


@pytest.mark.parametrize("by", ["STOP", "SIGTERM"])
def test_a_request_ends_the_pause(tmp_path, fake, start, by):
    process = start(*fake, "crash", RESTART_PAUSE="1000")
    assert "Restart 1 in 1000 s" in process.stdout.readline()
    if by == "STOP":
        (tmp_path / "run/STOP").touch()
    else:
        process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and f"stopped ({by})" in text, text
    assert not (tmp_path / "run/STOP").exists() and causes(tmp_path) == ["killed"]


@pytest.mark.parametrize("submitted", [100, 300])
def test_a_stop_file_is_for_each_job_that_was_submitted_before(supervisor, tmp_path, submitted):
    """The first job of a chain has removed the file, and says so in the attempt log."""
    _, us = supervisor
    record = Attempt([], 0, requests={"STOP": 200})._asdict()
    (tmp_path / "attempts.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "status").write_text(json.dumps({"state": "running", "run_dir": str(tmp_path)}))
    us.requests.submitted = submitted
    us.look_for_status(tmp_path / "status", threading.Event())
    assert ("STOP" in us.requests.made) == (submitted == 100)


def test_after_a_deadline_nothing_is_started(tmp_path, supervise):
    code, text = supervise("touch", tmp_path / "started", DEADLINE="1")
    assert code == 0 and "stopped (DEADLINE)" in text, text
    assert not (tmp_path / "started").exists()


IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("again", [True, False])
def test_what_does_not_stop_is_killed_by_a_second_ctrl_c_or_after_stop_seconds(
    tmp_path, start, again
):
    process = start(sys.executable, "-c", IGNORES_SIGTERM, STOP_SECONDS="1000" if again else "1")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    if again:
        assert "to save and stop" in process.stdout.readline()
        time.sleep(1.1)  # an impatient second one within a second does not count
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "stopped (SIGINT)" in text
    assert causes(tmp_path) == ["killed"]


SAVES_SLOWLY = """
import signal, sys, time
def save(*_):
    time.sleep(2)
    open(sys.argv[1], "w")
    sys.exit()
signal.signal(signal.SIGTERM, save)
open(f"{sys.argv[1]} ready", "w")
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_scheduler_that_kills_the_shell_around_it_lets_the_training_save(tmp_path, start, job):
    """Then, the job is requeued. scontrol stands for Slurm."""
    command = [sys.executable, "-c", SAVES_SLOWLY, tmp_path / "saved"]
    process = start("bash", "-c", '"$@"; :', "bash", *command, **job)  # it would exec the last one
    assert process.stdout.readline() == "ready\n"
    shell = int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))
    process.send_signal(signal.SIGTERM)
    os.killpg(shell, signal.SIGTERM)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and requeues(tmp_path) == 1, text
    assert (tmp_path / "saved").exists() and causes(tmp_path / "logs") == ["stopped"]


# Each process that handles SIGTERM writes a line when it gets it, at once: print() may write parts.
# The rank has a helper in a session of its own, as wandb starts one, and ends it in the end.
TOLD = """
import os, signal, sys, time
def told(*_):
    os.write(1, f"{name} saves\\n".encode())
    time.sleep(1)
    os.write(1, f"{name} has saved\\n".encode())
    os.kill(worker, 9)
    os.kill(helper, 9)
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
else:
    helper = os.fork()
    if helper == 0:
        name = "a helper"
        os.setsid()
    else:
        while os.getsid(helper) != helper:
            time.sleep(0.01)
        os.write(1, b"ready\\n")
time.sleep(1000)
"""
TRAINING = f'{sys.executable} -c "$CODE"'


@pytest.mark.parametrize(
    ("command", "code", "limit"),
    [
        (f"{TRAINING} rank", 0, "10"),
        (f"{TRAINING} rank | tee $LOG", 0, ""),
        (f"set -o pipefail; {TRAINING} rank fails | tee $LOG", 1, ""),
        (f"trap 'echo the end' EXIT; {TRAINING} rank; :", 0, ""),
        (f"{TRAINING} torchrun", 0, ""),
    ],
)
def test_a_stop_is_for_the_processes_that_handle_it(tmp_path, start, command, code, limit):
    """Not for a `tee`, which would lose the last lines, nor for torchrun or loader workers."""
    env = {"CODE": TOLD, "LOG": str(tmp_path / "log"), "MAX_DURATION": limit}
    env["LOCAL_RANK"] = "0"  # a rank may have started supervise.py
    process = start("bash", "-c", command, **env)
    text = ""
    for line in process.stdout:
        text += line
        if line == "ready\n" and not limit:
            process.send_signal(signal.SIGTERM)
    lines = [line for line in text.splitlines() if " save" in line and "supervise.py" not in line]
    assert lines == ["rank saves", "rank has saved"] and "ends its ranks" not in text, text
    assert process.wait() == code, text
    if "tee" in command:
        assert (tmp_path / "log").read_text() == "\n".join(["ready", *lines, ""])


def test_a_killed_supervisor_leaves_no_training_behind(tmp_path, fake, start):
    process = start(*fake)
    wait_for_training(tmp_path)
    process.kill()
    process.communicate(timeout=30)  # the training has the other end of the pipe
    assert not processes_with("MARK", tmp_path)


def test_a_status_that_is_malformed_counts_as_missing(supervisor, tmp_path):
    module, us = supervisor
    for text in ('{"saved_step": "5", "global_step": null}', "[]", "{", '"a"'):
        (tmp_path / "status").write_text(text)
        assert module.read_status(tmp_path / "status") == module.STATUS
    us.learn_run_dir({"run_dir": "a\0b"})
    assert us.run_dir is None


@pytest.mark.parametrize(
    ("command", "env", "error"),
    [
        ("true", {"MAX_RESTARTS": "junk"}, "MAX_RESTARTS is 'junk'"),
        ("true", {"MAX_DURATION": "nan"}, "MAX_DURATION is 'nan'"),
        ("true", {"STOPPED_EXIT_CODE": "256"}, "STOPPED_EXIT_CODE is '256'"),
        ("true", {"LOG_DIR": "/proc/none"}, "/proc/none"),
        ("no-such-command", {}, "cannot start no-such-command: No such file or directory"),
    ],
)
def test_a_user_error_is_one_sentence(supervise, command, env, error):
    code, text = supervise(command, **env)
    assert code == 2 and error in text and "Traceback" not in text, text


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


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ((3, 6), "supervise policy scheduler ssh/launch ssh/node"),
        ((3, 8), "check_training guard hang node_check report"),
    ],
)
def test_an_old_python_can_read_the_files(version, names):
    for name in names.split():
        ast.parse((REPO / f"scripts/{name}.py").read_text(), feature_version=version)


# ------------------------------------------------------------------------------ events, ON_EVENT

REPORTS_EVENTS = """
import os
with open(os.environ["EVENTS_FILE"], "w") as file:
    file.write('{"event": "training", "ranks": [1]}\\n{"event": "half')
"""


def test_a_command_is_run_after_each_attempt(tmp_path, supervise):
    """It and the attempt log have the events of the ranks."""
    on_event = f"cat >>{tmp_path}/events; echo >>{tmp_path}/events"
    supervise(sys.executable, "-c", f"{REPORTS_EVENTS}\nraise SystemExit(1)", ON_EVENT=on_event)
    lines = (tmp_path / "events").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["next"] for record in records] == [*["restart"] * 4, "give up"]
    logged = attempts(tmp_path / "logs")
    assert [record | attempt for record, attempt in zip(records, logged)] == records
    assert [record["events"] for record in logged] == [[{"event": "training", "ranks": [1]}]] * 5
    assert names_in(tmp_path / "logs") == ["attempts.jsonl"]


def test_neither_the_training_nor_ps_shows_a_secret_of_on_event(tmp_path, supervise):
    seen = tmp_path / "seen"
    look = f"cat /proc/[0-9]*/cmdline 2>/dev/null | grep -ac 'SECRE[T]' >{seen}"
    hook = write_program(tmp_path / "hook", f"cat >/dev/null\n{look}")
    code, text = supervise("env", ON_EVENT=f"export URL=SECRET; sh {hook}")
    assert code == 0 and seen.read_text() == "0\n" and "SECRET" not in text, text


RUN_ON_EVENT = """
import supervise
supervise.ON_EVENT_SECONDS = 1
supervise.adopt_orphans()
supervise.run_on_event("x" * 200_000)
"""


@pytest.mark.parametrize("command", ["exit 3", "sleep 1000 & wait"])
def test_a_command_that_fails_or_hangs_is_one_warning(tmp_path, command):
    env = os.environ | {"ON_EVENT": command, "MARK": str(tmp_path)}
    words = [sys.executable, "-c", RUN_ON_EVENT]
    result = subprocess.run(words, cwd=SUPERVISE.parent, env=env, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr.count("\n") == 1
    assert not processes_with("MARK", tmp_path)


# ------------------------------------------------------------------------------------ decisions


def test_a_requeued_job_knows_its_earlier_starts(supervisor, tmp_path):
    """And not another job in the same run directory, nor what is half written."""
    module, us = supervisor
    us.run_dir, us.restarts = tmp_path, 2
    wanted = Attempt(["n1"], 1, [Report("hang", "it is", "n1", ["n1"])], restarts=1, next="requeue")
    for attempt in (wanted, wanted._replace(restarts=2), wanted):
        us.record(attempt._replace(attempt=f"{us.job}.{attempt.restarts}001"), DECISION)
        us.job = "of another"
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 7}\n[]\n{"attempt": "a"}\nnull\n{"at')
    us.job = module.Supervisor(["true"]).job
    assert us.earlier_starts() == [wanted._replace(attempt=f"{us.job}.1001")]


@pytest.mark.parametrize("answers", [[None, None, True], [None, False], [None] * 3])
def test_a_requeue_is_tried_until_slurm_answers(supervisor, monkeypatch, answers):
    module, us = supervisor
    monkeypatch.setattr(module, "REQUEUE_TRIES", 3)
    monkeypatch.setattr(module, "requeue", lambda *_: answers.pop(0))
    last = answers[-1]
    assert us.requeue(Attempt([], 1), DECISION) == last and not answers


@pytest.mark.parametrize(
    ("action", "cause", "was_refused", "stopped_code", "expected"),
    [
        ("finish", "ended", False, "75", 0),
        ("requeue", "killed", False, "75", 0),
        ("stop", "stopped", False, "75", 75),
        ("stop", "stopped", False, "", 0),
        ("stop", "stopped", True, "", 1),
        ("stop", "killed", False, "75", 1),
        ("give up", "hang", False, "", 1),
        ("give up", "NaN", False, "", 2),
    ],
)
def test_the_exit_code(monkeypatch, action, cause, was_refused, stopped_code, expected):
    monkeypatch.setenv("STOPPED_EXIT_CODE", stopped_code)
    decision = Decision(cause, "", (), action, 0, "")
    assert load(SUPERVISE).exit_code(decision, was_refused) == expected


def test_the_reports_of_the_hosts_are_read(supervisor, tmp_path):
    """Whoever wrote them: names with or without a domain, clocks that differ, damaged files."""
    _, us = supervisor
    lost = {"cause": "node lost", "reason": "no", "host": "n1", "started_hosts": ["n1.site", "n3"]}
    named = {"cause": "hang", "reason": 'a "b"', "host": "n2.site", "rank": 1, "hosts": ["n3.site"]}
    named |= {"time": 5, "written": 15}
    contents = [lost, named, {**lost, "hosts": 3}, {**lost, "time": "1"}, {"reason": 1}, []]
    for number, content in enumerate(contents):
        file = tmp_path / f"FAILURE_FILE.n{number}"
        file.write_text(json.dumps(content))
        os.utime(file, (1000 + number, 1000 + number))
    (tmp_path / "FAILURE_FILE").write_text('{"cause": "ha')
    first, *reports = us.reports(tmp_path / "FAILURE_FILE", ["n1", "n2", "n3"], 1)
    assert first[:2] == ("killed", "its report cannot be read") and first.hosts == []
    assert reports[0] == ("node lost", "no", "n1", ["n2"], None, 1000)
    assert reports[1] == ("hang", 'a "b"', "n2", ["n3"], 1, 991)  # 10 s before it was written
    assert [report.cause for report in reports[2:]] == ["killed"] * 4
    assert [report.hosts for report in reports[2:]] == [[]] * 4


def test_a_file_shows_the_progress_of_a_script_without_a_status(supervisor, monkeypatch, tmp_path):
    module, _ = supervisor
    attempt = Attempt([], 1, end=1000)
    assert module.progress(attempt, 0) == "time"
    monkeypatch.setenv("PROGRESS_FILE", f"{tmp_path}/**/*.pt")
    before = module.last_change()
    assert module.progress(attempt, before) == ""
    (tmp_path / "epoch 1").mkdir()
    (tmp_path / "epoch 1/model.pt").touch()
    assert module.progress(attempt, before) == "file"


def test_the_time_for_a_save_is_kept_before_each_limit_and_for_the_requeue(supervisor):
    _, us = supervisor
    us.requests.save_seconds = 900
    began = us.requests.began
    us.requests.ends = {END: began + 5000, "DEADLINE": began + 9000}
    assert (us.requests.reserve(END), us.requests.reserve("DEADLINE")) == (500, 900)
    us.requests.obeyed_at = began + 4500
    assert us.requests.kill_time() == began + 4970
    us.requests.obeyed_at = began + 10
    assert us.requests.kill_time() == began + 910
    us.requests.obeyed_at = began + 5001  # the limit was raised, or Slurm is late
    assert us.requests.kill_time() == began + 5901


# ---------------------------------------------------------------------------- the state of Slurm

CANCELLED_BETWEEN_TWO_TRIES = """[ $1 = show ] && [ -e $0.asked ] && echo JobState=CANCELLED
[ $1 = show ] || [ -e $0.asked ] && exit; : >$0.asked; exit 1"""


@pytest.mark.parametrize(
    ("program", "answer", "lines"),
    [
        ("[ $1 = show ] && exit 1; exit 0", True, 1),
        ("exit 1", None, 1),
        ("[ $1 = show ] && echo JobState=RUNNING && exit; exit 1", None, 1),
        ("echo operation is presently disabled >&2; exit 1", False, 1),
        ("echo JobState=CANCELLED", False, 0),
        (CANCELLED_BETWEEN_TWO_TRIES, False, 1),
        ("echo JobState=COMPLETING Reason=TimeLimit", True, 1),
    ],
)
def test_a_job_counts_as_requeued_if_slurm_says_so_and_a_job_that_it_ends_gets_no_line_for_it(
    supervisor, monkeypatch, tmp_path, program, answer, lines
):
    module, us = supervisor
    us.directory.mkdir(parents=True)
    monkeypatch.setattr(module, "REQUEUE_TRIES", 2)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))
    write_program(tmp_path / "scontrol", program)
    assert us.requeue(Attempt([], 1), DECISION) == answer
    assert len(us.log_records()) == lines


def test_one_question_finds_the_nodes_that_cannot_start_the_program(monkeypatch, tmp_path):
    """A stand-in for srun. No answer, or one from no node, says nothing about a node."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for text, lost in (
        ("echo has it: n1; echo srun: error n2 >&2; echo has it: n3; exit 2", ["n2"]),
        ("exit 0", []),
        ("echo no controller >&2; exit 1", []),
    ):
        write_program(tmp_path / "bin/srun", f"echo >>{tmp_path}/questions\n{text}")
        assert scheduler.lost_nodes("train", ["n1", "n2", "n3"]) == lost
    assert (tmp_path / "questions").read_text() == 3 * "\n"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write_program(tmp_path / "bin/scontrol", "echo JobState=RUNNING NodeList=n1,n3")
    assert scheduler.lost_nodes("train", ["n1", "n2", "n3"]) == ["n2"]


def test_cleared_nodes_are_used_again_and_those_of_the_user_are_not(monkeypatch, tmp_path):
    """scontrol stands for Slurm."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    answers = """case "$*" in
      "show job"*) echo JobState=RUNNING ExcNodeList=n[1-2],n9 ;;
      "show hostnames"*) printf 'n1\nn2\nn9\n' ;;
      update*) echo "$3" >>"$0.updates" ;;
    esac"""
    write_program(tmp_path / "bin/scontrol", answers)
    assert scheduler.requeue(scheduler.slurm_job(), ["n2", "n3"], ["n1", "n2", "n3"]) is True
    assert (tmp_path / "bin/scontrol.updates").read_text() == "ExcNodeList=n9,n2,n3\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SubmitTime=1970-01-02T00:00:00 EndTime=1970-01-03T00:00:00", (86400, 2 * 86400)),
        ("SubmitTime=1970-01-02T00:00:00 EndTime=Unknown", (86400, float("inf"))),
        ("", (float("inf"), float("inf"))),
    ],
)
def test_the_times_of_a_job_are_those_of_slurm(monkeypatch, tmp_path, text, expected):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_program(tmp_path / "scontrol", f'echo "JobId=7 {text}"')
    assert scheduler.times_of_job() == tuple(time + scheduler.time.timezone for time in expected)


# ------------------------------------------------------------------------ nodes that are left out


def test_a_launcher_says_which_hosts_it_uses(supervisor, monkeypatch):
    """One of them, suspect at its second hang, makes room for the spare."""
    _, us = supervisor
    given = ["n1.site", "n2.site", "n3.site"]
    hosts = us.used_hosts([{"event": "hosts", "given": given, "used": given[:2]}])
    monkeypatch.setenv("NNODES", "2")
    attempt = Attempt(hosts, 1, [Report("hang", "it is", "n1.site", ["n2.site"])])
    us.earlier = [attempt._replace(next="restart")]
    decision = us.decide(attempt)
    assert (decision.action, decision.suspects) == ("leave out", ("n2.site",))
    us.leave_out(decision.suspects)
    assert os.environ["EXCLUDED_NODES"] == "n2.site"


@pytest.fixture
def supervisor(monkeypatch, tmp_path):
    """A Supervisor that has not started anything, and its module."""
    module = load(SUPERVISE)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("EXCLUDED_NODES", "NNODES", "SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LOG_DIR", str(tmp_path))
    monkeypatch.setattr(module, "descendants", list)  # the test process has children of its own
    monkeypatch.setattr(module, "kill_descendants", lambda: None)
    monkeypatch.setattr(module, "REQUEUE_SECONDS", 0)
    us = module.Supervisor(["true"])
    us.files = tmp_path
    return module, us


def test_only_srun_is_told_the_nodes_and_the_master(supervisor, monkeypatch):
    """A launcher that uses ssh, inside an allocation, has hosts of its own."""
    module, _ = supervisor
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2")
    us = module.Supervisor(["true"])
    assert us.command_on_nodes() == ["true"] and "MASTER_ADDR" not in us.environment(1, {})
    assert us.used_hosts([]) == ["n1", "n2"]  # a script may call srun
    us = module.Supervisor(["srun", "x"])
    assert us.command_on_nodes() == ["srun", "--nodes=2", "--nodelist=n1,n2", "x"]
    env = us.environment(1, {})
    assert env["MASTER_ADDR"] == "n1" and env["MASTER_PORT"]


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        (["scripts/ssh/launch_singlenode.sh", "a.yaml"], True),
        (["bash", "scripts/cluster_train.sh"], True),
        (["python", "scripts/guard.py", "train.py"], False),
        (["python", "/home/me/scripts/train.py"], False),
    ],
)
def test_only_launchers_of_this_repository_forward_a_stop_themselves(monkeypatch, command, ours):
    monkeypatch.chdir(REPO)
    assert load(SUPERVISE).is_ours(command) == ours
