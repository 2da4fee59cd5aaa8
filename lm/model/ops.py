"""The one choice between compiled operations and plain TensorFlow."""

from __future__ import annotations

from typing import Callable, NamedTuple

from lm import kernels
from lm.model import plain


class Ops(NamedTuple):
    """What a model is made of; `lm/model/plain.py` documents each."""

    matmul: Callable
    add_bias: Callable
    recurrence: Callable
    dropout: Callable
    cross_entropy: Callable
    column_sums: Callable
    global_norm: Callable


PLAIN = Ops(
    plain.matmul,
    plain.add_bias,
    plain.recurrence,
    plain.dropout,
    plain.cross_entropy,
    plain.column_sums,
    plain.global_norm,
)
COMPILED = Ops(
    kernels.matmul,
    kernels.add_bias,
    kernels.lstm_recurrence,
    kernels.dropout,
    kernels.softmax_cross_entropy,
    kernels.column_sums,
    kernels.global_norm,
)


def fastest() -> Ops:
    """Return the operations that are fastest on this process's device."""
    return COMPILED if kernels.available() else PLAIN
