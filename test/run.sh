#!/bin/sh
# Builds and runs every test: the sources under other compilers, each test program as it ships, and the unit
# tests again under AddressSanitizer and UBSan. One line each and, last, "N passed, N failed" in all.
# usage: test/run.sh [NAME...]   only these programs, such as test_attention
set -u
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build} CC=${CC:-cc} CXX=${CXX:-c++}
SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1"
# These start the shipped programs, so a sanitized build of the test itself would say nothing new.
PROGRAM_TESTS=$(make -s BUILD="$BUILD" program-tests)
# Threads that wait without spinning: tests are many short parallel regions, often on busy cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
passed=0 failed=0
mkdir -p "$BUILD/test"
TMPDIR=$(mktemp -d /tmp/bamc_tests_XXXXXX)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT

report() { printf '%-32s %3d passed, %d failed  (%d s)\n' "$1" "$2" "$3" $(($(date +%s) - started)); }

# check LABEL COMMAND...: one test that passes when the command exits with 0.
check() {
    label=$1 started=$(date +%s)
    shift
    if "$@" >"$BUILD/test/check.log" 2>&1; then p=1 f=0; else p=0 f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    report "$label" $p $f
    [ $f -eq 0 ] || tail -n 30 "$BUILD/test/check.log"
}

# run LABEL BUILD TARGET FLAGS: builds and runs one cmocka program, such as test/test_options, and adds up its counts.
# A program that dies, or that reports no test at all, counts as one failure.
run() {
    label=$1 program=$2/$3 started=$(date +%s)
    log=$program.log
    mkdir -p "${program%/*}"
    if ! make -s -j "$(nproc)" BUILD="$2" EXTRA_CFLAGS="$4" "$program" >"$log" 2>&1; then
        failed=$((failed + 1))
        report "$label" 0 1
        tail -n 30 "$log"
        return
    fi
    "$program" >"$log" 2>&1
    status=$?
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{s += $1} END {print s + 0}')
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{s += $1} END {print s + 0}')
    if [ "$f" -eq 0 ] && { [ $status -ne 0 ] || [ "$p" -eq 0 ]; }; then f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    report "$label" "$p" "$f"
    [ "$f" -eq 0 ] || tail -n 40 "$log"
}

# run_emulated NAME ORDERS BUILDS PRECISIONS: a CUDA test on the CPU, as its row in test/tests.mk wants it.
run_emulated() {
    for precision in $(echo "$4" | tr , ' '); do
        case $precision in fp32) suffix=_fp32 ;; *) suffix="" ;; esac
        for build in $(echo "$3" | tr , ' '); do
            if [ "$build" = plain ]; then
                for order in $(echo "$2" | tr , ' '); do
                    export EMU_SEED="$order" EMU_PROTECT=1  # host code that touches device memory is an error
                    run "$1 (emulated$suffix, order $order)" "$BUILD" "emu/plain$suffix/$1" ""
                done
                unset EMU_SEED EMU_PROTECT
            else
                run "$1 (emulated$suffix, $build)" "$BUILD" "emu/$build$suffix/$1" ""
            fi
        done
    done
}

# Random inputs, for a minute in all.
fuzz() {
    if ! test/fuzz/run.sh --can; then
        echo "the fuzz targets are LEFT OUT, not counted: no clang with libFuzzer (clang, libclang-rt-dev)"
        return
    fi
    export BUILD
    targets=$(make -s fuzz-targets)
    for target in $targets; do
        FUZZ_SECONDS=$((60 / $(echo $targets | wc -w))) check "fuzz $target" test/fuzz/run.sh "$target"
    done
}

cuda_names=""
if [ $# -gt 0 ]; then
    names=""
    for name in "$@"; do
        if [ -f "test/$name.cu" ]; then cuda_names="$cuda_names $name"; else names="$names $name"; fi
    done
else
    names=$(basename -s .c test/test_*.c)
    cuda_names=$(basename -s .cu test/test_*.cu)
    warnings="-std=gnu11 -Wall -Wextra -Werror -Wno-unknown-pragmas -fsyntax-only"
    for source in train_gpt.cu evaluate.c; do
        check "$source as C++" "$CXX" -std=c++17 ${warnings#-std=gnu11 } -x c++ "$source"
    done
    if command -v clang >/dev/null; then
        for source in llmc/*.c llmc/*/*.c dataset/*.c; do check "clang $source" clang -march=native $warnings "$source"; done
        for source in train_gpt.cu evaluate.c; do check "clang $source" clang $warnings -x c "$source"; done
    fi
fi
emulator=$(sed -n 's/^EMULATOR = //p' "$BUILD/config.mk")
# NAME:NEED of tests that this machine cannot run
for missing in $(make -s BUILD="$BUILD" left-out); do
    kept=$(printf '%s\n' $names | grep -vx "${missing%%:*}")
    [ "$(echo $kept)" = "$(echo $names)" ] || echo "${missing%%:*} is LEFT OUT, not counted: no ${missing#*:}"
    names=$kept
done
for name in $names; do run "$name" "$BUILD" "test/$name" ""; done
for name in $names; do
    case " $PROGRAM_TESTS " in *" $name "*) continue ;; esac
    run "$name (sanitized)" "$BUILD/sanitize" "test/$name" "$SANITIZE"
done
if [ "$emulator" = yes ]; then
    emulated=$(make -s BUILD="$BUILD" emu-tests) cuda_rows=$(make -s BUILD="$BUILD" cuda-rows)
    for name in $cuda_names; do
        case " $emulated " in
            *" $name "*) run_emulated $(printf '%s\n' $cuda_rows | grep "^$name:" | tr : ' ') ;;
            *) echo "$name is LEFT OUT, not counted: no nccl.h (libnccl-dev, or set NCCL_HOME)" ;;
        esac
    done
else
    echo "the tests of the CUDA code are LEFT OUT, not counted: no CUDA headers (set CUDA_HOME), x86-64 or g++"
fi

[ $# -gt 0 ] || fuzz

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
