# shellcheck shell=bash disable=SC2034
# Site configuration: all cluster-specific settings are here. Every launcher sources this file on every
# node, in the repository, before it starts Python, and uses the array `python` as its Python command. By
# default everything is off or detected automatically: edit what you need. The launcher defines `fail`.

# A job submitted from within a training has inherited that training's variables, or those of one of its
# ranks. Then ATTEMPT_ID, which supervise.py begins with the id of its job, is another job's, or missing.
job="${SLURM_JOB_ID:-${PBS_JOBID:-}}"
if [[ -n "$job" && -n "${ATTEMPT_ID:-}${RANK:-}" && "${ATTEMPT_ID:-}" != "$job"[.-]* ]]; then
  unset ATTEMPT ATTEMPT_ID DEADLINE STATUS_FILE FAILURE_FILE STOP_FILE EVENTS_FILE NODES_FILE EXCLUDED_NODES \
    STORE_KEY CHECK_RESUME HANG_TIMEOUT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE "${!TORCHELASTIC_@}"
  MASTER_ADDR="" MASTER_PORT=""
fi

set +eu # modules and conda use unset variables
# A line that loads a module and fails ends the launch; others may fail harmlessly. The line is read from this
# file, because BASH_COMMAND would be the last command inside the function `module`.
trap '[[ $BASH_SOURCE != */site.sh ]] || site_failed $LINENO "$(sed -n "${LINENO}p" scripts/site.sh)"' ERR
site_failed() {
  local text="line $1 of scripts/site.sh failed: $2"
  [[ "$2" != *module\ * ]] || fail "$text"
  echo "WARNING: $(hostname): $text" >&2
}

# ---- modules. Over ssh and under PBS there is no `module`: the first call loads the site's.
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
# module purge
# module load cuda/12.8

# ---- Python: CONDA_ENV, PYTHON, the active environment (conda's `base` is active everywhere), or .venv
if [[ -n "${CONDA_ENV:-}" ]]; then
  [[ -n "$(command -v conda)" ]] || fail "CONDA_ENV=$CONDA_ENV, but no conda here: add it to PATH or load its module"
  # A non-interactive shell must source this before `conda activate` works.
  # shellcheck disable=SC1091
  source "$(conda info --base)/etc/profile.d/conda.sh"
  conda activate "$CONDA_ENV" 2>/dev/null ||
    fail "Failed to activate conda environment $CONDA_ENV: try \`conda activate $CONDA_ENV\` on this host"
  PYTHON="${PYTHON:-python}"
else
  conda="${CONDA_PREFIX:-}"
  [[ "${CONDA_DEFAULT_ENV:-}" != base ]] || conda=""
  for environment in "${VIRTUAL_ENV:-}" "$conda" "$PWD/.venv"; do
    [[ -n "${PYTHON:-}" || ! -x "$environment/bin/python" ]] || PYTHON="$environment/bin/python"
  done
fi
PYTHON="${PYTHON:-python3}" # for what runs outside the container
python=("$PYTHON")          # for the ranks

# ---- container: APPTAINER_IMAGE=/shared/pytorch.sif runs the ranks in that image. Apptainer itself reads
# APPTAINER_BIND=/data,/scratch, for more directories than this repository.
if [[ -n "${APPTAINER_IMAGE:-}" ]]; then
  "${python[@]}" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null ||
    fail "${python[*]} is not Python 3.8 or newer, which the launchers need outside the container: set PYTHON"
  python=(apptainer exec --nv --bind "$PWD" "$APPTAINER_IMAGE" python3)
fi

# ---- Slurm: all steps are started with this command. Without --export=ALL, they would inherit
# `sbatch --export=NONE` and lose the variables that the launcher sets.
srun=(srun --export=ALL)
# Pyxis and Enroot: image, directories that it sees, and the container's Python. PYTHON is then for supervise.py.
# srun+=(--container-image=/shared/pytorch.sqsh --container-mounts="$PWD,/data" --container-workdir="$PWD")
# python=(python3)

# ---- caches of compiled kernels: guard.py puts them on each node's own disk (TMPDIR or /tmp)
# export TORCHINDUCTOR_CACHE_DIR="/scratch/$USER/torch_cache"    # kept between jobs, if TMPDIR is not

# ---- network. NCCL detects NVLink and InfiniBand; set a variable only if a test shows that you must.
# export NCCL_SOCKET_IFNAME="=ib0"   # interface for bootstrap; "=" exact name, "^" exclude
# export GLOO_SOCKET_IFNAME="eth0"   # the same for gloo; exact names only
# export NCCL_IB_HCA="mlx5"          # the InfiniBand adapters to use
# export NCCL_DEBUG=INFO             # logs which adapters NCCL uses
# export NCCL_NET_GDR_LEVEL=PHB      # how far from the adapter a GPU may be for GPUDirect (docs/LAUNCH.md)

trap - ERR
set -eu
