#!/usr/bin/env bash
# Slurm + srun on one node: one task per GPU, ranks from Slurm itself. As shipped 4 GPUs;
# change the directives below, or give sbatch other numbers on the command line.
#
# Usage: sbatch [options of sbatch] slurm_train_single_node.sh [config] [options of train_distributed.py]
#        bash slurm_train_single_node.sh --help
#
# Environment (and that of slurm_train_multinode.sh):
#   REPO_ROOT  this repository                      [where sbatch was called, or where this file is]
#
# Examples:
#   sbatch slurm_train_single_node.sh
#   sbatch --gpus-per-node=8 slurm_train_single_node.sh configs/default_config.yaml --epochs 10

#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append

set -euo pipefail

REPO_ROOT="${REPO_ROOT:-}"

fail() {
  echo "slurm_train_single_node.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# Slurm runs a copy of this file, so where it lies must be asked of Slurm.
find_repository() {
  local submitted place
  submitted="$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=//p')"
  until [[ -f "$submitted" || "$submitted" != *" "* ]]; do
    submitted="${submitted% *}" # its arguments
  done
  for place in "$REPO_ROOT" "${SLURM_SUBMIT_DIR:-$PWD}" "$(dirname "$(realpath "$submitted")")"; do
    if [[ -n "$place" && -f "$place/train_distributed.py" ]]; then
      echo "$place"
      return
    fi
  done
  fail "no train_distributed.py in ${SLURM_SUBMIT_DIR:-$PWD}: submit from the repository, or set REPO_ROOT"
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  [[ -n "${SLURM_JOB_ID:-}" ]] || fail "this is for sbatch; without Slurm: scripts/cluster_train.sh"
  REPO_ROOT="$(find_repository)"
  export REPO_ROOT
  # Beyond the directives, which are read by sbatch, one node is no different from several.
  exec bash "$REPO_ROOT/slurm_train_multinode.sh" "$@"
}

main "$@"
