"""The training step in JAX: jit, scan over time, and donated buffers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lm.benchmark.worker import Step, StepResult, initial_weight
from lm.config import Config

Weights = dict[str, jax.Array]
State = tuple[jax.Array, jax.Array]  # memory and output of an LSTM layer, both [B, H]
Product = Callable[[jax.Array, jax.Array], jax.Array]


def build_step(config: Config, vocab_size: int, variant: str, threads: int) -> Step:
    """Build the training step of a variant.

    "jax" computes in float32, and "jax-autocast" computes products in bfloat16.
    """
    os.environ["NPROC"] = str(threads)  # XLA reads it before its first computation
    product = _bfloat16_product if variant == "jax-autocast" else jnp.matmul
    shape = (config.batch_size, config.hidden_size)
    weights = _initial_weights(config, vocab_size)
    states = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
    # The default generator takes longer for the dropout masks.
    key = jax.random.key(config.seed, impl="rbg")

    def compute_loss(weights: Weights, states: list[State], key: jax.Array, inputs, targets):
        outputs, states = _layers(config, product, weights, states, key, inputs)
        outputs = outputs.reshape(-1, config.hidden_size)
        logits = product(outputs, weights["softmax/weights"]) + weights["softmax/bias"]
        target_logits = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
        nll = jax.nn.logsumexp(logits, axis=1) - target_logits
        return nll.sum() / config.batch_size, states

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(weights: Weights, states: list[State], number: int, inputs, targets):
        compute = jax.value_and_grad(compute_loss, has_aux=True)
        step_key = jax.random.fold_in(key, number)
        (loss, states), gradients = compute(weights, states, step_key, inputs, targets)
        grad_norm = jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in gradients.values()))
        rate = config.learning_rate * jnp.minimum(1.0, config.max_grad_norm / grad_norm)
        weights = {name: weights[name] - rate * grad for name, grad in gradients.items()}
        return weights, states, loss, grad_norm

    number = 0

    def step(inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        nonlocal weights, states, number
        weights, states, loss, grad_norm = train(weights, states, number, inputs, targets)
        number += 1
        jax.block_until_ready(weights)  # otherwise, the update would continue after the step
        return StepResult(float(loss), float(grad_norm))

    return step


def _initial_weights(config: Config, vocab_size: int) -> Weights:
    hidden = config.hidden_size
    shapes = {
        "embedding": (vocab_size, hidden),
        "softmax/weights": (hidden, vocab_size),
        "softmax/bias": (vocab_size,),
    }
    for layer in range(config.num_layers):
        shapes[f"lstm_{layer}/input_weights"] = (hidden, 4 * hidden)
        shapes[f"lstm_{layer}/recurrent_weights"] = (hidden, 4 * hidden)
        shapes[f"lstm_{layer}/bias"] = (4 * hidden,)
    return {name: jnp.asarray(initial_weight(config, name, shapes[name])) for name in shapes}


def _bfloat16_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.bfloat16) @ b.astype(jnp.bfloat16)).astype(jnp.float32)


def _layers(
    config: Config,
    product: Product,
    weights: Weights,
    states: list[State],
    key: jax.Array,
    inputs: jax.Array,
) -> tuple[jax.Array, list[State]]:
    """Return the outputs of the last layer, [T, B, H], and the final states of all layers."""

    def dropout(values: jax.Array, index: int) -> jax.Array:
        if config.keep_prob == 1:
            return values
        kept = jax.random.bernoulli(jax.random.fold_in(key, index), config.keep_prob, values.shape)
        return jnp.where(kept, values / config.keep_prob, 0.0)

    outputs = dropout(weights["embedding"][inputs], 0)
    final_states = []
    for layer, state in enumerate(states):
        names = ("input_weights", "recurrent_weights", "bias")
        layer_weights = [weights[f"lstm_{layer}/{name}"] for name in names]
        state, outputs = _lstm(product, outputs, state, *layer_weights)
        outputs = dropout(outputs, layer + 1)
        final_states.append(state)
    return outputs, final_states


def _lstm(
    product: Product,
    inputs: jax.Array,
    state: State,
    input_weights: jax.Array,
    recurrent_weights: jax.Array,
    bias: jax.Array,
) -> tuple[State, jax.Array]:
    """Return the final state and the outputs, [T, B, H], of a layer."""
    # One product projects the inputs of all time steps.
    projected = product(inputs, input_weights) + bias

    def cell(state: State, projected: jax.Array) -> tuple[State, jax.Array]:
        c, h = state
        i, j, f, o = jnp.split(projected + product(h, recurrent_weights), 4, axis=1)
        c = c * jax.nn.sigmoid(f) + jax.nn.sigmoid(i) * jnp.tanh(j)
        h = jnp.tanh(c) * jax.nn.sigmoid(o)
        return (c, h), h

    return jax.lax.scan(cell, state, projected)
