#!/usr/bin/env python3
"""Restart a training run after a crash, and requeue its job when the time is up.

Usage: scripts/supervise.py COMMAND [ARGUMENT ...]

COMMAND is any launch command of this repository. The Slurm and PBS scripts call supervise.py
themselves. It needs only Python 3.8.

How an attempt ended decides what follows: see the table in docs/RELIABILITY.md, which policy.py
prints.
    restart    runs the same command again, after 10 s; if no progress follows, after 30, 90 and
               300 s; with MAX_RESTARTS at most so often in a row without progress
    leave out  the same without the suspect hosts. Spare nodes take their place, or fewer go on
    requeue    lets Slurm start the job again, without a suspect host; tried until Slurm answers
    stop       prints how to resume

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, the end of a Slurm job's time, DEADLINE or MAX_DURATION
stop the training: each rank gets STOP_SIGNAL, and the file STOP_FILE is made. It has STOP_SECONDS
to save and exit with code 0. A second Ctrl-C kills it.

supervise.py passes to the training, in the environment: STOP_FILE (if this file exists: save and
exit), DEADLINE (seconds since 1970: the first of these limits), ATTEMPT (1, 2, ...), ATTEMPT_ID
(JOB.NUMBER), FAILURE_FILE, EVENTS_FILE and CHECK_RESUME (see scripts/guard.py).
The training may report, as JSON in STATUS_FILE: run_dir, state (running, finished, stopped,
failed), reason, start_step, global_step, saved_step, world_size. An attempt makes progress if it
has saved a step; without a status, if a file that matches PROGRESS_FILE was written; without that,
if it ran for ten minutes.

The attempt log, attempts.jsonl in the run directory, has one line per attempt, and another one if
Slurm has not requeued the job after all: start, end, start_step, end_step, saved_step, recomputed,
hosts, world_size, progress (step, file, time or ""), cause, reason, next (the action that
followed), code (the commit), events (those of EVENTS_FILE, such as equal batches), and what
policy.py has decided from (its Attempt).
Causes: finished, stopped, ended (exit code 0, but no status), out of memory, killed, node lost,
hang, NaN, weights differ, disk, configuration, port, exit (with a text), exception.
ON_EVENT, a shell command, is run after each attempt, once it is known what follows. It finds the
line of the attempt log on its standard input, with run_dir. It may take 10 s. The training does not
see ON_EVENT.
With NNODES, the other nodes of the job are spares. Under ssh and PBS, launch.py finds the hosts to
leave out in EXCLUDED_NODES, and writes the event `hosts`: those given and those used.
Exit code: 0 finished or requeued; STOPPED_EXIT_CODE stopped before the end (1 if it is 0 and Slurm
has not requeued the job); 1 gave up, or did not stop in time; 2 user error.

Environment:
    MAX_RESTARTS       restarts in a row without progress; 0: none at all        [10]
    MAX_DURATION       seconds after which the training is asked to stop         []
    DEADLINE           when it is, in seconds since 1970                         []
    RESTART_PAUSE      seconds before the first restart                          [10]
    STOP_SIGNAL        the signal that ranks get: TERM, USR1 or USR2             [TERM]
    STOP_SECONDS       seconds to save in: the training is asked to stop so long before a limit, or
                       a tenth of the time until it, if that is less, and is killed so long
                       afterwards                                                [300]
    PROGRESS_FILE      a path or pattern, such as 'runs/a/*.pt', for scripts without a status []
    STOPPED_EXIT_CODE  for your own scheduler or supervisor, for example 75, EX_TEMPFAIL of
                       sysexits.h: "try again later"                             [0]
    LOG_DIR            a directory that all nodes see                            [logs]
    ON_EVENT           a shell command to run after each attempt, for example to send a mail []
    NNODES, EXCLUDED_NODES    see scripts/hosts.py

Examples:
    scripts/supervise.py scripts/ssh/launch_singlenode.sh configs/default_config.yaml 4
    scripts/supervise.py scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 4 n01 n02
    scripts/supervise.py torchrun --standalone --nproc-per-node 2 train_distributed.py --epochs 10
"""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from hosts import HOST, choose_hosts, choose_master, expand, fewest_and_most, name_among
from policy import AGAIN, END, Attempt, Limits, Report, decide
from processes import (
    adopt_orphans,
    alive,
    descendants,
    end_with_parent,
    for_each_stop,
    handles,
    kill_descendants,
    ranks_of_torchrun,
)
from report import seconds, stop_signal, stopped_exit_code, whole_number
from scheduler import (
    ended_by,
    is_ending,
    log,
    lost_nodes,
    requeue,
    run,
    slurm_id,
    slurm_job,
    times_of_job,
)

NEVER = float("inf")
MANY = 10**9
PROGRESS_SECONDS = 600  # a script without a status made progress if it ran this long
USER_ERRORS = ("configuration", "NaN")

# Variables with the names of files, by which supervise.py and the training communicate.
FILES = "STOP_FILE STATUS_FILE FAILURE_FILE EVENTS_FILE".split()
ON_EVENT_SECONDS = 10  # time limit of ON_EVENT: Slurm's KillWait may be running
ON_EVENT = 'trap "" INT TERM HUP USR1 USR2; eval "$ON_EVENT"'  # a requeue sends SIGTERM
REQUEUE_SECONDS = 10  # from one try to requeue to the next
REQUEUE_TRIES = 360  # then, something else is wrong
ASK_SECONDS = 60  # from one question for the end of the job, or for a status, to the next
LEFT_SECONDS = 2  # for what a COMMAND that has succeeded leaves running
STATUS = {  # what supervise.py reads in STATUS_FILE, and what it assumes without
    "state": "",
    "reason": "",
    "run_dir": "",
    "start_step": 0,
    "global_step": 0,
    "saved_step": 0,
    "world_size": 0,
}
# Without these, a step of srun gets what Slurm has granted, whatever the job requested per task:
# --gres on sbatch's command line does not change them.
OF_THE_JOB = re.compile(
    r"SLURM_([CG]PU_BIND.*|GPUS|HINT|NO_KILL|NTASKS|NPROCS|TRES_BIND"
    r"|([CG]PUS|MEM|NTASKS|THREADS|TRES)_PER_\w+)"
)
REPOSITORY = Path(__file__).resolve().parent.parent


def main():
    command = sys.argv[1:]
    if sys.version_info < (3, 8):  # noqa: UP036
        log(f"error: {sys.executable} is not Python 3.8 or newer: set PYTHON to a newer one")
        return 2
    if not command or command[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if command else 2
    stop_signal()
    stopped_exit_code()
    try:
        supervisor = Supervisor(command)
    except ValueError as error:
        log(f"error: {error}")
        return 2
    if supervisor.is_srun:
        for name in list(os.environ):
            if OF_THE_JOB.fullmatch(name):
                del os.environ[name]
    only_checks = os.environ.get("TRAIN_SCRIPT", "").endswith("doctor.py")
    if os.environ.get("DRY_RUN") or only_checks:
        supervisor.set_master(os.environ)
        os.execvp(command[0], command)
    adopt_orphans()
    return supervisor.keep_alive()


# ---------------------------------------------------------------------------- requests to stop


class StopRequests:
    """All that count, whoever made them, and the limits of time."""

    def __init__(self):
        self.made = {}  # {a signal, STOP, DEADLINE, MAX_DURATION, END, ...: when}
        self.obeyed_at = None  # when the training was asked to stop
        self.pressed_again = False  # Ctrl-C
        self.began = time.time()
        self.save_seconds = seconds("STOP_SECONDS", 300)
        for_each_stop(self.on_signal)  # before Slurm is asked, which may take a minute
        submitted, end = times_of_job()
        self.submitted = min(submitted, self.began)
        self.ends = {  # the limits, in seconds since 1970
            END: min(end, seconds("SLURM_JOB_END_TIME", NEVER)),
            "DEADLINE": seconds("DEADLINE", NEVER),
            "MAX_DURATION": self.began + seconds("MAX_DURATION", NEVER),
        }

    def on_signal(self, number, _frame):
        now = time.time()
        if number == signal.SIGINT and self.obeyed_at:  # within a second, it is the same one
            self.pressed_again = now > self.obeyed_at + 1
        self.made.setdefault(signal.Signals(number).name, now)

    def reserve(self, limit):
        """The seconds before a limit that are kept for a save."""
        return min(self.save_seconds, (self.ends[limit] - self.began) / 10)

    def until_now(self):
        """All that were made, with the limits that are reached."""
        now = time.time()
        for limit, end in self.ends.items():
            if now > end - self.reserve(limit):
                self.made.setdefault(limit, now)
        return self.made

    def kill_time(self):
        """When a training that was asked to stop is killed: in time for a requeue."""
        limit = self.obeyed_at + self.save_seconds
        end = self.ends[END] - min(30, self.reserve(END) / 4)  # later, Slurm would not requeue it
        return min(limit, end) if end > self.obeyed_at else limit


# ---------------------------------------------------------------------------------- supervision


class Supervisor:
    """Runs COMMAND as often as policy.py says."""

    def __init__(self, command):
        self.command = command
        self.is_srun = Path(command[0]).name == "srun"  # other launchers choose their nodes
        self.passes_stop = self.is_srun or is_ours(command)
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        self.job = job or f"{HOST}-{os.getpid()}"
        self.restarts = whole_number(os.environ, "SLURM_RESTART_COUNT", 0, MANY, "0")
        self.max_restarts = whole_number(os.environ, "MAX_RESTARTS", 0, MANY, "10")
        self.restart_pause = seconds("RESTART_PAUSE", 10)
        logs = Path(os.environ.get("LOG_DIR") or REPOSITORY / "logs")  # all nodes see it
        self.directory = (logs / f"supervise_{self.job}").resolve()
        self.files = None  # the directory of FILES
        self.run_dir = None  # reported by the training
        self.requests = StopRequests()
        self.earlier = []  # attempts of this process

        self.job_nodes = expand(os.environ.get("SLURM_JOB_NODELIST", ""))
        self.given = self.job_nodes  # all hosts that may be used
        self.excluded = expand(os.environ.get("EXCLUDED_NODES", ""))
        self.leave_out(())

    def leave_out(self, suspects):
        """Choose the nodes of the next attempt. ValueError if too few are left."""
        os.environ["EXCLUDED_NODES"] = ",".join([*self.excluded, *suspects])
        self.nodes = choose_hosts(self.job_nodes, os.environ) if self.job_nodes else []

    def set_master(self, env):
        """For srun, whose tasks have not agreed on it: MASTER_ADDR and MASTER_PORT."""
        if self.nodes and self.is_srun:
            env["MASTER_ADDR"], env["MASTER_PORT"] = choose_master(env, self.nodes)

    def keep_alive(self):
        """Run attempts until the training ends. Returns the exit code."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.files = Path(tempfile.mkdtemp(dir=self.directory))
        except OSError as error:
            log(f"error: cannot write to {self.directory} ({error.strerror}): set LOG_DIR")
            return 2
        while True:
            attempt = self.attempt()
            decision = self.decide(attempt)
            if decision.action in AGAIN:
                log(decision.sentence)
                self.wait(decision.pause)
                if self.requests.made:
                    attempt = attempt._replace(requests={**self.requests.made})
                    decision = self.decide(attempt)
            is_refused = decision.action == "requeue" and not self.requeue(attempt, decision)
            if is_refused:
                decision = self.decide(attempt, can_requeue=False)
            if decision.action != "requeue":
                self.record(attempt, decision)
            if decision.action not in AGAIN:
                self.end(decision)
                return exit_code(decision, is_refused)
            self.earlier.append(attempt._replace(next=decision.action))
            self.leave_out(decision.suspects)

    def decide(self, attempt, can_requeue=True):
        """Ask policy.py what follows."""
        hosts = [host for host in self.given if host not in self.excluded]
        fewest = len(hosts)
        if os.environ.get("NNODES") and self.given:
            fewest, _ = fewest_and_most(os.environ, len(self.given))
        limits = Limits(
            hosts=hosts,
            spares=len(hosts) - fewest,
            max_restarts=self.max_restarts,
            restart_pause=self.restart_pause,
            can_requeue=can_requeue and bool(slurm_id() and shutil.which("scontrol")),
        )
        return decide(attempt, [*self.earlier_starts(), *self.earlier], limits)

    def wait(self, seconds):
        """The pause before a restart, until a stop is requested."""
        end = time.monotonic() + seconds
        while True:
            with suppress(OSError):
                os.remove(f"{self.run_dir}/STOP")  # as the trainer does: it is obeyed
                self.requests.made["STOP"] = time.time()
            if self.requests.until_now() or time.monotonic() >= end:
                return
            time.sleep(min(1, seconds))

    def requeue(self, attempt, decision):
        """Try until Slurm answers. Returns whether it will start the job again."""
        for number in range(REQUEUE_TRIES):
            facts = slurm_job()
            if is_ending(facts):
                return False
            if number == 0:
                self.record(attempt, decision)  # a requeue ends this process
            answer = requeue(facts, [*self.excluded, *decision.suspects], self.given)
            if answer is not None or "SIGINT" in self.requests.made:
                break
            time.sleep(REQUEUE_SECONDS)
        return answer

    def end(self, decision):
        """Print how the job ends."""
        remedy = ""
        if decision.action == "stop":
            remedy = "; the same command resumes it"
        elif decision.action == "give up":
            remedy = ". After fixing it, the same command resumes it"
        if decision.action != "finish":
            log(f"{decision.sentence}{remedy}")
        if decision.action != "requeue":
            shutil.rmtree(self.directory / "check_resume", ignore_errors=True)
        shutil.rmtree(self.files, ignore_errors=True)
        with suppress(OSError):
            self.directory.rmdir()  # unless it holds the attempt log

    # ------------------------------------------------------------------------- one attempt

    def attempt(self):
        """Run COMMAND once. Returns what it has left behind."""
        count = len(self.earlier) + 1
        files = {name: self.files / f"{count}.{name}" for name in FILES}
        env = self.environment(count, files)
        start = time.time()
        version = code_version()
        before = last_change()
        code = self.run(env, files)

        status = read_status(files["STATUS_FILE"])
        self.learn_run_dir(status)
        events = parse_lines(lines_of(files["EVENTS_FILE"]))
        hosts = self.used_hosts(events)
        of_ranks = "".join(lines_of(files["STOP_FILE"])[:1])  # by run_torchrun.py, guard.py
        self.add_requests_of(status, of_ranks)
        failed_gpus = [event for event in events if event.get("event") == "gpu_failed"]
        attempt = Attempt(
            hosts=hosts,
            exit_code=128 - code if 128 < code < 160 else code,  # of a shell
            reports=self.reports(files["FAILURE_FILE"], hosts, code),
            defective=[name_among(hosts, event["host"]) for event in failed_gpus],
            requests={**self.requests.made},
            of_ranks=of_ranks,
            state=status["state"],
            stopped_by=status["reason"],
            start_step=status["start_step"],
            end_step=status["global_step"],
            saved_step=status["saved_step"] if status["state"] else None,
            restarts=self.restarts,
            start=start,
            end=time.time(),
            attempt=env["ATTEMPT_ID"],
            world_size=status["world_size"],
            code=version,
            events=events,
        )
        return attempt._replace(progress=progress(attempt, before))

    def learn_run_dir(self, status):
        if os.path.isdir(status["run_dir"]):
            self.run_dir = status["run_dir"]

    def environment(self, count, files):
        """The environment of the next attempt."""
        env = {**os.environ, "ATTEMPT": str(count)}
        env.pop("ON_EVENT", None)  # it may have a secret
        env["ATTEMPT_ID"] = f"{self.job}.{1000 * self.restarts + count}"
        for name, file in files.items():
            env[name] = str(file)
        if env.get("CHECK_RESUME", "1") == "1":
            env["CHECK_RESUME"] = str(self.directory / "check_resume")
        deadline = min(self.requests.ends.values())
        if deadline < NEVER:
            env["DEADLINE"] = str(deadline)
        if count > 1:
            env["SLURM_OVERLAP"] = "1"  # Slurm may count the previous step as running
        self.set_master(env)
        return env

    def command_on_nodes(self):
        """COMMAND; srun is told the nodes of this attempt."""
        if not self.nodes or not self.is_srun:
            return self.command
        nodes = [f"--nodes={len(self.nodes)}", f"--nodelist={','.join(self.nodes)}"]
        return [self.command[0], *nodes, *self.command[1:]]

    def used_hosts(self, events):
        """Those of this attempt, as launch.py or this file has chosen them."""
        for event in events:
            if event.get("event") == "hosts":
                self.given = event["given"]
                return event["used"]
        return self.nodes or [HOST]

    def add_requests_of(self, status, of_ranks):
        """Those that did not come through this process."""
        made = self.requests.until_now()
        if made or status["state"] == "finished":
            return
        reason = status["reason"] if status["state"] == "stopped" else ""
        if reason == "time limit":  # the training looks at its own clock
            by = min(self.requests.ends, key=self.requests.ends.get)
        elif reason == "STOP file" and not of_ranks:
            by = "STOP"
        else:
            by = ended_by()
        if by:
            made[by] = time.time()

    def reports(self, file, hosts, code):
        """Those of the hosts; without any, what the scheduler knows."""
        files = sorted(file.parent.glob(f"{file.name}*"))
        found = [read_report(file, hosts) for file in files]
        if found or code == 0 or self.requests.made or not self.is_srun:
            return found
        program = next((word for word in self.command[1:] if not word.startswith("-")), "true")
        lost = lost_nodes(program, hosts) if len(hosts) > 1 else []
        if lost:
            reason = "down, or the program cannot be started there: a missing mount?"
            return [Report("node lost", reason, ", ".join(lost), lost)]
        if code == 2:  # also the error number of its execve(), in a short outage
            return [Report("killed", "exit code 2 of srun, and no report", "a node")]
        return []

    def run(self, env, files):
        """Run COMMAND until it ends or is killed. Returns its exit code."""
        if self.requests.until_now():  # do not start it
            return -signal.SIGTERM
        try:
            child = subprocess.Popen(
                self.command_on_nodes(), env=env, start_new_session=True, preexec_fn=die_with_parent
            )
        except OSError as error:
            log(f"error: cannot start {self.command[0]}: {error.strerror}")
            return 2
        has_ended = threading.Event()
        waiting = in_background(self.look_for_status, files["STATUS_FILE"], has_ended)
        code = None
        # A signal may have killed a shell, but its children still save.
        while code is None or (code < 0 and self.requests.obeyed_at and descendants()):
            time.sleep(0.2)
            if not self.requests.obeyed_at:
                self.stop_if_requested(child, files["STOP_FILE"])
            elif self.requests.pressed_again or time.time() > self.requests.kill_time():
                os.killpg(child.pid, signal.SIGINT)  # it makes our launchers kill all
                code = -signal.SIGKILL
                break
            code = child.poll()
        has_ended.set()
        end_of_others(code)
        waiting.join(ASK_SECONDS)
        return code

    def look_for_status(self, file, has_ended):
        """Learn the run directory. A status that never comes is asked for less and less."""
        seconds = 0.5
        while not has_ended.wait(seconds):
            status = read_status(file)
            if status["state"]:
                self.learn_run_dir(status)
                # A file STOP is for all jobs that were submitted before it, as in a chain.
                stops = [record["requests"].get("STOP", 0) for record in self.log_records()]
                if max(stops, default=0) > self.requests.submitted:
                    self.requests.made["STOP"] = max(stops)
                return
            seconds = min(2 * seconds, ASK_SECONDS)

    def stop_if_requested(self, child, file):
        """Ask the training to stop. The ranks come first; the rest may wait for a disk."""
        if not self.requests.until_now():
            return
        self.requests.obeyed_at = time.time()
        if self.passes_stop:  # srun forwards it; see run_torchrun.py and guard.py
            child.send_signal(signal.SIGUSR2)
        else:
            signal_training(child.pid)
        in_background(file.touch)
        by = ", ".join(self.requests.made)
        log(f"{by}: the training is asked to save and stop; press Ctrl-C again to kill it")

    # ----------------------------------------------------------------------- the attempt log

    def log_file(self):
        return Path(self.run_dir or self.directory) / "attempts.jsonl"

    def log_records(self):
        records = parse_lines(lines_of(self.log_file()))
        return [record for record in records if record.keys() >= set(Attempt._fields)]

    def earlier_starts(self):
        """The attempts of this job before it was requeued."""
        found = []
        for record in self.log_records():
            is_of_job = record["attempt"].startswith(f"{self.job}.")
            if is_of_job and record["restarts"] < self.restarts:
                fields = {name: record[name] for name in Attempt._fields}
                fields["reports"] = [Report(**report) for report in record["reports"]]
                found.append(Attempt(**fields))
        return found

    def record(self, attempt, decision):
        """Add a line to the attempt log, and pass it to ON_EVENT."""
        record = {"cause": decision.cause, "reason": decision.reason, **attempt._asdict()}
        record["next"] = decision.action
        record["reports"] = [report._asdict() for report in attempt.reports]
        record["recomputed"] = attempt.end_step - (attempt.saved_step or 0)
        try:
            with open(self.log_file(), "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            log(f"WARNING: cannot write {self.log_file()}: {error}")
        if os.environ.get("ON_EVENT"):
            run_on_event(json.dumps({**record, "run_dir": self.run_dir}))


def run_on_event(text):
    """Run ON_EVENT with this text on its standard input."""
    command = ["sh", "-c", ON_EVENT]  # `ps` shows no secret in it
    try:
        subprocess.run(command, input=text.encode(), timeout=ON_EVENT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log(f"WARNING: ON_EVENT failed: {type(error).__name__}")  # its text has the command
        kill_descendants()


def exit_code(decision, is_refused):
    """The exit code of supervise.py. is_refused: Slurm has not requeued the job."""
    if decision.action in ("finish", "requeue"):
        return 0
    if decision.action == "stop" and decision.cause == "stopped":
        return stopped_exit_code() or int(is_refused)
    return 2 if decision.cause in USER_ERRORS else 1


def in_background(function, *arguments):
    """Call it in a thread: it may wait for a disk."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def is_ours(command):
    """Whether it is a launcher of this scripts/, which forwards signals to the ranks."""
    files = [Path(word).resolve() for word in command[:2]]
    ours = [file.name for file in files if REPOSITORY / "scripts" in file.parents]
    return bool(ours) and ours != ["guard.py"]


def progress(attempt, before):
    """How the attempt has shown progress: "step", "file", "time", or "" if it has made none.

    before: what last_change() returned at its start.
    """
    if attempt.world_size:  # the script has written its status
        return "step" if attempt.saved_step > attempt.start_step else ""
    if os.environ.get("PROGRESS_FILE"):
        return "file" if last_change() > before else ""
    return "time" if attempt.end - attempt.start > PROGRESS_SECONDS else ""


def last_change():
    """When the newest file that matches PROGRESS_FILE was written; 0 if there is none."""
    newest = 0
    for file in glob.glob(os.environ.get("PROGRESS_FILE", ""), recursive=True):
        with suppress(OSError):  # it was replaced
            newest = max(newest, os.stat(file).st_mtime)
    return newest


def lines_of(path):
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_json(path):
    """{} if it is damaged or does not exist."""
    return parse_json("\n".join(lines_of(path)))


def read_status(path):
    """What the training, any script, has reported. A value of another type counts as missing."""
    found = read_json(path)
    status = {}
    for name, default in STATUS.items():
        value = found.get(name)
        status[name] = value if isinstance(value, type(default)) else default
    return status


def read_report(file, hosts):
    """A Report; one that cannot be read says nothing about a host. hosts: those of the attempt."""
    facts = read_json(file)
    host = facts.get("host", "a host")
    try:
        at_fault = [name_among(hosts, name) for name in facts.get("hosts", [])]
        if "started_hosts" in facts:
            came = [name_among(hosts, name) for name in facts["started_hosts"]]
            at_fault = [name for name in hosts if name not in came]
        seconds_ago = facts.get("written", 0) - facts.get("time", 0)
        return Report(
            cause=str(facts["cause"]),
            reason=str(facts["reason"]),
            host=name_among(hosts, host) or host,
            hosts=at_fault,
            rank=facts.get("rank"),
            time=os.stat(file).st_mtime - seconds_ago,  # one clock for all: the file system's
        )
    except (OSError, KeyError, TypeError, AttributeError):
        return Report("killed", "its report cannot be read", str(host))


def parse_lines(lines):
    """The JSON objects among the lines: one may be half written."""
    records = [parse_json(line) for line in lines]
    return [record for record in records if record]


def parse_json(text):
    """{} if it is not a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def code_version():
    """The commit of the current directory, and whether files differ from it; "" without git."""
    code, version = run("git", "describe", "--always", "--dirty=, modified", "--exclude=*")
    return version.strip() if code == 0 else ""


# ------------------------------------------------------------------------------------ processes


def die_with_parent():
    """For preexec_fn: stop the launch if supervise.py is killed. In batch jobs, Slurm does that."""
    by_slurm = os.environ.get("ENVIRONMENT") == "BATCH" and slurm_id()  # PBS sets it, too
    if not by_slurm:
        end_with_parent()


def signal_training(child):
    """Send STOP_SIGNAL to the ranks that torchrun has started.

    Without torchrun, to the processes of COMMAND's session that handle it: a helper, such as
    wandb's, has a session of its own. If none does, to all. Others would die of it, such as a
    shell, or a `tee`.
    """
    number = stop_signal()
    ranks = ranks_of_torchrun()
    if not ranks:
        parents = alive()
        programs = {}
        for process in descendants():
            with suppress(OSError):  # it has just ended
                if os.getsid(process) == child and handles(process, number):
                    programs[process] = os.readlink(f"/proc/{process}/exe")
        # A worker was forked by another of them.
        ranks = [p for p, program in programs.items() if programs.get(parents.get(p)) != program]
    if not ranks:
        os.killpg(child, number)
    for process in ranks:
        with suppress(OSError):
            os.kill(process, number)


def end_of_others(code):
    """End what is still running, such as ranks whose torchrun was killed."""
    deadline = time.monotonic() + LEFT_SECONDS
    while code == 0 and descendants() and time.monotonic() < deadline:
        time.sleep(0.1)  # it may be about to end
    left = descendants()
    if left:
        log(f"ending {len(left)} processes")
        kill_descendants()


if __name__ == "__main__":
    sys.exit(main())
