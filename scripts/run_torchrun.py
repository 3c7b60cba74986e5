#!/usr/bin/env python3
"""Run torchrun on this node, so that its ranks can save when they are stopped; write the log.

Usage: scripts/run_torchrun.py LOG COMMAND [ARGUMENT ...]

scripts/cluster_train.sh ends with this. SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and Ctrl-C are forwarded
to the ranks, once, as STOP_SIGNAL (TERM, USR1 or USR2 [TERM]): they save and exit, so torchrun
exits without an error. STOP_FILE names the signal, for supervise.py. A second Ctrl-C kills them; a
second SIGTERM does not, because Slurm sends it twice in quick succession.
The output is also written to the file LOG. FAILURE_FILE (see report.py) says which rank was killed,
and which host's torchrun has not come to the rendezvous within RANK_TIMEOUT. Without supervise.py,
the reason is printed again at the end, below the 40 lines of torchrun.
Exit code: that of COMMAND; 128 + N if signal N killed it, or if the ranks did not exit with 0 after
it; 2 after a user error; without supervise.py, STOPPED_EXIT_CODE [0] if the training was stopped
before its end.
Needs only Python 3.8.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import memory
import node_check
from hosts import addresses_of, hosts_of_job, peers_of
from processes import STOPS, end_with_parent, for_each_stop, ranks_of_torchrun
from report import (
    HOST,
    say,
    seconds,
    stop_signal,
    stopped_exit_code,
    write_failure,
    write_stop,
)

POLL_SECONDS = 0.2
GRACE_SECONDS = 10  # the first host knows who is missing, so it is the first to say it
LOG_SECONDS = 5  # for the last lines on a slow terminal
TEE_SECONDS = 1  # for torchrun's last lines
SAME_ZONE = 900  # seconds: the clock of a container may show the time of another zone
SUMMARY = re.compile(  # torchrun's, of the first rank to fail
    r"time +: (?P<time>\S+)\n.*\n +rank +: (?P<rank>\d+) .*\n +exitcode +: -(?P<signal>\d+) "
)


def main() -> int:
    torchrun = Torchrun()
    log, *command = sys.argv[1:]
    rendezvous = Rendezvous(command)
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # see ranks_of_torchrun()
    stopped_code = stopped_exit_code()
    # Slurm may send these signals to torchrun as well: it would die, or end its ranks.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP")  # not SIGQUIT
    # If SIGTERM also reaches torchrun, it kills its ranks after 30 s: too soon for some saves.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    os.environ["PET_RDZV_CONF"] = f"timeout={rendezvous.timeout + 10 * GRACE_SECONDS:.0f}"
    is_supervised = "FAILURE_FILE" in os.environ
    with tempfile.TemporaryDirectory() as own_reports:
        for name in ("FAILURE_FILE", "STATUS_FILE"):
            os.environ.setdefault(name, os.path.join(own_reports, name))
        tee = start_tee(log)
        kills = memory.oom_kills()
        code = torchrun.run(command, rendezvous)
        ignore_signals()
        if code != 0:
            report_killed_rank(log, memory.oom_kills() > kills, torchrun.stopped_by)
            failure = read_json("FAILURE_FILE")
            if failure.get("cause") == "configuration" and failure.get("host") == HOST:
                code = 2
            elif torchrun.stopped_by and not failure:
                code = -torchrun.stopped_by
            if failure and not is_supervised:  # else supervise.py does so
                repeat_reason(failure)
        elif not is_supervised and was_stopped(torchrun.stopped_by):
            code = stopped_code
    end_tee(tee)
    return code if code >= 0 else 128 - code


class Torchrun:
    """torchrun and its ranks, which are its children."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.stopped_ranks: list[int] = []  # those that STOP_SIGNAL was sent to
        self.stopped_by = 0  # the first signal received
        self.stop_signal = stop_signal()
        for_each_stop(self.on_stop)

    def run(self, command: list[str], rendezvous: Rendezvous) -> int:
        """Run it until it exits. Returns its exit code, -N if signal N killed it."""
        # In a new session, so that Ctrl-C does not reach it.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=before_torchrun,
        )
        code = None
        while code is None:
            time.sleep(POLL_SECONDS)
            if self.stopped_by:  # maybe before there were ranks
                self.stop_ranks()
            elif rendezvous.has_failed():
                self.process.kill()
            code = self.process.poll()
        for rank in self.stopped_ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)  # its own children, as of mp.spawn
        return code

    def on_stop(self, number: int, _frame) -> None:
        if self.stopped_by:
            if number == signal.SIGINT and self.process:
                send(signal.SIGKILL, [*ranks_of_torchrun(), -self.process.pid])
            return
        self.stopped_by = number
        if self.process:
            self.stop_ranks()
        write_stop(number)
        if number == signal.SIGINT:
            write("stopping: all ranks save and exit; press Ctrl-C again to kill them\n")

    def stop_ranks(self) -> None:
        """Signal those that have not been. Without any, there is nothing to save."""
        ranks = [rank for rank in ranks_of_torchrun() if rank not in self.stopped_ranks]
        self.stopped_ranks += ranks
        send(self.stop_signal, ranks)
        if not self.stopped_ranks:
            self.process.terminate()  # if it starts ranks at this moment, it ends them


class Rendezvous:
    """The hosts wait for each other in torchrun, before there are ranks."""

    def __init__(self, command: list[str]):
        options = dict(zip(command, command[1:]))
        self.nodes = int(options.get("--nnodes", "1"))
        self.is_first = options.get("--node-rank") == "0"
        self.master = options.get("--master-addr")
        self.port = int(options.get("--master-port", "0"))
        self.timeout = seconds("RANK_TIMEOUT", 300)
        self.deadline = time.monotonic() + self.timeout
        if not self.is_first:
            self.deadline += GRACE_SECONDS

    def has_failed(self) -> bool:
        """Whether hosts have not come in time, which it reports. True at most once."""
        if self.nodes == 1 or time.monotonic() < self.deadline:
            return False
        self.deadline = float("inf")
        if ranks_of_torchrun():
            return False
        if self.is_first:
            missing, who = self.missing()
            if not who:
                return False
        else:
            with suppress(OSError):
                socket.create_connection((self.master, self.port), GRACE_SECONDS).close()
                return False  # the first host waits, too, and says for whom
            missing = [self.master]
            who = f"the first host, {self.master} port {self.port},"
        limit = f"{self.timeout:.0f} s (RANK_TIMEOUT)"
        reason = f"torchrun of {who} did not start within {limit}: see the log there"
        say(f"cluster_train.sh: error: {HOST}: {reason}")
        write_failure("node lost", reason, hosts=missing)
        return True

    def missing(self) -> tuple[list[str], str]:
        """The hosts that have not connected to the first, if they can be named; a text for them."""
        peers = peers_of(self.port)
        count = self.nodes - 1 - len(peers)
        if count <= 0:  # torchrun is about to start the ranks
            return [], ""
        others = hosts_of_job(os.environ)[1 : self.nodes]
        missing = [host for host in others if not addresses_of(host) & peers]
        if len(missing) != count:  # the names have other addresses
            return [], f"{count} of {self.nodes} hosts"
        return missing, ", ".join(missing)


def before_torchrun() -> None:
    """In the child, before it becomes torchrun."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def write(text: str) -> None:
    """For signal handlers, which may have interrupted a print()."""
    with suppress(OSError):
        os.write(1, text.encode())


def send(number: int, processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


# ---------------------------------------------------------------------------- log and reason


def start_tee(log: str) -> subprocess.Popen:
    """From now on, the output of this process and its children also goes to the log file."""
    # It ignores signals, because it must run until the ranks have written their last lines.
    command = ["tee", "-ap", log]
    tee = subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=ignore_signals)
    os.dup2(tee.stdin.fileno(), 1)
    os.dup2(tee.stdin.fileno(), 2)
    tee.stdin.close()
    return tee


def ignore_signals() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def end_tee(tee: subprocess.Popen) -> None:
    """Wait until it has written all."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with suppress(subprocess.TimeoutExpired):
        tee.wait(LOG_SECONDS)


def report_killed_rank(log: str, lost_memory: bool, stopped_by: int) -> None:
    """Write to FAILURE_FILE what a rank that was killed could not report.

    lost_memory: whether the kernel has killed a process for its memory. stopped_by: the signal that
    asked the ranks to stop.
    """
    if not stopped_by:
        node_check.report_gpu("")  # NCCL aborts a rank whose GPU is lost
    time.sleep(TEE_SECONDS)
    facts = killed_rank(log, time.time())
    number = facts.pop("signal", None)
    if lost_memory:
        say(f"cluster_train.sh: error: {HOST}: {memory.KILLED}")
        write_failure("out of memory", memory.KILLED, **facts)
    elif number and number not in STOPS and not stopped_by:  # STOPS: by a launcher
        write_failure("killed", f"it was killed by {signal.Signals(number).name}", **facts)


def killed_rank(log: str, now: float) -> dict:
    """What torchrun, which writes no error file then, says of the first rank to be killed."""
    found = None
    with suppress(OSError):
        found = SUMMARY.search(Path(log).read_text(errors="replace").rpartition("Root Cause")[2])
    if not found:
        return {"rank": None}
    died = time.mktime(time.strptime(found["time"], "%Y-%m-%d_%H:%M:%S"))
    if not 0 <= now - died < SAME_ZONE:
        died = now
    return {"rank": int(found["rank"]), "signal": int(found["signal"]), "time": died}


def repeat_reason(failure: dict) -> None:
    rank = f"rank {failure['rank']} on " if "rank" in failure else ""
    say(f"cluster_train.sh: error: {rank}{failure['host']}: {failure['reason']}")


def was_stopped(stopped_by: int) -> bool:
    """Whether it exited before its end. A script without a status did so if it was asked to."""
    state = read_json("STATUS_FILE").get("state", "stopped" if stopped_by else "")
    return state == "stopped"


def read_json(name: str) -> dict:
    """The content of the file that the environment variable names; {} without one."""
    with suppress(OSError, ValueError):
        return json.loads(Path(os.environ[name]).read_text())
    return {}


if __name__ == "__main__":
    sys.exit(main())
