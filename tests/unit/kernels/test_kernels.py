"""All compiled ops: instruction sets, invalid shapes, and numbers of threads."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.errors import UserError
from tests.machine import NEEDED, has, in_new_processes
from tests.unit.kernels.arrays import (
    TOLERANCE,
    assert_near,
    lstm_inputs,
    lstm_loss,
    numbers,
    products_of,
    run,
    softmax_inputs,
)


def test_an_unknown_instruction_set_is_an_error(monkeypatch):
    monkeypatch.setenv("LM_KERNELS_ISA", "avx-512")
    with pytest.raises(UserError, match="'avx-512', not one of generic, avx2"):
        kernels.load.__wrapped__()


def test_bfloat16_products_need_an_instruction_set():
    isa = kernels.description().split()[3]
    assert kernels.multiplies_bfloat16() == (isa in ("avx512bf16", "amx"))


def test_wrong_shapes_are_errors():
    inputs = lstm_inputs(2, 3, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"weights has shape \[4,12\]"):
        run(kernels.lstm_recurrence, [*inputs[:2], inputs[2][:, :12], *inputs[3:]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"c0 has shape \[2,4\]"):
        run(kernels.lstm_recurrence, [*inputs[:4], inputs[4][:2]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot multiply"):
        run(lambda a, b: kernels.load().ops.lm_mat_mul(a, b), [numbers(2, 3), numbers(2, 3)])
    softmax, targets, scale = softmax_inputs(3, 4, 7)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"scale has shape \[2\]"):
        run(lambda *p: kernels.softmax_cross_entropy(*p, targets, scale[:2]), softmax)


def all_ops(threads, precisions=("float32", "bfloat16")):
    """Return the results of all ops in some precisions, as one list of arrays."""
    T, B, V = 5, 12, 1003
    micro_batches = (3, 0, 4, 5)

    def step(*variables):
        x, input_weights, *recurrence, output_weights = variables
        results = []
        for precision in precisions:
            projected = kernels.matmul(x, input_weights, precision, micro_batches)
            projected = tf.reshape(projected, [T, B, -1])
            outputs = kernels.lstm_recurrence(projected, *recurrence, precision, micro_batches)
            h, targets, scale = tf.reshape(outputs[0], [T * B, -1]), tf.range(T * B), tf.ones(T * B)
            softmax = [h, output_weights, tf.zeros(V), targets, scale, precision]
            loss, nll = kernels.softmax_cross_entropy(*softmax, micro_batches=micro_batches)
            results += [loss, nll, *tf.gradients([loss, lstm_loss(outputs)], variables)]
            for units in (4, None):  # fewer than a vector, and all
                hidden, words = h[:, :units], tf.transpose(output_weights)[:, :units]
                ends = tf.constant([15, 15, 35, T * B], tf.int64)
                nll = kernels.cluster_cross_entropy(hidden, words, targets, precision, ends)
                results += [nll, *tf.gradients(nll, [hidden, words])]
        return results

    results = [
        products_of(np.arange(101), precision == "bfloat16", threads) for precision in precisions
    ]
    for H in (40, 330):  # threads divide the rows, or the units
        factors = [numbers(T * B, 7), numbers(7, 4 * H)]
        _, *recurrence = lstm_inputs(T, B, H)
        results.append(run(step, [*factors, *recurrence, numbers(H, V)], threads))
    return [array for arrays in results for array in arrays]


def test_results_do_not_depend_on_the_number_of_threads():
    calls = [(threads,) for threads in (1, 2, 4, 4)]
    first, *others = in_new_processes(all_ops, calls)
    for other in others:
        for a, b in zip(first, other):
            np.testing.assert_array_equal(a, b)


def results_with(isa):
    """Return the results of all ops in each precision with this instruction set."""
    os.environ["LM_KERNELS_ISA"] = isa
    assert kernels.description().startswith(f"compiled ops for {isa} ")
    return {precision: all_ops(2, [precision]) for precision in TOLERANCE}


def test_results_with_each_instruction_set():
    """Results are bitwise identical wherever `kernels.arithmetic` promises it, and otherwise near.

    The soak tests run all tests of the ops with each instruction set.
    """
    if not has("avx2"):
        pytest.skip("this CPU has one instruction set only")
    isas = ["avx2", *(isa for isa in NEEDED if has(isa) and isa != "avx2")]
    # Linux may not let a process use AMX, although the processor has it.
    isas += ["amx"] * kernels.description().startswith("compiled ops for amx ")
    expected, *others = in_new_processes(results_with, [(isa,) for isa in isas])
    for isa, results in zip(isas[1:], others):
        for precision, arrays in results.items():
            is_exact = isa != "generic" and (precision == "float32" or isa == "avx512")
            for found, same in zip(arrays, expected[precision], strict=True):
                if is_exact:
                    np.testing.assert_array_equal(found, same)
                else:
                    assert_near(found, same, precision)


def norm_in_the_documented_order(arrays):
    """Sum in float64, where squares are exact: 16 sums per block of 16,384, added as a tree."""
    total = 0.0
    for array in arrays:
        for block in np.split(array.ravel(), range(1 << 14, array.size, 1 << 14)):
            lanes = np.zeros(-(-block.size // 16) * 16)
            lanes[: block.size] = block
            sums = np.cumsum(np.square(lanes).reshape(-1, 16), axis=0)[-1:].sum(axis=0)
            while sums.size > 1:
                sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
            total += sums[0]
    return np.float32(np.sqrt(total))


def arrays_of_a_norm():
    shapes = [(3, 100_003), (650, 2600), (1,), (0, 5), (16,), (1 << 14,)]
    return [numbers(*shape, seed=4) for shape in shapes]


def norm_on(threads):
    return run(lambda *xs: kernels.global_norm(xs), arrays_of_a_norm(), threads)


def test_the_norm_does_not_depend_on_threads_or_cpu():
    arrays = arrays_of_a_norm()
    expected = norm_in_the_documented_order([array for array in arrays if array.size])
    assert expected == pytest.approx(np.sqrt(sum(np.sum(np.square(a, dtype="d")) for a in arrays)))
    calls = [(threads,) for threads in (1, 2, 3, 4)]
    assert in_new_processes(norm_on, calls) == [expected] * 4
    for wild in (np.inf, np.nan):
        wrong = run(lambda *xs: kernels.global_norm(xs), [np.float32([1, wild]), numbers(5)])
        np.testing.assert_equal(wrong, np.float32(wild))
    assert run(lambda *xs: kernels.global_norm(xs), [np.float32([3e30, 4e30])]) == np.float32(5e30)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16, tf.float16])
def test_a_sum_does_not_depend_on_other_readers_of_its_terms(dtype):
    """TensorFlow's own kernel starts with the first term whose buffer nobody else reads."""
    values = [numbers(3000, 3, seed=seed) for seed in range(12)]

    def sums(*placeholders):
        terms = [tf.exp(tf.cast(ph, dtype)) for ph in placeholders]
        return tf.add_n(terms), [tf.add_n(terms), *terms[:4]]

    alone = run(lambda *phs: sums(*phs)[0], values)
    together, *terms = run(lambda *phs: sums(*phs)[1], values)
    np.testing.assert_array_equal(alone, together)
    expected = [run(lambda ph: tf.exp(tf.cast(ph, dtype)), [value]) for value in values[:4]]
    np.testing.assert_array_equal(terms, expected)
