# shellcheck shell=bash disable=SC2154
# Sourced by setup.sh: what is different where GPUs are to train (docs/gpu.md).

# Whether nobody has to ask for GPUs. A .venv stays as it is: of the hosts that share it, some may have
# GPUs and some not.
for_gpus() {
    if [[ -f .venv/.done-packages ]]; then
        [[ $(<.venv/.done-packages) == *"[and-cuda]"* ]]
    else
        [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]
    fi
}

# Prints the compiler of the host's CUDA toolkit; nothing where there is none.
host_nvcc() { PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin command -v nvcc || true; }

need_cuda() {
    local driver
    [[ -z ${CUDA_HOME:-} || -x $CUDA_HOME/bin/nvcc ]] ||
        die "CUDA_HOME has no bin/nvcc ($CUDA_HOME): set it to a CUDA toolkit, or not at all (docs/gpu.md)"
    [[ -z $nvcc ]] || return 0
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
    [[ ! $driver =~ ^[0-9]+ ]] || ((BASH_REMATCH >= 580)) ||
        die "the NVIDIA driver $BASH_REMATCH is too old for PyPI's CUDA 13: update it to 580, or install a CUDA 12 toolkit and set CUDA_HOME (docs/gpu.md)"
}

# TensorFlow 2.21 looks for cuSOLVER where the other CUDA libraries are, not in its own directory, and
# takes no GPU without it.
link_cusolver() {
    ln -sf ../../cusolver/lib/libcusolver.so.11 \
        .venv/lib/python3*/site-packages/nvidia/cuda_runtime/lib
}

# Sets the environment of Horovod's build.
export_cuda() {
    local nvidia cuda
    nvidia=$(echo "$root"/.venv/lib/python3*/site-packages/nvidia)
    if [[ -n $nvcc ]]; then # also one behind a wrapper knows where its toolkit lies
        cuda=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    else
        cuda=$nvidia/cu13
        ln -sfn lib "$cuda/lib64"
        ln -sf libcudart.so.13 "$cuda/lib/libcudart.so"
    fi
    # Wheels have no libnccl.so and libcudart.so, the names that linkers look for.
    ln -sf libnccl.so.2 "$nvidia/nccl/lib/libnccl.so"
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=$nvidia/nccl HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_CUDA_HOME=$cuda PATH=$cuda/bin:$PATH
}
