"""The training step in JAX: jit, scan over time, and donated buffers."""

import functools
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from lm.benchmark.workload import LSTM_WEIGHTS, Step, StepResult, initial_weights
from lm.config import Config

Weights = Mapping[str, jax.Array]


class LanguageModel:
    """Embedding, LSTM layers and projection, with dropout on the non-recurrent connections."""

    def __init__(self, config: Config, product_dtype: jnp.dtype):
        self._config, self._product_dtype = config, product_dtype

    def loss(self, weights: Weights, states, key: jax.Array, inputs, targets):
        """Return the loss, summed over time and averaged over rows, and the final states."""
        outputs = self._dropout(weights["embedding"][inputs], key, 0)
        final_states = []
        for layer, state in enumerate(states):
            state, outputs = self._lstm(weights, layer, state, outputs)
            outputs = self._dropout(outputs, key, layer + 1)
            final_states.append(state)
        outputs = outputs.reshape(-1, self._config.hidden_size)
        logits = self._product(outputs, weights["softmax/weights"]) + weights["softmax/bias"]
        target_logits = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=1) - target_logits
        return nll.sum() / inputs.shape[1], final_states

    def _lstm(self, weights: Weights, layer: int, state, inputs: jax.Array):
        """Return the final state (c, h) and the outputs [T, B, H] of a layer."""
        names = (f"lstm_{layer}/{name}" for name in LSTM_WEIGHTS)
        input_weights, recurrent_weights, bias = (weights[name] for name in names)
        # One product projects the inputs of all time steps.
        projected = self._product(inputs, input_weights) + bias

        def cell(state, projected):
            c, h = state
            gates = projected + self._product(h, recurrent_weights)
            i, j, f, o = jnp.split(gates, 4, axis=1)
            c = c * jax.nn.sigmoid(f) + jax.nn.sigmoid(i) * jnp.tanh(j)
            h = jnp.tanh(c) * jax.nn.sigmoid(o)
            return (c, h), h

        return jax.lax.scan(cell, state, projected)

    def _product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return (a.astype(self._product_dtype) @ b.astype(self._product_dtype)).astype(jnp.float32)

    def _dropout(self, values: jax.Array, key: jax.Array, index: int) -> jax.Array:
        keep_prob = self._config.keep_prob
        if keep_prob == 1:
            return values
        kept = jax.random.bernoulli(jax.random.fold_in(key, index), keep_prob, values.shape)
        return jnp.where(kept, values / keep_prob, 0.0)


def build_step(config: Config, vocab_size: int, variant: str, threads: int) -> Step:
    """Build the training step of a variant.

    "jax" computes in float32, and "jax-autocast" computes products in bfloat16.
    """
    os.environ["NPROC"] = str(threads)  # XLA reads it before its first computation
    # Otherwise, GPUs round the factors of float32 products to TensorFloat-32.
    jax.config.update("jax_default_matmul_precision", "highest")
    model = LanguageModel(config, jnp.bfloat16 if variant == "jax-autocast" else jnp.float32)
    shape = (config.batch_size, config.hidden_size)
    # The default generator takes longer for the dropout masks.
    key = jax.random.key(config.seed, impl="rbg")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(weights: Weights, states, number: int, inputs, targets):
        compute = jax.value_and_grad(model.loss, has_aux=True)
        step_key = jax.random.fold_in(key, number)
        (loss, states), gradients = compute(weights, states, step_key, inputs, targets)
        grad_norm = jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in gradients.values()))
        rate = config.learning_rate * jnp.minimum(1.0, config.max_grad_norm / grad_norm)
        weights = {name: weights[name] - rate * grad for name, grad in gradients.items()}
        return weights, states, loss, grad_norm

    weights = jax.tree.map(jnp.asarray, initial_weights(config, vocab_size))
    states = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
    number = 0

    def step(inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        nonlocal weights, states, number
        weights, states, loss, grad_norm = train(weights, states, number, inputs, targets)
        number += 1
        jax.block_until_ready(weights)  # otherwise, the update would continue after the step
        return StepResult(float(loss), float(grad_norm))

    return step
