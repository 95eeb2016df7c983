#!/bin/sh
# A sweep as a Slurm array job: one task per encoding and size. A task that runs out of time, is preempted or whose
# machine fails is queued again and goes on where it stopped, as sweep.sh does.
set -eu
usage() {
    cat <<'END'
usage: [SBATCH_FLAGS="..."] scripts/slurm_sweep.sh [flags of sweep.sh]
Submits an array job with one task per encoding and size; run it in the folder that holds data/ and logs/. Tasks
that run out of time save before it is over, and are queued again.

  SBATCH_FLAGS  flags for sbatch, such as "--gres=gpu:1 --cpus-per-task=8 --time=12:00:00"
  GRACE         seconds before the end of the time in which to save (default 120)

example: SBATCH_FLAGS="--gres=gpu:1 --time=12:00:00" scripts/slurm_sweep.sh --sizes l6,l12 \
             --encodings bam_ssmax,alibi --num_iterations 20000 --tokens_per_step 589824 --eval ""
afterwards, for the table of all runs: scripts/sweep.sh --summary with the same flags
END
}

# Within the array job: "$@" is sweep.sh and its flags.
run_task() {
    again=0
    "$@" --cell "$SLURM_ARRAY_TASK_ID" &
    task=$!
    trap 'again=1; kill -TERM $task || true' USR1 # time is nearly over
    trap 'kill -TERM $task || true' TERM INT      # cancelled, or preempted, which Slurm itself queues again
    while :; do
        status=0
        wait "$task" || status=$?
        kill -0 "$task" 2>/dev/null || break # a trap ended the wait, the job is still saving
    done
    if [ $again = 1 ] && [ "$status" -gt 128 ]; then
        scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        status=0
    fi
    exit "$status"
}

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    --task) shift; run_task "$@" ;;
esac
command -v sbatch >/dev/null || { echo "error: sbatch not found; run this where Slurm is, or use sweep.sh" >&2; exit 1; }
sweep=$(cd "$(dirname "$0")" && pwd)/sweep.sh
count=$("$sweep" "$@" --count)
mkdir -p logs
# shellcheck disable=SC2086  # flags, not one word
exec sbatch --job-name=sweep --output=logs/slurm_%A_%a.out ${SBATCH_FLAGS:-} --array="0-$((count - 1))" --requeue \
    --open-mode=append --signal="B:USR1@${GRACE:-120}" "$0" --task "$sweep" "$@"
