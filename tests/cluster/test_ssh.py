"""The ssh launchers with real sshds: quoting, signals, failures. Normal runs: test_guide.py."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from harness import (
    OLD_PYTHONS,
    SLOW_TO_SAVE,
    assert_same_state,
    torch,
    train,
    write_program,
)
from machines import Cluster, probed, wait_for_output, wait_until

CONFIG = "configs/default_config.yaml"
AUTO = "scripts/ssh/launch_torchrun_auto.sh"
PDSH = "scripts/ssh/launch_pdsh_multinode.sh"
TWO_NODES = {"node01": "0-1", "node02": "2-3"}
GRACE = 30  # seconds for a last save after the launcher was killed; in other cases it is 5


def words_of(launcher: str, ranks: int = 2) -> list[str]:
    """Start it on two nodes with so many processes each."""
    hosts = ["node01", "node02"] if launcher == AUTO else ["node[01-02]"]
    return [launcher, CONFIG, str(ranks), *hosts]


@pytest.mark.parametrize("launcher", [AUTO, PDSH])
def test_names_and_values_arrive_unchanged_and_show_on_no_command_line(
    cluster, repo, probe, launcher
):
    config = repo / "configs" / 'it\'s "mine" $HOME 100%.yaml'
    shutil.copy(repo / CONFIG, config)
    words = words_of(launcher)
    words[1] = config.relative_to(repo)
    more = ["--mine", "a b", 'it\'s 5%h "$HOME"', "", "%n", "--"]
    env = {"QUOTED": 's3cr3t it\'s\n"$HOME" `id` \udcff', **probe}
    env |= {f"LARGE{number}": "x" * 100_000 for number in range(5)}  # more than a socket takes
    launch = cluster.start("login", *words, *more, cwd=repo, **env)
    lines = set()

    def has_ended():
        lines.update(process.line for process in cluster.processes())
        return launch.poll() is not None

    wait_until(has_ended)
    text = end_of(launch)
    assert launch.returncode == 0, text
    assert any("ssh" in line and "node02" in line for line in lines)
    assert "s3cr3t" not in "".join(lines)
    logs = [(repo / f"logs/node_{host}.log").read_text() for host in TWO_NODES]
    assert (probed(text) == probed(logs[0])) == (launcher == AUTO)  # ssh prints node rank 0 only
    latest = repo / "logs/distributed_training/latest_node1.log"
    assert latest.is_symlink() and probed(latest.read_text()) == probed(logs[1])
    records = probed("".join(logs))
    hosts = ["node01"] * 2 + ["node02"] * 2
    assert [(r["rank"], r["host"]) for r in records] == list(enumerate(hosts))
    for record in records:
        assert record["argv"] == more
        assert record["quoted"] == env["QUOTED"]


@pytest.mark.long
def test_modules_load_over_ssh(cluster, repo, tmp_path, probe):
    """With Debian's package environment-modules: ssh passes no shell functions on."""
    copy = shutil.copytree(repo, tmp_path / "copy")
    site = copy / "scripts/site.sh"
    site.write_text(site.read_text().replace("# module purge", "module load mine"))
    (modules := tmp_path / "modules").mkdir()
    (modules / "mine").write_text("#%Module\nsetenv QUOTED {of the module}\n")
    env = {"MODULEPATH": str(modules), **probe}
    code, text = cluster.on("login", *words_of(AUTO), cwd=copy, **env)
    assert code == 0, text
    assert [record["quoted"] for record in probed(text)] == ["of the module"] * 2


@pytest.mark.parametrize("python", ["", pytest.param(sys.executable, marks=pytest.mark.long)])
def test_a_host_with_an_old_python_is_named_unless_python_is_set(
    cluster, repo, tmp_path, probe, python
):
    """A real Python 3.6 or 3.7 if this machine has one; else a stand-in that always fails."""
    places = ["/usr/local/bin", *filter(os.path.exists, [Path.home() / ".bashrc"])]  # may set PATH
    (empty := tmp_path / "empty").touch()
    program = OLD_PYTHONS[0] if OLD_PYTHONS else "false"
    old = write_program(tmp_path / "bin/python3", f'exec {program} "$@"')
    for source, place in zip([old.parent, empty], places):
        assert cluster.on("node01", "mount", "--bind", source, place) == (0, "")
    try:
        code, text = cluster.on("login", *words_of(AUTO), cwd=repo, PYTHON=python, **probe)
    finally:
        assert cluster.on("node01", "umount", *places)[0] == 0
    if python:
        assert code == 0 and len(probed(text)) == 2, text
    else:
        error = "launch.py: error: node01: python3 is not Python 3.8 or newer: set PYTHON\n"
        assert code == 2 and text.endswith(error) and "Traceback" not in text


# --------------------------------------------------------------------------- signals and failures


def end_of(launch) -> str:
    text, _ = launch.communicate(timeout=300)
    return text


def press_ctrl_c(launch) -> None:
    os.killpg(launch.pid, signal.SIGINT)  # as a terminal does, to the process group


def one_process(cluster, host: str, pattern: str) -> int:
    """The pid of the one process on that host whose command line matches."""
    (pid,) = (p.pid for p in cluster.processes() if p.host == host and re.search(pattern, p.line))
    return pid


@pytest.mark.parametrize("launcher", [AUTO, pytest.param(PDSH, marks=pytest.mark.long)])
def test_ctrl_c_saves_and_stops_all_nodes_and_the_same_command_resumes(
    cluster, repo, tmp_path, tiny, launcher
):
    options = [*tiny, "--epochs=2000", "--global-batch-size=32"]
    words = [*words_of(launcher, 1), *options, f"--checkpoint-dir={tmp_path / 'run'}"]
    threads = {"OMP_NUM_THREADS": "1"}  # as in train(); with two, sums are rounded otherwise
    launch = cluster.start("login", *words, cwd=repo, **threads)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, launch)
    press_ctrl_c(launch)
    text = end_of(launch)
    assert launch.returncode == 0, text
    cluster.assert_nothing_left()
    step = int(re.search(r"Stopped at step (\d+) of ", text)[1])
    assert "Traceback" not in text
    goal = step + 5
    while goal * 32 % 203 < 32:  # the last of the 203 samples is used in this step
        goal += 1
    code, text = cluster.on("login", *words, f"--stop-at-step={goal}", cwd=repo, **threads)
    assert code == 0 and f".pt at step {step}, to step {goal} of " in text, text
    saved = torch.load(tmp_path / f"run/checkpoint_step_{goal}.pt", weights_only=True)
    straight = train(tmp_path / "straight", 2, *options, f"--stop-at-step={goal}")
    assert_same_state(saved, straight.checkpoint(goal))


@pytest.fixture
def stubborn(cluster, repo, tmp_path):
    """Starts a script that ignores SIGTERM and leaves a process in a session of its own."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "time.sleep(1000)\n"
    )

    def start(launcher, *before):
        words, env = [*before, *words_of(launcher)], {"TRAIN_SCRIPT": str(script), "GUARD": "0"}
        launch = cluster.start("login", *words, cwd=repo, **env)
        sleeping = re.compile("^sleep 1000")
        wait_until(
            lambda: sum(bool(sleeping.match(p.line)) for p in cluster.processes()) == 4, launch
        )
        return launch

    return start


@pytest.mark.long
def test_a_terminal_that_closes_stops_and_saves_but_not_under_nohup(cluster, repo, tmp_path, tiny):
    command = [*words_of(AUTO), *tiny, f"--checkpoint-dir={tmp_path / 'run'}", "--epochs=2000"]
    launch = cluster.start("login", "nohup", *command, cwd=repo)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(metrics.exists, launch)
    os.killpg(launch.pid, signal.SIGHUP)
    size = metrics.stat().st_size
    wait_until(lambda: metrics.stat().st_size > size + 3000, launch)
    os.killpg(launch.pid, signal.SIGTERM)
    assert "Stopped at step " in end_of(launch) and launch.returncode == 0


@pytest.mark.parametrize("launcher", [AUTO, pytest.param(PDSH, marks=pytest.mark.long)])
def test_a_second_ctrl_c_kills_all_that_the_launcher_has_started_and_nothing_else(
    cluster, stubborn, launcher
):
    other = cluster.start("node02", "sleep", "1001")  # as of another training
    launch = stubborn(launcher)
    press_ctrl_c(launch)
    wait_for_output(launch, "press Ctrl-C again")
    assert {process.host for process in cluster.processes()} == {*cluster.hosts}
    press_ctrl_c(launch)
    end_of(launch)
    assert launch.returncode == 130
    assert [process.pid for process in cluster.processes()] == [other.pid]
    other.kill()
    other.communicate()


@pytest.fixture
def slow_to_save(cluster, repo, tmp_path):
    """Starts a script that is slow to save, on two nodes, and waits until all ranks are ready."""
    script = tmp_path / "slow_to_save.py"
    script.write_text(SLOW_TO_SAVE)
    logs = [repo / f"logs/node_{host}.log" for host in TWO_NODES]
    for log in logs:
        log.unlink(missing_ok=True)

    def are_ready():
        return sum(log.read_text().count("ready\n") for log in logs if log.exists()) == 4

    def start(**env):
        words, env = [*words_of(AUTO), f"--to={tmp_path}"], {"GUARD": "0", **env}
        launch = cluster.start("login", *words, cwd=repo, TRAIN_SCRIPT=str(script), **env)
        wait_until(are_ready, launch)
        return launch

    return start


@pytest.mark.parametrize(
    "way", ["SIGKILL", *(pytest.param(n, marks=pytest.mark.long) for n in ("SIGINT", "SIGHUP"))]
)
def test_ranks_save_and_nothing_is_left_when_the_launcher_ends(
    cluster, slow_to_save, tmp_path, way
):
    launch = slow_to_save()
    launch.stdout.close()  # as a `tee` that Ctrl-C ends
    if way == "SIGKILL":
        launch.kill()
    else:
        os.killpg(launch.pid, getattr(signal, way))
    code = launch.wait(timeout=300)
    cluster.assert_nothing_left(2 * GRACE)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == [f"saved{r}" for r in range(4)]
    assert code == (-signal.SIGKILL if way == "SIGKILL" else 0)


@pytest.mark.long
def test_a_node_that_fails_while_others_save_does_not_stop_them(cluster, slow_to_save, tmp_path):
    launch = slow_to_save(FAILING="2 3", SAVE_SECONDS="2")
    press_ctrl_c(launch)
    assert "error: node02 failed (exit code 1)" in end_of(launch)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_the_last_lines_are_not_lost_if_they_are_read_late(cluster, repo, tmp_path):
    script, done = tmp_path / "much.py", tmp_path / "done"
    much = "for line in range(20_000): print(f'line {line} {80 * \"-\"}')"
    script.write_text(f"import sys\n{much}\nsys.stdout.flush()\nopen({str(done)!r}, 'w').close()\n")
    words = [AUTO, CONFIG, "1", "node01"]
    env = {"TRAIN_SCRIPT": str(script), "GUARD": "0"}
    launch = cluster.start("login", *words, cwd=repo, **env)
    text = ""

    def is_done():  # until then it fills every pipe
        nonlocal text
        text += launch.stdout.read(16384)
        return done.exists()

    wait_until(is_done, launch)
    text += launch.communicate()[0]
    assert launch.returncode == 0
    log = repo / "logs/distributed_training/latest_node0.log"
    assert all("line 19999 " in read for read in (text, log.read_text()))


@pytest.fixture
def broken(cluster, repo, tmp_path_factory):
    """Breaks something on node02 only, for as long as the test runs."""
    mounts = []

    def mount(*words):
        assert cluster.on("node02", "mount", *words) == (0, "")
        mounts.append(words[-1])

    def python_missing():
        python = write_program(repo.parent / "bin/python", f'exec {sys.executable} "$@"')
        mount("-t", "tmpfs", "tmpfs", python.parent)
        return {"env": {"PYTHON": str(python)}}

    def repository_missing():
        mount("-t", "tmpfs", "tmpfs", repo.parent)
        return {}

    def wrong_key():
        other = tmp_path_factory.mktemp("key") / "other.pub"
        other.write_text((cluster.directory / "host_key.pub").read_text())
        mount("--bind", other, cluster.directory / "user_key.pub")
        return {}

    def unreachable():
        return {"hosts": ["node01", "10.77.0.99"]}

    yield locals()
    for path in mounts:
        assert cluster.on("node02", "umount", path)[0] == 0
    shutil.rmtree(repo.parent / "bin", ignore_errors=True)


@pytest.mark.parametrize("launcher", [AUTO, pytest.param(PDSH, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("python_missing", 2, "node02: .*/bin/python cannot be executed here: set PYTHON"),
        ("unreachable", 255, "connect to host 10.77.0.99 port 22: No route to host"),
        pytest.param(
            "repository_missing",
            2,
            "node02: there is no /.* here: set REPO_ROOT",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "wrong_key", 255, r"node02: Permission denied \(publickey", marks=pytest.mark.long
        ),
    ],
)
def test_a_fault_on_one_node_is_reported_and_stops_all_nodes(
    cluster, repo, tmp_path, options, broken, launcher, what, code, message
):
    broken = {"hosts": ["node01", "node02"], "env": {}} | broken[what]()
    hosts = broken["hosts"] if launcher == AUTO else [",".join(broken["hosts"])]
    words = [launcher, CONFIG, "2", *hosts, *options, f"--checkpoint-dir={tmp_path / 'run'}"]
    failure = tmp_path / "failure.json"  # for supervise.py
    env = {**broken["env"], "FAILURE_FILE": str(failure), "STOP_FILE": "/nowhere/stop"}
    exit_code, text = cluster.on("login", *words, cwd=repo, **env)
    assert exit_code == code, text
    facts = json.loads(failure.read_text())
    cause = "configuration" if code == 2 else "node lost"
    assert (facts["cause"], facts["host"]) == (cause, broken["hosts"][1])
    (own,) = tmp_path.glob("failure.json.*")  # no other host is at fault
    assert own.name == f"failure.json.{broken['hosts'][1]}"
    cluster.assert_nothing_left()
    end = text.partition(f"launch.py: error: {broken['hosts'][1]} failed (exit code {code})")[2]
    assert re.search(message, end), text
    assert "Traceback" not in text


@pytest.mark.parametrize("launcher", [AUTO, pytest.param(PDSH, marks=pytest.mark.long)])
def test_a_spare_takes_the_place_of_a_host_that_cannot_be_reached(
    cluster, repo, tmp_path, options, launcher
):
    lost, run = "10.77.0.99", tmp_path / "run"
    hosts = [lost, "node01", "node02"]
    words = [launcher, CONFIG, "1", *(hosts if launcher == AUTO else [",".join(hosts)])]
    words = [sys.executable, "scripts/supervise.py", *words, *options]
    words += ["--stop-at-step=1", f"--checkpoint-dir={run}"]
    code, text = cluster.on("login", *words, cwd=repo, NNODES="2")
    assert code == 0 and "Stopped at step 1 of " in text, text
    assert f"supervise.py: node lost: {lost}: " in text and f"without {lost}" in text, text
    last = (run / "attempts.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["hosts"] == ["node01", "node02"]
    ranks = re.findall(r"(?m)^(?:\S+: )?guard.py: ranks? (\d) on (\S+)$", text)
    assert sorted(ranks) == [("0", "node01"), ("1", "node02")], text


@pytest.mark.parametrize("launcher", [AUTO, "run_distributed.slurm"])
def test_a_host_whose_torchrun_never_comes_is_named_and_blamed(
    cluster, repo, tmp_path, options, launcher
):
    """As if its file system did not answer."""
    (hangs := tmp_path / "hangs.py").write_text("import time\ntime.sleep(300)\n")
    words = [*options, f"--checkpoint-dir={tmp_path / 'run'}"]
    env = {"RANK_TIMEOUT": "15", "MAX_RESTARTS": "0", "LOG_DIR": str(tmp_path)}
    assert cluster.on("node02", "mount", "--bind", hangs, repo / "scripts/run_torchrun.py")[0] == 0
    try:
        if launcher == AUTO:
            words = ["scripts/supervise.py", *words_of(AUTO), *words]
            code, text = cluster.on("login", *words, cwd=repo, **env)
        else:
            words = ["--nodes=2", "--gpus-per-node=2", launcher, CONFIG, *words]
            code, text = cluster.sbatch(repo, *words, **env)
    finally:
        assert cluster.on("node02", "umount", repo / "scripts/run_torchrun.py")[0] == 0
    assert code == 1 and "node02 did not start within 15 s (RANK_TIMEOUT)" in text, text
    (log,) = tmp_path.rglob("attempts.jsonl")
    record = json.loads(log.read_text())
    assert record["cause"] == "node lost" and record["reports"][0]["hosts"] == ["node02"]
    cluster.assert_nothing_left()


# ------------------------------------------------------------------ node.py, as launchers use it


def node_py(cluster, repo, requests: str, **env):
    """node.py on node01, with the output of that bash script as its input."""
    code = "import sys; sys.path[0] = 'scripts/ssh'; import node; print(node.request(sys.argv[1:]))"
    request = f'request() {{ python3 -c "{code}" "$@"; }}'
    script = f"{request}; exec python3 scripts/ssh/node.py < <({requests})"
    return cluster.start("node01", "bash", "-c", script, cwd=repo, **env)


@pytest.mark.parametrize("requests", ["true", "printf '{}'", "request sleep 60"])
def test_a_node_that_starts_after_its_launcher_has_exited_exits_at_once(cluster, repo, requests):
    node = node_py(cluster, repo, requests)
    assert node.communicate(timeout=GRACE) == ("", None)
    assert node.returncode == 128 + signal.SIGTERM
    cluster.assert_nothing_left()


@pytest.mark.parametrize(
    ("ending", "env"), [("echo end; sleep 60", {}), ("true", {"STOP_FILE": "/nowhere/stop"})]
)
def test_processes_that_a_command_leaves_behind_are_killed_soon(
    cluster, repo, tmp_path, ending, env
):
    """After `end`; under supervise.py, which restarts, also when the launcher has exited."""
    script, go_on = tmp_path / "leave.sh", tmp_path / "go on"
    script.write_text(
        "trap '' TERM\n"
        "setsid sleep 1000 &\n"
        'env -i "$(command -v sleep)" 1000 &\n'  # in the process group of the command
        "wait\n"
    )
    wait = f"until [[ -e {str(go_on)!r} ]]; do sleep 0.1; done"
    node = node_py(cluster, repo, f"request bash {script}; {wait}; {ending}", **env)
    wait_until(lambda: sum("sleep 1000" in p.line for p in cluster.processes()) == 2, node)
    go_on.touch()
    assert node.wait(timeout=GRACE - 5) == 137
    assert not [p for p in cluster.processes() if "sleep 1000" in p.line]
    for process in cluster.processes():
        os.kill(process.pid, signal.SIGKILL)  # the `sleep 60` of ending
    node.communicate()


def test_a_busy_port_or_a_master_that_is_elsewhere_is_an_error(cluster, repo):
    listen = "import socket, time; s = socket.create_server(('', 29400)); print(1); time.sleep(60)"
    listener = cluster.start("node01", sys.executable, "-uc", listen)
    try:
        wait_for_output(listener, "1\n")
        words = ["scripts/ssh/launch_torchrun_multinode.sh", CONFIG, "2", "2", "0", "node01"]
        code, text = cluster.on("node01", *words, cwd=repo)
        assert code == 2
        assert "error: node01: port 29400 is in use here, on the master: set another" in text
    finally:
        listener.kill()
        listener.communicate()
    words = ["scripts/cluster_train.sh", CONFIG, "2", "0", "node02", "29400"]
    code, text = cluster.on("login", *words, cwd=repo)
    assert code == 2 and "but master node02" in text and text.count("\n") == 1, text


@pytest.fixture
def ipv6():
    """Two nodes with IPv6 addresses only, fd00:77::11 and ...::12, for one test."""
    cluster = Cluster(Path(f"/tmp/ipv6-{os.getpid()}"), 2, 8)
    addresses = {"login": "fd00:77::1", "node01": "fd00:77::11", "node02": "fd00:77::12"}
    for host, address in addresses.items():
        for change in (["flush", "dev", "eth0"], ["add", f"{address}/64", "dev", "eth0", "nodad"]):
            assert cluster.on(host, "ip", "address", *change) == (0, "")
    names = [f"{address} {host}\n" for host, address in addresses.items()]
    names = "".join(["127.0.0.1 localhost\n::1 localhost\n", *names])
    for host in addresses:
        (own := cluster.directory / f"names-{host}").write_text(names)
        assert cluster.on(host, "mount", "--bind", own, "/etc/hosts") == (0, "")
    yield cluster
    cluster.down()


@pytest.mark.long
def test_hosts_with_ipv6_addresses_only(ipv6, repo, tmp_path, options, check):
    run = tmp_path / "run"
    words = [AUTO, CONFIG, "2", "fd00:77::11", "fd00:77::12", *options, f"--checkpoint-dir={run}"]
    code, text = ipv6.on("login", *words, cwd=repo)
    assert code == 0, text
    check(text, run, TWO_NODES)
    env = {"TRAIN_SCRIPT": "scripts/doctor.py"}
    code, text = ipv6.on("login", *words_of(AUTO), cwd=repo, **env)
    assert code == 0 and "OK   network" in text and "FAIL" not in text, text
    ipv6.assert_nothing_left()


@pytest.mark.long
def test_a_run_directory_that_the_nodes_do_not_share_is_an_error(cluster, repo, tmp_path, tiny):
    run = tmp_path / "run"
    run.mkdir()
    words = [*words_of(AUTO), *tiny, f"--checkpoint-dir={run}", "--epochs=2"]
    assert cluster.on("login", *words, "--stop-at-step=3", cwd=repo)[0] == 0
    assert cluster.on("node02", "mount", "-t", "tmpfs", "tmpfs", run)[0] == 0
    try:
        code, text = cluster.on("login", *words, cwd=repo, MAX_RESTARTS="0")
    finally:
        assert cluster.on("node02", "umount", run)[0] == 0
    assert code == 1
    error = "on node02: FileNotFoundError: [Errno 2] No such file or directory: "
    assert f"{error}'{run}/checkpoint_step_3.pt'" in text
