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
#   DRY_RUN    1: only print the commands (outside a job, for one node)    []
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

set -euo pipefail
unset CDPATH PYTHONSAFEPATH # they change what cd and import find

ARGS="${ARGS:-}"
REPO_ROOT="${REPO_ROOT:-}"
LOG_DIR="${LOG_DIR:-logs}"
DRY_RUN="${DRY_RUN:-}"

fail() {
  echo "pbs_train.sh: error: $*" >&2
  exit 2
}

# on_node DIRECTORY RANK: what pbsdsh starts on each node, with almost no environment. It writes the exit
# code to a file, because pbsdsh always returns 0 (OpenPBS).
on_node() {
  local status=0
  trap : TERM # qdel sends it to every process of this session; node.py forwards it
  cd "$(dirname "${BASH_SOURCE[0]}")/../.."
  exec < <(requests "$@")
  python3 scripts/ssh/node.py || status=$?
  kill -KILL "$!" 2>/dev/null || true
  echo "$status" >"$1/new$2" && mv "$1/new$2" "$1/status$2"
}

# requests DIRECTORY RANK: prints the input of node.py.
requests() {
  trap '' TERM
  cat "$1/request$2"
  rm "$1/request$2" # it contains the environment
  while [[ -d "$1" && ! -e "$1/failed" ]]; do
    sleep 0.5
  done
  echo end
}

# start SLOT RANK HOST COMMAND...: runs on_node there until it exits. The first nonzero exit code is written
# to the file `failed`, which stops the other nodes.
start() {
  local status=255 tenths=300 # 255 if it does not start or is killed
  (umask 077 && "${PYTHON:-python3}" scripts/ssh/node.py --request "${@:4}" >"$directory/request$2")
  pbsdsh -n "$1" -- /bin/bash "$PWD/scripts/pbs/pbs_train.sh" --node "$directory" "$2" ||
    until [[ -s "$directory/status$2" ]] || ((tenths-- == 0)); do # after a signal, pbsdsh exits first
      sleep 0.1
      kill -0 "$PPID" 2>/dev/null || break # supervise.py has exited, so the job is over
    done
  [[ ! -s "$directory/status$2" ]] || status="$(<"$directory/status$2")"
  if [[ "$status" != 0 ]] && (set -C && echo "$status" >"$directory/failed") 2>/dev/null; then
    echo "pbs_train.sh: error: $3 failed (exit code $status), so all nodes were stopped" >&2
  fi
}

# end: stops the nodes, which still run after Ctrl-C.
end() {
  trap '' INT TERM
  touch "$directory/failed"
  wait
  rm -rf "$directory"
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit
  elif [[ "${1:-}" == --node ]]; then
    on_node "${@:2}"
    exit
  fi
  local slots # the host of each slot, as PBS lists them
  if [[ -f "${PBS_NODEFILE:-}" ]]; then
    slots="$(<"$PBS_NODEFILE")"
    [[ -n "$(command -v pbsdsh)" ]] || fail "cannot find pbsdsh on $(hostname)"
  elif [[ -n "$DRY_RUN" ]]; then
    slots=NODE
  else
    fail "submit this script with qsub; without PBS, use scripts/cluster_train.sh"
  fi
  if [[ $# == 0 ]]; then
    read -r -a words <<<"$ARGS"
    set -- "${words[@]}"
  fi
  export REPO_ROOT="${REPO_ROOT:-${PBS_O_WORKDIR:-$PWD}}"
  cd "$REPO_ROOT"
  [[ -f train_distributed.py ]] ||
    fail "no train_distributed.py in $PWD: call qsub from the repository, or set REPO_ROOT"
  # shellcheck source=scripts/site.sh
  source scripts/site.sh
  local config=configs/default_config.yaml hosts slot port rank command
  if [[ $# -gt 0 && "$1" != -* ]]; then
    config="$1"
    shift
  fi
  if [[ -z "$DRY_RUN" && -z "${ATTEMPT:-}" ]]; then
    # supervise.py calls this file again, with ATTEMPT set, for each attempt.
    exec "${PYTHON:-python3}" scripts/supervise.py bash scripts/pbs/pbs_train.sh "$config" "$@"
  fi
  mapfile -t hosts < <(awk '!seen[$1]++ { print $1 }' <<<"$slots")
  port="${MASTER_PORT:-$("${PYTHON:-python3}" scripts/guard.py --free-port | tail -n 1)}" # this is the first host
  directory="$(realpath -m "$LOG_DIR")/pbs_${PBS_JOBID:-dry_run}"
  if [[ -z "$DRY_RUN" ]]; then
    trap end EXIT
    trap exit INT
    (umask 077 && mkdir -p "$directory")
    trap '' TERM # qdel sends it to each node.py as well, so the ranks save and stop
  fi
  for rank in "${!hosts[@]}"; do
    # PBS lists a host once per slot; pbsdsh takes the number of a slot.
    slot="$(awk -v host="${hosts[rank]}" '$1 == host { print NR - 1; exit }' <<<"$slots")"
    command=(scripts/cluster_train.sh "$config" "${#hosts[@]}" "$rank" "${MASTER_ADDR:-${hosts[0]}}" "$port" "$@")
    echo "\$ pbsdsh -n $slot --$(printf ' %q' "${command[@]}")"
    [[ -n "$DRY_RUN" ]] || start "$slot" "$rank" "${hosts[rank]}" "${command[@]}" &
  done
  wait
  [[ ! -s "$directory/failed" ]] || exit "$(<"$directory/failed")"
}

main "$@"
