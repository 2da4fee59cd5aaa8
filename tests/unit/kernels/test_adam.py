"""The compiled replacement of TensorFlow's Adam."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

BETA1, BETA2, RATE, EPSILON = map(np.float32, (0.9, 0.999, 0.01, 1e-8))


def updated(weights, moment1, moment2, gradient, nesterov):
    """Kingma & Ba 2015, section 2 (the order of computation without bias correction), in NumPy."""
    one = np.float32(1)
    moment1 = moment1 + (gradient - moment1) * (one - BETA1)
    moment2 = moment2 + (gradient * gradient - moment2) * (one - BETA2)
    step = RATE * np.sqrt(one - BETA2) / (one - BETA1)
    mean = gradient * (one - BETA1) + BETA1 * moment1 if nesterov else moment1
    return weights - mean * step / (np.sqrt(moment2) + EPSILON), moment1, moment2


def apply_adam(variables, gradient, nesterov=False):
    weights, moment1, moment2 = (variable.handle for variable in variables)
    return tf.raw_ops.ResourceApplyAdam(
        var=weights, m=moment1, v=moment2, beta1_power=BETA1, beta2_power=BETA2, lr=RATE,
        beta1=BETA1, beta2=BETA2, epsilon=EPSILON, grad=gradient, use_nesterov=nesterov,
    )  # fmt: skip


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", [0, 1, 13, (1 << 14) + 5])  # the last is over two blocks
def test_two_updates_have_the_bits_of_the_formula(size, nesterov):
    rng = np.random.default_rng(size)
    gradients = (rng.normal(size=[2, size]) * 10.0 ** rng.uniform(-9, 5, [2, size])).astype("f")
    expected = [rng.normal(size=size).astype("f"), *np.zeros([2, size], "f")]
    with tf.Graph().as_default(), tf.Session() as session:
        variables = [tf.Variable(value, use_resource=True) for value in expected]
        session.run(tf.global_variables_initializer())
        before = [variable.read_value() for variable in variables]
        gradient_ph = tf.placeholder(tf.float32, [size])
        update_op = apply_adam(variables, gradient_ph, nesterov)
        with tf.control_dependencies(before):
            update_after_reads_op = apply_adam(variables, gradient_ph, nesterov)
        # The first update is in place. Values that were read before the second stay unchanged.
        for gradient, fetches in zip(gradients, ([update_op], [update_after_reads_op, *before])):
            found = session.run(fetches, {gradient_ph: gradient})[1:]
            for value, start in zip(found, expected):
                np.testing.assert_array_equal(value, start)
            expected = updated(*expected, gradient, nesterov)
            for value, end in zip(session.run(variables), expected):
                np.testing.assert_array_equal(value, end)


def test_a_gradient_of_a_different_shape_is_an_error():
    with tf.Graph().as_default(), tf.Session() as session:
        variables = [tf.Variable(tf.zeros([3]), use_resource=True) for _ in range(3)]
        session.run(tf.global_variables_initializer())
        gradient = tf.placeholder_with_default(tf.zeros([2]), None)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"has shape \[3\], not \[2\]"):
            session.run(apply_adam(variables, gradient))
