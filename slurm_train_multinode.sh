#!/usr/bin/env bash
# Slurm + srun: one task per GPU, without torchrun; scripts/guard.py sets torchrun's variables. Default: 2
# nodes with 4 GPUs each. Edit the directives below or override them on sbatch's command line.
# scripts/supervise.py restarts the training after a crash and requeues the job when its time is up.
#
# Usage: sbatch [options of sbatch] slurm_train_multinode.sh [config] [options of train_distributed.py]
#        bash slurm_train_multinode.sh --help
#
# In a job array, %a in an argument is the task's number.
#
# Environment (see also scripts/environment.sh and scripts/supervise.py):
#   REPO_ROOT     path of this repository                              [the submission directory]
#   NPROC_PER_NODE  ranks on each node                                 [one per GPU of the job]
#   BACKEND       nccl or gloo                                         [nccl on GPUs, else gloo]
#   TRAIN_SCRIPT  any training script that works with torchrun         [train_distributed.py]
#   DRY_RUN       1: only print the command                            []
#
# Examples:
#   sbatch slurm_train_multinode.sh
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 slurm_train_multinode.sh configs/default_config.yaml --epochs 10

#SBATCH --job-name=train
#SBATCH --nodes=2
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

REPO_ROOT="${REPO_ROOT:-}"
TRAIN_SCRIPT="${TRAIN_SCRIPT:-train_distributed.py}"
NPROC_PER_NODE="${NPROC_PER_NODE:-}"
BACKEND="${BACKEND:-}"
DRY_RUN="${DRY_RUN:-}"

# gpus_per_node: prints the number of GPUs that a step gets on each node: what the job requested per node,
# else what it got on each (--gpus). With --exclusive, it got all GPUs, but a step gets those requested.
# SLURM_GPUS_PER_NODE is not read, because it does not reflect --gres on the command line.
gpus_per_node() {
  local job="$SLURM_JOB_ID" numbers
  [[ -z "${SLURM_ARRAY_JOB_ID:-}" ]] || job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" # else all tasks
  job="$(scontrol show job --details "$job")"
  # TresPerNode=gres:gpu:a100:4
  if [[ "$job" =~ TresPerNode=[^[:space:]]*gpu(:[^:,[:space:]]+)?:([0-9]+) ]]; then
    echo "${BASH_REMATCH[2]}"
    return
  fi
  # Nodes=node01 CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3)
  mapfile -t numbers < <(sed -nE 's/.* GRES=gpu(:[^:(]+)?:([0-9]+)\(.*/\2/p' <<<"$job" | sort -nu)
  ((${#numbers[@]} < 2)) || fail "the nodes have different numbers of GPUs (${numbers[*]}): use" \
    "run_distributed.slurm, or sbatch --gpus-per-node"
  echo "${numbers[0]:-1}"
}

cd "${REPO_ROOT:-$PWD}" || exit # Slurm starts a job in the submission directory
if [[ ! -f train_distributed.py ]]; then
  echo "slurm_train_multinode.sh: error: no train_distributed.py in $PWD: submit from the repository, or set REPO_ROOT" >&2
  exit 2
fi
# shellcheck source=scripts/common.sh
source scripts/common.sh
check_slurm_job
export REPO_ROOT="$PWD" PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD" # a script elsewhere may import train_distributed
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}"                         # labels numbered in the order of a set: on all ranks alike
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
set_program "${@//%a/${SLURM_ARRAY_TASK_ID:-%a}}"

# One task per GPU, each with its share of the cores, whatever the job requested per task. guard.py binds
# it to them, or to those near its GPU. A task sees all GPUs of its node and uses that of its local rank:
# with only one visible, NVLink would be lost.
ranks="$NPROC_PER_NODE"
[[ -n "$ranks" || -z "${SLURM_JOB_ID:-}" ]] || ranks="$(gpus_per_node)"
((ranks > 0)) || ranks=1
cores="$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | sed 's/(.*//' | sort -n | sed -n 1p)" # 64(x2),32
[[ -n "${SLURM_OVERCOMMIT:-}$DRY_RUN" || "$cores" -ge "$ranks" ]] || fail "the job has too few cores on a node" \
  "($cores) for $ranks ranks: request --ntasks-per-node=$ranks, or --overcommit"
cores="$((cores > ranks ? cores / ranks : 1))"
[[ -n "${OMP_NUM_THREADS:-}" ]] || export OMP_NUM_THREADS="$cores"
start "$PYTHON" scripts/supervise.py \
  "${srun[@]}" --ntasks-per-node="$ranks" --cpus-per-task="$cores" --kill-on-bad-exit=1 --cpu-bind=none \
  "${python[@]}" "${script[@]}" "${arguments[@]}"
