#!/usr/bin/env bash
# Slurm + srun: one task per GPU, ranks from Slurm itself, no torchrun. As shipped 2 nodes x 4 GPUs;
# change the directives below, or give sbatch other numbers on the command line. scripts/supervise.py
# keeps it alive: it starts a crashed training again, and requeues the job when its time is up.
#
# Usage: sbatch [options of sbatch] slurm_train_multinode.sh [config] [options of train_distributed.py]
#        bash slurm_train_multinode.sh --help
#
# Environment (CONDA_ENV, PYTHON and APPTAINER_IMAGE: see scripts/site.sh; that of scripts/supervise.py):
#   REPO_ROOT     this repository                      [where sbatch was called, or where this file is]
#   MASTER_ADDR   an address of the first node that the others reach   [its name]
#   TRAIN_SCRIPT  what to run: yours, if it reads Slurm's variables    [train_distributed.py]
#   DRY_RUN       1: print the commands only                           []
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
MASTER_ADDR="${MASTER_ADDR:-}"
DRY_RUN="${DRY_RUN:-}"

fail() {
  echo "slurm_train_multinode.sh: error: $*" >&2
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

# end_as COMMAND...: we become it. Slurm's SIGTERM to all of a preempted job would end this shell at once,
# but srun only when the ranks have saved.
end_as() {
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
  [[ -n "$cores" ]] || # in salloc, which runs on no node
    read -r gpus cores < <(srun --nodes=1 --ntasks=1 \
      bash -c 'echo "${SLURM_GPUS_ON_NODE:-1} $SLURM_CPUS_ON_NODE"')
  # With --exclusive, those are all of the node; its tasks get the ones the job asked for.
  [[ ! "${SLURM_GPUS_PER_NODE:-}" =~ ^([^:,]+:)?([0-9]+)$ ]] || gpus="${BASH_REMATCH[2]}"
  ((gpus > 0)) || gpus=1
  local hosts
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export MASTER_ADDR="${MASTER_ADDR:-${hosts[0]}}"
  if [[ $# -gt 0 && "$1" != -* ]]; then
    config="$1"
    shift
  fi
  [[ -f "$config" ]] || fail "there is no config $config in $PWD"
  if [[ -z "$DRY_RUN" && -z "${ATTEMPT:-}" ]]; then
    # It calls this file again, with ATTEMPT set, as often as it takes.
    exec "${PYTHON:-python3}" scripts/supervise.py bash "$this" "$config" "$@"
  fi
  # One task per GPU, each with its share of the cores, whatever the job asked for per task. A task
  # sees all GPUs of its node and takes the one of its rank: with one each, NVLink would be lost.
  cores="$((cores > gpus ? cores / gpus : 1))"
  unset SLURM_CPUS_PER_TASK SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_NODE SLURM_TRES_PER_TASK
  end_as srun --nodes="$SLURM_NNODES" --nodelist="$SLURM_JOB_NODELIST" \
    --ntasks="$((SLURM_NNODES * gpus))" --ntasks-per-node="$gpus" \
    --cpus-per-task="$cores" --kill-on-bad-exit=1 "${python[@]}" "$TRAIN_SCRIPT" --config "$config" "$@"
}

main "$@"
