#!/usr/bin/env bash
# PBS (OpenPBS, PBS Pro, Torque): torchrun on every node of the job, through pbsdsh. Change the directives
# below, or give qsub others on the command line. scripts/supervise.py starts a crashed training again.
#
# Usage: qsub [options of qsub] scripts/pbs/pbs_train.sh    (from the repository; arguments: ARGS)
#        bash scripts/pbs/pbs_train.sh [config] [options of train_distributed.py]    (in qsub -I)
#        bash scripts/pbs/pbs_train.sh --help
#
# Environment (qsub -v NAME=VALUE; and that of scripts/cluster_train.sh and scripts/supervise.py):
#   ARGS       config and options, which not every qsub can pass on as arguments    []
#   REPO_ROOT  this repository                            [where qsub was called]
#   DRY_RUN    1: print the commands only                 []
#
# Examples:
#   qsub scripts/pbs/pbs_train.sh
#   qsub -l select=4:ncpus=32:ngpus=8 -v ARGS="configs/default_config.yaml --epochs 10" scripts/pbs/pbs_train.sh

#PBS -N train
#PBS -l select=2:ncpus=32:ngpus=4
#PBS -l place=scatter
#PBS -j oe
# Torque, instead of the two lines with -l:
##PBS -l nodes=2:ppn=32:gpus=4

set -euo pipefail

ARGS="${ARGS:-}"
REPO_ROOT="${REPO_ROOT:-}"
DRY_RUN="${DRY_RUN:-}"

fail() {
  echo "pbs_train.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# on_node DIRECTORY RANK ARGUMENTS...: what pbsdsh starts on each node. It comes without an environment,
# and its exit status must be written down: that of pbsdsh is always 0 (OpenPBS).
on_node() {
  local status=0 asked="" tenths=50 command gpus="${CUDA_VISIBLE_DEVICES-none}"
  trap asked=1 TERM # which pbsdsh hands on to cluster_train.sh, too, and that saves and ends
  # shellcheck disable=SC1091
  source "$1/environment"
  # Which GPUs are the job's differs from node to node.
  unset CUDA_VISIBLE_DEVICES
  [[ "$gpus" == none ]] || export CUDA_VISIBLE_DEVICES="$gpus"
  cd "$REPO_ROOT"
  ON_NODE="$1/$2" scripts/cluster_train.sh "${@:3}" &
  command=$!
  while kill -0 "$command" 2>/dev/null; do
    if [[ -z "$asked" ]]; then
      wait "$command" || true # a signal interrupts it
    elif [[ -d "$1" && ! -s "$1/failed" ]] || ((tenths-- > 0)); then
      sleep 0.1 || true
    else # ranks elsewhere have failed, and those here may wait for them for ever
      scripts/cluster_train.sh --end "$1/$2"
    fi
  done
  wait "$command" || status=$?
  scripts/cluster_train.sh --end "$1/$2"
  echo "$status" >"$1/status$2.new"
  mv "$1/status$2.new" "$1/status$2"
}

# start SLOT RANK HOST ARGUMENTS...: on_node there, until it ends; a failure goes into the file `failed`.
start() {
  local tenths=300 status="none: it did not start, or was killed"
  pbsdsh -n "$1" -- /bin/bash "$REPO_ROOT/scripts/pbs/pbs_train.sh" --node "$directory" "$2" "${@:4}" ||
    # at a signal pbsdsh goes first, and the node may still be saving
    until [[ -s "$directory/status$2" ]] || ((tenths-- == 0)); do
      [[ ! -s "$directory/failed" || "$tenths" -lt 80 ]] || tenths=80 # on_node ends it sooner
      sleep 0.1
    done
  if [[ -s "$directory/status$2" ]]; then
    status="$(<"$directory/status$2")"
  fi
  [[ "$status" == 0 ]] || echo "$3 failed (exit code $status)" >>"$directory/failed"
}

# end: SIGTERM to each pbsdsh, which passes it on; in a batch job, PBS ends what is left.
end() {
  local job
  trap '' INT TERM
  for job in $(jobs -p); do
    pkill -TERM -P "$job" || true
  done
  wait
  rm -rf "$directory"
}

main() {
  case "${1:-}" in
    --help | -h) print_help && exit ;;
    --node) # not in a list with &&, where no error would end it
      on_node "${@:2}"
      exit
      ;;
  esac
  [[ -f "${PBS_NODEFILE:-}" ]] || fail "this is for qsub; without PBS: scripts/cluster_train.sh"
  [[ -n "$(command -v pbsdsh)" ]] || fail "there is no pbsdsh on $(hostname), which starts the nodes"
  if [[ $# == 0 ]]; then
    read -r -a words <<<"$ARGS"
    set -- "${words[@]}"
  fi
  export REPO_ROOT="${REPO_ROOT:-${PBS_O_WORKDIR:-$PWD}}" RUN_NONCE="${RUN_NONCE:-$PBS_JOBID}"
  cd "$REPO_ROOT"
  [[ -f train_distributed.py ]] ||
    fail "no train_distributed.py in $PWD: call qsub from the repository, or set REPO_ROOT"
  local config=configs/default_config.yaml slots rank port
  if [[ $# -gt 0 && "$1" != -* ]]; then
    config="$1"
    shift
  fi
  if [[ -z "$DRY_RUN" && -z "${ATTEMPT:-}" ]]; then
    # shellcheck source=scripts/site.sh
    source scripts/site.sh
    # It calls this file again, with ATTEMPT set, as often as it takes.
    exec "${PYTHON:-python3}" scripts/supervise.py bash scripts/pbs/pbs_train.sh "$config" "$@"
  fi
  # PBS names a host once per slot; its first slot is its number for pbsdsh. This is the first host.
  mapfile -t slots < <(awk '!seen[$0]++ { print NR - 1, $0 }' "$PBS_NODEFILE")
  port="${MASTER_PORT:-$(scripts/cluster_train.sh --free-port)}"
  local master="${MASTER_ADDR:-${slots[0]#* }}" command
  directory="$PWD/logs/pbs_$PBS_JOBID"
  if [[ -z "$DRY_RUN" ]]; then
    trap end EXIT
    trap exit INT
    (umask 077 && mkdir -p "$directory" && scripts/cluster_train.sh --environment >"$directory/environment")
    trap '' TERM # of qdel: PBS sends it to the workers too, which stop and save
  fi
  for rank in "${!slots[@]}"; do
    command=("$config" "${#slots[@]}" "$rank" "$master" "$port" "$@")
    printf '$ pbsdsh -n %s -- %s' "${slots[rank]%% *}" scripts/cluster_train.sh
    printf ' %q' "${command[@]}"
    echo
    [[ -n "$DRY_RUN" ]] || start "${slots[rank]%% *}" "$rank" "${slots[rank]#* }" "${command[@]}" &
  done
  while [[ -n "$(jobs -r)" && ! -s "$directory/failed" ]]; do
    sleep 0.2 || true
  done
  if [[ -s "$directory/failed" ]]; then
    echo "pbs_train.sh: error: $(head -n 1 "$directory/failed"), so it ends on all nodes" >&2
    exit 1
  fi
}

main "$@"
