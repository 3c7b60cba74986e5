"""What Slurm or PBS knows of this job, and its requeue: for supervise.py. Needs only Python 3.8."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress

from hosts import expand

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
            return seconds_of(slurm_job()["EndTime"])
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


def seconds_of(text):
    """A time of Slurm's in seconds since 1970."""
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def lost_nodes(program, nodes):
    """Those of these nodes of the job that are down, or where srun cannot start the program.

    One question for all. No answer in time says nothing about a node.
    """
    every = ",".join(nodes)
    states = output_of("sinfo", "--noheader", "--Node", f"--nodes={every}", "--format=%N %t") or ""
    lost = [node for node in nodes if f"{node} down" in states]
    rest = [node for node in nodes if node not in lost]
    where = [f"--nodes={len(rest)}", f"--nodelist={','.join(rest)}", "--ntasks-per-node=1"]
    test = ["sh", "-c", 'command -v "$0" >/dev/null && echo "$SLURMD_NODENAME"', program]
    try:
        result = subprocess.run(
            ["srun", "--overlap", *where, *test], stdout=subprocess.PIPE, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return lost
    answers = result.stdout.decode(errors="replace").split()
    if result.returncode and answers:
        lost += [node for node in rest if node not in answers]
    return lost if len(lost) < len(nodes) else []


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


def ended_by():
    """Who is ending this Slurm job: "preempted", "scancel", or "" for nobody."""
    facts = slurm_job()
    state = facts.get("JobState", "RUNNING")
    if state == "CANCELLED":
        return "scancel"
    is_preempted = state != "RUNNING" or facts.get("PreemptTime", "None") != "None"
    return "preempted" if is_preempted else ""


def submit_time():
    """When the user submitted this job, in seconds since 1970; None outside Slurm and PBS."""
    with suppress(KeyError, ValueError):
        if slurm_id():
            return seconds_of(slurm_job()["SubmitTime"])
        return time.mktime(time.strptime(pbs_job()["qtime"]))
    return None


def exclude(job, left_out, used):
    """Ask Slurm to start this job, which is being requeued, on other nodes than these.

    used: nodes of the job; those that are not left out any more may be used again.
    """
    given = slurm_job().get("ExcNodeList", "(null)")
    earlier = expand(given.replace("(null)", ""))
    names = [node for node in earlier if node not in used] + left_out
    if set(names) == set(earlier):
        return
    command = ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(names)}"]
    for _ in range(5):  # until Slurm has processed the requeue
        if output_of(*command) is not None:
            return
        time.sleep(0.5)
    remedy = f"scancel {job}; submit the same command again, with --exclude={','.join(names)}"
    log(f"Slurm does not exclude {', '.join(left_out)}: {remedy}")


def requeue(left_out, used):
    """Requeue this Slurm job, without the nodes of the first list.

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
    exclude(job, left_out, used)
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
