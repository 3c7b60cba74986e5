# shellcheck shell=bash
# For the launchers that are not batch scripts: --help prints the comment at their top, and `fail` prints an
# error.

set -euo pipefail
unset CDPATH PYTHONSAFEPATH # they change what cd and import find
trap '' QUIT                # ranks print their stacks; what runs before them ignores it

fail() {
  echo "${0##*/}: error: $*" >&2
  exit 2
}

if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  exit
fi
[[ "$(uname) $((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 44))" == "Linux 1" ]] ||
  fail "this needs Linux and bash 4.4 or newer, not $(uname) and bash $BASH_VERSION; elsewhere, use torchrun itself"
