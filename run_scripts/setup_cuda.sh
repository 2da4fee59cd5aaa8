# shellcheck shell=bash disable=SC2154
# GPU-specific parts of setup.sh, which sources this file (see docs/gpu.md).

# Prints the compiler of the host's CUDA toolkit if it exists.
host_nvcc() { PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin command -v nvcc || true; }

need_cuda() {
    local driver
    [[ -z ${CUDA_HOME:-} || -x $CUDA_HOME/bin/nvcc ]] ||
        die "CUDA_HOME has no bin/nvcc ($CUDA_HOME): set it to a CUDA toolkit, or unset it (docs/gpu.md)"
    [[ -z $nvcc ]] || return 0
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
    [[ ! $driver =~ ^[0-9]+ ]] || ((BASH_REMATCH >= 580)) ||
        die "the NVIDIA driver $BASH_REMATCH is too old for PyPI's CUDA 13: update it to 580, or install a CUDA 12 toolkit and set CUDA_HOME, or set USE_GPU=0 (docs/gpu.md)"
}

# Sets the environment for building Horovod.
export_cuda() {
    local nvidia cuda
    nvidia=$(echo "$venv"/lib/python3*/site-packages/nvidia)
    if [[ -n $nvcc ]]; then # nvcc may be a wrapper, so ask it for the toolkit
        cuda=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    else
        cuda=$nvidia/cu13
        ln -sfn lib "$cuda/lib64"
        ln -sf libcudart.so.13 "$cuda/lib/libcudart.so"
    fi
    # Linkers look for libnccl.so and libcudart.so. The wheels only have versioned names.
    ln -sf libnccl.so.2 "$nvidia/nccl/lib/libnccl.so"
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$nvidia/nccl HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_CUDA_HOME=$cuda PATH=$cuda/bin:$PATH
}
