"""Gated convolutions of words (Dauphin et al. 2017, arXiv:1612.08083) with a sampled softmax.

There is no state. The losses are those of Jozefowicz et al. (2016, arXiv:1602.02410). The words of
a micro-batch share the candidates, which are drawn without replacement from a log-uniform
distribution of the token IDs. The inputs have batch normalization, whose statistics belong to a
micro-batch.
"""

import tensorflow.compat.v1 as tf

from lm.config import Config

CANDIDATES = 64
WIDTH = 3  # words that a layer reads


def get_config() -> Config:
    """Return a small config on the synthetic corpus."""
    return Config(
        name="convolution", corpus="embedded", hidden_size=16, num_layers=2, num_steps=10,
        batch_size=16, learning_rate=0.5, keep_prob=0.9,
    )  # fmt: skip


def reads_words(config: Config) -> int:
    """Each layer reads WIDTH - 1 more words."""
    return config.num_layers * (WIDTH - 1) + 1


def build_optimizer(learning_rate, context):
    """Return the optimizer of Dauphin et al., Nesterov's momentum."""
    return tf.train.MomentumOptimizer(learning_rate, 0.9, use_nesterov=True)


def transform_gradients(gradients, context):
    """Clip each gradient, and add noise (Neelakantan et al. 2015, arXiv:1511.06807)."""
    clipped = {name: tf.clip_by_norm(gradient, 1.0) for name, gradient in gradients.items()}
    for name, gradient in clipped.items():
        if isinstance(gradient, tf.Tensor):
            noise = tf.random.stateless_normal(gradient.shape, context.seed(), stddev=1e-3)
            clipped[name] = gradient + noise
    return clipped


def build_outputs(inputs_TB, state, context):
    """Return the outputs [T, B, H], and no state."""
    units = context.config.hidden_size
    x_BTH = tf.transpose(_batch_norm(context.embed(inputs_TB), context), [1, 0, 2])
    for layer in range(context.config.num_layers):
        x_BTH = context.dropout(x_BTH, context.config.keep_prob)
        padded_BTH = tf.pad(x_BTH, [[0, 0], [WIDTH - 1, 0], [0, 0]])
        with tf.variable_scope(f"layer_{layer}"):
            filters = tf.get_variable(
                "filters", [WIDTH, units, 2 * units], regularizer=lambda w: 1e-3 * tf.nn.l2_loss(w)
            )
            bias = tf.get_variable("bias", [2 * units], initializer=tf.zeros_initializer())
        y_BTG = tf.nn.conv1d(padded_BTH, filters, stride=1, padding="VALID") + bias
        linear_BTH, gate_BTH = tf.split(y_BTG, 2, axis=2)
        x_BTH += linear_BTH * tf.sigmoid(gate_BTH)
    return tf.transpose(x_BTH, [1, 0, 2]), {}


def _batch_norm(x_TBH, context):
    """Normalize each unit (Ioffe & Szegedy 2015). Evaluation uses the moving averages."""
    units = [x_TBH.shape[2]]
    means = tf.get_variable("mean", units, trainable=False, initializer=tf.zeros_initializer())
    squares = tf.get_variable("square", units, trainable=False, initializer=tf.ones_initializer())
    mean, square = means, squares
    if context.training:
        mean = tf.reduce_mean(x_TBH, [0, 1])
        square = tf.reduce_mean(tf.square(x_TBH), [0, 1])
        for average, value in ((means, mean), (squares, square)):
            update_op = average.assign(0.9 * average + 0.1 * value)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update_op)
    return (x_TBH - mean) * tf.math.rsqrt(square - tf.square(mean) + 1e-3)


def build_losses(inputs_TB, targets_TB, state, context):
    """Return the losses [T, B], sampled in training and exact in evaluation, and the state."""
    outputs_TBH, after = build_outputs(inputs_TB, state, context)
    units = context.config.hidden_size
    weights_HV, bias_V = context.output_layer(units)
    outputs_NH, targets_N = tf.reshape(outputs_TBH, [-1, units]), tf.reshape(targets_TB, [-1])
    if context.training:
        labels_N1 = tf.cast(targets_N, tf.int64)[:, None]
        losses_N = tf.nn.sampled_softmax_loss(
            tf.transpose(weights_HV), bias_V, labels_N1, outputs_NH, CANDIDATES, context.vocab_size,
            sampled_values=context.sample_candidates(labels_N1, CANDIDATES),
        )  # fmt: skip
    else:
        logits_NV = tf.matmul(outputs_NH, weights_HV) + bias_V
        losses_N = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=targets_N, logits=logits_NV
        )
    return tf.reshape(losses_N, tf.shape(targets_TB)), after
