#!/usr/bin/env bash
# Slurm + srun on one node, by default with 4 GPUs: directives for slurm_train_multinode.sh. Edit them, or
# override them on sbatch's command line.
#
# Usage: sbatch [options of sbatch] slurm_train_single_node.sh [config] [options of train_distributed.py]
#        bash slurm_train_single_node.sh --help

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

[[ "${1:-}" != --help ]] || exec sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
# Slurm starts a job in the submission directory.
exec bash "${REPO_ROOT:-$PWD}/slurm_train_multinode.sh" "$@"
