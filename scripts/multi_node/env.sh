#!/bin/sh
# Trains with several processes without MPI, for builds for GPUs: the processes find each other through the environment.
set -eu
usage() {
    cat <<'END'
usage: [NP=N] scripts/multi_node/env.sh [flags of train_gpt]
Starts N processes of train_gpt on this host, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set, and
waits for them. For several hosts run it on each of them, at about the same time. Ranks on CPUs need MPI instead:
single_node.sh.

  NP           number of processes on this host (default: of the GPUs)
  NODES        number of hosts (default 1), each with NP processes
  NODE         this host, 0 to NODES - 1 (default 0)
  MASTER_ADDR  name or address of host 0 (default 127.0.0.1, with one host)
  MASTER_PORT  a free port on it (default 29500)
  TRAIN        the program (default: train_gpt of this repository)
  DRY_RUN=1    prints the commands only

Ctrl-C, SIGTERM or SIGUSR1: the run saves itself and says how to go on.

example: NODES=2 NODE=0 MASTER_ADDR=node1 scripts/multi_node/env.sh --dataset 10B --model_size l12  # on node1
         NODES=2 NODE=1 MASTER_ADDR=node1 scripts/multi_node/env.sh --dataset 10B --model_size l12  # on node2
END
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac

# shellcheck source=scripts/multi_node/common.sh
. "$(dirname "$0")/common.sh"
np=${NP:-$(gpus)} nodes=${NODES:-1} node=${NODE:-0}
[ "$np" != 0 ] || { echo "error: no GPU found; set NP, or use single_node.sh, which starts ranks on CPUs" >&2; exit 1; }
if [ "$nodes" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
    echo "error: NODES=$nodes, but MASTER_ADDR is not set; set it to the name of host 0 on all hosts" >&2
    exit 1
fi
train=${TRAIN:-$(cd "$(dirname "$0")/../.." && pwd)/train_gpt}
WORLD_SIZE=$((np * nodes)) MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
if [ "${DRY_RUN:-0}" != 1 ]; then
    command -v "$train" >/dev/null || { echo "error: $train not found; build it with make" >&2; exit 1; }
fi
export WORLD_SIZE MASTER_ADDR MASTER_PORT

processes=""
# shellcheck disable=SC2086,SC2317  # several process ids; called by traps
forward() {
    interrupted=1
    kill "-$1" $processes 2>/dev/null || true
}
trap 'forward TERM' TERM HUP
trap 'forward USR1' USR1
trap 'forward TERM' INT # until they are ready to save, the processes ignore the SIGINT of Ctrl-C
local_rank=0
while [ "$local_rank" -lt "$np" ]; do
    export LOCAL_RANK=$local_rank RANK=$((node * np + local_rank))
    if [ "${DRY_RUN:-0}" = 1 ]; then
        echo "RANK=$RANK WORLD_SIZE=$WORLD_SIZE LOCAL_RANK=$LOCAL_RANK MASTER_ADDR=$MASTER_ADDR" \
            "MASTER_PORT=$MASTER_PORT $train $*"
    else
        "$train" "$@" &
        processes="$processes $!"
    fi
    local_rank=$((local_rank + 1))
done
largest=0
for process in $processes; do
    wait_for "$process"
    [ "$status" -le "$largest" ] || largest=$status
done
exit "$largest"
