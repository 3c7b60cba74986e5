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

# pause SECONDS: a `sleep` is a process, which could outlive us.
pause() {
  read -r -t "$1" <> <(:)
}

# there ID COMMAND...: runs it there, where bash gets this as text, until it ends or our input does, of
# which each line is `stop`, or `soon` if there is little time left once the input ends.
# shellcheck disable=SC2329
there() {
  local id="$1" command watch status line asked="" seconds=30
  [[ -z "${ATTEMPT:-}" ]] || seconds=5 # supervise.py may start it again at once
  ON_NODE="$id" "${@:2}" </dev/null &
  command=$!
  {
    while read -r line; do
      if [[ "$line" == stop ]]; then
        asked=1
        kill -TERM "$command"
      else
        seconds=5
      fi
    done
    [[ -n "$asked" ]] || kill -TERM "$command"
    pause "$seconds" # for a last save
    scripts/cluster_train.sh --end "$id"
  } <&0 >/dev/null 2>&1 &
  watch=$!
  wait "$command" 2>/dev/null
  status=$?
  kill "$watch"
  scripts/cluster_train.sh --end "$id"
  exit "$status"
}

# speak HOST COMMAND...: what bash there shall do, and "stop" when it is time to, while the line is open.
speak() {
  local asked="" seconds=30
  "$here/../cluster_train.sh" --environment
  declare -f pause there
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
  if [[ -s "$LAUNCH_DIR/failed" ]]; then
    seconds=5
    echo soon # ranks elsewhere have failed, and those here may wait for them for ever
  elif [[ -e "$LAUNCH_DIR/stop" ]]; then
    seconds=5
    printf '%s\n' stop soon # asked twice
  fi
  exec >&-
  pause "$((seconds + 10))" || true
  pkill -P "$$" -x ssh # it hangs, and hears nothing
}

# end HOST: however we end, the launcher hears of it.
# shellcheck disable=SC2329
end() {
  {
    [[ "$status" == 0 || ! -d "$LAUNCH_DIR" ]] || echo "$1 $status" >>"$LAUNCH_DIR/failed"
    kill "$speaker"
  } 2>/dev/null || true
}

main() {
  case "${1:-}" in
    --help | -h) print_help && exit ;;
    --free-port) set -- "${2:-}" --free-port ;;
  esac
  local host="${1:-}"
  [[ "$host" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "'$host' is no host name"
  [[ $# -gt 1 ]] || fail "which command? See --help"
  REPO_ROOT="${REPO_ROOT:-$(cd "$here/../.." && pwd)}"
  if [[ "$2" == --free-port ]]; then
    exec "${ssh[@]}" "$host" "$(printf '%q ' bash "$REPO_ROOT/scripts/cluster_train.sh" --free-port \
      "$((15000 + RANDOM % 15000))")" </dev/null
  fi
  # Only "bash -s" meets the login shell of the host, whichever it is. All else, the environment with
  # its secrets too, goes through the pipe, where no shell splits it and no `ps` shows it.
  cd "$here/../.."
  mkdir -p logs
  status=143 # if we are killed before we know better
  exec {words}< <(speak "$@")
  speaker=$!
  trap 'end "$host"' EXIT
  # -p: when nobody reads us any more, the log goes on.
  if "${ssh[@]}" "$host" exec bash -s <&"$words" |& tee -p "logs/node_$host.log"; then
    status=0
  else
    status="${PIPESTATUS[0]}" # not of tee
  fi
  exit "$status"
}

main "$@"
