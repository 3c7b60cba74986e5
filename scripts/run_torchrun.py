#!/usr/bin/env python3
"""Run torchrun on this node, so that its ranks can save when they are stopped; write the log.

Usage: scripts/run_torchrun.py LOG COMMAND [ARGUMENT ...]

scripts/cluster_train.sh ends with this. SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and Ctrl-C are forwarded
to the ranks, once, as STOP_SIGNAL (TERM, USR1 or USR2 [TERM]): they save and exit, so torchrun
exits without an error. STOP_FILE names the signal, for supervise.py. A second Ctrl-C kills them; a
second SIGTERM does not, because Slurm sends it twice in quick succession.
SIGQUIT makes the ranks print their stacks and go on.
The output is also written to the file LOG. If a rank was killed, this is what FAILURE_FILE says
(see guard.py). Without one, the reason why a rank has failed is printed again at the end, below the
40 lines of torchrun.
Exit code: that of COMMAND; 128 + N if signal N killed it, or if the ranks did not exit with 0 after
it. Needs only Python 3.8.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import memory
import node_check
from processes import children_of, end_with_parent, variables_of
from report import HOST, say, stop_signal, write_failure, write_stop

STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
LOG_SECONDS = 5  # for the last lines on a slow terminal
STACK_SECONDS = 0.3  # from one rank that prints its stacks to the next, whose lines would mix


def main() -> int:
    torchrun = Torchrun()
    log, *command = sys.argv[1:]
    # Slurm may send these signals to torchrun as well: it would die, or end its ranks.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP")  # not SIGQUIT
    # If SIGTERM also reaches torchrun, it kills its ranks after 30 s: too soon for some saves.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    supervised = os.environ.get("FAILURE_FILE")
    with tempfile.TemporaryDirectory() as own_reports:
        failure_file = supervised or os.path.join(own_reports, "failure.json")
        os.environ["FAILURE_FILE"] = failure_file
        tee = start_tee(log)
        kills = memory.oom_kills()
        code = torchrun.run(command)
        ignore_signals()
        if code != 0 and not os.path.exists(failure_file):
            report_killed_rank(kills, torchrun.stopped_by)
            code = -torchrun.stopped_by or code
        elif code != 0 and not supervised:  # supervise.py does so, too
            repeat(failure_file)
    end_tee(tee)
    return code if code >= 0 else 128 - code


class Torchrun:
    """torchrun and its ranks, which are its children."""

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.stopped_ranks: list[int] = []  # those that STOP_SIGNAL was sent to
        self.stopped_by = 0  # the first signal received
        self.stop_signal = stop_signal()
        for number in STOPS:
            under_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(number, self.on_stop)

    def run(self, command: list[str]) -> int:
        """Run it until it exits. Returns its exit code, -N if signal N killed it."""
        # In a new session, so that Ctrl-C does not reach it.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=before_torchrun,
        )
        signal.signal(signal.SIGQUIT, self.on_quit)
        if self.stopped_by:  # before there was a process
            self.process.kill()
        code = self.process.wait()
        for rank in self.stopped_ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank, signal.SIGKILL)  # its own children, as of mp.spawn
        return code

    def on_quit(self, number: int, _frame) -> None:
        for rank in self.ranks():
            with suppress(OSError):  # it has just ended
                write(f"the stacks of rank {variables_of(rank).get('RANK')} on {HOST}:\n")
                send(number, [rank])
                time.sleep(STACK_SECONDS)

    def on_stop(self, number: int, _frame) -> None:
        ranks = self.ranks()
        if self.stopped_by:
            if number == signal.SIGINT:
                send(signal.SIGKILL, [*ranks, self.torchrun(), self.process.pid])
            return
        self.stopped_by = number
        write_stop(number)
        if number == signal.SIGINT:
            write("stopping: all ranks save and exit; press Ctrl-C again to kill them\n")
        self.stopped_ranks = ranks
        send(self.stop_signal, ranks)
        if self.process and not ranks:  # nothing to save
            self.process.kill()

    def ranks(self) -> list[int]:
        """Each is the leader of a session of its own."""
        return children_of(self.torchrun()) if self.process else []

    def torchrun(self) -> int:
        """In a container, it is the child of Apptainer."""
        inner = children_of(self.process.pid) if os.environ.get("APPTAINER_IMAGE") else []
        return inner[0] if inner else self.process.pid


def before_torchrun() -> None:
    """In the child, before it becomes torchrun."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
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
    for number in (*STOPS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def end_tee(tee: subprocess.Popen) -> None:
    """Wait until it has written all."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    with suppress(subprocess.TimeoutExpired):
        tee.wait(LOG_SECONDS)


def report_killed_rank(kills: int, stopped_by: int) -> None:
    """Write to FAILURE_FILE what a rank that was killed could not report.

    kills: what memory.oom_kills() returned before; stopped_by: the signal that asked them to stop.
    """
    node_check.report_gpu("")  # NCCL aborts a rank whose GPU is lost
    if memory.oom_kills() > kills:
        say(f"cluster_train.sh: error: {HOST}: {memory.KILLED}")
        write_failure("out of memory", memory.KILLED)
    elif not stopped_by:
        write_failure("killed", "a rank was killed, or has not said why: see the report above")


def repeat(failure_file: str) -> None:
    """Print the reason in the file, if there is one."""
    with suppress(OSError, ValueError):
        failure = json.loads(Path(failure_file).read_text())
        rank = f"rank {failure['rank']} on " if "rank" in failure else ""
        say(f"cluster_train.sh: error: {rank}{failure['host']}: {failure['reason']}")


if __name__ == "__main__":
    sys.exit(main())
