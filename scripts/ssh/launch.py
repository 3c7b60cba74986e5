#!/usr/bin/env python3
"""Run scripts/cluster_train.sh on all hosts, by ssh or pdsh, with this process's environment.

Usage: scripts/ssh/launch.py [--pdsh] HOST [HOST ...] -- CONFIG [options of the training script]

Called by launch_torchrun_auto.sh and launch_pdsh_multinode.sh; see their --help. For each host, it
starts `launch.py --connect`, which starts ssh, which runs node.py on the host.
Exit code: that of the first node that failed (255: ssh); 2 user error; 130 after a second Ctrl-C.
"""

import collections
import math
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

from node import END_SECONDS, HANG_SECONDS, exit_code, request, stop_with_parent

# If the connection is lost, ssh exits after 3 x 15 seconds. The remote command line is only
# `exec bash -s`: the login shell cannot split other words, and `ps` shows no secrets.
SSH = ["ssh", "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15", "--"]
HOSTS_PER_SECOND = 10  # a jump host may refuse many new connections at once
RUN = """cd {} 2>/dev/null || {{
  echo "launch.py: error: $(hostname): the repository is not at the same path here: set REPO_ROOT"
  exit 2
}} >&2
is_new() {{
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null
}}
python=python3
is_new python3 || python={}
is_new "$python" || {{
  echo "launch.py: error: $(hostname): $python is not Python 3.8 or newer: set PYTHON"
  exit 2
}} >&2
exec "$python" scripts/{}
"""


def main():
    words = sys.argv[1:]
    if words[:1] == ["--connect"]:
        return connect(*words[1:])
    with_pdsh, split = words[0] == "--pdsh", words.index("--")
    hosts, (config, *options) = words[with_pdsh:split], words[split + 1 :]
    for program in ["ssh"] + ["pdsh"] * with_pdsh:
        if not shutil.which(program):
            say(f"error: {program} is not installed here")
            return 2
    os.environ.setdefault("ATTEMPT_ID", f"{socket.gethostname()}:{os.getpid()}.1")
    root = shlex.quote(os.environ.get("REPO_ROOT") or os.getcwd())
    python = shlex.quote(os.environ.get("PYTHON") or "python3")
    master = os.environ.get("MASTER_ADDR") or hosts[0]
    port = os.environ.get("MASTER_PORT") or free_port(hosts[0], root, python)
    if not port.isdigit():
        if port:
            say(f"error: MASTER_PORT is '{port}', not a number")
        return 2
    nodes = {}
    for rank, host in enumerate(hosts):
        command = ["scripts/cluster_train.sh", config, str(len(hosts)), str(rank), master, port]
        run_node = RUN.format(root, python, "ssh/node.py")
        nodes[host] = Node(f"{run_node}{request([*command, *options])}\n")
    return run(nodes, with_pdsh)


def free_port(host, root, python):
    """A free port on that host; "" if none was found (the error has then been printed)."""
    ask = RUN.format(root, python, "guard.py --free-port").encode()
    answer = subprocess.run([*SSH, host, "exec bash -s"], input=ask, stdout=subprocess.PIPE)
    if answer.returncode == 255:
        say(f"error: cannot ask {host} for a free port: does `ssh {host}` work?")
    *_, last = ["", *answer.stdout.decode().split()]  # its shell may print other text first
    return last if answer.returncode == 0 and last.isdigit() else ""


class Node:
    """The launcher's connection to a host."""

    def __init__(self, text):
        self.unsent, self.socket, self.status = text.encode(), None, None

    def poll(self):
        """Send pending input. Once ssh has exited, self.status is its exit code."""
        if self.socket and self.status is None:
            with suppress(OSError):  # the buffer is full, or ssh has exited
                self.unsent = self.unsent[self.socket.send(self.unsent, socket.MSG_DONTWAIT) :]
            try:
                self.status = int(self.socket.recv(9, socket.MSG_DONTWAIT) or 255)
            except BlockingIOError:
                pass
            except ConnectionError:  # connect() was killed
                self.status = 255


def run(nodes, with_pdsh):
    """Run until all nodes have exited. Returns the exit code."""
    signals, (wakeup_read, wakeup_write) = [], socket.socketpair()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: signals.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup_write.setblocking(False)
    signal.set_wakeup_fd(wakeup_write.fileno())  # ends wait()
    failed, word, deadline = None, None, math.inf
    with tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp") as directory:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{directory}/socket")
        server.listen(len(nodes))
        server.setblocking(False)
        starters = start([*nodes], f"{directory}/socket", with_pdsh)
        while any(n.status is None for n in nodes.values()) and time.monotonic() < deadline:
            wait(server, wakeup_read, nodes.values(), deadline)
            with suppress(BlockingIOError):
                while True:
                    connection, _ = server.accept()
                    nodes[connection.makefile().readline().strip()].socket = connection
            for node in nodes.values():
                node.poll()
            codes = [(host, node.status) for host, node in nodes.items()]
            codes += [(name, starter.poll()) for name, starter in starters]
            failed = failed or next(((name, exit_code(c)) for name, c in codes if c), None)
            aborted = signal.SIGINT in signals[1:]
            due = "end" if failed or aborted else "stop" if signals else None
            if due != word:
                word = due
                for node in nodes.values():
                    node.unsent += f"{word}\n".encode()
                if word == "end":
                    deadline = time.monotonic() + END_SECONDS + HANG_SECONDS
                else:
                    say("stopping: all ranks save and exit; press Ctrl-C again to kill them")
    signal.set_wakeup_fd(-1)  # the sockets are about to be closed; a starter may still end
    if aborted and any(node.status != 0 for node in nodes.values()):
        return 130
    if failed:
        report(*failed)
    return failed[1] if failed else 0


def wait(server, wakeup_read, nodes, deadline):
    """Sleep until a signal or a message of a node arrives, or a process ends."""
    with selectors.DefaultSelector() as events:
        events.register(server, selectors.EVENT_READ)
        events.register(wakeup_read, selectors.EVENT_READ)
        for node in nodes:
            if node.socket and node.status is None:
                write = selectors.EVENT_WRITE if node.unsent else 0
                events.register(node.socket, selectors.EVENT_READ | write)
        found = events.select(None if deadline == math.inf else max(0, deadline - time.monotonic()))
        if any(key.fileobj == wakeup_read for key, _ in found):
            wakeup_read.recv(4096)


def start(hosts, path, with_pdsh):
    """Start connect() for each host in a new session, so that Ctrl-C does not reach it.

    Returns [(name, process)].
    """
    connect = ["scripts/ssh/launch.py", "--connect", path]
    if with_pdsh:
        pdsh = ["pdsh", "-R", "exec", "-f", str(len(hosts)), "-w", ",".join(hosts)]
        return [("pdsh", subprocess.Popen([*pdsh, *connect, "%h", "%n"], start_new_session=True))]
    starters = []
    for rank, host in enumerate(hosts):
        screen = subprocess.DEVNULL if rank else None
        command = [*connect, host, str(rank)]
        starters.append((host, subprocess.Popen(command, stdout=screen, start_new_session=True)))
    return starters


def connect(path, host, rank):
    """Run ssh for one host: input from the launcher, output to stdout and the log file."""
    time.sleep(int(rank) // HOSTS_PER_SECOND)
    with socket.socket(socket.AF_UNIX) as launcher, suppress(ConnectionError, FileNotFoundError):
        launcher.connect(path)
        launcher.sendall(f"{host}\n".encode())
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [*SSH, host, "exec bash -s"]
        ssh = subprocess.Popen(command, stdin=launcher, preexec_fn=stop_with_parent, **output)
        # -p: keep writing the log if stdout is closed
        subprocess.run(["tee", "-p", log_of(host)], stdin=ssh.stdout)
        launcher.sendall(str(exit_code(ssh.wait())).encode())


def log_of(host):
    return os.path.join(os.environ.get("LOG_DIR") or "logs", f"node_{host}.log")


def report(host, status):
    say(f"error: {host} failed (exit code {status}), so all nodes were stopped")
    with suppress(OSError), open(log_of(host), errors="replace") as log:
        last = "  ".join(collections.deque(log, 15)).rstrip()
        say(f"the end of {log_of(host)}:\n  {last}")


def say(text):
    with suppress(OSError):  # the terminal was closed
        print(f"launch.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
