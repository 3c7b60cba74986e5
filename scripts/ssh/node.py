#!/usr/bin/env python3
"""Run a command on this host for launch.py, until either ends.

Usage: node.py [--files PATH]

Standard input has one message per line. First the line of request(). Later `quit`: the command's
ranks should print their stacks; `stop`: it should save and exit; or `end`: it has END_SECONDS to do
so. End of input means that the launcher has exited. With --files, the messages are in the file
PATH.words, which the launcher's end removes, and the exit code is written to PATH.code.
When the command has exited, all processes that it left behind are killed: those with ON_NODE=ID in
their environment.
If node.py is killed, the same happens END_SECONDS later: a PBS job ends with SIGKILL to node.py's
session only, and torchrun's ranks have sessions of their own.
Exit code: the command's; 128 + N if signal N killed it.
"""

import ctypes
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress

# After `end`, node.py kills its command this many seconds later. Another node has failed, or Ctrl-C
# was pressed twice; ranks that wait for a failed rank would never exit.
END_SECONDS = 5
# The same if the launcher was killed or the connection lost: more ranks may be able to save. Under
# supervise.py, which may restart at once, it is END_SECONDS.
GONE_SECONDS = 30
# After `stop`, there is no limit: the last save may take any time.

# Variables of a host, a session or an MPI process are not forwarded. Those of modules
# (LOADEDMODULES, ...) are, because they describe PATH and LD_LIBRARY_PATH, which are forwarded too.
PRIVATE = re.compile(
    r"_|BASH.*|DBUS_.*|DISPLAY|EUID|HOME|HOST|HOSTNAME|KRB5CCNAME|LOGNAME|MAIL|OLDPWD|ON_NODE|PPID"
    r"|PWD|SHELL.*|SHLVL|SLURM.*|SSH_.*|TERM.*|TMPDIR|TMUX.*|UID|USER|XAUTHORITY|XDG_.*"
    r"|OMPI_.*|PMIX?_.*|PBS_(MOMPORT|NODENUM|TASKNUM|VNODENUM)"
)
# In a job, the scheduler has chosen those of one host; in a shell, the user has, for all hosts.
GPUS = re.compile(r".*_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL")


def request(command):
    """The line that makes node.py run the command with this process's environment."""
    environment = {}
    in_job = "SLURM_JOB_ID" in os.environ or "PBS_JOBID" in os.environ
    for name, value in os.environ.items():
        is_private = PRIVATE.fullmatch(name) or (in_job and GPUS.fullmatch(name))
        if not is_private:
            environment[name] = value
    return json.dumps({"command": command, "environment": environment, "id": uuid.uuid4().hex})


class StandardInput:
    def __init__(self):
        self.file = open(0, "rb", buffering=0)  # unbuffered: select() does not see buffered lines

    def message(self):
        """The launcher's next message, b"gone" if it has exited, b"" if there is none."""
        ready, _, _ = select.select([self.file], [], [], 0.1)
        return (self.file.readline() or b"gone") if ready else b""


class GrowingFile:
    """The same in a PBS job, where there is no input."""

    def __init__(self, path):
        self.path = path
        self.position = 0
        if not os.path.isdir(os.path.dirname(path)):
            text = f"{path} is not visible here: set LOG_DIR to a directory that all nodes see"
            sys.exit(f"node.py: error: {socket.gethostname()}: {text}")

    def message(self):
        time.sleep(0.5)
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                line = file.readline()
        except OSError:
            return b"gone"
        if not line.endswith(b"\n"):  # it is still being written
            return b""
        self.position += len(line)
        return line


def serve(launcher):
    """Run the command that the launcher requests. Returns the exit code."""
    line = b""
    while not line:
        line = launcher.message()
    if not line.endswith(b"\n"):  # the launcher has already exited
        return 128 + signal.SIGTERM
    wanted = json.loads(line)
    signals = record_signals()
    environment = dict(os.environ)
    environment.update(wanted["environment"])
    environment["ON_NODE"] = wanted["id"]
    mark = f"ON_NODE={wanted['id']}".encode()
    reaper = start_reaper(mark)
    command = subprocess.Popen(
        wanted["command"],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=stop_with_parent,
    )
    end_seconds = {b"end\n": END_SECONDS, b"gone": GONE_SECONDS}
    if "STOP_FILE" in environment:  # under supervise.py
        end_seconds[b"gone"] = END_SECONDS
    wait(command, launcher, signals, end_seconds)
    with suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    kill_all(mark)
    os.kill(reaper, signal.SIGKILL)
    return exit_code(command.wait())


def record_signals():
    """From now on, append each stop signal, which a scheduler may send, to the list returned."""
    signals = []

    def on_signal(number, _frame):
        signals.append(number)

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # the launcher sends a word instead
    return signals


def wait(command, launcher, signals, end_seconds):
    """Wait until the command has exited, or its time after one of these words is over."""
    stopping = False
    deadline = math.inf
    while command.poll() is None and time.monotonic() < deadline:
        if deadline < math.inf:
            time.sleep(0.1)
            continue
        word = launcher.message()
        if word == b"quit\n":
            command.send_signal(signal.SIGQUIT)
            continue
        if signals and not word:
            word = b"stop"
        if word and not stopping:  # once: a second SIGTERM may interrupt a save
            stopping = True
            command.terminate()
        if word in end_seconds:
            deadline = time.monotonic() + end_seconds[word]


def start_reaper(mark):
    """Start a process that calls kill_all END_SECONDS after this one dies. Returns its pid."""
    parent_is_gone, write_end = os.pipe()  # readable once no process has the write end open
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.close(write_end)
    os.closerange(0, 3)  # ssh waits until these are closed
    os.read(parent_is_gone, 1)
    time.sleep(END_SECONDS)
    kill_all(mark)
    os._exit(0)


def stop_with_parent():
    """For preexec_fn: if this process is killed, the kernel sends the child SIGTERM."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def kill_all(variable):
    """Kill every process with this variable in its environment, even if its parent has exited."""
    for _ in range(50):  # a process may have started another before it was killed
        found = False
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
                if variable in environ.read().split(b"\0"):
                    os.kill(int(pid), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.1)


def exit_code(code):
    """The exit code as a shell reports it: Popen.returncode is -N after signal N."""
    return code if code >= 0 else 128 - code


def main():
    if sys.argv[1:2] != ["--files"]:
        return serve(StandardInput())
    path = sys.argv[2]
    code = serve(GrowingFile(f"{path}.words"))
    with suppress(OSError):  # unless the launcher has exited
        with open(f"{path}.new", "w") as file:
            file.write(str(code))
        os.replace(f"{path}.new", f"{path}.code")
    return code


if __name__ == "__main__":
    sys.exit(main())
