#!/usr/bin/env python3
"""Plays PBS on the cluster of up.sh: qsub on its first node, and the pbsdsh that jobs call.

PBS itself is in no package registry. What the launcher relies on is as in OpenPBS: the job script
runs on the first host only, in the home directory; PBS_NODEFILE names a host once per slot; pbsdsh
-n SLOT starts a process on the host of that slot, with nothing of the caller's environment, passes
SIGTERM on, and exits with 0 whatever the process does; at the end of the job, what it left running
is killed.

    pbs.py qsub HOST[,HOST...] SLOTS [-W block=true] [-v NAME=VALUE,...] SCRIPT
    pbsdsh -n SLOT -- PROGRAM [ARGUMENT ...]
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start(host: str, env: dict[str, str], command: list, output=None) -> subprocess.Popen:
    words = [f"{name}={value}" for name, value in env.items()]
    command = [HERE / "on.sh", host, "env", "-i", f"--chdir={Path.home()}", *words, *command]
    return subprocess.Popen(
        list(map(str, command)),
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),  # as PBS's daemon does
    )


def end_job(job: str) -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"PBS_JOBID={job}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended by itself


def qsub(hosts: str, slots: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-W", choices=["block=true"], help="wait for the end of the job")
    parser.add_argument("-v", default="")
    parser.add_argument("script")
    options = parser.parse_args(words)
    variables = dict(word.split("=", 1) for word in filter(None, options.v.split(",")))
    with tempfile.TemporaryDirectory() as directory:
        nodefile, program = Path(directory, "nodes"), Path(directory, "pbsdsh")
        nodefile.write_text("".join(f"{host}\n" * int(slots) for host in hosts.split(",")))
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} pbsdsh "$@"\n')
        program.chmod(0o755)
        env = {
            "HOME": str(Path.home()),
            "PATH": f"{directory}:/usr/bin:/bin:/usr/sbin:/sbin",
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_JOBID": (job := f"{os.getpid()}.server"),
            "PBS_NODEFILE": str(nodefile),
            "PBS_O_WORKDIR": os.getcwd(),
            "CLUSTER": os.environ["CLUSTER"],
        }
        print(job, flush=True)
        with open(f"train.o{os.getpid()}", "w") as output:
            command = ["bash", os.path.abspath(options.script)]
            code = start(hosts.split(",")[0], env | variables, command, output).wait()
        end_job(job)
        return code


def pbsdsh(option: str, slot: str, dashes: str, *command: str) -> int:
    assert (option, dashes) == ("-n", "--")
    host = Path(os.environ["PBS_NODEFILE"]).read_text().split()[int(slot)]
    kept = ["HOME", "PBS_ENVIRONMENT", "PBS_JOBID", "PBS_NODEFILE", "PBS_O_WORKDIR", "CLUSTER"]
    env = {name: os.environ[name] for name in kept} | {"PATH": "/usr/bin:/bin"}
    task = start(host, env, list(command))

    def end(number, _frame):
        os.killpg(task.pid, number)
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    if code := task.wait():
        print(f"pbsdsh: task 0x00000000 exit status {code}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit({"qsub": qsub, "pbsdsh": pbsdsh}[sys.argv[1]](*sys.argv[2:]))
