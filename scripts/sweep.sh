#!/bin/sh
# Trains encodings x sizes; the work is in sweep.py, this only says what is missing. See --help.
set -eu
command -v python3 >/dev/null || { echo "error: python3 not found; run scripts/install_deps.sh" >&2; exit 1; }
exec python3 "$(dirname "$0")/sweep.py" "$@"
