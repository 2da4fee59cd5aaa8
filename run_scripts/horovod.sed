# What set-up changes in horovod/tensorflow/CMakeLists.txt and mpi_ops.cc of Horovod 0.28.1.

# The library finds MPI and NCCL in the .venv that it is installed in, wherever it was built: one
# wheel serves all checkouts. CMake would name the directories of the .venv that built it alone.
/^set(TF_TARGET_LIB/i set(CMAKE_BUILD_RPATH "$ORIGIN/../../../.." "$ORIGIN/../../nvidia/nccl/lib")

# The wheels of TensorFlow after 2.18 lack headers that the XLA operations need. What is lost is an
# allreduce inside XLA-compiled code, which is off unless HOROVOD_ENABLE_XLA_OPS=1 asks for it.
/xla_mpi_ops\.cc/ {
    i if(Tensorflow_VERSION VERSION_LESS 2.19)
    a endif()
}

# TensorFlow exports the functions of its CUDA runtime, and Horovod would link to these: what one
# version of nvcc compiles would run in the CUDA of another. It has all of its own inside instead.
/^target_link_libraries(/ {
    i if(HAVE_CUDA)
    i list(APPEND LINKER_LIBS -Wl,--whole-archive,${CUDA_cudart_static_LIBRARY},--no-whole-archive)
    i endif()
}

# TensorFlow after 2.18 does not export this function any more. It returned the same.
s/^GpuStreamHandle AsGpuStreamValue(Stream\* stream);/template <typename T> GpuStreamHandle AsGpuStreamValue(T* stream) {\
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\
}/
