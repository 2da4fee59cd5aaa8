"""The average of the weights over steps, which is validated, tested and used instead of them."""

import contextlib
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from lm.checkpoint.tensors import average_name
from lm.model.ops import implementation
from lm.model.windows import Run


class Average:
    """The mean of the weights after each of the last steps, or their exponential moving average.

    The moving average also starts as a mean. The average is stored in global variables, so
    checkpoints contain it and all ranks have the same. The training graph must be the default
    graph. See Polyak & Juditsky 1992, and algorithm 1 of Merity et al. 2018.
    """

    def __init__(self, ema_decay: float = 0.0) -> None:
        self._smallest_factor = 1 - ema_decay if ema_decay else 0.0
        weights = tf.trainable_variables()
        options = dict(initializer=tf.zeros_initializer(), trainable=False, use_resource=True)
        averages = [
            tf.get_variable(average_name(weight.op.name), weight.shape, **options)
            for weight in weights
        ]
        pairs = list(zip(weights, averages))
        add = implementation().add_to_average
        self._factor_ph = tf.placeholder(tf.float32, [], "factor_in_average")
        self._add_op = tf.group(
            *[add(average, weight, self._factor_ph) for weight, average in pairs]
        )
        values = [(weight.read_value(), average.read_value()) for weight, average in pairs]
        with tf.control_dependencies([value for pair in values for value in pair]):
            self._swap_op = tf.group(
                *[weight.assign(value) for weight, (_, value) in zip(weights, values)],
                *[average.assign(value) for average, (value, _) in zip(averages, values)],
            )

    def add(self, run: Run, count: int) -> None:
        """Add the weights as the last of `count` weights. The first weights are copied bitwise."""
        factor = max(1 / count, self._smallest_factor)
        run(self._add_op, {self._factor_ph: factor})

    @contextlib.contextmanager
    def in_place(self, session: tf.Session) -> Iterator[None]:
        """Swap the average and the weights, and swap them back at the end or after an error."""
        session.run(self._swap_op)
        try:
            yield
        finally:
            session.run(self._swap_op)
