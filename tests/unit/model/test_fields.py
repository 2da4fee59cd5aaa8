"""The fields of the built-in network, compared with the equations of the papers."""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint.manifest import verify
from lm.checkpoint.transfer import VariableLoader
from lm.config import Config
from lm.data.batches import Rows
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.model import decoding
from lm.model.context import collected
from lm.model.network import Network
from lm.model.windows import build_window_graph
from lm.optimize.gradients import exchange_gradients
from tests.unit.checkpoint.saved import save
from tests.unit.model.networks import V, context_of, start_values

T, B, H, E = 4, 3, 6, 5
STEP = 7
CONFIG = Config(hidden_size=H, num_layers=2, num_steps=T, batch_size=B, init_scale=0.8, seed=3)
FIELDS = {
    "tied": dict(tie_weights=True),
    "sizes": dict(embedding_size=E, keep_prob=0.8, output_keep_prob=1.0),
    "adaptive": dict(adaptive_softmax_cutoffs="4,7", adaptive_softmax_factor=2, keep_prob=0.8),
    # The random words of this test do not include the only word of the first cluster.
    "adaptive with an empty cluster": dict(
        adaptive_softmax_cutoffs="9,10", adaptive_softmax_factor=2
    ),
    "adaptive input": dict(
        adaptive_softmax_cutoffs="4,7", adaptive_softmax_factor=2, adaptive_input=True,
        embedding_size=E, keep_prob=0.8,
    ),
    "tied adaptive input": dict(
        adaptive_softmax_cutoffs="4,7", adaptive_softmax_factor=2, adaptive_input=True,
        tie_weights=True,
    ),
    "tied adaptive input, sizes": dict(
        adaptive_softmax_cutoffs="1,7", adaptive_softmax_factor=2, adaptive_input=True,
        tie_weights=True, embedding_size=E,
    ),
    "resets": dict(reset_state="line", recurrent_keep_prob=0.6),
    "all": dict(
        tie_weights=True, embedding_size=E, keep_prob=0.8, embedding_keep_prob=0.6,
        output_keep_prob=0.7, recurrent_keep_prob=0.6, locked_dropout=True, forget_bias=1.0,
        activation_penalty=2.0, temporal_activation_penalty=1.0,
    ),
}  # fmt: skip
# The other fields use the same operations in plain TensorFlow.
PLAIN = "sizes", "adaptive", "adaptive with an empty cluster", "resets", "all"
CASES = [*(("compiled", name) for name in FIELDS), *(("plain", name) for name in PLAIN)]


def mask(config, shape, keep_prob, mask_index):
    context = context_of(Rows(0, shape[1]), Config(seed=config.seed), STEP, num_draws=mask_index)
    return context.dropout(tf.ones(shape), keep_prob)


def dropped(config, x, keep_prob, mask_index):
    """Drop activations [T, B, ...]. If locked, all time steps share a mask."""
    steps = 1 if config.locked_dropout else T
    return x * mask(config, [steps, *x.shape[1:]], keep_prob, mask_index)


def all_log_probs(config, weights, top):
    """Return the log-probabilities of all words."""
    if config.adaptive_softmax_cutoffs:
        return adaptive_log_probs(config, weights, top)
    if "softmax/projection" in weights:
        top = top @ weights["softmax/projection"]
    projection = tf.transpose(weights["embedding"])
    if not config.tie_weights:
        projection = weights["softmax/weights"]
    return tf.nn.log_softmax(top @ projection + weights["softmax/bias"])


def adaptive_log_probs(config, weights, top):
    """Return the log-probabilities of an adaptive softmax (Grave et al. 2017)."""
    first, last = config.cutoffs
    if config.tie_weights:
        words = [weights[f"embedding/band_{band}"] for band in range(3)]
        head = tf.transpose(tf.concat([words[0], weights["softmax/clusters"]], axis=0))
    else:
        words = [None, *(weights[f"softmax/cluster_{c}/words"] for c in range(2))]
        head = weights["softmax/weights"]
    to_head = top @ weights["softmax/projection"] if "softmax/projection" in weights else top
    of_head = tf.nn.log_softmax(to_head @ head + weights["softmax/bias"])
    parts = [of_head[:, :first]]
    units = config.embedding_size if config.tie_weights and config.embedding_size else H
    for c in range(2):
        assert words[c + 1].shape == [(last - first, units // 2), (V - last, units // 4)][c]
        logits = top @ weights[f"softmax/cluster_{c}/projection"] @ tf.transpose(words[c + 1])
        parts.append(of_head[:, first + c, None] + tf.nn.log_softmax(logits))
    return tf.concat(parts, axis=1)


def embed(config, weights, inputs):
    """Return the units of the words; with bands, as in Baevski & Auli (2019)."""
    if not config.adaptive_input:
        return tf.gather(weights["embedding"], inputs)
    bands = [weights[f"embedding/band_{band}"] for band in range(3)]
    units = [band.shape[1] for band in bands]
    projections = tf.split(weights["embedding/projection"], units)
    return tf.gather(tf.concat([x @ y for x, y in zip(bands, projections)], axis=0), inputs)


def plain_loss(config, weights, inputs, targets):
    """Return the differentiated loss as in the papers, and the negative log-likelihood."""
    first_keep = config.embedding_keep_prob or config.keep_prob
    x = dropped(config, embed(config, weights, inputs), first_keep, 0)
    # Weight-drop uses one more mask per layer.
    masks_per_layer = 1 + (config.recurrent_keep_prob < 1)
    for layer in range(config.num_layers):
        w, u, b = (
            weights[f"lstm_{layer}/{name}"]
            for name in ("input_weights", "recurrent_weights", "bias")
        )
        if config.recurrent_keep_prob < 1:
            mask_index = 1 + layer * masks_per_layer
            u = u * mask(config, [1, *u.shape], config.recurrent_keep_prob, mask_index)[0]
        h = c = tf.zeros([B, H])
        outputs = []
        for x_t, words in zip(tf.unstack(x), tf.unstack(inputs)):
            if config.reset_state == "line":  # the word 0 ends a line, so it is read first
                starts = tf.equal(words, 0)[:, None]
                h, c = (tf.where_v2(starts, 0.0, state) for state in (h, c))
            i, j, f, o = tf.split(x_t @ w + h @ u + b, 4, axis=1)
            c = tf.sigmoid(f + config.forget_bias) * c + tf.sigmoid(i) * tf.tanh(j)
            h = tf.sigmoid(o) * tf.tanh(c)
            outputs.append(h)
        raw = tf.stack(outputs)
        keep = (layer == 1 and config.output_keep_prob) or config.keep_prob
        x = dropped(config, raw, keep, masks_per_layer * (layer + 1))
    log_probs = all_log_probs(config, weights, tf.reshape(x, [T * B, H]))
    nll = -tf.gather(log_probs, tf.reshape(targets, [-1]), batch_dims=1)
    # As in the code of the papers, these are means over all words. Our loss is T times as large.
    loss = tf.reduce_mean(nll) + config.activation_penalty * tf.reduce_mean(x**2)
    loss += config.temporal_activation_penalty * tf.reduce_mean((raw[1:] - raw[:-1]) ** 2)
    return T * loss, tf.reduce_sum(nll)


def feed_of(graph, words):
    state = {ph: np.zeros(ph.shape) for ph in graph.state_phs.values()}
    words = {graph.inputs_ph: words[:-1], graph.targets_ph: words[1:]}
    return {**words, **state, graph.first_row_ph: 0}


@pytest.mark.parametrize("implementation, name", CASES, indirect=["implementation"])
def test_loss_and_gradients_equal_the_equations_of_the_papers(implementation, name):
    config = dataclasses.replace(CONFIG, **FIELDS[name])
    words = np.random.default_rng(0).integers(0, V, [T + 1, B]).astype(np.int32)
    words[2, 0] = words[3, 1] = 0
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.constant(STEP, tf.int64)
        network = Network(config, V, words=["<eos>", *map(str, range(1, V))])
        model = build_window_graph(network, Rows(0, B), "train", step)
        separate = model.separate_reductions
        found = exchange_gradients(model.loss, T * B, Communicator(), (), separate)
        weights = {variable.op.name: variable for variable in tf.trainable_variables()}
        loss, nll = plain_loss(config, weights, words[:-1], words[1:])
        expected = tf.gradients(loss, list(weights.values()))
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        ours = [model.loss, model.nll_sum, *map(tf.convert_to_tensor, found.gradients)]
        theirs = [loss, nll, *map(tf.convert_to_tensor, expected)]
        results = session.run([ours, theirs], feed_of(model, words))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "reset_state, words, expected",
    [
        ("line", ("<eos>", "a", "b\u010a", "\u010a", "\u010a\u010a"), [0, 1, 0, 0, 0]),
        ("line", ("a", "<eos>", "x<eos>", "</s>", "b"), [1, 0, 1, 0, 1]),
        # A SentencePiece model with the 256 bytes
        ("line", ("<unk>", "<s>", "</s>", "<0x0A>", "a"), [1, 1, 0, 0, 1]),
        ("line", ("<unk>", "\u010a", "\n", "a", "b"), [1, 1, 0, 1, 1]),  # a letter of Maltese
        ("document", ("<|endoftext|>", "</s>", "a", "b", "c"), [0, 1, 1, 1, 1]),
        ("document", ("<|endoftext|>", "\u010a", "a", "b", "c"), [0, 1, 1, 1, 1]),
    ],
)
def test_the_state_is_reset_at_all_tokens_with_a_separator(reset_state, words, expected):
    with tf.Graph().as_default(), tf.Session() as session:
        context = context_of(Rows(0, 5), Config(reset_state=reset_state), words=words)
        found = session.run(context.kept_state(tf.range(5)[None]))
    np.testing.assert_array_equal(found, np.reshape(expected, [1, 5, 1]))


def test_embedding_init_scale_only_changes_the_embedding():
    config = dataclasses.replace(CONFIG, init_scale=0.05)
    plain = start_values(config)
    own = start_values(dataclasses.replace(config, embedding_init_scale=0.1))
    largest = np.abs(own["embedding"]).max()
    assert 0.05 < largest < 0.1
    np.testing.assert_allclose(own.pop("embedding"), 2 * plain.pop("embedding"), rtol=1e-5)
    assert plain.keys() == own.keys()
    for name, values in plain.items():
        np.testing.assert_array_equal(own[name], values)
        assert np.abs(values).max() <= 0.05


@pytest.mark.usefixtures("implementation")
def test_windows_and_single_words_have_the_same_loss():
    config = dataclasses.replace(CONFIG, **FIELDS["all"])
    words = np.random.default_rng(5).integers(0, V, [T + 1, B]).astype(np.int32)
    with tf.Graph().as_default(), tf.Session() as session:
        network = Network(config, V)
        model = build_window_graph(network, Rows(0, B), "eval")
        by_word = decoding.target_log_probs(network, *map(tf.constant, (words[:-1], words[1:])))
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        feed = feed_of(model, words)
        nll, loss, log_probs = session.run([model.nll_TB, model.loss, by_word], feed)
    np.testing.assert_allclose(log_probs, -nll, rtol=1e-5)
    np.testing.assert_allclose(loss, nll.sum() / B, rtol=1e-5)  # no penalty


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.Session() as session:
        yield session


def test_a_checkpoint_must_fit(session, tmp_path):
    build_window_graph(Network(CONFIG, V), Rows(0, B), "first")
    session.run(tf.global_variables_initializer())
    loader, steps = VariableLoader(), iter(range(4))

    def load(arrays):
        path = save(tmp_path, next(steps), arrays=arrays, weights=tuple(arrays))
        loader.load_weights(session, verify(str(path)))

    arrays = {v.op.name: np.zeros(v.shape, "f") for v in tf.global_variables()}
    load(arrays)
    assert not any(value.any() for value in session.run(tf.global_variables()))
    with pytest.raises(UserError, match="softmax/bias has the shape"):
        load({**arrays, "softmax/bias": np.zeros([2, 2])})
    with pytest.raises(UserError, match="has w, which this model does not use"):
        load({**arrays, "w": np.zeros([2, 2])})
    del arrays["softmax/bias"]
    with pytest.raises(UserError, match="no softmax/bias"):
        load(arrays)


def test_dropping_rows_of_a_table_adds_the_gradients_of_each_row():
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", [4, 2], initializer=tf.ones_initializer())
        context = context_of(Rows(0, B), spans_micro_batches=True)
        kept = context.drop_weights(tf.gather(table, [0, 0, 2]), 0.5)
        loss = tf.reduce_sum(kept)
        found = exchange_gradients(
            loss, T * B, Communicator(), (), collected(context).separate_reductions
        )
        session.run(tf.global_variables_initializer())
        (gradient,), mask = session.run([found.gradients, kept])
    np.testing.assert_array_equal(gradient, [mask[0] + mask[1], [0, 0], mask[2], [0, 0]])
