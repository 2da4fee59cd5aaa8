"""Results are the same for single words and for windows."""

import dataclasses

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint.variables import VariableLoader
from lm.config import Config
from lm.data.batches import Rows
from lm.errors import UserError
from lm.model import decoding
from lm.model.network import Network
from lm.model.windows import build_window_graph
from tests.unit.checkpoint.saved import save

CONFIG = Config(hidden_size=7, num_layers=3, init_scale=0.8)
VOCAB_SIZE = 11


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.Session() as session:
        yield session


ADAPTIVE = dict(adaptive_softmax_cutoffs="3,6", adaptive_softmax_factor=2)
TIED = dict(**ADAPTIVE, adaptive_input=True, tie_weights=True, embedding_size=5)


@pytest.fixture(params=[{}, ADAPTIVE, TIED], ids=["full", "adaptive", "tied"])
def network(session, request):
    config = dataclasses.replace(CONFIG, **request.param)
    network = Network(config, VOCAB_SIZE)
    build_window_graph(network, Rows(0, 4), "first")
    session.run(tf.global_variables_initializer())
    for variable in tf.global_variables():  # initially zero, which would hide a missing bias
        if variable.op.name.endswith("/bias") and variable.op.name.startswith("lstm"):
            session.run(variable.assign(np.linspace(-1, 1, 4 * CONFIG.hidden_size)))
    return network


def test_reading_word_by_word_equals_reading_a_sentence(session, network):
    words_TB = np.random.default_rng(5).integers(0, VOCAB_SIZE, [7, 4]).astype(np.int32)
    windows = inputs, targets = words_TB[:-1], words_TB[1:]
    state_ph = tf.placeholder(tf.float32, [None, decoding.state_size(network)])
    words_ph = tf.placeholder(tf.int32, [None])
    step = decoding.next_word(network, words_ph, state_ph)
    state = np.zeros([4, CONFIG.num_layers * 2 * CONFIG.hidden_size])
    whole = session.run(decoding.target_log_probs(network, *map(tf.constant, windows)))
    for words, after, expected in zip(inputs, targets, whole):
        log_probs, state = session.run(step, {words_ph: words, state_ph: state})
        np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(log_probs[np.arange(4), after], expected, rtol=1e-5)


def test_a_checkpoint_must_fit(session, network, tmp_path):
    loader, steps = VariableLoader(), iter(range(4))

    def load(arrays):
        path = save(tmp_path, next(steps), arrays=arrays, weights=tuple(arrays))
        loader.load_weights(session, str(path))

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
