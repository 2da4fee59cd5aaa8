# What set-up changes in horovod/tensorflow/CMakeLists.txt of Horovod 0.28.1.

# The library finds MPI and NCCL in the .venv that it is installed in, wherever it was built: one
# wheel serves all checkouts. CMake would name the directories of the .venv that built it alone.
1i set(CMAKE_BUILD_RPATH "$ORIGIN/../../../.." "$ORIGIN/../../nvidia/nccl/lib")

# The wheels of TensorFlow after 2.18 lack headers that the XLA operations need. What is lost is an
# allreduce inside XLA-compiled code, which is off unless HOROVOD_ENABLE_XLA_OPS=1 asks for it.
/xla_mpi_ops\.cc/ {
    i if(Tensorflow_VERSION VERSION_LESS 2.19)
    a endif()
}
