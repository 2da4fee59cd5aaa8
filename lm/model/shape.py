"""What the built-in model consists of and costs, on paper; no TensorFlow.

Symbols: T time steps, B rows of the global batch, H hidden units, E units of the embedding, V
words, L layers.
"""

from __future__ import annotations

import math

from lm.config import Config


def weight_shapes(config: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trained variables, by name, in the order of the network."""
    hidden, embedding = config.hidden_size, config.embedding_size or config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocab_size, embedding)}
    for layer in range(config.num_layers):
        inputs = hidden if layer else embedding
        shapes[f"lstm_{layer}/input_weights"] = (inputs, 4 * hidden)
        shapes[f"lstm_{layer}/recurrent_weights"] = (hidden, 4 * hidden)
        shapes[f"lstm_{layer}/bias"] = (4 * hidden,)
    if not config.tie_weights:
        shapes["softmax/weights"] = (hidden, vocab_size)
    elif embedding != hidden:
        shapes["softmax/projection"] = (hidden, embedding)
    shapes["softmax/bias"] = (vocab_size,)
    return shapes


def step_flops(config: Config, vocab_size: int) -> int:
    """Count the operations of a step's matrix products, a multiplication and an addition as two.

    Each weight matrix but the embedding is used in three products per token: forward, for the
    gradient of its input and for its own gradient. So 3 * 2 * T * B * (8 L H^2 + H V) operations,
    where E is H. An embedding that is tied to the output layer is used in these products too.
    What is computed a second time, elementwise work and the optimizer do not count, as in the
    model-FLOPs utilization of Chowdhery et al. 2022, "PaLM", appendix B.
    """
    products = sum(
        math.prod(shape)
        for name, shape in weight_shapes(config, vocab_size).items()
        if (name != "embedding" or config.tie_weights) and len(shape) == 2
    )
    return 6 * config.num_steps * config.batch_size * products
