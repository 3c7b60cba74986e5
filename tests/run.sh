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
#   VENV   the virtual environment                                                   [.venv]
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

export VENV="${VENV:-.venv}"
export SLURM="${SLURM:-}"

# By default, pytest keeps the files of three runs: 11 GB.
pytest=("$VENV/bin/python" -m pytest -q -ra --durations=15 -o tmp_path_retention_count=1)
output="" # file with the output of a session of pytest in the background

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
  local bin="$VENV/bin" scripts
  mapfile -t scripts < <(find . -name .venv -prune -o \( -name '*.sh' -o -name '*.slurm' \) -print)
  "$bin/ruff" check .
  "$bin/ruff" format --check .
  "$bin/shellcheck" -x "${scripts[@]}" .ci/run
  "$bin/shfmt" -d -i 2 -ci "${scripts[@]}" .ci/run
}

# The cluster tests mostly wait for Slurm, so they run beside the others, with some of those, so that both
# halves take equally long: the faults, but not with --long, which makes hundreds of them. Their output
# comes last.
run_two_halves() {
  local cluster others results=(passed passed)
  local half=(tests/cluster tests/test_docs.py)
  if [[ -z "${FAULTS:-}" ]]; then
    half+=(tests/faults)
  fi
  output="$(mktemp)"
  "${pytest[@]}" "${half[@]}" &>"$output" &
  cluster="$!"
  "${pytest[@]}" tests "${half[@]/#/--ignore=}" &
  others="$!"
  wait "$others" || results[0]=FAILED
  wait "$cluster" || results[1]=FAILED
  print_output
  echo "${half[*]}: ${results[1]}; the others, printed before them: ${results[0]}"
  [[ "${results[*]}" != *FAILED* ]]
}

print_output() {
  cat "$output"
  rm "$output"
}

# After Ctrl-C, SIGTERM or SIGHUP: each session of pytest ends its test and its clusters.
interrupted() {
  trap '' INT TERM HUP
  if [[ -n "$output" ]]; then
    jobs -p | xargs --no-run-if-empty kill -TERM || true # one may have ended
    wait
    print_output
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
  if ! cmp -s tests/requirements.txt "$VENV/installed-tests-requirements.txt"; then
    "$VENV/bin/pip" install --quiet --disable-pip-version-check -r tests/requirements.txt
    cp tests/requirements.txt "$VENV/installed-tests-requirements.txt"
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
    run_two_halves
  else
    exec "${pytest[@]}" "$@"
  fi
}

main "$@"
