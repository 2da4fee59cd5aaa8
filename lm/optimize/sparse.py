"""Sparse gradients. A sparse gradient lists rows of a table, such as the embedding."""

import math
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from lm.model.ops import implementation

Gradient = tf.Tensor | tf.IndexedSlices


def is_sparse(gradient: Gradient | None) -> bool:
    """Return whether a gradient is a list of rows."""
    return isinstance(gradient, tf.IndexedSlices)


def values_of(gradient: Gradient) -> tf.Tensor:
    return gradient.values if is_sparse(gradient) else gradient


def dense(gradient: Gradient | None, variable: tf.Variable) -> tf.Tensor | None:
    """Return the gradient of a whole variable; a sparse gradient must list each row once."""
    if not is_sparse(gradient):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])


def sum_rows(
    slices: tf.IndexedSlices, shape: Sequence[int], micro_batches: Sequence[int]
) -> tf.Tensor:
    """Return a sparse gradient as a dense gradient, summed micro-batch by micro-batch as a tree."""
    num_slices = slices.values.shape.as_list()[0]
    rows = sum(micro_batches)
    with tf.device("cpu:0"):  # see merge_duplicates
        if not rows or not num_slices or num_slices % rows:  # the rows are not one per token
            return tf.math.unsorted_segment_sum(slices.values, slices.indices, shape[0])
        sizes = [num_slices // rows * size for size in micro_batches]
        parts = [
            tf.math.unsorted_segment_sum(values, indices, shape[0])
            for values, indices in zip(
                tf.split(slices.values, sizes), tf.split(slices.indices, sizes)
            )
        ]
        # TensorFlow's graph optimizer would change the summation order of `+`.
        flat = tf.reshape(tf.stack(parts), [len(parts), math.prod(shape)])
        total = implementation().column_sums(flat, [1] * len(parts))
    return tf.reshape(total, shape)


def merge_duplicates(gradient: Gradient | None) -> Gradient | None:
    """Sum the entries of a sparse gradient that belong to the same row.

    Otherwise, the norm would depend on how the words are distributed over the ranks. The CPU sums
    each row in the order of the entries. A GPU would sum them in any order, and the weights of the
    ranks would diverge.
    """
    if not is_sparse(gradient):
        return gradient
    with tf.device("cpu:0"):
        rows, position = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, position, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def dense_is_smaller(rows: int, num_tokens: int) -> bool:
    """Return whether a table's gradient has fewer bytes as a dense tensor than as a list of rows.

    In an exchange of lists, each rank receives one row per token of the global batch. An allreduce
    of the dense tensor moves each row of the table twice.

    Args:
      rows: The rows of the table.
      num_tokens: The tokens of the global batch.
    """
    return num_tokens >= 2 * rows
