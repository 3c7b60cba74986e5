#!/usr/bin/env bash
# All nodes from one terminal: starts torchrun on each through ssh. Shows what node rank 0 says; what
# each says is in logs/node_HOST.log. Ctrl-C stops and saves, a second one ends all at once. When a node
# fails, or this launcher is killed, everything ends on all nodes.
#
# Usage: scripts/ssh/launch_torchrun_auto.sh CONFIG GPUS_PER_NODE HOST [HOST ...] [options]
#
# Needs ssh to each host without a password, and this repository there under the same path. The
# environment goes along. The options, from the first word with a dash on, go to train_distributed.py.
#
# Environment (and that of scripts/cluster_train.sh):
#   MASTER_ADDR  an address of the first host that the others reach    [its name as given]
#   MASTER_PORT  a free port there                                     [found there]
#   REPO_ROOT    the repository on the hosts                           [the path of this one]
#   FAN_OUT      ssh, or pdsh: as launch_pdsh_multinode.sh             [ssh]
#   DRY_RUN      1: print the commands only                            []
#
# Examples:
#   scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 4 node01 node02
#   NCCL_DEBUG=INFO scripts/ssh/launch_torchrun_auto.sh configs/default_config.yaml 8 a b c --epochs 10

set -euo pipefail

MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-}"
REPO_ROOT="${REPO_ROOT:-}"
FAN_OUT="${FAN_OUT:-ssh}"
DRY_RUN="${DRY_RUN:-}"

fail() {
  echo "launch_torchrun_auto.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

check_hosts() {
  local host seen=" "
  [[ $# -gt 0 ]] || fail "on which hosts? CONFIG GPUS_PER_NODE HOST [HOST ...] [options]"
  for host in "$@"; do
    [[ "$host" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "'$host' is no host name"
    [[ "$seen" != *" $host "* ]] || fail "$host is named twice"
    seen+="$host "
  done
}

# start CONFIG MASTER PORT OPTIONS...: node.sh for each of the hosts; it knows when to end. In a session
# of its own, where neither Ctrl-C nor a terminal that closes ends it.
start() {
  local config="$1" options=("${@:2}") rank command
  local train=(env "NPROC_PER_NODE=$NPROC_PER_NODE" scripts/cluster_train.sh)
  if [[ "$FAN_OUT" == pdsh ]]; then
    options=("${options[@]//%/%%}")
    local list="${hosts[*]}"
    command=(pdsh -R exec -f "${#hosts[@]}" -w "${list// /,}" scripts/ssh/node.sh %h
      "${train[@]}" "${config//%/%%}" "${#hosts[@]}" %n "${options[@]}")
    show "${command[@]}"
    if [[ -z "$DRY_RUN" ]]; then
      setsid "${command[@]}" {line}>&- &
      pids+=($!)
    fi
    return
  fi
  for rank in "${!hosts[@]}"; do
    command=(scripts/ssh/node.sh "${hosts[rank]}" "${train[@]}" "$config" "${#hosts[@]}" "$rank"
      "${options[@]}")
    show "${command[@]}"
    [[ -z "$DRY_RUN" ]] || continue
    if [[ "$rank" == 0 ]]; then
      setsid "${command[@]}" {line}>&- &
    else
      setsid "${command[@]}" >/dev/null {line}>&- &
    fi
    pids+=($!)
  done
}

# running: is anything of what start() started? (Ctrl-C would end the subshell of "$(jobs -r)".)
running() {
  local pid
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      return 0
    fi
  done
  return 1
}

show() {
  echo "\$$(printf ' %q' "$@")"
}

# stop: the first Ctrl-C, or a terminal that closes.
stop() {
  touch "$LAUNCH_DIR/stop"
  echo "Stopping all nodes, they save first; Ctrl-C again ends them at once" >&2 || true
  trap end INT TERM
}

# end: lets go of the line, which ends everything on all nodes.
end() {
  exec {line}>&-
  trap '' INT TERM
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || fail "CONFIG GPUS_PER_NODE HOST ...: '${2:-}' is no number of GPUs"
  local config="$1" port="$MASTER_PORT" host status pid ended=0
  NPROC_PER_NODE="$2"
  shift 2
  hosts=() pids=()
  while [[ $# -gt 0 && "$1" != -* ]]; do
    hosts+=("$1")
    shift
  done
  check_hosts "${hosts[@]}"
  cd "$(dirname "${BASH_SOURCE[0]}")/../.."
  if [[ -z "$port" && -n "$DRY_RUN" ]]; then
    port=FREE_PORT
  elif [[ -z "$port" ]]; then
    port="$(scripts/ssh/node.sh --free-port "${hosts[0]}" | tail -n 1)" || true
    [[ "$port" =~ ^[0-9]+$ ]] || fail "${hosts[0]} cannot be asked for a port: does 'ssh ${hosts[0]}' work?"
  fi
  mkdir -p logs && [[ -w logs ]] || fail "cannot write to $PWD/logs"
  LAUNCH_DIR="$(mktemp -d)"
  trap 'rm -rf "$LAUNCH_DIR"' EXIT
  RUN_NONCE="${RUN_NONCE:-$(hostname):$LAUNCH_DIR}"
  export LAUNCH_DIR RUN_NONCE
  mkfifo "$LAUNCH_DIR/line"
  touch "$LAUNCH_DIR/failed"
  exec {line}<>"$LAUNCH_DIR/line" # we alone hold it, and let go of it even when killed
  trap stop INT TERM HUP
  start "$config" "${MASTER_ADDR:-${hosts[0]}}" "$port" "$@"
  [[ -z "$DRY_RUN" ]] || exit 0
  trap '' PIPE # of a `tee` behind us, which Ctrl-C has ended
  while running && [[ ! -s "$LAUNCH_DIR/failed" ]]; do
    sleep 0.2 || true # Ctrl-C ends it too
  done
  trap '' INT TERM HUP
  end
  for pid in "${pids[@]}"; do
    wait "$pid" || ended=$?
  done
  if read -r host status <"$LAUNCH_DIR/failed"; then
    echo "launch_torchrun_auto.sh: error: $host failed (exit code $status); what ran elsewhere was" \
      "stopped. The end of logs/node_$host.log:" >&2
    tail -n 15 "logs/node_$host.log" | sed 's/^/  /' >&2
    exit 1
  fi
  if [[ "$ended" != 0 ]]; then
    echo "launch_torchrun_auto.sh: error: what started the nodes was ended (exit code $ended)" >&2
    exit "$ended"
  fi
}

main "$@"
