#!/usr/bin/env bash
# Trains on this machine with one rank per GPU.
#
# Usage: scripts/ssh/launch_singlenode.sh CONFIG GPUS [options of train_distributed.py]
#
# Environment: see scripts/cluster_train.sh; DRY_RUN=1 only prints the command
#
# Examples:
#   scripts/ssh/launch_singlenode.sh configs/default_config.yaml 4
#   scripts/ssh/launch_singlenode.sh configs/default_config.yaml 4 --epochs 10

set -euo pipefail

# A copy in each script: sourcing a file would take as many lines.
fail() {
  echo "launch_singlenode.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  [[ $# -gt 1 && "$1" != -* ]] || fail "the arguments are CONFIG GPUS [options]"
  [[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "CONFIG GPUS: '$2' is not a number of GPUs"
  export NPROC_PER_NODE="$2"
  exec "$(dirname "${BASH_SOURCE[0]}")/../cluster_train.sh" "$1" 1 0 localhost "" "${@:3}"
}

main "$@"
