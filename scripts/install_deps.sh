#!/bin/sh
# Installs the Debian packages that bam.c builds, tests and plots with. See --help.
set -eu
usage() {
    cat <<'END'
usage: scripts/install_deps.sh [--list | --cudnn]
Installs the Debian packages that bam.c builds, tests and plots with; asks for sudo when not root. Packages that are
already there cost nothing.

  --list   only prints their names
  --cudnn  gets the headers of cuDNN's frontend instead, and cuDNN itself where the CUDA toolkit has none, from PyPI
           into .deps/cudnn: for make cuda USE_CUDNN=1
END
}
case "${1:-}" in
    "" | --list | --cudnn) ;;
    -h | --help) usage; exit 0 ;;
    *) echo "error: unknown argument $1; see scripts/install_deps.sh --help" >&2; exit 1 ;;
esac
if [ "${1:-}" = --cudnn ]; then
    cd "$(dirname "$0")/.."
    packages=nvidia-cudnn-frontend==1.32.0
    nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
    toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    found=$(ls "${CUDNN_HOME:-$toolkit}/include/cudnn.h" "$toolkit/include/cudnn.h" /usr/include/cudnn.h \
        /usr/include/x86_64-linux-gnu/cudnn.h /usr/local/include/cudnn.h 2>/dev/null | head -n 1)
    if [ -z "$found" ]; then
        version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p')
        packages="$packages nvidia-cudnn-cu${version:-13}"
    fi
    echo "installing into .deps/cudnn: $packages"
    python3 -m pip install -q --disable-pip-version-check --no-deps --upgrade --target .deps/cudnn $packages && exit 0
    echo "error: pip could not install $packages into .deps/cudnn; see above" >&2
    exit 1
fi
packages="gcc g++ make git ca-certificates libdnnl-dev libsentencepiece-dev libcjson-dev libcmocka-dev python3 python3-pip
    sentencepiece gnuplot-nox fonts-dejavu-core libopenmpi-dev openmpi-bin clang libclang-rt-dev"
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
