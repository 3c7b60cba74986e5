#!/usr/bin/env bash
# Checks this node with scripts/node_check.py, then starts its ranks with torchrun and scripts/guard.py,
# one per GPU. The launchers call it once per node. Arguments that are left out come from Slurm or PBS.
#
# Usage: scripts/cluster_train.sh [config] [num_nodes] [node_rank] [master_addr] [master_port] [options]
#
# All arguments from the first one with a dash on are options of the training script. It gets --config, and
# --distributed-backend if BACKEND is set, only if it has these options. After --, it gets what follows, and
# nothing else. SIGQUIT makes all ranks print their stacks and go on. The output is also written to
# LOG_DIR/distributed_training/cluster_train_TIMESTAMP_JOB_nodeRANK.log (link: latest_nodeRANK.log).
#
# Environment (CONDA_ENV, PYTHON and APPTAINER_IMAGE: see scripts/site.sh; SHARE_GPU: see scripts/guard.py):
#   NPROC_PER_NODE  ranks on this node                            [Slurm's GPUs, visible GPUs, or 1]
#   BACKEND         nccl or gloo                                  [nccl on GPUs, else gloo]
#   LOG_LEVEL       torchrun's; DEBUG also makes NCCL verbose; unknown words are ignored  [WARNING]
#   LAUNCHER        torch.distributed.launch, deprecated; other words are ignored  [torch.distributed.run]
#   TRAIN_SCRIPT    any training script that works with torchrun, or "-m package.module"  [train_distributed.py]
#   MASTER_ADDR     the host of node rank 0                       [first host of the job, or localhost]
#   MASTER_PORT     a free port on that host                      [derived from the job id]
#   LOG_DIR         directory for log files                       [logs]
#   DRY_RUN         1: only print the command                     []
#
# Examples:
#   scripts/cluster_train.sh configs/default_config.yaml
#   scripts/cluster_train.sh configs/default_config.yaml 2 1 node01 29400 --epochs 10

set -euo pipefail +o posix  # POSIXLY_CORRECT changes `wait`
unset CDPATH PYTHONSAFEPATH # they change what cd and import find

NPROC_PER_NODE="${NPROC_PER_NODE:-}"
BACKEND="${BACKEND:-}"
LOG_LEVEL="${LOG_LEVEL:-WARNING}"
LAUNCHER="${LAUNCHER:-torch.distributed.run}"
TRAIN_SCRIPT="${TRAIN_SCRIPT:-train_distributed.py}"
MASTER_ADDR="${MASTER_ADDR:-}"
MASTER_PORT="${MASTER_PORT:-}"
LOG_DIR="${LOG_DIR:-logs}"
DRY_RUN="${DRY_RUN:-}"

fail() {
  report_failure configuration "$*"
  exit 2
}

# report_failure CAUSE REASON: prints the error and writes it to FAILURE_FILE (see scripts/guard.py).
report_failure() {
  echo "cluster_train.sh: error: $(hostname): $2" >&2
  (set -o noclobber && printf '{"cause": "%s", "reason": "%s", "host": "%s"}\n' "$1" "$2" "$(hostname)" \
    >"${FAILURE_FILE:-/dev/null}") 2>/dev/null || true
}

print_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

# answer_of COMMAND...: the last line that it prints; a Python of the site may print others before.
answer_of() {
  "$@" | tail -n 1
}

# node_rank_among HOST...: prints the index of this host.
node_rank_among() {
  local index=0 name
  for name in "$@"; do
    if [[ "${name%%.*}" == "$(hostname -s)" ]]; then
      echo "$index"
      return
    fi
    index=$((index + 1))
  done
  fail "this host is not one of: ${*:-none}. Give node_rank"
}

# takes OPTION: whether the training script has it. Those that import train_distributed have its options.
takes() {
  [[ -z "$is_verbatim" ]] && grep -qsE -e "$1|^ *(from|import) +train_distributed" -- "$TRAIN_SCRIPT"
}

# run_ranks COMMAND...: runs torchrun until it exits. Stop signals are forwarded to its ranks, which
# save and exit, so torchrun exits without an error. A later SIGINT kills them; a later SIGTERM does not,
# because Slurm sends it twice in quick succession when it ends a job.
run_ranks() {
  local status=0 alone=()
  child="" stop_received="" ranks_signaled=""
  # In a new session, so that Ctrl-C does not reach torchrun; stopped if this shell dies.
  if setpriv --pdeathsig TERM true 2>/dev/null; then
    alone=(setpriv --pdeathsig TERM)
  else # no --pdeathsig, for example on RHEL 8
    trap 'kill -TERM "$child" 2>/dev/null || true' EXIT
  fi
  [[ -z "$(command -v setsid)" ]] || alone=(setsid "${alone[@]}")
  trap stop HUP TERM USR1 USR2
  trap 'echo "stopping: all ranks save and exit; press Ctrl-C again to kill them"; stop' INT
  trap 'pkill -QUIT -P "$(torchrun_process)" || true' QUIT
  # Slurm may send these signals to torchrun as well: it would die, or end its ranks.
  export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP}" # not SIGQUIT
  (trap '' USR1 USR2 QUIT && exec "${alone[@]}" "$@") &
  child=$!
  [[ -z "$stop_received" ]] || stop
  while kill -0 "$child" 2>/dev/null; do
    wait "$child" || true # a signal interrupts it
  done 2>/dev/null        # hide the shell's "Killed" message
  wait "$child" || status=$?
  [[ -z "$ranks_signaled" ]] || pkill -KILL --session "$ranks_signaled" || true # their own children, as of mp.spawn
  child=""
  return "$status"
}

# torchrun_process: prints its id; in a container, it is the child of Apptainer.
torchrun_process() {
  [[ -n "${APPTAINER_IMAGE:-}" ]] && pgrep -P "$child" || echo "$child"
}

stop() {
  if [[ -z "$child" ]]; then
    stop_received=1
    return
  fi
  local torchrun
  torchrun="$(torchrun_process)"
  # shellcheck disable=SC2064
  trap "pkill -KILL -P $torchrun || true; kill -KILL $torchrun $child || true" INT
  local ranks
  ranks="$(pgrep -d, -P "$torchrun")" || true # each is the leader of a session
  if pkill -TERM -P "$torchrun"; then
    ranks_signaled="$ranks"
  elif [[ -z "$ranks_signaled" ]]; then # no ranks yet: nothing to save
    kill -KILL "$child" || true
  fi
}

# oom_kills: prints how often the kernel has killed a process of this job's cgroup (v1, v2) for its memory.
oom_kills() {
  local group
  group="$(sed -nE 's/^[0-9]+:(memory)?:/\1/p' /proc/self/cgroup | sort | tail -n 1)" || true # v1: "memory/..."
  cat "/sys/fs/cgroup/$group"/memory.{oom_control,events} 2>/dev/null |
    awk '$1 == "oom_kill" { n = $2 } END { print n + 0 }' || true
}

# killed_rank LOG: prints which rank a signal has ended first, from torchrun's report.
killed_rank() {
  sed -n '/^Root Cause/,$p' "$1" |
    awk '/^ *rank +:/ { rank = $3 } /Signal [0-9]+ \(SIG/ { gsub("[()]", "", $5); print "rank " rank " was ended by " $5; exit }'
}

main() {
  if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
    print_help
    exit
  fi
  # Other programs use these names, too.
  if [[ ! "$LAUNCHER" =~ ^torch\.distributed\.(run|launch)$ ]]; then
    echo "cluster_train.sh: WARNING: LAUNCHER=$LAUNCHER is another program's, and is ignored" >&2
    LAUNCHER=torch.distributed.run
  fi
  LOG_LEVEL="${LOG_LEVEL^^}"
  [[ "$LOG_LEVEL" =~ ^(DEBUG|INFO|ERROR|CRITICAL)$ ]] || LOG_LEVEL=WARNING
  local arguments=() hosts=()
  while [[ $# -gt 0 && "$1" != -* ]]; do
    arguments+=("$1")
    shift
  done
  [[ ${#arguments[@]} -le 5 ]] ||
    fail "too many arguments before the options: ${arguments[*]:5} (the script's own arguments go after --)"
  is_verbatim=""
  if [[ "${1:-}" == -- ]]; then
    is_verbatim=1
    shift
  fi
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD" # a script elsewhere may import train_distributed
  # shellcheck source=scripts/site.sh
  source scripts/site.sh
  # Not if the arguments, or Slurm and the launcher, say everything: a container may have no scontrol.
  [[ -n "${arguments[1]:-}" && -n "${arguments[2]:-}" && -n "${arguments[3]:-}" ]] ||
    [[ -n "${SLURM_STEP_NUM_NODES:-}" && -n "$MASTER_ADDR" ]] ||
    read -r -a hosts < <(answer_of "${PYTHON:-python3}" scripts/guard.py --hosts) || exit 2

  local config="${arguments[0]:-configs/default_config.yaml}"
  local nodes="${arguments[1]:-${SLURM_STEP_NUM_NODES:-${#hosts[@]}}}"
  local rank="${arguments[2]:-}"
  if [[ -z "$rank" ]]; then
    rank=0
    [[ "$nodes" == 1 ]] || rank="${SLURM_NODEID:-$(node_rank_among "${hosts[@]}")}"
  fi
  local master="${arguments[3]:-${MASTER_ADDR:-${hosts[0]}}}" port="${arguments[4]:-$MASTER_PORT}"
  [[ "$nodes" != 1 ]] || master=localhost
  # On one node, the port must be free here. On several, the launcher has found one on the first node.
  [[ -n "$port" ]] || port="$(answer_of "${PYTHON:-python3}" scripts/guard.py --free-port)" || exit
  [[ "$nodes $rank $port" =~ ^[1-9][0-9]*\ [0-9]+\ [0-9]+$ ]] ||
    fail "num_nodes '$nodes', node_rank '$rank' and master_port '$port' should be numbers"
  [[ -f "$config" ]] || fail "there is no config $config in $PWD"
  local script=("$TRAIN_SCRIPT")
  [[ "$TRAIN_SCRIPT" != "-m "* ]] || script=(-m "${TRAIN_SCRIPT#-m }")
  [[ -f "$TRAIN_SCRIPT" || "${script[0]}" == -m ]] || fail "there is no TRAIN_SCRIPT $TRAIN_SCRIPT in $PWD"
  NPROC_PER_NODE="${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
  [[ "$NPROC_PER_NODE" =~ ^([1-9][0-9]*)?$ ]] || fail "NPROC_PER_NODE is '$NPROC_PER_NODE', not a number"
  ((${#NPROC_PER_NODE} <= 4 && NPROC_PER_NODE <= 1024)) ||
    fail "NPROC_PER_NODE is $NPROC_PER_NODE, more than 1024 ranks on a node"
  local where=(--nnodes "$nodes" --node-rank "$rank" --master-addr "$master" --master-port "$port")
  local what=("$@") gpus=0
  [[ -z "$BACKEND" ]] || ! takes --distributed-backend || what=(--distributed-backend "$BACKEND" "${what[@]}")
  ! takes --config || what=(--config "$config" "${what[@]}")
  if [[ -n "$DRY_RUN" ]]; then
    NPROC_PER_NODE="${NPROC_PER_NODE:-gpu}" # torchrun's word for one rank per GPU
  else
    gpus="$(answer_of "${python[@]}" scripts/node_check.py "${where[@]}" --nproc-per-node "${NPROC_PER_NODE:-0}" \
      "$TRAIN_SCRIPT" "${what[@]}")" || {
      (($? != 2)) || exit 2 # it has printed why
      fail "${python[*]} does not start, or is not Python 3.10 or newer: see scripts/site.sh"
    }
    NPROC_PER_NODE="${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
  fi
  where+=(--nproc-per-node "$NPROC_PER_NODE")

  local command=("${python[@]}" -m "$LAUNCHER" "${where[@]}" scripts/guard.py "${script[@]}" "${what[@]}")
  if [[ "$LAUNCHER" == torch.distributed.launch ]]; then
    command=("${command[@]:0:3}" --use-env "${command[@]:3}")
  fi
  if [[ "$TRAIN_SCRIPT" == *doctor.py ]]; then # it starts the ranks itself: torchrun would wait for missing nodes
    command=("${python[@]}" "$TRAIN_SCRIPT" "${where[@]}" "${what[@]}")
  fi

  echo "\$$(printf ' %q' "${command[@]}")" # one write, because other nodes print too
  [[ -z "$DRY_RUN" ]] || exit 0

  # CPU threads: this node's cores, divided among the ranks. PBS sets the variable to NCPUS, for one process.
  local cores
  [[ -z "${PBS_JOBID:-}" || "${OMP_NUM_THREADS:-}" != "${NCPUS:-}" ]] || unset OMP_NUM_THREADS
  cores="$(nproc)" # this too would read OMP_NUM_THREADS
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NPROC_PER_NODE ? cores / NPROC_PER_NODE : 1))}"
  export LOGLEVEL="$LOG_LEVEL"
  # If SIGTERM also reaches torchrun, it kills its ranks after 30 s: too soon for a large checkpoint.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
  if [[ "$LOG_LEVEL" == DEBUG ]]; then
    export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL
  fi
  local logs="$LOG_DIR/distributed_training" log
  log="cluster_train_$(date +%Y%m%d_%H%M%S)_${SLURM_JOB_ID:-$$}_node$rank.log" # jobs may start at the same time
  mkdir -p "$logs" && [[ -w "$logs" ]] || fail "cannot write to $logs: set LOG_DIR"
  ln -sfn "$log" "$logs/latest_node$rank.log"
  # tee ignores signals: it must run until the ranks have written their last lines.
  exec &> >(trap '' HUP INT QUIT TERM USR1 USR2 && exec tee -ap "$logs/$log")
  local tee=$! status=0 kills killed own_reports=""
  if [[ -z "${FAILURE_FILE:-}" ]]; then # not under supervise.py
    own_reports="$(mktemp -d)"
    export FAILURE_FILE="$own_reports/failure.json"
  fi
  kills="$(oom_kills)"
  run_ranks "${command[@]}" || status=$?
  trap '' HUP INT TERM USR1 USR2
  # The report of a rank, if there is one, is more precise.
  if [[ "$status" != 0 && ! -s "${FAILURE_FILE:-}" ]]; then
    sleep 0.2 # until tee has written torchrun's report
    if (($(oom_kills) > kills)); then
      report_failure "out of memory" "the kernel killed a process because the job ran out of memory: request more --mem, or use fewer --num-workers"
    elif killed="$(killed_rank "$logs/$log")" && [[ -n "$killed" && -z "$ranks_signaled" ]]; then
      report_failure killed "$killed"
    fi
  fi
  if [[ -n "$own_reports" ]]; then # torchrun prints 40 lines after a rank's error: repeat it, as supervise.py does
    "${PYTHON:-python3}" -c 'import json, sys; print("cluster_train.sh: error: rank {rank} on {host}: {reason}".format(
      **json.load(open(sys.argv[1]))), file=sys.stderr)' "$FAILURE_FILE" 2>&1 | grep "^cluster_train" >&2 || true
    rm -rf "$own_reports"
  fi
  exec &>/dev/null
  for _ in {1..500}; do # wait for the last lines on a slow terminal
    kill -0 "$tee" || break
    sleep 0.01
  done
  exit "$status"
}

main "$@"
