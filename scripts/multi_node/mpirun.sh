#!/bin/sh
# Trains with processes on several hosts, started by mpirun.
set -eu
usage() {
    cat <<'END'
usage: HOSTFILE=FILE scripts/multi_node/mpirun.sh [flags of train_gpt]
Starts train_gpt on the hosts of FILE with mpirun (Open MPI). Every host needs this repository, its build, data/ and
logs/ under the same path (a shared file system), and ssh without a password. Run it in the folder that holds data/
and logs/.

  HOSTFILE      a line for each host, with its number of processes: "node1 slots=8"
  NP            number of processes in all (default: all slots)
  MPIRUN_FLAGS  more flags for mpirun, such as "--mca btl_tcp_if_include eth0" to choose the network of its messages
  TRAIN         the program (default: train_gpt of this repository)
  DRY_RUN=1     prints the command only

Variables NCCL_* and OMP_* are handed to all hosts.
Ctrl-C, SIGTERM or SIGUSR1 to this script: the run saves itself and says how to go on. A second one: it ends at once.

example: HOSTFILE=hosts scripts/multi_node/mpirun.sh --dataset 10B --model_size l24 --batch_size 64 \
             --tokens_per_step 1048576 --zero_stage 1
END
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac

hostfile=${HOSTFILE:-}
if [ ! -r "$hostfile" ]; then
    echo "error: HOSTFILE='$hostfile', expected a file with a line \"HOST slots=8\" for each host" >&2
    exit 1
fi
train=${TRAIN:-$(cd "$(dirname "$0")/../.." && pwd)/train_gpt}
if [ "${DRY_RUN:-0}" != 1 ]; then
    command -v "$train" >/dev/null || { echo "error: $train not found; build it with make" >&2; exit 1; }
    command -v mpirun >/dev/null || { echo "error: mpirun not found; run scripts/install_deps.sh" >&2; exit 1; }
fi
# mpirun hands its own variables on, but no others.
exports=$(env | sed -n 's/^\(NCCL_[A-Z0-9_]*\|OMP_[A-Z_]*\|LD_LIBRARY_PATH\)=.*/-x \1/p' | tr '\n' ' ')
# No binding: the program divides the cores of a host among its processes, mpirun would give each one core.
# shellcheck disable=SC2086  # flags, not one word
set -- mpirun --hostfile "$hostfile" ${NP:+-np "$NP"} --bind-to none $exports \
    ${MPIRUN_FLAGS:-} "$train" "$@"
echo "$*"
[ "${DRY_RUN:-0}" != 1 ] || exit 0
# shellcheck source=scripts/multi_node/common.sh
. "$(dirname "$0")/common.sh"
# shellcheck source=scripts/multi_node/run_mpirun.sh
. "$(dirname "$0")/run_mpirun.sh"
