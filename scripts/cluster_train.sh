#!/usr/bin/env bash
# Starts the workers of this node with torchrun, one per GPU, after checking what would make them
# fail. The launchers call it once on each node; what is left out is read from Slurm or PBS.
#
# Usage: scripts/cluster_train.sh [config] [num_nodes] [node_rank] [master_addr] [master_port] [options]
#        scripts/cluster_train.sh --free-port [first]    a port nobody listens to on this node
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
  exit 2
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

# port_of_job: one that other jobs do not begin with, below the ephemeral ones (32768 and up).
port_of_job() {
  local job="${SLURM_JOB_ID:-${PBS_JOBID:-0}}"
  echo "$((15000 + 16 * ${job%%[^0-9]*} % 15000))"
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
  fail "it is not among the job's nodes: $*"
}

# check NUM_NODES NODE_RANK MASTER_ADDR MASTER_PORT: one sentence if the workers would fail.
check() {
  "${python[@]}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "${python[*]} is not Python 3.11 or newer: see scripts/site.sh"
  "${python[@]}" - "$@" "$NPROC_PER_NODE" "$BACKEND" <<'END' || exit 2
import socket, sys

def fail(text):
    sys.exit(f"cluster_train.sh: error: {socket.gethostname()}: {text}")

nodes, rank, master, port, workers, backend = sys.argv[1:]
try:
    import torch, torchvision, yaml
    import torch.distributed as dist
except ImportError as error:
    fail(f"{error}, for {sys.executable}: see scripts/site.sh")
if not dist.is_available():
    fail("this PyTorch is built without torch.distributed")
gpus = torch.cuda.device_count()
if backend == "nccl" and gpus < int(workers):
    fail(f"{workers} workers for nccl, but {gpus} visible GPUs")
for gpu in range(min(gpus, int(workers))):
    free, total = torch.cuda.mem_get_info(gpu)
    if free < 0.8 * total:
        print(f"WARNING: {socket.gethostname()}: GPU {gpu} has only {free >> 30} of "
              f"{total >> 30} GiB free: is another job on it?", file=sys.stderr)
try:
    address = socket.getaddrinfo(master, int(port), socket.AF_INET)[0][4]
except OSError as error:
    fail(f"master {master} is unknown here ({error.strerror}): is the name right?")
if int(rank) and address[0].startswith("127."):
    fail(f"master {master} is {address[0]} here, this node itself: use an address others can reach")
if int(rank):
    try:
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        pass  # it answers; its store comes up in a moment
    except OSError as error:
        fail(f"cannot reach master {master} ({address[0]}): {error.strerror or error}")
END
}

main() {
  case "${1:-}" in
    --help | -h) print_help && exit ;;
    --free-port) free_port "${2:-}" && exit ;;
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
  [[ -n "$port" ]] || port="$(port_of_job)"
  [[ -n "${arguments[4]:-}" || "$nodes" != 1 ]] || port="$(free_port "$port")"
  [[ -f "$config" ]] || fail "there is no config $config in $PWD"
  [[ -f "$TRAIN_SCRIPT" ]] || fail "there is no TRAIN_SCRIPT $TRAIN_SCRIPT in $PWD"
  if [[ -z "$NPROC_PER_NODE" ]]; then
    NPROC_PER_NODE="${SLURM_GPUS_ON_NODE:-$("${python[@]}" -c \
      'import torch; print(torch.cuda.device_count() or 1)')}"
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

  printf '$'
  printf ' %q' "${command[@]}"
  echo
  [[ -z "$DRY_RUN" ]] || exit 0
  check "$nodes" "$rank" "$master" "$port"
  local log
  log="cluster_train_$(date +%Y%m%d_%H%M%S)_node$rank.log"
  mkdir -p logs/distributed_training
  ln -sfn "$log" "logs/distributed_training/latest_node$rank.log"
  exec "${command[@]}" &> >(exec tee -a "logs/distributed_training/$log")
}

main "$@"
