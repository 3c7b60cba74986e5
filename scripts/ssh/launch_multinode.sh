#!/usr/bin/env bash
# Another name of launch_torchrun_multinode.sh: starts one of several machines by hand.
#
# Usage: scripts/ssh/launch_multinode.sh CONFIG GPUS_PER_NODE NODES NODE_RANK MASTER_ADDR [options]
#
# Environment: see launch_torchrun_multinode.sh
#
# Examples:
#   scripts/ssh/launch_multinode.sh configs/default_config.yaml 4 2 0 node01    # on node01
#   scripts/ssh/launch_multinode.sh configs/default_config.yaml 4 2 1 node01    # on node02

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

exec "$(dirname "${BASH_SOURCE[0]}")/launch_torchrun_multinode.sh" "$@"
