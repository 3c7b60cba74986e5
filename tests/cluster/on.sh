#!/usr/bin/env bash
# Runs a command on a host of the cluster of up.sh: on login, where jobs are submitted, or a node.
#
# Usage: tests/cluster/on.sh HOST COMMAND [ARGUMENT ...]
#
# Environment:
#   CLUSTER  the cluster's directory  [/tmp/cluster]
#
# Examples:
#   tests/cluster/on.sh login squeue
#   tests/cluster/on.sh node01 bash

set -euo pipefail

CLUSTER="${CLUSTER:-/tmp/cluster}"

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  if [[ $# -lt 2 || ! -f "$CLUSTER/hosts/$1" ]]; then
    echo "on.sh: error: the arguments are HOST COMMAND; the hosts are in $CLUSTER/hosts" >&2
    exit 2
  fi
  local host="$1" pid
  pid="$(<"$CLUSTER/hosts/$host")"
  export SLURM_CONF="$CLUSTER/slurm.conf" TMPDIR="$CLUSTER/tmp"
  exec nsenter --target "$pid" --net --uts --mount --wd="$PWD" -- "${@:2}"
}

main "$@"
