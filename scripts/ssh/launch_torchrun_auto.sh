#!/usr/bin/env bash
# Starts torchrun on all nodes from one terminal, by ssh. Shows the output of node rank 0; the output of
# each node is in LOG_DIR/node_HOST.log. Ctrl-C saves and stops; a second Ctrl-C kills all nodes. If a node
# fails or this launcher is killed, all nodes stop.
#
# Usage: scripts/ssh/launch_torchrun_auto.sh CONFIG GPUS_PER_NODE HOST [HOST ...] [options]
#
# Each host needs ssh without a password, python3 or PYTHON (3.8 or newer), and this repository at the
# same path. With NNODES, further hosts are spares: see docs/RELIABILITY.md.
# The environment is passed on, except for variables of the host. CUDA_VISIBLE_DEVICES=2,3 of the shell is for
# each host, so that two runs can use two GPUs each; that of a job is not passed on. All
# arguments from the first one with a dash on are options of train_distributed.py.
#
# Environment (see also scripts/cluster_train.sh):
#   MASTER_ADDR  address of the first host, reachable from all hosts   [its name as given]
#   MASTER_PORT  a port that is free on the first host               [one from 15000 on]
#   REPO_ROOT    path of the repository on the hosts                   [its path here]
#   LOG_DIR      directory for node_HOST.log and the hosts' logs       [logs]
#   DRY_RUN      1: only print the command                             []
#
# Examples:
#   scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 4 node01 node02
#   NCCL_DEBUG=INFO scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 8 a b c --epochs 10

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-}"
REPO_ROOT="${REPO_ROOT:-}"
LOG_DIR="${LOG_DIR:-logs}"
DRY_RUN="${DRY_RUN:-}"

way=()
if [[ "${1:-}" == --pdsh ]]; then # from launch_pdsh_multinode.sh
  way=("$1")
  shift
fi
[[ $# -gt 2 && "$1" != -* ]] || fail "the arguments are CONFIG GPUS_PER_NODE HOST ... [options]"
[[ "$2" =~ ^[1-9][0-9]*$ ]] || fail "CONFIG GPUS_PER_NODE HOST ...: '$2' is not a number of GPUs"
config="$1"
hosts=()
command=(env "NPROC_PER_NODE=$2" scripts/ssh/launch.py "${way[@]}")
shift 2
while [[ $# -gt 0 && "$1" != -* ]]; do
  [[ "$1" =~ ^[A-Za-z0-9][A-Za-z0-9.:_-]*$ ]] ||
    fail "'$1' is not a host name: set another user in ~/.ssh/config, and another path with REPO_ROOT"
  [[ " ${hosts[*]} " != *" $1 "* ]] || fail "$1 is named twice"
  hosts+=("$1")
  shift
done
[[ ${#hosts[@]} -gt 0 ]] || fail "CONFIG GPUS_PER_NODE HOST ...: there is no HOST"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$LOG_DIR" && [[ -w "$LOG_DIR" ]] || fail "cannot write to $LOG_DIR: set LOG_DIR"
start "${command[@]}" "${hosts[@]}" -- "$config" "$@"
