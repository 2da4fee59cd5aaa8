"""What the ranks exchange in a training step, on paper."""

from __future__ import annotations

import math
from typing import NamedTuple

from lm.config import Config
from lm.model.shape import weight_shapes

_FLOAT_BYTES = 4


class Message(NamedTuple):
    """One collective operation of a step."""

    collective: str  # "allreduce" or "allgather"
    bytes: int  # of its result, the same on all ranks

    def bytes_sent(self, ranks: int) -> float:
        """Return what each rank sends: (N - 1) / N of the bytes, twice to allreduce."""
        passes = 2 if self.collective == "allreduce" else 1
        return passes * (ranks - 1) / ranks * self.bytes


def messages_of_step(config: Config, vocab_size: int) -> list[Message]:
    """List what the ranks exchange in a step: the gradients, and the sum of the losses.

    The embedding's gradient goes dense, or sparse as the rows and ids of the global batch's
    tokens, as `lm.distributed.gradients` decides; where it is tied to the output layer, the part
    of the gradient from there goes dense besides.
    """
    # Here, not above: the parent process of a benchmark has no other need of TensorFlow.
    from lm.distributed.gradients import dense_is_smaller
    from lm.training.step import NUM_SUMS

    tokens = config.batch_size * config.num_steps
    messages = [Message("allreduce", NUM_SUMS * _FLOAT_BYTES)]
    shapes = weight_shapes(config, vocab_size)
    if config.tie_weights:
        messages.append(Message("allreduce", math.prod(shapes["embedding"]) * _FLOAT_BYTES))
    for name, shape in shapes.items():
        if name == "embedding" and not dense_is_smaller(config, vocab_size):
            messages.append(Message("allgather", tokens * shape[1] * _FLOAT_BYTES))
            messages.append(Message("allgather", tokens * _FLOAT_BYTES))
        else:
            messages.append(Message("allreduce", math.prod(shape) * _FLOAT_BYTES))
    return messages
