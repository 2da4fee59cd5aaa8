"""Adaptive softmax (Grave et al. 2017, arXiv:1609.04309): rare words have fewer units.

The head predicts the most frequent words, or the cluster of a rarer word. A cluster predicts its
words from a projection of the outputs to fewer units:

    p(word) = p(word | head), or p(cluster | head) * p(word | cluster)

Training and evaluation compute only the cluster of the target. Token IDs must be sorted by
frequency. The layer equals torch.nn.AdaptiveLogSoftmaxWithLoss with head_bias=True.

Shapes: N tokens, H units of the outputs, S words of the head, C clusters, W words and K units of a
cluster, V words in total.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    head: tf.Tensor  # [H, S + C]: the words of the head, then the clusters
    head_bias: tf.Tensor  # [S + C]
    clusters: Sequence[Cluster]

    @property
    def cutoffs(self) -> list[int]:
        """The token ID of the first word of each cluster."""
        firsts = [self.head.shape.as_list()[1] - len(self.clusters)]
        for cluster in self.clusters[:-1]:
            firsts.append(firsts[-1] + cluster.words_WK.shape.as_list()[0])
        return firsts


def get_weights(config: Config, hidden: int, vocab_size: int) -> AdaptiveWeights:
    """Create the weights in the current variable scope, or find them again."""
    cutoffs, clusters = config.cutoffs, []
    for c, (first, end) in enumerate(zip(cutoffs, (*cutoffs[1:], vocab_size))):
        units = max(hidden // config.adaptive_softmax_factor ** (c + 1), 1)
        with tf.variable_scope(f"cluster_{c}"):
            projection = tf.get_variable("projection", [hidden, units])
            clusters.append(Cluster(projection, tf.get_variable("words", [end - first, units])))
    size = cutoffs[0] + len(cutoffs)
    head = tf.get_variable("weights", [hidden, size])
    return AdaptiveWeights(head, tf.get_variable("bias", [size]), clusters)


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
        outputs_NH, weights.head, weights.head_bias, head_targets_N, scale_N, training=training
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


def log_probs(weights: AdaptiveWeights, outputs_NH: tf.Tensor) -> tf.Tensor:
    """Return the natural log-probabilities of all words, float32 [N, V]."""
    head_logits = tf.nn.bias_add(tf.matmul(outputs_NH, weights.head), weights.head_bias)
    words = weights.cutoffs[0]
    head = tf.nn.log_softmax(head_logits)
    parts = [head[:, :words]]
    for c, cluster in enumerate(weights.clusters):
        hidden = tf.matmul(outputs_NH, cluster.projection_HK)
        logits = tf.matmul(hidden, cluster.words_WK, transpose_b=True)
        parts.append(tf.nn.log_softmax(logits) + head[:, words + c, None])
    return tf.concat(parts, axis=1)
