"""Faults on the real cluster: the doctor reports each one and its place within a minute."""

import json
import os
import re
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from findings import DOCTOR, found

RUN, SRUN = "run_distributed.slurm", "slurm_train_multinode.sh"
CONFIG = "configs/default_config.yaml"


def job(cluster, repo, run, script=SRUN, nodes=2, gpus=2, **env):
    """The doctor as a job: (seconds, exit code, its findings, the whole output)."""
    flags = [f"--nodes={nodes}", f"--gpus-per-node={gpus}", f"--ntasks-per-node={gpus}"]
    flags += ["--cpus-per-task=1", f"--output={run}.out"]
    words = [script, CONFIG, f"--checkpoint-dir={run}", "--json"]
    began = time.monotonic()
    code, text = cluster.sbatch(repo, *flags, *words, TRAIN_SCRIPT="scripts/doctor.py", **env)
    return time.monotonic() - began, code, findings_in(text), text


def findings_in(text: str) -> list[dict]:
    """The findings of one report; [] if there is none, or if two nodes printed at the same time."""
    found = re.search(r"^\[\n.*?^\]", text, re.DOTALL | re.MULTILINE)
    with suppress(ValueError):
        return json.loads(found[0]) if found else []
    return []


def by_hand(cluster, repo, run):
    """One launch per terminal: (exit codes, outputs) of node01 and node02."""
    nodes = []
    for rank, host in enumerate(["node01", "node02"]):
        words = ["scripts/cluster_train.sh", CONFIG, 2, rank, "node01", 29400]
        env = {"TRAIN_SCRIPT": "scripts/doctor.py", "NPROC_PER_NODE": "1"}
        nodes.append(cluster.start(host, *words, f"--checkpoint-dir={run}", cwd=repo, **env))
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    return [node.returncode for node in nodes], outputs


def on(cluster, host, command: str) -> None:
    code, text = cluster.on(host, "bash", "-c", command)
    assert code == 0, text


@pytest.fixture
def inject(cluster):
    """inject(host, command, undo): run the command there; undo it when the test ends."""
    injected = []

    def do(host, command, undo):
        injected.append((host, undo))
        on(cluster, host, command)

    yield do
    for host, undo in reversed(injected):
        on(cluster, host, undo)


def nft(rule: str, hook: str) -> tuple[str, str]:
    chain = f"add chain ip t c {{ type filter hook {hook} priority 0; }}"
    rules = f"add table ip t; {chain}; add rule ip t c {rule}"
    return f"nft {shlex.quote(rules)}", "nft flush ruleset"


def replaced(path, content: str) -> tuple[str, str]:
    """(command, undo) that replaces the content of a file on one host, with a bind mount."""
    copy = shlex.quote(f"/run/{path.name}")
    path = shlex.quote(str(path))
    return f"cat > {copy} <<'END' && mount --bind {copy} {path}\n{content}\nEND", f"umount {path}"


@pytest.mark.parametrize("script", [RUN, pytest.param(SRUN, marks=pytest.mark.long)])
def test_a_healthy_cluster_gets_no_warning(cluster, repo, tmp_path, script):
    seconds, code, findings, text = job(cluster, repo, tmp_path / "run", script)
    assert code == 0 and findings, text
    assert not found(findings, "WARN") and not found(findings, "FAIL"), text
    checks = {finding["check"]: finding for finding in findings}
    assert {"ranks", "clocks", "run directory", "network", "all_reduce"} <= checks.keys()
    measured = checks["all_reduce"]["data"]
    assert (measured["ranks"], measured["local"]) == (4, 2)
    sizes = [f"{name} {size}" for name in ("all", "node") for size in (8 << 10, 4 << 20)]
    assert list(measured["seconds"]) == sizes and min(measured["seconds"].values()) > 0
    print(f"{seconds:.0f} s")


def test_it_also_runs_over_ssh_and_prints_a_table(cluster, repo, tmp_path):
    launcher = ["scripts/ssh/launch_torchrun_auto.sh", CONFIG, "1", "node01", "node02"]
    words = [*launcher, f"--checkpoint-dir={tmp_path}"]
    env = {"TRAIN_SCRIPT": "scripts/doctor.py"}
    code, text = cluster.on("node01", *words, cwd=repo, timeout=60, **env)
    assert code == 0, text
    assert re.search(r"(?m)^OK   ranks +all 2 are here, on node01, node02$", text), text
    assert re.search(r"(?m)^doctor.py: \d+ OK$", text), text


@pytest.mark.long
def test_a_blocked_port(cluster, repo, tmp_path, inject):
    inject("node01", *nft("tcp dport 15000-32767 ip saddr 10.77.0.12 drop", "input"))
    seconds, code, findings, text = job(cluster, repo, tmp_path / "run")
    assert code and seconds < 60
    lines = found(findings, "FAIL")
    assert re.search(r"rank 2 on node02 was last seen .*node01:\d+", lines[0]), text


@pytest.mark.long
def test_a_blocked_port_under_torchrun_s_launcher(cluster, repo, tmp_path, inject):
    inject("node01", *nft("tcp dport 15000-32767 ip saddr 10.77.0.12 drop", "input"))
    seconds, code, _, text = job(cluster, repo, tmp_path / "run", RUN)
    assert code and seconds < 60
    expected = r"error: node02: cannot connect to master node at 10.77.0.11:\d+: timed out"
    assert re.search(expected, text), text


@pytest.mark.long  # the master's port alone is blocked above
def test_free_ports_between_nodes_are_blocked(cluster, repo, tmp_path, inject):
    """As on clusters that open only a few: the ranks connect, but gloo or NCCL then hangs."""
    inject(
        "node01",
        *nft(
            "tcp dport 32768-65535 tcp flags & (syn|ack) == syn ip saddr 10.77.0.12 drop", "input"
        ),
    )
    codes, (text, _) = by_hand(cluster, repo, tmp_path)  # Slurm needs these ports, too
    assert codes[0] == 2, text
    assert re.search(r"(?m)^FAIL network +node02 cannot send to node01: timed out", text), text


@pytest.mark.long
def test_a_wrong_master_address(cluster, repo, tmp_path):
    seconds, code, findings, text = job(cluster, repo, tmp_path / "run", MASTER_ADDR="10.77.0.99")
    assert code and seconds < 60
    assert "cannot open the store at 10.77.0.99:" in text and "MASTER_ADDR" in text, text


@pytest.mark.long
def test_a_rank_that_never_starts_is_named(cluster, repo, tmp_path):
    script = tmp_path / "one_missing.sh"
    script.write_text('[[ "$SLURM_PROCID" == 3 ]] && exec sleep 50; exec "$@"\n')
    command = [sys.executable, DOCTOR, "--json", f"--checkpoint-dir={tmp_path}"]
    flags = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gpus-per-node=2"]
    words = ["bash", script, *command]
    began = time.monotonic()
    code, text = cluster.on("login", "srun", *flags, "--kill-on-bad-exit=1", *words, cwd=repo)
    assert code and time.monotonic() - began < 60
    assert "rank 3 on node02 did not start within 20 s" in text, text


@pytest.mark.long
def test_many_faults_are_reported_together(cluster, repo, tmp_path, inject):
    """On node02: another PyTorch, another trainer, its own run directory, a loopback host name. On
    all nodes: a harmful variable, and a launch script with two mistakes."""
    import torch.version

    run = tmp_path / "run"
    run.mkdir()
    version = Path(torch.version.__file__)
    inject("node02", *replaced(version, version.read_text().replace(torch.__version__, "2.14.1")))
    inject("node02", *replaced(repo / "train_distributed.py", "print('another trainer')"))
    inject("node02", f"mount -t tmpfs tmpfs {run}", f"umount {run}")
    hosts = (cluster.directory / "etc-hosts").read_text()
    hosts = re.sub(r"(?m)^\S*10\.77\.0\.12 .*\n", "", hosts) + "127.0.1.1 node02"
    inject("node02", *replaced(Path("/etc/hosts"), hosts))
    script = "#!/bin/bash\n# SBATCH --nodes=2\n#SBATCH --output=logs/none/%j.out\nsrun hi\n"
    (repo / "mine.slurm").write_text(script)
    try:
        _, code, findings, text = job(cluster, repo, run, NCCL_P2P_DISABLE="1")
    finally:
        (repo / "mine.slurm").unlink()
    assert code
    off = "NCCL_P2P_DISABLE=1 disables direct transfers between GPUs"
    comment = "`# SBATCH --nodes=2` is a comment, which the scheduler ignores"
    name = "node02 is 127.0.1.1: gloo listens there, where no other node can connect"
    assert sorted(found(findings, "WARN")) == [
        "mine.slurm:2: launch scripts: " + comment,
        "node01, node02: environment: " + off,
        "node02: host name: " + name,
    ], text
    lines = sorted(found(findings, "FAIL"))
    ranks = "differs: {} for ranks 2-3 on node02, {} for rank 0".format
    version = ranks("2.14.1", re.escape(torch.__version__))
    assert re.fullmatch(f": same everywhere: PyTorch {version}", lines[0]), text
    code = ranks(*["[0-9a-f]{8}"] * 2)
    assert re.fullmatch(f": same everywhere: file train_distributed.py {code}", lines[1]), text
    assert lines[2].startswith("mine.slurm:3: launch scripts: --output in logs/none/, which does")
    assert lines[3] == f"node02: run directory: {run} is not the directory that rank 0 has"
    assert len(lines) == 4, text


@pytest.mark.long
def test_a_full_disk_and_a_tiny_dev_shm(cluster, repo, tmp_path, inject):
    run = tmp_path / "run"
    run.mkdir()
    inject("node01", f"mount -t tmpfs -o size=9m tmpfs {run}", f"umount {run}")
    inject("node02", "mount -t tmpfs -o size=64m tmpfs /dev/shm", "umount /dev/shm")
    _, code, findings, text = job(cluster, repo, run)
    assert code
    (line,) = [line for line in found(findings, "FAIL") if "is full" in line]
    assert line.startswith(f"node01: disk: run directory {run}: 0.0 GiB free: it is full"), text
    (line,) = found(findings, "WARN")
    assert line == "node02: /dev/shm: 0.1 GiB of 0.1 GiB of /dev/shm are free", text


def test_a_clock_that_is_off(cluster, repo, tmp_path):
    wrapper = tmp_path / "python.sh"
    wrapper.write_text(
        f'#!/bin/bash\ncommand=({sys.executable} "$@")\n'
        '[[ "$(hostname)" != node02 ]] || command=(faketime -f +5m "${command[@]}")\n'
        'exec "${command[@]}"\n'
    )
    wrapper.chmod(0o755)
    _, _, findings, text = job(cluster, repo, tmp_path / "run", PYTHON=str(wrapper))
    (line,) = found(findings, "WARN")
    clock = r"node02: clocks: its clock is \+(299|300|301) s from that of rank 0"
    assert re.fullmatch(clock, line), text


def test_a_node_that_loses_packets(cluster, repo, tmp_path, inject):
    rule = "ip saddr 10.77.0.12 tcp sport 1-65535 numgen random mod 100 < 5 drop"
    inject("node01", *nft(rule, "input"))
    seconds, _, findings, text = job(cluster, repo, tmp_path / "run")
    assert seconds < 60
    (line,) = [line for line in found(findings, "WARN") if "network" in line]
    text = r"node02: network: ([\d.]+)% of the packets that it sends to node01 are lost"
    match = re.fullmatch(text, line)
    assert match and 1 < float(match[1]) < 12, line


DELAY = """
import fcntl, heapq, os, select, socket, struct, subprocess, sys, time
# Packets to the other nodes leave through a tunnel that we read; we forward them 0.3 s later.
tun = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH", b"late", 0x1001))  # IFF_TUN | IFF_NO_PI
for command in (
    "ip link set late mtu 1500 up", "ip rule add fwmark 7 table main priority 10",
    "ip rule add to 10.77.0.0/24 table 77 priority 20",
    "ip rule add to {me} table local priority 5",
    "ip route add 10.77.0.0/24 dev late table 77 src {me}",
):
    subprocess.run(command.format(me=sys.argv[1]).split(), check=True)
out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
out.setsockopt(socket.SOL_SOCKET, 36, 7)  # SO_MARK
print("ready", flush=True)
queue = []
while True:
    wait = max(0, queue[0][0] - time.monotonic()) if queue else None
    if select.select([tun], [], [], wait)[0]:
        heapq.heappush(queue, (time.monotonic() + 0.3, len(queue), os.read(tun, 65536)))
    while queue and queue[0][0] <= time.monotonic():
        packet = heapq.heappop(queue)[2]
        try:
            out.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))
        except OSError:
            pass
"""


@pytest.mark.long
def test_a_node_with_a_long_round_trip(racks, repo, tmp_path):
    """300 ms, by a relay of packets (this kernel's tc has no netem)."""
    address = "10.77.0.13"  # of the third
    relay = racks.start("rack02-n1", sys.executable, "-u", "-c", DELAY, address)
    try:
        assert relay.stdout.readline() == "ready\n"
        seconds, _, findings, text = job(racks, repo, tmp_path / "run", nodes=4, gpus=1)
    finally:
        os.killpg(relay.pid, 9)
        relay.communicate()
        undo = "ip rule del priority 5; ip rule del priority 10; ip rule del priority 20"
        on(racks, "rack02-n1", undo)
    print(f"{seconds:.0f} s", text)
    (line,) = [line for line in found(findings, "WARN") if "ms round trip" in line]
    assert re.match(r"rack02-n1: network: 3\d\d ms round trip to each of the others", line), text


def test_one_core_for_each_rank_where_there_are_more(racks, repo, tmp_path):
    flags = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=1"]
    command = [sys.executable, DOCTOR, "--json", f"--checkpoint-dir={tmp_path}"]
    words = ["--hint=nomultithread", *command]
    code, text = racks.on("login", "srun", *flags, *words, cwd=repo)
    lines = found(findings_in(text), "WARN")
    assert [line for line in lines if "cores: this process may use 1 of " in line], text
