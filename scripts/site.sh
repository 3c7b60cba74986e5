# shellcheck shell=bash disable=SC2034
# The one place for what differs from cluster to cluster. Every launcher sources it on every node, in the
# repository, before it starts Python; it leaves the command for Python in the array `python`. Everything is
# off or detected: edit what you need.

set +u # modules and conda use variables that are not set

# ---- modules
# module purge
# module load cuda/12.8

# ---- Python: CONDA_ENV, PYTHON, or the .venv of scripts/quickstart.sh
if [[ -n "${CONDA_ENV:-}" ]]; then
  [[ -n "$(command -v conda)" ]] || { echo "site.sh: error: CONDA_ENV=$CONDA_ENV, but no conda here" >&2 && exit 2; }
  # A shell that is not interactive has no conda command to activate with, until this is sourced.
  # shellcheck disable=SC1091
  source "$(conda info --base)/etc/profile.d/conda.sh"
  conda activate "$CONDA_ENV"
  PYTHON="${PYTHON:-python}"
elif [[ -z "${PYTHON:-}" && -x .venv/bin/python ]]; then
  PYTHON="$PWD/.venv/bin/python"
fi
python=("${PYTHON:-python3}")

# ---- container: APPTAINER_IMAGE=/shared/pytorch.sif runs the same job inside of it
if [[ -n "${APPTAINER_IMAGE:-}" ]]; then
  python=(apptainer exec --nv --bind "$PWD" "$APPTAINER_IMAGE" python3)
fi

# ---- memory. On a machine without GPUs, glibc would return each large activation to the kernel and page it
# in again in the next step: the largest single cost of a small network on a CPU.
if [[ ! -e /dev/nvidia0 && ! -e /dev/kfd ]]; then
  export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.trim_threshold=2147483647:glibc.malloc.mmap_max=0}"
fi

# ---- network. NCCL finds NVLink and InfiniBand by itself; set nothing before a test shows you must.
# export NCCL_SOCKET_IFNAME="=ib0"   # interface for the first contact; = exact, ^ excludes
# export GLOO_SOCKET_IFNAME="eth0"   # the same for gloo: exact names only
# export NCCL_IB_HCA="mlx5"          # the InfiniBand adapters to use
# export NCCL_DEBUG=INFO             # says which it uses

set -u
