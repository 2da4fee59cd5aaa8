"""Initializing a run with weights of an earlier run."""

import dataclasses
import logging
import re
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.checkpoint import store
from lm.checkpoint.tensors import load_arrays, weight_tensors
from lm.config import Config, RunOptions
from lm.data.batches import Rows
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.functions import BUILT_IN
from lm.model.network import Network
from lm.model.windows import build_window_graph
from lm.tokens.selection import load_vocabulary
from lm.tokens.symbols import Characters, Ids
from lm.tokens.tokenizers import Words
from lm.tokens.vocabulary import Vocabulary
from lm.training.initialize import find_source, initial_values
from lm.training.initialize_run import warn_of_other_network
from lm.training.restore import BroadcastHook, values_to_resume
from tests.unit.model.networks import GOOD, OWN_TABLE
from tests.untrained import make_run, write_run


@pytest.fixture(scope="module")
def other(tmp_path_factory, corpora):
    """Create an untrained run; return its checkpoint, config and vocabulary words."""
    directory = tmp_path_factory.mktemp("other") / "run"
    config = make_run(directory, corpora)
    words = load_vocabulary(directory / "vocabulary.txt").words
    return str(directory / "checkpoints" / "step-00000007"), config, words


def test_matching_weights_are_loaded_and_others_not(other, caplog):
    path, config, words = other
    caplog.set_level(logging.INFO, "lm")
    tensors = start_from(path, dataclasses.replace(config, num_layers=3), words)
    assert "initialized lstm_2/input_weights, lstm_2/" in caplog.text
    theirs = weight_tensors(store.verify(path))
    assert {"lstm_0/bias", "lstm_1/recurrent_weights"} <= tensors.keys() < {*theirs, "lstm_2/bias"}
    assert tensors.items() <= theirs.items()


def test_the_bands_of_other_words_are_not_loaded(tmp_path, corpora, caplog):
    fields = dict(adaptive_softmax_cutoffs="10,30", adaptive_input=True, tie_weights=True)
    config = make_run(tmp_path / "run", corpora, **fields)
    words = load_vocabulary(tmp_path / "run/vocabulary.txt").words
    caplog.set_level(logging.INFO, "lm")
    path = str(tmp_path / "run/checkpoints/step-00000007")
    assert start_from(path, config, words) == weight_tensors(store.verify(path))
    start_from(path, config, words[:50])
    bands = ", ".join(f"embedding/band_{band}" for band in range(3))
    assert f"initialized {bands}, softmax/bias\n" in caplog.text


def test_a_checkpoint_without_matching_weights_is_rejected(other):
    path, config, words = other
    with pytest.raises(UserError, match="has no weights that fit this model"):
        start_from(path, dataclasses.replace(config, hidden_size=9), words[:50])


def test_a_resumed_run_must_use_all_weights(other):
    path, config, words = other
    config = dataclasses.replace(config, num_layers=1)
    with tf.Graph().as_default():
        build_window_graph(Network(config, len(words)), Rows(0, 1), "eval")
        with pytest.raises(UserError, match="does not use lstm_1/bias"):
            values_to_resume(store.verify(path), {})


def test_an_untrainable_embedding_is_loaded_too(other, load):
    path, config, words = other
    tensors = start_from(
        path, config, words, load(OWN_TABLE % ", trainable=False" + GOOD).functions
    )
    assert tensors.keys() == {"embedding", "softmax/weights", "softmax/bias"}


def tokenizer_of(words):
    return Words(Vocabulary(tuple(words)))


def load_values(options, tokenizer, functions=BUILT_IN):
    """Return the initial values of the network in the current graph."""
    return initial_values(find_source(options), options, tokenizer, functions)


def start_from(path, config, words, functions=BUILT_IN):
    with tf.Graph().as_default():
        build_window_graph(Network(config, len(words), functions), Rows(0, 1), "eval")
        options = RunOptions(init_from=path, init_partly=True, new_vocabulary=True)
        return load_values(options, tokenizer_of(words)).tensors


# In the last two cases, both vocabularies have as many words as the layers have units or gates.
@pytest.mark.parametrize(
    ("fields", "axis"),
    [
        ({}, 1),
        ({"tie_weights": True}, None),
        ({"vocab_size": 52, "hidden_size": 52}, 1),
        ({"vocab_size": 52, "hidden_size": 13}, 1),
    ],
)
def test_words_of_both_vocabularies_keep_their_weights(tmp_path, corpora, fields, axis):
    config = make_run(tmp_path / "run", corpora, **fields)
    words = load_vocabulary(tmp_path / "run/vocabulary.txt").words
    new_words = ("zebra", *reversed(words[:50]), "yak")
    with tf.Graph().as_default():
        build_window_graph(Network(config, len(new_words)), Rows(0, 1), "eval")
        options = RunOptions(init_from=str(tmp_path / "run"), new_vocabulary=True)
        values = load_values(options, tokenizer_of(new_words))
        hook = BroadcastHook(Communicator(), values, tf.no_op())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            names = [v.op.name for v in tf.trainable_variables()]
            before = dict(zip(names, session.run(tf.trainable_variables())))
            hook.after_create_session(session, None)
            after = dict(zip(names, session.run(tf.trainable_variables())))
    saved = load_arrays(values.checkpoint, names)
    kept = [words.index(word) for word in new_words[1:-1]]
    tables = {"embedding": 0, "softmax/bias": 0} | ({"softmax/weights": axis} if axis else {})
    assert values.tables.keys() == tables.keys()
    for name in names:
        if name not in tables:
            np.testing.assert_array_equal(after[name], saved[name])
            continue
        arrays = (before[name], after[name], saved[name])
        old, new, rows = (np.moveaxis(array, tables[name], 0) for array in arrays)
        np.testing.assert_array_equal(new[1:-1], rows[kept])
        np.testing.assert_array_equal(new[[0, -1]], old[[0, -1]])


def test_the_tokenizer_of_the_earlier_run_must_be_unchanged(other):
    path, config, words = other
    with tf.Graph().as_default():
        build_window_graph(Network(config, len(words)), Rows(0, 1), "eval")
        for is_part in (False, True):
            options = RunOptions(init_from=path, init_partly=is_part)
            with pytest.raises(UserError, match="different tokenizer than this run uses: restore"):
                load_values(options, tokenizer_of(words[::-1]))


def test_a_new_vocabulary_does_not_hide_a_changed_model(other):
    path, config, words = other
    config = dataclasses.replace(config, num_layers=3)
    with tf.Graph().as_default():
        build_window_graph(Network(config, 50), Rows(0, 1), "eval")
        options = RunOptions(init_from=path, new_vocabulary=True)
        with pytest.raises(UserError, match=r"has no lstm_2/.* of this shape; --init_partly"):
            load_values(options, tokenizer_of(words[:50]))


@pytest.mark.parametrize(
    "tokenizer, fix",
    [
        (Characters(Vocabulary(("<eos>", "a", "i"))), "choose a tokenizer of this kind"),
        (Ids(10), "use a corpus of token IDs"),
    ],
)
def test_a_new_vocabulary_does_not_change_the_kind_of_the_tokenizer(tmp_path, tokenizer, fix):
    write_run(tmp_path / "run", Config(), tokenizer)
    options = RunOptions(init_from=str(tmp_path / "run"), new_vocabulary=True)
    message = f"with the tokenizer {tokenizer.name}: remove --new_vocabulary, or {fix}"
    with tf.Graph().as_default(), pytest.raises(UserError, match=message):
        load_values(options, tokenizer_of(("<eos>", "a", "i", "am")))


def test_a_checkpoint_needs_its_run(other, tmp_path):
    path, *_ = other
    alone = shutil.copytree(path, tmp_path / "step-00000007")
    with pytest.raises(UserError, match="step-00000007 is not inside a run: pass RUN/check"):
        find_source(RunOptions(init_from=str(alone)))
    (tmp_path / "link").symlink_to(path)
    assert find_source(RunOptions(init_from=f"{tmp_path}/link")).checkpoint.manifest.step == 7


@pytest.mark.parametrize("name", ["model", "model.index"])
def test_a_file_of_a_checkpoint_is_not_taken_for_a_tf1_checkpoint(other, name):
    path, *_ = other
    with pytest.raises(UserError, match=f"{name} is a file of a .*: pass {re.escape(path)}$"):
        find_source(RunOptions(init_from=f"{path}/{name}"))


def test_settings_that_the_shapes_do_not_show_are_a_warning(other, caplog):
    _, config, _ = other
    warn_of_other_network(dataclasses.asdict(config), config)
    assert not caplog.text
    changed = dataclasses.replace(config, forget_bias=1.0, learning_rate=0.1)
    warn_of_other_network(dataclasses.asdict(config), changed)
    assert caplog.messages == ["--init_from: the earlier run had forget_bias 0.0, now 1.0"]


OWN_KERNEL = """
import tensorflow.compat.v1 as tf
from lm.config import Config

def get_config():
    return Config(corpus="embedded", hidden_size=25, num_steps=5)

def build_logits(inputs_TB, state, context):
    table = tf.get_variable("table", [context.vocab_size, 25], trainable=False)
    kernel = tf.get_variable("kernel", [25, 50])
    output = tf.get_variable("output", [50, context.vocab_size])
    x_TBH = tf.gather(table, inputs_TB)
    return tf.einsum("tbh,hv->tbv", tf.tanh(tf.einsum("tbe,eh->tbh", x_TBH, kernel)), output), {}
"""


@pytest.mark.parametrize("num_words", [50, 51])
def test_words_of_a_user_defined_network_need_a_different_size(tmp_path, load, num_words):
    """A kernel with 50 columns is not a table of 50 words."""
    functions, config = load(OWN_KERNEL).functions, load(OWN_KERNEL).config
    words = ("<eos>", *(f"w{i}" for i in range(49)))
    write_run(tmp_path / "run", config, tokenizer_of(words), functions=functions)
    options = RunOptions(init_from=str(tmp_path / "run"), new_vocabulary=True)
    others = tokenizer_of(("zebra", *words[: num_words - 1]))
    with tf.Graph().as_default():
        build_window_graph(Network(config, num_words, functions), Rows(0, 1), "eval")
        if num_words == 50:
            with pytest.raises(UserError, match="both vocabularies have 50 words, and "):
                load_values(options, others)
            return
        values = load_values(options, others)
        assert (values.tables.keys(), values.tensors.keys()) == ({"table", "output"}, {"kernel"})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            BroadcastHook(Communicator(), values, tf.no_op()).after_create_session(session, None)
