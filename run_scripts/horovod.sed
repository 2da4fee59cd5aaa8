# Changes to horovod/tensorflow/CMakeLists.txt and mpi_ops.cc of Horovod 0.28.1.

# Find MPI and NCCL in the .venv that contains the library, so that one wheel serves all checkouts. CMake
# would only name the directories of the .venv that built it.
/^set(TF_TARGET_LIB/i set(CMAKE_BUILD_RPATH "$ORIGIN/../../../.." "$ORIGIN/../../nvidia/nccl/lib")

# Skip the XLA operations (HOROVOD_ENABLE_XLA_OPS=1): TensorFlow's wheels after 2.18 lack their headers.
/xla_mpi_ops\.cc/ {
    i if(Tensorflow_VERSION VERSION_LESS 2.19)
    a endif()
}

# Link Horovod's own CUDA runtime. TensorFlow exports the functions of its runtime, so code that one version
# of nvcc compiled would run in the CUDA runtime of a different version.
/^target_link_libraries(/ {
    i if(HAVE_CUDA)
    i list(APPEND LINKER_LIBS -Wl,--whole-archive,${CUDA_cudart_static_LIBRARY},--no-whole-archive)
    i endif()
}

# Replace a function that TensorFlow after 2.18 does not export any more.
s/^GpuStreamHandle AsGpuStreamValue(Stream\* stream);/template <typename T> GpuStreamHandle AsGpuStreamValue(T* stream) {\
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\
}/
