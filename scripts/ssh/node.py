#!/usr/bin/env python3
"""Run a command on this host for launch.py, until either ends.

Usage: node.py [--files PATH]

Standard input has one message per line. First the line of request(). Later `stop`: the command
should save and exit; or `end`: it has END_SECONDS to do so. End of input means that the launcher
has exited. With --files, the messages are in the file PATH.words, which the launcher's end removes,
and the exit code is written to PATH.code.
When the command has exited, all processes that it left behind are killed: node.py adopts them. It
is two processes: the one that runs the command has a session of its own, because a PBS job ends
with SIGKILL to the session. If one of the two is killed, the other stops the command.
Exit code: the command's; 128 + N if signal N killed it.
"""

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
from contextlib import suppress

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # scripts/
from processes import adopt_orphans, end_with_parent, kill_descendants  # noqa: E402

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
    r"_|BASH.*|DBUS_.*|DISPLAY|EUID|HOME|HOST|HOSTNAME|KRB5CCNAME|LOGNAME|MAIL|OLDPWD|PPID"
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
    return json.dumps({"command": command, "environment": environment})


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


def serve(launcher, front):
    """Run the command that the launcher requests. Returns the exit code.

    front: the process that is in the session of the launch.
    """
    stops = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stops.append(number))
    line = b""
    while not line:
        line = launcher.message()
    if not line.endswith(b"\n"):  # the launcher has already exited
        return 128 + signal.SIGTERM
    wanted = json.loads(line)
    command = subprocess.Popen(
        wanted["command"],
        env={**os.environ, **wanted["environment"]},
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    end_seconds = {b"end\n": END_SECONDS, b"gone": GONE_SECONDS}
    if "STOP_FILE" in wanted["environment"]:  # under supervise.py
        end_seconds[b"gone"] = END_SECONDS
    is_stopping = False
    deadline = math.inf
    while command.poll() is None and time.monotonic() < deadline:
        if deadline < math.inf:
            time.sleep(0.1)
            continue
        word = launcher.message()
        if os.getppid() != front:
            word = b"gone"
        if (word or stops) and not is_stopping:  # once: a second SIGTERM may interrupt a save
            is_stopping = True
            command.terminate()
        if word in end_seconds:
            deadline = time.monotonic() + end_seconds[word]
    kill_descendants([signal.SIGKILL])
    code = command.wait()
    return code if code >= 0 else 128 - code


def main():
    path = sys.argv[2] if sys.argv[1:2] == ["--files"] else None
    launcher = GrowingFile(f"{path}.words") if path else StandardInput()
    adopt_orphans()
    front = os.getpid()
    keeper = os.fork()
    if not keeper:
        os.setsid()
        adopt_orphans()
        return serve(launcher, front)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # a scheduler may send them
        signal.signal(number, lambda _number, _frame: os.kill(keeper, signal.SIGTERM))
    _, status = os.waitpid(keeper, 0)
    kill_descendants()  # those of a keeper that was killed
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 255  # as of a lost connection
    if path:
        with suppress(OSError):  # unless the launcher has exited
            with open(f"{path}.new", "w") as file:
                file.write(str(code))
            os.replace(f"{path}.new", f"{path}.code")
    return code


if __name__ == "__main__":
    sys.exit(main())
