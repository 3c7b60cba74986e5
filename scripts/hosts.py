#!/usr/bin/env python3
"""Which hosts a job trains on, in which order, and where rank 0 listens: for all launchers.

    python3 scripts/hosts.py --hosts        print the hosts of this job, rank 0's first
    python3 scripts/hosts.py --free-port    print a free port on this host

Environment:
    NNODES          nodes to train on, or MIN:MAX: on MAX, and on fewer, but at least MIN, if some
                    cannot be used. The other nodes of the job are spares            [all]
    HOST_LIST       set by launch.py for the hosts: those that it uses, rank 0's first
    EXCLUDED_NODES  nodes to leave out, such as node07,rack[01-02]-n1                []
What the user must change is raised as a ValueError. Needs only Python 3.8.
"""

import ipaddress
import os
import socket
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path

HOST = socket.gethostname()
FIRST_PORT = 15000
ESTABLISHED = "01"  # a connection, in /proc/net/tcp
EPHEMERAL_PORTS = 32768  # where Linux's range starts, of which any program may get one


def main():
    words = sys.argv[1:]
    try:
        if words == ["--hosts"]:
            print(*hosts_of_job(os.environ))
        elif words == ["--free-port"]:
            print(free_port(port_of_job(os.environ)))
        else:
            print(__doc__.strip())
    except ValueError as error:
        print(f"hosts.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def hosts_of_job(env):
    """The job's hosts, rank 0's first; ["localhost"] without a job."""
    if env.get("HOST_LIST"):
        return env["HOST_LIST"].split()
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return expand(nodes)
    with suppress(OSError, KeyError):
        slots = Path(env["PBS_NODEFILE"]).read_text().split()  # a host once per slot
        return list(dict.fromkeys(slots))
    return ["localhost"]


def expand(names):
    """The hosts in a text such as "n1,rack[01-02]-n[1-4]". Ranges are Slurm's: it expands them."""
    if "[" not in names:
        return names.replace(",", " ").split()
    command = ["scontrol", "show", "hostnames", names]
    try:
        text = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        remedy = f"write each name of {names}"
        raise ValueError(f"`{' '.join(command)}` failed ({error}): {remedy}") from None
    return text.decode().split()


def fewest_and_most(env, count):
    """How many of the `count` hosts of a job may train, of NNODES."""
    text = env.get("NNODES")
    if not text:
        return 1, count
    numbers = text.split(":")
    if len(numbers) <= 2 and all(number.isdigit() for number in numbers):
        fewest, most = int(numbers[0]), int(numbers[-1])
        if 1 <= fewest <= most <= count:
            return fewest, most
    wanted = f"a number from 1 to {count}, the number of hosts, or MIN:MAX of two such numbers"
    raise ValueError(f"NNODES is {text!r}, not {wanted}")


def choose_hosts(given, env):
    """The hosts to train on: the first of those given that are not in EXCLUDED_NODES."""
    excluded = env.get("EXCLUDED_NODES", "")
    left_out = [name_among(given, host) for host in expand(excluded)]
    if None in left_out:  # maybe rightly, in a job that Slurm has started again on other nodes
        print(f"hosts.py: EXCLUDED_NODES={excluded}: not all are hosts here", file=sys.stderr)
    hosts = [host for host in given if host not in left_out]
    fewest, most = fewest_and_most(env, len(given))
    if len(hosts) < fewest:
        rest = f"leaves {len(hosts)} of {len(given)} hosts, and {fewest} are needed (NNODES)"
        raise ValueError(f"EXCLUDED_NODES is {excluded!r}, which {rest}: exclude fewer")
    return hosts[:most]


def name_among(hosts, host):
    """The host's name in the list, also without its domain if only one has that. None: neither."""
    if host in hosts:
        return host
    similar = [name for name in hosts if name.split(".")[0] == host.split(".")[0]]
    return similar[0] if len(similar) == 1 else None


def choose_master(env, hosts):
    """(MASTER_ADDR, MASTER_PORT); the port is free, if the first host is this one."""
    master = env.get("MASTER_ADDR") or hosts[0]
    port = env.get("MASTER_PORT")
    if not port:
        port = port_of_job(env)
        if name_among(hosts, HOST) == master:
            port = free_port(port)
    return master, str(port)


def addresses_of(host):
    """Its IP addresses, as this host knows them."""
    with suppress(OSError, UnicodeError):
        return {info[4][0] for info in socket.getaddrinfo(host, None)}
    return set()


def peers_of(port):
    """The IP addresses of other hosts that are connected with this port of this host."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(file).read_text().splitlines()[1:]:
                local, remote, state = line.split()[1:4]
                address, number = local.split(":")
                peer = remote.split(":")[0]
                if int(number, 16) == port and state == ESTABLISHED and peer != address:
                    found.add(address_from(peer))
    return found


def address_from(text):
    """/proc/net/tcp writes each 4 bytes of an address as a number of this machine."""
    numbers = [int(text[begin : begin + 8], 16) for begin in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(numbers)}I", *numbers))
    return str(getattr(address, "ipv4_mapped", None) or address)


def port_of_job(env):
    """A port that differs between jobs, their steps and their attempts."""
    job = env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or os.urandom(8).hex()
    part = f"{job} {env.get('SLURM_STEP_ID')} {env.get('ATTEMPT_ID')}"
    return FIRST_PORT + zlib.crc32(os.fsencode(part)) % 15000


def free_port(first):
    """The first port from `first` on that is free on this host."""
    for port in range(first, EPHEMERAL_PORTS):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("", port))
                return port
        print(f"hosts.py: port {port} is in use on {HOST}; trying the next", file=sys.stderr)
    raise ValueError(f"no port from {first} on is free on {HOST}: set MASTER_PORT")


if __name__ == "__main__":
    sys.exit(main())
