"""Data-parallel language models: TensorFlow graphs, Horovod, MPI; LSTMs on PTB built in."""
