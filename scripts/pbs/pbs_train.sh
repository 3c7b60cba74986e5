#!/usr/bin/env bash
# PBS (OpenPBS, PBS Pro, Torque): starts torchrun on every node of the job, with pbsdsh. Edit the directives
# below or override them on qsub's command line. scripts/supervise.py restarts the training after a crash.
#
# Usage: qsub [options of qsub] scripts/pbs/pbs_train.sh    (from the repository; arguments in ARGS)
#        bash scripts/pbs/pbs_train.sh [config] [options of train_distributed.py]    (in qsub -I)
#        bash scripts/pbs/pbs_train.sh --help
#
# Environment (qsub -v NAME=VALUE; see also scripts/cluster_train.sh and scripts/supervise.py):
#   ARGS       config and options: not every qsub passes arguments to the script    []
#   REPO_ROOT  path of this repository                    [the directory where qsub was called]
#   LOG_DIR    a directory that all nodes see             [logs]
#   DRY_RUN    1: only print the command                        []
#
# Examples:
#   qsub scripts/pbs/pbs_train.sh
#   qsub -l select=4:ncpus=32:ngpus=8 -v ARGS="configs/default_config.yaml --epochs 10" scripts/pbs/pbs_train.sh

#PBS -N train
#PBS -l select=2:ncpus=32:ngpus=4
#PBS -l place=scatter
#PBS -j oe
#PBS -W umask=022
# For Torque, replace the two -l lines by:
##PBS -l nodes=2:ppn=32:gpus=4

ARGS="${ARGS:-}"
REPO_ROOT="${REPO_ROOT:-}"
LOG_DIR="${LOG_DIR:-logs}"
DRY_RUN="${DRY_RUN:-}"

cd "${REPO_ROOT:-${PBS_O_WORKDIR:-$PWD}}" || exit
if [[ ! -f train_distributed.py ]]; then
  echo "pbs_train.sh: error: no train_distributed.py in $PWD: call qsub from the repository, or set REPO_ROOT" >&2
  exit 2
fi
# shellcheck source=scripts/common.sh
source scripts/common.sh
[[ -f "${PBS_NODEFILE:-}" || -n "$DRY_RUN" ]] ||
  fail "submit this script with qsub; without PBS, use scripts/cluster_train.sh"
if [[ $# == 0 ]]; then
  read -r -a words <<<"$ARGS"
  set -- "${words[@]}"
fi
export REPO_ROOT="$PWD"
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
split_config "$@"
export PYTHON # also on the nodes, whose python3 may be too old
start "$PYTHON" scripts/supervise.py "$PYTHON" scripts/ssh/launch.py --pbs -- "$config" "${arguments[@]}"
