#!/usr/bin/env bash
# Starts a real cluster on this machine: Slurm (slurmctld, munge, a slurmd on each node), an sshd
# on each node, pdsh. A node is a network, host name and mount namespace of its own; all share this
# machine's files. Nothing outside of the namespaces is changed. down.sh stops the cluster.
#
# Usage: tests/cluster/up.sh [nodes] [GPU slots per node]      (2 nodes of 8, as root, on Debian)
#
# Environment:
#   CLUSTER    its directory: pids, logs, keys, configuration    [/tmp/cluster]
#   NAMES      names of the nodes, instead of node01 node02 ...  []
#   CPUS       cores that each node reports; Slurm binds tasks to cores if the machine has that many  [64]
#   PROCTRACK  how Slurm finds a job's processes: linuxproc or cgroup    [linuxproc]
#   SILENCE    seconds without contact after which Slurm marks a node as down  [300]
#   SLURM_ROOT directory made by newer_slurm.sh: runs its Slurm instead of this machine's    []
#
# Examples:
#   tests/cluster/up.sh 2 && tests/cluster/on.sh login sinfo
#   tests/cluster/on.sh login srun --nodes=2 --ntasks-per-node=4 hostname
#   tests/cluster/on.sh login ssh node02 hostname
#   tests/cluster/on.sh login sbatch --gpus-per-node=2 run_distributed.slurm; tail -f logs/slurm-*.out

set -euo pipefail

CLUSTER="${CLUSTER:-/tmp/cluster}"
NAMES="${NAMES:-}"
CPUS="${CPUS:-64}"
PROCTRACK="${PROCTRACK:-linuxproc}"
SILENCE="${SILENCE:-300}"
SLURM_ROOT="${SLURM_ROOT:-}"

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
on="$here/on.sh"
export CLUSTER

# A copy in each script: sourcing a file would take as many lines.
fail() {
  echo "up.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

check() {
  local command missing=()
  ((EUID == 0)) || fail "namespaces need root: run it as root"
  for command in slurmctld slurmd munged sshd pdsh ip nsenter; do
    [[ -x "$(command -v "$command")" ]] || missing+=("$command")
  done
  [[ ${#missing[@]} -eq 0 ]] ||
    fail "no ${missing[*]}: apt-get install slurm-wlm munge openssh-server pdsh iproute2"
  [[ ! -e "$CLUSTER" ]] || fail "$CLUSTER exists: is a cluster running? stop it with down.sh"
}

# make_host NAME ADDRESS: creates the namespaces of a host, which a sleeping process keeps alive.
make_host() {
  setsid unshare --net --uts --mount sleep infinity &>/dev/null &
  echo "$!" >"$CLUSTER/hosts/$1"
  until [[ "$(<"/proc/$!/comm")" == sleep ]]; do # its namespaces are ready then
    sleep 0.05
  done
  "$on" "$1" hostname "$1"
  "$on" "$1" ip link set lo up
  "$on" "$1" mount --bind "$CLUSTER/etc-hosts" /etc/hosts
  "$on" "$1" mount --bind "$CLUSTER/nsswitch.conf" /etc/nsswitch.conf
  "$on" "$1" mount --bind "$CLUSTER/ssh_config" /etc/ssh/ssh_config
  "$on" "$1" mount -t tmpfs -o mode=755 tmpfs /run
  "$on" "$1" mkdir /run/sshd
  [[ -z "$SLURM_ROOT" ]] || # its /usr on top of this machine's
    "$on" "$1" mount -t overlay overlay -o "lowerdir=$SLURM_ROOT/usr:/usr" /usr
  if [[ "$1" == login ]]; then
    "$on" login ip link add eth0 type bridge
  else
    "$on" login ip link add "$1" type veth peer name eth0 netns "$!"
    "$on" login ip link set "$1" master eth0 up
  fi
  "$on" "$1" ip address add "$2/24" dev eth0
  "$on" "$1" ip link set eth0 up
}

# name ADDRESS NAME: adds lines to /etc/hosts, also for the mapped IPv6 address: without, PyTorch warns.
name() {
  printf '%s %s\n' "$1" "$2" "::ffff:$1" "$2" >>"$CLUSTER/etc-hosts"
}

configure_ssh() {
  ssh-keygen -q -t ed25519 -N '' -f "$CLUSTER/user_key"
  ssh-keygen -q -t ed25519 -N '' -f "$CLUSTER/host_key"
  echo "* $(<"$CLUSTER/host_key.pub")" >"$CLUSTER/known_hosts"
  cat >"$CLUSTER/ssh_config" <<END
IdentityFile $CLUSTER/user_key
UserKnownHostsFile $CLUSTER/known_hosts
END
  cat >"$CLUSTER/sshd_config" <<END
HostKey $CLUSTER/host_key
AuthorizedKeysFile $CLUSTER/user_key.pub
PidFile none
PermitRootLogin yes
SetEnv TMPDIR=$CLUSTER/tmp
StrictModes no
UsePAM no
END
}

# configure_slurm SLOTS NODE...
configure_slurm() {
  local slots="$1" names
  shift
  names="$(IFS=, && echo "$*")"
  mkdir "$CLUSTER/state" "$CLUSTER/spool" "$CLUSTER/gpus"
  for ((slot = 0; slot < slots; slot++)); do
    mknod "$CLUSTER/gpus/gpu$slot" c 1 3 # Slurm needs real devices: /dev/null under other names
  done
  echo "Name=gpu File=$CLUSTER/gpus/gpu[0-$((slots - 1))]" >"$CLUSTER/gres.conf"
  cat >"$CLUSTER/slurm.conf" <<END
ClusterName=test
SlurmctldHost=login
SlurmUser=root
AuthInfo=socket=$CLUSTER/munge.socket,cred_expire=10
StateSaveLocation=$CLUSTER/state
SlurmdSpoolDir=$CLUSTER/spool/%n
SlurmctldPidFile=$CLUSTER/slurmctld.pid
SlurmdPidFile=$CLUSTER/slurmd-%n.pid
SlurmctldLogFile=$CLUSTER/slurmctld.log
SlurmdLogFile=$CLUSTER/slurmd-%n.log
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/$( ((CPUS > $(nproc))) && echo none || echo affinity)
SelectType=select/cons_tres
SchedulerParameters=sched_interval=3,bf_interval=3
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdTimeout=$SILENCE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=$names CPUs=$CPUS Gres=gpu:$slots
PartitionName=all Nodes=$names Default=YES State=UP OverSubscribe=YES
PartitionName=low Nodes=$names State=UP PriorityTier=1
PartitionName=high Nodes=$names State=UP PriorityTier=10
END
  [[ -z "$SLURM_ROOT" ]] || # not among the plugins of this machine's Slurm, which it cannot load
    printf 'PluginDir=%s\n' "$SLURM_ROOT"/usr/lib/*/slurm-wlm >>"$CLUSTER/slurm.conf"
  echo CgroupPlugin=cgroup/v1 >"$CLUSTER/cgroup.conf"
  if [[ "$PROCTRACK" == cgroup ]]; then # below a cgroup of this cluster's own: another may have the same NAMES
    mkdir -p "$CLUSTER/cgroup" "/sys/fs/cgroup/freezer/${CLUSTER//\//-}"
    ln -s "/sys/fs/cgroup/freezer/${CLUSTER//\//-}" "$CLUSTER/cgroup/freezer"
    echo CgroupMountpoint="$CLUSTER/cgroup" >>"$CLUSTER/cgroup.conf"
  fi
}

start() {
  local host
  dd if=/dev/urandom of="$CLUSTER/munge.key" bs=1k count=1 status=none
  chmod 400 "$CLUSTER/munge.key"
  "$on" login munged --force --socket "$CLUSTER/munge.socket" --key-file "$CLUSTER/munge.key" \
    --pid-file "$CLUSTER/munged.pid" --log-file "$CLUSTER/munged.log" \
    --seed-file "$CLUSTER/munge.seed" 2>/dev/null
  "$on" login slurmctld
  for host in "$@"; do
    "$on" "$host" slurmd -N "$host"
    "$on" "$host" "$(command -v sshd)" -f "$CLUSTER/sshd_config" -E "$CLUSTER/sshd-$host.log"
  done
}

wait_until_ready() {
  local tries
  for ((tries = 0; tries < 120; tries++)); do
    if [[ "$("$on" login sinfo --noheader --format=%T 2>/dev/null | sort -u)" == idle ]]; then
      return
    fi
    sleep 0.25
  done
  tail -n 5 "$CLUSTER"/*.log >&2
  fail "Slurm is not ready after 30 s: the last lines of its logs are above"
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  local nodes="${1:-2}" slots="${2:-8}" hosts=() number
  check
  mkdir -p "$CLUSTER/hosts" "$CLUSTER/tmp"
  trap '"$here/down.sh"' EXIT # if anything fails
  for ((number = 1; number <= nodes; number++)); do
    hosts+=("$(printf 'node%02d' "$number")")
  done
  [[ -z "$NAMES" ]] || read -r -a hosts <<<"$NAMES"
  sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$CLUSTER/nsswitch.conf" # no name server there
  name 127.0.0.1 localhost
  name 10.77.0.1 login
  for number in "${!hosts[@]}"; do
    name "10.77.0.$((11 + number))" "${hosts[number]}"
  done
  configure_ssh
  configure_slurm "$slots" "${hosts[@]}"
  make_host login 10.77.0.1
  for number in "${!hosts[@]}"; do
    make_host "${hosts[number]}" "10.77.0.$((11 + number))"
  done
  start "${hosts[@]}"
  wait_until_ready
  trap - EXIT
  echo "Up: login, ${hosts[*]}. On a host: $on login sinfo. Down: $here/down.sh"
}

main "$@"
