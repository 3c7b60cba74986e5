#!/usr/bin/env bash
# Stops the cluster of up.sh: kills every process in its namespaces and removes its directory.
#
# Usage: tests/cluster/down.sh
#
# Environment:
#   CLUSTER  the cluster's directory  [/tmp/cluster]

set -euo pipefail

CLUSTER="${CLUSTER:-/tmp/cluster}"

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# pids_in NAMESPACES: the processes in these network namespaces.
pids_in() {
  local entry
  for entry in /proc/[0-9]*/ns/net; do
    if [[ " $* " == *" $(readlink "$entry" 2>/dev/null) "* ]]; then
      entry="${entry#/proc/}"
      echo "${entry%%/*}"
    fi
  done
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  local file namespace namespaces=() pids=()
  [[ -d "$CLUSTER/hosts" ]] || { echo "down.sh: error: no cluster of up.sh in $CLUSTER" >&2 && exit 2; }
  for file in "$CLUSTER"/hosts/*; do
    namespace="$(readlink "/proc/$(<"$file")/ns/net")" || continue
    # After a reboot, it may be another process.
    if grep -qzxF "CLUSTER=$CLUSTER" "/proc/$(<"$file")/environ" 2>/dev/null; then
      namespaces+=("$namespace")
    fi
  done
  while [[ ${#namespaces[@]} -gt 0 ]] && mapfile -t pids < <(pids_in "${namespaces[@]}") && [[ ${#pids[@]} -gt 0 ]]; do
    kill -KILL "${pids[@]}" 2>/dev/null || true
    sleep 0.1
  done
  if [[ -L "$CLUSTER/cgroup/freezer" ]]; then
    find "$(realpath "$CLUSTER/cgroup/freezer")" -depth -type d -exec rmdir {} + || true
  fi
  rm -rf "$CLUSTER"
}

main "$@"
