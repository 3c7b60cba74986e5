"""policy.py: what follows each kind of end. Histories of attempts, without a process or a file."""
# ruff: noqa: E501 - a table

import random
import re

import pytest
from harness import REPO, load

policy = load(REPO / "scripts/policy.py")
END, Attempt, Limits, Report = policy.END, policy.Attempt, policy.Limits, policy.Report


def job(hosts="n1 n2", least=0, **more):
    """least: how many of the hosts must be left; 0: all."""
    hosts = tuple(hosts.split())
    return Limits(hosts, len(hosts) - (least or len(hosts)), **more)


def slurm(hosts="n1 n2", least=0, **more):
    return job(hosts, least, can_requeue=True, **more)


def at(hosts="n1 n2", code=1, *reports, **facts):
    return Attempt(tuple(hosts.split()), code, reports, **facts)


def says(cause, reason="it is", host="n1", about="", rank=0, time=0.0):
    """A report; about: the hosts at fault."""
    return Report(cause, reason, host, tuple(about.split()), rank, time)


def failed(cause, about="", hosts="n1 n2", reason="it is", rank=0, **facts):
    """An attempt with one report: of the host at fault, or of the first."""
    report = says(cause, reason, (about or hosts).split()[0], about, rank)
    return at(hosts, 1, report, **facts)


def lost(about="n2", hosts="n1 n2", **facts):
    return at(hosts, 2, says("node lost", "ranks did not start", about=about), **facts)


def bug(hosts, **facts):
    """Rank 0 fails in the same way on whatever host it runs."""
    first = hosts.split()[0]
    return failed("exception", first, hosts, f"sample 12 on {first}", saved_step=0, **facts)


def stopped(*requests, said="", **facts):
    facts = {"exit_code": 0, "state": "stopped", "stopped_by": said, **facts}
    return at(requests=dict.fromkeys(requests, 1))._replace(**facts)


def every(attempt, *restarts):
    """The same at several starts of the job."""
    return [attempt._replace(restarts=number) for number in restarts]


CRASH = at(saved_step=0)
SAVED = at(saved_step=8, progress="step")
KILLED = at(code=-9)
OOPS = failed("exception", "n2", rank=1)
BAD = failed("configuration", "n2", rank=None, reason="n2: no torch")
HANG = failed("hang", "n2")
USED = failed("exit")
PREEMPTED = stopped("SIGTERM", said="SIGTERM")
TIME_UP = stopped(END, said=END)
DEAD = at(code=-6, defective=("n2",))
SPARE, SPARES = job("n1 n2 n3", 2), slurm("n1 n2 n3 n4", 2)
LOSSES = [lost(), lost(), lost("n3", "n1 n3"), lost("n3", "n1 n3")]
ELSEWHERE = [OOPS, OOPS, failed("exception", "n3", "n1 n3", rank=1)]
LATE = says("exception", "connection closed", "n1", "n1", time=12)
EARLY = says("killed", "killed", "n2", "n2", 1, 10.5)
ALL = "n1 n2 n3 n4"
EACH = [says("exception", "KeyError: 7", host, host, rank) for rank, host in enumerate(ALL.split())]
SITE = [says("configuration", "no such file", host, host, None) for host in ("n1", "n2")]
TWICE = "restart, leave out n2"
FIVE = "4 restart, give up"

# Name, limits, attempts, then what follows each with the hosts that are left out, and a part of the
# last sentence.
# fmt: off
HISTORIES = [
    ("finished", job(), [at(code=0, state="finished")], "finish", "finished"),
    ("no status", job(), [at(code=0)], "finish", "ended"),
    ("finished, though asked", slurm(), [at(code=0, state="finished", requests={"SIGTERM": 1})], "finish", ""),
    # -------------------------------------------------------------- stops
    ("--stop-at-step", slurm(), [stopped()], "stop", "stopped (--stop-at-step)"),
    ("Ctrl-C", slurm(), [stopped("SIGINT")], "stop", "stopped (SIGINT)"),
    ("Ctrl-C, the ranks only", slurm(), [stopped(said="SIGINT")], "stop", "stopped (SIGINT)"),
    ("Ctrl-C, it had to be killed", slurm(), [at(code=-9, requests={"SIGINT": 1})], "stop", "in time; stopped"),
    ("Ctrl-C, a failed save", job(), [failed("disk", requests={"SIGINT": 1})], "stop", "disk: rank 0 on n1: it is; stop"),
    ("SIGTERM and Ctrl-C", slurm(), [stopped("SIGTERM", "SIGINT")], "stop", "stopped (SIGTERM, SIGINT)"),
    ("DEADLINE", slurm(), [stopped("DEADLINE", said="time limit")], "stop", "stopped (DEADLINE)"),
    ("MAX_DURATION", slurm(), [stopped("MAX_DURATION")], "stop", ""),
    ("scancel", slurm(), [at(code=-15, requests={"scancel": 1})], "stop", ""),
    ("STOP in the pause", job(), [CRASH, CRASH._replace(requests={"STOP": 7})], "restart, stop", "killed"),
    ("STOP after 3 starts", slurm(), [*every(TIME_UP, 0, 1), stopped("STOP", END, restarts=2)], "2 requeue, stop", ""),
    ("no Slurm: SIGTERM", job(), [PREEMPTED], "stop", "stopped (SIGTERM)"),
    ("no Slurm: the end of the time", job(), every(TIME_UP, 0, 1, 2), "3 stop", END),
    ("preempted before the first step", slurm(), every(PREEMPTED, *range(9)), "9 requeue", "stopped: SIGTERM. The job"),
    ("the end of the time", slurm(), [TIME_UP], "requeue", ""),
    ("the end of the time, then killed", slurm(), [at(code=-9, requests={END: 1})], "requeue", "in time. The job"),
    ("SIGUSR1 and the end of the time", slurm(), [stopped("SIGUSR1", END)], "requeue", ""),
    ("SIGUSR1, then a crash", slurm(), [OOPS._replace(requests={"SIGUSR1": 1})], "requeue", "exception"),
    ("the same without Slurm", job(), [OOPS._replace(requests={"SIGUSR1": 1})], "stop", "exception"),
    ("preempted, the save failed", slurm(), [at(requests={"preempted": 1})], "requeue", "killed"),
    ("preempted, code of SIGTERM", slurm(), [at(code=-15, requests={"preempted": 1})], "requeue", "stopped"),
    ("NaN, and SIGTERM", slurm(), [failed("NaN", requests={"SIGTERM": 1})], "requeue", "NaN"),
    ("END in the pause", slurm(), [CRASH._replace(requests={END: 1})], "requeue", ""),
    ("during imports", slurm(), [at(code=-15, of_ranks="SIGTERM")], "requeue", "stopped: SIGTERM"),
    ("the ranks only: SIGUSR1", slurm(), [at(code=0, of_ranks="SIGUSR1")], "requeue", "stopped"),
    ("its STOP_FILE names it, too", slurm(), [stopped("SIGTERM", of_ranks="SIGTERM")], "requeue", "stopped: SIGTERM. The"),
    ("other codes after a stop", slurm(), [stopped("SIGUSR1", state="", exit_code=-10)], "requeue", "stopped: SIGUSR1"),
    ("SIGHUP", slurm(), [stopped("SIGHUP", state="", exit_code=-1)], "stop", "stopped (SIGHUP)"),
    ("the ranks stopped, it crashed", slurm(), [stopped(said="SIGTERM", exit_code=1)], "requeue", "stopped: SIGTERM. The"),
    ("the ranks only: SIGINT", slurm(), [at(code=0, of_ranks="SIGINT")], "stop", "stopped"),
    ("srun ends the others", slurm(), [at(code=1, of_ranks="SIGTERM")], "restart", "killed"),
    ("srun ends them, a report", slurm(), [OOPS._replace(exit_code=-15, of_ranks="SIGTERM")], "restart", "exception"),
    ("it ends them each time", slurm(), every(at(code=-15, of_ranks="SIGTERM"), 0, 1, 2), "2 requeue, give up", "no new"),
    ("3 starts without progress", slurm(), every(TIME_UP, 0, 1, 2), "2 requeue, give up", "in 3 starts of this job"),
    ("starts with progress", slurm(), every(TIME_UP._replace(progress="step"), *range(12)), "12 requeue", ""),
    ("10 starts that show nothing", slurm(), every(TIME_UP._replace(progress="time"), *range(10)),
     "9 requeue, give up", "set PROGRESS_FILE"),
    ("a launcher that was killed", job(), [at(code=-9, state="stopped", stopped_by="SIGTERM")] * 5, FIVE, "killed"),
    ("ssh lost its connection", job(), [at(code=255, state="stopped", stopped_by="SIGTERM")], "restart", "node lost"),
    ("and another rank saw STOP_FILE", job(), [at(code=255, state="stopped", stopped_by="STOP file", of_ranks="SIGTERM")], "restart", "node lost"),
    # -------------------------------------------------------------- user errors
    ("a usage error", job(), [at(code=2)], "give up", "configuration: exit code 2"),
    ("cannot be executed", job(), [at(code=126)], "give up", "126"),
    ("no such program", slurm(), [at(code=127)], "give up", "a restart would not help"),
    ("after progress, it is tried", job(), [at(code=127, progress="file")], "restart", ""),
    ("NaN", slurm(), [failed("NaN")], "give up", "error: NaN: rank 0 on n1"),
    ("NaN after new saves", job(), [failed("NaN", progress="step")], "restart", ""),
    ("the first host alone", SPARE, [failed("configuration", "n1")], "give up", ""),
    ("two hosts", SPARE, [at("n1 n2", 2, *SITE)], "give up", "configuration: n1: no such file"),
    ("two of four, not the first", job(ALL, 1), [at(ALL, 2, *[e._replace(cause="configuration", rank=None) for e in EACH[2:]])],
     "give up", "configuration: n3: KeyError: 7"),
    ("another host alone", SPARE, [BAD] * 2, TWICE, "configuration: n2: n2: no torch"),
    ("two hosts in turn", SPARES, [BAD, BAD, failed("configuration", "n3", "n1 n3", "n3: no torch", None)],
     f"{TWICE}, restart", ""),
    # -------------------------------------------------------------- crashes
    ("progress in each of 12", job(), [SAVED] * 12, "12 restart", "Restart 12 in 10 s, from step 8"),
    ("progress of a file", slurm(), [at(progress="file")] * 12, "12 restart", ""),
    ("5 crashes", job(), [CRASH] * 5, FIVE, "5 attempts without progress"),
    ("5 crashes in Slurm", slurm(), [CRASH] * 5, "4 restart, requeue", ""),
    ("15 of them", slurm(), [*every(CRASH, *[0] * 5, *[1] * 5, *[2] * 5)], f"4 restart, requeue, 4 restart, requeue, {FIVE}",
     "in 3 starts"),
    ("pauses", job(), [CRASH] * 4, "4 restart", "Restart 4 in 300 s, from step 0"),
    ("shorter pauses", job(), [CRASH] * 2, "2 restart", "in 30 s"),
    ("pauses after progress", job(), [*[CRASH] * 3, SAVED, CRASH], "5 restart", "in 10 s"),
    ("MAX_RESTARTS=2", slurm(max_restarts=2), [CRASH] * 3, "2 restart, give up", "MAX_RESTARTS=2 is reached"),
    ("MAX_RESTARTS=0, with progress", slurm(max_restarts=0), [SAVED], "give up", "MAX_RESTARTS=0"),
    ("MAX_RESTARTS=0, preempted", slurm(max_restarts=0), [PREEMPTED], "requeue", ""),
    ("ten minutes each time", job(max_restarts=3), [at(progress="time")] * 4, "3 restart, give up", "MAX_RESTARTS=3"),
    ("killed", job(), [KILLED], "restart", "did not stop in time. Restart 1 in 10 s"),
    ("a limit of CPU time", job(), [at(code=-24)], "restart", "CPU time limit exceeded"),
    ("a pipe hides the code", job(), [at(code=0, state="running")], "restart", "status is running"),
    ("it says that it failed", job(), [at(code=0, state="failed")], "restart", "status is failed"),
    ("a lost node's lock", job("n1 n2", 1), [lost("n1"), USED], "2 restart", "Restart 2 in 30 s"),
    ("a lock after a requeue", slurm(), [OOPS, PREEMPTED, *every(USED, 1)], "restart, requeue, restart", "exit"),
    ("a report that cannot be read", SPARE, [failed("killed")] * 3, "3 restart", "killed: rank 0 on n1"),
    # -------------------------------------------------------------- nodes
    ("a crash of a host, twice", SPARE, [OOPS] * 2, TWICE, "exception: rank 1 on n2: it is. Restart 2 in 10 s, without n2"),
    ("no spare", job(), [OOPS] * 3, "3 restart", ""),
    ("no spare in Slurm", slurm(), [OOPS] * 2, "2 restart", ""),
    ("NNODES=1:2", job("n1 n2", 1), [lost()] * 2, TWICE, ""),
    ("a silent host", SPARE, [HANG] * 2, TWICE, "hang"),
    ("a silent host, no spare", job("n1 n2 n3"), [HANG] * 3, "3 restart", ""),
    ("the same in Slurm", slurm(), [HANG] * 2, "restart, requeue n2", ""),
    ("several silent hosts", job(ALL, 1), [failed("hang", "n1 n2", ALL)] * 3, "3 restart", ""),
    ("each rank waits for another", SPARE, [failed("hang", "n1"), HANG], "2 restart", ""),
    ("a host of another attempt", SPARE, [failed("hang", "n9")] * 3, "3 restart", ""),
    ("a lost node", slurm(), [lost()] * 2, "restart, requeue n2", ""),
    ("the only node used", job("n1 n2", 1), [lost("n1", "n1")] * 2, "restart, leave out n1", ""),
    ("a lost node, no Slurm", job(), [lost()] * 2, "2 restart", ""),
    ("two lost nodes in turn", SPARES, LOSSES, "restart, leave out n2, restart n2, leave out n2 n3", ""),
    ("most hosts never came", job(ALL, 2), [lost("n2 n3 n4", ALL)] * 2, "2 restart", ""),
    ("two of four never came", job(ALL, 2), [lost("n3 n4", ALL)] * 2, "restart, leave out n3 n4", ""),
    ("one can be spared", job(ALL, 3), [lost("n3 n4", ALL)] * 2, "restart, leave out n3", ""),
    ("a lost node beats 5 crashes", SPARES, [CRASH] * 3 + [lost()] * 2, "4 restart, leave out n2", "in 10 s"),
    ("after it, they are counted anew", SPARES, [*[lost()] * 2, *[at("n1 n3")] * 4], "restart, leave out n2, 4 restart n2", ""),
    ("no node is at fault", SPARE, [failed("port")] * 3, "3 restart", ""),
    ("the earliest counts", SPARE, [at("n1 n2", 1, LATE, EARLY)] * 2, TWICE, "killed: rank 1 on n2: killed"),
    ("a failed GPU", SPARE, [DEAD], "leave out n2", "killed: by signal 6"),
    ("also with a user error", SPARE, [BAD._replace(exit_code=2, defective=("n2",))], "leave out n2", ""),
    ("its node is elsewhere", slurm(), [DEAD], "requeue n2", "The job is requeued, without n2"),
    ("there is no other", job(), [DEAD], "restart", ""),
    ("preempted, too", slurm(), [DEAD._replace(requests={"SIGTERM": 1})], "requeue n2", ""),
    ("stopped, too", SPARE, [DEAD._replace(requests={"STOP": 1})], "stop n2", ""),
    ("the last node is kept", job("n1 n2 n3", 1), [at(f"n{n}", defective=(f"n{n}",)) for n in (1, 2, 3)],
     "leave out n1, leave out n1 n2, restart n1 n2", ""),
    ("a bug of all ranks", slurm(ALL), [at(ALL, 1, *EACH)] * 3, "3 restart", ""),
    ("one bug: at most one host", SPARES, [bug("n1 n2"), bug("n1 n2"), bug("n2 n3"), *[bug("n1 n2")] * 4],
     "restart, leave out n1, 4 restart, give up", ""),
    ("of names without numbers", slurm("a b c d", 2), [bug("a b"), bug("a b"), bug("b c")], "restart, leave out a, restart", ""),
    ("elsewhere", SPARES, ELSEWHERE, f"{TWICE}, restart", ""),
    ("elsewhere, another rank", SPARES, [OOPS, OOPS, ELSEWHERE[2]._replace(reports=(says("exception", "it is", "n3", "n3", 5),))],
     f"{TWICE}, restart n2", ""),
    ("elsewhere, after progress", SPARES, [OOPS, OOPS, ELSEWHERE[2]._replace(saved_step=90)], f"{TWICE}, restart n2", ""),
    ("elsewhere, another error", SPARES, [OOPS, OOPS, failed("exception", "n3", "n1 n3", "no", 1)], f"{TWICE}, restart n2", ""),
    ("after a stop, no evidence", SPARES, [OOPS._replace(requests={"SIGTERM": 1}), *every(OOPS, 1)], "requeue, restart", ""),
    ("a stop in the pause", SPARES, [OOPS._replace(requests={"SIGTERM": 9}, end=5), *every(OOPS, 1)], "requeue, leave out n2", ""),
    ("a suspect of before", [SPARES] * 2 + [slurm("n1 n5 n6", 2)], [OOPS, OOPS, *every(failed("hang", "n5", "n1 n5"), 1)],
     f"{TWICE}, restart", ""),
]
# fmt: on


def follow(limits, attempts):
    """The decisions. limits: one for all attempts, or a list with one for each."""
    history, decisions = [], []
    for number, attempt in enumerate(attempts):
        own = limits[number] if isinstance(limits, list) else limits
        decisions.append(policy.decide(attempt, history, own))
        history.append(attempt._replace(next=decisions[-1].action))
    return decisions


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history[0])
def test_what_follows(history):
    _, limits, attempts, expected, part = history
    decisions = follow(limits, attempts)
    wanted = []
    for text in expected.split(", "):
        count, action = re.fullmatch(r"(\d*) ?(.*)", text).groups()
        wanted += [action] * int(count or 1)
    assert [" ".join([d.action, *d.suspects]) for d in decisions] == wanted, decisions[-1]
    assert part in decisions[-1].sentence and "None" not in decisions[-1].sentence


BY_YOU = ["SIGINT", "SIGHUP", "STOP", "DEADLINE", "MAX_DURATION", "scancel"]
BY_SLURM = ["SIGTERM", "SIGUSR1", "preempted", END]
CAUSES = "exception, killed, disk, port, NaN, exit, hang, node lost, configuration".split(", ")


def some(rng, names):
    return tuple(rng.sample(names, rng.randint(1, len(names))))


def random_attempt(rng, hosts, restarts, stops, progress):
    reports = []
    cause = rng.choice(CAUSES)
    for host in some(rng, hosts) if rng.random() < 0.7 else ():
        about = some(rng, [*hosts, "n99"]) if cause in ("hang", "node lost") else (host,)
        text = rng.choice(["it is", f"rank 3 on {host}", f"{rng.random()}"])
        rank = rng.choice([None, 0, 1, 5])
        reports.append(Report(cause, text, host, about, rank, rng.random()))
    asked = rng.sample(BY_YOU + BY_SLURM, rng.randint(1, 2)) if rng.random() < stops else ()
    return Attempt(
        hosts=tuple(hosts),
        exit_code=rng.choice([1, 1, 1, 1, 2, 126, 127, 255, -6, -9, -15]),
        reports=tuple(reports),
        defective=some(rng, [*hosts, "n99"]) if rng.random() < 0.1 else (),
        requests={kind: rng.randint(0, 9) for kind in asked},
        of_ranks=rng.choice(["SIGTERM", ""]) if rng.random() < stops else "",
        state=rng.choice(["", "", "running", "failed"]),
        saved_step=rng.choice([None, 0, 7]),
        progress=rng.choice(progress),
        restarts=restarts,
    )


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens(seed):
    """Never more hosts left out than can be spared, a request always obeyed, always an end."""
    rng = random.Random(seed)
    pool = [f"n{number}" for number in range(12)]
    count = rng.randint(1, 5)
    limits = Limits(
        hosts=tuple(pool[:count]),
        spares=rng.randint(0, count - 1),
        max_restarts=rng.choice([0, 3, 10]),
        can_requeue=rng.random() < 0.6,
    )
    stops = rng.choice([0, 0, 0.2])
    progress = rng.choice([[""], ["", "step"], ["step"], ["time"], ["file"]])
    history, suspects, restarts = [], (), 0
    while len(history) < 150:
        hosts = [host for host in limits.hosts if host not in suspects]
        assert len(hosts) >= count - limits.spares
        attempt = random_attempt(rng, hosts, restarts, stops, progress)
        decision = policy.decide(attempt, history, limits)
        action, suspects = decision.action, decision.suspects
        history.append(attempt._replace(next=action))
        used = {host for earlier in history for host in earlier.hosts}
        assert used.issuperset(suspects) and (action == "requeue" or limits.spares >= len(suspects))
        assert not suspects or len(history) > 1 or attempt.defective, "blamed at the first time"
        if set(attempt.requests).intersection(BY_YOU):
            assert action == "stop"
        elif attempt.requests:
            assert action in ("stop", "requeue") or "in a row" in decision.sentence
        elif attempt.progress in ("step", "file") and limits.max_restarts:
            assert action != "give up" and decision.pause <= 10
        if action in ("finish", "stop", "give up"):
            return
        if action == "requeue":
            assert limits.can_requeue
            restarts += 1
            free = [host for host in pool if host not in suspects]
            if len(free) >= count:  # else, the same again
                limits = limits._replace(hosts=tuple(rng.sample(free, count)))
            in_use = [host for host in suspects if host in limits.hosts]
            suspects = in_use[: limits.spares]
    assert stops or not {"", "time"}.issuperset(progress), "it goes on without progress"


def test_the_page_has_the_same_table():
    page = (REPO / "docs/RELIABILITY.md").read_text()
    for name, row in policy.TABLE.items():
        cells = (name, row.evidence, row.first, ", ".join(row.then), row.gives_up)
        assert f"| {' | '.join(cells)} |".replace("|  ", "| ") in page, name
