#!/usr/bin/env bash
# Slurm + srun: one task per GPU, without torchrun; scripts/guard.py sets torchrun's variables. Default: 2
# nodes with 4 GPUs each. Edit the directives below or override them on sbatch's command line.
# scripts/supervise.py restarts the training after a crash and requeues the job when its time is up.
#
# Usage: sbatch [options of sbatch] slurm_train_multinode.sh [config] [options of train_distributed.py]
#        bash slurm_train_multinode.sh --help
#
# Environment (see also scripts/site.sh and scripts/supervise.py):
#   REPO_ROOT     path of this repository            [the submission directory, or that of this file]
#   MASTER_ADDR   address of the first node, reachable from all nodes  [its name]
#   MASTER_PORT   a free port on the first node                        [derived from the job and step]
#   TRAIN_SCRIPT  any training script that works with torchrun         [train_distributed.py]
#   DRY_RUN       1: only print the commands                           []
#
# Examples:
#   sbatch slurm_train_multinode.sh
#   sbatch --nodes=4 --gpus-per-node=8 slurm_train_multinode.sh configs/default_config.yaml --epochs 10

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --no-kill
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append

set -euo pipefail

REPO_ROOT="${REPO_ROOT:-}"
TRAIN_SCRIPT="${TRAIN_SCRIPT:-train_distributed.py}"
export MASTER_ADDR="${MASTER_ADDR:-}"
export MASTER_PORT="${MASTER_PORT:-}"
DRY_RUN="${DRY_RUN:-}"

fail() {
  echo "slurm_train_multinode.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# Slurm runs a copy of this file, so ask Slurm for the original path.
find_repository() {
  local submitted place
  submitted="$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=//p')"
  until [[ -f "$submitted" || "$submitted" != *" "* ]]; do
    submitted="${submitted% *}" # drop an argument
  done
  for place in "$REPO_ROOT" "${SLURM_SUBMIT_DIR:-$PWD}" "$(dirname "$(realpath "$submitted")")"; do
    if [[ -n "$place" && -f "$place/train_distributed.py" ]]; then
      echo "$place"
      return
    fi
  done
  fail "no train_distributed.py in ${SLURM_SUBMIT_DIR:-$PWD}: submit from the repository, or set REPO_ROOT"
}

# exec_command COMMAND...: replaces this shell. At a preemption, Slurm's SIGTERM would kill the shell at once,
# while srun waits until the ranks have saved.
exec_command() {
  echo "\$$(printf ' %q' "$@")"
  [[ -n "$DRY_RUN" ]] || exec "$@"
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  [[ -n "${SLURM_JOB_ID:-}" ]] || fail "this is for sbatch; without Slurm: scripts/cluster_train.sh"
  REPO_ROOT="$(find_repository)"
  local this
  this="$(realpath "$0")"
  cd "$REPO_ROOT"
  # shellcheck source=scripts/site.sh
  source scripts/site.sh
  local config=configs/default_config.yaml gpus="${SLURM_GPUS_ON_NODE:-1}" cores="${SLURM_CPUS_ON_NODE:-}"
  # shellcheck disable=SC2016
  [[ -n "$cores" ]] || # in salloc, this shell runs outside the nodes
    read -r gpus cores < <(srun --nodes=1 --ntasks=1 \
      bash -c 'echo "${SLURM_GPUS_ON_NODE:-1} $SLURM_CPUS_ON_NODE"')
  # With --exclusive, that is all GPUs of the node; use only those that the job requested.
  [[ ! "${SLURM_GPUS_PER_NODE:-}" =~ ^([^:,]+:)?([0-9]+)$ ]] || gpus="${BASH_REMATCH[2]}"
  ((gpus > 0)) || gpus=1
  if [[ $# -gt 0 && "$1" != -* ]]; then
    config="$1"
    shift
  fi
  [[ -f "$config" ]] || fail "there is no config $config in $PWD"
  if [[ -z "$DRY_RUN" && -z "${ATTEMPT:-}" ]]; then
    # supervise.py calls this file again, with ATTEMPT set, for each attempt.
    exec "${PYTHON:-python3}" scripts/supervise.py bash "$this" "$config" "$@"
  fi
  # One task per GPU, each with its share of the cores, whatever the job requested per task. A task
  # sees all GPUs of its node and uses that of its local rank: with only one visible, NVLink would be lost.
  cores="$((cores > gpus ? cores / gpus : 1))"
  unset SLURM_CPUS_PER_TASK SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_NODE SLURM_TRES_PER_TASK
  local script=(scripts/guard.py "$TRAIN_SCRIPT")
  [[ "$TRAIN_SCRIPT" != *doctor.py ]] || script=("$TRAIN_SCRIPT") # doctor.py checks the ranks itself
  exec_command srun --nodes="$SLURM_NNODES" --nodelist="$SLURM_JOB_NODELIST" \
    --ntasks="$((SLURM_NNODES * gpus))" --ntasks-per-node="$gpus" \
    --cpus-per-task="$cores" --kill-on-bad-exit=1 "${python[@]}" "${script[@]}" --config "$config" "$@"
}

main "$@"
