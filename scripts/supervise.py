#!/usr/bin/env python3
"""Restart a training run after a crash, and requeue its job when the time is up.

Usage: scripts/supervise.py COMMAND [ARGUMENT ...]

COMMAND is any launch command of this repository. The Slurm and PBS scripts call supervise.py
themselves. It needs only Python 3.8.

How an attempt ended decides what follows: see the table in docs/RELIABILITY.md.
    restart  runs the same command again, after 10 s; if no progress follows, after 30, 90 and
             300 s; MAX_RESTARTS times at most
    spare    the same, but a spare node takes the place of the suspect host. A host is suspect from
             the second time on, and at once if its driver reports a failed GPU
    requeue  lets Slurm start the job again, without a suspect host; tried again until Slurm answers
    stop     prints how to resume

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, the end of the job's time or MAX_DURATION stop the
training: each rank gets STOP_SIGNAL, and the file STOP_FILE is made. It has STOP_SECONDS to save
and exit with code 0. A second Ctrl-C kills it. If COMMAND is a launcher of scripts/, SIGQUIT makes
its ranks print their stacks.

supervise.py passes to the training, in the environment: STOP_FILE (if this file exists: save and
exit), DEADLINE (seconds since 1970), ATTEMPT_ID (JOB.NUMBER), FAILURE_FILE, EVENTS_FILE and
CHECK_RESUME (see scripts/guard.py).
The training may report, as JSON in STATUS_FILE: run_dir, state (running, finished, stopped,
failed), reason, start_step, global_step, saved_step, world_size. An attempt makes progress if it
has saved a step; without a status, if a file that matches PROGRESS_FILE was written; without that,
if it ran for ten minutes.

The attempt log, attempts.jsonl in the run directory, has one line per attempt: start, end,
start_step, end_step, saved_step, recomputed, hosts, world_size, progress (step, file, time or ""),
cause, reason, code (the commit), events (those of EVENTS_FILE, such as a slow rank).
Causes: finished, stopped, ended (exit code 0, but no status), out of memory, killed, node lost,
hang, NaN, weights differ, disk, configuration, port, in use, exception.
ON_EVENT, a shell command, is run after each attempt, once it is known what follows. It finds the
line of the attempt log on its standard input and, without events and with a short reason, in the
variable EVENT, with two more fields: run_dir and next, which is finish, stop, requeue, restart,
spare, or why supervise.py gives up. It may take 10 s. The training does not see ON_EVENT.
With NNODES, the other nodes of the job are spares. Under ssh and PBS, launch.py finds the hosts to
leave out in EXCLUDED_NODES, and writes all its hosts to NODES_FILE, one per line.
Exit code: 0 finished or requeued; STOPPED_EXIT_CODE stopped before the end (1 if it is 0 and Slurm
has refused the requeue); 1 gave up; 2 user error.

Environment:
    MAX_RESTARTS       restarts after crashes within this job                    [10]
    MAX_DURATION       seconds after which the training is asked to stop         []
    RESTART_PAUSE      seconds before the first restart                          [10]
    STOP_SIGNAL        the signal that ranks get: TERM, USR1 or USR2             [TERM]
    STOP_SECONDS       seconds the training may take to stop before it is killed [300]
    RESERVE_SECONDS    it is asked to stop so long before the end of the time
                       [120, or a tenth of the time if this is less]
    PROGRESS_FILE      a path or pattern, such as 'runs/a/*.pt', for scripts without a status []
    STOPPED_EXIT_CODE  for your own scheduler or supervisor, for example 75, EX_TEMPFAIL of
                       sysexits.h: "try again later"                             [0]
    LOG_DIR            a directory that all nodes see                            [logs]
    NNODES             nodes to train on; the other nodes of the job are spares  [all]
    EXCLUDED_NODES     nodes to leave out, separated by commas                   []
    ON_EVENT           a shell command to run after each attempt, for example to send a mail []

Examples:
    scripts/supervise.py scripts/ssh/launch_singlenode.sh configs/default_config.yaml 4
    scripts/supervise.py scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 4 n01 n02
    scripts/supervise.py torchrun --standalone --nproc-per-node 2 train_distributed.py --epochs 10
"""

import glob
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from processes import (
    descendants,
    end_with_parent,
    handles,
    kill_descendants,
    parent_of,
    prctl,
    variables_of,
)
from scheduler import (
    end_of_job,
    is_preempted,
    log,
    nodes_of_job,
    nodes_without,
    output_of,
    requeue,
    slurm_id,
)

PAUSES = (1, 3, 9, 30)  # times RESTART_PAUSE: before restarts in a row without progress
MAX_STARTS = 3  # of the job, in a row without progress
UNPROVEN_STARTS = 10  # in a row, of a script without a status and PROGRESS_FILE
PROGRESS_SECONDS = 600  # such a script made progress if it ran this long
USER_ERRORS = ("configuration", "NaN", "in use")
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>: orphans among the descendants become children
ON_TIME = {"time limit", "SIGUSR1", "SIGUSR2", "SIGTERM"}  # after these, the job is requeued

SSH_FAILED = 255  # exit code of ssh and of launch.py
SIGKILLED = (-9, 137)  # exit code of a process that was killed, and of a shell whose child was
STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# Variables with the names of files, by which supervise.py and the training communicate.
FILES = "STOP_FILE STATUS_FILE FAILURE_FILE EVENTS_FILE NODES_FILE".split()
MAX_EVENTS = 100  # of an attempt; earlier ones are ignored
ON_EVENT_SECONDS = 10  # time limit of ON_EVENT: Slurm's KillWait may be running
AGAIN = ("restart", "spare")
REQUEUE_SECONDS = 10  # from one try to requeue to the next
MAX_FAILED = 30  # tries that slurmctld answers with another error than a refusal
STRIKES = 2  # pieces of evidence against a host that make it suspect
EVENT_CHARACTERS = 1000  # of the reason in the variable EVENT; Linux allows 131,071 bytes
ASK_SECONDS = 60  # from one question for the end of the job to the next
NUMBERS = {  # environment variables, and their defaults
    "MAX_RESTARTS": 10,
    "MAX_DURATION": float("inf"),
    "RESTART_PAUSE": 10.0,
    "STOP_SECONDS": 300.0,
    "RESERVE_SECONDS": 0.0,  # see time_left()
    "STOPPED_EXIT_CODE": 0,
    "NNODES": 0,  # all
    "SLURM_RESTART_COUNT": 0,
    "SLURM_JOB_END_TIME": float("inf"),
}
NUMBER = (int, float)
STATUS = {  # types of what supervise.py reads in STATUS_FILE
    "state": str,
    "reason": str,
    "run_dir": str,
    "start_step": NUMBER,
    "global_step": NUMBER,
    "saved_step": NUMBER,
    "world_size": NUMBER,
}
# Without these, a step of srun gets what Slurm has granted, whatever the job requested per task:
# --gres on sbatch's command line does not change them.
OF_THE_JOB = re.compile(
    r"SLURM_([CG]PU_BIND.*|GPUS|HINT|NO_KILL|NTASKS|NPROCS|TRES_BIND"
    r"|([CG]PUS|MEM|NTASKS|THREADS|TRES)_PER_\w+)"
)
HOST = socket.gethostname()


class Row(NamedTuple):
    """How an attempt ended, and what follows: the first action that is possible."""

    evidence: str
    first: str
    then: tuple = ()  # tried in this order; once a host is suspect, without `first`
    gives_up: str = ""


TABLE = {  # the same as in docs/RELIABILITY.md
    "success": Row("exit code 0; the status is `finished`, or there is none", "finish"),
    "a stop by you": Row("Ctrl-C, SIGHUP, a file STOP, `--stop-at-step`", "stop"),
    "a stop by the scheduler": Row(
        "SIGTERM, SIGUSR1, SIGUSR2 or the end of the time; then exit code 0, or a failure",
        "requeue",
        ("stop",),
        "after 3 starts of the job in a row without progress",
    ),
    "a user error": Row(
        "exit code 2 on the first host or on several; NaN; a run directory in use", "give up"
    ),
    "a bad node": Row(
        "a node did not start, or a rank on it never came; one node alone has no mount, Python or "
        "package, or does not answer in a hang; its driver reports a failed GPU",
        "restart",
        ("spare", "requeue", "restart"),
        "after 5 attempts in a row without progress, and 3 starts of the job",
    ),
    "a crash": Row(
        "any other failure or hang, or exit code 0 with the status `running` or `failed`. The host "
        "of the first rank to fail may be bad",
        "restart",
        ("spare", "restart", "requeue"),
        "after 5 attempts in a row without progress, and 3 starts of the job",
    ),
}
REPOSITORY = Path(__file__).resolve().parent.parent


def main():
    command = sys.argv[1:]
    if sys.version_info < (3, 8):  # noqa: UP036
        log(f"error: {sys.executable} is not Python 3.8 or newer: set PYTHON to a newer one")
        return 2
    if not command or command[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if command else 2
    from report import stop_signal  # an older Python cannot read that file

    stop_signal()
    try:
        for name in NUMBERS:
            number(name)
    except ValueError as error:
        log(f"error: {error}: correct or unset it")
        return 2
    if is_srun(command):
        for name in list(os.environ):
            if OF_THE_JOB.fullmatch(name):
                del os.environ[name]
    if not shutil.which(command[0]):
        log(f"error: cannot start {command[0]}: there is no such program")
        return 2
    if never_restarts():
        choose_master(os.environ, command, nodes_of_job())
        os.environ.pop("ON_EVENT", None)
        os.execvp(command[0], command)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    return Supervisor(command).keep_alive()


def number(name):
    """The value of one of NUMBERS in the environment, of the type of its default.

    Raises ValueError with its name.
    """
    default = NUMBERS[name]
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = type(default)(text)
    except ValueError:
        value = -1
    if not value >= 0:  # nan is not, either
        raise ValueError(f"{name} is {text!r}, not a number from 0 on")
    return value


def never_restarts():
    """Whether COMMAND only prints commands, or only checks the nodes."""
    if os.environ.get("DRY_RUN"):
        return True
    return os.environ.get("TRAIN_SCRIPT", "").endswith("doctor.py")


def last_change():
    """When the newest file that matches PROGRESS_FILE was written; 0 if there is none."""
    newest = 0
    for file in glob.glob(os.environ.get("PROGRESS_FILE", ""), recursive=True):
        with suppress(OSError):  # it was replaced
            newest = max(newest, os.stat(file).st_mtime)
    return newest


def run_on_event(record):
    """Run ON_EVENT, which finds this as JSON on its standard input and in the variable EVENT."""
    if not os.environ.get("ON_EVENT"):
        return
    text = json.dumps(record)
    short = json.dumps({**record, "reason": record["reason"][:EVENT_CHARACTERS], "events": []})
    command = ["sh", "-c", 'eval "$ON_EVENT"']  # `ps` shows no secret in it
    options = {"input": text.encode(), "env": {**os.environ, "EVENT": short}}
    try:
        result = subprocess.run(
            command, timeout=ON_EVENT_SECONDS, preexec_fn=ignore_stops, **options
        )
        problem = f"exit code {result.returncode}" if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = type(error).__name__  # its text has the command, maybe with a password
        kill_descendants()
    if problem:
        log(f"WARNING: ON_EVENT failed: {problem}")


def ignore_stops():
    """A job that is being requeued gets SIGTERM."""
    for name in STOPS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


# ---------------------------------------------------------------------------------- supervision


class Supervisor:
    """Runs COMMAND as often as needed."""

    def __init__(self, command):
        self.command = command
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        self.job = job or f"{HOST}-{os.getpid()}"
        logs = Path(os.environ.get("LOG_DIR") or REPOSITORY / "logs")  # all nodes see it
        self.directory = (logs / f"supervise_{self.job}").resolve()
        self.files = None  # the directory of FILES, in the current attempt
        self.run_dir = None  # reported by the training

        # the time, and requests to stop
        self.signals = []  # names of those received
        self.stopping_since = None
        self.pressed_again = False  # Ctrl-C
        self.killed = False  # by us, because it did not stop
        self.warning = ""  # the last one of watch()
        self.child = None  # the process of COMMAND
        for name in STOPS:  # before Slurm is asked, which may take a minute
            under_nohup = name == "SIGHUP" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(getattr(signal, name), self.on_signal)
        signal.signal(signal.SIGQUIT, self.forward)
        self.began = time.time()
        self.asked_at = 0  # when Slurm or PBS was asked for the end of the job
        self.end_of_job = number("SLURM_JOB_END_TIME")
        self.time_left()

        # attempts of this process
        self.count = 0
        self.crashes = 0  # in a row without progress
        self.refused = False  # Slurm has refused a requeue

        # nodes
        self.wanted = number("NNODES")
        self.job_nodes = nodes_of_job()
        self.left_out = os.environ.get("EXCLUDED_NODES", "").replace(",", " ").split()
        self.nodes = choose_nodes(self.job_nodes, self.left_out, self.wanted)  # of an attempt
        self.strikes = []  # hosts, one for each piece of evidence

    def on_signal(self, number, _frame):
        if number == signal.SIGINT and self.stopping_since:  # within a second, it is the same one
            self.pressed_again = time.time() > self.stopping_since + 1
        self.signals.append(signal.Signals(number).name)

    def forward(self, number, _frame):
        """A request for stacks, which would end other programs than our launchers."""
        if self.child and is_ours(self.command):
            self.child.send_signal(number)

    def time_left(self):
        """Seconds until the training should be asked to stop. Sets end_of_job and reserve."""
        now = time.time()
        if now > self.asked_at + ASK_SECONDS:  # the end may be changed; suspended jobs end later
            self.asked_at = now
            self.end_of_job = end_of_job() or self.end_of_job
        self.deadline = min(self.end_of_job, self.began + number("MAX_DURATION"))
        usual = min(120, (self.deadline - self.began) / 10)
        self.reserve = number("RESERVE_SECONDS") or usual
        return self.deadline - self.reserve - now

    def asked(self):
        """Who has asked the training to stop: names of signals, or the time limit; [] if nobody."""
        if self.signals or self.stopping_since or self.time_left() < 0:
            return self.signals or ["time limit"]
        return []

    def keep_alive(self):
        """Run attempts until the training ends. Returns the exit code."""
        while True:
            attempt = self.attempt()
            if attempt["cause"] != "in use":  # otherwise the attempt log is another job's
                self.record(attempt)
            self.crashes = 0 if attempt["progress"] else self.crashes + 1
            decision = self.decide(attempt)
            self.report(attempt, decision)
            if decision in AGAIN and self.is_stopped_in_pause():
                decision = self.decide(attempt)
                self.report(attempt, decision)
            run_on_event({**attempt, "run_dir": self.run_dir, "next": decision})
            if decision not in AGAIN:
                break
        if decision != "requeue":
            shutil.rmtree(self.directory / "check_resume", ignore_errors=True)
        with suppress(OSError):
            self.directory.rmdir()  # unless it holds the attempt log
        return self.exit_code(decision, attempt["cause"])

    def pause(self):
        """Seconds before the next restart."""
        index = min(max(self.crashes, 1), len(PAUSES)) - 1
        return PAUSES[index] * number("RESTART_PAUSE")

    def is_stopped_in_pause(self):
        """Wait before a restart. Returns whether a stop is requested in the meantime."""
        end = time.monotonic() + self.pause()
        while time.monotonic() < end and not self.asked():
            time.sleep(0.2)
        return bool(self.asked())

    def exit_code(self, decision, cause):
        """The exit code of supervise.py."""
        if decision in ("finish", "requeue"):
            return 0
        if decision == "stop":
            return number("STOPPED_EXIT_CODE") or int(self.refused)
        return 2 if cause in USER_ERRORS else 1

    # ------------------------------------------------------------------------- what to do next

    def decide(self, attempt):
        """Do the first thing that TABLE lists and that is possible: one of its actions.

        Returns it, or why to give up.
        """
        name = self.ended_by(attempt)
        row = TABLE[name]
        suspects = self.find_suspects(attempt) if name in ("a bad node", "a crash") else []
        actions = row.then if suspects else (row.first, *row.then)
        self.refused = False
        why = ""
        for action in actions:
            obstacle = self.obstacle(action, attempt, suspects, why)
            if obstacle is None:
                return action
            why = obstacle or why
        return why or "a restart would not help"

    def ended_by(self, attempt):
        """The row of TABLE."""
        cause = attempt["cause"]
        if cause in ("finished", "ended"):
            return "success"
        asked = self.asked()
        if failed_gpus(attempt) and not asked:
            return "a bad node"
        if cause in USER_ERRORS:
            return "a user error"
        if cause == "stopped" and not (asked or self.was_too_early(attempt)):
            asked = attempt["reason"].split(", ")
        if asked:
            by_scheduler = ON_TIME.intersection(asked) and "SIGINT" not in asked
            return "a stop by the scheduler" if by_scheduler else "a stop by you"
        is_silent = cause == "hang" and self.evidence(cause)
        return "a bad node" if cause == "node lost" or is_silent else "a crash"

    def was_too_early(self, attempt):
        """Whether the training stopped at a time limit that has been raised since."""
        return attempt["reason"] == "time limit" and self.time_left() > 120

    def obstacle(self, action, attempt, suspects, why):
        """Try an action. Returns None if it is done, else the reason, if there is one to report.

        why: the last such reason of an earlier action.
        """
        if action == "stop":
            is_clean = attempt["cause"] == "stopped"
            return why or (None if is_clean else "a stop was requested")
        if action == "give up":
            return ""
        if action == "requeue":
            return self.obstacle_to_requeue(attempt, suspects)
        if action in AGAIN and self.count > number("MAX_RESTARTS"):
            return f"MAX_RESTARTS={number('MAX_RESTARTS')} is reached"
        if action == "restart" and self.crashes > len(PAUSES):
            return f"{self.crashes} crashes without progress"
        if action == "spare":
            return self.obstacle_to_spare(suspects)
        return None

    def obstacle_to_requeue(self, attempt, suspects):
        is_stop = self.asked() or attempt["cause"] == "stopped"
        if not slurm_id() or (self.count > number("MAX_RESTARTS") and not is_stop):
            return ""
        if self.starts_without("step", "file", "time") >= MAX_STARTS:
            return f"in {MAX_STARTS} starts of this job in a row, no new step was saved"
        if self.starts_without("step", "file") >= UNPROVEN_STARTS:
            remedy = "nothing has shown progress: set PROGRESS_FILE"
            return f"in {UNPROVEN_STARTS} starts of this job in a row, {remedy}"
        left_out = [*self.left_out, *suspects]
        answers = [requeue(left_out)]
        while answers[-1] in ("failed", "no answer") and answers.count("failed") < MAX_FAILED:
            if "SIGINT" in self.signals or time.time() > self.end_of_job:
                break
            time.sleep(REQUEUE_SECONDS)
            answers.append(requeue(left_out))
        self.refused = answers[-1] not in ("requeued", "ended")
        return None if answers[-1] == "requeued" else ""

    def starts_without(self, *kinds):
        """How often in a row, with this time, this job was started without such progress."""
        numbers = set()
        for record in reversed(self.log_records()):
            job, _, number = record["attempt"].rpartition(".")
            is_complete = "end" in record
            if job != self.job or not is_complete or record.get("progress") in kinds:
                break
            numbers.add(int(number) // 1000)  # see environment()
        return len(numbers)

    def report(self, attempt, decision):
        """Print how the attempt ended, and what follows."""
        if decision == "finish":
            return
        if decision == "stop":
            reason = attempt["reason"] or "at --stop-at-step"
            log(f"stopped ({reason}); to resume: {how_to_resume()}")
            return
        what = attempt["cause"]
        saved = ""
        if attempt["world_size"]:  # the script has written its status
            what += f" at step {attempt['end_step']}"
            saved = f", from step {attempt['saved_step']}"
        if attempt["reason"]:
            what += f": {attempt['reason']}"
        if decision == "requeue":
            log(f"{what}. The job is requeued{saved}")
        elif decision in AGAIN:
            which = f"Restart {self.count} of {number('MAX_RESTARTS')}"
            log(f"{what}. {which} in {self.pause():.0f} s{saved}")
        else:
            remedy = f"After fixing it, to resume: {how_to_resume()}"
            log(f"error: {what}. Giving up: {decision}. {remedy}")

    # ------------------------------------------------------------------------- the nodes

    def given_nodes(self):
        """All that may be used."""
        return self.job_nodes or self.launcher_hosts

    def find_suspects(self, attempt):
        """The nodes against which this attempt has evidence, and not for the first time."""
        hosts = failed_gpus(attempt) * STRIKES or self.evidence(attempt["cause"])
        nodes = [name_among(self.given_nodes(), host) for host in hosts]
        self.strikes += nodes
        known = set(nodes).difference(self.left_out, [None])
        return sorted(node for node in known if self.strikes.count(node) >= STRIKES)

    def evidence(self, cause):
        """The hosts against which the failure is evidence."""
        silent = self.failure.get("silent_hosts", [])
        if cause == "node lost":
            return silent
        if cause == "hang":
            return silent if len(silent) == 1 else []  # of several, the network may be at fault
        is_of_host = self.failure and cause != "port"
        return [self.failure["host"]] if is_of_host else []

    def obstacle_to_spare(self, suspects):
        """Leave out the suspect nodes, as many as there are spare nodes."""
        good = [node for node in self.given_nodes() if node not in self.left_out]
        spares = len(good) - self.wanted if self.wanted else 0
        replaced = suspects[: max(0, spares)]
        if not replaced:
            return ""
        self.crashes = 0
        self.left_out = [*self.left_out, *replaced]
        self.nodes = choose_nodes(self.job_nodes, self.left_out, self.wanted)
        os.environ["EXCLUDED_NODES"] = ",".join(self.left_out)
        log(f"{', '.join(replaced)} left out: a spare node takes its place")
        return None

    def lost_nodes(self):
        """The nodes, fewer than all, where srun cannot start COMMAND: down, or without a mount."""
        if len(self.nodes) < 2 or not is_srun(self.command):
            return []
        program = next((word for word in self.command[1:] if not word.startswith("-")), "true")
        lost = nodes_without(program, self.nodes)
        return lost if len(lost) < len(self.nodes) else []

    # ------------------------------------------------------------------------- one attempt

    def attempt(self):
        """Run COMMAND once. Returns the record for the attempt log."""
        self.count += 1
        self.files = self.directory / f"{HOST}_{os.getpid()}_{self.count}"
        shutil.rmtree(self.files, ignore_errors=True)  # of a supervisor that was killed
        try:
            self.files.mkdir(0o700, parents=True)
        except OSError as error:
            self.files = Path(tempfile.mkdtemp())
            what = "a stop reaches ranks on this host only: set LOG_DIR"
            log(f"WARNING: cannot write to {self.directory} ({error}); {what}")

        env = self.environment()
        self.begun = {
            "attempt": env["ATTEMPT_ID"],
            "start": time.time(),
            "code": code_version(),
            "hosts": self.nodes or [HOST],
            "events": [],
        }
        before = last_change()
        self.is_recorded = False  # whether the attempt log has it, with the cause "running"
        code = self.run(env)

        status = read_status(self.files / "STATUS_FILE")
        self.failure = read_failure(self.files / "FAILURE_FILE")
        self.launcher_hosts = lines_of(self.files / "NODES_FILE")
        if not self.asked() and status.get("state") != "finished":
            self.signals += self.signals_of_ranks(code)
        cause, reason = self.cause(code, status)
        events = parse_lines(lines_of(self.files / "EVENTS_FILE"))[-MAX_EVENTS:]
        shutil.rmtree(self.files, ignore_errors=True)
        self.run_dir = status.get("run_dir") or self.run_dir
        attempt = {
            **self.begun,
            "end": time.time(),
            **steps(status),
            "world_size": status.get("world_size"),
            "cause": cause,
            "reason": reason,
            "events": events,
        }
        attempt["progress"] = progress(attempt, before)
        return attempt

    def environment(self):
        """The environment of the next attempt."""
        env = dict(os.environ)
        env.pop("ON_EVENT", None)  # it may have a secret
        env["ATTEMPT"] = str(self.count)
        env["ATTEMPT_ID"] = f"{self.job}.{1000 * number('SLURM_RESTART_COUNT') + self.count}"
        env["STORE_KEY"] = os.urandom(8).hex()  # see scripts/guard.py
        for name in FILES:
            env[name] = str(self.files / name)
        env.setdefault("CHECK_RESUME", str(self.directory / "check_resume"))
        if self.deadline < float("inf"):
            env["DEADLINE"] = str(self.deadline)
        if self.count > 1:
            env["SLURM_OVERLAP"] = "1"  # Slurm may count the previous step as running
        choose_master(env, self.command, self.nodes)
        return env

    def command_on_nodes(self):
        """COMMAND; srun is told the nodes of this attempt."""
        if not self.nodes or not is_srun(self.command):
            return self.command
        nodes = [f"--nodes={len(self.nodes)}", f"--nodelist={','.join(self.nodes)}"]
        return [self.command[0], *nodes, *self.command[1:]]

    def cause(self, code, status):
        """Why an attempt ended: (one of the causes above, reason)."""
        asked = ", ".join(self.asked())
        state = status.get("state")
        reason = status.get("reason", "")
        failure = self.failure
        # If the launcher was killed, the kernel sends the training SIGTERM: it saves and stops.
        # If ssh has lost the connection to a host, node.py does so there.
        launcher_failed = code in (*SIGKILLED, SSH_FAILED) and not asked
        orphaned = launcher_failed and state == "stopped" and reason == "SIGTERM"
        if state in ("finished", "stopped") and not orphaned:
            return state, reason and (asked or reason)  # the reason is our own signal or file
        if failure:
            return self.cause_of_failure(failure)
        ended_by_signal = signal_of(code)
        if asked and not self.killed and code == 0:
            return "stopped", asked
        if asked and not self.killed and ended_by_signal:
            return "stopped", f"{asked}; ended by {ended_by_signal}, perhaps without a save"
        if code == 0 and state:
            remedy = "if a pipeline hides the exit code, use `set -o pipefail`"
            return "killed", f"exit code 0, but the status is still {state}: {remedy}"
        if code == 0:
            return "ended", "exit code 0, but the training wrote no STATUS_FILE"
        if self.killed:
            return "killed", "it did not stop in time (STOP_SECONDS), or you pressed Ctrl-C twice"
        lost = [] if asked else self.lost_nodes()
        # srun also exits with the error number of execve(): a short outage gets two restarts.
        if lost or (code == 2 and is_srun(self.command) and self.crashes < 2):
            self.failure = {"silent_hosts": lost}
            where = ", ".join(lost) or "a node"
            return "node lost", f"{where} cannot start the program (down, or without a mount?)"
        if code == 2:
            return "configuration", "see the error above"
        if code in SIGKILLED:
            return "killed", "killed (SIGKILL); out of memory? (see dmesg)"
        remedy = "see the errors above; if there are none, see dmesg"
        return "killed", f"exit code {code} and no error report: {remedy}"

    def cause_of_failure(self, failure):
        """(cause, reason) of FAILURE_FILE. If it is the fault of nodes, sets their silent_hosts."""
        cause = failure["cause"]
        used = choose_nodes(self.given_nodes(), self.left_out, self.wanted)
        silent = []
        if "started_hosts" in failure:  # the rank check waits for the others
            started = failure["started_hosts"]
            silent = [node for node in used if not name_among(started, node)]
        elif cause == "configuration":  # each host that has reported it has a file
            reports = [read_failure(file) for file in self.files.glob("FAILURE_FILE*")]
            silent = list({name_among(used, report["host"]) for report in reports if report})
            if len(silent) == 1 and silent[0] not in (None, *used[:1]):  # else, it is the user's
                cause = "node lost"
        if silent and len(silent) < len(used):
            failure["silent_hosts"] = silent
        rank = f"rank {failure['rank']} on " if "rank" in failure else ""
        return cause, f"{rank}{failure['host']}: {failure['reason']}"

    def signals_of_ranks(self, code):
        """The signals that Slurm has sent to the ranks only, if they ended because of them."""
        received = lines_of(self.files / "STOP_FILE")  # by run_torchrun.py or guard.py
        if code == 0 and received:
            return received
        return ["SIGTERM"] if is_preempted() else []

    def run(self, env):
        """Run COMMAND until it ends or is killed. Returns its exit code."""
        try:
            self.child = subprocess.Popen(
                self.command_on_nodes(), env=env, start_new_session=True, preexec_fn=die_with_parent
            )
        except OSError as error:
            log(f"error: cannot start {self.command[0]}: {error.strerror}")
            return 2
        while self.child.poll() is None:
            time.sleep(0.2)
            self.watch()
        code = self.child.returncode
        while code < 0 and self.stopping_since and not self.killed and descendants():
            time.sleep(0.2)  # a signal killed the shell, but its children still save
            self.watch()
        kill_descendants()  # for example, ranks whose torchrun was killed
        return code

    def watch(self):
        """Record the run directory, forward stop requests. An error of ours ends no training."""
        try:
            if not self.is_recorded:
                self.record_start()
            if not self.stopping_since:
                self.stop_if_requested()
            if self.stopping_since and not self.killed:
                self.kill_if_too_slow()
        except Exception as error:
            text = f"WARNING: {type(error).__name__}: {error}; the training goes on"
            if text != self.warning:
                log(text)
            self.warning = text

    def record_start(self):
        """Write the attempt to the attempt log as soon as the training owns its run directory."""
        status = read_status(self.files / "STATUS_FILE")
        if not status.get("state"):
            return
        self.run_dir = status.get("run_dir") or self.run_dir
        self.is_recorded = True
        self.record({**self.begun, "cause": "running"})

    def stop_if_requested(self):
        """Ask the training to stop, after a signal or shortly before the end of the time."""
        asked = self.asked()
        if not asked:
            return
        self.stopping_since = time.time()
        log(f"{asked[0]}: saving and stopping; press Ctrl-C again to kill the training")
        with suppress(OSError):
            (self.files / "STOP_FILE").touch()
        if is_srun(self.command) or is_ours(self.command):
            # srun forwards it; see run_torchrun.py and guard.py
            self.child.send_signal(signal.SIGUSR2)
        else:
            signal_training(self.child.pid)

    def kill_if_too_slow(self):
        """Kill the training after its time to stop, in time for a requeue, or at another Ctrl-C."""
        seconds = number("STOP_SECONDS")
        if not self.signals:  # at the time limit
            seconds = max(seconds, self.reserve)
        limit = self.stopping_since + seconds
        end = self.end_of_job - min(30, self.reserve / 4)  # later, Slurm would not requeue the job
        if end > self.stopping_since:
            limit = min(limit, end)
        if self.pressed_again or time.time() > limit:
            self.killed = True
            self.kill_command()

    def kill_command(self):
        """Send SIGTERM, SIGINT (which makes our launchers kill all), SIGKILL, until it exits."""
        for number, seconds in ((signal.SIGTERM, 2), (signal.SIGINT, 6), (signal.SIGKILL, 5)):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.child.pid, number)
                self.child.wait(seconds)
                return

    # ----------------------------------------------------------------------- the attempt log

    def log_file(self):
        return Path(self.run_dir or self.directory) / "attempts.jsonl"

    def log_records(self):
        records = parse_lines(lines_of(self.log_file()))
        return [record for record in records if {"attempt", "start", "cause"} <= record.keys()]

    def record(self, attempt):
        """Write the attempt's line, replacing its line with the cause "running".

        If another attempt still has such a line, its supervisor was killed: complete it here.
        """
        records = []
        for old in self.log_records():
            if old["start"] == attempt["start"]:
                continue
            if old["cause"] == "running" and "end" in attempt:
                old.update(cause="killed", reason="together with its supervisor")
                old.update(end=attempt["start"])
            records.append(old)
        records.append(attempt)
        text = "".join(json.dumps(record) + "\n" for record in records)
        new = self.log_file().with_name(f".attempts.{os.getpid()}.tmp")
        try:
            new.unlink(missing_ok=True)
            with open(new, "x") as file:  # it follows no link
                file.write(text)
            new.replace(self.log_file())
        except OSError as error:
            log(f"WARNING: cannot write {self.log_file()}: {error}")


def choose_nodes(nodes, left_out, wanted):
    """The first of the nodes that are not left out; wanted: how many, 0: all.

    If too few would remain, those that should be left out are used, too.
    """
    good = [node for node in nodes if node not in left_out]
    if len(good) < wanted or not good:
        good = nodes
    return good[:wanted] if wanted else good


def is_srun(command):
    """Other launchers choose their nodes themselves."""
    return Path(command[0]).name == "srun"


def is_ours(command):
    """Whether it is a launcher of this scripts/, which forwards signals to the ranks."""
    files = [Path(word).resolve() for word in command[:2]]
    ours = [file.name for file in files if REPOSITORY / "scripts" in file.parents]
    return bool(ours) and ours != ["guard.py"] and not is_srun(command)


def choose_master(env, command, nodes):
    """For srun: MASTER_ADDR and MASTER_PORT; the port is free, if this is the first node."""
    if not nodes or not is_srun(command):
        return
    from hosts import free_port, port_of_job  # an older Python cannot read that file

    master = env.get("MASTER_ADDR") or nodes[0]
    port = env.get("MASTER_PORT") or port_of_job(env)
    if not env.get("MASTER_PORT") and name_among(nodes, HOST) == master:
        port = free_port(port)
    env["MASTER_ADDR"] = master
    env["MASTER_PORT"] = str(port)


def name_among(nodes, host):
    """The host's name in the list, also without its domain if only one has that. None: neither."""
    if host in nodes:
        return host
    similar = [node for node in nodes if node.split(".")[0] == host.split(".")[0]]
    return similar[0] if len(similar) == 1 else None


def failed_gpus(attempt):
    """The hosts whose driver reports a failed GPU; several ranks of a host may say so."""
    events = [event for event in attempt["events"] if event.get("event") == "gpu_failed"]
    hosts = [event["host"] for event in events if isinstance(event.get("host"), str)]
    return list(dict.fromkeys(hosts))


def progress(attempt, before):
    """How the attempt has shown progress: "step", "file", "time", or "" if it has made none.

    before: what last_change() returned at its start.
    """
    if attempt["world_size"]:  # the script has written its status
        return "step" if attempt["saved_step"] > attempt["start_step"] else ""
    if os.environ.get("PROGRESS_FILE"):
        return "file" if last_change() > before else ""
    return "time" if attempt["end"] - attempt["start"] > PROGRESS_SECONDS else ""


def steps(status):
    """The part of the record that comes from the status of the training."""
    start = status.get("start_step", 0)
    end = max(start, status.get("global_step", 0))
    saved = max(start, status.get("saved_step", 0))
    return {
        "start_step": start,
        "end_step": end,
        "saved_step": saved,
        "recomputed": max(0, end - saved),
    }


def lines_of(path):
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_json(path):
    """{} if it is damaged or does not exist."""
    return parse_json("\n".join(lines_of(path)))


def read_status(path):
    """What the training, any script, has reported; {} if a value is not what it should be."""
    status = read_json(path)
    for name, kind in STATUS.items():
        if name in status and not isinstance(status[name], kind):
            return {}
    if "\0" in status.get("run_dir", ""):
        return {}
    return status


def read_failure(path):
    """What the first rank to fail, of any script, has reported; {} if something is missing."""
    failure = read_json(path)
    return failure if {"cause", "reason", "host"} <= failure.keys() else {}


def parse_lines(lines):
    """The JSON objects among the lines: one may be half written."""
    records = [parse_json(line) for line in lines]
    return [record for record in records if record]


def parse_json(text):
    """{} if it is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------------ processes


def die_with_parent():
    """For preexec_fn: stop the launch if supervise.py is killed. In batch jobs, Slurm does that."""
    by_slurm = os.environ.get("ENVIRONMENT") == "BATCH" and slurm_id()  # PBS sets it, too
    if not by_slurm:
        end_with_parent()


def signal_of(code):
    """The name of the stop signal that ended a process, or a shell's child; "" if none has."""
    for name in STOPS:
        if code in (-getattr(signal, name), 128 + getattr(signal, name)):
            return name
    return ""


def signal_training(child):
    """Send STOP_SIGNAL to the processes of COMMAND that handle it; if none does, to all.

    Others would die of it, such as a shell, or a `tee`. torchrun would end its ranks.
    """
    from report import stop_signal

    number = stop_signal()
    programs = {}  # of the processes that handle it
    elastic = []  # those that torchrun has started
    for process in descendants():
        with suppress(OSError):  # it has just ended
            if handles(process, number):
                programs[process] = os.readlink(f"/proc/{process}/exe")
                if "TORCHELASTIC_RUN_ID" in variables_of(process):
                    elastic.append(process)
    if not programs:
        os.killpg(child, number)
    ranks = elastic or list(programs)
    for process in ranks:
        with suppress(OSError):
            parent = parent_of(process)
            is_worker = parent in ranks and programs[parent] == programs[process]
            if not is_worker:
                os.kill(process, number)


# ------------------------------------------------------------------------------------- the code


def code_version():
    """The commit of the current directory, and whether files differ from it; "" without git."""
    version = output_of("git", "describe", "--always", "--dirty=, modified", "--exclude=*") or ""
    return version.strip()


def how_to_resume():
    if slurm_id() or os.environ.get("PBS_JOBID"):
        return "submit or run the same command again"
    command = " ".join(shlex.quote(word) for word in sys.argv)
    return re.sub(r" --stop-at-step[= ]\d+", "", command)  # it would stop there at once


if __name__ == "__main__":
    sys.exit(main())
