#!/bin/sh
# Finds the libraries by compiling a line for each; writes BUILD/config.mk (for make) and BUILD/summary.txt
# (for people). Stops with one line when something that the programs cannot do without is missing, unless PARTIAL=1
# asks for what can be built without it.
set -u
case "${1:-}" in
    -h | --help | "") echo "usage: [PARTIAL=1] scripts/detect.sh BUILD    (make calls it; writes BUILD/config.mk)"; exit 0 ;;
esac
build=$1
tmp=$build/detect
mkdir -p "$tmp"
config=$build/config.mk.new summary=$build/summary.txt
: >"$config"
: >"$summary"
defines="" missing="" required=""

# found NAME DESCRIPTION: one line of the summary
found() { printf '  %-14s %s\n' "$1" "$2" >>"$summary"; }

# links LANGUAGE SOURCE FLAGS...: does this source compile and link?
links() {
    language=$1 source=$2
    shift 2
    compiler=${CC:-cc}
    [ "$language" = c++ ] && compiler=${CXX:-c++}
    printf '%s\n' "$source" >"$tmp/source"
    $compiler -x "$language" "$tmp/source" -o "$tmp/program" "$@" >"$tmp/log" 2>&1
}

if ! links c 'int main(void) { return 0; }'; then
    echo "error: ${CC:-cc} cannot compile a program; run scripts/install_deps.sh or set CC" >&2
    exit 1
fi
found compiler "$(${CC:-cc} --version | head -n 1)"

if links c '#include <omp.h>
int main(void) { return omp_get_max_threads() < 1; }' -fopenmp; then
    echo "OPENMP_CFLAGS = -fopenmp
OPENMP_LIBS = -fopenmp" >>"$config"
    found OpenMP "all cores"
else
    echo "OPENMP_CFLAGS = -fopenmp-simd -Wno-unknown-pragmas" >>"$config"
    found OpenMP "missing: one core only"
    missing="$missing libgomp"
fi

if links c '#include <dnnl.h>
int main(void) { return dnnl_version()->major; }' -ldnnl; then
    "$tmp/program"
    version=$?
    echo "LIB_DNNL = -ldnnl" >>"$config"
    found oneDNN "version $version: matrix products"
else
    found oneDNN "missing"
    required="$required libdnnl-dev"
fi

if links c '#include <cjson/cJSON.h>
int main(void) { return cJSON_Version() == 0; }' -lcjson; then
    echo "LIB_CJSON = -lcjson" >>"$config"
    found cJSON "run folders and metadata"
else
    found cJSON "missing"
    required="$required libcjson-dev"
fi

# through the compiler wrapper's answers, for the paths differ from MPI to MPI (Open MPI, then MPICH's spelling)
mpi_flags=$(mpicc --showme:compile 2>/dev/null || mpicc -compile_info 2>/dev/null | cut -d " " -f 2-)
mpi_libs=$(mpicc --showme:link 2>/dev/null || mpicc -link_info 2>/dev/null | cut -d " " -f 2-)
if links c '#include <mpi.h>
int main(void) { int version, minor; return MPI_Get_version(&version, &minor); }' $mpi_flags $mpi_libs; then
    echo "MPI_CFLAGS = $mpi_flags
LIB_MPI = $mpi_libs" >>"$config"
    defines="$defines -DHAVE_MPI"
    found MPI "training on several processes"
else
    found MPI "missing: one process"
    missing="$missing libopenmpi-dev"
fi

if links c++ '#include <sentencepiece_processor.h>
int main() { sentencepiece::SentencePieceProcessor p; return p.GetPieceSize() != 0; }' -lsentencepiece; then
    echo "LIB_SENTENCEPIECE = -lsentencepiece" >>"$config"
    defines="$defines -DHAVE_SENTENCEPIECE"
    found SentencePiece "tokenizer models"
else
    found SentencePiece "missing: only the built-in 'bytes' tokenizer"
    missing="$missing libsentencepiece-dev"
fi

if links c '#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
int main(void) { return 0; }' -lcmocka; then
    echo "LIB_CMOCKA = -lcmocka" >>"$config"
    found cmocka "tests"
else
    found cmocka "missing: no tests"
    missing="$missing libcmocka-dev"
fi

# CUDA is chosen where it can be compiled and there is a device to run it; the CPU's products are not needed then.
cuda_home=${CUDA_HOME:-/usr/local/cuda} gpu=""
nvcc=${NVCC:-$(command -v nvcc || echo "$cuda_home/bin/nvcc")}
if [ -x "$nvcc" ] && "$nvcc" --version >"$tmp/log" 2>&1; then
    nvcc_home=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    echo "NVCC = $nvcc
CUDA_LIB = $nvcc_home/lib64" >>"$config"
    found nvcc "$(sed -n 's/.*release \([0-9.]*\).*/CUDA \1/p' "$tmp/log")"
    if ls /dev/nvidia0 >/dev/null 2>&1 || nvidia-smi -L >/dev/null 2>&1; then
        gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
        gpu=${gpu:-present}
        echo "GPU = yes
BACKEND ?= cuda" >>"$config"
        required=$(echo "$required" | sed 's/ libdnnl-dev//')
        found GPU "$gpu"
    else
        found GPU "none: programs for the CPU; make cuda only compiles"
    fi
else
    echo "NVCC =" >>"$config"
    found nvcc "missing: no CUDA programs"
fi
echo "BACKEND ?= cpu" >>"$config"

cuda_include=$cuda_home/include
if links c++ '#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cublasLt.h>
#ifndef __x86_64__
#error "the emulator is written for x86-64"
#endif
int main() { return 0; }' -isystem "$cuda_include" && command -v "${EMU_CXX:-g++}" >/dev/null; then
    echo "EMULATOR = yes
CUDA_INCLUDE = $cuda_include" >>"$config"
    found "CUDA headers" "tests of the CUDA code in the emulator"
else
    found "CUDA headers" "missing (CUDA_HOME, x86-64, g++): the tests of the CUDA code are left out"
fi

# The header is enough for the emulator's NCCL; programs for GPUs link the library. NCCL_HOME: a copy of one's own.
nccl_include=${NCCL_HOME:+$NCCL_HOME/include} nccl_lib=${NCCL_HOME:+$NCCL_HOME/lib}
nccl_lib=${nccl_lib:-${nvcc_home:-$cuda_home}/lib64}
nccl_source='#include <nccl.h>
int main() { int version; return ncclGetVersion(&version) != ncclSuccess; }'
if links c++ "$nccl_source" ${nccl_include:+-isystem "$nccl_include"} -isystem "$cuda_include" -c; then
    echo "NCCL = yes
NCCL_INCLUDE = $nccl_include" >>"$config"
    if links c++ "$nccl_source" ${nccl_include:+-isystem "$nccl_include"} -isystem "$cuda_include" -L"$nccl_lib" -lnccl; then
        echo "LIB_NCCL = -L$nccl_lib -Xlinker -rpath=$nccl_lib -lnccl" >>"$config"
        found NCCL "several GPUs"
    else
        found NCCL "header only: emulated ranks, no library for GPUs"
    fi
else
    found NCCL "missing (NCCL_HOME, libnccl-dev): one GPU only, no tests of several"
fi

echo "CONFIG_DEFINES =$defines" >>"$config"
rm -rf "$tmp"
if [ -n "$required" ] && [ "${PARTIAL:-0}" != 1 ]; then
    echo "error: missing$required; run scripts/install_deps.sh (or: apt-get install$required), then make again" >&2
    exit 1
fi
[ -z "$missing" ] || echo "  to install what is missing ($(echo $missing)): scripts/install_deps.sh" >>"$summary"
# The file changes only when what was found does, so that nothing is built again for it.
if cmp -s "$config" "$build/config.mk"; then rm "$config"; else mv "$config" "$build/config.mk"; fi
