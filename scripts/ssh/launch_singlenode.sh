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

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

[[ $# -gt 1 && "$1" != -* ]] || fail "the arguments are CONFIG GPUS [options]"
[[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "CONFIG GPUS: '$2' is not a number of GPUs"
export NPROC_PER_NODE="$2"
exec "$(dirname "${BASH_SOURCE[0]}")/../cluster_train.sh" "$1" 1 0 localhost "" "${@:3}"
