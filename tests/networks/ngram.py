"""A feed-forward model of the last words, with batch normalization (Bengio et al. 2003).

Batch statistics, moving averages, a regularizer and random noise belong to a micro-batch.
"""

import tensorflow.compat.v1 as tf

from lm.config import Config

ORDER = 3


def get_config() -> Config:
    """Return a small config on the synthetic corpus."""
    return Config(
        name="ngram", corpus="embedded", hidden_size=24, num_steps=7, batch_size=16,
        learning_rate=0.5, keep_prob=0.9,
    )  # fmt: skip


def state_shapes(config: Config) -> dict[str, list[int]]:
    """The state has the embeddings of the words before the window."""
    return {"before": [ORDER - 1, config.hidden_size]}


def build_outputs(inputs_TB, state, context):
    """Return the outputs [T, B, H] and the embeddings of the last words."""
    num_steps, units = inputs_TB.shape[0], context.config.hidden_size
    x_TBH = context.embed(inputs_TB)
    all_TBH = tf.concat([tf.transpose(state["before"], [1, 0, 2]), x_TBH], axis=0)
    y_TBX = tf.concat([all_TBH[i : i + num_steps] for i in range(ORDER)], axis=2)
    weights = tf.get_variable(
        "weights", [ORDER * units, units], regularizer=lambda w: 1e-3 * tf.nn.l2_loss(w)
    )
    y_TBH = _batch_norm(tf.tensordot(y_TBX, weights, 1), context)
    if context.training:
        y_TBH += 0.01 * tf.random.stateless_normal(tf.shape(y_TBH), context.seed())
    y_TBH = context.dropout(tf.nn.relu(y_TBH), context.config.keep_prob)
    return y_TBH, {"before": tf.transpose(all_TBH[num_steps:], [1, 0, 2])}


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
