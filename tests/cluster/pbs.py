#!/usr/bin/env python3
"""Simulates PBS on the cluster of up.sh: qsub and qdel on the login node, pbsdsh in jobs.

PBS itself is in no package registry. This simulates what was observed with two MoMs of OpenPBS
23.06: a copy of the job script runs on the first host, in the home directory, as
the child of a shell; PBS_NODEFILE names a host once per slot and exists on the first host only;
OMP_NUM_THREADS is NCPUS; the umask is 077 without -W umask. pbsdsh -n SLOT starts a process on the
host of that slot, in a session of its own, with nothing of the caller's environment, and exits with
0 whatever the process does. Signals go to the sessions of the script and of pbsdsh's processes, and
to nothing outside of them: qdel sends SIGTERM, and SIGKILL after 30 s;
either kills the shell above the script. When the shell ends, the sessions get SIGKILL, too; after
qdel only when they are empty.

    pbs.py qsub HOST[,HOST...] SLOTS [-W ...] [-v NAME=VALUE,...] SCRIPT
    pbsdsh -n SLOT -- PROGRAM [ARGUMENT ...]

SIGTERM to the qsub process is qdel.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
NCPUS = "64"
KILL_DELAY = 30  # seconds from SIGTERM to SIGKILL


def start(host: str, env: dict[str, str], umask: int, command: list, **io) -> subprocess.Popen:
    words = [f"{name}={value}" for name, value in env.items()]
    command = [HERE / "on.sh", host, "env", "-i", f"--chdir={Path.home()}", *words, *command]
    return subprocess.Popen(
        list(map(str, command)),
        start_new_session=True,
        umask=umask,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),  # as PBS's daemon does
        **io,
    )


def signal_sessions(tasks: Path, number: int) -> int:
    """Signals all processes in the sessions of the job. Returns their number."""
    sessions, count = {int(path.name) for path in tasks.iterdir()}, 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                os.kill(int(entry.name), number)
                count += 1
    return count


def qsub(hosts: str, slots: str, *words: str) -> int:
    script = Path(words[-1]).resolve()
    directives = shlex.split(" ".join(re.findall("(?m)^#PBS (.*)", script.read_text())))
    parser = argparse.ArgumentParser()
    for option in ("-j", "-N"):
        parser.add_argument(option)
    for option in ("-W", "-l", "-v"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("script", nargs="?")
    options = parser.parse_args([*directives, *words])
    attributes = dict(word.split("=", 1) for word in options.W + options.l)
    variables = dict(word.split("=", 1) for text in options.v for word in text.split(","))
    job = f"{os.getpid()}.server"
    first, received = hosts.split(",")[0], []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    with tempfile.TemporaryDirectory() as directory:
        tasks, spool = Path(directory, "tasks"), Path(directory, f"{job}.SC")
        tasks.mkdir()
        spool.write_text(script.read_text())
        program = Path(directory, "pbsdsh")
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} pbsdsh "$@"\n')
        program.chmod(0o755)
        nodefile = f"/run/{job}"  # every host has its own /run
        text = "".join(f"{host}\n" * int(slots) for host in hosts.split(","))
        put = [HERE / "on.sh", first, "tee", nodefile]
        subprocess.run(put, input=text, text=True, stdout=subprocess.DEVNULL, check=True)
        env = {
            "HOME": str(Path.home()),
            "PATH": f"{directory}:/usr/bin:/bin:/usr/sbin:/sbin",
            "ENVIRONMENT": "BATCH",
            "NCPUS": NCPUS,
            "OMP_NUM_THREADS": NCPUS,
            "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_JOBID": job,
            "PBS_NODEFILE": nodefile,
            "PBS_O_WORKDIR": os.getcwd(),
            "SIMULATION": directory,
            "UMASK": attributes.get("umask", "077"),
            "CLUSTER": os.environ["CLUSTER"],
        }
        print(job, flush=True)
        with open(f"train.o{os.getpid()}", "w") as output:
            command = ["bash", "-c", f"bash {shlex.quote(str(spool))}; exit $?"]
            umask = int(env["UMASK"], 8)
            shell = start(first, env | variables, umask, command, stdout=output, stderr=output)
            (tasks / str(shell.pid)).touch()
            while shell.poll() is None and not received:
                time.sleep(0.1)
            if shell.poll() is None:
                signal_sessions(tasks, signal.SIGTERM)
                kill_at = time.time() + KILL_DELAY
                while time.time() < kill_at and signal_sessions(tasks, 0):
                    time.sleep(0.1)
            signal_sessions(tasks, signal.SIGKILL)
        return shell.wait()


def pbsdsh(option: str, slot: str, dashes: str, *command: str) -> int:
    assert (option, dashes) == ("-n", "--")
    host = Path(os.environ["PBS_NODEFILE"]).read_text().split()[int(slot)]
    kept = "HOME ENVIRONMENT NCPUS PBS_ENVIRONMENT PBS_JOBID PBS_NODEFILE PBS_O_WORKDIR CLUSTER"
    env = {name: os.environ[name] for name in kept.split()}
    env |= {"PATH": "/bin:/usr/bin", "OMP_NUM_THREADS": NCPUS}
    task = start(host, env, int(os.environ["UMASK"], 8), list(command))
    Path(os.environ["SIMULATION"], "tasks", str(task.pid)).touch()

    def end(number, _frame):
        os.killpg(task.pid, number)
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    if code := task.wait():
        print(f"pbsdsh: task 0x00000000 exit status {code}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit({"qsub": qsub, "pbsdsh": pbsdsh}[sys.argv[1]](*sys.argv[2:]))
