# shellcheck shell=sh
# Sourced by the scripts beside it.

# GPUs that the processes will see.
gpus() {
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .
    else
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

# wait_for PROCESS: until it has ended, with its status in $status; a trap that sets interrupted=1 does not end it.
wait_for() {
    status=127
    while :; do
        interrupted=0 code=0
        wait "$1" || code=$?
        # shellcheck disable=SC2034  # read by the caller
        [ "$code" = 127 ] || status=$code # 127: it had ended before, with the status that is known
        [ "$interrupted" = 1 ] || break   # a trap ends a wait, the process is still saving
    done
}
