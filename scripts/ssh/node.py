#!/usr/bin/env python3
"""Run a command on this host for a remote launcher (launch.py, pbs_train.sh), until either ends.

Standard input has one message per line. First a request: the line that `node.py --request
COMMAND ...` prints on the launcher's host. Later `stop`: the command should save and exit; or
`end`: it has END_SECONDS to do so. End of input means that the launcher has exited. When the
command has exited, all processes that it left behind are killed: those with ON_NODE=ID in their
environment.
If node.py is killed, the same happens END_SECONDS later: a PBS job ends with SIGKILL to node.py's
session only, and torchrun's workers have sessions of their own.
Exit code: the command's; 128 + N if signal N killed it.
"""

import ctypes
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress

# Time limits:
# END_SECONDS   After `end`, node.py kills its command. Another node has failed, or Ctrl-C was
#               pressed twice; ranks that wait for a failed rank would never exit.
# GONE_SECONDS  The same if the launcher was killed or the connection lost: more ranks may be able
#               to save. Under supervise.py, which may restart at once, it is END_SECONDS.
# HANG_SECONDS  After END_SECONDS and this, the launcher exits without waiting for its nodes.
# After `stop`, the last save may take any time.
END_SECONDS, GONE_SECONDS, HANG_SECONDS = 5, 30, 10

# Variables of a host, a session or an MPI process are not forwarded. Those of modules
# (LOADEDMODULES, ...) are, because they describe PATH and LD_LIBRARY_PATH, which are forwarded too.
PRIVATE = re.compile(
    r"_|BASH.*|DBUS_.*|DISPLAY|EUID|HOME|HOST|HOSTNAME|KRB5CCNAME|LOGNAME|MAIL|OLDPWD|ON_NODE|PPID"
    r"|PWD|SHELL.*|SHLVL|SLURM.*|SSH_.*|TERM.*|TMPDIR|TMUX.*|UID|USER|XAUTHORITY|XDG_.*"
    r"|.*_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|OMPI_.*|PMIX?_.*|PBS_(MOMPORT|NODENUM|TASKNUM|VNODENUM)"
)


def request(command):
    """The line that makes node.py run the command with this process's environment."""
    environment = {k: v for k, v in os.environ.items() if not PRIVATE.fullmatch(k)}
    return json.dumps({"command": command, "environment": environment, "id": uuid.uuid4().hex})


def serve():
    """Run the command requested on standard input. Returns the exit code."""
    launcher = open(0, "rb", buffering=0)  # unbuffered: select() does not see buffered lines
    line, signals = launcher.readline(), []
    if not line.endswith(b"\n"):  # the launcher has already exited
        return 128 + signal.SIGTERM
    wanted = json.loads(line)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # from a scheduler
        signal.signal(number, lambda number, _: signals.append(number))
    environment = {**os.environ, **wanted["environment"], "ON_NODE": wanted["id"]}
    mark = f"ON_NODE={wanted['id']}".encode()
    reaper = start_reaper(mark)
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    command = subprocess.Popen(
        wanted["command"], env=environment, preexec_fn=stop_with_parent, **options
    )
    stopping, deadline = False, math.inf
    while command.poll() is None and time.monotonic() < deadline:
        ready = select.select([launcher] * (deadline == math.inf), [], [], 0.1)[0]
        word = launcher.readline() or b"gone" if ready else b"stop" * bool(signals)
        if word and not stopping:  # once: a second SIGTERM may interrupt a save
            stopping = True
            command.terminate()
        if word in (b"end\n", b"gone"):
            hurry = word == b"end\n" or "ATTEMPT" in environment
            deadline = time.monotonic() + (END_SECONDS if hurry else GONE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    kill_all(mark)
    os.kill(reaper, signal.SIGKILL)
    return exit_code(command.wait())


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--request"]:
        print(request(sys.argv[2:]))
    else:
        sys.exit(serve())
