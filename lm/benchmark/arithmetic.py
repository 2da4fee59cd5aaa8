"""What a training step costs on paper: products and bytes.

Symbols: T time steps, B rows of the global batch, H hidden units, V words, L layers, N ranks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lm.config import Config

_FLOAT_BYTES = 4


def weight_shapes(config: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights, by the names of the graph's variables."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes[f"lstm_{layer}/input_weights"] = (hidden, 4 * hidden)
        shapes[f"lstm_{layer}/recurrent_weights"] = (hidden, 4 * hidden)
        shapes[f"lstm_{layer}/bias"] = (4 * hidden,)
    shapes["softmax/weights"] = (hidden, vocab_size)
    shapes["softmax/bias"] = (vocab_size,)
    return shapes


def model_flops(config: Config, vocab_size: int) -> int:
    """Count the operations of a step's matrix products, a multiplication and an addition as two.

    Each weight matrix is used in three products a token: forward, for the gradient of its input
    and for its own gradient. So 3 * 2 * T * B * (8 L H^2 + H V) operations. What is computed a
    second time, elementwise work and the optimizer do not count, as in the model-FLOPs
    utilization of Chowdhery et al. 2022, "PaLM", appendix B.
    """
    hidden = config.hidden_size
    products = 8 * config.num_layers * hidden**2 + hidden * vocab_size
    return 6 * config.num_steps * config.batch_size * products


class Message(NamedTuple):
    """One collective operation of a step."""

    collective: str  # "allreduce" or "allgather"
    bytes: int  # of its result, the same on all ranks

    def bytes_sent(self, ranks: int) -> float:
        """Return what each rank sends in a ring: (N - 1) / N of the bytes, twice to allreduce."""
        passes = 2 if self.collective == "allreduce" else 1
        return passes * (ranks - 1) / ranks * self.bytes


def messages_of_step(config: Config, vocab_size: int) -> list[Message]:
    """List what the ranks exchange in a step: the gradients, and the sum of the losses.

    The embedding's gradient goes dense, or sparse as the rows and ids of the global batch's
    tokens, as `lm.optimizer` decides.
    """
    # Here, not above: the parent process of a benchmark has no other need of TensorFlow.
    from lm.training.optimizer import dense_is_smaller

    tokens = config.batch_size * config.num_steps
    messages = [Message("allreduce", _FLOAT_BYTES)]  # the loss
    for name, shape in weight_shapes(config, vocab_size).items():
        if name == "embedding" and not dense_is_smaller(config, vocab_size):
            messages.append(Message("allgather", tokens * config.hidden_size * _FLOAT_BYTES))
            messages.append(Message("allgather", tokens * _FLOAT_BYTES))
        else:
            messages.append(Message("allreduce", math.prod(shape) * _FLOAT_BYTES))
    return messages
