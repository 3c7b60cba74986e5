#!/usr/bin/env bash
# Tests distributed training on this machine or allocation, in about a minute. scripts/doctor.py checks
# all nodes and the network. Then all processes train 20 steps, and a second run resumes at step 10: both
# must end with the same weights, bit for bit. The last line is PASS, or FAIL with the reason.
#
# Usage: scripts/test_distributed.sh [N]    N processes on this machine (default: one per GPU, or 2)
#        scripts/test_distributed.sh        in an allocation (salloc, sbatch, qsub): on all its nodes
#
# Environment (see also scripts/cluster_train.sh; SHARE_GPU=1 for several processes on one GPU):
#   DRY_RUN  1: only print the commands    []
#
# Examples:
#   scripts/test_distributed.sh 2
#   salloc --nodes=2 --gpus-per-node=4 scripts/test_distributed.sh

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DRY_RUN="${DRY_RUN:-}"

finish() {
  echo "$*"
  if [[ "$1" == PASS:* ]]; then
    rm -rf "$directory"
    exit
  fi
  exit 1
}

# launch LOG OPTIONS...: runs the launcher that fits here; its output also goes to LOG.
launch() {
  local command=(scripts/cluster_train.sh) log="$directory/$1.log"
  if [[ -n "${SLURM_JOB_ID:-}" ]]; then
    command=(bash run_distributed.slurm)
  elif [[ -f "${PBS_NODEFILE:-}" ]]; then
    command=(bash scripts/pbs/pbs_train.sh)
  fi
  command+=(configs/default_config.yaml "${@:2}")
  if [[ -n "$DRY_RUN" ]]; then
    echo "\$ ${TRAIN_SCRIPT:+TRAIN_SCRIPT=$TRAIN_SCRIPT }${command[*]}"
  elif ! "${command[@]}" 2>&1 | tee "$log"; then
    finish "FAIL: $(grep -m 1 -E 'error: |^FAIL' "$log" || tail -n 1 "$log") (full log: $log)"
  fi
}

# train RUN OPTIONS...: trains to step 20.
train() {
  launch "$1" --checkpoint-dir "$directory/$1" --stop-at-step 20 --checkpoint-every-steps 10 \
    --batch-size 8 --epochs 100 --warmup-epochs 0 --deterministic --hang-timeout 60 \
    "${@:2}"
}

main() {
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  # shellcheck source=scripts/environment.sh
  source scripts/environment.sh
  if [[ ! "${1:-}" =~ ^([1-9][0-9]*)?$ ]]; then
    fail "'$1' is not a number of processes"
  fi
  [[ -z "${1:-}" ]] || export NPROC_PER_NODE="$1"
  if [[ -z "${NPROC_PER_NODE:-}${SLURM_JOB_ID:-}${PBS_NODEFILE:-}" ]]; then
    NPROC_PER_NODE="$("${python[@]}" scripts/node_check.py train_distributed.py | tail -n 1)"
    [[ "$NPROC_PER_NODE" != 0 ]] || NPROC_PER_NODE=2
    export NPROC_PER_NODE
  fi
  export MAX_RESTARTS=0 STOPPED_EXIT_CODE=0
  directory="$PWD/runs/test_distributed_$(date +%Y%m%d_%H%M%S)_$$"
  [[ -n "$DRY_RUN" ]] || mkdir -p "$directory"
  TRAIN_SCRIPT=scripts/doctor.py launch doctor --checkpoint-dir "$directory/straight"
  train straight
  train resumed --resume "$directory/straight/checkpoint_step_10.pt"
  [[ -z "$DRY_RUN" ]] || exit 0
  "${python[@]}" scripts/compare_runs.py "$directory"/{straight,resumed}/checkpoint_step_20.pt ||
    finish "FAIL: the run resumed at step 10 ends with different weights (see $directory)"
  finish "PASS: 20 steps and a run resumed at step 10 end with the same weights"
}

main "$@"
