#!/usr/bin/env bash
# Runs the checks: lint and format of Python and bash, then every test, in the virtual environment of
# scripts/quickstart.sh (created if missing).
#
# Usage: tests/run.sh [--cluster] [--long] [options of pytest]
#        tests/run.sh --versions [3.10 3.12:2.8 ...]
#
# --cluster runs the tests on a real Slurm cluster too, in namespaces of this machine: as root, on
# Debian, whose packages it installs. Without it, they run if the packages are installed. --long runs
# all of the fault suite: hundreds of kills and damaged files, every fault with every launcher. A test
# that takes more than 5 minutes (with --long, an hour) fails. Ctrl-C and SIGTERM end the tests and
# everything that they have started.
#
# --versions runs only tests/versions.py: the trainer's and the guard's tests on the oldest and the
# newest Python and PyTorch, or on those versions: of Python alone, or of Python:PyTorch. It fails if a
# Python is not installed.
#
# Environment:
#   SLURM  a Debian suite whose Slurm the cluster tests run on, for example trixie   []
#
# Examples:
#   tests/run.sh
#   tests/run.sh --cluster
#   tests/run.sh -k resume
#   tests/run.sh --versions
#   SLURM=trixie tests/run.sh --cluster --long tests/cluster/test_slurm.py
#   tests/run.sh --cluster --long tests/faults tests/cluster/test_survival.py

set -euo pipefail

export SLURM="${SLURM:-}"

# By default, pytest keeps the files of three runs: 11 GB.
pytest=(.venv/bin/python -m pytest -q -ra --durations=15 -o tmp_path_retention_count=1)
outputs="" # directory with the output of each session of pytest

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

install_cluster() {
  local packages=(slurm-wlm munge openssh-server pdsh iproute2 nftables environment-modules
    g++ python3-dev)
  if ! dpkg --status "${packages[@]}" &>/dev/null; then
    echo "Installing Debian packages: ${packages[*]}"
    apt-get update -q >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
      --no-install-recommends "${packages[@]}" >/dev/null
  fi
  export CLUSTER_TESTS=required
}

lint() {
  local bin=.venv/bin scripts
  mapfile -t scripts < <(find . -name .venv -prune -o \( -name '*.sh' -o -name '*.slurm' \) -print)
  "$bin/ruff" check .
  "$bin/ruff" format --check .
  "$bin/shellcheck" -x "${scripts[@]}" .ci/run
  "$bin/shfmt" -d -i 2 -ci "${scripts[@]}" .ci/run
}

# Cluster tests mostly wait for Slurm, and launch tests for time limits, so three sessions of pytest share
# the cores. The output of the first two comes last.
run_side_by_side() {
  local cluster=(tests/cluster tests/test_docs.py)
  local launch=(tests/test_{guard,launchers,supervise,check_training,check_resume,doctor_findings}.py)
  local others=(tests "${cluster[@]/#/--ignore=}" "${launch[@]/#/--ignore=}")
  local sessions=() failed=""
  outputs="$(mktemp -d)"
  "${pytest[@]}" "${cluster[@]}" &>"$outputs/cluster" &
  sessions+=("$!")
  "${pytest[@]}" "${launch[@]}" &>"$outputs/launch" &
  sessions+=("$!")
  "${pytest[@]}" "${others[@]}" &
  wait "$!" || failed="$failed others"
  wait "${sessions[0]}" || failed="$failed cluster"
  wait "${sessions[1]}" || failed="$failed launch"
  print_outputs
  if [[ -n "$failed" ]]; then
    echo "run.sh: error: failed:$failed" >&2
    return 1
  fi
}

print_outputs() {
  tail -n +1 "$outputs"/* # each begins with its name
  rm -r "$outputs"
}

# After Ctrl-C, SIGTERM or SIGHUP: each session of pytest ends its test and its clusters.
interrupted() {
  trap '' INT TERM HUP
  if [[ -n "$outputs" ]]; then
    jobs -p | xargs --no-run-if-empty kill -TERM || true # one may have ended
    wait
    print_outputs
  fi
  echo "run.sh: error: interrupted" >&2
  exit 130
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  if [[ "${1:-}" == --versions ]]; then
    exec python3 tests/versions.py "${@:2}"
  fi
  trap interrupted INT TERM HUP
  scripts/quickstart.sh --install-only
  if ! cmp -s tests/requirements.txt .venv/installed-tests-requirements.txt; then
    .venv/bin/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
    cp tests/requirements.txt .venv/installed-tests-requirements.txt
  fi
  while [[ "${1:-}" == --cluster || "${1:-}" == --long ]]; do
    if [[ "$1" == --cluster ]]; then
      install_cluster
    else
      export FAULTS=long PYTEST_TIMEOUT=3600
    fi
    shift
  done
  lint
  if (($# == 0)) && [[ -n "${CLUSTER_TESTS:-}" ]]; then
    run_side_by_side
  else
    exec "${pytest[@]}" "$@"
  fi
}

main "$@"
