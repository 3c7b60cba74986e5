#!/usr/bin/env bash
# Starts all nodes from one terminal, like launch_torchrun_auto.sh, with host names as pdsh expands them.
# Each line of output begins with the name of its host, as that of pdsh does.
#
# Usage: scripts/ssh/launch_pdsh_multinode.sh CONFIG GPUS_PER_NODE HOSTS [options]
#
# HOSTS as for pdsh -w: node[01-16], rack[01-02]-n[1-4], node01,node07. The first host is the master. All
# arguments from the first one with a dash on are options of train_distributed.py.
#
# Environment: see launch_torchrun_auto.sh
#
# Examples:
#   scripts/ssh/launch_pdsh_multinode.sh configs/default_config.yaml 8 'node[01-16]'
#   DRY_RUN=1 scripts/ssh/launch_pdsh_multinode.sh configs/default_config.yaml 8 'rack[01-02]-n[1-4]'

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

[[ -n "$(command -v pdsh)" ]] || fail "pdsh is not installed here: use launch_torchrun_auto.sh"
[[ $# -gt 2 && "$3" != -* ]] || fail "no HOSTS: CONFIG GPUS_PER_NODE HOSTS [options]"
mapfile -t hosts < <(pdsh -R exec -f 1 -N -w "$3" echo %h)
[[ ${#hosts[@]} -gt 0 ]] || fail "pdsh finds no hosts in '$3'"
exec "$(dirname "${BASH_SOURCE[0]}")/launch_torchrun_auto.sh" --pdsh "$1" "$2" "${hosts[@]}" "${@:4}"
