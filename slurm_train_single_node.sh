#!/usr/bin/env bash
# Slurm + srun on one node: one task per GPU, without torchrun. Default: 4 GPUs. Edit the directives below
# or override them on sbatch's command line.
#
# Usage: sbatch [options of sbatch] slurm_train_single_node.sh [config] [options of train_distributed.py]
#        bash slurm_train_single_node.sh --help
#
# Environment (see also slurm_train_multinode.sh):
#   REPO_ROOT  path of this repository              [the submission directory, or that of this file]
#
# Examples:
#   sbatch slurm_train_single_node.sh
#   sbatch --gpus-per-node=8 --ntasks-per-node=8 slurm_train_single_node.sh configs/default_config.yaml --epochs 10

#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH --output=logs/slurm-%j.out
#SBATCH --open-mode=append
# EDIT: delete "# EDIT " from a line that your site needs, and set its value.
# EDIT #SBATCH --partition=gpu
# EDIT #SBATCH --account=myproject
# EDIT #SBATCH --time=24:00:00    # shortly before the end, the training saves and the job is requeued
# EDIT #SBATCH --mem=0            # all memory of each node; the default of some sites is 1 GB per core

set -euo pipefail

REPO_ROOT="${REPO_ROOT:-}"

# A copy in each job script: it is needed before the repository is found.
fail() {
  echo "slurm_train_single_node.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# Slurm runs a copy of this file, so ask Slurm for the original path.
# A copy in each job script: no other file can be sourced before.
find_repository() {
  local submitted place
  submitted="$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=//p')"
  submitted="${submitted%%$'\n'*}" # of a job array, one line for each task
  until [[ -f "$submitted" || "$submitted" != *" "* ]]; do
    submitted="${submitted% *}" # drop an argument
  done
  for place in "$REPO_ROOT" "${SLURM_SUBMIT_DIR:-$PWD}" "$(dirname "$(realpath "${submitted:-$0}")")"; do
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
  [[ -n "${SLURM_JOB_ID:-}${DRY_RUN:-}" ]] ||
    fail "submit this script with sbatch; without Slurm, use scripts/cluster_train.sh"
  REPO_ROOT="$(find_repository)"
  export REPO_ROOT
  # sbatch has read the directives; the rest is the same as for several nodes.
  [[ -n "${SLURM_JOB_ID:-}" ]] || export SLURM_NNODES=1
  exec bash "$REPO_ROOT/slurm_train_multinode.sh" "$@"
}

main "$@"
