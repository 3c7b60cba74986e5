#!/usr/bin/env bash
# Starts one of several machines by hand: call it on each machine, in any order, with the same arguments
# except NODE_RANK. The first machines wait for the others.
#
# Usage: scripts/ssh/launch_torchrun_multinode.sh CONFIG GPUS_PER_NODE NODES NODE_RANK MASTER_ADDR [options]
#
# MASTER_ADDR is a name or address of node rank 0 that all machines can reach. All arguments from the
# first one with a dash on are options of train_distributed.py.
#
# Environment (see also scripts/cluster_train.sh):
#   MASTER_PORT  a free port of node rank 0, the same in all calls [29400]
#
# Examples:
#   scripts/ssh/launch_torchrun_multinode.sh configs/default_config.yaml 4 2 0 node01    # on node01
#   scripts/ssh/launch_torchrun_multinode.sh configs/default_config.yaml 4 2 1 node01    # on node02

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MASTER_PORT="${MASTER_PORT:-29400}"

usage="CONFIG GPUS_PER_NODE NODES NODE_RANK MASTER_ADDR"
[[ $# -gt 4 && "$1" != -* ]] || fail "the arguments are $usage [options]"
[[ "$2 $3 $4" =~ ^[1-9][0-9]*\ [1-9][0-9]*\ [0-9]+$ ]] ||
  fail "$usage: '$2', '$3' and '$4' should be numbers"
(($4 < $3)) || fail "$usage: of $3 nodes, the ranks are 0 to $(($3 - 1)), not $4"
[[ "$5" =~ ^[A-Za-z0-9] ]] || fail "$usage: '$5' is not a MASTER_ADDR"
export NPROC_PER_NODE="$2"
exec "$(dirname "${BASH_SOURCE[0]}")/../cluster_train.sh" "$1" "$3" "$4" "$5" "$MASTER_PORT" "${@:6}"
