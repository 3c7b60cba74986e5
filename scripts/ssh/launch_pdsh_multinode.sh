#!/usr/bin/env bash
# All nodes from one terminal, as launch_torchrun_auto.sh, but pdsh starts them: for many nodes, named as
# for pdsh. Every line on the screen begins with the host it comes from.
#
# Usage: scripts/ssh/launch_pdsh_multinode.sh CONFIG GPUS_PER_NODE HOSTS [options]
#
# HOSTS as for pdsh -w: node[01-16], rack[01-02]-n[1-4], node01,node07. The first one is the master. The
# options, from the first word with a dash on, go to train_distributed.py.
#
# Environment: that of launch_torchrun_auto.sh
#
# Examples:
#   scripts/ssh/launch_pdsh_multinode.sh configs/default_config.yaml 8 'node[01-16]'
#   DRY_RUN=1 scripts/ssh/launch_pdsh_multinode.sh configs/default_config.yaml 8 'rack[01-02]-n[1-4]'

set -euo pipefail

fail() {
  echo "launch_pdsh_multinode.sh: error: $*" >&2
  exit 2
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit
  fi
  [[ -n "$(command -v pdsh)" ]] || fail "there is no pdsh here: use launch_torchrun_auto.sh"
  [[ $# -gt 2 && "$3" != -* ]] || fail "no HOSTS: CONFIG GPUS_PER_NODE HOSTS [options]"
  local hosts
  mapfile -t hosts < <(pdsh -R exec -f 1 -N -w "$3" echo %h)
  [[ ${#hosts[@]} -gt 0 ]] || fail "pdsh finds no hosts in '$3'"
  export FAN_OUT=pdsh
  exec "$(dirname "${BASH_SOURCE[0]}")/launch_torchrun_auto.sh" "$1" "$2" "${hosts[@]}" "${@:4}"
}

main "$@"
