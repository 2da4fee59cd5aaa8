"""Sums over the windows of the local rows, which are added up outside of the graph."""

from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.optimize.sparse import (
    Gradient,
    is_sparse,
)


class LocalSums(NamedTuple):
    """Tensors that are computed for each part of the local rows, and added up outside the graph.

    Both lists have the same structure. A sparse gradient is a pair, values and indices, because
    TensorFlow does not allow to feed the shape.
    """

    of_part: list[tf.Tensor | tuple[tf.Tensor, tf.Tensor]]
    sum_phs: list[tf.Tensor | tuple[tf.Tensor, tf.Tensor]]

    def add(self, tensor: Gradient) -> Gradient:
        """Add a tensor of a part, and return the placeholder of its sum."""
        if not is_sparse(tensor):
            self.of_part.append(tensor)
            self.sum_phs.append(tf.placeholder(tensor.dtype, tensor.shape))
            return self.sum_phs[-1]
        self.of_part.append((tensor.values, tensor.indices))
        values_ph = tf.placeholder(tensor.dtype, [None, *tensor.values.shape[1:]])
        indices_ph = tf.placeholder(tensor.indices.dtype, [None])
        self.sum_phs.append((values_ph, indices_ph))
        return tf.IndexedSlices(values_ph, indices_ph, tensor.dense_shape)

    def feed(self, sums: list) -> dict[tf.Tensor, np.ndarray]:
        pairs = zip(self.sum_phs, sums)
        return {
            placeholder: value
            for ph, found in pairs
            for placeholder, value in (zip(ph, found) if isinstance(ph, tuple) else [(ph, found)])
        }


def add_sums(first: list, second: list) -> list:
    """Add the values of `LocalSums.of_part` of two parts: sparse gradients are concatenated."""
    return [
        tuple(map(np.concatenate, zip(one, two))) if isinstance(one, tuple) else one + two
        for one, two in zip(first, second)
    ]
