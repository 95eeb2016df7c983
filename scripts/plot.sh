#!/bin/sh
# Pictures of runs; the work is in plot.py, this only says what is missing. See --help.
set -eu
needed="python3 gnuplot"
case "${1:-}" in -h | --help) needed=python3 ;; esac
for program in $needed; do
    command -v $program >/dev/null || { echo "error: $program not found; run scripts/install_deps.sh" >&2; exit 1; }
done
exec python3 "$(dirname "$0")/plot.py" "$@"
