#!/usr/bin/env python3
"""Keep one training alive: launch it, relaunch it after a crash, requeue its job when time is up.

Usage: scripts/supervise.py COMMAND [ARGUMENT ...]

COMMAND is any launch of this repository; the Slurm and PBS scripts put supervise.py in front by
themselves. It needs nothing but Python 3.8.

    the training finished             the end
    stopped for time or preemption    under Slurm the job is requeued; elsewhere: how to resume
    stopped by you                    how to resume
    crashed                           the same command again, on the nodes that are left
    3 crashes without progress,       the reason, and the end
    or an error that would repeat

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 stops the training, which saves first; so does the end
of the job's time, or of MAX_DURATION. A second Ctrl-C kills it.

What it tells the training, in the environment: STOP_FILE (if that file exists: save and exit),
DEADLINE (seconds since 1970), ATTEMPT_ID (JOB.NUMBER), FAILURE_FILE (see scripts/guard.py). What
the training tells it, as JSON in STATUS_FILE: run_dir, state (running, finished, stopped), reason,
start_step, global_step, saved_step, world_size, began. A script that writes no STATUS_FILE is
restarted all the same; if it ran for ten minutes, that counts as progress.

Writes attempts.jsonl to the run directory, one line per attempt: start, end, start_step, end_step,
saved_step, recomputed, train_seconds, hosts, world_size, cause, reason. Causes: finished, stopped,
ended (exit code 0, but no status), out of memory, killed, node lost, hang, NaN, disk,
configuration, port, in use, replaced, exception.
Exit code: 0 finished or stopped; 1 gave up; 2 a user error.

Environment:
    MAX_RESTARTS   after crashes, within this job                            [10]
    MAX_DURATION   seconds after which the training is asked to stop         []
    STOP_SECONDS   that a training may take to stop before it is killed      [300]
    LOG_DIR        a directory that all nodes see                            [logs]

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
from pathlib import Path

NO_PROGRESS = 3  # crashes in a row without progress, after which it gives up
PROGRESS_SECONDS = 600  # a script without a status makes progress if it runs for so long
WOULD_REPEAT = ("configuration", "NaN", "replaced", "in use")
ON_TIME = {"time limit", "SIGUSR1", "SIGUSR2", "SIGTERM"}  # reasons to requeue the job

HOST = socket.gethostname()
REPOSITORY = Path(__file__).resolve().parent.parent


def main():
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if command else 2
    try:
        max_restarts = int(os.environ.get("MAX_RESTARTS") or 10)
        stop_seconds = float(os.environ.get("STOP_SECONDS") or 300)
        max_duration = float(os.environ.get("MAX_DURATION") or "inf")
    except ValueError as error:
        log(f"error: MAX_RESTARTS, MAX_DURATION and STOP_SECONDS should be numbers ({error})")
        return 2
    if not shutil.which(command[0]):
        log(f"error: cannot start {command[0]}: there is no such program")
        return 2
    if os.environ.get("DRY_RUN") or os.environ.get("TRAIN_SCRIPT", "").endswith("doctor.py"):
        # Nothing to keep alive.
        os.execvpe(command[0], command, {**os.environ, "ATTEMPT": "1"})
    directory = Path(os.environ.get("LOG_DIR") or REPOSITORY / "logs") / f"supervise_{job_name()}"
    directory = directory.resolve()
    with tempfile.TemporaryDirectory(prefix="supervise-") as local:
        supervisor = Supervisor(command, directory, Path(local), stop_seconds, max_duration)
        try:
            return supervisor.keep_alive(max_restarts)
        finally:
            supervisor.clean_up()


def log(text):
    try:
        print(f"supervise.py: {text}", file=sys.stderr, flush=True)
    except OSError:  # a terminal that was closed, a `tee` ended by Ctrl-C
        sys.stderr = open(os.devnull, "w")


class Supervisor:
    """COMMAND, launched as often as needed."""

    def __init__(self, command, directory, local, stop_seconds, max_duration):
        self.command, self.stop_seconds, self.began = command, stop_seconds, time.time()
        self.directory = directory  # for files that the training writes: all nodes see it
        self.stop_file = local / "STOP"  # on this host, where a network file system is not late
        self.run_dir = None  # once the training has told
        self.deadline = min(end_of_job() or float("inf"), self.began + max_duration)
        self.signals = []  # (name, time), as they came
        self.count = 0  # of attempts by this process
        self.restarts = self.crashes = 0
        self.nodes = self.nodes_at_first = nodes_of_job()
        self.asked_slurm, self.missing = 0.0, []  # when it was asked for lost nodes; its answer
        self.stopping_since = None
        self.killed = False  # by us, because it did not stop by itself
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name)
            if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self.on_signal)

    def on_signal(self, number, _frame):
        self.signals.append((signal.Signals(number).name, time.time()))

    def keep_alive(self, max_restarts):
        """Attempt after attempt. Returns the exit code."""
        while True:
            attempt = self.attempt()
            cause, reason = attempt["cause"], attempt["reason"]
            if cause == "in use" and self.free_stale_lock():
                continue
            if cause != "in use":  # by another job, to which the attempt log belongs
                self.record(attempt)
            if cause in ("finished", "stopped") and attempt["world_size"]:
                log(goodput(self.attempts()))
            if cause in ("finished", "ended"):
                return 0
            if cause == "stopped":
                if not ON_TIME & set(reason.split(", ")) or not requeue():
                    log(f"stopped ({reason or 'at --stop-at-step'}); to resume: {self.again()}")
                return 0
            what = f"{cause} at step {attempt['end_step']}" + f": {reason}" * bool(reason)
            progress = attempt["saved_step"] > attempt["start_step"]
            if not attempt["world_size"]:  # no status
                progress = attempt["end"] - attempt["start"] > PROGRESS_SECONDS
            self.crashes = 0 if progress else self.crashes + 1
            if self.may_requeue(cause) and requeue():
                log(f"{what}. The job resumes from step {attempt['saved_step']}")
                return 1
            asked = self.killed or self.signals
            if cause in WOULD_REPEAT or asked or self.crashes >= NO_PROGRESS or (
                self.restarts >= max_restarts
            ):  # fmt: skip
                why = f"MAX_RESTARTS={max_restarts} is reached"
                if cause in WOULD_REPEAT:
                    why = "a restart would not help"
                elif asked:
                    why = "as you asked"
                elif self.crashes >= NO_PROGRESS:
                    why = f"{self.crashes} crashes without progress"
                log(f"error: {what}. Giving up: {why}. After fixing it: {self.again()}")
                return 2 if cause in ("configuration", "in use") else 1
            self.restarts += 1
            where = f"from step {attempt['saved_step']}"
            log(f"{what}. Restart {self.restarts} of {max_restarts}, {where}")
            time.sleep(0 if self.crashes == 0 else 2)

    def may_requeue(self, cause):
        """Whether a crash is one that another run of the Slurm job may get over."""
        if self.crashes >= NO_PROGRESS:
            return False
        too_few_nodes = cause == "configuration" and self.nodes != self.nodes_at_first
        asked = self.signals or self.killed
        on_time = asked and ON_TIME.issuperset(name for name, _ in self.signals)
        return too_few_nodes or (on_time and cause not in WOULD_REPEAT)

    def again(self):
        job = os.environ.get("SLURM_JOB_ID")
        return f"scontrol requeue {job}" if job else " ".join(map(shlex.quote, sys.argv))

    # ------------------------------------------------------------------------- one attempt

    def attempt(self):
        """One launch to its end: its line for the attempt log."""
        self.count += 1
        name = f"{HOST}_{os.getpid()}_{self.count}"
        self.status_file = self.directory / f"status_{name}.json"
        failure_file = self.directory / f"failure_{name}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log(f"WARNING: cannot write to {self.directory} ({error}): set LOG_DIR")
        env = {**self.environment(), "FAILURE_FILE": str(failure_file)}
        self.running, began = {"attempt": env["ATTEMPT_ID"], "start": time.time()}, time.time()
        code = self.run(env)
        status, failure = read_json(self.status_file), read_json(failure_file)
        for file in (self.status_file, failure_file):
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
        """Of the next attempt."""
        restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        env = {
            **os.environ,
            "ATTEMPT": str(self.count),
            "ATTEMPT_ID": f"{job_name()}.{1000 * restart + self.count}",
            "STOP_FILE": str(self.stop_file),
            "STATUS_FILE": str(self.status_file),
        }
        if self.deadline < float("inf"):
            env["DEADLINE"] = str(self.deadline)
        if self.count > 1:
            # Slurm may not have seen the end of the step before, least of all on a lost node.
            env["SLURM_OVERLAP"] = "1"
        if self.nodes != self.nodes_at_first:
            env["SLURM_JOB_NODELIST"] = ",".join(self.nodes)
            env["SLURM_NNODES"] = str(len(self.nodes))
        return env

    def cause(self, code, status, failure):
        """(one word, a sentence)"""
        names = [name for name, _ in self.signals]
        # A training whose launcher was killed is stopped by the kernel's SIGTERM, and saves.
        orphaned = code in (-9, 137) and not self.signals
        if status.get("state") in ("finished", "stopped") and not orphaned:
            by_us = status["reason"] == "STOP file" and self.stopping_since
            asked = ", ".join(names) or "time limit"
            return status["state"], asked if by_us else status["reason"]
        if code == 0 and not failure:
            if self.stopping_since:
                return "stopped", ", ".join(names) or "time limit"
            return "ended", "exit code 0, but the training wrote no STATUS_FILE"
        if failure.get("cause") not in WOULD_REPEAT and (lost := nodes_lost(self.nodes)):
            self.nodes = [node for node in self.nodes if node not in lost]
            return "node lost", ", ".join(lost)
        if failure:
            rank = f"rank {failure['rank']} on " if "rank" in failure else ""
            return failure["cause"], f"{rank}{failure['host']}: {failure['reason']}"
        if self.killed:
            return "killed", "it did not stop in time, or you asked twice"
        if code == 2:
            return "configuration", "see the error above"
        return "killed", f"exit code {code} and no error report; out of memory? (see dmesg)"

    def run(self, env):
        """Run COMMAND until it ends, or is killed. Returns its exit code."""
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
                self.look_after(child)
        while code < 0 and self.signals and not self.killed and is_alive(child):
            self.look_after(child)  # the scheduler has killed a shell, but its children are saving
            time.sleep(0.2)
        kill_group(child)  # what its first process may have left
        for file in self.stop_files():
            if self.stopping_since and file.exists():
                file.unlink()
        return code

    def look_after(self, child):
        """Note the run directory, pass on requests to stop, end a step that has lost a node."""
        status = read_json(self.status_file) if self.running else {}
        if status.get("state"):  # it owns the run directory now
            self.run_dir = status["run_dir"]
            self.record({**self.running, "cause": "running"})
            self.running = None
        if len(self.nodes) > 1 and time.time() > self.asked_slurm + 20:
            # A step that lost a node may neither end nor, the next one, begin.
            missing = nodes_lost(self.nodes)
            if missing and missing == self.missing:
                log(f"Slurm has lost {', '.join(missing)}: ending what is left of this attempt")
                kill_group(child)
            self.asked_slurm, self.missing = time.time(), missing
        reserve = min(120, (self.deadline - self.began) / 10)
        out_of_time = time.time() > self.deadline - reserve
        if (self.signals or out_of_time) and not self.stopping_since:
            self.stopping_since = time.time()
            reason = self.signals[0][0] if self.signals else "time limit"
            log(f"{reason}: the training saves and stops; Ctrl-C again kills it")
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

    def stop_files(self):
        return [self.stop_file, *([Path(self.run_dir) / "STOP"] if self.run_dir else [])]

    def free_stale_lock(self):
        """Remove the lock of a job that is gone: on NFS version 3, a lost node never frees it."""
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
        """Add a line, in place of the one that told that this attempt is running.

        Such a line of another attempt is one whose supervisor was killed: it ended before ours.
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
        """Of the training's metrics."""
        lines = lines_of(Path(self.run_dir) / "metrics.jsonl")[-3:] if self.run_dir else []
        return ([record for record in map(parse_json, lines) if record] or [{}])[-1]

    def clean_up(self):
        try:
            self.directory.rmdir()  # unless an attempt log is there
        except OSError:
            pass


def goodput(attempts):
    """The share of the time since the first attempt began that became steps of the final model.

    Of an attempt, the steps count that were saved; evaluating and saving count as steps.
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
        f"{trained - lost:.0f} s of steps that count, {lost:.0f} s of steps that were lost, "
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
    """SIGTERM; SIGINT, at which our launchers kill all; SIGKILL. Returns when all are gone."""
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
    """Whether anything of its process group is."""
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def die_with_parent():
    """If supervise.py is killed, the launch stops; in sbatch Slurm does that, more gently."""
    if sys.platform == "linux" and os.environ.get("ENVIRONMENT") != "BATCH":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


# ---------------------------------------------------------------------------------------- Slurm


def job_name():
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    return job or f"{HOST}-{os.getpid()}"


def slurm(*command):
    """What a command of Slurm prints; None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode() if result.returncode == 0 else None


def end_of_job():
    """In seconds since 1970; None if it is not known."""
    job = os.environ.get("SLURM_JOB_ID")
    if os.environ.get("SLURM_JOB_END_TIME"):
        return float(os.environ["SLURM_JOB_END_TIME"])
    text = slurm("squeue", "--noheader", "--job", job, "--format=%e") if job else None
    try:
        return time.mktime(time.strptime((text or "").strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def nodes_of_job():
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    return (slurm("scontrol", "show", "hostnames", nodes) or "").split() if nodes else []


def nodes_lost(nodes):
    """Those that Slurm does not hear from; never the one that this runs on."""
    nodes = [node for node in nodes if node != os.environ.get("SLURMD_NODENAME")]
    if not nodes:
        return []
    text = slurm("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format=%N %T")
    states = dict(line.split() for line in (text or "").splitlines())
    return [n for n in nodes if re.search(r"down|fail|unknown|\*$", states.get(n, ""))]


def job_is_gone(job):
    """Whether Slurm answers, and no longer knows the job, or knows that it has ended."""
    if slurm("sinfo", "--noheader") is None:
        return False
    state = slurm("squeue", "--noheader", "--states=all", "--job", job, "--format=%T")
    return (state or "").strip() not in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")


def requeue():
    """Whether this Slurm job will start again by itself."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return False
    facts = dict(re.findall(r"(\w+)=(\S*)", slurm("scontrol", "show", "job", job) or ""))
    if facts.get("JobState") != "RUNNING":
        log(f"job {job} is {facts.get('JobState')}: the rest is up to Slurm")
        return True
    log(f"requeueing job {job}")
    # This ends the job at once, so everything must be on disk by now.
    return slurm("scontrol", "requeue", job) is not None


if __name__ == "__main__":
    sys.exit(main())
