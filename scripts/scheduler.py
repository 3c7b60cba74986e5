"""What Slurm knows of this job, and its requeue: for supervise.py. Needs only Python 3.8."""

import os
import re
import subprocess
import time

from hosts import expand
from report import say

ANSWER_SECONDS = 60  # slurmctld may be slow
REFUSED = re.compile("disabled|denied|invalid", re.I)  # an error of scontrol that would repeat


def log(text):
    say(f"supervise.py: {text}")


def run(*command):
    """(exit code, what it prints); (None, "") without an answer."""
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        result = subprocess.run(command, timeout=ANSWER_SECONDS, env=env, **pipes)
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return result.returncode, result.stdout.decode(errors="replace")


def times_of_job():
    """(when the user submitted this Slurm job, when its time ends), in seconds since 1970.

    inf if Slurm does not say, and for the end of a time without limit.
    """
    facts = slurm_job()
    return seconds_of(facts.get("SubmitTime", "")), seconds_of(facts.get("EndTime", ""))


def seconds_of(text):
    """A time in seconds since 1970; inf if it is missing or "Unknown"."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return float("inf")


def slurm_id():
    """The job's id for Slurm's commands. In an array, SLURM_JOB_ID of one task means all tasks."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def slurm_job():
    """What `scontrol show job` prints: {name: text}; {} outside Slurm, or without an answer."""
    job = slurm_id()
    if not job:
        return {}
    _, text = run("scontrol", "show", "job", job)
    return dict(re.findall(r"(\w+)=(\S*)", text))


def ended_by():
    """Who is ending this Slurm job: "preempted", "scancel", or "" for nobody."""
    facts = slurm_job()
    state = facts.get("JobState", "RUNNING")
    if state == "CANCELLED":
        return "scancel"
    is_preempted = state != "RUNNING" or facts.get("PreemptTime", "None") != "None"
    return "preempted" if is_preempted else ""


def lost_nodes(program, nodes):
    """Those of these nodes that Slurm has lost, or where srun cannot start the program.

    One question for all. No answer in time says nothing about a node.
    """
    every = ",".join(nodes)
    left = expand(slurm_job().get("NodeList", ""))  # of a job with --no-kill
    lost = [node for node in nodes if left and node not in left]
    if not lost:
        where = [f"--nodes={len(nodes)}", f"--nodelist={every}", "--ntasks-per-node=1"]
        test = 'command -v "$0" >/dev/null && echo "has it: $SLURMD_NODENAME"'
        _, text = run("srun", "--overlap", *where, "sh", "-c", test, program)
        answers = re.findall(r"has it: (\S+)", text)
        lost = [node for node in nodes if node not in answers]
    return lost if len(lost) < len(nodes) else []


def is_ending(facts):
    """Whether Slurm is ending this job, or starts it again; not because its time is over.

    facts: of slurm_job().
    """
    state = facts.get("JobState", "RUNNING")
    if state == "RUNNING" or facts.get("Reason") == "TimeLimit":
        return False
    log(f"this job is {state}: Slurm ends it, or starts it again")
    return True


def requeue(facts, left_out, used):
    """Ask Slurm to start this job again, without the nodes of the first list.

    Returns whether it will; None without an answer. facts: of slurm_job(). used: nodes of the job;
    those that are not left out any more may be used again.
    """
    job = slurm_id()
    code, text = run("scontrol", "requeue", job)  # it kills the job: all must be on disk by now
    if code == 0:
        exclude(job, facts, left_out, used)
        return True
    log(f"Slurm does not requeue job {job}: {text.strip() or 'no answer'}")
    return False if REFUSED.search(text) else None


def exclude(job, facts, left_out, used):
    """Set the nodes that Slurm excludes from this job, which is being requeued."""
    earlier = expand(facts.get("ExcNodeList", "").replace("(null)", ""))
    names = [node for node in earlier if node not in used] + left_out
    if set(names) == set(earlier):
        return
    command = ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(names)}"]
    for _ in range(5):  # until Slurm has processed the requeue
        code, _ = run(*command)
        if code == 0:
            return
        time.sleep(0.5)
    remedy = f"scancel {job}; submit the same command again, with --exclude={','.join(names)}"
    log(f"Slurm does not exclude {', '.join(left_out)}: {remedy}")
