# shellcheck shell=bash disable=SC2154
# Sourced by setup.sh: installs Horovod into .venv, from the user's cache or built.

build_log=.venv/horovod-build.log

# Builds the wheel into .venv/wheels.
build_horovod() (
    # CMake and Ninja come from the pins, so that neither make nor the host's CMake matters.
    # Some of Horovod's files use std::string and uint8_t without including them, which gcc >= 13
    # refuses. Without --no-build-isolation Horovod builds, silently, without TensorFlow; without
    # --quiet its setup.py passes make's VERBOSE=1 to Ninja.
    export PATH=$root/.venv/bin:$PATH CMAKE_GENERATOR=Ninja MAKEFLAGS="-j$(nproc)" CXX=${CXX:-g++}
    export CXXFLAGS="-include stdexcept -include string -include cstdint ${CXXFLAGS:-}"
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    # CMake looks into MPI_HOME, I_MPI_ROOT and CMAKE_PREFIX_PATH, which modules of other MPIs set,
    # before PATH; but first of all into this.
    MPI_ROOT=$(dirname "$(dirname "$(command -v mpicxx)")")
    export MPI_ROOT
    [[ $USE_GPU == 0 ]] || export_cuda
    source=.venv/horovod-source
    rm -rf $source .venv/wheels && mkdir $source &&
        .venv/bin/python -m pip download --no-deps --no-build-isolation --no-binary horovod \
            --constraint "$pins_file" --dest $source horovod &&
        tar -xzf $source/*.tar.gz -C $source --strip-components 1 &&
        sed -i -f run_scripts/horovod.sed $source/horovod/tensorflow/{CMakeLists.txt,mpi_ops.cc} &&
        .venv/bin/python -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir \
            --config-settings=--global-option=--quiet --wheel-dir .venv/wheels ./$source &&
        rm -rf $source
) >$build_log 2>&1

# Prints all that the wheel depends on: what it is built from, with what and how, and for which
# machine. Horovod uses those three features of a CPU where the one that builds it has them.
wheel_key() {
    echo "$tensorflow | $mpi | $pins | ${CXXFLAGS:-} | ${LDFLAGS:-}"
    .venv/bin/python -c "import platform, sysconfig
print(sysconfig.get_config_var('SOABI'), platform.machine(), *platform.libc_ver())"
    "${CXX:-g++}" --version
    if [[ $USE_GPU == 1 ]]; then
        "${nvcc:-true}" --version
        grep -E '^nvidia-(nccl|cuda-nvcc=)' "$pins_file"
        declare -f export_cuda
    fi
    grep -m 1 '^flags' /proc/cpuinfo 2>/dev/null | grep -owE 'avx|f16c|fma' || true
    env | grep ^HOROVOD_ || true
    declare -f build_horovod
    cat run_scripts/horovod.sed
}

# Installs a wheel, also over one of the same version; fails if it does not load.
try_wheel() {
    local built="hvd.mpi_built()"
    [[ $USE_GPU == 0 ]] || built+=" and hvd.nccl_built()"
    { try_install --force-reinstall --no-deps "$1" &&
        .venv/bin/python -c "import horovod.tensorflow as hvd; assert $built"; } >>$build_log 2>&1
}

install_horovod() {
    local key kept
    key=$(wheel_key | sha256sum)
    kept=$cache/horovod/${key%% *}
    if [[ -d $kept ]]; then
        say "installing Horovod from $cache"
        if try_wheel "$kept"/horovod-*.whl; then
            return
        fi
        say "that wheel does not load ($build_log says why)"
    fi
    if [[ $USE_GPU == 1 && -z $nvcc ]]; then
        install nvidia-cuda-nvcc nvidia-cuda-cccl
    fi
    say "building Horovod with $mpi (about 2 minutes on 2 cores)"
    saying $build_log "building Horovod" build_horovod || {
        grep -E 'error:|Error' $build_log | head -n 8 >&2 || true
        die "Horovod did not build; the whole log is $build_log"
    }
    try_wheel .venv/wheels/horovod-*.whl || die "Horovod does not load; see the end of $build_log"
    keep .venv/wheels/horovod-*.whl "$kept" 2>>$build_log ||
        say "the wheel could not be kept in $cache; the next checkout builds it again"
}
