#!/usr/bin/env python3
"""Run a command on this host, for a launcher elsewhere (launch.py, pbs_train.sh), while that lives.

Standard input is, line by line: a request (what `node.py --request COMMAND ...` prints, where the
launcher is); `stop`, to make the command save and exit; `end`, to give it END_SECONDS for that. The
end of the input means that the launcher has gone. At the end, every process is killed that the
command has left: one with the request's id as ON_NODE in its environment, and no other.
Exit code: the command's; 128 + N if signal N ended it.
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

# Who waits how long for whom:
# END_SECONDS   node.py for its command, then it kills: after `end`, because another node has failed
#               or Ctrl-C was pressed twice. Ranks that wait for a failed one would never exit.
# GONE_SECONDS  the same if the launcher is killed or the connection lost, when more ranks may be
#               able to save. Under supervise.py, which may start again at once: END_SECONDS.
# HANG_SECONDS  the launcher for its nodes, beyond END_SECONDS; then it exits without them.
# After `stop`, nobody limits how long the last save takes.
END_SECONDS, GONE_SECONDS, HANG_SECONDS = 5, 30, 10

# What belongs to a host or a session does not go along.
PRIVATE = re.compile(
    r"_|BASH.*|DBUS_.*|DISPLAY|EUID|HOME|HOST|HOSTNAME|LOGNAME|MAIL|OLDPWD|ON_NODE|PPID|PWD|SHELL.*"
    r"|SHLVL|SLURM.*|SSH_.*|TERM.*|TMPDIR|TMUX.*|UID|USER|XAUTHORITY|XDG_.*"
    r"|.*_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|PBS_(MOMPORT|NODENUM|TASKNUM|VNODENUM)"
)


def request(command):
    """A line that makes node.py run the command in the environment of here."""
    environment = {k: v for k, v in os.environ.items() if not PRIVATE.fullmatch(k)}
    return json.dumps({"command": command, "environment": environment, "id": uuid.uuid4().hex})


def serve():
    """Run what standard input asks for. Returns the exit code."""
    launcher = open(0, "rb", buffering=0)  # select() does not see lines in a buffer
    line, signals = launcher.readline(), []
    if not line.endswith(b"\n"):  # it has gone already
        return 128 + signal.SIGTERM
    wanted = json.loads(line)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # from a scheduler
        signal.signal(number, lambda number, _: signals.append(number))
    environment = {**os.environ, **wanted["environment"], "ON_NODE": wanted["id"]}
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    command = subprocess.Popen(
        wanted["command"], env=environment, preexec_fn=stop_with_parent, **options
    )
    stopping, deadline = False, math.inf
    while command.poll() is None and time.monotonic() < deadline:
        ready = select.select([launcher] * (deadline == math.inf), [], [], 0.1)[0]
        word = launcher.readline() or b"gone" if ready else b"stop" * bool(signals)
        if word and not stopping:  # once: a second SIGTERM would interrupt some scripts' save
            stopping = True
            command.terminate()
        if word in (b"end\n", b"gone"):
            hurry = word == b"end\n" or "ATTEMPT" in environment
            deadline = time.monotonic() + (END_SECONDS if hurry else GONE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)
    kill_all(f"ON_NODE={wanted['id']}".encode())
    return exit_code(command.wait())


def stop_with_parent():
    """In a child: if this process is killed, the kernel stops the child, too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def kill_all(variable):
    """Kill every process with this in its environment, whoever its parent is by now."""
    for _ in range(50):  # what is killed may just have started another
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
    """As a shell has it: Popen.returncode is -N after signal N."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--request"]:
        print(request(sys.argv[2:]))
    else:
        sys.exit(serve())
