#!/usr/bin/env bash
# Measures everything that needs a GPU, on one GPU and without a network, in at most 20 minutes. Writes the
# section "On a GPU" of docs/PERFORMANCE.md to a file, again after each part, and all output of the
# benchmarks to a .log file beside it. A part that fails or exceeds its time limit does not stop the others.
# Exit code: 0 no part failed, 1 a part failed, 2 user error.
#
# Usage: benchmarks/on_gpu.sh [--cpu] [--only PART...] [--data-dir DIR] [--output FILE] [--minutes N]
#
#   --cpu       rehearsal on the CPU with small sizes: shows that the parts run, not how fast
#   --only      measure these parts, in this order: doctor tests distributed resnet50 convnet
#               convnet-compiled resnet50-compiled checkpoints overhead startup jpeg mnist resnet50-peers
#   --data-dir  directory with MNIST/raw, for the part mnist [data]
#   --output    Markdown file [runs/on_gpu.md]
#   --minutes   after this time, the remaining parts are not measured [20]
#
# It uses the Python of scripts/site.sh. Relative paths start at the repository.
#
# Examples:
#   benchmarks/on_gpu.sh
#   sbatch --gpus=1 --cpus-per-task=16 --time=30 --wrap "benchmarks/on_gpu.sh"
#   benchmarks/on_gpu.sh --only resnet50 resnet50-compiled --output resnet50.md
#   benchmarks/on_gpu.sh --cpu

set -euo pipefail

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

fail() {
  echo "on_gpu.sh: error: $*" >&2
  exit 2
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  # shellcheck source=scripts/site.sh
  source scripts/site.sh
  exec "${python[@]}" benchmarks/on_gpu.py "$@"
}

main "$@"
