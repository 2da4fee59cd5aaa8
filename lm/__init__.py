"""Data-parallel LSTM language models on PTB: TensorFlow graphs, Horovod, MPI."""
