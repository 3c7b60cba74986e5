# shellcheck shell=bash disable=SC2034
# For all launchers, which source this file first: --help prints the comment at their top.

set -euo pipefail
unset CDPATH PYTHONSAFEPATH # they change what cd and import find
trap '' QUIT                # ranks print their stacks; what runs before them ignores it

fail() {
  echo "${0##*/}: error: $*" >&2
  exit 2
}

# start COMMAND ...: prints the command; unless DRY_RUN is set, it replaces this script.
start() {
  local command=("$@")
  if [[ -n "${TRAIN_SCRIPT:-}" && "$*" != *"$TRAIN_SCRIPT"* ]]; then # the nodes find it in the environment
    command=("TRAIN_SCRIPT=$TRAIN_SCRIPT" "$@")
  fi
  echo "\$$(printf ' %q' "${command[@]}")"
  check_python "$1"
  [[ -n "$DRY_RUN" ]] || exec "$@"
}

check_python() {
  [[ -n "$DRY_RUN$(command -v "$1")" ]] || fail "$1 cannot be executed here: set PYTHON"
}

# check_slurm_job: for the scripts that sbatch starts.
check_slurm_job() {
  [[ -n "${SLURM_JOB_ID:-}$DRY_RUN" ]] ||
    fail "submit this script with sbatch; without Slurm, use scripts/cluster_train.sh"
  [[ -z "${SLURM_HET_SIZE:-}" ]] ||
    fail "this is a heterogeneous job, of which srun would use the first component only: request all nodes alike"
}

# own_directory PATH: makes it, unless it exists; fails if another user has made it or could write to it.
own_directory() {
  mkdir -m 700 -- "$1" 2>/dev/null || true
  [[ ! -L "$1" && -O "$1" && "$(stat -c %A -- "$1")" == d????-??-? ]] ||
    fail "$(hostname): $1 cannot be made, or is open to other users: use another directory"
}

# takes OPTION: whether TRAIN_SCRIPT passes it to a function such as argparse's add_argument() or click's
# option(), or has the trainer's options, because it calls main() of train_distributed.
takes() {
  local comment='#[^\n]*+' quote="[\"']"
  local declares="^[^#\n]*(add|arg|option)\w*\(([^()#]|$comment)*?$quote$1$quote"
  local has_main='^ *from train_distributed import (\([^)]*|[^\n(]*)\bmain\b|^ *import train_distributed\b(?s:.*)\.main\('
  [[ "$TRAIN_SCRIPT" -ef train_distributed.py ]] || grep -qsPz -e "(?m)$declares|$has_main" -- "$TRAIN_SCRIPT"
}

# split_config [CONFIG] [OPTION ...]: sets `config`, "" if none is given, and the array `arguments` to the options.
# Fails if there is no such file.
split_config() {
  config=""
  arguments=("$@")
  if [[ $# -gt 0 && "$1" != -* ]]; then
    config="$1"
    arguments=("${@:2}")
  fi
  [[ -z "$config" || -f "$config" || "$config" == *%a* ]] || fail "there is no config $config in $PWD"
}

# add_option OPTION VALUE: puts it before `arguments`, if the user has given the value, and the script takes it.
add_option() {
  if [[ -n "$2" ]] && takes "$1"; then
    arguments=("$1" "$2" "${arguments[@]}")
  elif [[ -n "$2" ]]; then
    echo "${0##*/}: $TRAIN_SCRIPT has no option $1, so $2 is not passed to it" >&2
  fi
}

# set_program [CONFIG] [OPTION ...]: sets the arrays `script`, to what runs a rank, and `arguments`.
set_program() {
  split_config "$@"
  local first_line=""
  script=(scripts/guard.py "$TRAIN_SCRIPT")
  case "$TRAIN_SCRIPT" in
    "-m "*) script=(scripts/guard.py -m "${TRAIN_SCRIPT#-m }") ;;
    *)
      [[ -f "$TRAIN_SCRIPT" ]] || fail "there is no TRAIN_SCRIPT $TRAIN_SCRIPT in $PWD"
      IFS= read -r first_line <"$TRAIN_SCRIPT" || true
      [[ "$TRAIN_SCRIPT" == *.py || "$first_line" == "#!"*python* ]] ||
        fail "TRAIN_SCRIPT $TRAIN_SCRIPT is not a script of Python: name the one that it starts"
      ;;
  esac
  if [[ "${arguments[0]:-}" == -- ]]; then # the script gets what follows, and nothing else
    arguments=("${arguments[@]:1}")
    return
  fi
  add_option --distributed-backend "$BACKEND"
  add_option --config "$config"
}

if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  exit
fi
[[ "$(uname) $((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 44))" == "Linux 1" ]] ||
  fail "this needs Linux and bash 4.4 or newer, not $(uname) and bash $BASH_VERSION; elsewhere, use torchrun itself"
[[ -x "${BASH_SOURCE[0]%/*}/cluster_train.sh" ]] ||
  fail "scripts/cluster_train.sh cannot be executed: chmod +x *.sh scripts/*.sh scripts/*.py scripts/*/*, if the" \
    "execute bits are lost; otherwise, use a directory that is not mounted with noexec"
