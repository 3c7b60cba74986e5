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

set -euo pipefail
unset CDPATH PYTHONSAFEPATH # they change what cd and import find

DRY_RUN="${DRY_RUN:-}"

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# A copy in each script: sourcing a file would take as many lines.
fail() {
  echo "test_distributed.sh: error: $*" >&2
  exit 2
}

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

# compare A B: succeeds if the weights and optimizer states of the two checkpoints are equal.
compare() {
  "${python[@]}" - "$@" <<'END'
import sys, torch

a, b = (torch.load(path, weights_only=True, map_location="cpu") for path in sys.argv[1:])
state = [[*s["model"].values(), *(v for values in s["optimizer"]["state"].values()
                                  for v in values.values() if torch.is_tensor(v))] for s in (a, b)]
sys.exit(not state[0] or len(state[0]) != len(state[1]) or not all(map(torch.equal, *state)))
END
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  # shellcheck source=scripts/site.sh
  source scripts/site.sh
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
  compare "$directory"/{straight,resumed}/checkpoint_step_20.pt ||
    finish "FAIL: the run resumed at step 10 ends with different weights (see $directory)"
  finish "PASS: 20 steps and a run resumed at step 10 end with the same weights"
}

main "$@"
