"""The compiled ops, compared with the equations in float64."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.config import Config
from lm.errors import UserError
from lm.kernels import build
from lm.model.context import Context
from lm.model.ops import fastest
from lm.model.plain import matmul as product
from tests.machine import in_new_processes

# The error of products whose factors are rounded to bfloat16 (8 bits), relative to exact products.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module", autouse=True)
def library():
    build.build()
    if not kernels.available():
        pytest.skip(kernels.description())


def test_an_unknown_instruction_set_is_an_error(monkeypatch):
    monkeypatch.setenv("LM_KERNELS_ISA", "avx-512")
    with pytest.raises(UserError, match="'avx-512', not one of generic, avx2"):
        kernels.load.__wrapped__()


def test_bfloat16_products_need_an_instruction_set():
    isa = kernels.description().split()[3]
    assert kernels.multiplies_bfloat16() == (isa in ("avx512bf16", "amx"))


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(np.float32)


def run(fetch, feeds=(), threads=2):
    """Run fetch(*placeholders) in a new graph. Feeding prevents constant folding."""
    with tf.Graph().as_default():
        placeholders = [tf.placeholder(np.asarray(x).dtype, np.shape(x)) for x in feeds]
        config = tf.ConfigProto(intra_op_parallelism_threads=threads)
        with tf.Session(config=config) as session:
            return session.run(fetch(*placeholders), dict(zip(placeholders, feeds)))


def assert_near(actual, expected, precision="float32"):
    expected = np.asarray(expected)
    assert np.shape(actual) == expected.shape
    scale = max(np.abs(expected).max(initial=0), 1e-3)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[precision] * scale)


# ---- The recurrence ----


def lstm_inputs(T, B, H):
    weights = numbers(H, 4 * H) * H**-0.5
    bias, h0, c0 = numbers(4 * H, seed=4), numbers(B, H, seed=1), numbers(B, H, seed=2)
    return [numbers(T, B, 4 * H), bias, weights, h0, c0]


def lstm_loss(outputs):
    """Return a scalar that depends on each element of all outputs."""
    factors = [numbers(*output.shape.as_list(), seed=3 + n) for n, output in enumerate(outputs)]
    return tf.add_n([tf.reduce_sum(output * factor) for output, factor in zip(outputs, factors)])


def plain_recurrence(projected, bias, weights, h, c):
    outputs = []
    for projected_t in tf.unstack(projected):
        i, j, f, o = tf.split(projected_t + bias + tf.matmul(h, weights), 4, axis=1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(c)
        outputs.append(h)
    return tf.stack(outputs), h, c


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "T, B, H",
    [(1, 1, 1), (3, 1, 5), (4, 3, 33), (2, 17, 64), (5, 20, 200), (2, 10, 650), (2, 61, 40)],
)
def test_recurrence_and_its_gradient(T, B, H, precision):
    inputs = lstm_inputs(T, B, H)

    def with_gradients(recurrence, *placeholders):
        outputs = recurrence(*placeholders)
        return outputs, tf.gradients(lstm_loss(outputs), placeholders)

    ours = functools.partial(kernels.lstm_recurrence, precision=precision)
    actual = run(functools.partial(with_gradients, ours), inputs)
    exact = functools.partial(with_gradients, plain_recurrence)
    expected = run(exact, [x.astype(np.float64) for x in inputs])
    for a, e in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
        assert_near(a, e, precision)


def recurrence_of(rows, H, precision):
    """Return outputs and gradients of some of 61 rows, except sums over rows."""
    projected, bias, weights, h0, c0 = lstm_inputs(3, 61, H)
    dh = numbers(3, 61, H, seed=3)

    def outputs(projected, *inputs):
        *state, dh = inputs
        h, h_last, c_last = kernels.lstm_recurrence(projected, *state, precision)
        dprojected, dh0, dc0 = tf.gradients(h, [projected, *state[2:]], dh)
        return [h, dprojected, *(x[None] for x in (h_last, c_last, dh0, dc0))]

    return run(outputs, [projected[:, rows], bias, weights, h0[rows], c0[rows], dh[:, rows]])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("H", [40, 650])  # threads divide the rows, or the units
def test_recurrence_of_a_row_does_not_depend_on_other_rows(H, precision):
    every = np.arange(61)
    whole = recurrence_of(every, H, precision)
    for rows in every[:1], every[1:11], every[16:49], every[3::2], every[::-1]:
        for some, all_rows in zip(recurrence_of(rows, H, precision), whole):
            np.testing.assert_array_equal(some, all_rows[:, rows])


def test_gates_saturate_without_overflow():
    inputs = lstm_inputs(2, 2, 17)
    inputs[0] = inputs[0] * 1e4
    h, _, _ = run(kernels.lstm_recurrence, inputs)
    expected, _, _ = run(plain_recurrence, [x.astype(np.float64) for x in inputs])
    assert_near(h, expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_recurrence_propagates_nan(bad, precision):
    inputs = lstm_inputs(2, 3, 20)
    inputs[0][1, 2, 25] = bad  # the candidate of unit 5: tanh(inf) = 1 is a number, NaN is not
    inputs[4][0, 7] = bad
    h, _, c = run(lambda *p: kernels.lstm_recurrence(*p, precision), inputs)
    assert not np.isfinite(c[0, 7])
    assert np.isnan(h[1, 2, 5]) == np.isnan(bad)
    assert np.isfinite(h[:, 1]).all()  # the row with finite inputs


# ---- Products ----


def exact(x, bf16):
    """Return x in float64, first rounded to bfloat16 if bf16."""
    return (x.astype(tf.bfloat16.as_numpy_dtype) if bf16 else x).astype(np.float64)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("multiply", [kernels.matmul, product])
@pytest.mark.parametrize("M, K, N", [(1, 1, 1), (3, 5, 7), (40, 1100, 130), (100, 33, 501)])
def test_bfloat16_products_only_round_the_factors(M, K, N, multiply, bf16):
    a, b, dc = numbers(M, K), numbers(K, N), numbers(M, N)

    def fetch(a_ph, b_ph):
        c = multiply(a_ph, b_ph, "bfloat16" if bf16 else "float32")
        return c, tf.gradients(c, [a_ph, b_ph], dc)

    c, (da, db) = run(fetch, [a, b])
    a, b, dc = (exact(x, bf16) for x in (a, b, dc))
    assert_near(c, a @ b)
    assert_near(da, dc @ b.T)
    assert_near(db, a.T @ dc)


# Sizes around the sizes of vectors and tiles, and sums with several blocks.
SHAPES = [
    *itertools.product([1, 15, 17, 33], [1, 15, 31, 33], [1, 15, 17, 31, 33]),
    (30, 1025, 47),
    (33, 1500, 31),
    (1500, 17, 33),
    (31, 33, 1500),
    (65, 34, 160),
    (64, 2048, 64),
]


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_products_in_all_layouts(dtype, bf16, transpose_b):
    rounded = bf16 or dtype == tf.bfloat16
    with tf.Graph().as_default(), tf.Session() as session:
        a_ph, b_ph = (tf.placeholder(tf.float32, [None, None]) for _ in range(2))
        a_op, b_op = tf.cast(a_ph, dtype), tf.cast(b_ph, dtype)
        c_op = kernels.load().ops.lm_mat_mul(a_op, b_op, bf16=bf16, transpose_b=transpose_b)
        for M, K, N in SHAPES:
            a, b = numbers(M, K), numbers(K, N)
            c = session.run(c_op, {a_ph: a, b_ph: b.T if transpose_b else b})
            # The remaining differences are the rounding of float32 sums.
            assert_near(c, exact(a, rounded) @ exact(b, rounded))


def products_of(rows, bf16, threads):
    """Return products of some rows. Threads divide `wide` by columns and `narrow` by rows."""

    def products(a, wide, narrow):
        a = tf.gather(a, rows)
        return [
            kernels.load().ops.lm_mat_mul(a, b, bf16=bf16, transpose_b=transpose_b)
            for b in (wide, narrow)
            for transpose_b, b in ((False, b), (True, tf.transpose(b)))
        ]

    return run(products, [numbers(101, 1237), numbers(1237, 530), numbers(1237, 17)], threads)


@pytest.mark.parametrize("bf16", [False, True])
def test_products_of_a_row_do_not_depend_on_other_rows(bf16):
    every = np.arange(101)
    whole = products_of(every, bf16, threads=2)
    for rows in every[:1], every[1:18], every[16:49], every[3:99:2], every[::-1]:
        for some, all_rows in zip(products_of(rows, bf16, threads=2), whole):
            np.testing.assert_array_equal(some, all_rows[rows])


# ---- Dropout ----


@pytest.mark.parametrize("keep_prob", [0.35, 0.85])  # 1 / 0.85 depends on the rounding
@pytest.mark.parametrize("T, B, H", [(1, 1, 1), (3, 2, 7), (4, 3, 64), (5, 2, 203), (35, 2, 650)])
def test_dropout_and_its_gradient_are_bitwise_equal_to_tensorflow(T, B, H, keep_prob, monkeypatch):
    x, dy = numbers(T, B, H), numbers(T, B, H, seed=1)

    def fetch(x):
        step = tf.constant(2**40 + 5, tf.int64)
        context = Context(
            Config(seed=2**33 + 1), 1, fastest(), num_rows=B, first_row=7, step=step, num_draws=3
        )
        y = context.dropout(tf.ensure_shape(x, [T, B, H]), keep_prob)
        return [y, tf.gradients(y, x, dy)[0]]

    own = run(fetch, [x])
    monkeypatch.setattr(kernels, "available", lambda: False)
    for mine, stock in zip(own, run(fetch, [x])):
        np.testing.assert_array_equal(mine, stock)


# ---- Softmax ----


def softmax_inputs(N, H, V):
    targets = np.random.default_rng(V).integers(V, size=N)
    scale = np.abs(numbers(N, seed=5)) + 0.1
    return [numbers(N, H), numbers(H, V) * 3, numbers(V)], targets, scale


def exact_cross_entropy(hidden, weights, bias, targets, scale):
    """Loss, nll, and the gradients of the loss, in float64."""
    hidden, weights, bias = (x.astype(np.float64) for x in (hidden, weights, bias))
    logits = hidden @ weights + bias
    logits -= logits.max(axis=1, keepdims=True)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.arange(len(targets))
    nll = -np.log(softmax[rows, targets])
    softmax[rows, targets] -= 1
    d = softmax * scale[:, None]
    return (scale * nll).sum(), nll, [d @ weights.T, hidden.T @ d, d.sum(axis=0)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("N, H, V", [(1, 1, 2), (5, 3, 7), (9, 33, 1001), (20, 50, 10000)])
def test_cross_entropy_and_its_gradient(N, H, V, index, precision):
    inputs, targets, scale = softmax_inputs(N, H, V)

    def ours(*placeholders):
        loss, nll = kernels.softmax_cross_entropy(
            *placeholders, targets.astype(index), scale, precision
        )
        # Double the loss, so that the incoming gradient is not 1.
        return loss, nll, [g / 2 for g in tf.gradients(2 * loss, placeholders)]

    actual = run(ours, inputs)
    expected = exact_cross_entropy(*inputs, targets, scale)
    for a, e in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
        assert_near(a, e, precision)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_transposed_weights_do_not_change_the_cross_entropy(precision):
    (hidden, weights, bias), targets, scale = softmax_inputs(20, 33, 1001)

    def losses(*placeholders, transposed=False):
        loss, nll = kernels.softmax_cross_entropy(
            *placeholders, targets, scale, precision, micro_batches=[2, 0, 3], transposed=transposed
        )
        return [loss, nll, *tf.gradients(loss, placeholders)]

    expected = run(losses, [hidden, weights, bias])
    actual = run(lambda *p: losses(*p, transposed=True), [hidden, weights.T, bias])
    actual[3] = actual[3].T
    for a, e in zip(actual, expected):
        np.testing.assert_array_equal(a, e)


def test_evaluation_has_the_same_results_without_a_gradient():
    inputs, targets, scale = softmax_inputs(9, 5, 100)
    without = []

    def losses(*placeholders):
        trained = kernels.softmax_cross_entropy(*placeholders, targets, scale)
        evaluated = kernels.softmax_cross_entropy(*placeholders, targets, scale, training=False)
        without.extend(tf.gradients(evaluated[0], placeholders))
        return trained, evaluated

    trained, evaluated = run(losses, inputs)
    np.testing.assert_array_equal(trained[1], evaluated[1])
    assert without == [None] * 3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_cross_entropy_propagates_nan(where, bad, precision):
    inputs, targets, scale = softmax_inputs(3, 4, 50)
    inputs[0] = np.abs(inputs[0])  # otherwise, an infinite weight may lead to a valid logit of -inf
    inputs[where].flat[2] = bad
    loss, _ = run(lambda *p: kernels.softmax_cross_entropy(*p, targets, scale, precision), inputs)
    assert not np.isfinite(loss)


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    inputs, targets, scale = softmax_inputs(3, 4, 7)
    targets[1] = target
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"targets\[1\] = {target} "):
        run(lambda *p: kernels.softmax_cross_entropy(*p, targets, scale), inputs)


# ---- All ----


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
            loss, nll = kernels.softmax_cross_entropy(
                tf.reshape(outputs[0], [T * B, -1]),
                output_weights,
                tf.zeros(V),
                tf.range(T * B),
                tf.ones(T * B),
                precision,
                micro_batches=micro_batches,
            )
            results += [loss, nll, *tf.gradients([loss, lstm_loss(outputs)], variables)]
            for units in (4, None):  # fewer than a vector, and all
                hidden = tf.reshape(outputs[0], [T * B, -1])[:, :units]
                words = tf.transpose(output_weights)[:, :units]
                nll = kernels.cluster_cross_entropy(
                    hidden,
                    words,
                    tf.range(T * B),
                    precision,
                    tf.constant([15, 15, 35, T * B], tf.int64),
                )
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
    calls = [(threads,) for threads in (1, 2, 3, 4, 3, 4)]
    first, *others = in_new_processes(all_ops, calls)
    for other in others:
        for a, b in zip(first, other):
            np.testing.assert_array_equal(a, b)


# ---- Clusters of an adaptive softmax ----


def cluster_inputs(N, V, K):
    targets = np.random.default_rng(V).integers(V, size=N)
    return [numbers(N, K), numbers(V, K), targets, numbers(N)]


def cluster_results(precision, ends, hidden, words, targets, dnll):
    ends = ends and tf.constant(ends, tf.int64)
    nll = kernels.cluster_cross_entropy(hidden, words, targets, precision, ends)
    return [nll, *tf.gradients(nll, [hidden, words], dnll)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "N, V, K", [(1, 1, 1), (3, 7, 2), (14, 300, 4), (23, 5000, 16), (50, 1100, 65), (7, 301, 170)]
)
def test_cluster_cross_entropy_and_its_gradient(N, V, K, precision):
    inputs = cluster_inputs(N, V, K)
    ends = [0, N // 2, N // 2, N]  # two of the micro-batches are empty
    found = run(functools.partial(cluster_results, precision, ends), inputs)
    hidden, words, targets, dnll = (x.astype(np.float64) for x in inputs)
    targets = targets.astype(int)
    logits = hidden @ words.T
    exponentials = np.exp(logits)
    sums = exponentials.sum(axis=1)
    dlogits = exponentials / sums[:, None]
    dlogits[np.arange(N), targets] -= 1
    dlogits *= dnll[:, None]
    nll = np.log(sums) - logits[np.arange(N), targets]
    for one, other in zip(found, [nll, dlogits @ words, dlogits.T @ hidden]):
        assert_near(one, other, precision)


@pytest.mark.parametrize("scale", [1e3, 1e30])  # the second overflows
def test_large_logits_of_a_cluster(scale):
    hidden, words, targets, dnll = cluster_inputs(5, 600, 3)
    hidden[2] *= scale
    words[300:] *= 10  # the maximum changes between blocks
    if scale > 1e10:
        words *= 1e10
    nll, dhidden, dwords = run(
        functools.partial(cluster_results, "float32", None), [hidden, words, targets, dnll]
    )
    finite = scale < 1e10
    assert np.isfinite(nll[2]) == np.isfinite(dhidden[2]).all() == finite
    assert finite or np.isnan(dwords).any()


def test_nan_in_a_word_of_a_cluster_shows_in_the_loss():
    inputs = cluster_inputs(5, 600, 3)
    inputs[1][430, 1] = np.nan
    nll, _, _ = run(functools.partial(cluster_results, "float32", None), inputs)
    assert np.isnan(nll).all()


@pytest.mark.parametrize("K", [4, 40])
def test_results_of_a_cluster_do_not_depend_on_other_tokens(K):
    inputs = cluster_inputs(61, 1000, K)

    def some(rows):
        hidden, words, targets, dnll = inputs
        feeds = [hidden[rows], words, targets[rows], dnll[rows]]
        return run(functools.partial(cluster_results, "float32", None), feeds)[:2]

    every = np.arange(61)
    whole = some(every)
    for rows in every[:1], every[1:18], every[16:49], every[3:59:2], every[::-1], every[:0]:
        for found, all_rows in zip(some(rows), whole):
            np.testing.assert_array_equal(found, all_rows[rows])


@pytest.mark.parametrize("target", [-1, 600])
def test_a_word_outside_of_a_cluster_is_an_error(target):
    inputs = cluster_inputs(5, 600, 3)
    inputs[2][1] = target
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"targets\[1\] = {target}"):
        run(functools.partial(cluster_results, "float32", None), inputs)


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
