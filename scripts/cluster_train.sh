#!/usr/bin/env bash
# Starts the workers of this node with torchrun, one per GPU, after checking what would make them
# fail. The launchers call it once on each node; what is left out is read from Slurm or PBS.
#
# Usage: scripts/cluster_train.sh [config] [num_nodes] [node_rank] [master_addr] [master_port] [options]
#        scripts/cluster_train.sh --free-port [first]    a port nobody listens to on this node
#        scripts/cluster_train.sh --environment          this environment, for bash on another node
#
# The options, from the first word with a dash on, go to train_distributed.py. Output goes also to
# logs/distributed_training/cluster_train_TIMESTAMP_nodeRANK.log (link: latest_nodeRANK.log).
#
# Environment (CONDA_ENV, PYTHON and APPTAINER_IMAGE: see scripts/site.sh):
#   NPROC_PER_NODE  workers on this node                          [Slurm's GPUs, visible GPUs, or 1]
#   BACKEND         nccl or gloo                                  [nccl on GPUs, else gloo]
#   LOG_LEVEL       of torchrun; DEBUG also makes NCCL talk       [WARNING]
#   LAUNCHER        torch.distributed.launch for an old PyTorch   [torch.distributed.run]
#   TRAIN_SCRIPT    what to run: yours, if it suits torchrun      [train_distributed.py]
#   MASTER_ADDR     the host of node rank 0                       [Slurm's or PBS's first, or localhost]
#   MASTER_PORT     a free port there                             [made from the job's number]
#   DRY_RUN         1: print the command, run nothing             []
#
# Examples:
#   scripts/cluster_train.sh configs/default_config.yaml
#   scripts/cluster_train.sh configs/default_config.yaml 2 1 node01 29400 --epochs 10

set -euo pipefail

NPROC_PER_NODE="${NPROC_PER_NODE:-}"
BACKEND="${BACKEND:-}"
LOG_LEVEL="${LOG_LEVEL:-WARNING}"
LAUNCHER="${LAUNCHER:-torch.distributed.run}"
TRAIN_SCRIPT="${TRAIN_SCRIPT:-train_distributed.py}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-}"
DRY_RUN="${DRY_RUN:-}"

fail() {
  echo "cluster_train.sh: error: $(hostname): $*" >&2
  record configuration "$*"
  exit 2
}

# record CAUSE REASON: for supervise.py, if nobody was first.
record() {
  local reason="${2//[\\\"[:cntrl:]]/ }"
  [[ -z "${FAILURE_FILE:-}" ]] || (set -C &&
    echo "{\"cause\": \"$1\", \"reason\": \"$reason\", \"host\": \"$(hostname)\"}" >"$FAILURE_FILE") 2>/dev/null || true
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# free_port [FIRST]: the first port from there on that nobody listens to on this node.
free_port() {
  local first="${1:-$(port_of_job)}" port
  for ((port = first; port < 32768; port++)); do
    if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      echo "$port"
      return
    fi
    echo "cluster_train.sh: $(hostname): port $port is busy, taking the next" >&2
  done
  fail "no free port from $first on"
}

# environment: what srun would hand on, as commands: all but what belongs to this host or session.
environment() {
  local name own='^(_|BASH.*|DBUS_.*|DISPLAY|EUID|HOME|HOST|HOSTNAME|LOGNAME|MAIL|OLDPWD|ON_NODE|PPID|PWD|SHELL.*|SHLVL'
  own+='|SLURM.*|SSH_.*|TERM.*|TMPDIR|TMUX.*|UID|USER|XAUTHORITY|XDG_.*)$'
  while read -r name; do
    [[ "$name" =~ $own ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done < <(compgen -e)
}

# port_of_job: one that other jobs do not begin with, below the ephemeral ones (32768 and up).
port_of_job() {
  local job="${SLURM_JOB_ID:-${PBS_JOBID:-0}}"
  echo "$((15000 + (16 * ${job%%[^0-9]*} + ${ATTEMPT:-1} - 1) % 15000))"
}

# hosts_of_job: the nodes, rank 0 first; nothing outside of a job. PBS names a host once per slot.
hosts_of_job() {
  if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then
    scontrol show hostnames "$SLURM_JOB_NODELIST"
  elif [[ -f "${PBS_NODEFILE:-}" ]]; then
    awk '!seen[$0]++' "$PBS_NODEFILE"
  fi
}

# position NAME...: the place of this host among the names, counted from 0.
position() {
  local index=0 name
  for name in "$@"; do
    if [[ "${name%%.*}" == "$(hostname -s)" ]]; then
      echo "$index"
      return
    fi
    index=$((index + 1))
  done
  fail "which of the nodes is it? Not one of: ${*:-none known}. Give node_rank"
}

# train COMMAND...: runs it to its end. A signal that asks to stop goes to its children, the workers, who
# save and end, so that torchrun ends without an error of its own; a second one kills them.
train() {
  local kills status=0 alone=()
  kills="$(oom_kills)"
  # Out of reach of Ctrl-C, and ending with us.
  [[ -z "$(command -v setpriv)" ]] || alone=(setpriv --pdeathsig TERM)
  [[ -z "$(command -v setsid)" ]] || alone=(setsid "${alone[@]}")
  trap 'stop TERM' TERM
  trap 'stop INT' INT
  trap 'stop' USR1 USR2
  "${alone[@]}" "$@" &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    wait "$child" || true # a signal interrupts it
  done 2>/dev/null        # bash would say "Killed"
  wait "$child" || status=$?
  if ((status > 0 && $(oom_kills) > kills)); then
    record "out of memory" "the kernel of $(hostname) killed a process"
  fi
  return "$status"
}

# stop [SIGNAL]: at the start, when there are no workers and nothing to save, torchrun itself.
stop() {
  pkill -TERM -P "$child" || kill -KILL "$child" || true
  # shellcheck disable=SC2064
  [[ -z "${1:-}" ]] || trap 'pkill -KILL -P "$child"; kill -KILL "$child"' "$1"
}

oom_kills() {
  awk '$1 == "oom_kill" { n = $2 } END { print n + 0 }' /proc/vmstat 2>/dev/null || echo 0
}

# look NUM_NODES NODE_RANK MASTER_ADDR MASTER_PORT: the number of visible GPUs; or one sentence, if the
# workers would fail.
look() {
  "${python[@]}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "${python[*]} is not Python 3.11 or newer: see scripts/site.sh"
  "${python[@]}" - "$@" "$NPROC_PER_NODE" "$BACKEND" "$TRAIN_SCRIPT" <<'END' || exit 2
import errno, json, os, socket, sys
from glob import glob
from importlib.util import find_spec

def fail(text, cause="configuration"):
    if "FAILURE_FILE" in os.environ:  # for supervise.py, if nobody was first
        try:
            with open(os.environ["FAILURE_FILE"], "x") as file:
                json.dump({"cause": cause, "reason": text, "host": socket.gethostname()}, file)
        except OSError:
            pass
    sys.exit(f"cluster_train.sh: error: {socket.gethostname()}: {text}")

nodes, rank, master, port, workers, backend, script = sys.argv[1:]
needed = ["torch"] + ["torchvision", "yaml", "tqdm"] * (script == "train_distributed.py")
missing = [name for name in needed if not find_spec(name)]
if missing:
    fail(f"{sys.executable} has no {', '.join(missing)}: pip install -r requirements.txt, or scripts/site.sh")
gpus = 0
if glob("/dev/nvidia[0-9]*") + glob("/dev/kfd") + glob("/dev/dxg"):  # else save the seconds of the import
    import torch

    gpus = torch.cuda.device_count()
workers = int(workers or gpus or 1)
if backend == "nccl" and gpus < workers:
    fail(f"{workers} workers for nccl, but {gpus} visible GPUs")
for gpu in range(min(gpus, workers)):
    free, total = torch.cuda.mem_get_info(gpu)
    if free < 0.8 * total:
        print(f"WARNING: {socket.gethostname()}: GPU {gpu} has only {free >> 30} of "
              f"{total >> 30} GiB free: is another job on it?", file=sys.stderr)
try:
    address = socket.getaddrinfo(master, int(port), type=socket.SOCK_STREAM)[0][4]
except OSError as error:
    fail(f"master {master} is unknown here ({error.strerror}): set MASTER_ADDR to an address of it")
if int(nodes) > 1 and rank == "0":
    with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address[0], int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fail(f"port {port} is busy here, on the master: set another MASTER_PORT on all nodes", "port")
            fail(f"node rank 0 is here, but master {master} ({address[0]}) is not: {error.strerror}")
elif int(nodes) > 1:
    if address[0].startswith("127."):
        fail(f"master {master} is {address[0]} here, this node itself: set MASTER_ADDR to an address "
             "that all nodes reach")
    try:
        socket.create_connection(address[:2], timeout=10).close()
    except ConnectionRefusedError:
        pass  # it answers; its store comes up in a moment
    except OSError as error:
        fail(f"cannot reach master {master} ({address[0]}): {error.strerror or error}", "node lost")
try:
    print(gpus, flush=True)
except BrokenPipeError:  # who asked was told to stop
    os._exit(2)
END
}

main() {
  case "${1:-}" in
    --help | -h) print_help && exit ;;
    --free-port) free_port "${2:-}" && exit ;;
    --environment) environment && exit ;;
  esac
  local arguments=() hosts=()
  while [[ $# -gt 0 && "$1" != -* ]]; do
    arguments+=("$1")
    shift
  done
  [[ ${#arguments[@]} -le 5 ]] || fail "too many words before the options: ${arguments[*]:5}"
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  # shellcheck source=scripts/site.sh
  source scripts/site.sh
  mapfile -t hosts < <(hosts_of_job)

  local config="${arguments[0]:-configs/default_config.yaml}"
  local nodes="${arguments[1]:-${SLURM_STEP_NUM_NODES:-${#hosts[@]}}}"
  [[ "$nodes" != 0 ]] || nodes=1
  local rank="${arguments[2]:-}"
  if [[ -z "$rank" ]]; then
    rank=0
    [[ "$nodes" == 1 ]] || rank="${SLURM_NODEID:-$(position "${hosts[@]}")}"
  fi
  local master="${arguments[3]:-${MASTER_ADDR:-${hosts[0]:-localhost}}}"
  [[ "$nodes" != 1 ]] || master=localhost
  local job="${SLURM_JOB_ID:-${PBS_JOBID:-0}}" port="${arguments[4]:-$MASTER_PORT}"
  if [[ -z "$port" && "$nodes" == 1 && "$job" == 0 ]]; then
    port="$((15000 + RANDOM % 15000))" # others of ours may begin at this moment
  fi
  [[ -n "$port" ]] || port="$(port_of_job)"
  [[ "$nodes $rank $port" =~ ^[1-9][0-9]*\ [0-9]+\ [0-9]+$ ]] ||
    fail "num_nodes '$nodes', node_rank '$rank' and master_port '$port' should be numbers"
  [[ -n "${arguments[4]:-}" || "$nodes" != 1 ]] || port="$(free_port "$port")" || exit
  [[ -f "$config" ]] || fail "there is no config $config in $PWD"
  [[ -f "$TRAIN_SCRIPT" ]] || fail "there is no TRAIN_SCRIPT $TRAIN_SCRIPT in $PWD"
  NPROC_PER_NODE="${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
  [[ "$NPROC_PER_NODE" =~ ^([1-9][0-9]*)?$ ]] || fail "NPROC_PER_NODE is '$NPROC_PER_NODE', not a number"
  if [[ -z "$DRY_RUN" || -z "$NPROC_PER_NODE" ]]; then
    local gpus
    gpus="$(look "$nodes" "$rank" "$master" "$port")" || exit 2
    NPROC_PER_NODE="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
  fi

  # Threads of CPU work: this node's cores, shared out among the workers.
  local cores
  cores="$(nproc)"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NPROC_PER_NODE ? cores / NPROC_PER_NODE : 1))}"
  export LOGLEVEL="$LOG_LEVEL" RUN_NONCE="${RUN_NONCE:-$job}"
  if [[ "$LOG_LEVEL" == DEBUG ]]; then
    export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL
  fi
  local command=("${python[@]}" -m "$LAUNCHER" --nnodes "$nodes" --node-rank "$rank"
    --nproc-per-node "$NPROC_PER_NODE" --master-addr "$master" --master-port "$port"
    "$TRAIN_SCRIPT" --config "$config" ${BACKEND:+--distributed-backend "$BACKEND"} "$@")
  if [[ "$LAUNCHER" == torch.distributed.launch ]]; then
    command=("${command[@]:0:${#python[@]}+2}" --use-env "${command[@]:${#python[@]}+2}")
  fi

  echo "\$$(printf ' %q' "${command[@]}")" # in one piece: other nodes write, too
  [[ -z "$DRY_RUN" ]] || exit 0
  local log
  log="cluster_train_$(date +%Y%m%d_%H%M%S)_node$rank.log"
  mkdir -p logs/distributed_training && [[ -w logs/distributed_training ]] ||
    fail "cannot write to $PWD/logs/distributed_training"
  ln -sfn "$log" "logs/distributed_training/latest_node$rank.log"
  # What is written last is written by the workers: tee goes when they have gone, not at a signal.
  exec &> >(trap '' HUP INT TERM USR1 USR2 && exec tee -ap "logs/distributed_training/$log")
  train "${command[@]}"
}

main "$@"
