"""Matrix products of user-defined networks in the precision of the run.

A network calls TensorFlow's own products, so their precision is chosen when TensorFlow creates the
operations. This also works in loops, conditions and Keras layers.
"""

import contextlib
from collections.abc import Iterator

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
        if op_type == "MatMul" and multiply:
            a, b = inputs
            if attrs["transpose_a"].b:
                a = tf.transpose(a)
            return multiply(a, b, attrs["transpose_b"].b, name=name).op

        def product(*factors: tf.Tensor) -> tf.Tensor:
            return create(graph, op_type, list(factors), *others, **named).outputs[0]

        return tf.identity(plain.rounded(product, *inputs)).op  # an operation with one output

    tf.Graph._create_op_internal = create_rounded
    try:
        yield
    finally:
        tf.Graph._create_op_internal = create
