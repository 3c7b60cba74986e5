"""The cluster of up.sh from Python: run commands on its hosts, list their processes."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness import LAUNCH_VARIABLES, REPO

HERE = Path(__file__).resolve().parent
TOOLS = "slurmctld slurmd munged sshd pdsh ip nsenter nft modulecmd".split()
DAEMONS = re.compile(r"^(sleep infinity|munged|slurm|: slurm|sshd: .*listener|\S*sshd -f)")


def why_not() -> str:
    """What is missing to start the cluster; "" if nothing is."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    packages = f"of Debian: {', '.join(missing)}" if missing else ""
    return " and ".join(filter(None, ["root" if os.geteuid() else "", packages]))


# A user's own script, which the launchers run in place of the trainer.
PROBE = """
import json, os, socket, sys
env = os.environ
line = json.dumps({
    "host": socket.gethostname(), "rank": int(env["RANK"]), "local_rank": int(env["LOCAL_RANK"]),
    "world_size": int(env["WORLD_SIZE"]), "cores": sorted(os.sched_getaffinity(0)),
    "argv": sys.argv[1:], "quoted": env.get("QUOTED"), "attempt": env.get("ATTEMPT_ID"),
    "gpus": env.get("CUDA_VISIBLE_DEVICES"),
    "cores_of_step": int(env.get("SLURM_CPUS_ON_NODE", 0)),
    "threads": env.get("OMP_NUM_THREADS"),
})
os.write(1, f"PROBE {line}\\n".encode())
"""


def probed(text: str) -> list[dict]:
    """What the probe printed on each rank, in order of rank."""
    lines = [line.split("PROBE ")[1] for line in text.splitlines() if "PROBE " in line]
    return sorted(map(json.loads, lines), key=lambda record: record["rank"])


def wait_until(condition, launch: subprocess.Popen | None = None, seconds: float = 300) -> None:
    """Wait until the condition holds; fails if the launch ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert launch is None or launch.poll() is None, launch.communicate()[0]
        assert time.monotonic() < deadline, f"condition not met after {seconds} s"
        time.sleep(0.1)


def wait_for_output(launch: subprocess.Popen, text: str, seconds: float = 300) -> None:
    """Read what the launch prints, up to this text."""
    deadline, printed = time.monotonic() + seconds, b""
    while text.encode() not in printed:
        ready, _, _ = select.select([launch.stdout], [], [], max(0, deadline - time.monotonic()))
        chunk = os.read(launch.stdout.fileno(), 65536) if ready else b""
        assert chunk, f"no {text!r} in {printed.decode()}"
        printed += chunk


def down_at_exit(directory: Path) -> None:
    """Run down.sh when this process has ended, even if it was killed or interrupted in up.sh."""
    script = f"tail --pid={os.getpid()} -f /dev/null; exec {HERE}/down.sh"
    subprocess.Popen(
        ["bash", "-c", script],
        env=os.environ | {"CLUSTER": str(directory), "TMPDIR": "/tmp"},  # see temporary_files
        start_new_session=True,  # a signal to the group of the tests does not reach it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@dataclass
class Process:
    host: str
    pid: int
    line: str
    env: list[str]


class Cluster:
    """The cluster of up.sh: run commands on its hosts, list their processes."""

    def __init__(self, directory: Path, nodes: int, slots: int, **env: str):
        self.directory = directory
        inherited = {k: v for k, v in os.environ.items() if not LAUNCH_VARIABLES.search(k)}
        self.env = inherited | {"CLUSTER": str(directory), "PYTHON": sys.executable}
        down_at_exit(directory)
        up = subprocess.run(
            [HERE / "up.sh", str(nodes), str(slots)],
            env=self.env | env,
            capture_output=True,
            text=True,
        )
        assert up.returncode == 0, up.stdout + up.stderr
        self.hosts = sorted(path.name for path in (directory / "hosts").iterdir())

    def down(self) -> None:
        subprocess.run([HERE / "down.sh"], env=self.env, check=True)
        assert not self.directory.exists()

    def start(self, host: str, *command, cwd=REPO, **env: str) -> subprocess.Popen:
        """The command on that host, or this machine if "", in a process group of its own."""
        return subprocess.Popen(
            [*([HERE / "on.sh", host] if host else []), *map(str, command)],
            cwd=cwd,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def on(self, host: str, *command, cwd=REPO, timeout=240, **env: str):
        """(exit code, output) of the command on that host."""
        process = self.start(host, *command, cwd=cwd, **env)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output

    def sbatch(self, cwd, *words, **env: str):
        """(exit code, output) of the job."""
        code, output = self.on("login", "sbatch", "--parsable", *words, cwd=cwd, **env)
        assert code == 0, output
        return self.end_of_job(output.split()[-1])

    def end_of_job(self, job: str):
        """(exit code, output) of the job. Faster than sbatch --wait."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            _, text = self.on("login", "scontrol", "show", "job", job)
            state = re.search(r"JobState=(\w+)", text)[1]
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                code, path = re.search(r"ExitCode=(\d+):.*StdOut=(.*?)\n", text, re.DOTALL).groups()
                output, soon = Path(path), time.monotonic() + 5  # it may be written a moment later
                while not (output.exists() and output.read_text()) and time.monotonic() < soon:
                    time.sleep(0.1)
                return int(code), output.read_text() if output.exists() else ""
            time.sleep(0.3)
        raise TimeoutError(text)

    def processes(self) -> list["Process"]:
        """The processes on the hosts, without the daemons."""
        namespaces = {}
        for host in self.hosts:
            pid = (self.directory / "hosts" / host).read_text().strip()
            namespaces[os.readlink(f"/proc/{pid}/ns/net")] = host
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                host = namespaces.get(os.readlink(entry / "ns/net"))
                line, env = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
            except OSError:
                continue  # it has just ended
            line = os.fsdecode(line).replace("\0", " ").strip()
            if host and line and not DAEMONS.match(line):
                found.append(Process(host, int(entry.name), line, os.fsdecode(env).split("\0")))
        return found

    def assert_nothing_left(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # do not disturb the next test
        text = "\n".join(f"{process.host}: {process.line}" for process in left)
        assert not text, f"still running after {seconds} s:\n{text}"
