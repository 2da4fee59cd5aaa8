"""The choice between the compiled ops and TensorFlow's own ops."""

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from lm import kernels
from lm.model import plain


class Ops(NamedTuple):
    """The operations of a network; see `lm.kernels` for their arguments."""

    precision: str  # precision of matrix products
    micro_batches: Sequence[int]  # the micro-batches of all sums, or ()
    matmul: Callable
    recurrence: Callable
    dropout: Callable
    cross_entropy: Callable
    cluster_cross_entropy: Callable


def implementation() -> types.ModuleType:
    """Return `lm.kernels`, or `plain` if this process cannot use the compiled ops."""
    return kernels if kernels.available() else plain


def plain_ops(precision: str = "float32") -> Ops:
    """Return the operations in plain TensorFlow, with products of the given precision."""
    return _ops(plain, precision)


def fastest(precision: str = "float32", micro_batches: Sequence[int] = ()) -> Ops:
    """Return the fastest operations on this process's device.

    All sums are computed by micro-batches (see `lm.kernels`).
    """
    if kernels.available():
        return _ops(kernels, precision, micro_batches=micro_batches)
    ops = plain_ops(precision)
    if tf.config.list_physical_devices("GPU"):
        return ops._replace(recurrence=partial(ops.recurrence, uses_xla=True))
    return ops


def compiled_product() -> Callable | None:
    """Return `kernels.rounded_product`, or None if this process cannot use the compiled ops."""
    return kernels.rounded_product if kernels.available() else None


def _ops(module: types.ModuleType, precision: str, **sums: Sequence[int]) -> Ops:
    products = dict(precision=precision, **sums)
    return Ops(
        precision=precision,
        micro_batches=sums.get("micro_batches", ()),
        matmul=partial(module.matmul, **products),
        recurrence=partial(module.lstm_recurrence, **products),
        dropout=module.dropout,
        cross_entropy=partial(module.softmax_cross_entropy, **products),
        cluster_cross_entropy=partial(module.cluster_cross_entropy, precision=precision),
    )
