#!/bin/sh
# The published training run of BAM (arXiv 2505.22842): l12, bam_ssmax, 20000 steps of 589,824 tokens on FineWeb 10B.
set -eu
usage() {
    cat <<'END'
usage: [VARIABLE=value]... scripts/train_paper.sh [flags of train_gpt]
Trains the published model: l12, bam_ssmax, 512 tokens a sequence, 20000 steps of 589824 tokens. Flags given here
win, so the paper's other models are --position_encoding alibi, --model_size l24, ...

  BATCH_SIZE  sequences per forward pass and rank (default 32); 1152 / BATCH_SIZE / ranks has to be whole
  LAUNCHER    what starts train_gpt (default: nothing), such as LAUNCHER="mpirun -np 4"
  DATASET     folder of token shards under data/ (default 10B), made by dataset/fineweb.py and dataset/prepare

A run that was stopped goes on with
  ./train_gpt --checkpoint logs/l12/bam_ssmax/version_00 --checkpoint_args
END
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac

train=$(dirname "$0")/../train_gpt
[ -x "$train" ] || { echo "error: $train not found; build it with make" >&2; exit 1; }
set -- "$train" \
    --dataset "${DATASET:-10B}" \
    --num_iterations 20000 \
    --tokens_per_step 589824 \
    --position_encoding bam_ssmax \
    --model_size l12 \
    --sequence_length 512 \
    --batch_size "${BATCH_SIZE:-32}" \
    --weight_decay 0.1 \
    --learning_rate 1e-3 \
    --learning_rate_decay_frac 0.1 \
    --val_loss_every 32 \
    --dtype bfloat16 \
    --compile \
    --tensorcores \
    "$@"
# shellcheck disable=SC2086  # a launcher is a command with arguments
set -- ${LAUNCHER:-} "$@"
echo "$*"
exec "$@"
