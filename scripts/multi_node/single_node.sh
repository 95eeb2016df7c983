#!/bin/sh
# Trains with several processes on this host: one for each GPU, or as many as NP says.
set -eu
usage() {
    cat <<'END'
usage: [NP=N] scripts/multi_node/single_node.sh [flags of train_gpt]
Starts N processes of train_gpt on this host with mpirun (Open MPI); run it in the folder that holds data/ and logs/.

  NP            number of processes (default: of the GPUs; without GPUs: of the processors' memory nodes)
  MPIRUN_FLAGS  more flags for mpirun, such as "--oversubscribe" for more processes than cores
  TRAIN         the program (default: train_gpt of this repository)
  DRY_RUN=1     prints the command only

mpirun refuses to run as root: in a container set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
Ctrl-C, SIGTERM or SIGUSR1 to this script: the run saves itself and says how to go on. A second one: it ends at once.

example: scripts/multi_node/single_node.sh --dataset 10B --model_size l12 --batch_size 32 --tokens_per_step 524288
END
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac

# shellcheck source=scripts/multi_node/common.sh
. "$(dirname "$0")/common.sh"
np=${NP:-$(gpus)}
[ "$np" != 0 ] || np=$(find /sys/devices/system/node -maxdepth 1 -name 'node[0-9]*' 2>/dev/null | wc -l)
[ "$np" != 0 ] || np=1

train=${TRAIN:-$(cd "$(dirname "$0")/../.." && pwd)/train_gpt}
if [ "${DRY_RUN:-0}" != 1 ]; then
    command -v "$train" >/dev/null || { echo "error: $train not found; build it with make" >&2; exit 1; }
    command -v mpirun >/dev/null || { echo "error: mpirun not found; run scripts/install_deps.sh" >&2; exit 1; }
fi
# No binding: the program divides the cores of a host among its processes, mpirun would give each one core.
# shellcheck disable=SC2086  # flags, not one word
set -- mpirun -np "$np" --bind-to none ${MPIRUN_FLAGS:-} "$train" "$@"
echo "$*"
[ "${DRY_RUN:-0}" != 1 ] || exit 0
# shellcheck source=scripts/multi_node/run_mpirun.sh
. "$(dirname "$0")/run_mpirun.sh"
