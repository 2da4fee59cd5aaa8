"""An LSTM with a projection (Sak et al. 2014, arXiv:1402.1128), trained with a sampled softmax.

The losses are those of Jozefowicz et al. (2016, arXiv:1602.02410). The words of a micro-batch share
the candidates, which are drawn with replacement from a log-uniform distribution of the token IDs.
The inputs have batch normalization and noise. Their statistics belong to a micro-batch too.
"""

import tensorflow.compat.v1 as tf

from lm.config import Config

CELLS, CANDIDATES = 24, 64


def get_config() -> Config:
    """Return a small config on the synthetic corpus."""
    return Config(
        name="recurrence", corpus="embedded", hidden_size=16, num_steps=7, batch_size=16,
        learning_rate=1.0, keep_prob=0.9,
    )  # fmt: skip


def state_shapes(config: Config) -> dict[str, list[int]]:
    """The state has the cells and the projected outputs after the last word."""
    return {"c": [CELLS], "h": [config.hidden_size]}


def build_optimizer(learning_rate, context):
    """Return the optimizer of Jozefowicz et al."""
    return tf.train.AdagradOptimizer(learning_rate, initial_accumulator_value=1.0)


def build_outputs(inputs_TB, state, context):
    """Return the outputs [T, B, H] and the state after the window."""
    units, outputs = context.config.hidden_size, []
    x_TBH = _batch_norm(context.embed(inputs_TB), context)
    if context.training:
        x_TBH += 0.01 * tf.random.stateless_normal(tf.shape(x_TBH), context.seed())
    x_TBH = context.dropout(x_TBH, context.config.keep_prob)
    weights = tf.get_variable(
        "lstm/weights", [2 * units, 4 * CELLS], regularizer=lambda w: 1e-3 * tf.nn.l2_loss(w)
    )
    bias = tf.get_variable("lstm/bias", [4 * CELLS], initializer=tf.zeros_initializer())
    projection = tf.get_variable("lstm/projection", [CELLS, units])
    c, h = state["c"], state["h"]
    for x in tf.unstack(x_TBH):
        i, f, g, o = tf.split(tf.matmul(tf.concat([x, h], axis=1), weights) + bias, 4, axis=1)
        c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
        h = tf.matmul(tf.sigmoid(o) * tf.tanh(c), projection)
        outputs.append(h)
    return context.dropout(tf.stack(outputs), context.config.keep_prob), {"c": c, "h": h}


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
        losses_N = _sampled_losses(outputs_NH, weights_HV, bias_V, targets_N, context)
    else:
        logits_NV = tf.matmul(outputs_NH, weights_HV) + bias_V
        losses_N = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=targets_N, logits=logits_NV
        )
    return tf.reshape(losses_N, tf.shape(targets_TB)), after


def _sampled_losses(outputs_NH, weights_HV, bias_V, targets_N, context):
    """Correct logits by the expected counts (Bengio & Senecal 2008), and mask accidental hits."""
    log_range = tf.math.log(tf.cast(context.vocab_size + 1, tf.float32))
    uniform_C = tf.random.stateless_uniform([CANDIDATES], context.seed())
    candidates_C = tf.cast(tf.exp(uniform_C * log_range), tf.int32) - 1
    candidates_C = tf.clip_by_value(candidates_C, 0, context.vocab_size - 1)

    def log_count(words):
        first = tf.cast(words, tf.float32) + 1
        return tf.math.log(CANDIDATES * tf.math.log((first + 1) / first) / log_range)

    words = tf.concat([targets_N, candidates_C], axis=0)
    weights = tf.gather(tf.transpose(weights_HV), words)
    logits = tf.gather(bias_V, words) - log_count(words)
    own_NH, drawn_CH = tf.split(weights, [tf.size(targets_N), CANDIDATES])
    own_N, drawn_C = tf.split(logits, [tf.size(targets_N), CANDIDATES])
    own_N += tf.reduce_sum(outputs_NH * own_NH, axis=1)
    drawn_NC = tf.matmul(outputs_NH, drawn_CH, transpose_b=True) + drawn_C
    drawn_NC -= 1e9 * tf.cast(tf.equal(candidates_C, targets_N[:, None]), tf.float32)
    return tf.reduce_logsumexp(tf.concat([own_N[:, None], drawn_NC], axis=1), axis=1) - own_N
