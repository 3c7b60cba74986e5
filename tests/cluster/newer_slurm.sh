#!/usr/bin/env bash
# Unpacks the Slurm of a newer Debian into a directory, for up.sh's SLURM_ROOT: slurmctld, slurmd, the
# client commands, munge and the libraries that they need (30 MB to download). Nothing is installed.
#
# Usage: tests/cluster/newer_slurm.sh DIRECTORY [Debian suite]      (trixie: Slurm 24.11)
#
# Examples:
#   tests/cluster/newer_slurm.sh /tmp/slurm-trixie && SLURM_ROOT=/tmp/slurm-trixie tests/cluster/up.sh 2
#   tests/cluster/on.sh login sinfo --version

set -euo pipefail

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

main() {
  if [[ $# -eq 0 || "$1" == --help || "$1" == -h ]]; then
    print_help
    exit
  fi
  local root suite="${2:-trixie}" keys=/usr/share/keyrings/debian-archive-keyring.gpg package
  mkdir -p "$1"
  root="$(realpath "$1")"
  mkdir -p "$root"/apt/{lists,cache/archives}/partial
  touch "$root/apt/status" # no package is installed: download the dependencies too
  echo "deb [signed-by=$keys] http://deb.debian.org/debian $suite main" >"$root/apt/sources.list"
  local apt=(apt-get -q -o Dir::State="$root/apt" -o Dir::State::status="$root/apt/status"
    -o Dir::Cache="$root/apt/cache" -o Dir::Etc::sourcelist="$root/apt/sources.list"
    -o Dir::Etc::sourceparts=- -o Acquire::Languages=none -o Acquire::Retries=3
    -o APT::Sandbox::User=root -o APT::Install-Recommends=false)
  "${apt[@]}" -o APT::Update::Error-Mode=any update
  "${apt[@]}" install --yes --download-only slurmctld slurmd slurm-client munge
  for package in "$root"/apt/cache/archives/*.deb; do
    dpkg-deb --extract "$package" "$root"
  done
  rm -r "$root/apt"
}

main "$@"
