#!/usr/bin/env bash
# Checks this node with scripts/node_check.py, then starts its ranks with torchrun and scripts/guard.py,
# one per GPU. The launchers call it once per node. Arguments that are left out come from Slurm or PBS.
#
# Usage: scripts/cluster_train.sh [config] [num_nodes] [node_rank] [master_addr] [master_port] [options]
#
# All arguments from the first one with a dash on are options of the training script. It gets --config, if a
# config is given, and --distributed-backend, if BACKEND is set, only if it has these options. After --, it gets
# what follows, and nothing else. The output is also written to
# LOG_DIR/distributed_training/cluster_train_TIMESTAMP_JOB_PID_nodeRANK.log (link: latest_nodeRANK.log).
#
# Environment (CONDA_ENV, PYTHON and APPTAINER_IMAGE: see scripts/environment.sh; SHARE_GPU: see scripts/guard.py):
#   NPROC_PER_NODE  ranks on this node                            [Slurm's GPUs, visible GPUs, or 1]
#   BACKEND         nccl or gloo                                  [nccl on GPUs, else gloo]
#   LOG_LEVEL       torchrun's; DEBUG also makes NCCL verbose  [WARNING]
#   TRAIN_SCRIPT    any training script that works with torchrun, or "-m package.module"  [train_distributed.py]
#   MASTER_ADDR     the host of node rank 0                       [first host of the job, or localhost]
#   MASTER_PORT     a free port on that host                      [derived from the job id]
#   LOG_DIR         directory for log files                       [logs]
#   DRY_RUN         1: only print the command                     []
#
# Examples:
#   scripts/cluster_train.sh configs/default_config.yaml
#   scripts/cluster_train.sh configs/default_config.yaml 2 1 node01 29400 --epochs 10

set +o posix # POSIXLY_CORRECT changes bash
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NPROC_PER_NODE="${NPROC_PER_NODE:-}"
BACKEND="${BACKEND:-}"
LOG_LEVEL="${LOG_LEVEL:-WARNING}"
TRAIN_SCRIPT="${TRAIN_SCRIPT:-train_distributed.py}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-}"
LOG_DIR="${LOG_DIR:-logs}"
DRY_RUN="${DRY_RUN:-}"

scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

fail() {
  local host
  host="$(hostname)"
  echo "cluster_train.sh: error: $host: $*" >&2
  # For supervise.py. PYTHON may be what has failed.
  "${PYTHON:-python3}" "$scripts/report.py" configuration "$*" "$host" 2>/dev/null ||
    python3 "$scripts/report.py" configuration "$*" "$host"
  exit 2
}

# answer_of COMMAND...: the last line that it prints; a Python of the site may print others before.
answer_of() {
  "$@" | tail -n 1
}

# node_rank_among HOST...: prints the index of this host; without its domain, if no other has the same name.
node_rank_among() {
  local lines
  lines="$(printf '%s\n' "$@" | grep -nxF -e "$(hostname)")" ||
    lines="$(printf '%s\n' "${@%%.*}" | grep -nxF -e "$(hostname -s)")" ||
    fail "this host is not one of: ${*:-none}. Give node_rank"
  [[ "$lines" != *$'\n'* ]] || fail "this host may be each of: $*. Give node_rank"
  echo "$((${lines%%:*} - 1))"
}

main() {
  # Other programs use LOG_LEVEL, too.
  LOG_LEVEL="${LOG_LEVEL^^}"
  if [[ ! "$LOG_LEVEL" =~ ^(DEBUG|INFO|WARNING|ERROR|CRITICAL)$ ]]; then
    echo "cluster_train.sh: WARNING: LOG_LEVEL=$LOG_LEVEL is not a level of torchrun, and is ignored" >&2
    LOG_LEVEL=WARNING
  fi
  local given=() hosts=()
  while [[ $# -gt 0 && "$1" != -* ]]; do
    given+=("$1")
    shift
  done
  [[ ${#given[@]} -le 5 ]] ||
    fail "too many arguments before the options: ${given[*]:5} (the script's own arguments go after --)"
  cd "$scripts/.."
  export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD" # a script elsewhere may import train_distributed
  export PYTHONHASHSEED="${PYTHONHASHSEED:-0}"        # labels numbered in the order of a set: on all ranks alike
  # shellcheck source=scripts/environment.sh
  source scripts/environment.sh
  # Only Apptainer runs this script outside the container: with Pyxis, PYTHON of the host is not here.
  [[ -n "${APPTAINER_IMAGE:-}" ]] || PYTHON="${python[0]}"
  check_python "$PYTHON"
  # Not if the arguments, or Slurm and the launcher, say everything: a container may have no scontrol.
  [[ -n "${given[1]:-}" && -n "${given[2]:-}" && -n "${given[3]:-}" ]] ||
    [[ -n "${SLURM_STEP_NUM_NODES:-}" && -n "$MASTER_ADDR" ]] ||
    read -r -a hosts < <(answer_of "$PYTHON" scripts/hosts.py --hosts) || exit 2

  # Each is the argument, else the launcher's variable, else that of the Slurm step, else from the list of hosts.
  local config="${given[0]:-}"
  local nodes="${given[1]:-${SLURM_STEP_NUM_NODES:-${#hosts[@]}}}"
  local rank="${given[2]:-}"
  if [[ -z "$rank" ]]; then
    rank=0
    [[ "$nodes" == 1 ]] || rank="${SLURM_NODEID:-$(node_rank_among "${hosts[@]}")}"
  fi
  local master="${given[3]:-${MASTER_ADDR:-${hosts[0]}}}" port="${given[4]:-$MASTER_PORT}"
  if [[ "$nodes" == 1 ]]; then
    master=localhost
  fi
  # On one node, the port must be free here. On several, the launcher has chosen one.
  [[ -n "$port" ]] || port="$(answer_of "$PYTHON" scripts/hosts.py --free-port)" || exit
  [[ "$nodes $rank $port" =~ ^[1-9][0-9]*\ [0-9]+\ [0-9]+$ ]] ||
    fail "num_nodes '$nodes', node_rank '$rank' and master_port '$port' should be numbers"
  set_program "$config" "$@"
  NPROC_PER_NODE="${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
  [[ "$NPROC_PER_NODE" =~ ^([1-9][0-9]{0,2})?$ ]] || fail "NPROC_PER_NODE is '$NPROC_PER_NODE', not 1 to 999"
  local where=(--nnodes "$nodes" --node-rank "$rank" --master-addr "$master" --master-port "$port")
  local gpus=0
  if [[ -n "$DRY_RUN" ]]; then
    NPROC_PER_NODE="${NPROC_PER_NODE:-gpu}" # torchrun's word for one rank per GPU
  else
    gpus="$(answer_of "${python[@]}" scripts/node_check.py "${where[@]}" --nproc-per-node "${NPROC_PER_NODE:-0}" \
      "$TRAIN_SCRIPT" "${arguments[@]}")" || {
      (($? != 2)) || exit 2 # it has printed why
      fail "${python[*]} does not start, or is not Python 3.10 or newer: see scripts/site.sh"
    }
    NPROC_PER_NODE="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
  fi
  where+=(--nproc-per-node "$NPROC_PER_NODE")

  local command=("${python[@]}" -m torch.distributed.run "${where[@]}" "${script[@]}" "${arguments[@]}")
  echo "\$$(printf ' %q' "${command[@]}")" # one write, because other nodes print too
  [[ -z "$DRY_RUN" ]] || exit 0

  # CPU threads: this node's cores, divided among the ranks. PBS sets the variable to NCPUS, for one process.
  local cores
  [[ -z "${PBS_JOBID:-}" || "${OMP_NUM_THREADS:-}" != "${NCPUS:-}" ]] || unset OMP_NUM_THREADS
  cores="$(nproc)" # this too would read OMP_NUM_THREADS
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NPROC_PER_NODE ? cores / NPROC_PER_NODE : 1))}"
  # In a pod of Kubeflow, these preset torchrun's options, such as another rendezvous.
  local preset=("${!PET_@}")
  if [[ ${#preset[@]} -gt 0 ]]; then
    echo "cluster_train.sh: ${preset[*]}: ignored, because the options of torchrun are those above"
    unset "${preset[@]}"
  fi
  export LOGLEVEL="$LOG_LEVEL"
  if [[ "$LOG_LEVEL" == DEBUG ]]; then
    export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL
  fi
  local logs="$LOG_DIR/distributed_training" log
  log="cluster_train_$(date +%Y%m%d_%H%M%S)_${SLURM_JOB_ID:+${SLURM_JOB_ID}_}$$_node$rank.log"
  mkdir -p "$logs" || true
  (set -o noclobber && : >"$logs/$log") 2>/dev/null || fail "cannot write to $logs: set LOG_DIR"
  ln -sfn "$log" "$logs/latest_node$rank.log"
  # Python itself, not a wrapper around it: it gets the signals.
  exec "$(answer_of "$PYTHON" -c 'import sys; print(sys.executable)')" \
    scripts/run_torchrun.py "$logs/$log" "${command[@]}"
}

main "$@"
