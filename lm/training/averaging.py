"""The average of the weights over the steps: what is validated, tested and used in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from lm.checkpoint.store import average_name
from lm.model.ops import fastest


class Average:
    """The mean of the weights after each of the last steps, in variables beside the weights.

    They are global variables: in the checkpoints, and the same on all ranks. Polyak & Juditsky
    1992; Merity et al. 2018, algorithm 1. To be made in the training graph.
    """

    def __init__(self) -> None:
        weights = tf.trainable_variables()
        averages = [_beside(weight) for weight in weights]
        pairs = list(zip(weights, averages))
        add = fastest().add_to_average
        self._share_ph = tf.placeholder(tf.float32, [], "share_in_average")
        self._add_op = tf.group(
            *[add(average, weight, self._share_ph) for weight, average in pairs]
        )
        values = [(weight.read_value(), average.read_value()) for weight, average in pairs]
        with tf.control_dependencies([value for pair in values for value in pair]):
            self._swap_op = tf.group(
                *[weight.assign(value) for weight, (_, value) in zip(weights, values)],
                *[average.assign(value) for average, (value, _) in zip(averages, values)],
            )

    def add(self, session: tf.Session, count: int) -> None:
        """Take the weights in, as the last of `count`; the first is copied, bit for bit."""
        session.run(self._add_op, {self._share_ph: 1 / count})

    @contextlib.contextmanager
    def in_place(self, session: tf.Session) -> Iterator[None]:
        """Put the average in the place of the weights, and take it out again, whatever happens."""
        session.run(self._swap_op)
        try:
            yield
        finally:
            session.run(self._swap_op)


def _beside(weight: tf.Variable) -> tf.Variable:
    return tf.get_variable(
        average_name(weight.op.name),
        weight.shape,
        initializer=tf.zeros_initializer(),
        trainable=False,
        use_resource=True,
    )
