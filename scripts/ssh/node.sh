#!/usr/bin/env bash
# Runs a command on a host through ssh, in the repository and the environment of here, for as long as
# the launcher lives. When it ends, or is killed, the command ends there with all that it started.
# For the launchers beside it. What it says goes to logs/node_HOST.log too.
#
# Usage: scripts/ssh/node.sh HOST COMMAND [ARGUMENT ...]
#        scripts/ssh/node.sh --free-port HOST    a port nobody listens to there
#
# Environment:
#   REPO_ROOT   the repository on the host                    [the path of this one]
#   LAUNCH_DIR  of the launcher, here: the pipe `line`, which it holds open as long as all shall run;
#               the file `stop`, once they shall save and end; the file `failed`, who failed     []

set -euo pipefail

REPO_ROOT="${REPO_ROOT:-}"
LAUNCH_DIR="${LAUNCH_DIR:-}"

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ssh=(ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 --)

fail() {
  echo "node.sh: error: $*" >&2
  exit 2
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# The next two run there: bash gets them as text.

# end_all ID: kills whatever has ON_NODE=ID in its environment, whoever its parent is by now.
# shellcheck disable=SC2329
end_all() {
  local pids
  for _ in {1..50}; do
    pids="$(grep -slzxF "ON_NODE=$1" /proc/[0-9]*/environ | tr -dc '0-9\n')"
    [[ -n "$pids" ]] || break
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null
    sleep 0.1
  done
}

# there ID COMMAND...: runs it until it ends or our input does; each line of input asks it to stop.
# shellcheck disable=SC2329
there() {
  local id="$1" command watch status
  ON_NODE="$id" "${@:2}" </dev/null &
  command=$!
  {
    while read -r; do
      kill -TERM "$command"
    done
    kill -TERM "$command"
    read -r -t 5 <> <(:) || true # 5 s for a last save; a `sleep` could outlive us
    end_all "$id"
  } <&0 >/dev/null 2>&1 &
  watch=$!
  wait "$command" 2>/dev/null
  status=$?
  kill "$watch"
  end_all "$id"
  exit "$status"
}

# speak HOST COMMAND...: what bash there shall do, and "stop" when it is time to, while the line is open.
speak() {
  local asked=""
  "$here/../cluster_train.sh" --environment
  declare -f end_all there
  # shellcheck disable=SC2016
  printf 'cd %q || { echo "node.sh: error: $(hostname): the repository is not at the same path here:" \
    "set REPO_ROOT" >&2; exit 2; }\n' "$REPO_ROOT"
  printf '%q ' there "${LAUNCH_DIR:-$$}.$1" "${@:2}"
  echo
  if [[ -n "$LAUNCH_DIR" ]]; then
    # Held open by us for a moment: opening it would wait for a launcher that has gone.
    # shellcheck disable=SC2094
    exec 3<>"$LAUNCH_DIR/line" <"$LAUNCH_DIR/line" 3>&-
  fi
  while read -r -t 0.5 || [[ $? -gt 128 ]]; do # over 128: nothing came; 1: the line is closed
    if [[ -z "$asked" && -e "$LAUNCH_DIR/stop" ]]; then
      asked=1
      echo stop
    fi
  done
}

main() {
  case "${1:-}" in
    --help | -h) print_help && exit ;;
    --free-port) set -- "${2:-}" --free-port ;;
  esac
  local host="${1:-}" status=0
  [[ "$host" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "'$host' is no host name"
  [[ $# -gt 1 ]] || fail "which command? See --help"
  REPO_ROOT="${REPO_ROOT:-$(cd "$here/../.." && pwd)}"
  if [[ "$2" == --free-port ]]; then
    exec "${ssh[@]}" "$host" "$(printf '%q ' bash "$REPO_ROOT/scripts/cluster_train.sh" --free-port \
      "$((15000 + RANDOM % 15000))")"
  fi
  # Only "bash -s" meets the login shell of the host, whichever it is. All else, the environment with
  # its secrets too, goes through the pipe, where no shell splits it and no `ps` shows it.
  cd "$here/../.."
  mkdir -p logs
  exec {words}< <(speak "$@")
  # shellcheck disable=SC2064
  trap "kill $! 2>/dev/null || true" EXIT
  "${ssh[@]}" "$host" exec bash -s <&"$words" |& tee "logs/node_$host.log" || status=$?
  [[ "$status" == 0 || -z "$LAUNCH_DIR" ]] || echo "$host $status" >>"$LAUNCH_DIR/failed"
  exit "$status"
}

main "$@"
