"""The same training step as others write it, to compare speed and losses with: TensorFlow, PyTorch.

`tensorflow` is the graph of TensorFlow's PTB tutorial, `torch` is PyTorch's `nn.LSTM`. Both start
from the weights and train on the words of `lm/benchmark/workers/workload.py`.
"""
