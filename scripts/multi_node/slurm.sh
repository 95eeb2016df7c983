#!/bin/sh
#SBATCH --job-name=train_gpt
#SBATCH --output=slurm_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
# Trains with the tasks of a Slurm job. A job that runs out of time saves, is queued again and goes on; so does one that
# is preempted or whose machine fails.
set -eu
usage() {
    cat <<'END'
usage: SBATCH_FLAGS="..." scripts/multi_node/slurm.sh [flags of train_gpt]
   or: sbatch [flags of sbatch] scripts/multi_node/slurm.sh [flags of train_gpt]   (in the folder of train_gpt)
Submits a job with a process for each task; run it in the folder that holds data/ and logs/. Within a job (salloc) it
starts at once. The job's output is slurm_JOB.out.

  SBATCH_FLAGS  flags for sbatch: nodes, tasks and GPUs of each, time. --gpus-per-node rather than --gpus-per-task:
                NCCL has to see all GPUs of a host
  MPI           what srun --mpi gets: default pmix if both Slurm and the program know it, otherwise none, and the
                processes find each other through Slurm's variables (builds for GPUs)
  TRAIN         the program (default: train_gpt of this repository)
  DRY_RUN=1     prints the command only

Five minutes before the end of the time the processes are told to save (SIGUSR1); another --signal=B:USR1@SECONDS in
SBATCH_FLAGS changes that. To stop a job and keep its last step: scancel --batch --signal=TERM JOB. Plain scancel kills.

example: SBATCH_FLAGS="--nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=12:00:00" scripts/multi_node/slurm.sh \
             --dataset 10B --model_size l24 --batch_size 32 --tokens_per_step 524288 --zero_stage 1
END
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac

# A batch script runs as a copy elsewhere: where it was submitted from is the next best place.
train=${TRAIN:-$(cd "$(dirname "$0")/../.." && pwd)/train_gpt}
[ -n "${TRAIN:-}" ] || [ -x "$train" ] || train=${SLURM_SUBMIT_DIR:-.}/train_gpt
if [ "${DRY_RUN:-0}" != 1 ] && ! command -v "$train" >/dev/null; then
    echo "error: $train not found; build it with make, or set TRAIN" >&2
    exit 1
fi

if [ -z "${SLURM_JOB_ID:-}" ]; then
    # shellcheck disable=SC2086  # flags, not one word
    set -- sbatch ${SBATCH_FLAGS:-} "$0" "$@"
    echo "$*"
    [ "${DRY_RUN:-0}" != 1 ] || exit 0
    if ! command -v sbatch >/dev/null; then
        echo "error: sbatch not found; run this where Slurm is, or use mpirun.sh" >&2
        exit 1
    fi
    export TRAIN="$train"
    exec "$@"
fi

# Queued again: go on with the run of this job, if it has saved. Its folder is what the program said last.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    output=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *StdOut=//p')
    run=$(sed -n 's/^run  *//p' "$output" | tail -n 1)
    if [ -n "$run" ] && [ -e "$run/model.safetensors" ]; then set -- --checkpoint "$run" --checkpoint_args; fi
fi

mpi=${MPI:-none}
if [ -z "${MPI:-}" ] && srun --mpi=list 2>&1 | grep -q pmix && ldd "$train" 2>/dev/null | grep -q libmpi; then
    mpi=pmix
fi
# No binding: the program divides the cores of a host among its processes. One that dies ends the others, which would
# wait for it.
set -- srun "--mpi=$mpi" --cpu-bind=none --kill-on-bad-exit=1 \
    ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} "$train" "$@"
echo "$*"
[ "${DRY_RUN:-0}" != 1 ] || exit 0

again=0
"$@" &
job=$!
# srun hands SIGUSR1 on to the processes; at SIGTERM it would kill them
# shellcheck disable=SC2317  # called by traps
save() {
    interrupted=1
    kill -USR1 "$job" 2>/dev/null || true
}
trap 'again=1; save' USR1 # time is nearly over
trap save TERM INT        # cancelled, or preempted, which Slurm itself queues again
status=127
while :; do
    interrupted=0 code=0
    wait "$job" || code=$?
    [ "$code" = 127 ] || status=$code # 127: it had ended before, with the status that is known
    [ "$interrupted" = 1 ] || break   # a trap ends a wait, the job is still saving
done
if [ $again = 1 ] && [ "$status" -gt 128 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    status=0
fi
exit "$status"
