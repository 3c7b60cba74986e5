"""What Slurm or PBS knows of this job, and its requeue: for supervise.py. Needs only Python 3.8."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

PROBES = 32  # nodes that are asked at the same time
REFUSED = re.compile("disabled|denied|invalid", re.I)  # an error of scontrol that would repeat


def log(text):
    try:
        print(f"supervise.py: {text}", file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed, or Ctrl-C ended a `tee`
        sys.stderr = open(os.devnull, "w")


def end_of_job():
    """The end of the job's time in seconds since 1970; None if the scheduler does not say."""
    try:
        if slurm_id():
            return time.mktime(time.strptime(slurm_job()["EndTime"], "%Y-%m-%dT%H:%M:%S"))
        if os.environ.get("PBS_JOBID"):
            facts = pbs_job()
            start = time.mktime(time.strptime(facts.get("stime") or facts["start_time"]))
            return start + walltime_seconds(facts["Resource_List.walltime"])
    except KeyError:  # the scheduler has not answered
        return None
    except ValueError:  # "Unknown": the time has no limit
        return float("inf")
    return None


# ---------------------------------------------------------------------------------------- Slurm


def output_of(*command):
    """What a command prints; None if it fails."""
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        result = subprocess.run(command, capture_output=True, timeout=20, check=True, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace")


def nodes_of_job():
    """The nodes of this Slurm job; [] outside Slurm."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    text = output_of("scontrol", "show", "hostnames", nodes) or ""
    return text.split()


def nodes_without(program, nodes):
    """Those of these nodes of the job where srun cannot start the program."""
    probe = ["srun", "--overlap", "--nodes=1", "--ntasks=1"]
    test = ["sh", "-c", 'command -v "$0"', program]
    commands = [[*probe, f"--nodelist={node}", *test] for node in nodes]
    with ThreadPoolExecutor(PROBES) as pool:
        answers = pool.map(lambda command: output_of(*command), commands)
    return [node for node, answer in zip(nodes, answers) if answer is None]


def slurm_id():
    """The job's id for Slurm's commands. In an array, SLURM_JOB_ID of one task means all tasks."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array:
        return f"{array}_{task}"
    return os.environ.get("SLURM_JOB_ID")


def slurm_job():
    """What `scontrol show job` prints: {name: text}; {} outside Slurm."""
    job = slurm_id()
    if not job:
        return {}
    text = output_of("scontrol", "show", "job", job) or ""
    return dict(re.findall(r"(\w+)=(\S*)", text))


def is_preempted():
    """Whether Slurm is ending this job."""
    facts = slurm_job()
    is_running = facts.get("JobState", "RUNNING") == "RUNNING"
    return not is_running or facts.get("PreemptTime", "None") != "None"


def submit_without(nodes):
    return f"submit the same command again, with --exclude={','.join(nodes)}"


def exclude(job, nodes):
    """Ask Slurm to start this job, which is being requeued, on other nodes than these."""
    earlier = slurm_job().get("ExcNodeList", "(null)")
    names = nodes if earlier == "(null)" else [earlier, *nodes]
    command = ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(names)}"]
    for _ in range(5):  # until Slurm has processed the requeue
        if output_of(*command) is not None:
            return
        time.sleep(0.5)
    log(f"Slurm does not exclude {', '.join(nodes)}: scancel {job}; {submit_without(nodes)}")


def requeue(left_out=()):
    """Requeue this Slurm job, without these nodes.

    Returns "requeued", "refused", "ended" if the job is over, "failed", or "no answer".
    """
    job = slurm_id()
    facts = slurm_job()
    state = facts.get("JobState")
    if state not in (None, "RUNNING") and facts.get("Reason") != "TimeLimit":
        log(f"job {job} is {state}: Slurm ends it, or starts it again")
        return "ended"
    log(f"requeueing job {job}")
    try:  # This kills the job at once, so everything must be on disk by now.
        command = ["scontrol", "requeue", job]
        subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        text = str(error)
        if getattr(error, "stderr", None):
            text = error.stderr.decode(errors="replace").strip()
        log(f"Slurm does not requeue job {job}: {text}")
        if REFUSED.search(text) or isinstance(error, OSError):
            return "refused"
        return "failed" if facts else "no answer"
    if left_out:
        exclude(job, left_out)
    return "requeued"


# ------------------------------------------------------------------------------------------ PBS


def pbs_job():
    """The attributes of this job: {name: text}. Torque's names differ from those of OpenPBS."""
    text = output_of("qstat", "-f", os.environ["PBS_JOBID"]) or ""
    unwrapped = text.replace("\n\t", "")
    return dict(re.findall(r"(?m)^    (\S+) = (.*)$", unwrapped))


def walltime_seconds(text):
    """The seconds in [[DAYS:]HOURS:]MINUTES:SECONDS."""
    seconds = 0
    for number, unit in zip(reversed(text.split(":")), (1, 60, 3600, 86400)):
        seconds += int(number) * unit
    return seconds
