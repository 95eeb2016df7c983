#!/bin/sh
# The point of the project in a few minutes on a laptop: tiny models of several encodings learn to retrieve a passkey
# in texts of 128 tokens, then look for it in texts up to 32 times as long. The very path of a real run: text,
# tokenizer, shards, training, evaluation, table, picture. See --help.
set -eu
usage() {
    cat <<'END'
usage: scripts/demo.sh [--all] [flags of train_gpt]
Trains tiny models of four encodings on texts of 128 tokens with a passkey in them, then looks for it in texts up to 32
times as long; ends in a table and in plots/demo. Under 5 minutes on a laptop.

  --all  ten encodings instead of four

The data go to data/demo, the runs to logs/demo; what is there is not made again.
END
}
case "${1:-}" in -h | --help) usage; exit 0 ;; esac
cd "$(dirname "$0")/.."
encodings=bam_ssmax,alibi,rotary,sinusoidal
if [ "${1:-}" = --all ]; then
    encodings=bam_ssmax,bam,alibi_ssmax,alibi,nope_ssmax,nope,rotary_ssmax,rotary,sinusoidal_ssmax,sinusoidal
    shift
fi
command -v spm_train >/dev/null || { echo "error: spm_train not found; run scripts/install_deps.sh" >&2; exit 1; }
cores=$(nproc 2>/dev/null || echo 1)
jobs=$((cores < 4 ? cores : 4))
length=128
started=$(date +%s)
step() { printf '\n== %s (%d s)\n' "$1" $(($(date +%s) - started)); }

mkdir -p data
if [ ! -e data/demo/demo_000000.bin ]; then
    step "a tokenizer of whole words and single digits"
    dataset/synthetic --vocabulary_text --out data/demo_vocabulary.txt --overwrite
    spm_train --input=data/demo_vocabulary.txt --model_prefix=data/demo --model_type=unigram --vocab_size=200 \
        --hard_vocab_limit=false --split_digits --character_coverage=1 --unk_id=0 --bos_id=1 --eos_id=2 \
        --minloglevel=1
    step "documents with a passkey, and repeated strings of digits"
    # keys whose digits sum to a multiple of 10 are held out for the evaluation
    dataset/synthetic --bytes 24_000_000 --sequence_length $length --tokenizer data/demo.model \
        --out data/demo.txt --overwrite
    dataset/prepare data/demo.txt --tokenizer data/demo.model --out data/demo
fi

step "training $(echo "$encodings" | tr ',' ' ') at $length tokens, evaluating up to $((32 * length))"
scripts/sweep.sh --encodings "$encodings" --sizes l2 --jobs "$jobs" --log_dir logs/demo \
    --dataset demo --tokenizer data/demo.model --dim 64 --n_layers 2 --n_heads 4 \
    --sequence_length $length --batch_size 32 --tokens_per_step 4096 --num_iterations 2000 \
    --learning_rate 4e-3 --learning_rate_decay_frac 0.1 --warmup_iters 50 \
    --val_loss_every 500 --val_tokens 32768 --val_tokens_padding 0 "$@" \
    --eval "--passkey_keys held_out --passkey_sample_size 40
            --passkey_seq_lens 128,256,512,1024,2048,4096"

step "keys found, by the length of the text"
# the runs of these flags: an earlier demo with others may have taken version_00
runs=$(awk -F , 'NR > 1 { print $3 }' logs/demo/sweep/summary.csv)
python3 scripts/passkey_table.py $runs
# shellcheck disable=SC2086  # one word per run
scripts/plot.sh $runs --out plots/demo --only passkey,priors
step "done; the picture is plots/demo/passkey.png"
