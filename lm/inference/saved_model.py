"""Export of a run as a SavedModel, which TensorFlow loads without this project.

Shapes: B sentences or rows, T words of the longest sentence, V words.
"""

from __future__ import annotations

import logging
import os
import tempfile

import tensorflow.compat.v1 as tf

from lm.errors import RunError, UserError, error_class
from lm.inference.run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network
from lm.model.network_rules import PYTHON_OPS, operations
from lm.model.user_errors import short_message
from lm.record import VOCABULARY_FILE

logger = logging.getLogger("lm")

_PADDING = -1  # the ID after the end of a sentence


def export(run: Run, to: str) -> None:
    """Write the network and the weights of a run to a new directory, atomically.

    Raises:
      UserError: If the directory exists or cannot be created, or the network calls Python code.
      RunError: If the disk is full.
    """
    if os.path.exists(to):
        raise UserError(f"--to {to} already exists: choose a different directory, or remove it")
    check_words(run)
    parent = os.path.dirname(os.path.abspath(to))
    tf.logging.set_verbosity(tf.logging.ERROR)  # hide the deprecation of graphs in SavedModels
    try:
        os.makedirs(parent, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=parent) as staging:
            model = os.path.join(staging, "model")
            _write(run, model)
            os.rename(model, to)
    except OSError as error:
        raise error_class(error)(f"cannot write {to}: {error.strerror}") from error
    except tf.errors.OpError as error:
        raise RunError(f"cannot write {to}: {short_message(error)}") from error
    logger.info("wrote %s; load it with tf.saved_model.load(%r)", to, to)


def _write(run: Run, directory: str) -> None:
    session, signatures = open_session(run, lambda network: _build_signatures(run, network))
    with session, session.graph.as_default():
        python_ops = sorted({node.op for node in operations().values()} & PYTHON_OPS)
        if python_ops:
            raise UserError(
                f"{run.functions.where} calls Python code ({python_ops[0]}), which a SavedModel"
                " cannot contain: use only TensorFlow operations"
            )
        builder = tf.saved_model.Builder(directory)
        builder.add_meta_graph_and_variables(
            session,
            [tf.saved_model.tag_constants.SERVING],
            signature_def_map=signatures,
            assets_collection=tf.get_collection(tf.GraphKeys.ASSET_FILEPATHS),
            main_op=tf.tables_initializer(),
        )
        builder.save()


def _build_signatures(run: Run, network: Network) -> dict:
    """Build the exported graph, and return its signatures, which `lm/export.py` documents."""
    eos_id, unk_id = run.vocabulary.eos_id, run.vocabulary.unk_id
    table = tf.lookup.StaticHashTable(
        tf.lookup.TextFileInitializer(
            os.path.join(run.directory, VOCABULARY_FILE),
            key_dtype=tf.string,
            key_index=tf.lookup.TextFileIndex.WHOLE_LINE,
            value_dtype=tf.int64,
            value_index=tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        # If <unk> is missing, unknown words get an ID that `_known` rejects.
        default_value=len(run.vocabulary) if unk_id is None else unk_id,
    )

    def ids_of(words):
        ids = tf.cast(table.lookup(words), tf.int32)
        return tf.where_v2(tf.equal(words, ""), _PADDING, ids)

    words_ph = tf.placeholder(tf.string, [None, None], "score_words")
    ids_ph = tf.placeholder(tf.int32, [None, None], "score_ids")
    word_ph = tf.placeholder(tf.string, [None], "next_word_words")
    id_ph = tf.placeholder(tf.int32, [None], "next_word_ids")
    state_ph = tf.placeholder(tf.float32, [None, decoding.state_size(network)], "state")
    signature = tf.saved_model.predict_signature_def
    return {
        "score": signature({"words": words_ph}, _score(network, ids_of(words_ph), eos_id)),
        "score_ids": signature({"ids": ids_ph}, _score(network, ids_ph, eos_id)),
        "next_word": signature(
            {"words": word_ph, "state": state_ph}, _next_word(network, ids_of(word_ph), state_ph)
        ),
        "next_word_ids": signature(
            {"ids": id_ph, "state": state_ph}, _next_word(network, id_ph, state_ph)
        ),
    }


def _score(network: Network, ids_BT: tf.Tensor, eos_id: int) -> dict[str, tf.Tensor]:
    """Build the log-probabilities of each word and of the closing <eos>, followed by zeros."""
    ids_BT = _known(ids_BT, network, _PADDING)
    is_word = tf.not_equal(ids_BT, _PADDING)
    lengths = tf.reduce_sum(tf.cast(is_word, tf.int32), axis=1)
    words = tf.where_v2(is_word, ids_BT, eos_id)
    eos = tf.fill([tf.shape(words)[0], 1], eos_id)
    log_probs_TB = decoding.target_log_probs(
        network,
        tf.transpose(tf.concat([eos, words], axis=1)),
        tf.transpose(tf.concat([words, eos], axis=1)),
    )
    counted = tf.sequence_mask(lengths + 1, tf.shape(words)[1] + 1)
    log_probs = tf.where_v2(counted, tf.transpose(log_probs_TB), 0.0)
    return {"log_probabilities": log_probs, "log_probability": tf.reduce_sum(log_probs, axis=1)}


def _known(ids: tf.Tensor, network: Network, lowest: int) -> tf.Tensor:
    # On a GPU, the embedding would return zeros for an invalid ID.
    message = "not in the vocabulary"
    checks = [
        tf.debugging.assert_greater_equal(ids, lowest, message=message),
        tf.debugging.assert_less(ids, network.vocab_size, message=message),
    ]
    with tf.control_dependencies(checks):
        return tf.identity(ids)


def _next_word(network: Network, ids_B: tf.Tensor, state: tf.Tensor) -> dict[str, tf.Tensor]:
    log_probs_BV, state = decoding.next_word(network, _known(ids_B, network, 0), state)
    return {"log_probabilities": log_probs_BV, "state": state}
