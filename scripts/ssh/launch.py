#!/usr/bin/env python3
"""Run scripts/cluster_train.sh on all hosts, with this process's environment.

Usage: scripts/ssh/launch.py [--pdsh] HOST [HOST ...] -- CONFIG [options of the training script]
       scripts/ssh/launch.py --pbs -- CONFIG [options of the training script]

Called by launch_torchrun_auto.sh, launch_pdsh_multinode.sh and pbs_train.sh; see their --help. For
each host, it starts `launch.py --connect`, which starts ssh, which runs node.py on the host. In a
PBS job, the hosts are those of the job, and `launch.py --connect-pbs` starts pbsdsh. SIGQUIT
(Ctrl-\\) makes all ranks print their stacks and go on.
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
import threading
import time
from contextlib import nullcontext, suppress

from node import END_SECONDS, HANG_SECONDS, Files, exit_code, request, stop_with_parent

# If the connection is lost, ssh exits after 3 x 15 seconds. The remote command line is only
# `exec bash -s`: the login shell cannot split other words, and `ps` shows no secrets.
SSH = ["ssh", "-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15", "--"]
CONNECT = [sys.executable, "scripts/ssh/launch.py", "--connect"]
CONNECT_PBS = [sys.executable, "scripts/ssh/launch.py", "--connect-pbs"]
PROBE_SECONDS = 30  # for ssh to connect to a host, if there are spares
HOSTS_PER_SECOND = 10  # a jump host may refuse many new connections at once
STATUS_SECONDS = 30  # after pbsdsh has exited, for the exit code of its node
# Input of that bash, on the host.
RUN = """cd {repository} 2>/dev/null || {{
  echo "launch.py: error: $(hostname): the repository is not at the same path here: set REPO_ROOT"
  exit 2
}} >&2
is_new() {{
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null
}}
python=python3
is_new python3 || python={python}
is_new "$python" || {{
  echo "launch.py: error: $(hostname): $python is not Python 3.8 or newer: set PYTHON"
  exit 2
}} >&2
exec "$python" scripts/{script}
"""


def main():
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # until record_signals()
    words = sys.argv[1:]
    if words[0] == "--connect":
        return connect_by_ssh(*words[1:])
    if words[0] == "--connect-pbs":
        return connect_by_pbs(*words[1:])
    split = words.index("--")
    given = words[:split]
    way = Ssh()
    if given[:1] == ["--pdsh"]:
        way = Pdsh()
        given = given[1:]
    elif given == ["--pbs"]:
        way = Pbs()
        given = list(dict.fromkeys(slots_of_job()))
    config = words[split + 1]
    options = words[split + 2 :]

    for program in way.programs:
        if not shutil.which(program):
            say(f"error: {program} is not installed here")
            return 2
    hosts = choose_hosts(given, way)
    if not hosts:
        return 2  # choose_hosts() has printed the error
    os.environ.setdefault("ATTEMPT_ID", f"{socket.gethostname()}:{os.getpid()}.1")
    master = os.environ.get("MASTER_ADDR") or hosts[0]
    port = os.environ.get("MASTER_PORT")
    if port and not port.isdigit():
        say(f"error: MASTER_PORT is '{port}', not a number")
        return 2
    if not port:
        port = free_port(hosts[0], way)
    if not port:
        return 2  # free_port() or the host has printed the error

    nodes = {}
    for rank, host in enumerate(hosts):
        command = ["scripts/cluster_train.sh", config, str(len(hosts)), str(rank), master, port]
        command += options
        nodes[host] = Node(way.input_of_node(command))
    return run(nodes, way)


# ---- how to reach the hosts


class Ssh:
    """An ssh for each host. Its input is bash's, then that of node.py."""

    programs = ["ssh"]
    shared_directory = nullcontext  # for start()

    def shell(self, host):
        """The command that runs bash on that host."""
        return [*SSH, host, "exec bash -s"]

    def input_of_node(self, command):
        return input_of_bash("ssh/node.py") + request(command) + "\n"

    def lost(self, hosts):
        """Those to which ssh cannot connect."""
        probes = {}
        for rank, host in enumerate(hosts):
            if rank and rank % HOSTS_PER_SECOND == 0:
                time.sleep(1)
            probes[host] = subprocess.Popen(
                [*SSH, host, "exec true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        deadline = time.monotonic() + PROBE_SECONDS
        lost = []
        for host, probe in probes.items():
            try:
                code = probe.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                probe.kill()
                code = 255
            if code == 255:
                lost.append(host)
        return lost

    def start(self, hosts, path, _directory):
        """Start a process for each host, which connects it to the socket.

        Returns [(name, process)].
        """
        starters = []
        for rank, host in enumerate(hosts):
            output = None if rank == 0 else subprocess.DEVNULL  # all of it is in log_of(host)
            connect = [*CONNECT, path, host, str(rank)]
            starters.append((host, start(connect, stdout=output)))
        return starters

    def is_over(self):
        """Whether the scheduler has ended the job."""
        return False

    def show_failure(self, host):
        """The end of its log."""
        with suppress(OSError), open(log_of(host), errors="replace") as log:
            lines = collections.deque(log, 15)
            text = "  ".join(lines).rstrip()
            say(f"the end of {log_of(host)}:\n  {text}")


class Pdsh(Ssh):
    """One pdsh starts all, and shows their output."""

    programs = ["ssh", "pdsh"]

    def start(self, hosts, path, _directory):
        pdsh = ["pdsh", "-R", "exec", "-f", str(len(hosts)), "-w", ",".join(hosts)]
        return [("pdsh", start([*pdsh, *CONNECT, path, "%h", "%n"]))]


class Pbs:
    """A pbsdsh for each host. PBS writes the output of all to that of the job."""

    programs = ["pbsdsh"]

    def __init__(self):
        self.parent = os.getppid()

    def shared_directory(self):
        """For Files: pbsdsh has no input."""
        logs = os.path.abspath(os.environ.get("LOG_DIR") or "logs")  # which all nodes see
        os.makedirs(logs, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="pbs_", dir=logs)

    def shell(self, _host):
        return ["bash", "-s"]  # usually, it is this host

    def input_of_node(self, command):
        return request(command) + "\n"

    def lost(self, _hosts):
        return []

    def start(self, hosts, path, directory):
        starters = []
        for rank, host in enumerate(hosts):
            connect = [*CONNECT_PBS, path, host, str(rank), directory]
            starters.append((host, start(connect)))
        return starters

    def is_over(self):
        return os.getppid() != self.parent  # PBS kills supervise.py at the end

    def show_failure(self, _host):
        pass


def start(command, **options):
    """In a new session, so that Ctrl-C does not reach it."""
    return subprocess.Popen(command, start_new_session=True, **options)


def slots_of_job():
    """The host of each slot of this PBS job."""
    with open(os.environ["PBS_NODEFILE"]) as file:
        return file.read().split()


# ---- the hosts, and what runs there


def choose_hosts(given, way):
    """The hosts to train on: not those in EXCLUDED_NODES; with NNODES, the first that answer.

    [] if NNODES is wrong.
    """
    nnodes = os.environ.get("NNODES") or "0"
    if not nnodes.isdigit() or int(nnodes) > len(given):
        count = len(given)
        say(f"error: NNODES is '{nnodes}', not a number from 1 to {count}, the number of hosts")
        return []
    wanted = int(nnodes)
    nodes_file = os.environ.get("NODES_FILE")
    if nodes_file:  # for supervise.py
        with suppress(OSError), open(nodes_file, "w") as file:
            file.write("\n".join(given) + "\n")
    excluded = os.environ.get("EXCLUDED_NODES", "").split(",")
    hosts = [host for host in given if host not in excluded]
    if len(hosts) < max(1, wanted):
        hosts = given
    if wanted in (0, len(hosts)):
        return hosts
    lost = way.lost(hosts)
    reached = [host for host in hosts if host not in lost]
    if len(reached) < wanted:
        return hosts[:wanted]  # its error names one that is lost
    if any(host in lost for host in hosts[:wanted]):
        say(f"{', '.join(lost)} left out: ssh cannot connect; a spare node takes its place")
    return reached[:wanted]


def input_of_bash(script):
    """The input of bash on a host that runs this script of the repository."""
    repository = os.environ.get("REPO_ROOT") or os.getcwd()
    python = os.environ.get("PYTHON") or "python3"
    return RUN.format(repository=shlex.quote(repository), python=shlex.quote(python), script=script)


def free_port(host, way):
    """A free port on that host; "" if none was found (the error has then been printed)."""
    text = input_of_bash("guard.py --free-port")
    answer = subprocess.run(way.shell(host), input=text.encode(), stdout=subprocess.PIPE)
    if answer.returncode == 255:
        say(f"error: cannot ask {host} for a free port: does `ssh {host}` work?")
    words = answer.stdout.decode().split()
    if answer.returncode != 0 or not words:
        return ""
    port = words[-1]  # its shell may print other text first
    return port if port.isdigit() else ""


class Node:
    """The launcher's connection to a host."""

    def __init__(self, text):
        self.unsent = text.encode()
        self.socket = None  # until its starter has connected
        self.status = None  # the exit code, once ssh has exited

    def poll(self):
        """Send pending input, and receive the exit code if there is one."""
        if self.socket is None or self.status is not None:
            return
        with suppress(OSError):  # the buffer is full, or ssh has exited
            sent = self.socket.send(self.unsent, socket.MSG_DONTWAIT)
            self.unsent = self.unsent[sent:]
        try:
            received = self.socket.recv(9, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:  # the starter was killed
            received = b""
        self.status = int(received) if received else 255


def run(nodes, way):
    """Run until all nodes have exited. Returns the exit code."""
    wakeup_read, wakeup_write = socket.socketpair()
    signals, quits = record_signals(wakeup_write)
    failed = None  # (name, exit code) of the first node that failed
    killed = False  # by a second Ctrl-C, or at the end of the job
    word = None  # the last one sent to the nodes, but for "quit"
    deadline = math.inf
    own_directory = tempfile.TemporaryDirectory(prefix="launch-", dir="/tmp")
    with own_directory as directory, way.shared_directory() as shared:
        path = f"{directory}/socket"
        server = listen(path, len(nodes))
        starters = way.start(list(nodes), path, shared)
        while time.monotonic() < deadline:
            if all(node.status is not None for node in nodes.values()):
                break
            wait(server, wakeup_read, nodes.values(), deadline)
            accept_connections(server, nodes)
            for node in nodes.values():
                node.poll()
            if failed is None:
                failed = find_failure(nodes, starters)
            while quits:
                quits.pop()
                send("quit", nodes)
            killed = way.is_over() or signal.SIGINT in signals[1:]
            if word != "end" and (failed or killed):
                word = "end"
                send(word, nodes)
                deadline = time.monotonic() + END_SECONDS + HANG_SECONDS
            elif word is None and signals:
                word = "stop"
                send(word, nodes)
                say("stopping: all ranks save and exit; press Ctrl-C again to kill them")
    signal.set_wakeup_fd(-1)  # the sockets are about to be closed; a starter may still end
    if killed and any(node.status != 0 for node in nodes.values()):
        return 130
    if failed is None:
        return 0
    name, status = failed
    say(f"error: {name} failed (exit code {status}), so all nodes were stopped")
    way.show_failure(name)
    return status


def record_signals(wakeup):
    """From now on, append each stop signal and each SIGQUIT to the two lists returned.

    And write to the socket.
    """
    signals = []
    quits = []

    def on_signal(number, _frame):
        signals.append(number)

    def on_quit(number, _frame):
        quits.append(number)

    def on_exit_of_a_starter(_number, _frame):
        pass  # without a handler, it would not write to the socket

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, on_signal)
    signal.signal(signal.SIGQUIT, on_quit)
    signal.signal(signal.SIGCHLD, on_exit_of_a_starter)
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())  # ends wait()
    return signals, quits


def listen(path, count):
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(count)
    server.setblocking(False)
    return server


def accept_connections(server, nodes):
    """Accept connections from the starters, which first send the name of their host."""
    while True:
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            return
        host = connection.makefile().readline().strip()
        nodes[host].socket = connection


def find_failure(nodes, starters):
    """(name, exit code) of a node that has failed, or of a starter."""
    codes = [(host, node.status) for host, node in nodes.items()]
    codes += [(name, starter.poll()) for name, starter in starters]
    for name, code in codes:
        if code:
            return name, exit_code(code)
    return None


def send(word, nodes):
    for node in nodes.values():
        node.unsent += f"{word}\n".encode()


def wait(server, wakeup_read, nodes, deadline):
    """Sleep until a signal or a message of a node arrives, or a process ends."""
    with selectors.DefaultSelector() as events:
        events.register(server, selectors.EVENT_READ)
        events.register(wakeup_read, selectors.EVENT_READ)
        for node in nodes:
            if node.socket and node.status is None:
                awaited = selectors.EVENT_READ
                if node.unsent:
                    awaited |= selectors.EVENT_WRITE
                events.register(node.socket, awaited)
        timeout = None
        if deadline < math.inf:
            timeout = max(0, deadline - time.monotonic())
        for key, _ in events.select(timeout):
            if key.fileobj == wakeup_read:
                wakeup_read.recv(4096)


def connect_by_ssh(path, host, rank):
    """Run ssh for one host: input from the launcher, output to stdout and the log file."""
    time.sleep(int(rank) // HOSTS_PER_SECOND)
    with socket.socket(socket.AF_UNIX) as launcher, suppress(ConnectionError, FileNotFoundError):
        launcher.connect(path)
        launcher.sendall(f"{host}\n".encode())
        ssh = subprocess.Popen(
            [*SSH, host, "exec bash -s"],
            stdin=launcher,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=stop_with_parent,
        )
        # -p: keep writing the log if stdout is closed
        subprocess.run(["tee", "-p", log_of(host)], stdin=ssh.stdout)
        code = exit_code(ssh.wait())
        launcher.sendall(str(code).encode())


def connect_by_pbs(path, host, rank, directory):
    """Run pbsdsh for one host. It has no input and always returns 0: files replace both."""
    files = Files(directory, rank)
    signal.signal(signal.SIGTERM, lambda *_: None)  # pbsdsh gets it, too, and ends
    with socket.socket(socket.AF_UNIX) as launcher, suppress(ConnectionError, FileNotFoundError):
        launcher.connect(path)
        launcher.sendall(f"{host}\n".encode())
        lines = launcher.makefile("rb")
        files.write("request", lines.readline())
        slot = str(slots_of_job().index(host))  # the first one of this host
        run_node = input_of_bash(f"ssh/node.py --files {shlex.quote(directory)} {rank}")
        command = ["pbsdsh", "-n", slot, "--", "/bin/bash", "-c", run_node]
        pbsdsh = subprocess.Popen(command, preexec_fn=stop_with_parent)
        forwarding = threading.Thread(target=forward, args=(lines, files), daemon=True)
        forwarding.start()
        pbsdsh.wait()
        deadline = time.monotonic() + STATUS_SECONDS
        while files.read("status") is None and forwarding.is_alive():
            if time.monotonic() > deadline:  # it did not start or was killed
                break
            time.sleep(0.1)  # a network file system may lag
        launcher.sendall(files.read("status") or b"255")


def forward(lines, files):
    """Pass the launcher's words on. When it has exited, node.py notices that the files are gone."""
    for word in lines:
        files.write("quit" if word == b"quit\n" else "word", word)
    shutil.rmtree(files.directory, ignore_errors=True)


def log_of(host):
    directory = os.environ.get("LOG_DIR") or "logs"
    return os.path.join(directory, f"node_{host}.log")


def say(text):
    with suppress(OSError):  # the terminal was closed
        print(f"launch.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
