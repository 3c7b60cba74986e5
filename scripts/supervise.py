#!/usr/bin/env python3
"""Restart a training run after a crash, and requeue its job when the time is up.

Usage: scripts/supervise.py COMMAND [ARGUMENT ...]

COMMAND is any launch command of this repository. The Slurm and PBS scripts call supervise.py
themselves. It needs only Python 3.8.

    the training ...                  supervise.py ...
    finished                          exits
    stopped: time limit, preemption   requeues the job under Slurm, if Slurm permits it; else
                                      prints how to resume
    stopped by you                    prints how to resume
    crashed                           runs the same command again
    crashed 3 times without progress  prints the reason and exits
    started by the scheduler 3 times  the same, instead of a requeue
    in a row without progress
    failed with a permanent error     prints the reason and exits

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, the end of the job's time or MAX_DURATION stop the
training, which saves first. A second Ctrl-C kills it. If COMMAND is a launcher of scripts/, SIGQUIT
makes its ranks print their stacks.

supervise.py passes to the training, in the environment: STOP_FILE (if this file exists: save and
exit), DEADLINE (seconds since 1970), ATTEMPT_ID (JOB.NUMBER), FAILURE_FILE and EVENTS_FILE (see
scripts/guard.py).
The training reports, as JSON in STATUS_FILE: run_dir, state (running, finished, stopped, failed),
reason, start_step, global_step, saved_step, world_size. A script that writes no STATUS_FILE is
restarted too; an attempt that ran for ten minutes then counts as progress.

The attempt log, attempts.jsonl in the run directory, has one line per attempt: start, end,
start_step, end_step, saved_step, recomputed, hosts, world_size, cause, reason, code (the commit),
events (those of EVENTS_FILE, such as a slow rank).
Causes: finished, stopped, ended (exit code 0, but no status), out of memory, killed, node lost,
hang, NaN, weights differ, disk, configuration, port, in use, exception.
ON_EVENT, a shell command, is run after each attempt. It finds the line of the attempt log on its
standard input and in the variable EVENT, with two more fields: run_dir and next, which is finish,
stop, requeue, restart, or why supervise.py gives up. It may take 10 s.
A node is left out of the next attempts if only ranks on it did not answer in two hangs, or if its
GPU has failed. With NNODES, a spare node takes its place at once. Without a spare, a Slurm job is
requeued without the node. Under ssh and PBS, launch.py finds the hosts to leave out in
EXCLUDED_NODES, and writes all its hosts to NODES_FILE, one per line.
Exit code: 0 finished or requeued; STOPPED_EXIT_CODE stopped before the end; 1 gave up; 2 user
error.

Environment:
    MAX_RESTARTS       restarts after crashes within this job                    [10]
    MAX_DURATION       seconds after which the training is asked to stop         []
    STOP_SECONDS       seconds the training may take to stop before it is killed [300]
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

import ctypes
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

NO_PROGRESS = 3  # crashes, or starts of the job, in a row without progress before giving up
PROGRESS_SECONDS = 600  # a script without a status made progress if it ran this long
WOULD_REPEAT = ("configuration", "NaN", "in use")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: the signal to send when the parent process ends
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>: orphans among the descendants become children
ON_TIME = {"time limit", "SIGUSR1", "SIGUSR2", "SIGTERM"}  # after these, the job is requeued

SSH_FAILED = 255  # exit code of ssh and of launch.py
SIGKILLED = (-9, 137)  # exit code of a process that was killed, and of a shell whose child was
# Variables with the names of files, by which supervise.py and the training communicate.
FILES = ("STOP_FILE", "STATUS_FILE", "FAILURE_FILE", "EVENTS_FILE", "NODES_FILE")
MAX_EVENTS = 100  # of an attempt; earlier ones are ignored
ON_EVENT_SECONDS = 10  # time limit of ON_EVENT: Slurm's KillWait may be running
HANGS = 2  # in which a node did not answer, before it is left out
NUMBERS = {  # environment variables, and their defaults
    "MAX_RESTARTS": 10,
    "MAX_DURATION": float("inf"),
    "STOP_SECONDS": 300.0,
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
REPOSITORY = Path(__file__).resolve().parent.parent


def main():
    command = sys.argv[1:]
    if sys.version_info < (3, 8):  # noqa: UP036
        log(f"error: {sys.executable} is not Python 3.8 or newer: set PYTHON to a newer one")
        return 2
    if not command or command[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if command else 2
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


def log(text):
    try:
        print(f"supervise.py: {text}", file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed, or Ctrl-C ended a `tee`
        sys.stderr = open(os.devnull, "w")


def made_progress(attempt):
    """Whether an attempt has saved a step that the previous one had not."""
    if attempt.get("world_size"):  # the script has written its status
        return attempt["saved_step"] > attempt["start_step"]
    return attempt["end"] - attempt["start"] > PROGRESS_SECONDS


def exit_code(decision, cause):
    """The exit code of supervise.py."""
    if decision in ("finish", "requeue"):
        return 0
    if decision == "stop":
        return number("STOPPED_EXIT_CODE")
    return 2 if cause in ("configuration", "in use") else 1


def run_on_event(record):
    """Run ON_EVENT, which finds this as JSON on its standard input and in the variable EVENT."""
    command = os.environ.get("ON_EVENT")
    if not command:
        return
    text = json.dumps(record)
    options = {"shell": True, "input": text.encode(), "env": {**os.environ, "EVENT": text}}
    try:
        code = subprocess.run(command, timeout=ON_EVENT_SECONDS, **options).returncode
        problem = f"exit code {code}" if code else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = type(error).__name__  # its text has the command, maybe with a password
        kill_descendants()
    if problem:
        log(f"WARNING: ON_EVENT failed: {problem}")


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
        now = time.time()
        self.end_of_job = end_of_job()
        self.deadline = min(self.end_of_job, now + number("MAX_DURATION"))
        # The training is asked to stop this many seconds before the deadline.
        self.reserve = min(120, (self.deadline - now) / 10)
        self.signals = []  # names of those received
        self.stopping_since = None
        self.pressed_again = False  # Ctrl-C
        self.killed = False  # by us, because it did not stop
        self.warning = ""  # the last one of watch()
        self.child = None  # the process of COMMAND

        # attempts of this process
        self.count = 0
        self.crashes = 0  # in a row without progress

        self.find_nodes()

        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            under_nohup = name == "SIGHUP" and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(getattr(signal, name), self.on_signal)
        signal.signal(signal.SIGQUIT, self.forward)

    def on_signal(self, number, _frame):
        if number == signal.SIGINT and self.stopping_since:  # within a second, it is the same one
            self.pressed_again = time.time() > self.stopping_since + 1
        self.signals.append(signal.Signals(number).name)

    def forward(self, number, _frame):
        """A request for stacks, which would end other programs than our launchers."""
        is_ours = any("scripts/" in word for word in self.command[:2])
        if self.child and is_ours and not is_srun(self.command):
            self.child.send_signal(number)

    def keep_alive(self):
        """Run attempts until the training ends. Returns the exit code."""
        while True:
            attempt = self.attempt()
            self.leave_out_bad_nodes(attempt)
            if attempt["cause"] != "in use":  # otherwise the attempt log is another job's
                self.record(attempt)
            self.count_crash(attempt)
            decision = self.decide(attempt)
            run_on_event({**attempt, "run_dir": self.run_dir, "next": decision})
            if decision == "requeue" and not requeue(self.left_out):
                decision = self.decide(attempt, can_requeue=False)
                if self.bad_node:
                    log(f"to leave out {', '.join(self.left_out)}: {submit_without(self.left_out)}")
            self.report(attempt, decision)
            if decision != "restart":
                break
        with suppress(OSError):
            self.directory.rmdir()  # unless it holds the attempt log
        return exit_code(decision, attempt["cause"])

    def count_crash(self, attempt):
        if made_progress(attempt) or self.bad_node == "replaced":
            self.crashes = 0
        else:
            self.crashes += 1

    # ------------------------------------------------------------------------- what to do next

    def decide(self, attempt, can_requeue=True):
        """What to do after an attempt: finish, stop, requeue, restart, or else why to give up.

        can_requeue is False if the scheduler has refused to requeue.
        """
        cause = attempt["cause"]
        if cause in ("finished", "ended"):
            return "finish"
        if can_requeue and self.requeue_may_help(attempt):
            starts = self.starts_without_progress()
            if starts < NO_PROGRESS:
                return "requeue"
            return f"in {starts} starts of this job in a row, no new step was saved"
        if cause == "stopped":
            return "stop"
        if cause in WOULD_REPEAT and self.bad_node != "replaced":
            return "a restart would not help"
        if self.signals or self.killed:
            return "a stop was requested"
        if self.crashes >= NO_PROGRESS:
            return f"{self.crashes} crashes without progress"
        if self.count > number("MAX_RESTARTS"):
            return f"MAX_RESTARTS={number('MAX_RESTARTS')} is reached"
        return "restart"

    def requeue_may_help(self, attempt):
        """Whether the training should continue once the scheduler has started the job again."""
        if attempt["cause"] == "stopped":
            reasons = attempt["reason"].split(", ")
            return any(reason in ON_TIME for reason in reasons)
        if self.bad_node == "no spare" and not self.signals:
            return True
        if self.crashes >= NO_PROGRESS or attempt["cause"] in WOULD_REPEAT:
            return False
        if self.signals:
            return all(name in ON_TIME for name in self.signals)
        return self.killed  # after the time limit

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
        elif decision == "restart":
            log(f"{what}. Restart {self.count} of {number('MAX_RESTARTS')}{saved}")
        else:
            remedy = f"After fixing it, to resume: {how_to_resume()}"
            log(f"error: {what}. Giving up: {decision}. {remedy}")

    def starts_without_progress(self):
        """How often in a row, with this time, this job was started and saved no new step."""
        numbers = set()
        for record in reversed(self.log_records()):
            job, _, number = record["attempt"].rpartition(".")
            is_complete = "end" in record
            if job != self.job or not is_complete or made_progress(record):
                break
            numbers.add(int(number) // 1000)  # see environment()
        return len(numbers)

    # ------------------------------------------------------------------------- the nodes

    def find_nodes(self):
        self.wanted = number("NNODES")
        self.job_nodes = nodes_of_job()
        self.left_out = os.environ.get("EXCLUDED_NODES", "").replace(",", " ").split()
        self.nodes = choose_nodes(self.job_nodes, self.left_out, self.wanted)  # of an attempt
        if len(self.nodes) < len(self.job_nodes):
            used = f"{len(self.nodes)} of the job's {len(self.job_nodes)} nodes"
            log(f"training on {used} (NNODES, EXCLUDED_NODES); the others are spares")
        self.silent_hosts = []  # for each hang, the host of which alone ranks did not answer
        self.bad_node = ""  # "replaced" by a spare node, or there is "no spare"

    def leave_out_bad_nodes(self, attempt):
        """Leave out the nodes with evidence against them, if others can take their place."""
        self.bad_node = ""
        events = [event for event in attempt["events"] if event.get("event") == "gpu_failed"]
        failed = [event["host"] for event in events if isinstance(event.get("host"), str)]
        for host in dict.fromkeys(failed):  # several ranks of a host may report it
            self.leave_out(host, "its GPU has failed", attempt)
        silent = self.failure.get("silent_hosts", [])
        if len(silent) == 1:  # if several hosts are silent, the network may be at fault
            self.silent_hosts += silent
            hangs = self.silent_hosts.count(silent[0])
            if hangs >= HANGS:
                why = f"a rank on it did not answer in {hangs} hangs"
                self.leave_out(silent[0], why, attempt)

    def leave_out(self, host, why, attempt):
        """Leave out the node of this host, if another one can take its place."""
        given = self.job_nodes or self.launcher_hosts  # all that may be used
        node = name_among(given, host)
        if not node or node in self.left_out:
            return
        left_out = [*self.left_out, node]
        remaining = [other for other in given if other not in left_out]
        if self.wanted and len(remaining) >= self.wanted:
            self.bad_node = "replaced"
            what = f"{node} is left out: {why}; a spare node takes its place"
            self.nodes = choose_nodes(self.job_nodes, left_out, self.wanted)
        elif self.job_nodes:
            self.bad_node = "no spare"
            what = f"{node} is to be left out: {why}; there is no spare node"
        else:
            log(f"WARNING: {node} may be defective: {why}; there is no spare node (NNODES)")
            return
        self.left_out = left_out
        os.environ["EXCLUDED_NODES"] = ",".join(left_out)
        event = {"time": time.time(), "event": "node_left_out", "text": what, "hosts": [node]}
        attempt["events"] = [*attempt["events"], event]
        log(what)

    # ------------------------------------------------------------------------- one attempt

    def attempt(self):
        """Run COMMAND once. Returns the record for the attempt log."""
        self.count += 1
        if self.count > 1:
            self.drop_lost_nodes()
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
        self.is_recorded = False  # whether the attempt log has it, with the cause "running"
        code = self.run(env)

        status = read_status(self.files / "STATUS_FILE")
        self.failure = read_failure(self.files / "FAILURE_FILE")
        self.launcher_hosts = lines_of(self.files / "NODES_FILE")
        events = parse_lines(lines_of(self.files / "EVENTS_FILE"))[-MAX_EVENTS:]
        shutil.rmtree(self.files, ignore_errors=True)
        self.run_dir = status.get("run_dir") or self.run_dir
        cause, reason = self.cause(code, status, self.failure)
        return {
            **self.begun,
            "end": time.time(),
            **steps(status),
            "world_size": status.get("world_size"),
            "cause": cause,
            "reason": reason,
            "events": events,
        }

    def environment(self):
        """The environment of the next attempt."""
        env = dict(os.environ)
        env["ATTEMPT"] = str(self.count)
        env["ATTEMPT_ID"] = f"{self.job}.{1000 * number('SLURM_RESTART_COUNT') + self.count}"
        env["STORE_KEY"] = os.urandom(8).hex()  # see scripts/guard.py
        for name in FILES:
            env[name] = str(self.files / name)
        if self.deadline < float("inf"):
            env["DEADLINE"] = str(self.deadline)
        if self.count > 1:
            env["SLURM_OVERLAP"] = "1"  # Slurm may count the previous step as running
        choose_master(env, self.command, self.nodes)
        return env

    def drop_lost_nodes(self):
        """After `sbatch --no-kill`, a job goes on without a lost node: Slurm no longer lists it."""
        listed = slurm_job().get("NodeList")
        if not listed:  # not in Slurm, or it does not answer
            return
        alive = (output_of("scontrol", "show", "hostnames", listed) or "").split()
        lost = [node for node in self.job_nodes if node not in alive]
        if lost and alive:
            log(f"Slurm has lost {', '.join(lost)}: the other nodes go on")
            self.job_nodes = alive
            self.nodes = choose_nodes(alive, self.left_out, self.wanted)

    def command_on_nodes(self):
        """COMMAND; srun is told the nodes of this attempt."""
        if not self.nodes or not is_srun(self.command):
            return self.command
        nodes = [f"--nodes={len(self.nodes)}", f"--nodelist={','.join(self.nodes)}"]
        return [self.command[0], *nodes, *self.command[1:]]

    def cause(self, code, status, failure):
        """Why an attempt ended: (one of the causes above, reason)."""
        asked = ", ".join(self.signals) or "time limit"
        state = status.get("state")
        reason = status.get("reason", "")
        # If the launcher was killed, the kernel sends the training SIGTERM: it saves and stops.
        # If ssh has lost the connection to a host, node.py does so there.
        launcher_failed = code in (*SIGKILLED, SSH_FAILED) and not self.signals
        orphaned = launcher_failed and state == "stopped" and reason == "SIGTERM"
        if state in ("finished", "stopped") and not orphaned:
            if reason == "STOP file" and self.stopping_since:  # our own file
                reason = asked
            return state, reason
        if failure:
            rank = f"rank {failure['rank']} on " if "rank" in failure else ""
            return failure["cause"], f"{rank}{failure['host']}: {failure['reason']}"
        if code == 0 and self.stopping_since:
            return "stopped", asked
        if code == 0:
            return "ended", "exit code 0, but the training wrote no STATUS_FILE"
        if self.killed:
            return "killed", "it did not stop in time (STOP_SECONDS), or you pressed Ctrl-C twice"
        if code == 2:
            return "configuration", "see the error above"
        if code in SIGKILLED:
            return "killed", "killed (SIGKILL); out of memory? (see dmesg)"
        remedy = "see the errors above; if there are none, see dmesg"
        return "killed", f"exit code {code} and no error report: {remedy}"

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
        while code < 0 and self.signals and not self.killed and descendants():
            time.sleep(0.2)  # the scheduler killed the shell, but its children still save
            self.watch()
        kill_descendants()  # for example, ranks whose torchrun was killed
        return code

    def watch(self):
        """Call monitor(), whatever files it finds: an error of ours should not end the training."""
        try:
            self.monitor()
        except Exception as error:
            text = f"WARNING: {type(error).__name__}: {error}; the training goes on"
            if text != self.warning:
                log(text)
            self.warning = text

    def monitor(self):
        """Record the run directory, forward stop requests."""
        if not self.is_recorded:
            self.record_start()
        if not self.stopping_since:
            self.stop_if_requested()
        if self.stopping_since and not self.killed:
            self.kill_if_too_slow()

    def record_start(self):
        """Write the attempt to the attempt log as soon as the training owns its run directory."""
        status = read_status(self.files / "STATUS_FILE")
        if not status.get("state"):
            return
        self.run_dir = status.get("run_dir") or self.run_dir
        self.is_recorded = True
        of_this_job = [r for r in self.log_records() if r["attempt"].startswith(f"{self.job}.")]
        changed = files_changed_since(of_this_job[0]["start"]) if of_this_job else []
        if changed:
            names = ", ".join(changed[:5])
            log(f"WARNING: changed since the first attempt, which trained other code: {names}")
        self.record({**self.begun, "cause": "running"})

    def stop_if_requested(self):
        """Ask the training to stop, after a signal or shortly before the end of the time."""
        out_of_time = time.time() > self.deadline - self.reserve
        if self.signals:
            reason = self.signals[0]
        elif out_of_time:
            reason = "time limit"
        else:
            return
        (self.files / "STOP_FILE").touch()
        self.stopping_since = time.time()
        log(f"{reason}: saving and stopping; press Ctrl-C again to kill the training")

    def kill_if_too_slow(self):
        """Kill the training after STOP_SECONDS, in time for a requeue, or at a second Ctrl-C."""
        limit = self.stopping_since + number("STOP_SECONDS")
        if not self.signals:  # at the time limit; after it, Slurm would no longer requeue the job
            limit = min(limit, self.end_of_job - self.reserve / 4)
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
                step = attempt["start_step"]
                old.update(start_step=step, end_step=step, saved_step=step, recomputed=0)
                old.update(end=attempt["start"], world_size=None)
                old.update(cause="killed", reason="together with its supervisor")
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


def choose_master(env, command, nodes):
    """For srun: MASTER_ADDR and MASTER_PORT; the port is free, if this is the first node."""
    if not nodes or not is_srun(command):
        return
    from guard import free_port, port_of_job  # an older Python cannot read that file

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


def steps(status):
    """The part of the record that comes from the training: its status and its metrics."""
    last_step = last_recorded_step(status["run_dir"]) if status.get("run_dir") else 0
    start = status.get("start_step", 0)
    end = max(start, status.get("global_step", 0), last_step)
    saved = max(start, status.get("saved_step", 0))
    return {
        "start_step": start,
        "end_step": end,
        "saved_step": saved,
        "recomputed": max(0, end - saved),
    }


def last_recorded_step(run_dir):
    """The step of the last record in metrics.jsonl; 0 if there is none."""
    from report import end_of  # an older Python cannot read that file

    step = 0
    last_lines = []
    with suppress(OSError):
        last_lines = end_of(Path(run_dir) / "metrics.jsonl").splitlines()[-3:]
    for record in parse_lines(last_lines):  # the last line may be incomplete
        if isinstance(record.get("step"), NUMBER):
            step = record["step"]
    return step


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
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def kill_descendants():
    """Send SIGTERM, then SIGKILL, to all descendants of this process, until none is alive."""
    for number, seconds in ((signal.SIGTERM, 8), (signal.SIGKILL, 5)):
        for process in descendants():
            with suppress(ProcessLookupError):
                os.kill(process, number)
        deadline = time.monotonic() + seconds
        while descendants() and time.monotonic() < deadline:
            time.sleep(0.05)


def descendants():
    """The process ids of the descendants that are alive; [] if there is no /proc."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            # PID (COMMAND) STATE PARENT ...; spaces and parentheses in the command
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
            state, parent = fields[:2]
            if state != "Z":  # not one that has ended
                parents[int(file.parent.name)] = int(parent)
    found = []
    generation = [os.getpid()]
    while generation:
        generation = [process for process in parents if parents[process] in generation]
        found += generation
    return found


# --------------------------------------------------------------- the job, of Slurm, PBS or neither


def code_version():
    """The commit of the current directory, and whether files differ from it; "" without git."""
    version = output_of("git", "describe", "--always", "--dirty=, modified", "--exclude=*") or ""
    return version.strip()


def files_changed_since(then):
    """The tracked files of the current directory that were written after this time."""
    tracked = output_of("git", "ls-files") or ""
    changed = []
    for name in tracked.splitlines():
        with suppress(OSError):
            if os.stat(name).st_mtime > then:
                changed.append(name)
    return changed


def end_of_job():
    """The end of the job's time in seconds since 1970; inf if it is not known."""
    try:
        if slurm_id():
            return time.mktime(time.strptime(slurm_job()["EndTime"], "%Y-%m-%dT%H:%M:%S"))
        if os.environ.get("PBS_JOBID"):
            facts = pbs_job()
            start = time.mktime(time.strptime(facts.get("stime") or facts["start_time"]))
            return start + walltime_seconds(facts["Resource_List.walltime"])
    except (KeyError, ValueError):  # the scheduler has not answered, or the time has no limit
        if slurm_id():
            return number("SLURM_JOB_END_TIME")
    return float("inf")


def how_to_resume():
    if slurm_id() or os.environ.get("PBS_JOBID"):
        return "submit or run the same command again"
    command = " ".join(shlex.quote(word) for word in sys.argv)
    return re.sub(r" --stop-at-step[= ]\d+", "", command)  # it would stop there at once


def submit_without(nodes):
    return f"submit the same command again, with --exclude={','.join(nodes)}"


# ---------------------------------------------------------------------------------------- Slurm


def output_of(*command):
    """What a command prints; None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace")


def nodes_of_job():
    """The nodes of this Slurm job; [] outside Slurm."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    text = output_of("scontrol", "show", "hostnames", nodes) or ""
    return text.split()


def slurm_id():
    """The job's id for Slurm's commands. In an array, SLURM_JOB_ID of one task means all tasks."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID")


def slurm_job():
    """What `scontrol show job` prints: {name: text}; {} outside Slurm."""
    job = slurm_id()
    if not job:
        return {}
    text = output_of("scontrol", "show", "job", job) or ""
    return dict(re.findall(r"(\w+)=(\S*)", text))


def exclude(job, nodes):
    """Ask Slurm to start this job, which is being requeued, on other nodes than these."""
    earlier = slurm_job().get("ExcNodeList", "(null)")
    names = nodes if earlier == "(null)" else [earlier, *nodes]
    command = ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(names)}"]
    for _ in range(5):  # until Slurm has processed the requeue
        if output_of(*command) is not None:
            return
        time.sleep(0.5)
    log(f"Slurm does not exclude {', '.join(nodes)}: scancel {job}; {submit_without(nodes)}")


def requeue(left_out=()):
    """Requeue this Slurm job, without these nodes. Returns whether Slurm will start it again."""
    job = slurm_id()
    if not job:
        return False
    facts = slurm_job()
    state = facts.get("JobState")
    if state not in (None, "RUNNING") and facts.get("Reason") != "TimeLimit":
        log(f"job {job} is {state}: Slurm will end or restart it")
    else:
        log(f"requeueing job {job}")
        try:  # This kills the job at once, so everything must be on disk by now.
            command = ["scontrol", "requeue", job]
            subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=True)
        except subprocess.CalledProcessError as error:
            log(f"Slurm does not requeue job {job}: {error.stderr.decode().strip()}")
            return False
        except (OSError, subprocess.TimeoutExpired) as error:
            log(f"Slurm does not requeue job {job}: {error}")
            return False
    if left_out:
        exclude(job, left_out)
    return True


# ------------------------------------------------------------------------------------------ PBS


def pbs_job():
    """The attributes of this job: {name: text}. Torque's names differ from those of OpenPBS."""
    text = output_of("qstat", "-f", os.environ["PBS_JOBID"]) or ""
    unwrapped = text.replace("\n\t", "")
    return dict(re.findall(r"(?m)^    (\S+) = (.*)$", unwrapped))


def walltime_seconds(text):
    """The seconds in [[DAYS:]HOURS:]MINUTES:SECONDS."""
    seconds = 0
    for number, unit in zip(reversed(text.split(":")), (1, 60, 3600, 86400)):
        seconds += int(number) * unit
    return seconds


if __name__ == "__main__":
    sys.exit(main())
