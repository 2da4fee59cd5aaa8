"""The one choice between compiled operations and plain TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Callable, NamedTuple

from lm import kernels
from lm.model import plain


class Ops(NamedTuple):
    """What a model is made of, at one precision; `lm/model/plain.py` documents each."""

    matmul: Callable
    add_bias: Callable
    recurrence: Callable
    dropout: Callable
    cross_entropy: Callable
    column_sums: Callable
    global_norm: Callable
    add_to_average: Callable


def plain_ops(precision: str = "float32") -> Ops:
    """Return the operations in plain TensorFlow.

    Args:
      precision: Of the factors of all products: float32 or bfloat16.
    """
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


def fastest(precision: str = "float32", shares: Sequence[int] = ()) -> Ops:
    """Return the operations that are fastest on this process's device.

    Args:
      precision: Of the factors of all products: float32 or bfloat16.
      shares: Of all sums over rows, but for those of `column_sums`, which is told; see `Rows`.
    """
    if not kernels.available():
        return plain_ops(precision)
    return Ops(
        matmul=partial(kernels.matmul, precision=precision, shares=shares),
        add_bias=partial(kernels.add_bias, shares=shares),
        recurrence=partial(kernels.lstm_recurrence, precision=precision, shares=shares),
        dropout=kernels.dropout,
        cross_entropy=partial(kernels.softmax_cross_entropy, precision=precision, shares=shares),
        column_sums=kernels.column_sums,
        global_norm=kernels.global_norm,
        add_to_average=kernels.add_to_average,
    )
