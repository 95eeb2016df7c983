# shellcheck shell=sh
# Sourced by single_node.sh and mpirun.sh, after common.sh: runs "$@", an mpirun command, and ends with its status.
#
# mpirun kills its processes a second after SIGINT or SIGTERM, too soon to save; SIGUSR1 it hands on and waits. So the
# first signal becomes SIGUSR1. One that comes more than a second later is SIGTERM: no saving (as train_gpt, this takes
# two at once for one: some send a signal to a process and to its group).

# shellcheck disable=SC2317,SC2034  # called by traps; read by wait_for
stop() {
    interrupted=1
    now=$(date +%s)
    if [ -z "${first:-}" ]; then
        first=$now
        kill -USR1 "$job" 2>/dev/null || true
    elif [ $((now - first)) -gt 1 ]; then
        kill -TERM "$job" 2>/dev/null || true
    fi
}
trap stop HUP INT TERM USR1

setsid "$@" & # Ctrl-C reaches all of the terminal's processes, but not those of another session
job=$!
wait_for "$job"
# shellcheck disable=SC2154  # set by wait_for
exit "$status"
