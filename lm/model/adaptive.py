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

import tensorflow.compat.v1 as tf

from lm.model.ops import Ops
from lm.model.plain import logits_cross_entropy


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
        """The first word of each cluster."""
        firsts = [self.head.shape.as_list()[1] - len(self.clusters)]
        for cluster in self.clusters[:-1]:
            firsts.append(firsts[-1] + cluster.words_WK.shape.as_list()[0])
        return firsts


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
    members = [tf.where(tf.equal(cluster_N, c))[:, 0] for c in range(len(cutoffs))]
    inputs = _gather_parts(outputs_NH, members)
    for cluster, first, tokens, x in zip(weights.clusters, cutoffs, members, inputs):
        hidden = ops.matmul(x, cluster.projection_HK)
        logits = ops.matmul(hidden, tf.transpose(cluster.words_WK))
        targets, scale = tf.gather(targets_N, tokens) - first, tf.gather(scale_N, tokens)
        cluster_loss, nll = logits_cross_entropy(logits, targets, scale)
        loss += cluster_loss
        nll_N = tf.tensor_scatter_nd_add(nll_N, tokens[:, None], nll)
    return loss, nll_N


def _gather_parts(x_NH: tf.Tensor, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gather rows for each list of indices. No index may occur twice.

    The gradient is dense. TensorFlow's own gradient is a list of rows, whose sum with the gradient
    of the head is slow.
    """

    @tf.custom_gradient
    def gather(x):
        def gradient(*dparts):
            indices = tf.concat(parts, axis=0)[:, None]
            return tf.scatter_nd(indices, tf.concat(dparts, axis=0), tf.shape(x, out_type=tf.int64))

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
