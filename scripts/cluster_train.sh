#!/usr/bin/env bash
# Starts the workers of this node with torchrun, one per GPU, after checking what would make them
# fail. The launchers call it once on each node; what is left out is read from Slurm or PBS.
#
# Usage: scripts/cluster_train.sh [config] [num_nodes] [node_rank] [master_addr] [master_port] [options]
#        scripts/cluster_train.sh --free-port [first]    a port nobody listens to on this node
#        scripts/cluster_train.sh --environment          this environment, for bash on another node
#        scripts/cluster_train.sh --end ID               for the launchers: ends what they started here
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

# end_all ID: kills what has ON_NODE=ID in its environment, whoever its parent is by now.
end_all() {
  local pids
  for _ in {1..50}; do
    pids="$(grep -slzxF "ON_NODE=$1" /proc/[0-9]*/environ | tr -dc '0-9\n')"
    [[ -n "$pids" ]] || break
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null || true
    sleep 0.1
  done
}

# train COMMAND...: runs it to its end. A signal that asks to stop goes to its children, the workers, who
# save and end, so that torchrun ends without an error of its own. SIGINT after that kills them: SIGTERM
# does not, which Slurm sends twice within a moment when it ends a job.
train() {
  local kills status=0 alone=()
  child="" asked="" told=""
  kills="$(oom_kills)"
  # Out of reach of Ctrl-C, and ending with us.
  if setpriv --pdeathsig TERM true 2>/dev/null; then
    alone=(setpriv --pdeathsig TERM)
  else # RHEL 8, for one
    trap 'kill -TERM "$child" 2>/dev/null || true' EXIT
  fi
  [[ -z "$(command -v setsid)" ]] || alone=(setsid "${alone[@]}")
  trap stop HUP INT TERM USR1 USR2
  # Of these torchrun would die, if Slurm sent them to it too, and leave its workers.
  (trap '' USR1 USR2 && exec "${alone[@]}" "$@") &
  child=$!
  [[ -z "$asked" ]] || stop
  while kill -0 "$child" 2>/dev/null; do
    wait "$child" || true # a signal interrupts it
  done 2>/dev/null        # bash would say "Killed"
  wait "$child" || status=$?
  if ((status > 0 && $(oom_kills) > kills)); then
    record "out of memory" "the kernel of $(hostname) killed a process"
  fi
  child=""
  return "$status"
}

# stop: at the start, when there are no workers yet and nothing to save, torchrun itself.
stop() {
  if [[ -z "$child" ]]; then
    asked=1
    return
  fi
  trap 'pkill -KILL -P "$child" || true; kill -KILL "$child" || true' INT
  if pkill -TERM -P "$child"; then
    told=1
  elif [[ -z "$told" ]]; then
    kill -KILL "$child" || true
  fi
}

oom_kills() {
  awk '$1 == "oom_kill" { n = $2 } END { print n + 0 }' /proc/vmstat 2>/dev/null || echo 0
}

# look NUM_NODES NODE_RANK MASTER_ADDR MASTER_PORT: the number of visible GPUs; or one sentence, if the
# workers would fail.
look() {
  local needs=torch
  [[ "$TRAIN_SCRIPT" != train_distributed.py ]] || needs=torch,torchvision,yaml,tqdm
  "${python[@]}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "${python[*]} is not Python 3.11 or newer: see scripts/site.sh"
  "${python[@]}" scripts/doctor.py --quick --needs "$needs" --nnodes "$1" --node-rank "$2" \
    --master-addr "$3" --master-port "$4" ${NPROC_PER_NODE:+--nproc-per-node "$NPROC_PER_NODE"} \
    ${BACKEND:+--distributed-backend "$BACKEND"}
}

main() {
  case "${1:-}" in
    --help | -h) print_help && exit ;;
    --free-port) free_port "${2:-}" && exit ;;
    --environment) environment && exit ;;
    --end) end_all "$2" && exit ;;
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
  # Where a SIGTERM reaches torchrun as well, it kills its workers after 30 s: too soon for a large model.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
  if [[ "$LOG_LEVEL" == DEBUG ]]; then
    export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL
  fi
  local where=(--nnodes "$nodes" --node-rank "$rank" --nproc-per-node "$NPROC_PER_NODE"
    --master-addr "$master" --master-port "$port")
  local what=("$TRAIN_SCRIPT" --config "$config" ${BACKEND:+--distributed-backend "$BACKEND"} "$@")
  local command=("${python[@]}" -m "$LAUNCHER" "${where[@]}" "${what[@]}")
  if [[ "$LAUNCHER" == torch.distributed.launch ]]; then
    command=("${python[@]}" -m "$LAUNCHER" --use-env "${where[@]}" "${what[@]}")
  fi
  if [[ "$TRAIN_SCRIPT" == *doctor.py ]]; then # it starts the ranks itself: torchrun waits for missing nodes
    command=("${python[@]}" "$TRAIN_SCRIPT" "${where[@]}" "${what[@]:1}")
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
  local tee=$! status=0
  train "${command[@]}" || status=$?
  trap '' HUP INT TERM USR1 USR2
  exec &>/dev/null
  for _ in {1..100}; do # the last lines, through a slow terminal
    kill -0 "$tee" || break
    sleep 0.05
  done
  exit "$status"
}

main "$@"
