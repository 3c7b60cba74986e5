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
    crashed                           runs the same command again on the remaining nodes
    crashed 3 times without progress  prints the reason and exits
    failed with a permanent error     prints the reason and exits

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, the end of the job's time or MAX_DURATION stop the
training, which saves first. A second Ctrl-C kills it.

supervise.py passes to the training, in the environment: STOP_FILE (if this file exists: save and
exit), DEADLINE (seconds since 1970), ATTEMPT_ID (JOB.NUMBER), FAILURE_FILE (see scripts/guard.py).
The training reports, as JSON in STATUS_FILE: run_dir, state (running, finished, stopped), reason,
start_step, global_step, saved_step, world_size, began. A script that writes no STATUS_FILE is
restarted too; an attempt that ran for ten minutes then counts as progress.

The attempt log, attempts.jsonl in the run directory, has one line per attempt: start, end,
start_step, end_step, saved_step, recomputed, train_seconds, hosts, world_size, cause, reason.
Causes: finished, stopped, ended (exit code 0, but no status), out of memory, killed, node lost,
hang, NaN, disk, configuration, port, in use, replaced, exception.
Exit code: 0 finished; STOPPED_EXIT_CODE stopped before the end; 1 gave up; 2 user error.

Environment:
    MAX_RESTARTS       restarts after crashes within this job                    [10]
    MAX_DURATION       seconds after which the training is asked to stop         []
    STOP_SECONDS       seconds the training may take to stop before it is killed [300]
    STOPPED_EXIT_CODE  for your own scheduler or supervisor, for example 75, EX_TEMPFAIL of
                       sysexits.h: "try again later"                             [0]
    LOG_DIR            a directory that all nodes see                            [logs]

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

NO_PROGRESS = 3  # crashes in a row without progress before giving up
PROGRESS_SECONDS = 600  # a script without a status made progress if it ran this long
POLL_SECONDS, SILENT_SECONDS = 20, 60  # see poll_for_lost_nodes()
WOULD_REPEAT = ("configuration", "NaN", "replaced", "in use")
# Our batch scripts run `supervise.py bash SCRIPT`. Slurm runs a copy of SCRIPT with the name
# slurm_script; slurm_train_single_node.sh executes slurm_train_multinode.sh.
BATCH_SCRIPTS = {"slurm_script", "slurm_train_multinode.sh"}
SBATCH_OPTIONS = {"Partition": "partition", "Account": "account", "QOS": "qos", "TimeLimit": "time"}
ON_TIME = {"time limit", "SIGUSR1", "SIGUSR2", "SIGTERM"}  # after these, the job is requeued

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
        max_restarts = int(os.environ.get("MAX_RESTARTS") or 10)
        stop_seconds = float(os.environ.get("STOP_SECONDS") or 300)
        max_duration = float(os.environ.get("MAX_DURATION") or "inf")
        stopped_code = int(os.environ.get("STOPPED_EXIT_CODE") or 0)
    except ValueError as error:
        names = "MAX_RESTARTS, MAX_DURATION, STOP_SECONDS and STOPPED_EXIT_CODE"
        log(f"error: {names} should be numbers ({error})")
        return 2
    if not shutil.which(command[0]):
        log(f"error: cannot start {command[0]}: there is no such program")
        return 2
    if (
        os.environ.get("DRY_RUN")
        or os.environ.get("TRAIN_SCRIPT", "").endswith("doctor.py")
        or ("pbs_train.sh" in " ".join(command) and "PBS_JOBID" not in os.environ)  # it fails
    ):  # there is nothing to restart
        os.execvpe(command[0], command, {**os.environ, "ATTEMPT": "1"})
    directory = Path(os.environ.get("LOG_DIR") or REPOSITORY / "logs") / f"supervise_{job_name()}"
    directory = directory.resolve()
    with tempfile.TemporaryDirectory(prefix="supervise-") as local:
        supervisor = Supervisor(command, directory, Path(local), stop_seconds, max_duration)
        try:
            return supervisor.keep_alive(max_restarts, stopped_code)
        finally:
            supervisor.clean_up()


def log(text):
    try:
        print(f"supervise.py: {text}", file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed, or Ctrl-C ended a `tee`
        sys.stderr = open(os.devnull, "w")


class Supervisor:
    """Runs COMMAND as often as needed."""

    def __init__(self, command, directory, local, stop_seconds, max_duration):
        self.command, self.stop_seconds, self.began = command, stop_seconds, time.time()
        self.directory = directory  # for files that the training writes; all nodes see it
        self.stop_file = local / "STOP"  # on a local disk: a network file system may lag
        self.run_dir = None  # reported by the training
        self.deadline = min(end_of_job() or float("inf"), self.began + max_duration)
        self.signals = []  # (name, time) of each signal received
        self.count = 0  # attempts by this process
        self.restarts = self.crashes = 0
        self.nodes = self.nodes_at_first = nodes_of_job()
        self.polled, self.missing = 0.0, []  # for lost nodes: time of the last poll, and its result
        self.written = []  # modification times of the files that the training writes
        self.stopping_since = None
        self.killed = False  # by us, because it did not stop
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name)
            if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.on_signal)

    def on_signal(self, number, _frame):
        self.signals.append((signal.Signals(number).name, time.time()))

    def keep_alive(self, max_restarts, stopped_code):
        """Run attempts until the training ends. Returns the exit code."""
        while True:
            attempt = self.attempt()
            cause, reason = attempt["cause"], attempt["reason"]
            if cause == "in use" and self.free_stale_lock():
                continue
            if cause != "in use":  # otherwise the attempt log is another job's
                self.record(attempt)
            if cause in ("finished", "stopped") and attempt["world_size"]:
                log(goodput(self.attempts()))
            if cause in ("finished", "ended"):
                return 0
            if cause == "stopped":
                if ON_TIME & set(reason.split(", ")) and requeue():
                    return 0
                log(f"stopped ({reason or 'at --stop-at-step'}); to resume: {resume_command()}")
                return stopped_code
            known = attempt["world_size"]  # the script has written its status
            what = cause + f" at step {attempt['end_step']}" * bool(known)
            what += f": {reason}" * bool(reason)
            saved = f", from step {attempt['saved_step']}" if known else ""
            progress = attempt["saved_step"] > attempt["start_step"]
            if not known:
                progress = attempt["end"] - attempt["start"] > PROGRESS_SECONDS
            self.crashes = 0 if progress else self.crashes + 1
            if self.may_requeue(cause) and requeue():
                log(f"{what}. The job is requeued{saved}")
                return 1
            asked = self.killed or self.signals
            if cause in WOULD_REPEAT or asked or self.crashes >= NO_PROGRESS or (
                self.restarts >= max_restarts
            ):  # fmt: skip
                why = f"MAX_RESTARTS={max_restarts} is reached"
                if cause in WOULD_REPEAT:
                    why = "a restart would not help"
                elif asked:
                    why = "a stop was requested"
                elif self.crashes >= NO_PROGRESS:
                    why = f"{self.crashes} crashes without progress"
                how = f"After fixing it, resume with: {resume_command()}"
                log(f"error: {what}. Giving up: {why}. {how}")
                return 2 if cause in ("configuration", "in use") else 1
            self.restarts += 1
            log(f"{what}. Restart {self.restarts} of {max_restarts}{saved}")
            time.sleep(0 if self.crashes == 0 else 2)

    def may_requeue(self, cause):
        """Whether requeueing the Slurm job may help after this crash."""
        if self.crashes >= NO_PROGRESS:
            return False
        too_few_nodes = cause == "configuration" and self.nodes != self.nodes_at_first
        asked = self.signals or self.killed
        on_time = asked and ON_TIME.issuperset(name for name, _ in self.signals)
        return too_few_nodes or (on_time and cause not in WOULD_REPEAT)

    # ------------------------------------------------------------------------- one attempt

    def attempt(self):
        """Run COMMAND once. Returns the record for the attempt log."""
        self.count += 1
        name = f"{HOST}_{os.getpid()}_{self.count}"
        self.status_file = self.directory / f"status_{name}.json"
        self.failure_file = self.directory / f"failure_{name}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log(f"WARNING: cannot write to {self.directory} ({error}): set LOG_DIR")
        env = {**self.environment(), "FAILURE_FILE": str(self.failure_file)}
        self.running, began = {"attempt": env["ATTEMPT_ID"], "start": time.time()}, time.time()
        self.written_at, self.patience = began, SILENT_SECONDS  # see poll_for_lost_nodes()
        code = self.run(env)
        status, failure = read_json(self.status_file), read_json(self.failure_file)
        for file in (self.status_file, self.failure_file):
            if file.exists():
                file.unlink()
        self.run_dir = status.get("run_dir") or self.run_dir
        last = self.last_record() if status.get("state") else {}
        start = status.get("start_step", 0)
        end = max(start, status.get("global_step", 0), last.get("step", 0))
        saved = max(start, status.get("saved_step", 0))
        end_time = max(status.get("time", 0), last.get("time", 0))
        cause, reason = self.cause(code, status, failure)
        return {
            "attempt": env["ATTEMPT_ID"],
            "start": began,
            "end": time.time(),
            "start_step": start,
            "end_step": end,
            "saved_step": saved,
            "recomputed": max(0, end - saved),
            "train_seconds": max(0.0, end_time - status.get("began", end_time)),
            "hosts": self.nodes or [HOST],
            "world_size": status.get("world_size"),
            "cause": cause,
            "reason": reason,
        }

    def environment(self):
        """The environment of the next attempt."""
        env = {
            **os.environ,
            "ATTEMPT": str(self.count),
            "ATTEMPT_ID": f"{job_name()}.{1000 * requeues_of_job() + self.count}",
            "STOP_FILE": str(self.stop_file),
            "STATUS_FILE": str(self.status_file),
        }
        if self.deadline < float("inf"):
            env["DEADLINE"] = str(self.deadline)
        if self.count > 1:
            # Slurm may still count the previous step as running, especially on a lost node.
            env["SLURM_OVERLAP"] = "1"
        if self.nodes != self.nodes_at_first:
            env["SLURM_JOB_NODELIST"] = ",".join(self.nodes)
            env["SLURM_NNODES"] = str(len(self.nodes))
        return env

    def cause(self, code, status, failure):
        """Why an attempt ended: (one of the causes above, reason)."""
        asked = ", ".join(name for name, _ in self.signals) or "time limit"
        # If the launcher was killed, the kernel sends the training SIGTERM: it saves and stops.
        orphaned = code in (-9, 137) and not self.signals
        if status.get("state") in ("finished", "stopped") and not orphaned:
            reason = status.get("reason", "")
            by_us = reason == "STOP file" and self.stopping_since
            return status["state"], asked if by_us else reason
        if code == 0 and not failure:
            if self.stopping_since:
                return "stopped", asked
            return "ended", "exit code 0, but the training wrote no STATUS_FILE"
        lost = failure.get("cause") not in WOULD_REPEAT and nodes_lost(self.nodes)
        if lost:
            self.nodes = [node for node in self.nodes if node not in lost]
            return "node lost", ", ".join(lost)
        if failure:
            rank = f"rank {failure['rank']} on " if "rank" in failure else ""
            return failure["cause"], f"{rank}{failure['host']}: {failure['reason']}"
        if self.killed:
            return "killed", "it did not stop in time, or you pressed Ctrl-C twice"
        if code == 2:
            return "configuration", "see the error above"
        return "killed", f"exit code {code} and no error report; out of memory? (see dmesg)"

    def run(self, env):
        """Run COMMAND until it ends or is killed. Returns its exit code."""
        try:
            child = subprocess.Popen(
                self.command, env=env, start_new_session=True, preexec_fn=die_with_parent
            )
        except OSError as error:
            log(f"error: cannot start {self.command[0]}: {error.strerror}")
            return 2
        while True:
            try:
                code = child.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                self.monitor(child)
        while code < 0 and self.signals and not self.killed and is_alive(child):
            self.monitor(child)  # the scheduler killed the shell, but its children still save
            time.sleep(0.2)
        kill_group(child)  # processes that COMMAND may have left behind
        for file in self.stop_files():
            if self.stopping_since and file.exists():
                file.unlink()
        return code

    def monitor(self, child):
        """Record the run directory, forward stop requests, kill an attempt that has lost a node."""
        status = read_json(self.status_file) if self.running else {}
        if status.get("state"):  # it now owns the run directory
            self.run_dir = status.get("run_dir") or self.run_dir
            self.record({**self.running, "cause": "running"})
            self.running = None
        if len(self.nodes) > 1 and time.time() > self.polled + POLL_SECONDS:
            self.poll_for_lost_nodes(child)
        reserve = min(120, (self.deadline - self.began) / 10)
        out_of_time = time.time() > self.deadline - reserve
        if (self.signals or out_of_time) and not self.stopping_since:
            self.stopping_since = time.time()
            reason = self.signals[0][0] if self.signals else "time limit"
            log(f"{reason}: saving and stopping; press Ctrl-C again to kill the training")
            for file in self.stop_files():
                try:
                    file.touch()
                except OSError:
                    pass
        if self.stopping_since and not self.killed:
            since = self.stopping_since
            again = sum(name == "SIGINT" and when > since + 1 for name, when in self.signals)
            if again or time.time() > since + self.stop_seconds:
                self.killed = True
                kill_group(child)

    def poll_for_lost_nodes(self, child):
        """Kill the attempt if Slurm has lost a node: its step may never end on its own.

        Asks Slurm only if a rank has failed, or if the training has not written anything for a
        minute, then again after 2, 4, 8 ... minutes.
        """
        self.polled, written = time.time(), []
        for file in (self.status_file, Path(self.run_dir or self.directory) / "metrics.jsonl"):
            with suppress(OSError):
                written.append(file.stat().st_mtime)
        if written != self.written:
            self.written, self.written_at, self.patience = written, self.polled, SILENT_SECONDS
        silent = self.polled - self.written_at > self.patience
        ask = silent or self.missing or self.failure_file.exists()
        missing = nodes_lost(self.nodes) if ask else []
        if silent and not missing:
            self.patience *= 2
        if missing and missing == self.missing:
            log(f"Slurm has lost {', '.join(missing)}: stopping the rest of this attempt")
            kill_group(child)
        self.missing = missing

    def stop_files(self):
        return [self.stop_file, *([Path(self.run_dir) / "STOP"] if self.run_dir else [])]

    def free_stale_lock(self):
        """Remove the lock of a job that has ended: on NFSv3, a lost node never releases it."""
        file = Path(self.run_dir or self.directory) / "lock"
        owner = re.match(r"attempt (\d+)\.", "\n".join(lines_of(file)))
        if not owner or not job_is_gone(owner[1]):
            return False
        log(f"job {owner[1]} is gone, but still holds {file}: removing it")
        file.unlink()
        return True

    # ----------------------------------------------------------------------- the attempt log

    def log_file(self):
        return Path(self.run_dir or self.directory) / "attempts.jsonl"

    def attempts(self):
        lines = lines_of(self.log_file())
        return [record for record in map(parse_json, lines) if record.get("cause") != "running"]

    def record(self, attempt):
        """Write the attempt's line, replacing its line with the cause "running".

        If another attempt still has such a line, its supervisor was killed: complete it here.
        """
        records = [parse_json(line) for line in lines_of(self.log_file())]
        records = [r for r in records if r and r["attempt"] != attempt["attempt"]]
        for old in records:
            if old["cause"] == "running" and "start_step" in attempt:
                step = attempt["start_step"]
                old.update(start_step=step, end_step=step, saved_step=step, recomputed=0)
                old.update(end=attempt["start"], train_seconds=0, hosts=[], world_size=None)
                old.update(cause="killed", reason="together with its supervisor")
        text = "".join(json.dumps(record) + "\n" for record in [*records, attempt])
        new = self.log_file().with_name(f".attempts.{os.getpid()}.tmp")
        try:
            new.write_text(text)
            new.replace(self.log_file())
        except OSError as error:
            log(f"WARNING: cannot write {self.log_file()}: {error}")

    def last_record(self):
        """The last record in metrics.jsonl."""
        lines = lines_of(Path(self.run_dir) / "metrics.jsonl")[-3:] if self.run_dir else []
        return ([record for record in map(parse_json, lines) if record] or [{}])[-1]

    def clean_up(self):
        try:
            self.directory.rmdir()  # fails if it holds the attempt log
        except OSError:
            pass


def goodput(attempts):
    """The share of the time since the first attempt that was spent on steps of the final model.

    Only steps that were saved count. Time for evaluation and saving is included.
    """
    wall = max(1e-9, attempts[-1]["end"] - attempts[0]["start"])
    trained = sum(attempt["train_seconds"] for attempt in attempts)
    lost = sum(
        a["train_seconds"] * a["recomputed"] / max(1, a["end_step"] - a["start_step"])
        for a in attempts
    )
    noun = "attempt" if len(attempts) == 1 else "attempts"
    return (
        f"goodput {(trained - lost) / wall:.1%}: of {wall:.0f} s in {len(attempts)} {noun}, "
        f"{trained - lost:.0f} s of useful steps, {lost:.0f} s of lost steps, "
        "the rest start-up and waiting"
    )


def lines_of(path):
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_json(path):
    return parse_json("\n".join(lines_of(path)))


def parse_json(text):
    """{} if it is not a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------------ processes


def kill_group(child):
    """Send SIGTERM, SIGINT (which makes our launchers kill all), SIGKILL, until all have exited."""
    for number, seconds in ((signal.SIGTERM, 2), (signal.SIGINT, 6), (signal.SIGKILL, 5)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not is_alive(child):
                return
            time.sleep(0.05)


def is_alive(child):
    """Whether any process of its group is alive."""
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def die_with_parent():
    """For preexec_fn: stop the launch if supervise.py is killed. In batch jobs, Slurm does that."""
    if sys.platform == "linux" and os.environ.get("ENVIRONMENT") != "BATCH":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


# ---------------------------------------------------------------------------------------- Slurm


def job_name():
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    return job or f"{HOST}-{os.getpid()}"


def slurm(*command):
    """The output of a command of Slurm or PBS; None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode() if result.returncode == 0 else None


def end_of_job():
    """The end of the job's time in seconds since 1970; None if it is not known."""
    job = os.environ.get("SLURM_JOB_ID")
    if os.environ.get("SLURM_JOB_END_TIME"):
        return float(os.environ["SLURM_JOB_END_TIME"])
    if not job and os.environ.get("PBS_JOBID"):
        return end_of_pbs_job()
    text = slurm("squeue", "--noheader", "--job", job, "--format=%e") if job else None
    try:
        return time.mktime(time.strptime((text or "").strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def requeues_of_job():
    """How often the scheduler has started this job before."""
    if os.environ.get("PBS_JOBID"):
        return max(0, int(pbs_job().get("run_count", 1)) - 1)
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def nodes_of_job():
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    return (slurm("scontrol", "show", "hostnames", nodes) or "").split() if nodes else []


def nodes_lost(nodes):
    """The nodes that do not respond to Slurm; never this one."""
    nodes = [node for node in nodes if node != os.environ.get("SLURMD_NODENAME")]
    if not nodes:
        return []
    text = slurm("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format=%N %T")
    states = dict(line.split() for line in (text or "").splitlines())
    return [n for n in nodes if re.search(r"down|fail|unknown|\*$", states.get(n, ""))]


def job_is_gone(job):
    """Whether Slurm responds and reports the job as ended or unknown. The id may be an array's."""
    if slurm("sinfo", "--noheader") is None:
        return False
    states = slurm("squeue", "--noheader", "--states=all", "--job", job, "--format=%T") or ""
    return not {"PENDING", "RUNNING", "COMPLETING", "SUSPENDED"} & set(states.split())


def slurm_id():
    """The job's id for Slurm's commands. In an array, SLURM_JOB_ID of one task means all tasks."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID")


def facts_of_job():
    """What `scontrol show job` prints; {} outside Slurm."""
    text = slurm("scontrol", "show", "job", slurm_id()) if slurm_id() else None
    facts = re.findall(r"(\w+)=(\S*)", text or "") + re.findall("(Command)=(.*)", text or "")
    return dict(facts)


def requeue():
    """Requeue this Slurm job. Returns whether Slurm will start it again."""
    job, state = slurm_id(), facts_of_job().get("JobState")
    if not job:
        return False
    if state not in (None, "RUNNING"):
        log(f"job {job} is {state}: Slurm will end or restart it")
        return True
    log(f"requeueing job {job}")
    try:  # This kills the job at once, so everything must be on disk by now.
        command = ["scontrol", "requeue", job]
        answer = subprocess.run(command, stderr=subprocess.PIPE, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        log(f"Slurm does not requeue job {job}: {error}")
        return False
    if answer.returncode:
        log(f"Slurm does not requeue job {job}: {answer.stderr.decode().strip()}")
    return answer.returncode == 0


def resume_command():
    """The command that resumes the training, as typed in a shell."""
    if os.environ.get("PBS_ENVIRONMENT") == "PBS_BATCH":
        return qsub_command()
    if os.environ.get("ENVIRONMENT") != "BATCH" or not slurm_id():
        return " ".join(map(shlex.quote, sys.argv))
    facts, words = facts_of_job(), ["sbatch", f"--nodes={os.environ['SLURM_JOB_NUM_NODES']}"]
    gpus = re.search(r"gpu[^,]*$", facts.get("TresPerNode", ""))
    words += [f"--gres={gpus[0]}"] if gpus else []
    for name, option in SBATCH_OPTIONS.items():
        if facts.get(name, "(null)") not in ("(null)", "N/A", "UNLIMITED"):
            words.append(f"--{option}={facts[name]}")
    script = facts.get("Command")
    if not script:
        return "call sbatch again with the same arguments"
    if sys.argv[1] != "bash" or Path(*sys.argv[2:3]).name not in BATCH_SCRIPTS:
        return " ".join([*words, script])  # the user's own, with its arguments
    while " " in script and not os.path.isfile(script):
        script = script.rpartition(" ")[0]
    return " ".join(map(shlex.quote, [*words, script, *sys.argv[3:]]))  # some are from variables


# ------------------------------------------------------------------------------------------ PBS


def pbs_job():
    """The attributes of this job: {name: text}. Torque's names differ from those of OpenPBS."""
    text = slurm("qstat", "-f", os.environ["PBS_JOBID"]) or ""
    return dict(re.findall(r"(?m)^    (\S+) = (.*)$", text.replace("\n\t", "")))  # wrapped lines


def end_of_pbs_job():
    facts = pbs_job()
    walltime = reversed(facts.get("Resource_List.walltime", "").split(":"))  # [[days:]hours:]...
    try:
        start = time.mktime(time.strptime(facts.get("stime") or facts["start_time"]))
        return start + sum(int(n) * unit for n, unit in zip(walltime, (1, 60, 3600, 86400)))
    except (KeyError, ValueError):
        return None


def qsub_command():
    """The qsub command of this job, without secrets. PBS has dropped the quotes around -v's."""
    facts = pbs_job()
    words = facts.get("Submit_arguments") or facts.get("submit_args")
    if not words:
        return "call qsub again with the same arguments"
    words = re.sub(r"(\w*(?:KEY|TOKEN|SECRET|PASSWORD)\w*)=[^, ]*", r"\1=...", words)
    return "qsub " + re.sub(r"(?<=-v )(.+?)(?= -\w | \S+$)", lambda v: shlex.quote(v[1]), words)


if __name__ == "__main__":
    sys.exit(main())
