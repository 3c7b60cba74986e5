# shellcheck shell=bash disable=SC2034
# Each launcher sources this file on every node, in the repository, before it starts Python. It reads
# scripts/site.sh, and sets the arrays `python`, the command for ranks, and `srun`, that for all steps; and
# PYTHON, for what runs outside a container. The launcher defines `fail`.
#
# Environment:
#   CONDA_ENV        the conda environment to activate                        []
#   PYTHON           the Python to use                                        [active environment, .venv, python3]
#   APPTAINER_IMAGE  such as /shared/pytorch.sif: runs the ranks in that image. Apptainer itself reads
#                    APPTAINER_BIND=/data,/scratch, for more directories than this repository    []

# A job submitted from within a training has inherited that training's variables, or those of one of its
# ranks. Then ATTEMPT_ID, which supervise.py begins with the id of its job, is another job's, or missing.
job="${SLURM_JOB_ID:-${PBS_JOBID:-}}"
if [[ -n "$job" && -n "${ATTEMPT_ID:-}${RANK:-}" && "${ATTEMPT_ID:-}" != "$job"[.-]* ]]; then
  unset ATTEMPT_ID DEADLINE STATUS_FILE FAILURE_FILE STOP_FILE EVENTS_FILE EXCLUDED_NODES HOST_LIST \
    CHECK_RESUME HANG_TIMEOUT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE "${!TORCHELASTIC_@}"
  MASTER_ADDR="" MASTER_PORT=""
fi

# Without --export=ALL, steps would inherit `sbatch --export=NONE` and lose the variables of the launcher.
srun=(srun --export=ALL)
python=()

# Over ssh and under PBS there is no `module`: the first call loads the site's.
if [[ -z "$(type -t module)" ]]; then
  module() {
    local init words="$*"
    unset -f module
    for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh "${MODULESHOME:-/usr/share/modules}/init/bash"; do
      # shellcheck disable=SC1090
      [[ -n "$(type -t module)" || ! -r "$init" ]] || source "$init"
    done
    [[ -n "$(type -t module)" ]] || fail "module $words: there are no modules here. Source their init file in scripts/site.sh"
    module "$@"
  }
fi

# A line that loads a module and fails ends the launch; others may fail harmlessly. The line is read from the
# file, because BASH_COMMAND would be the last command inside the function `module`.
site_failed() {
  local text="line $1 of scripts/site.sh failed: $2"
  [[ "$2" != *module\ * ]] || fail "$text"
  echo "WARNING: $(hostname): $text" >&2
}
set +eu # modules and conda use unset variables
trap '[[ $BASH_SOURCE != */site.sh ]] || site_failed $LINENO "$(sed -n "${LINENO}p" scripts/site.sh)"' ERR
# shellcheck source=scripts/site.sh
source scripts/site.sh
trap - ERR

if [[ -n "${CONDA_ENV:-}" ]]; then
  [[ -n "$(command -v conda)" ]] || fail "CONDA_ENV=$CONDA_ENV, but no conda here: add it to PATH or load its module"
  # A non-interactive shell must source this before `conda activate` works.
  # shellcheck disable=SC1091
  source "$(conda info --base)/etc/profile.d/conda.sh"
  conda activate "$CONDA_ENV" 2>/dev/null ||
    fail "Failed to activate conda environment $CONDA_ENV: try \`conda activate $CONDA_ENV\` on this host"
  PYTHON="${PYTHON:-python}"
else
  conda="${CONDA_PREFIX:-}" # conda's `base` is active everywhere
  [[ "${CONDA_DEFAULT_ENV:-}" != base ]] || conda=""
  for environment in "${VIRTUAL_ENV:-}" "$conda" "$PWD/.venv"; do
    [[ -n "${PYTHON:-}" || ! -x "$environment/bin/python" ]] || PYTHON="$environment/bin/python"
  done
fi
set -eu
PYTHON="${PYTHON:-python3}"
if [[ -n "${APPTAINER_IMAGE:-}" ]]; then
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null ||
    fail "$PYTHON is not Python 3.8 or newer, which the launchers need outside the container: set PYTHON"
  python=(apptainer exec --nv --bind "$PWD" "$APPTAINER_IMAGE" python3)
fi
[[ ${#python[@]} -gt 0 ]] || python=("$PYTHON")
