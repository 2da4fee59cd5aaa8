"""Matrix products of user-defined networks in the precision of the run.

A network calls TensorFlow's own products, so their precision is chosen when TensorFlow creates the
operations. This also works in loops, conditions and Keras layers.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence

import tensorflow.compat.v1 as tf

from lm.model import plain
from lm.model.ops import compiled_product

_PRODUCTS = {"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Einsum", "MatMul"}


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Round the factors of the products that are created in this context, if "bfloat16".

    The factors are rounded in the results and in the gradients. Everything else stays float32.
    """
    if precision == "float32":
        yield
        return
    create, multiply = tf.Graph._create_op_internal, compiled_product()

    def create_rounded(
        graph, op_type, inputs, dtypes=None, input_types=None, name=None, attrs=None, *rest, **named
    ):
        others = (dtypes, input_types, name, attrs, *rest)
        if op_type not in _PRODUCTS or any(x.dtype != tf.float32 for x in inputs):
            return create(graph, op_type, inputs, *others, **named)
        compiled = _compiled(multiply, op_type, inputs, attrs) if multiply else None
        if compiled is not None:
            return compiled.op

        def product(*factors: tf.Tensor) -> tf.Tensor:
            return create(graph, op_type, list(factors), *others, **named).outputs[0]

        return tf.identity(plain.rounded(product, *inputs)).op  # an operation with one output

    tf.Graph._create_op_internal = create_rounded
    try:
        yield
    finally:
        tf.Graph._create_op_internal = create


def _compiled(
    multiply: Callable, op_type: str, inputs: Sequence[tf.Tensor], attrs: dict
) -> tf.Tensor | None:
    """Return the result of the compiled product, or None if it cannot compute this product."""
    if op_type == "MatMul":
        return multiply(*inputs, attrs["transpose_a"].b, attrs["transpose_b"].b)
    if op_type == "Einsum":
        return _einsum(multiply, attrs["equation"].s.decode(), inputs)
    if op_type == "Conv2D":
        return None
    a, b = (x.shape for x in inputs)
    if not (a[:-2].is_fully_defined() and b[:-2].is_fully_defined() and a[:-2] == b[:-2]):
        return None
    return multiply(*inputs, attrs["adj_x"].b, attrs["adj_y"].b)


def _einsum(multiply: Callable, equation: str, inputs: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Return an einsum that is a product of matrices, [.., left, summed] by [.., summed, right]."""
    match = re.fullmatch(r"(\w+),(\w+)->(\w*)", equation)
    if not match or not all(x.shape.is_fully_defined() for x in inputs):
        return None
    x, y, z = match.groups()
    batch = [c for c in x if c in y and c in z]
    left, right = ([c for c in one if c not in other] for one, other in ((x, y), (y, x)))
    summed = [c for c in x if c in y and c not in z]
    is_product = summed and sorted(z) == sorted(batch + left + right)
    if not is_product or any(len({*labels}) < len(labels) for labels in (x, y)):
        return None
    size = {c: n for labels, t in zip((x, y), inputs) for c, n in zip(labels, t.shape.as_list())}

    def sizes(labels: Sequence[str]) -> list[int]:
        return [size[c] for c in labels]

    def matrix(labels: str, tensor: tf.Tensor, rows: list[str], columns: list[str]) -> tf.Tensor:
        order = [labels.index(c) for c in batch + rows + columns]
        shape = [*sizes(batch), math.prod(sizes(rows)), math.prod(sizes(columns))]
        return tf.reshape(tf.transpose(tensor, order), shape)

    # Summed labels that are the last labels of a factor need no transposition.
    transpose_a, transpose_b = x[-1] not in summed, y[-1] in summed
    a = matrix(x, inputs[0], *((summed, left) if transpose_a else (left, summed)))
    b = matrix(y, inputs[1], *((right, summed) if transpose_b else (summed, right)))
    product = tf.reshape(multiply(a, b, transpose_a, transpose_b), sizes(batch + left + right))
    return tf.transpose(product, [(batch + left + right).index(c) for c in z])
