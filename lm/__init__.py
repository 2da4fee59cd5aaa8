"""Data-parallel language models with TensorFlow graphs, Horovod and MPI; LSTMs on PTB built in."""

__version__ = "1.0"
