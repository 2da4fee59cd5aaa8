"""Data-parallel language models: TensorFlow graphs, Horovod, MPI; LSTMs on PTB built in."""

from lm.processes import keep_freed_memory

keep_freed_memory()  # before NumPy starts threads, each of which would have an arena of its own
