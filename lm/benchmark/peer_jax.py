"""The training step in JAX: jit, scan over time, and donated buffers.

Shapes: T time steps, B rows, H units, A heads, S = M + T words that a word may see, with M words in
memory.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.benchmark.workload import LSTM_WEIGHTS, Step, StepResult, network_of
from lm.config import Config

Weights = Mapping[str, jax.Array]
State = Sequence[jax.Array]


class Layers:
    """The products and dropout masks of one forward pass."""

    def __init__(self, config: Config, weights: Weights, product_dtype: jnp.dtype, key: jax.Array):
        self.config, self.weights = config, weights
        self._product_dtype, self._key, self._num_masks = product_dtype, key, 0

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(self._product_dtype), b.astype(self._product_dtype)
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    def dense(self, x: jax.Array, name: str) -> jax.Array:
        return self.product(x, self.weights[f"{name}/weights"]) + self.weights[f"{name}/bias"]

    def dropout(self, values: jax.Array) -> jax.Array:
        keep_prob = self.config.keep_prob
        if keep_prob == 1:
            return values
        self._num_masks += 1
        key = jax.random.fold_in(self._key, self._num_masks)
        kept = jax.random.bernoulli(key, keep_prob, values.shape)
        return jnp.where(kept, values / keep_prob, 0.0)


def _lstm(x_TBH: jax.Array, state: State, layers: Layers) -> tuple[jax.Array, State]:
    """Return the outputs and the final state of the built-in network: c and h of each layer."""
    outputs, final_state = layers.dropout(x_TBH), []
    for layer in range(layers.config.num_layers):
        names = (f"lstm_{layer}/{name}" for name in LSTM_WEIGHTS)
        input_weights, recurrent_weights, bias = (layers.weights[name] for name in names)
        # One product projects the inputs of all time steps.
        projected = layers.product(outputs, input_weights) + bias

        def cell(state, projected, recurrent_weights=recurrent_weights):
            c, h = state
            gates = projected + layers.product(h, recurrent_weights)
            i, j, f, o = jnp.split(gates, 4, axis=1)
            c = c * jax.nn.sigmoid(f) + jax.nn.sigmoid(i) * jnp.tanh(j)
            h = jnp.tanh(c) * jax.nn.sigmoid(o)
            return (c, h), h

        of_layer, outputs = jax.lax.scan(cell, tuple(state[2 * layer : 2 * layer + 2]), projected)
        outputs = layers.dropout(outputs)
        final_state += of_layer
    return outputs, final_state


def _gru(x_TBH: jax.Array, state: State, layers: Layers) -> tuple[jax.Array, State]:
    """Return the outputs and the final state of the network of configs/config_gru.py."""
    x_TBH = layers.dropout(x_TBH)
    parts = ("gates", "candidate")
    of_x, of_h = zip(*(jnp.split(layers.weights[f"{part}/weights"], 2) for part in parts))
    biases = (layers.weights[f"{part}/bias"] for part in parts)
    projected = [layers.product(x_TBH, weights) + bias for weights, bias in zip(of_x, biases)]

    def cell(h, projected):
        gates, candidate = projected
        reset, update = jnp.split(jax.nn.sigmoid(gates + layers.product(h, of_h[0])), 2, axis=1)
        h = update * h + (1 - update) * jnp.tanh(candidate + layers.product(reset * h, of_h[1]))
        return h, h

    h, outputs = jax.lax.scan(cell, state[0], projected)
    return layers.dropout(outputs), [h]


def _transformer(x_TBH: jax.Array, state: State, layers: Layers) -> tuple[jax.Array, State]:
    """Return the outputs and the final state of the network of configs/config_transformer.py."""
    config, T = layers.config, len(x_TBH)
    x_BTH = layers.dropout(x_TBH.swapaxes(0, 1) * config.hidden_size**0.5)
    after = [jnp.ones(x_BTH.shape[:2])] if state else []
    M = T if state else 0
    back_TS = M + np.arange(T)[:, None] - np.arange(M + T)
    may_see = (back_TS >= 0) & (back_TS <= T)
    if state:
        may_see = may_see * jnp.concatenate([state[0], after[0]], 1)[:, None, None]

    def normalize(x, name):
        mean, variance = x.mean(2, keepdims=True), x.var(2, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * layers.weights[f"{name}/scale"]

    def attention(seen_BSH, name):
        seen_BSH = normalize(seen_BSH, f"{name}/norm_attention")

        def heads(y_BSH, part):
            y_BSH = layers.dense(y_BSH, f"{name}/{part}")
            return y_BSH.reshape(*y_BSH.shape[:2], config.num_heads, -1).swapaxes(1, 2)

        query, key, value = heads(seen_BSH[:, M:], "q"), heads(seen_BSH, "k"), heads(seen_BSH, "v")
        score_BATS = layers.product(query, key.swapaxes(2, 3)) * query.shape[3] ** -0.5
        bias_TSA = layers.weights[f"{name}/distance"][back_TS.clip(0, T)]
        score_BATS = jnp.where(may_see, score_BATS + bias_TSA.transpose(2, 0, 1), -1e9)
        mixed_BTAh = layers.product(jax.nn.softmax(score_BATS), value).swapaxes(1, 2)
        return layers.dense(mixed_BTAh.reshape(*mixed_BTAh.shape[:2], -1), f"{name}/mixed")

    for layer in range(config.num_layers):
        name = f"layer_{layer}"
        after += [x_BTH] if state else []
        seen_BSH = jnp.concatenate([state[1 + layer], x_BTH], 1) if state else x_BTH
        x_BTH += layers.dropout(attention(seen_BSH, name))
        inner = jax.nn.relu(layers.dense(normalize(x_BTH, f"{name}/norm"), f"{name}/inner"))
        x_BTH += layers.dropout(layers.dense(inner, f"{name}/outer"))
    return normalize(x_BTH, "norm").swapaxes(0, 1), after


def _transformer_state(config: Config) -> list[tuple[int, ...]]:
    B, T, H = config.batch_size, config.num_steps, config.hidden_size
    return [(B, T), *[(B, T, H)] * config.num_layers] if config.memory else []


class Network(NamedTuple):
    """The function that builds a network, and the shapes of its recurrent state."""

    build: Callable[[jax.Array, State, Layers], tuple[jax.Array, State]]
    state_shapes: Callable[[Config], list[tuple[int, ...]]]


_NETWORKS = {
    "lstm": Network(_lstm, lambda c: [(c.batch_size, c.hidden_size)] * 2 * c.num_layers),
    "gru": Network(_gru, lambda c: [(c.batch_size, c.hidden_size)]),
    "transformer": Network(_transformer, _transformer_state),
}


def _loss(network: Network, weights: Weights, state: State, layers: Layers, inputs, targets):
    """Return the loss, summed over time and averaged over rows, and the final state."""
    outputs, state = network.build(weights["embedding"][inputs], state, layers)
    outputs = outputs.reshape(-1, outputs.shape[2])
    table = weights["embedding"].T if layers.config.tie_weights else weights["softmax/weights"]
    logits = layers.product(outputs, table) + weights["softmax/bias"]
    target_logits = jnp.take_along_axis(logits, targets.reshape(-1, 1), axis=1)[:, 0]
    nll = jax.nn.logsumexp(logits, axis=1) - target_logits
    return nll.sum() / inputs.shape[1], state


def _updated(config: Config, weights: Weights, moments: Sequence[Weights], gradients, number):
    """Return the weights and the moments of Adam after a step of the optimizer."""
    rate = config.learning_rate
    if config.optimizer == "sgd":
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), moments
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, moments[1], gradients)
    # The bias corrections of Kingma & Ba (2015), algorithm 1.
    rate = rate / (1 - beta1 ** (number + 1.0))
    correction = 1 - beta2 ** (number + 1.0)

    def move(w, m, v):
        return w - rate * m / (jnp.sqrt(v / correction) + config.adam_epsilon)

    return jax.tree.map(move, weights, first, second), (first, second)


def build_step(
    config: Config, weights: Mapping[str, np.ndarray], variant: str, threads: int
) -> tuple[Step, str]:
    """Build the training step of a variant with these initial weights.

    "jax" computes in float32, and "jax-autocast" computes products in bfloat16.
    """
    os.environ["NPROC"] = str(threads)  # XLA reads it before its first computation
    # Otherwise, GPUs round the factors of float32 products to TensorFloat-32.
    jax.config.update("jax_default_matmul_precision", "highest")
    network = _NETWORKS[network_of(weights)]
    product_dtype = jnp.bfloat16 if variant == "jax-autocast" else jnp.float32
    # The default generator takes longer for the dropout masks.
    key = jax.random.key(config.seed, impl="rbg")

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(weights: Weights, moments, state: State, number: int, inputs, targets):
        def loss_of(weights):
            layers = Layers(config, weights, product_dtype, jax.random.fold_in(key, number))
            return _loss(network, weights, state, layers, inputs, targets)

        (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        grad_norm = jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in gradients.values()))
        scale = jnp.minimum(1.0, config.max_grad_norm / grad_norm)
        gradients = {name: scale * grad for name, grad in gradients.items()}
        weights, moments = _updated(config, weights, moments, gradients, number)
        return weights, moments, state, loss, grad_norm

    weights = jax.tree.map(jnp.asarray, dict(weights))
    slots = 0 if config.optimizer == "sgd" else 2
    moments = tuple(jax.tree.map(jnp.zeros_like, weights) for _ in range(slots))
    state = [jnp.zeros(shape) for shape in network.state_shapes(config)]
    number = 0

    def step(inputs: np.ndarray, targets: np.ndarray) -> StepResult:
        nonlocal weights, moments, state, number
        weights, moments, state, loss, grad_norm = train(
            weights, moments, state, number, inputs, targets
        )
        number += 1
        jax.block_until_ready(weights)  # otherwise, the update would continue after the step
        return StepResult(float(loss), float(grad_norm))

    return step, jax.default_backend().upper()
