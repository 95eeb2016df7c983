#!/bin/sh
# Checks and measures the CUDA code on a machine with a GPU, in one command: builds for that GPU, runs the CUDA tests on
# it, compute-sanitizer on a few, benchmarks, training and long contexts. Ends in Markdown, printed and in
# BUILD/gpu.md (copy it to docs/gpu.md). Stops by itself after --budget seconds; what had no time is named.
# Needs nvcc and cuBLASLt. Left out, with a line, where they are missing: the programs (cJSON), tests (cmocka), tests
# against the CPU's operators (oneDNN), cuDNN's attention (scripts/install_deps.sh --cudnn). Libraries unpacked elsewhere
# are found through CPATH, LIBRARY_PATH and LD_LIBRARY_PATH. No MPI, SentencePiece or network.
set -u
usage() {
    cat <<'END'
usage: scripts/gpu_check.sh [--budget SECONDS] [--precision bf16|fp32] [--dry_run]
Checks and measures the CUDA code on a machine with a GPU: builds for it, runs the CUDA tests, compute-sanitizer,
benchmarks, training and long contexts. Prints Markdown, also in BUILD/gpu.md. Needs nvcc and cuBLASLt.

  --budget SECONDS   ends by itself after so many (default 480); what had no time is named
  --precision WORD   of the build: bf16 (default) or fp32
  --dry_run          prints the commands only
END
}
cd "$(dirname "$0")/.." || exit 1
budget=480 precision=bf16 dry_run=0
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --dry_run) dry_run=1 ;;
        --budget | --precision)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 1; }
            case $1 in --budget) budget=$2 ;; *) precision=$2 ;; esac
            shift ;;
        *) echo "error: unknown argument $1; usage: scripts/gpu_check.sh [--budget SECONDS] [--precision bf16|fp32] [--dry_run]" >&2
            exit 1 ;;
    esac
    shift
done
case $budget in '' | *[!0-9]*) echo "error: --budget $budget: expected seconds" >&2; exit 1 ;; esac
case $precision in bf16 | fp32) ;; *) echo "error: --precision $precision: expected bf16 or fp32" >&2; exit 1 ;; esac

started=$(date +%s)
report=${BUILD:-build}/gpu.md
BUILD=${BUILD:-build}/gpu
work=$BUILD/check failures=0 status=0
mkdir -p "$work"
: >"$report"

say() { printf '%s\n' "$*" | tee -a "$report"; }
left() { echo $((budget - ($(date +%s) - started))); }

# limited SECONDS COMMAND...: within that time and the budget, output in $work/log; status in $status. 124: no time.
limited() {
    limit=$1
    shift
    [ "$(left)" -gt "$limit" ] || limit=$(left)
    if [ "$limit" -le 0 ]; then
        echo "the time budget is used up" >"$work/log"
        status=124
    elif [ $dry_run = 1 ]; then
        echo "would run (at most $limit s): $*" | tee "$work/log"
        status=0
    else
        timeout -k 5 "$limit" "$@" >"$work/log" 2>&1
        status=$?
    fi
}

# why: the last line of the log, or that time ran out.
why() {
    if [ $status -eq 124 ]; then echo "out of time"; else tail -n 1 "$work/log" | tr '|' '/' | cut -c 1-200; fi
}

# check LABEL SECONDS COMMAND...: one row of the table of checks.
check() {
    label=$1 seconds=$2 before=$(date +%s)
    shift 2
    limited "$seconds" "$@"
    passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1 tests/p' "$work/log" | head -n 1)
    case $status in
        0) [ $dry_run = 0 ] && result="passed${passed:+, $passed}" || result="not run" ;;
        77) result="left out: $(why)" ;;
        *) result="FAILED: $(why)" failures=$((failures + 1)) && cp "$work/log" "$work/failed_$failures.log" ;;
    esac
    say "| $label | $result | $(($(date +%s) - before)) s |"
}

# rows SECONDS COMMAND...: lines of a table, printed by the command; a failure becomes a row too.
rows() {
    seconds=$1
    shift
    limited "$seconds" "$@"
    grep '^|' "$work/log" | tee -a "$report"
    if [ $status -ne 0 ]; then
        failures=$((failures + 1))
        say "| $* | FAILED: $(why) |"
    fi
}

# ---------------------------------------------------------------- device and build
gpu=$(nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if [ -z "$gpu" ] && [ $dry_run = 0 ]; then
    echo "error: nvidia-smi names no GPU; run this on a machine with one, or see what it would do with --dry_run" >&2
    exit 1
fi
gpu=${gpu:-"none (dry run), 9.0, 0 MiB, 0"}
arch=$(echo "$gpu" | awk -F', ' '{print $2}' | tr -d '.')

# With cuDNN where it is and there is bf16; why not, otherwise.
cudnn=0 no_cudnn="float32"
if [ "$precision" = bf16 ]; then
    if make -s BUILD="$BUILD" CUDA_ARCHS="$arch" PARTIAL=1 USE_CUDNN=1 "$BUILD/cuda/flags.txt" >"$work/log" 2>&1; then
        cudnn=1
    else
        no_cudnn=$(sed -n 's/^error: USE_CUDNN=1: //p' "$work/log" | head -n 1)
    fi
fi
export USE_CUDNN=$cudnn

# build.sh TARGET...: for this GPU, with whatever libraries are there. A file, so that timeout can run it.
cat >"$work/build.sh" <<SCRIPT
#!/bin/sh
exec make -j $(nproc) BUILD="$BUILD" CUDA_ARCHS="$arch" PRECISION="$precision" PARTIAL=1 "\$@"
SCRIPT
chmod +x "$work/build.sh"

say "# bam.c on a GPU"
say ""
say "Written by \`scripts/gpu_check.sh\` at commit $(git describe --always --dirty 2>/dev/null || echo unknown): $precision, $gpu."
say ""
say "| check | result | time |"
say "| --- | --- | --- |"
check "build of the benchmark" 200 "$work/build.sh" "$BUILD/cuda/dev/bench_cuda"
if [ $cudnn = 1 ] && [ $status -ne 0 ]; then
    cudnn=0 USE_CUDNN=0 no_cudnn="the build with it failed"
    check "build of the benchmark without cuDNN" 200 "$work/build.sh" "$BUILD/cuda/dev/bench_cuda"
fi
names=$("$work/build.sh" -s cuda-test-names 2>/dev/null)
tests=$(echo "$names" | sed -n 1p) missing=$(echo "$names" | sed -n 2p)
programs=0
if grep -q '^LIB_CJSON' "$BUILD/config.mk" 2>/dev/null; then
    programs=1
    check "build of train_gpt and evaluate" 200 "$work/build.sh" "$BUILD/cuda/train_gpt" "$BUILD/cuda/evaluate" \
        dataset/synthetic
else
    say "| train_gpt and evaluate | left out: no cJSON (libcjson-dev) | |"
fi
[ -z "$tests" ] || check "build of the tests" 240 "$work/build.sh" -k cuda-tests
for name in $missing; do
    reason="no cmocka, or no oneDNN to compare with"
    if [ "$name" = test_cuda_cudnn ] && [ $cudnn = 0 ]; then reason=$no_cudnn; fi
    say "| $name | left out: $reason | |"
done

# ---------------------------------------------------------------- tests on the device
for name in $tests; do check "$name" 60 "$BUILD/cuda/test/$name"; done
bench=$BUILD/cuda/dev/bench_cuda
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        check "compute-sanitizer $tool, small operators" 60 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$bench" operators --rows 512 --T 128 --repetitions 1
    done
else
    say "| compute-sanitizer | left out: not installed | |"
fi

# The shipped programs on a synthetic shard of bytes: two runs give the same numbers, and long contexts are read.
if [ $programs = 1 ]; then
    dtype=bfloat16
    [ "$precision" = bf16 ] || dtype=float32
    cat >"$work/programs.sh" <<SCRIPT
#!/bin/sh
set -eu
rm -rf "$work/runs" "$work/data"
mkdir -p "$work/data"
dataset/synthetic --tokens 400000 --sequence_length 128 --tokenizer bytes --min_fillers 0 --max_fillers 0 \
    --task repeat --out "$work/data/repeat"
for run in 1 2; do
    "$BUILD/cuda/train_gpt" --dataset repeat --data_dir "$work/data" --log_dir "$work/runs/\$run" --model_size l4 \
        --position_encoding bam_ssmax --num_iterations 20 --tokens_per_step 8192 --batch_size 16 --dtype $dtype \
        --sequence_length 128 --val_loss_every 10 --val_tokens 8192 --val_tokens_padding 0 --tokenizer bytes
    cut -d, -f 1,3,4 "$work/runs/\$run/l4/bam_ssmax/version_00/train.log" >"$work/runs/\$run.csv"
done
cmp "$work/runs/1.csv" "$work/runs/2.csv"
"$BUILD/cuda/evaluate" --log_dir "$work/runs/1/l4/bam_ssmax/version_00" --tokenizer bytes --passkey_sample_size 1 \
    --passkey_seq_lens 32768,262144
SCRIPT
    chmod +x "$work/programs.sh"
    check "train_gpt twice, equal; evaluate at 32k and 256k" 90 "$work/programs.sh"
fi

# ---------------------------------------------------------------- measurements
say ""
say "## Training"
say ""
say "| size | encoding | B x T | tokens/s | TFLOP/s | MFU of 989 | of the matrix rate | GiB |"
say "| --- | --- | --- | --- | --- | --- | --- | --- |"
for size in l6 l12 l24; do
    for encoding in nope bam_ssmax; do rows 45 "$bench" train "$size" "$encoding" --rows 65536; done
    if [ $cudnn = 1 ]; then rows 45 "$bench" train "$size" nope --rows 65536 --attention cudnn; fi
done
say ""
say "## Reading long contexts"
say ""
say "| size | encoding | tokens | s | tokens/s | TFLOP/s | of the matrix rate | GiB |"
say "| --- | --- | --- | --- | --- | --- | --- | --- |"
for tokens in 32768 262144; do rows 60 "$bench" prefill l12 bam_ssmax "$tokens"; done
say ""
say "## Operators"
say ""
limited 120 "$bench" operators
if [ $dry_run = 0 ]; then tee -a "$report" <"$work/log"; fi
if [ $status -ne 0 ]; then failures=$((failures + 1)) && say "FAILED: $(why)"; fi

# ---------------------------------------------------------------- the other precision, last: speed is bf16's
if [ "$precision" = bf16 ]; then
    say ""
    say "## Tests in float32"
    say ""
    say "| check | result | time |"
    say "| --- | --- | --- |"
    fp32=$BUILD/fp32
    set -- BUILD="$fp32" PRECISION=fp32 USE_CUDNN=0
    names=$("$work/build.sh" -s "$@" cuda-test-names 2>/dev/null | sed -n 3p)
    targets=$(for name in $names; do echo "$fp32/cuda/test/$name"; done)
    [ -z "$names" ] || check "build of the tests in float32" 150 "$work/build.sh" -k "$@" $targets
    for name in $names; do check "$name, float32" 60 "$fp32/cuda/test/$name"; done
    [ -n "$names" ] || say "| tests in float32 | left out: no cmocka, or no oneDNN to compare with | |"
fi
say ""
say "$failures failed; $(($(date +%s) - started)) s of $budget."
echo "written to $report"
[ $failures -eq 0 ]
