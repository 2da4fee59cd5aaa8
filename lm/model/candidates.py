"""Candidate classes of sampled losses, drawn from a seed.

TensorFlow's samplers depend on the number of their previous runs, so a run on two ranks would draw
other candidates than a run on one rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm.errors import UserError


class Candidates(NamedTuple):
    """The argument `sampled_values` of `tf.nn.sampled_softmax_loss` and `tf.nn.nce_loss`."""

    sampled: tf.Tensor  # int64 [num_sampled]
    true_expected_count: tf.Tensor  # float32, the shape of the true classes
    sampled_expected_count: tf.Tensor  # float32 [num_sampled]


class _Distribution(NamedTuple):
    draw: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]  # number of draws, seed -> int64 classes
    probability: Callable[[tf.Tensor], tf.Tensor]  # int64 classes -> float64


def _uniform(num_classes: int) -> _Distribution:
    def draw(count: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_uniform([count], seed, 0, num_classes, tf.int64)

    return _Distribution(draw, lambda classes: tf.ones_like(classes, tf.float64) / num_classes)


def _log_uniform(num_classes: int) -> _Distribution:
    """Return the approximately Zipfian distribution of classes that are sorted by frequency."""
    scale = tf.math.log(tf.constant(num_classes + 1, tf.float64))

    def draw(count: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        uniform = tf.random.stateless_uniform([count], seed, dtype=tf.float64)
        # The power can be rounded up to num_classes + 1.
        return (tf.cast(tf.exp(uniform * scale), tf.int64) - 1) % num_classes

    return _Distribution(
        draw, lambda classes: tf.math.log1p(1 / (tf.cast(classes, tf.float64) + 1)) / scale
    )


_DISTRIBUTIONS = {"uniform": _uniform, "log_uniform": _log_uniform}


def sample_candidates(
    seed: tf.Tensor,
    true_classes: tf.Tensor,
    num_sampled: int,
    num_classes: int,
    unique: bool = True,
    distribution: str = "log_uniform",
) -> Candidates:
    """Draw classes from a seed (int32 [2]) with the distributions of TensorFlow's samplers.

    As in TensorFlow, unique candidates are drawn with replacement until `num_sampled` of them
    differ, and their expected counts depend on the number of draws.

    Raises:
      UserError: If there are not enough classes, or if the distribution is unknown.
    """
    if distribution not in _DISTRIBUTIONS:
        raise UserError(f"the distribution must be {' or '.join(_DISTRIBUTIONS)}: {distribution!r}")
    if unique and num_sampled > num_classes:
        raise UserError(f"{num_sampled} unique candidates of {num_classes} classes do not exist")
    draw, probability = _DISTRIBUTIONS[distribution](num_classes)
    if not unique:
        sampled, num_draws = draw(num_sampled, seed), num_sampled
    else:
        sampled, num_draws = _draw_unique(draw, num_sampled, seed)

    def expected_count(classes: tf.Tensor) -> tf.Tensor:
        p = probability(classes)
        at_least_once = -tf.math.expm1(tf.cast(num_draws, tf.float64) * tf.math.log1p(-p))
        has_repeats = tf.not_equal(num_draws, num_sampled)
        return tf.cast(tf.where_v2(has_repeats, at_least_once, p * num_sampled), tf.float32)

    return Candidates(sampled, expected_count(true_classes), expected_count(sampled))


def _draw_unique(
    draw: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], num_sampled: int, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the first `num_sampled` different classes, and the number of draws they took."""

    def is_short(drawn: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        return tf.size(tf.unique(drawn).y) < num_sampled

    def draw_more(drawn: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        more = draw(tf.size(drawn), tf.stack([seed[0], seed[1] + index]))
        return tf.concat([drawn, more], 0), index + 1

    start = draw(2 * num_sampled, seed), tf.constant(1)
    shapes = tf.TensorShape([None]), tf.TensorShape([])
    drawn, _ = tf.while_loop(is_short, draw_more, start, shapes)
    classes, index_of_class = tf.unique(drawn)  # ordered by their first draws
    is_last = tf.equal(index_of_class, num_sampled - 1)
    num_draws = tf.argmax(tf.cast(is_last, tf.int32), output_type=tf.int32) + 1
    return tf.ensure_shape(classes[:num_sampled], [num_sampled]), num_draws
