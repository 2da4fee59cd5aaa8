# shellcheck shell=bash disable=SC2154
# Sourced by setup.sh: installs Horovod into .venv, from the user's cache or from source.

build_log=$venv/horovod-build.log

# At most 8 compilers, because a login node may have 100 cores and little memory for each user.
build_jobs() { echo $(($(nproc) < 8 ? $(nproc) : 8)); }

# Builds the wheel into .venv/wheels.
build_horovod() (
    # With gcc >= 13, some of Horovod's files lack includes. With build isolation, Horovod silently builds
    # without TensorFlow. --quiet stops Horovod's setup.py from passing make's VERBOSE=1 to Ninja.
    export PATH=$venv/bin:$PATH CMAKE_GENERATOR=Ninja CXX=${CXX:-g++}
    # CMake passes the number of compilers to Ninja. Without MAKEFLAGS, which Ninja ignores, Horovod's setup.py would add -j8.
    export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(build_jobs)} MAKEFLAGS=-j8
    export CXXFLAGS="-include stdexcept -include string -include cstdint ${CXXFLAGS:-}"
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    # CMake searches MPI_ROOT before the variables that modules of other MPIs set.
    MPI_ROOT=$(dirname "$(dirname "$(command -v mpicxx)")")
    export MPI_ROOT
    [[ $USE_GPU == 0 ]] || export_cuda
    source=$venv/horovod-source
    rm -rf $source "$venv/wheels" && mkdir $source &&
        "$venv/bin/python" -m pip download --no-deps --no-build-isolation --no-binary horovod \
            --constraint "$pins_file" --dest $source horovod &&
        tar -xzf $source/*.tar.gz -C $source --strip-components 1 &&
        sed -i -f run_scripts/horovod.sed $source/horovod/tensorflow/{CMakeLists.txt,mpi_ops.cc} &&
        "$venv/bin/python" -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir \
            --config-settings=--global-option=--quiet --wheel-dir "$venv/wheels" $source &&
        rm -rf $source
) >$build_log 2>&1

# Prints everything that the wheel depends on. Horovod uses three CPU features if the building host has them.
wheel_key() {
    echo "$tensorflow | $mpi | $pins | ${CXXFLAGS:-} | ${LDFLAGS:-}"
    "$venv/bin/python" -c "import platform, sysconfig
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

# Installs a wheel, even over the same version. Fails if the wheel does not load.
try_wheel() {
    local built="hvd.mpi_built()"
    [[ $USE_GPU == 0 ]] || built+=" and hvd.nccl_built()"
    { try_install --force-reinstall --no-deps "$1" &&
        "$venv/bin/python" -c "import horovod.tensorflow as hvd; assert $built"; } >>$build_log 2>&1
}

install_horovod() {
    local key kept
    key=$(wheel_key | sha256sum)
    open_cache "horovod/${key%% *}"
    if [[ -d $kept ]] && try_wheel "$kept"/horovod-*.whl; then
        return
    fi
    [[ $USE_GPU == 0 || -n $nvcc ]] || install nvidia-cuda-nvcc nvidia-cuda-cccl
    say "building Horovod with $mpi (about 2 minutes on 2 cores)"
    build_horovod || die "Horovod did not build: $(grep -m 1 -E 'error:|Error' $build_log) (see $build_log)"
    try_wheel "$venv"/wheels/horovod-*.whl || die "Horovod does not load; see the end of $build_log"
    put "$venv"/wheels/horovod-*.whl "$kept" 2>>$build_log ||
        say "the wheel could not be kept in $cache; the next checkout builds it again"
}
