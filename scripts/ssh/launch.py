#!/usr/bin/env python3
"""Run scripts/cluster_train.sh on all hosts, with this process's environment.

Usage: scripts/ssh/launch.py [--pdsh] HOST [HOST ...] -- CONFIG [options of the training script]
       scripts/ssh/launch.py --pbs -- CONFIG [options of the training script]

Called by launch_torchrun_auto.sh, launch_pdsh_multinode.sh and pbs_train.sh; see their --help. For
each host, it starts ssh, which runs node.py there. In a PBS job, the hosts are those of the job,
and it starts pbsdsh instead. SIGQUIT (Ctrl-\\) makes all ranks print their stacks and go on.
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

from node import END_SECONDS, exit_code, request

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # scripts/
from hosts import choose_hosts, choose_master  # noqa: E402
from report import say, whole_number, write_event, write_failure  # noqa: E402

# After `end`, the launcher exits without waiting for its nodes this many seconds later.
EXIT_SECONDS = END_SECONDS + 10
POLL_SECONDS = 0.1
HOSTS_PER_SECOND = 10  # a jump host may refuse many new connections at once
# If the connection is lost, ssh exits after 3 x 15 seconds. The remote command line is only
# `exec bash -s`: the login shell cannot split other words, and `ps` shows no secrets.
SSH = ["ssh", "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15", "--"]

# Bash runs this for each host. Its arguments: HOST RANK DIRECTORY, and the command that runs bash
# on the host. tee -p: keep writing the log if stdout is closed.
CONNECT = """
host=$1 node=$3/$2
sleep $(($2 / 10)) # HOSTS_PER_SECOND
log=${LOG_DIR:-logs}/node_$host
ln -sfn "${log##*/}_${3##*/}.log" "$log.log"
"${@:4}" <"$node.input" 2>&1 | tee -p "${log}_${3##*/}.log"
echo "${PIPESTATUS[0]}" 2>/dev/null >"$node.code"
"""
# The same in a PBS job. Its arguments: SLOT RANK DIRECTORY, and the script for bash on the host.
# pbsdsh has no input, and its exit code is 0: two files that both hosts see replace them.
CONNECT_PBS = """
node=$3/$2
touch "$node.words"
while IFS= read -r line; do # closed after each line, so that a network file system sends it
  printf '%s\\n' "$line" >>"$node.words"
done <"$node.input" &
pbsdsh -n "$1" -- /bin/bash -c "$4"
for ((tenths = 0; tenths < 300; tenths++)); do # a network file system may lag
  [[ -d "$3" && ! -e "$node.code" ]] || exit 0 # the launcher has it, or has exited
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
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # until record_signals()
    words = sys.argv[1:]
    split = words.index("--")
    given = words[:split]
    config = words[split + 1]
    options = words[split + 2 :]
    if given[0] == "--pbs":
        way = Pbs()
        given = list(dict.fromkeys(way.slots))
    elif given[0] == "--pdsh":
        way = Pdsh()
        given = given[1:]
    else:
        way = Ssh()
    for program in way.programs:
        if not shutil.which(program):
            fail(f"{program} is not installed here")

    try:
        hosts = choose_hosts(given, os.environ)
        os.environ.setdefault("ATTEMPT_ID", f"{socket.gethostname()}:{os.getpid()}.1")
        master, port = choose_master(os.environ, hosts)
    except ValueError as error:
        fail(error)
    os.environ["HOST_LIST"] = " ".join(hosts)
    write_event("hosts", f"training on {', '.join(hosts)}", given=given, used=hosts)
    signals = record_signals()
    nodes = []
    for rank, host in enumerate(hosts):
        where = [config, str(len(hosts)), str(rank), master, port]
        command = ["bash", "scripts/cluster_train.sh", *where, *options]
        text = way.first_input() + request(command) + "\n"
        nodes.append(Node(host, f"{way.directory}/{rank}", text))
    way.start(nodes)
    return run(nodes, way, signals)


# ---- how to reach the hosts


class Ssh:
    """An ssh for each host."""

    programs = ["ssh"]
    has_logs = True  # node_HOST_DIRECTORY.log, linked to by node_HOST.log

    def __init__(self):
        self.directory = make_directory(tempfile.gettempdir())

    def first_input(self):
        """What comes before the input of node.py."""
        return script_on_host()

    def start(self, nodes):
        """Start a process for each node: its starter."""
        for rank, node in enumerate(nodes):
            output = None if rank == 0 else subprocess.DEVNULL  # all of it is in the logs
            node.starter = start(self.connect(node.host, str(rank)), stdout=output)

    def connect(self, host, rank):
        words = ["bash", "-c", CONNECT, "connect", host, rank, self.directory]
        return [*words, *SSH, host, "exec bash -s"]

    def is_over(self):
        """Whether the scheduler has ended the job."""
        return False


class Pdsh(Ssh):
    """One pdsh starts all, and shows their output."""

    programs = ["ssh", "pdsh"]

    def start(self, nodes):
        hosts = ",".join(node.host for node in nodes)
        pdsh = ["pdsh", "-R", "exec", "-f", str(len(nodes)), "-w", hosts]
        process = start([*pdsh, *self.connect("%h", "%n")])
        for node in nodes:
            node.starter = process


class Pbs:
    """A pbsdsh for each host. PBS writes the output of all to that of the job."""

    programs = ["pbsdsh"]
    has_logs = False

    def __init__(self):
        logs = os.path.abspath(os.environ.get("LOG_DIR") or "logs")  # which all nodes see
        os.makedirs(logs, exist_ok=True)
        self.directory = make_directory(logs)
        self.parent = os.getppid()
        with open(os.environ["PBS_NODEFILE"]) as file:
            self.slots = file.read().split()  # the host of each

    def first_input(self):
        return ""

    def start(self, nodes):
        for rank, node in enumerate(nodes):
            slot = self.slots.index(node.host)
            script = script_on_host("--files", node.path)
            connect = ["bash", "-c", CONNECT_PBS, "connect", str(slot), str(rank), self.directory]
            node.starter = start([*connect, script])

    def is_over(self):
        return os.getppid() != self.parent  # PBS kills supervise.py at the end


def make_directory(parent):
    """A directory that is removed when this process exits, even if it is killed."""
    directory = tempfile.mkdtemp(prefix=time.strftime("launch-%Y%m%d_%H%M%S-"), dir=parent)
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
    """The launcher's connection to a host.

    PATH.input is the input of what runs there, and PATH.code will be its exit code.
    """

    def __init__(self, host, path, text):
        self.host = host
        self.path = path
        self.unsent = text.encode()
        self.starter = None
        read_end, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        # Not a FIFO: this cannot be opened any more when the launcher has exited.
        os.symlink(f"/proc/{os.getpid()}/fd/{read_end}", f"{path}.input")

    def send(self, word=""):
        """Add a word, and send what fits into the pipe."""
        self.unsent += word.encode()
        with suppress(BlockingIOError):
            sent = os.write(self.pipe, self.unsent)
            self.unsent = self.unsent[sent:]

    def code(self):
        """The exit code; None if the node has not exited."""
        starter = self.starter.poll()
        with suppress(OSError, ValueError), open(f"{self.path}.code") as file:
            return int(file.read())
        if starter is None:
            return None
        return exit_code(starter) or 255  # it was killed


def run(nodes, way, signals):
    """Run until all nodes have exited. Returns the exit code."""
    failed = None  # (host, exit code) of the first node that failed
    is_stopping = False
    killed = False  # by a second Ctrl-C, or at the end of the job
    deadline = math.inf
    stopped_code = whole_number(
        "STOPPED_EXIT_CODE", os.environ.get("STOPPED_EXIT_CODE") or 0, 0, 255
    )
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
            if number == signal.SIGQUIT:
                word += "quit\n"
            elif not is_stopping:
                is_stopping = True
                word += "stop\n"
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
    if way.has_logs:
        log = f"node_{host}_{os.path.basename(way.directory)}.log"
        path = os.path.join(os.environ.get("LOG_DIR") or "logs", log)
        say(f"launch.py: the end of {path}:")
        subprocess.run(["tail", "-n", "15", path], stdout=sys.stderr)
    return code


def report_hosts(nodes, codes):
    """Write FAILURE_FILE for hosts that could not do so: without ssh, a mount or Python."""
    causes = {2: "configuration", 126: "configuration", 127: "configuration", 255: "node lost"}
    for node, code in zip(nodes, codes):
        if code in causes:
            reason = f"exit code {code}, see its log"
            write_failure(causes[code], reason, None, node.host, hosts=[node.host])


def record_signals():
    """From now on, append each stop signal and each SIGQUIT to the list returned."""
    signals = []

    def on_signal(number, _frame):
        signals.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, on_signal)
    signal.signal(signal.SIGQUIT, on_signal)
    return signals


def fail(text):
    say(f"launch.py: error: {text}")
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
