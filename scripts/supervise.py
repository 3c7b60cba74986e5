#!/usr/bin/env python3
"""Keep one training alive: start it, start it again if it crashes, requeue its job when time is up.

Usage: scripts/supervise.py COMMAND [ARGUMENT ...]

COMMAND is any launch of this repository; the Slurm scripts and the PBS script put supervise.py in
front by themselves. It needs nothing but Python 3.8.

    finished                          the end
    stopped for time or preemption    under Slurm the job is requeued; elsewhere: how to go on
    stopped by you                    how to go on
    crashed                           the same command again, on the nodes that are left
    crashed 3 times without a new checkpoint, a mistake in what was asked, NaN: why, and the end

Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 stops the training, which saves first; a second Ctrl-C
ends it at once. The end of its time stops it too (--max-duration, the job's time limit), and so
does a file STOP in its run directory (--checkpoint-dir).

Writes attempts.jsonl to the run directory, one line per attempt: start, end, start_step, end_step,
saved_step, recomputed, hosts, world_size, cause, reason. Causes: finished, stopped, out of memory,
killed, node lost, hang, NaN, data, disk, configuration, port, superseded, exception.
Exit code: 0 finished or stopped; 1 given up; 2 a mistake in what was asked.

Environment:
    RUN_DIR        the run directory    [--checkpoint-dir of COMMAND, or of its config]
    MAX_RESTARTS   after crashes, within this job                     [10]
    STOP_SECONDS   that a training may take to stop before it is ended [300]

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

NO_PROGRESS = 3  # crashes in a row without a new checkpoint, after which it is given up
HOPELESS = ("configuration", "NaN", "superseded", "in use")
ON_TIME = {"time limit", "max-duration", "SIGUSR1", "SIGUSR2", "SIGTERM"}


def main():
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if command else 2
    try:
        most = int(os.environ.get("MAX_RESTARTS") or 10)
        patience = float(os.environ.get("STOP_SECONDS") or 300)
    except ValueError as error:
        say(f"error: MAX_RESTARTS and STOP_SECONDS should be numbers ({error})")
        return 2
    if not shutil.which(command[0]):
        say(f"error: cannot start {command[0]}: there is no such program")
        return 2
    if os.environ.get("TRAIN_SCRIPT", "").endswith("doctor.py"):  # it says what is wrong, once
        os.execvpe(command[0], command, {**os.environ, "ATTEMPT": "1"})
    run = RunDirectory(Path(os.environ.get("RUN_DIR") or run_directory_of(command)))
    with tempfile.TemporaryDirectory(prefix="supervise-") as scratch:
        launch = Launch(command, run, Path(scratch), patience)
        return keep_alive(launch, run, most)


def keep_alive(launch, run, most):
    """Attempt after attempt. Returns the exit code."""
    restarts = 0
    while True:
        before = run.status()
        attempt = launch.attempt(before)
        if attempt["cause"] != "in use":  # by another job, whose ledger it is
            run.make_up(before, attempt["start_step"])
            run.append(attempt)
        cause, reason = attempt["cause"], attempt["reason"]
        if cause in ("finished", "stopped") and attempt["world_size"]:
            say(run.goodput())
        if cause == "finished":
            return 0
        if cause == "stopped":
            if not (ON_TIME & set(reason.split()) or "time limit" in reason) or not requeue():
                say(f"stopped ({reason or '--stop-at-step'}); to go on: {launch.again()}")
            return 0
        step = f"{cause} at step {attempt['end_step']}" + f": {reason}" * bool(reason)
        vain = run.crashes_without_progress()
        asked = launch.is_ended or launch.signals
        on_time = asked and ON_TIME.issuperset(name for name, _ in launch.signals)
        too_few = cause == "configuration" and launch.nodes != launch.nodes_at_first
        if vain < NO_PROGRESS and (too_few or (on_time and cause not in HOPELESS)) and requeue():
            say(f"{step}. From step {attempt['saved_step']} in the job's next turn")
            return 1
        if cause in HOPELESS or asked or vain >= NO_PROGRESS or restarts >= most:
            why = "that would happen again" if cause in HOPELESS else "as you asked"
            if not asked and cause not in HOPELESS:
                why = f"after {restarts} restarts"
                if vain >= NO_PROGRESS:
                    why = f"crashed {vain} times without a new checkpoint"
            say(run.goodput())
            say(f"error: {step}. Given up, {why}; once mended, to go on: {launch.again()}")
            return 2 if cause in ("configuration", "in use") else 1
        restarts += 1
        say(f"{step}. Starting again from step {attempt['saved_step']} ({restarts} of {most})")
        time.sleep(0 if vain == 0 else 2)


def say(text):
    try:
        print(f"supervise.py: {text}", file=sys.stderr, flush=True)
    except OSError:  # a terminal that was closed, a `tee` that Ctrl-C ended
        sys.stderr = open(os.devnull, "w")


class RunDirectory:
    """What the trainer and we write down in --checkpoint-dir."""

    def __init__(self, path):
        self.path = path
        self.ledger = path / "attempts.jsonl"

    def attempts(self):
        return [record for line in lines_of(self.ledger) if (record := read_json(line))]

    def append(self, attempt):
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.ledger.open("a") as file:
                file.write(json.dumps(attempt) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            say(f"WARNING: cannot write {self.ledger}: {error}")

    def make_up(self, status, saved):
        """The line of an attempt whose supervisor was killed before it could write it."""
        known = {attempt["attempt"] for attempt in self.attempts()}
        number = number_of(status)
        if not number or number in known or not {"began", "time"} <= status.keys():
            return
        ended = status["state"] in ("finished", "stopped")
        record = {
            "attempt": number,
            "start": status["began"],
            "end": status["time"],
            "start_step": status["start_step"],
            "end_step": status["global_step"],
            "saved_step": saved,
            "recomputed": max(0, status["global_step"] - saved),
            "train_seconds": status["time"] - status["began"],
            "hosts": status["hosts"],
            "world_size": status["world_size"],
            "cause": status["state"] if ended else "killed",
            "reason": status["reason"] or "with its supervisor",
        }
        self.append(record)

    def status(self):
        return read_json("\n".join(lines_of(self.path / "status.json"))) or {}

    def saved_step(self):
        """Of the newest checkpoint."""
        files = self.path.glob("checkpoint_*.json")
        facts = (read_json("\n".join(lines_of(file))) or {} for file in files)
        return max((int(fact.get("step", 0)) for fact in facts), default=0)

    def last_record(self):
        """Of the training's metrics."""
        records = [read_json(line) for line in lines_of(self.path / "metrics.jsonl")[-3:]]
        return ([record for record in records if record] or [{}])[-1]

    def crashes_without_progress(self):
        """In a row, at the end of the ledger."""
        vain = 0
        for attempt in reversed(self.attempts()):
            if attempt["cause"] in ("finished", "stopped"):
                break
            if attempt["saved_step"] > attempt["start_step"]:
                break
            vain += 1
        return vain

    def goodput(self):
        """The share of the time since the first attempt began that became steps of the end's model.

        An attempt's steps count as far as they were saved; evaluating and saving count as steps.
        """
        attempts = self.attempts()
        if not attempts:
            return "no attempt is on record"
        wall = max(1e-9, attempts[-1]["end"] - attempts[0]["start"])
        trained = sum(attempt["train_seconds"] for attempt in attempts)
        lost = sum(
            attempt["train_seconds"] * attempt["recomputed"] / max(1, steps_of(attempt))
            for attempt in attempts
        )
        runs = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
        return (
            f"goodput {(trained - lost) / wall:.1%}: of {wall:.0f} s in {runs}, "
            f"{trained - lost:.0f} became steps that count, {lost:.0f} steps that were lost, "
            "the rest start-up and waiting"
        )


def number_of(status):
    """Of the attempt that a status.json tells of; 0 if it was not ours."""
    match = re.search(r"\.(\d+)$", status.get("job", ""))
    return int(match[1]) if match else 0


def steps_of(attempt):
    return attempt["end_step"] - attempt["start_step"]


def lines_of(path):
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_json(text):
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def job_id():
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")


def run_directory_of(command):
    """What COMMAND will train in, as far as its words and its config tell."""
    config = {}
    if os.environ.get("TRAIN_SCRIPT", "train_distributed.py") != "train_distributed.py":
        config["dir"] = f"logs/run_{job_id() or os.getpid()}"  # of your own script we know nothing
    for word in command:
        if word.endswith((".yaml", ".yml")):
            for line in lines_of(Path(word.split("=")[-1])) if not config else []:
                match = re.match(r"(checkpoint_dir|save_dir):\s*(.*?)\s*(#.*)?$", line)
                if match and match[2].strip("'\"") not in ("", "null"):
                    config["dir"] = match[2].strip("'\"")
    found = config.get("dir", "checkpoints")
    for word, following in zip(command, [*command[1:], ""]):
        match = re.match(r"--(checkpoint[-_]dir|save[-_]dir)(=(.*))?$", word, re.DOTALL)
        if match:
            found = match[3] if match[2] else following
    return found


class Launch:
    """COMMAND, started as often as needed."""

    def __init__(self, command, run, scratch, patience):
        self.command, self.run, self.patience = command, run, patience
        self.stop_file = scratch / "STOP"
        self.signals = []  # (name, time), as they came
        self.count = 0  # of attempts
        self.looked, self.missing = 0.0, []  # when we asked Slurm which nodes it misses; its answer
        self.nodes = self.nodes_at_first = nodes_of_job()
        self.is_ended = False  # by us, before it stopped by itself
        self.stopping_since = None
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name)
            if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(
                    number, lambda n, _: self.signals.append((signal.Signals(n).name, time.time()))
                )

    def again(self):
        job = os.environ.get("SLURM_JOB_ID")
        return f"scontrol requeue {job}" if job else " ".join(map(shlex.quote, sys.argv))

    def attempt(self, before):
        """One launch to its end: its line for the ledger. `before` is the status before it."""
        known = [attempt["attempt"] for attempt in self.run.attempts()]
        number = 1 + max([*known, number_of(before)])
        self.count += 1
        job = job_id()
        nonce = f"{job or f'{socket.gethostname()}:{os.getpid()}'}.{number}"
        ours = f"{socket.gethostname()}_{os.getpid()}_{number}"
        failure = self.run.path / f".failure_{ours}.json"
        env = {
            **os.environ,
            "RUN_NONCE": nonce,
            "STOP_FILE": str(self.stop_file),
            "ATTEMPT": str(self.count),
        }
        if self.count > 1:
            # Slurm may not have seen the end of the step before, least on a lost node.
            env["SLURM_OVERLAP"] = "1"
        env.update(self.environment_of_nodes(), FAILURE_FILE=str(failure.absolute()))
        if deadline := end_of_job():
            env.setdefault("DEADLINE", str(deadline))
        try:
            self.run.path.mkdir(parents=True, exist_ok=True)
            failure.unlink()
        except OSError:
            pass  # the trainer will say what is wrong with it
        start_step, kills, began = self.run.saved_step(), oom_kills(), time.time()
        code = self.start(env)
        status = self.run.status()
        told = status if status.get("job") == nonce else {}
        why = read_json("\n".join(lines_of(failure))) or {}
        if failure.exists():
            failure.unlink()
        start_step = told.get("start_step", start_step)
        last = self.run.last_record() if told else {}
        end_step = max(start_step, told.get("global_step", 0), last.get("step", 0))
        end_time = max(told.get("time", 0), last.get("time", 0))
        saved = max(self.run.saved_step(), start_step)
        cause, reason = self.cause(code, told, why, kills)
        if told.get("state") == "running":
            self.mark_failed(told, cause, reason)
        return {
            "attempt": number,
            "start": began,
            "end": time.time(),
            "start_step": start_step,
            "end_step": end_step,
            "saved_step": saved,
            "recomputed": max(0, end_step - saved),
            "train_seconds": max(0.0, end_time - told.get("began", end_time)),
            "hosts": told.get("hosts", self.nodes or [socket.gethostname()]),
            "world_size": told.get("world_size"),
            "cause": cause,
            "reason": reason,
        }

    def mark_failed(self, told, cause, reason):
        """So that nobody takes a run that was killed for one that is running."""
        told.update(state="failed", reason=f"{cause}: {reason}")
        new = self.run.path / ".status.json.new"
        try:
            new.write_text(json.dumps(told, indent=1))
            new.replace(self.run.path / "status.json")
        except OSError:
            pass

    def cause(self, code, told, why, kills):
        """(one word, a sentence)"""
        orphaned = told.get("reason") == "SIGTERM" and code in (-9, 137) and not self.signals
        if told.get("state") in ("finished", "stopped") and not orphaned:
            heard = " ".join(name for name, _ in self.signals)
            by_us = "STOP" in told["reason"] and self.stopping_since
            return told["state"], heard if by_us else told["reason"]
        if code == 0 and not told and not why:
            return "finished", ""  # a script of your own, which writes no status
        if (why or {}).get("cause") not in HOPELESS and (lost := nodes_lost(self.nodes)):
            self.nodes = [node for node in self.nodes if node not in lost]
            return "node lost", ", ".join(lost)
        if why:
            rank = "" if why.get("rank") is None else f"rank {why['rank']} on "
            return why["cause"], f"{rank}{why['host']}: {why['reason']}"
        if self.is_ended:
            return "killed", "it did not stop in time, or you asked twice"
        if code == 2:
            return "configuration", "it is told above"
        if oom_kills() > kills:
            return "out of memory", f"the kernel of {socket.gethostname()} has killed a process"
        return "killed", f"without a word of its own (exit code {code})"

    def environment_of_nodes(self):
        """For the Slurm scripts: the nodes that are left."""
        if not self.nodes or self.nodes == self.nodes_at_first:
            return {}
        return {"SLURM_JOB_NODELIST": ",".join(self.nodes), "SLURM_NNODES": str(len(self.nodes))}

    def start(self, env):
        """Run COMMAND until it ends, or we end it. Returns its exit code."""
        try:
            child = subprocess.Popen(
                self.command, env=env, start_new_session=True, preexec_fn=die_with_parent
            )
        except OSError as error:
            say(f"error: cannot start {self.command[0]}: {error.strerror}")
            return 2
        while True:
            try:
                code = child.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                self.look_after(child)
        while code < 0 and self.signals and not self.is_ended and lives(child):
            self.look_after(child)  # the scheduler has ended a shell, and its children save
            time.sleep(0.2)
        end_group(child)  # what its first process may have left
        for file in (self.stop_file, self.run.path / "STOP"):
            if self.stopping_since and file.exists():
                file.unlink()
        return code

    def look_after(self, child):
        if len(self.nodes) > 1 and time.time() > self.looked + 20:
            # A step that lost a node may neither end nor, the next one, begin.
            missing = nodes_lost(self.nodes)
            if missing and missing == self.missing:
                say(f"Slurm has lost {', '.join(missing)}: ending what is left of this attempt")
                end_group(child)
            self.looked, self.missing = time.time(), missing
        if self.signals and not self.stopping_since:
            self.stopping_since = time.time()
            say(f"{self.signals[0][0]}: the training saves and stops; Ctrl-C again ends it at once")
            for file in (self.stop_file, self.run.path / "STOP"):
                try:
                    file.touch()
                except OSError:
                    pass
        if self.stopping_since and not self.is_ended:
            first = self.signals[0][1]
            again = any(name == "SIGINT" and when > first + 1 for name, when in self.signals)
            if again or time.time() > first + self.patience:
                self.is_ended = True
                end_group(child)


def end_group(child):
    """SIGTERM; SIGINT, for our launchers `at once`; SIGKILL. Returns when its group is gone."""
    for number, seconds in ((signal.SIGTERM, 2), (signal.SIGINT, 6), (signal.SIGKILL, 5)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not lives(child):
                return
            time.sleep(0.05)


def lives(child):
    """Whether anything of its process group does."""
    child.poll()
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def die_with_parent():
    """Should we be killed, the launch stops as well; in sbatch Slurm sees to that, more gently."""
    if sys.platform == "linux" and os.environ.get("ENVIRONMENT") != "BATCH":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def oom_kills():
    """How many processes this machine's kernel has killed for want of memory."""
    for line in lines_of(Path("/proc/vmstat")):
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


# ---------------------------------------------------------------------------------------- Slurm


def slurm(*command):
    """What a command of Slurm's prints; None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode() if result.returncode == 0 else None


def job_facts():
    """`scontrol show job` as a dictionary; {} outside of a job."""
    job = os.environ.get("SLURM_JOB_ID")
    text = slurm("scontrol", "show", "job", job) if job else None
    return dict(re.findall(r"(\w+)=(\S*)", text or ""))


def end_of_job():
    """When its time is up, in seconds since 1970; None if nobody knows."""
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
    """Those that Slurm does not hear from; not the one that we run on."""
    nodes = [node for node in nodes if node != os.environ.get("SLURMD_NODENAME")]
    if not nodes:
        return []
    text = slurm("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format=%N %T")
    if text is None:
        return []
    states = dict(line.split() for line in text.splitlines())
    return [n for n in nodes if re.search(r"down|fail|unknown|\*$", states.get(n, ""))]


def requeue():
    """Whether this job will start again by itself."""
    job, state = os.environ.get("SLURM_JOB_ID"), job_facts().get("JobState")
    if not job:
        return False
    if state != "RUNNING":
        say(f"job {job} is {state}: the rest is up to Slurm")
        return True
    say(f"requeueing job {job}")
    # It ends this job at once; whatever must be on disk is.
    return slurm("scontrol", "requeue", job) is not None


if __name__ == "__main__":
    sys.exit(main())
