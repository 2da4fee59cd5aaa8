"""Adaptive softmax and adaptive input: rare words have fewer units.

Adaptive softmax (Grave et al. 2017, arXiv:1609.04309):

The head predicts the most frequent words, or the cluster of a rarer word. A cluster predicts its
words from a projection of the outputs to fewer units:

    p(word) = p(word | head), or p(cluster | head) * p(word | cluster)

Training and evaluation compute only the cluster of the target. Token IDs must be sorted by
frequency. The layer equals torch.nn.AdaptiveLogSoftmaxWithLoss with head_bias=True.

Adaptive input (Baevski & Auli 2019, arXiv:1809.10853): the embedding has one table for the head and
one for each cluster, called bands. Their units are projected to the size of the embedding. Tied
weights use the same tables in both layers.

Shapes: N tokens, H units of the outputs, E units of the embedding, S words of the head, C clusters,
W words and K units of a cluster or band, V words in total, T time steps, B rows.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.model.ops import Ops


class Cluster(NamedTuple):
    """The weights of a cluster."""

    projection_HK: tf.Tensor
    words_WK: tf.Tensor


class AdaptiveWeights(NamedTuple):
    """The weights of an adaptive softmax."""

    cutoffs: Sequence[int]  # the token ID of the first word of each cluster
    head: tf.Tensor  # [H, S + C]: the words of the head, then the clusters; [S + C, E] if tied
    head_bias: tf.Tensor  # [S + C]
    clusters: Sequence[Cluster]
    is_tied: bool = False
    head_projection: tf.Tensor | None = None  # [H, E] if tied and H differs from E

    def head_inputs(self, outputs_NH: tf.Tensor, ops: Ops) -> tf.Tensor:
        if self.head_projection is None:
            return outputs_NH
        return ops.matmul(outputs_NH, self.head_projection)


def _band_shapes(config: Config, units: int, vocab_size: int) -> list[list[int]]:
    """Return the shape [W, K] of the head's words, and of the words of each cluster.

    `units` are the units of the head.
    """
    edges = itertools.pairwise((0, *config.cutoffs, vocab_size))
    return [
        [end - first, max(units // config.adaptive_softmax_factor**band, 1)]
        for band, (first, end) in enumerate(edges)
    ]


def get_weights(config: Config, hidden: int, vocab_size: int) -> AdaptiveWeights:
    """Create the weights in the current variable scope, or find them again."""
    clusters = []
    for c, shape in enumerate(_band_shapes(config, hidden, vocab_size)[1:]):
        with tf.variable_scope(f"cluster_{c}"):
            projection = tf.get_variable("projection", [hidden, shape[1]])
            clusters.append(Cluster(projection, tf.get_variable("words", shape)))
    size = config.cutoffs[0] + len(clusters)
    head = tf.get_variable("weights", [hidden, size])
    return AdaptiveWeights(config.cutoffs, head, tf.get_variable("bias", [size]), clusters)


def get_tied_weights(
    config: Config,
    bands: Sequence[tf.Variable],
    hidden: int,
    reduce_separately: Callable[[tf.Tensor], tf.Tensor],
) -> AdaptiveWeights:
    """Return weights that use the bands of an adaptive input.

    `reduce_separately` is the method of `Context`.
    """
    clusters = []
    for c, band in enumerate(bands[1:]):
        with tf.variable_scope(f"cluster_{c}"):
            projection = tf.get_variable("projection", [hidden, band.shape[1]])
            words = reduce_separately(tf.convert_to_tensor(band))
            clusters.append(Cluster(projection, words))
    words, units = bands[0].shape.as_list()
    cluster_rows = tf.get_variable("clusters", [len(clusters), units])
    head = reduce_separately(tf.concat([bands[0], cluster_rows], axis=0))
    projection = tf.get_variable("projection", [hidden, units]) if hidden != units else None
    bias = tf.get_variable("bias", [words + len(clusters)])
    return AdaptiveWeights(config.cutoffs, head, bias, clusters, True, projection)


def get_embedding(
    config: Config, units: int, vocab_size: int, initializer: Callable | None
) -> tuple[list[tf.Variable], tf.Variable]:
    """Create the bands of an adaptive input, or find them again.

    Return the table [W, K] of each band, and the projections of all bands, [sum of K, E].
    """
    shapes = _band_shapes(config, units, vocab_size)
    bands = [
        tf.get_variable(f"band_{band}", shape, initializer=initializer)
        for band, shape in enumerate(shapes)
    ]
    return bands, tf.get_variable("projection", [sum(shape[1] for shape in shapes), units])


def embed(
    bands: Sequence[tf.Tensor], projection_KE: tf.Tensor, inputs_TB: tf.Tensor, ops: Ops
) -> tf.Tensor:
    """Look up token IDs in the bands, as float32 [T, B, E].

    Each band looks up all tokens, and the units of words of other bands are zero. Therefore, the
    number of rows of each gradient is known, and one product computes the projections of all bands.
    """
    first, parts = 0, []
    inputs_BT = tf.stack(tf.unstack(inputs_TB), axis=1)  # see Context.embed
    for band in bands:
        index_BT = inputs_BT - first
        is_member_BT = (index_BT >= 0) & (index_BT < band.shape[0])
        units_BTK = tf.gather(band, tf.where(is_member_BT, index_BT, tf.zeros_like(index_BT)))
        parts.append(tf.where_v2(is_member_BT[:, :, None], units_BTK, 0.0))
        first += band.shape.as_list()[0]
    units_TBK = tf.transpose(tf.concat(parts, axis=2), [1, 0, 2])
    x_NE = ops.matmul(tf.reshape(units_TBK, [-1, projection_KE.shape[0]]), projection_KE)
    return tf.reshape(x_NE, [inputs_TB.shape[0], -1, projection_KE.shape[1]])


def cross_entropy(
    weights: AdaptiveWeights,
    outputs_NH: tf.Tensor,
    targets_N: tf.Tensor,
    scale_N: tf.Tensor,
    ops: Ops,
    training: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the loss and the negative log-likelihood of each token.

    See `lm.kernels.softmax_cross_entropy` for the arguments and results.
    """
    cutoffs = weights.cutoffs
    cluster_N = tf.searchsorted(cutoffs, targets_N, side="right") - 1  # -1: a word of the head
    head_targets_N = tf.where(cluster_N < 0, targets_N, cutoffs[0] + cluster_N)
    loss, nll_N = ops.cross_entropy(
        weights.head_inputs(outputs_NH, ops),
        weights.head,
        weights.head_bias,
        head_targets_N,
        scale_N,
        training=training,
        transposed=weights.is_tied,
    )
    order = _micro_batch_order(targets_N, ops.micro_batches)
    members = [_members(cluster_N, c, *order) for c in range(len(cutoffs))]
    inputs = _gather_parts(outputs_NH, [tokens for tokens, _ in members])
    for cluster, first, (tokens, ends), x in zip(weights.clusters, cutoffs, members, inputs):
        hidden = ops.matmul(x, cluster.projection_HK, ends=ends)
        nll = ops.cluster_cross_entropy(
            hidden, cluster.words_WK, tf.gather(targets_N, tokens) - first, ends=ends
        )
        loss += tf.reduce_sum(tf.gather(scale_N, tokens) * nll)
        nll_N = tf.tensor_scatter_nd_add(nll_N, tokens[:, None], tf.stop_gradient(nll))
    return loss, nll_N


def _micro_batch_order(
    targets_N: tf.Tensor, micro_batches: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the tokens, [T, rows], ordered by micro-batch, and the end of each micro-batch."""
    if not micro_batches:  # one micro-batch, and N may be unknown
        return tf.range(tf.size(targets_N)), tf.size(targets_N)[None]
    tokens_TB = np.arange(targets_N.shape[0], dtype=np.int32).reshape(-1, sum(micro_batches))
    ends = np.cumsum(micro_batches)
    parts = [part.ravel() for part in np.split(tokens_TB, ends[:-1], axis=1)]
    return tf.constant(np.concatenate(parts)), tf.constant(ends * len(tokens_TB))


def _members(
    cluster_N: tf.Tensor, cluster: int, order_N: tf.Tensor, ends: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the tokens of a cluster in the given order, and the end of each micro-batch's part."""
    is_member_N = tf.equal(tf.gather(cluster_N, order_N), cluster)
    count_N = tf.cumsum(tf.cast(is_member_N, tf.int64))
    return tf.boolean_mask(order_N, is_member_N), tf.gather(tf.pad(count_N, [[1, 0]]), ends)


def _gather_parts(x_NH: tf.Tensor, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gather rows for each list of indices. No index may occur twice.

    The gradient is dense. TensorFlow's own gradient is a list of rows, whose sum with the gradient
    of the head is slow.
    """

    @tf.custom_gradient
    def gather(x):
        def gradient(*dparts):
            indices = tf.concat(parts, axis=0)[:, None]
            return tf.scatter_nd(indices, tf.concat(dparts, axis=0), tf.shape(x))

        return [tf.gather(x, part) for part in parts], gradient

    return gather(x_NH)


def log_probs(weights: AdaptiveWeights, outputs_NH: tf.Tensor, ops: Ops) -> tf.Tensor:
    """Return the natural log-probabilities of all words, float32 [N, V]."""
    head_inputs_NE = weights.head_inputs(outputs_NH, ops)
    product = ops.matmul(head_inputs_NE, weights.head, transpose_b=weights.is_tied)
    head_logits = tf.nn.bias_add(product, weights.head_bias)
    words = weights.cutoffs[0]
    head = tf.nn.log_softmax(head_logits)
    parts = [head[:, :words]]
    for c, cluster in enumerate(weights.clusters):
        hidden = ops.matmul(outputs_NH, cluster.projection_HK)
        logits = ops.matmul(hidden, cluster.words_WK, transpose_b=True)
        parts.append(tf.nn.log_softmax(logits) + head[:, words + c, None])
    return tf.concat(parts, axis=1)
