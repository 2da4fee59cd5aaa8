"""Data-parallel language models with TensorFlow graphs, Horovod and MPI; LSTMs on PTB built in."""

import logging

__version__ = "0.1.0"

logger = logging.getLogger("lm")  # lm/events/logs.py opens its destinations
