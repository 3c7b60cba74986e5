#!/usr/bin/env python3
"""Run scripts/cluster_train.sh on all hosts, with this process's environment.

Usage: scripts/ssh/launch.py [--pdsh] HOST [HOST ...] -- CONFIG [options of the training script]
       scripts/ssh/launch.py --pbs -- CONFIG [options of the training script]

Called by launch_torchrun_auto.sh, launch_pdsh_multinode.sh and pbs_train.sh; see their --help. For
each host, it starts ssh, which runs node.py there. In a PBS job, the hosts are those of the job,
and it starts pbsdsh instead.
Exit code: that of the first node that failed (255: ssh); 2 user error; 130 after a second Ctrl-C.
"""

import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

from node import END_SECONDS, request

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # scripts/
from hosts import choose_hosts, choose_master  # noqa: E402
from policy import CODES  # noqa: E402
from processes import for_each_stop  # noqa: E402
from report import say, stopped_exit_code, write_event, write_failure  # noqa: E402

# After `end`, the launcher exits without waiting for its nodes this many seconds later.
EXIT_SECONDS = END_SECONDS + 10
POLL_SECONDS = 0.1
# If the connection is lost, ssh exits after 3 x 15 seconds. The remote command line is only
# `exec bash -s`: the login shell cannot split other words, and `ps` shows no secrets.
SSH = ["ssh", "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15", "--"]

# Bash runs this for each host. Its arguments: HOST RANK LOG PREFIX, and the command that runs bash
# on the host. tee -p: keep writing the log if stdout is closed.
CONNECT = """
sleep $(($2 / 10)) # a jump host may refuse many new connections at once
ln -sfn "${3##*/}" "${3%/*}/node_$1.log"
"${@:5}" 2>&1 | tee -p "$3" | sed -u "s/^/$4/"
exit "${PIPESTATUS[0]}"
"""
# The same in a PBS job. Its arguments: SLOT PATH, and the script for bash on the host. pbsdsh has
# no input, and its exit code is 0: two files that both hosts see replace them.
CONNECT_PBS = """
touch "$2.words"
while IFS= read -r line; do # closed after each line, so that a network file system sends it
  printf '%s\\n' "$line" >>"$2.words"
done <&0 &
pbsdsh -n "$1" -- /bin/bash -c "$3" </dev/null
for ((tenths = 0; tenths < 300; tenths++)); do # a network file system may lag
  [[ ! -e "$2.code" ]] || exit "$(<"$2.code")"
  [[ -d "${2%/*}" ]] || exit 0 # the launcher has exited
  sleep 0.1
done
exit 255 # node.py did not start, or was killed
"""
# What bash runs on the host. node.py reads what comes after the last line.
RUN = """fail() {{
  echo "launch.py: error: $(hostname): $1" >&2
  exit 2
}}
run() {{
  cd {repository} 2>/dev/null || fail "there is no "{repository}" here: set REPO_ROOT"
  for python in python3 {python}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
      exec "$python" scripts/ssh/node.py {arguments}
    fi
  done
  fail "$python is not Python 3.8 or newer: set PYTHON"
}}
run
"""


def main():
    words = sys.argv[1:]
    split = words.index("--")
    given = words[:split]
    config = words[split + 1]
    options = words[split + 2 :]
    if given[0] == "--pbs":
        way = Pbs()
        given = list(dict.fromkeys(way.slots))
    else:
        way = Ssh(shows_all=given[0] == "--pdsh")
        given = [host for host in given if host != "--pdsh"]
    if not shutil.which(way.program):
        fail(f"{way.program} is not installed here")

    try:
        hosts = choose_hosts(given, os.environ)
        os.environ.setdefault("ATTEMPT_ID", f"{socket.gethostname()}:{os.getpid()}.1")
        master, port = choose_master(os.environ, hosts)
    except ValueError as error:
        fail(error)
    os.environ["HOST_LIST"] = " ".join(hosts)
    write_event("hosts", f"training on {', '.join(hosts)}", given=given, used=hosts)
    signals = []
    for_each_stop(lambda number, _frame: signals.append(number))
    nodes = []
    for rank, host in enumerate(hosts):
        where = [config, str(len(hosts)), str(rank), master, port]
        command = ["bash", "scripts/cluster_train.sh", *where, *options]
        text = way.first_input() + request(command) + "\n"
        nodes.append(Node(host, way.start(rank, host), text))
    return run(nodes, way, signals)


# ---- how to reach the hosts


class Ssh:
    """An ssh for each host. Each launch has its logs, to which node_HOST.log is a link."""

    program = "ssh"

    def __init__(self, shows_all):
        self.shows_all = shows_all  # else only rank 0's host; the logs have all of it
        self.name = time.strftime(f"%Y%m%d_%H%M%S_{os.getpid()}.log")

    def first_input(self):
        """What comes before the input of node.py."""
        return script_on_host()

    def start(self, rank, host):
        """A process whose input is that of the host, and whose exit code is that of node.py."""
        prefix = f"{host}: " if self.shows_all else ""
        output = None if rank == 0 or self.shows_all else subprocess.DEVNULL
        words = ["bash", "-c", CONNECT, "connect", host, str(rank), self.log(host), prefix]
        return start([*words, *SSH, host, "exec bash -s"], stdin=subprocess.PIPE, stdout=output)

    def log(self, host):
        return os.path.join(os.environ.get("LOG_DIR") or "logs", f"node_{host}_{self.name}")

    def is_over(self):
        """Whether the scheduler has ended the job."""
        return False


class Pbs:
    """A pbsdsh for each host. PBS writes the output of all to that of the job."""

    program = "pbsdsh"

    def __init__(self):
        logs = os.path.abspath(os.environ.get("LOG_DIR") or "logs")  # which all nodes see
        os.makedirs(logs, exist_ok=True)
        self.directory = make_directory(logs)
        self.parent = os.getppid()
        with open(os.environ["PBS_NODEFILE"]) as file:
            self.slots = file.read().split()  # the host of each

    def first_input(self):
        return ""

    def start(self, rank, host):
        path = f"{self.directory}/{rank}"
        words = ["bash", "-c", CONNECT_PBS, "connect", str(self.slots.index(host)), path]
        return start([*words, script_on_host("--files", path)], stdin=subprocess.PIPE)

    def log(self, host):
        return None

    def is_over(self):
        return os.getppid() != self.parent  # PBS kills supervise.py at the end


def make_directory(parent):
    """A directory that is removed when this process exits, even if it is killed."""
    directory = tempfile.mkdtemp(prefix="launch-", dir=parent)
    pipe, _ = os.pipe()  # at its end when this process has exited
    start(["sh", "-c", 'trap "" TERM; cat; rm -rf "$0"', directory], stdin=pipe)
    return directory


def script_on_host(*arguments):
    repository = os.environ.get("REPO_ROOT") or os.getcwd()
    python = os.environ.get("PYTHON") or "python3"
    return RUN.format(
        repository=shlex.quote(repository),
        python=shlex.quote(python),
        arguments=" ".join(map(shlex.quote, arguments)),
    )


def start(command, stdin=subprocess.DEVNULL, stdout=None):
    """In a new session, so that Ctrl-C does not reach it."""
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, start_new_session=True)


# ---- what runs on the hosts


class Node:
    """The launcher's connection to a host."""

    def __init__(self, host, starter, text):
        self.host = host
        self.starter = starter
        self.unsent = text.encode()
        os.set_blocking(starter.stdin.fileno(), False)

    def send(self, word=""):
        """Add a word, and send what fits into the pipe."""
        self.unsent += word.encode()
        with suppress(BlockingIOError, BrokenPipeError):
            sent = os.write(self.starter.stdin.fileno(), self.unsent)
            self.unsent = self.unsent[sent:]

    def code(self):
        """The exit code; None if the node has not exited, 255 if the connection was killed."""
        code = self.starter.poll()
        return 255 if code and code < 0 else code


def run(nodes, way, signals):
    """Run until all nodes have exited. Returns the exit code."""
    failed = None  # (host, exit code) of the first node that failed
    is_stopping = False
    killed = False  # by a second Ctrl-C, or at the end of the job
    deadline = math.inf
    stopped_code = stopped_exit_code()
    codes = [None]
    while None in codes and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        codes = [node.code() for node in nodes]
        for node, code in zip(nodes, codes):
            if code not in (None, 0, stopped_code) and failed is None:
                failed = (node.host, code)
        word = ""
        while signals:
            number = signals.pop(0)
            if not is_stopping:
                is_stopping = True
                word = "stop\n"
                say("launch.py: stopping: all ranks save and exit; press Ctrl-C again to kill them")
            elif number == signal.SIGINT:
                killed = True
        killed = killed or way.is_over()
        if deadline == math.inf and (failed or killed):
            word += "end\n"
            deadline = time.monotonic() + EXIT_SECONDS
        for node in nodes:
            node.send(word)
    if killed and any(code != 0 for code in codes):
        return 130
    if failed is None:
        return max(codes)
    report_hosts(nodes, codes)
    host, code = failed
    say(f"launch.py: error: {host} failed (exit code {code}), so all nodes were stopped")
    log = way.log(host)
    if log:
        say(f"launch.py: the end of {log}:")
        subprocess.run(["tail", "-n", "15", log], stdout=sys.stderr)
    return code


def report_hosts(nodes, codes):
    """Write FAILURE_FILE for hosts that could not do so: without ssh, a mount or Python."""
    for node, code in zip(nodes, codes):
        if code in CODES:
            reason = f"exit code {code}, see its log"
            write_failure(CODES[code], reason, None, node.host, hosts=[node.host])


def fail(text):
    say(f"launch.py: error: {text}")
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
