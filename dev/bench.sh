#!/bin/sh
# Runs the benchmarks of a build and gathers their lines in BUILD/bench.json: an array of objects.
set -eu
case "${1:-}" in
    -h | --help | "") echo "usage: dev/bench.sh BUILD    (make bench calls it; writes BUILD/bench.json)"; exit 0 ;;
esac
build=$1
lines=$build/bench.jsonl
rm -f "$lines"
echo "matrix products"
"$build/dev/bench_matmul" --json "$lines"
echo
echo "attention, CPU time (share: of oneDNN's fp32 rate in the same run)"
OMP_WAIT_POLICY=passive "$build/dev/bench_attention" --cpu-time --json "$lines"
echo
echo "training, B 8, T 512 (mfu: of this machine's own matrix-product rate at that precision)"
"$build/dev/bench_train" --json "$lines"
echo
echo "reading 32k tokens, and 70,000 with losses, CPU time (share: of the fp32 rate in the same run)"
OMP_WAIT_POLICY=passive "$build/dev/bench_evaluate" --cpu-time --json "$lines"
{ echo "["; sed '$!s/$/,/' "$lines"; echo "]"; } >"$build/bench.json"
rm -f "$lines"
echo
echo "written to $build/bench.json"
