#!/usr/bin/env bash
# From a fresh machine to a trained model: creates a virtual environment in .venv, installs requirements.txt,
# trains SimpleConvNet on handwritten digits on all GPUs (or with 2 CPU processes), and plots the metrics
# in runs/quickstart.
# A second run reuses the environment and resumes the training.
#
# Usage: scripts/quickstart.sh [--install-only] [options of train_distributed.py]
#
# Environment:
#   PYTHON          Python 3.10 or newer, for the environment [python3]
#   NPROC_PER_NODE  number of processes                       [number of GPUs, or 2 without GPUs]
#   TORCH_INDEX     where PyTorch comes from: a URL, or cpu, cu126 ... of download.pytorch.org  []
#
# Examples:
#   scripts/quickstart.sh
#   scripts/quickstart.sh --epochs 10
#   TORCH_INDEX=cpu scripts/quickstart.sh
#   scripts/quickstart.sh --checkpoint-dir runs/adamw --optimizer adamw --lr 0.001

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PYTHON="${PYTHON:-python3}"
NPROC_PER_NODE="${NPROC_PER_NODE:-}"
TORCH_INDEX="${TORCH_INDEX:-}"

install() {
  if [[ ! -x .venv/bin/pip ]]; then
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
      fail "PYTHON=$PYTHON is not Python 3.10 or newer: load a module, or set PYTHON"
    echo "Creating .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv .venv || fail "$PYTHON cannot create .venv: on Debian, install python3-venv"
  fi
  # Variables that make pip install elsewhere, or find packages elsewhere, are for other environments.
  local pip=(env -u PYTHONPATH -u PIP_TARGET -u PIP_PREFIX PIP_USER=0 .venv/bin/pip) torch
  pip+=(--quiet --disable-pip-version-check)
  if [[ -n "$TORCH_INDEX" ]] && ! grep -qsxF -e "$TORCH_INDEX" .venv/installed-torch-index.txt; then
    [[ "$TORCH_INDEX" == *://* ]] || TORCH_INDEX="https://download.pytorch.org/whl/$TORCH_INDEX"
    echo "Installing PyTorch from $TORCH_INDEX into .venv"
    mapfile -t torch < <(grep -o '^torch[^ ]*' requirements.txt)
    rm -f .venv/installed-requirements.txt # so that the next call repairs what fails here
    "${pip[@]}" uninstall --yes torch torchvision
    "${pip[@]}" install --index-url "$TORCH_INDEX" "${torch[@]}" ||
      fail "pip could not install PyTorch from TORCH_INDEX=$TORCH_INDEX: see its message above"
  fi
  if ! cmp -s requirements.txt .venv/installed-requirements.txt; then
    echo "Installing requirements.txt into .venv (if PyTorch is missing: 5 GB, some minutes)"
    "${pip[@]}" install -r requirements.txt ||
      fail "pip could not install requirements.txt: see its message above"
    env -u PYTHONPATH .venv/bin/python -c '
import torch, torchvision
torchvision.ops.nms(torch.eye(4), torch.ones(4), 0.5)' || # a pair that does not fit has no operators
      fail "torch and torchvision in .venv do not work together: remove .venv, and try another TORCH_INDEX, or none"
    [[ -z "$TORCH_INDEX" ]] || printf '%s\n' "$TORCH_INDEX" "${TORCH_INDEX##*/}" >.venv/installed-torch-index.txt
    cp requirements.txt .venv/installed-requirements.txt
  fi
}

# train OPTIONS...: sets `run`, the run directory.
train() {
  local options=(--checkpoint-dir runs/quickstart "$@")
  # Check the options here: torchrun would add 40 lines to the error message.
  run="$(.venv/bin/python -c '
import sys, train_distributed as trainer
sys.argv[0] = "quickstart.sh"
try:
    print(trainer.parse_config(sys.argv[1:]).checkpoint_dir)
except trainer.UserError as error:
    print(f"quickstart.sh: error: {error}", file=sys.stderr)
    sys.exit(2)' "${options[@]}")" || exit 2
  if [[ -z "$NPROC_PER_NODE" ]]; then
    NPROC_PER_NODE="$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)')"
  fi
  PYTHON="$PWD/.venv/bin/python" NPROC_PER_NODE="$NPROC_PER_NODE" \
    scripts/cluster_train.sh configs/default_config.yaml 1 0 localhost "${options[@]}"
}

main() {
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  trap 'echo "quickstart.sh: interrupted; to go on, run the same command again" >&2; exit 130' INT
  install
  if [[ "${1:-}" == --install-only ]]; then
    exit
  fi
  train "$@"
  .venv/bin/python scripts/plot_metrics.py "$run"
  cat <<END

Your model: $run/best.pt   Its metrics: $run/metrics.jsonl, metrics.png
Next:
  scripts/quickstart.sh --epochs 10              continue the same run
  source .venv/bin/activate
  scripts/ssh/launch_singlenode.sh configs/default_config.yaml 2 --dataset mnist --checkpoint-dir runs/mnist
  python train_distributed.py --help             every option
END
}

main "$@"
