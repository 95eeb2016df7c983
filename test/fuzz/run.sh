#!/bin/sh
# Fuzzes what reads files and messages: builds the targets test/fuzz/fuzz_NAME with clang, lets each write its corpus of
# good inputs, and runs libFuzzer on it under AddressSanitizer and UBSan. One line a target; a crash, 5 s of computing
# or 1 GB of memory for one input is a fault, and the input is kept.
# usage: test/fuzz/run.sh [NAME...]   these targets, such as shard; all by default
#        test/fuzz/run.sh --can       only says by its status whether this machine has what it takes
# FUZZ_SECONDS (60) is for all of them together. What a run has learnt stays in BUILD/fuzz/corpus for the next one.
set -u
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build} FUZZ_SECONDS=${FUZZ_SECONDS:-60} FUZZ_CXX=${FUZZ_CXX:-clang++}
export BUILD
folder=$BUILD/fuzz
mkdir -p "$folder/found"

echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$folder/probe.cpp"
if ! "$FUZZ_CXX" -fsanitize=fuzzer,address,undefined -o "$folder/probe" "$folder/probe.cpp" >/dev/null 2>&1; then
    [ "${1:-}" = --can ] ||
        echo "error: no clang with libFuzzer; run scripts/install_deps.sh (or: apt-get install clang libclang-rt-dev)" >&2
    exit 1
fi
[ "${1:-}" = --can ] && exit 0

[ $# -gt 0 ] || set -- $(make -s fuzz-targets)
seconds=$((FUZZ_SECONDS / $#))
[ $seconds -gt 0 ] || seconds=1
programs=""
for name in "$@"; do programs="$programs $folder/fuzz_$name"; done
make -s -j "$(nproc)" $programs || exit 1

# Files of the targets, in memory where that is possible.
parent=${TMPDIR:-/tmp}
[ -w /dev/shm ] && parent=/dev/shm
TMPDIR=$(mktemp -d "$parent/bamc_fuzz_XXXXXX")
export TMPDIR OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:quarantine_size_mb=16
trap 'rm -rf "$TMPDIR"' EXIT

# An input that took 5 s by the clock is a fault only if it takes 5 s of computing, too: the machine may be busy.
is_slow() { ! (ulimit -t 5 && "$1" -rss_limit_mb=1024 "$2") >/dev/null 2>&1; }

faults=0
for name in "$@"; do
    program=$folder/fuzz_$name corpus=$folder/corpus/$name log=$folder/$name.log started=$(date +%s) fault=""
    mkdir -p "$corpus"
    rm -f "$corpus"/seed_* "$folder/found/$name"-*
    FUZZ_SEEDS=$corpus "$program" || fault="no corpus"
    [ -n "$fault" ] || "$program" -max_total_time=$seconds -timeout=5 -rss_limit_mb=1024 -print_final_stats=1 \
        -artifact_prefix="$folder/found/$name-" "$corpus" >"$log" 2>&1 || fault="no input kept"
    for input in "$folder/found/$name"-*; do
        [ -e "$input" ] || continue
        fault=$input
        case $input in *-timeout-* | *-slow-unit-*) is_slow "$program" "$input" || fault="" ;; esac
    done
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
    printf 'fuzz %-12s %9s inputs, %d faults  (%d s)\n' "$name" "${runs:-0}" "$([ -z "$fault" ]; echo $?)" \
        $(($(date +%s) - started))
    [ -n "$fault" ] || continue
    faults=$((faults + 1))
    grep -v '^#[0-9]\|^INFO' "$log" | head -n 40
    echo "error: $name: see $log; repeat it with: $program $fault" >&2
done
[ $faults -eq 0 ]
