"""The choice between the compiled ops and TensorFlow's own ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Callable, NamedTuple

from lm import kernels
from lm.model import plain


class Ops(NamedTuple):
    """The operations of a network and its training; see `lm.kernels` for their arguments."""

    matmul: Callable
    add_bias: Callable
    recurrence: Callable
    dropout: Callable
    cross_entropy: Callable
    column_sums: Callable
    global_norm: Callable
    add_to_average: Callable


def plain_ops(precision: str = "float32") -> Ops:
    """Return the operations in plain TensorFlow, with products of the given precision."""
    return Ops(
        matmul=partial(plain.matmul, precision=precision),
        add_bias=plain.add_bias,
        recurrence=partial(plain.recurrence, precision=precision),
        dropout=plain.dropout,
        cross_entropy=partial(plain.cross_entropy, precision=precision),
        column_sums=plain.column_sums,
        global_norm=plain.global_norm,
        add_to_average=plain.add_to_average,
    )


def fastest(precision: str = "float32", micro_batches: Sequence[int] = ()) -> Ops:
    """Return the fastest operations on this process's device.

    Args:
      precision: Precision of the factors of all products, float32 or bfloat16.
      micro_batches: Rows of each micro-batch, for all sums except `column_sums`, which receives
        them as an argument; see `lm.data.batches.Rows`.
    """
    if not kernels.available():
        return plain_ops(precision)
    sums = dict(micro_batches=micro_batches)
    products = dict(precision=precision, **sums)
    return Ops(
        matmul=partial(kernels.matmul, **products),
        add_bias=partial(kernels.add_bias, **sums),
        recurrence=partial(kernels.lstm_recurrence, **products),
        dropout=kernels.dropout,
        cross_entropy=partial(kernels.softmax_cross_entropy, **products),
        column_sums=kernels.column_sums,
        global_norm=kernels.global_norm,
        add_to_average=kernels.add_to_average,
    )
