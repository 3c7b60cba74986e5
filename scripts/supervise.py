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

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, the end of the job's time, DEADLINE or MAX_DURATION stop
the training: each rank gets STOP_SIGNAL, and the file STOP_FILE is made. It has STOP_SECONDS to
save and exit with code 0. A second Ctrl-C kills it. If COMMAND is a launcher of scripts/, SIGQUIT
makes its ranks print their stacks.

supervise.py passes to the training, in the environment: STOP_FILE (if this file exists: save and
exit), DEADLINE (seconds since 1970: the first of these limits), ATTEMPT_ID (JOB.NUMBER),
FAILURE_FILE, EVENTS_FILE and CHECK_RESUME (see scripts/guard.py).
The training may report, as JSON in STATUS_FILE: run_dir, state (running, finished, stopped,
failed), reason, start_step, global_step, saved_step, world_size. An attempt makes progress if it
has saved a step; without a status, if a file that matches PROGRESS_FILE was written; without that,
if it ran for ten minutes.

The attempt log, attempts.jsonl in the run directory, has one line per attempt: start, end,
start_step, end_step, saved_step, recomputed, hosts, world_size, progress (step, file, time or ""),
cause, reason, next (the action that followed), code (the commit), events (those of EVENTS_FILE,
such as a slow rank), and what policy.py has decided from (its Attempt).
Causes: finished, stopped, ended (exit code 0, but no status), out of memory, killed, node lost,
hang, NaN, weights differ, disk, configuration, port, exception.
ON_EVENT, a shell command, is run after each attempt, once it is known what follows. It finds the
line of the attempt log on its standard input, with run_dir. It may take 10 s. The training does not
see ON_EVENT.
With NNODES, the other nodes of the job are spares. Under ssh and PBS, launch.py finds the hosts to
leave out in EXCLUDED_NODES, and writes to NODES_FILE, as JSON, the hosts given and those used.
Exit code: 0 finished or requeued; STOPPED_EXIT_CODE stopped before the end (1 if it is 0 and Slurm
has refused the requeue); 1 gave up, or did not stop in time; 2 user error.

Environment:
    MAX_RESTARTS       restarts in a row without progress; 0: none at all        [10]
    MAX_DURATION       seconds after which the training is asked to stop         []
    DEADLINE           when it is, in seconds since 1970                         []
    RESTART_PAUSE      seconds before the first restart                          [10]
    STOP_SIGNAL        the signal that ranks get: TERM, USR1 or USR2             [TERM]
    STOP_SECONDS       seconds the training may take to stop before it is killed [300]
    RESERVE_SECONDS    it is asked to stop so long before a limit
                       [120, or a tenth of the time if this is less]
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
import shlex
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
from policy import AGAIN, END, Attempt, Limits, Report, decide, stops
from processes import (
    adopt_orphans,
    descendants,
    end_with_parent,
    handles,
    kill_descendants,
    parent_of,
    variables_of,
)
from scheduler import (
    end_of_job,
    ended_by,
    log,
    lost_nodes,
    output_of,
    requeue,
    slurm_id,
    submit_time,
)

PROGRESS_SECONDS = 600  # a script without a status made progress if it ran this long
# Without the hosts at fault, a report of these is evidence against its host.
OWN_FAULTS = ("configuration", "exception", "killed", "out of memory")
USER_ERRORS = ("configuration", "NaN")

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
# Variables with the names of files, by which supervise.py and the training communicate.
FILES = "STOP_FILE STATUS_FILE FAILURE_FILE EVENTS_FILE NODES_FILE".split()
MAX_EVENTS = 100  # of an attempt; earlier ones are ignored
ON_EVENT_SECONDS = 10  # time limit of ON_EVENT: Slurm's KillWait may be running
REQUEUE_SECONDS = 10  # from one try to requeue to the next
MAX_FAILED = 30  # tries that slurmctld answers with another error than a refusal
ASK_SECONDS = 60  # from one question for the end of the job, or for a status, to the next
LEFT_SECONDS = 2  # for what a COMMAND that has succeeded leaves running
NUMBERS = {  # environment variables, and their defaults
    "MAX_RESTARTS": 10,
    "MAX_DURATION": float("inf"),
    "DEADLINE": float("inf"),
    "RESTART_PAUSE": 10.0,
    "STOP_SECONDS": 300.0,
    "RESERVE_SECONDS": 0.0,  # see StopRequests.reserve()
    "STOPPED_EXIT_CODE": 0,
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
        if not shutil.which(command[0]):
            raise ValueError(f"cannot start {command[0]}: there is no such program")
        supervisor = Supervisor(command)
    except ValueError as error:
        log(f"error: {error}")
        return 2
    if is_srun(command):
        for name in list(os.environ):
            if OF_THE_JOB.fullmatch(name):
                del os.environ[name]
    if never_restarts():
        supervisor.set_master(os.environ)
        os.environ.pop("ON_EVENT", None)
        os.execvp(command[0], command)
    adopt_orphans()
    return supervisor.keep_alive()


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
        raise ValueError(f"{name} is {text!r}, not a number from 0 on: correct or unset it")
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
    """Run ON_EVENT, which finds this as JSON on its standard input."""
    if not os.environ.get("ON_EVENT"):
        return
    command = ["sh", "-c", 'eval "$ON_EVENT"']  # `ps` shows no secret in it
    text = json.dumps(record).encode()
    try:
        result = subprocess.run(
            command, input=text, timeout=ON_EVENT_SECONDS, preexec_fn=ignore_stops
        )
        problem = f"exit code {result.returncode}" if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = type(error).__name__  # its text has the command, maybe with a password
        kill_descendants()
    if problem:
        log(f"WARNING: ON_EVENT failed: {problem}")


def ignore_stops():
    """A job that is being requeued gets SIGTERM."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)


# ---------------------------------------------------------------------------- requests to stop


class StopRequests:
    """All of them, whoever made them, and the limits of time. policy.stops() knows which count."""

    def __init__(self):
        self.made = {}  # {a signal, STOP, DEADLINE, MAX_DURATION, END, ...: when}
        self.obeyed_at = None  # when the training was asked to stop
        self.pressed_again = False  # Ctrl-C
        self.began = time.time()
        for name in SIGNALS:  # before Slurm is asked, which may take a minute
            under_nohup = name == "SIGHUP" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(getattr(signal, name), self.on_signal)
        self.ends = {  # the limits, in seconds since 1970
            END: end_of_job() or number("SLURM_JOB_END_TIME"),
            "DEADLINE": number("DEADLINE"),
            "MAX_DURATION": self.began + number("MAX_DURATION"),
        }

    def on_signal(self, number, _frame):
        now = time.time()
        if number == signal.SIGINT and self.obeyed_at:  # within a second, it is the same one
            self.pressed_again = now > self.obeyed_at + 1
        self.made.setdefault(signal.Signals(number).name, now)

    def ask_again(self):
        """The end may be changed, and suspended jobs end later. In a thread: Slurm may be slow."""
        while True:
            time.sleep(ASK_SECONDS)
            self.ends[END] = end_of_job() or self.ends[END]

    def reserve(self, limit):
        """The seconds before a limit that are kept for a save."""
        usual = min(120, (self.ends[limit] - self.began) / 10)
        return number("RESERVE_SECONDS") or usual

    def seconds_left(self):
        """{limit: seconds until it is time to save}"""
        now = time.time()
        return {limit: end - self.reserve(limit) - now for limit, end in self.ends.items()}

    def look(self, run_dir=None):
        """Add the limits that are reached, and a file STOP in the run directory."""
        for limit, seconds in self.seconds_left().items():
            if seconds <= 0:
                self.made.setdefault(limit, time.time())
        if run_dir:
            with suppress(OSError):
                self.made["STOP"] = os.stat(f"{run_dir}/STOP").st_mtime

    def kill_time(self):
        """When a training that was asked to stop is killed: in time for a requeue."""
        reserve = self.reserve(END)
        seconds = number("STOP_SECONDS")
        if END in self.made:
            seconds = max(seconds, reserve)
        end = self.ends[END] - min(30, reserve / 4)  # later, Slurm would not requeue the job
        limit = self.obeyed_at + seconds
        return min(limit, end) if end > self.obeyed_at else limit


# ---------------------------------------------------------------------------------- supervision


class Supervisor:
    """Runs COMMAND as often as policy.py says."""

    def __init__(self, command):
        self.command = command
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
        self.job = job or f"{HOST}-{os.getpid()}"
        self.restarts = number("SLURM_RESTART_COUNT")
        logs = Path(os.environ.get("LOG_DIR") or REPOSITORY / "logs")  # all nodes see it
        self.directory = (logs / f"supervise_{self.job}").resolve()
        self.files = None  # the directory of FILES, in the current attempt
        self.run_dir = None  # reported by the training
        self.child = None  # the process of COMMAND
        self.requests = StopRequests()
        self.submitted = submit_time() or self.requests.began
        self.earlier = []  # attempts of this process
        signal.signal(signal.SIGQUIT, self.forward)

        self.job_nodes = expand(os.environ.get("SLURM_JOB_NODELIST", ""))
        self.given = self.job_nodes  # all hosts that may be used
        self.excluded = expand(os.environ.get("EXCLUDED_NODES", ""))
        self.leave_out(())

    def forward(self, number, _frame):
        """A request for stacks, which would end other programs than our launchers."""
        if self.child and is_ours(self.command):
            self.child.send_signal(number)

    def leave_out(self, suspects):
        """Choose the nodes of the next attempt. ValueError if too few are left."""
        os.environ["EXCLUDED_NODES"] = ",".join([*self.excluded, *suspects])
        self.nodes = choose_hosts(self.job_nodes, os.environ) if self.job_nodes else []

    def set_master(self, env):
        """For srun, whose tasks have not agreed on it: MASTER_ADDR and MASTER_PORT."""
        if self.nodes and is_srun(self.command):
            env["MASTER_ADDR"], env["MASTER_PORT"] = choose_master(env, self.nodes)

    def keep_alive(self):
        """Run attempts until the training ends. Returns the exit code."""
        in_background(self.requests.ask_again)
        while True:
            self.requests.obeyed_at = None
            attempt, facts = self.attempt()
            decision = self.decide(attempt, facts)
            if decision.action in AGAIN:
                log(decision.sentence)
                if self.is_stopped_in_pause(decision.pause):
                    attempt = attempt._replace(requests={**self.requests.made})
                    decision = self.decide(attempt, facts)
            answer = ""
            if decision.action == "requeue":
                answer = self.requeue(decision.suspects)
                if answer != "requeued":
                    decision = self.decide(attempt, facts, can_requeue=False)
            run_on_event({**record_of(attempt, facts, decision), "run_dir": self.run_dir})
            if decision.action not in AGAIN:
                break
            self.requests.made.clear()  # a limit, if any, that was raised since
            self.earlier.append(attempt._replace(next=decision.action))
            self.leave_out(decision.suspects)
        self.end(decision)
        was_refused = answer not in ("", "requeued", "ended")
        return exit_code(decision, was_refused)

    def decide(self, attempt, facts, can_requeue=True):
        """Ask policy.py what follows, and write it to the attempt log: a requeue ends the job."""
        limits = self.limits(can_requeue=can_requeue and bool(slurm_id()))
        decision = decide(attempt, [*self.earlier_starts(), *self.earlier], limits)
        self.record(record_of(attempt, facts, decision))
        return decision

    def limits(self, can_requeue=False):
        hosts = tuple(host for host in self.given if host not in self.excluded)
        fewest = len(hosts)
        if os.environ.get("NNODES") and self.given:
            fewest, _ = fewest_and_most(os.environ, len(self.given))
        return Limits(
            hosts=hosts,
            spares=len(hosts) - fewest,
            max_restarts=number("MAX_RESTARTS"),
            restart_pause=number("RESTART_PAUSE"),
            can_requeue=can_requeue,
            submitted=self.submitted,
            seconds=self.requests.seconds_left(),
        )

    def asked(self):
        """The requests to stop that count."""
        return stops(Attempt((), None, requests=self.requests.made), self.limits())

    def is_stopped_in_pause(self, seconds):
        """Wait before a restart. Returns whether a stop is requested in the meantime."""
        end = time.monotonic() + seconds
        self.requests.look(self.run_dir)
        while time.monotonic() < end and not self.asked():
            time.sleep(min(1, seconds))
            self.requests.look(self.run_dir)
        return bool(self.asked())

    def requeue(self, suspects):
        """Try until Slurm answers. Returns the last answer: see scheduler.py."""
        left_out = [*self.excluded, *suspects]
        answers = [requeue(left_out, self.given)]
        while answers[-1] in ("failed", "no answer") and answers.count("failed") < MAX_FAILED:
            if "SIGINT" in self.requests.made or time.time() > self.requests.ends[END]:
                break
            time.sleep(REQUEUE_SECONDS)
            answers.append(requeue(left_out, self.given))
        return answers[-1]

    def end(self, decision):
        """Print how the job ends."""
        remedy = ""
        if decision.action == "stop":
            remedy = f"; to resume: {how_to_resume()}"
            with suppress(OSError):  # it was made in a pause: obeyed
                os.remove(f"{self.run_dir}/STOP")
        elif decision.action == "give up":
            remedy = f". After fixing it, to resume: {how_to_resume()}"
        if decision.action != "finish":
            log(f"{decision.sentence}{remedy}")
        if decision.action != "requeue":
            shutil.rmtree(self.directory / "check_resume", ignore_errors=True)
        with suppress(OSError):
            self.directory.rmdir()  # unless it holds the attempt log

    # ------------------------------------------------------------------------- one attempt

    def attempt(self):
        """Run COMMAND once. Returns what policy.py needs, and more for the attempt log."""
        count = len(self.earlier) + 1
        self.make_files(count)
        env = self.environment(count)
        facts = {"attempt": env["ATTEMPT_ID"], "start": time.time(), "code": code_version()}
        before = last_change()
        code = self.run(env, facts)

        status = read_status(self.files / "STATUS_FILE")
        self.run_dir = status.get("run_dir") or self.run_dir
        hosts = self.used_hosts()
        of_ranks = "".join(lines_of(self.files / "STOP_FILE")[:1])  # by run_torchrun.py, guard.py
        self.add_requests_of(status, of_ranks)
        events = parse_lines(lines_of(self.files / "EVENTS_FILE"))[-MAX_EVENTS:]
        failed_gpus = [event.get("host") for event in events if event.get("event") == "gpu_failed"]
        start_step = status.get("start_step", 0)
        end_step = max(start_step, status.get("global_step", 0))
        saved_step = max(start_step, status.get("saved_step", 0))
        facts.update(
            start_step=start_step,
            recomputed=max(0, end_step - saved_step),
            world_size=status.get("world_size"),
            events=events,
        )
        attempt = Attempt(
            hosts=tuple(hosts),
            exit_code=128 - code if 128 < code < 160 else code,  # of a shell
            reports=tuple(self.reports(hosts, code)),
            defective=tuple({name_among(hosts, host) for host in failed_gpus}),
            requests={**self.requests.made},
            of_ranks=of_ranks,
            state=status.get("state", ""),
            stopped_by=status.get("reason", ""),
            end_step=end_step,
            saved_step=saved_step if status else None,
            restarts=self.restarts,
            end=time.time(),
        )
        shutil.rmtree(self.files, ignore_errors=True)
        return attempt._replace(progress=progress(attempt, facts, before)), facts

    def make_files(self, count):
        """The directory of FILES of the next attempt."""
        self.files = self.directory / f"{HOST}_{os.getpid()}_{count}"
        shutil.rmtree(self.files, ignore_errors=True)  # of a supervisor that was killed
        try:
            self.files.mkdir(0o700, parents=True)
        except OSError as error:
            self.files = Path(tempfile.mkdtemp())
            what = "a stop reaches ranks on this host only: set LOG_DIR"
            log(f"WARNING: cannot write to {self.directory} ({error}); {what}")

    def environment(self, count):
        """The environment of the next attempt."""
        env = dict(os.environ)
        env.pop("ON_EVENT", None)  # it may have a secret
        env["ATTEMPT"] = str(count)
        env["ATTEMPT_ID"] = f"{self.job}.{1000 * self.restarts + count}"
        for name in FILES:
            env[name] = str(self.files / name)
        if env.get("CHECK_RESUME") == "1":
            env["CHECK_RESUME"] = str(self.directory / "check_resume")
        deadline = min(self.requests.ends.values())
        if deadline < float("inf"):
            env["DEADLINE"] = str(deadline)
        if count > 1:
            env["SLURM_OVERLAP"] = "1"  # Slurm may count the previous step as running
        self.set_master(env)
        return env

    def command_on_nodes(self):
        """COMMAND; srun is told the nodes of this attempt."""
        if not self.nodes or not is_srun(self.command):
            return self.command
        nodes = [f"--nodes={len(self.nodes)}", f"--nodelist={','.join(self.nodes)}"]
        return [self.command[0], *nodes, *self.command[1:]]

    def used_hosts(self):
        """Those of this attempt, as launch.py or this file has chosen them."""
        chosen = read_json(self.files / "NODES_FILE")
        self.given = chosen.get("given") or self.given
        return chosen.get("used") or self.nodes or [HOST]

    def add_requests_of(self, status, of_ranks):
        """Those that did not come through this process."""
        self.requests.look()
        made = self.requests.made
        now = time.time()
        if made or status.get("state") == "finished":
            return
        reason = status.get("reason") if status.get("state") == "stopped" else ""
        if reason == "time limit":  # the training looks at its own clock
            ends = self.requests.ends
            made[min(ends, key=ends.get)] = now
        elif reason == "STOP file" and not of_ranks:
            made["STOP"] = now
        else:
            by_slurm = ended_by()
            if by_slurm:
                made[by_slurm] = now

    def reports(self, hosts, code):
        """Those of the hosts; without any, what the scheduler knows."""
        files = sorted(self.files.glob("FAILURE_FILE*"))
        found = [read_report(file, hosts) for file in files]
        if found or code == 0 or self.requests.made or not is_srun(self.command):
            return found
        program = next((word for word in self.command[1:] if not word.startswith("-")), "true")
        lost = lost_nodes(program, hosts) if len(hosts) > 1 else []
        if lost:
            reason = "down, or the program cannot be started there: a missing mount?"
            return [Report("node lost", reason, ", ".join(lost), tuple(lost))]
        if code == 2:  # also the error number of its execve(), in a short outage
            return [Report("killed", "exit code 2 of srun, and no report", "a node")]
        return []

    def run(self, env, facts):
        """Run COMMAND until it ends or is killed. Returns its exit code."""
        try:
            self.child = subprocess.Popen(
                self.command_on_nodes(), env=env, start_new_session=True, preexec_fn=die_with_parent
            )
        except OSError as error:
            log(f"error: cannot start {self.command[0]}: {error.strerror}")
            return 2
        has_ended = threading.Event()
        waiting = in_background(self.record_start, facts, has_ended)
        is_killed = False
        code = None
        # A signal may have killed a shell, but its children still save.
        while code is None or (code < 0 and self.requests.obeyed_at and descendants()):
            time.sleep(0.2)
            if not self.requests.obeyed_at:
                self.stop_if_requested()
            elif self.requests.pressed_again or time.time() > self.requests.kill_time():
                self.kill_command()
                is_killed = True
                break
            code = self.child.poll()
        has_ended.set()
        end_of_others(code)
        waiting.join(ASK_SECONDS)
        return -9 if is_killed else code

    def record_start(self, facts, has_ended):
        """Write the attempt to the attempt log as soon as the training owns its run directory.

        A status that never comes is asked for less and less.
        """
        seconds = 0.5
        while not has_ended.wait(seconds):
            seconds = min(2 * seconds, ASK_SECONDS)
            status = read_status(self.files / "STATUS_FILE")
            if status.get("state"):
                break
        else:
            return
        self.run_dir = status.get("run_dir") or self.run_dir
        hosts = self.used_hosts()
        for record in self.log_records():
            asked = record.get("requests", {})
            if "STOP" in asked:  # for each job of a chain that was submitted before
                self.requests.made["STOP"] = asked["STOP"]
        self.record({**facts, "hosts": hosts, "cause": "running"})

    def stop_if_requested(self):
        """Ask the training to stop. The ranks come first; the rest may wait for a disk."""
        self.requests.look()
        asked = self.requests.made and self.asked()
        if not asked:
            return
        self.requests.obeyed_at = time.time()
        if is_srun(self.command) or is_ours(self.command):
            # srun forwards it; see run_torchrun.py and guard.py
            self.child.send_signal(signal.SIGUSR2)
        else:
            signal_training(self.child.pid)
        in_background((self.files / "STOP_FILE").touch)
        log(f"{asked[0]}: saving and stopping; press Ctrl-C again to kill the training")

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

    def earlier_starts(self):
        """The attempts of this job before it was requeued."""
        found = []
        for record in self.log_records():
            job, _, _ = f"{record['attempt']}".rpartition(".")
            is_complete = record.keys() >= set(Attempt._fields)
            if job == self.job and is_complete and record["restarts"] < self.restarts:
                attempt = Attempt(*[record[name] for name in Attempt._fields])
                reports = tuple(Report(**report) for report in attempt.reports)
                found.append(attempt._replace(hosts=tuple(attempt.hosts), reports=reports))
        return found

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


def record_of(attempt, facts, decision):
    """The line of the attempt log."""
    reports = [report._asdict() for report in attempt.reports]
    followed = {"cause": decision.cause, "reason": decision.reason, "next": decision.action}
    return {**facts, **attempt._asdict(), "reports": reports, **followed}


def exit_code(decision, was_refused):
    """The exit code of supervise.py."""
    if decision.action in ("finish", "requeue"):
        return 0
    if decision.action == "stop" and decision.cause == "stopped":
        return number("STOPPED_EXIT_CODE") or int(was_refused)
    return 2 if decision.cause in USER_ERRORS else 1


def in_background(function, *arguments):
    """Call it in a thread: it may wait for a disk. An error of ours ends no training."""

    def call():
        try:
            function(*arguments)
        except Exception as error:
            log(f"WARNING: {type(error).__name__}: {error}; the training goes on")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def is_srun(command):
    """Other launchers choose their nodes themselves."""
    return Path(command[0]).name == "srun"


def is_ours(command):
    """Whether it is a launcher of this scripts/, which forwards signals to the ranks."""
    files = [Path(word).resolve() for word in command[:2]]
    ours = [file.name for file in files if REPOSITORY / "scripts" in file.parents]
    return bool(ours) and ours != ["guard.py"] and not is_srun(command)


def progress(attempt, facts, before):
    """How the attempt has shown progress: "step", "file", "time", or "" if it has made none.

    before: what last_change() returned at its start.
    """
    if facts["world_size"]:  # the script has written its status
        return "step" if attempt.saved_step > facts["start_step"] else ""
    if os.environ.get("PROGRESS_FILE"):
        return "file" if last_change() > before else ""
    return "time" if attempt.end - facts["start"] > PROGRESS_SECONDS else ""


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


def read_report(file, hosts):
    """A Report; one that cannot be read says nothing about a host. hosts: those of the attempt."""
    facts = read_json(file)
    host = facts.get("host") or file.name.partition("FAILURE_FILE.")[2] or "a host"
    try:
        own = [host] if facts["cause"] in OWN_FAULTS else []
        named = facts.get("hosts", facts.get("silent_hosts", own))
        if "started_hosts" in facts:
            came = [name_among(hosts, name) for name in facts["started_hosts"]]
            named = [name for name in hosts if name not in came]
        written = os.stat(file).st_mtime
        return Report(
            cause=facts["cause"] + "",
            reason=facts["reason"] + "",
            host=name_among(hosts, host) or host,
            hosts=tuple(name_among(hosts, name) for name in named),
            rank=facts.get("rank"),
            time=float(facts.get("time", written)),
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError):
        return Report("killed", "its report cannot be read", f"{host}")


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


def signal_training(child):
    """Send STOP_SIGNAL to the ranks that torchrun has started.

    Without torchrun, to the processes of COMMAND's session that handle it: a helper, such as
    wandb's, has a session of its own. If none does, to all. Others would die of it, such as a
    shell, or a `tee`.
    """
    from report import stop_signal

    number = stop_signal()
    parents = {}  # of the processes below torchrun
    programs = {}  # of the processes that handle the signal
    for process in descendants():
        with suppress(OSError):  # it has just ended
            if "TORCHELASTIC_RUN_ID" in variables_of(process):
                parents[process] = parent_of(process)
            if os.getsid(process) == child and handles(process, number):
                programs[process] = os.readlink(f"/proc/{process}/exe")
    ranks = [process for process, parent in parents.items() if parent not in parents]
    if not ranks:
        ranks = [process for process in programs if not is_worker(process, programs)]
    if not ranks:
        os.killpg(child, number)
    for process in ranks:
        with suppress(OSError):
            os.kill(process, number)


def is_worker(process, programs):
    """Whether it was forked by another of them."""
    with suppress(OSError):
        parent = parent_of(process)
        return programs.get(parent) == programs[process]
    return False


def end_of_others(code):
    """End what COMMAND has left running, such as ranks whose torchrun was killed."""
    deadline = time.monotonic() + LEFT_SECONDS
    while code == 0 and descendants() and time.monotonic() < deadline:
        time.sleep(0.1)  # it may be about to end
    left = descendants()
    if left:
        log(f"ending {len(left)} processes that COMMAND has left running")
        kill_descendants()


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
