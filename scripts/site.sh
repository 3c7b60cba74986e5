# shellcheck shell=bash disable=SC2034
# What differs between clusters: edit what you need. Each launcher reads this file on every node, in the
# repository (see scripts/environment.sh). If a line that loads a module fails, the launch ends.

# ---- modules, and the environment: else CONDA_ENV, PYTHON, the active environment, or .venv is used
# module purge
# module load cuda/12.8
# CONDA_ENV=train

# ---- Pyxis and Enroot: image, directories that it sees, and the container's Python. PYTHON is then for supervise.py.
# srun+=(--container-image=/shared/pytorch.sqsh --container-mounts="$PWD,/data" --container-workdir="$PWD")
# python=(python3)

# ---- caches of compiled kernels: PyTorch puts them on each node's own disk (TMPDIR or /tmp)
# export TORCHINDUCTOR_CACHE_DIR="/scratch/$USER/torch_cache"    # kept between jobs, if TMPDIR is not

# ---- network. NCCL detects NVLink and InfiniBand; set a variable only if a test shows that you must.
# export NCCL_SOCKET_IFNAME="=ib0"   # interface for bootstrap; "=" exact name, "^" exclude
# export GLOO_SOCKET_IFNAME="eth0"   # the same for gloo; exact names only
# export NCCL_IB_HCA="mlx5"          # the InfiniBand adapters to use
# export NCCL_DEBUG=INFO             # logs which adapters NCCL uses
# export NCCL_NET_GDR_LEVEL=PHB      # how far from the adapter a GPU may be for GPUDirect (docs/LAUNCH.md)
