#!/bin/sh
# Installs the Debian packages that bam.c builds, tests and plots with; asks for sudo when not root.
# Packages that are already there cost nothing. `scripts/install_deps.sh --list` only prints the names.
set -eu
packages="gcc g++ make git ca-certificates libdnnl-dev libsentencepiece-dev libcjson-dev libcmocka-dev python3 python3-pip
    sentencepiece gnuplot-nox fonts-dejavu-core libopenmpi-dev openmpi-bin"
[ "${1:-}" = --list ] && { echo $packages; exit 0; }

missing=""
for p in $packages; do
    dpkg-query -W -f '${Status}\n' "$p" 2>/dev/null | grep -q '^install ok installed$' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0

echo "installing:$missing"
as_root=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "error: not root and no sudo; as root run: apt-get install$missing" >&2; exit 1; }
    as_root=sudo
fi
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
