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

# run LABEL BUILD NAME FLAGS: builds and runs one cmocka program and adds up its counts. A program that dies, or
# that reports no test at all, counts as one failure.
run() {
    label=$1 build=$2 name=$3 started=$(date +%s)
    log=$build/test/$name.log
    mkdir -p "$build/test"
    if ! make -s -j "$(nproc)" BUILD="$build" EXTRA_CFLAGS="$4" "$build/test/$name" >"$log" 2>&1; then
        failed=$((failed + 1))
        report "$label" 0 1
        tail -n 30 "$log"
        return
    fi
    "$build/test/$name" >"$log" 2>&1
    status=$?
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{s += $1} END {print s + 0}')
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{s += $1} END {print s + 0}')
    if [ "$f" -eq 0 ] && { [ $status -ne 0 ] || [ "$p" -eq 0 ]; }; then f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    report "$label" "$p" "$f"
    [ "$f" -eq 0 ] || tail -n 40 "$log"
}

if [ $# -gt 0 ]; then
    names=$*
else
    names=$(basename -s .c test/test_*.c)
    warnings="-std=gnu11 -Wall -Wextra -Werror -Wno-unknown-pragmas -fsyntax-only"
    for source in train_gpt.cu evaluate.c; do
        check "$source as C++" "$CXX" -std=c++17 ${warnings#-std=gnu11 } -x c++ "$source"
    done
    if command -v clang >/dev/null; then
        for source in llmc/*.c dataset/*.c; do check "clang $source" clang -march=native $warnings "$source"; done
        for source in train_gpt.cu evaluate.c; do check "clang $source" clang $warnings -x c "$source"; done
    fi
fi
for name in $names; do run "$name" "$BUILD" "$name" ""; done
for name in $names; do
    case " $PROGRAM_TESTS " in *" $name "*) continue ;; esac
    run "$name (sanitized)" "$BUILD/sanitize" "$name" "$SANITIZE"
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
