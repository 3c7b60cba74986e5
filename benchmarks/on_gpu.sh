#!/usr/bin/env bash
# Checks and measures everything that needs a GPU, without a network: first what is right (hangs, kills,
# exact resume), then what is fast. Writes a report, again after each part, and all output to a .log file
# beside it. A part that fails or exceeds its time limit does not stop the others. Run it again to measure
# the rest: it goes on with the parts that the report lacks.
# Exit code: 0 no part failed, 1 a part failed, 2 user error.
#
# Usage: benchmarks/on_gpu.sh [--cpu] [--only PART...] [--output FILE] [--rounds N] [--minutes N]
#
#   --cpu       rehearsal on the CPU with small sizes: shows that the parts run, not how fast
#   --only      measure these parts again, in this order: doctor tests hang killed resume reproducible
#               distributed bandwidth resnet50-1 resnet50-2 resnet50-4 resnet50-8 convnet
#               convnet-compiled resnet50-compiled peers peers-tuned loader jpeg checkpoints startup
#               tf32 fp16
#   --output    Markdown file [runs/on_gpu.md]
#   --rounds    turns of each contestant, of which the median is shown [5]
#   --minutes   after this time, the remaining parts are left for the next call [20]
#
# It uses all GPUs, and the Python of scripts/site.sh. Relative paths start at the repository.
#
# Examples:
#   benchmarks/on_gpu.sh
#   sbatch --gpus=2 --cpus-per-task=32 --time=30 --wrap "benchmarks/on_gpu.sh"
#   benchmarks/on_gpu.sh --minutes 9
#   benchmarks/on_gpu.sh --only resnet50-1 resnet50-compiled --output resnet50.md
#   benchmarks/on_gpu.sh --cpu

set -euo pipefail

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# scripts/site.sh calls it.
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
  # shellcheck source=scripts/environment.sh
  source scripts/environment.sh
  exec "${python[@]}" benchmarks/on_gpu.py "$@"
}

main "$@"
