#!/bin/sh
# Builds and runs every test program; prints one line a program and, last, "N passed, N failed" in all.
set -u
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build}
passed=0 failed=0

# run LABEL COMMAND...: a cmocka program; its counts are added up, its output shown only when it fails.
run() {
    label=$1 started=$(date +%s)
    shift
    log=$BUILD/test/$label.log
    "$@" >"$log" 2>&1
    status=$?
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{s += $1} END {print s + 0}')
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' "$log" | awk '{s += $1} END {print s + 0}')
    [ $status -ne 0 ] && [ "$f" -eq 0 ] && f=1
    if [ $status -eq 0 ] && [ "$p" -eq 0 ]; then f=1; fi
    passed=$((passed + p)) failed=$((failed + f))
    printf '%-28s %3d passed, %d failed  (%d s)\n' "$label" "$p" "$f" $(($(date +%s) - started))
    [ "$f" -eq 0 ] || tail -n 40 "$log"
}

mkdir -p "$BUILD/test"
for source in test/test_*.c; do
    name=$(basename "$source" .c)
    if make -s -j "$(nproc)" BUILD="$BUILD" "$BUILD/test/$name" >"$BUILD/test/$name.build" 2>&1; then
        run "$name" "$BUILD/test/$name"
    else
        failed=$((failed + 1))
        echo "$name does not build:"
        tail -n 20 "$BUILD/test/$name.build"
    fi
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
