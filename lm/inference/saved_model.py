"""Export of a run as a SavedModel, which TensorFlow loads without this project.

Shapes: B sentences or rows, T words of the longest sentence, V words.
"""

import os
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from lm import logger
from lm.errors import UserError
from lm.inference.export_path import new_export
from lm.inference.trained_run import Run, check_words, open_session
from lm.model import decoding
from lm.model.network import Network
from lm.tokens.tokenizers import VOCABULARY_FILE, Words
from lm.tokens.vocabulary import EOS
from lm.user.audit import operations
from lm.user.failures import PYTHON_OPS


def export(run: Run, to: str, rows: int | None = None) -> None:
    """Write the network and the weights of a run to a new directory, atomically.

    The exported functions accept `rows` rows, or any number of rows.
    """
    tf.logging.set_verbosity(tf.logging.ERROR)  # hide the deprecation of graphs in SavedModels
    with new_export(to) as directory:
        check_words(run)
        _write(run, directory, rows)
    logger.info("wrote %s; load it with tf.saved_model.load(%r)", to, to)


def _write(run: Run, directory: str, rows: int | None) -> None:
    session, signatures = open_session(run, lambda network: _build_signatures(run, network, rows))
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
            strip_default_attrs=True,  # for older versions of TensorFlow and TensorFlow Serving
        )
        builder.save()


def _build_signatures(run: Run, network: Network, rows: int | None) -> dict:
    """Build the exported graph, and return its signatures, which `lm/export.py` documents."""
    state_ph = tf.placeholder(tf.float32, [rows, decoding.state_size(network)], "state")
    signature = tf.saved_model.predict_signature_def
    eos_id = run.tokenizer.eos_id

    def score(name: str, ph: tf.Tensor, ids_BT: tf.Tensor, is_token: tf.Tensor) -> Any:
        return signature({name: ph}, _score(network, ids_BT, is_token, eos_id))

    def next_token(name: str, ph: tf.Tensor, ids_B: tf.Tensor) -> Any:
        log_probs_BV, state = decoding.next_word(network, ids_B, state_ph)
        results = {"log_probabilities": log_probs_BV, "state": state}
        return signature({name: ph, "state": state_ph}, results)

    ids_ph = tf.placeholder(tf.int32, [rows, None], "score_ids")
    is_token = tf.greater_equal(ids_ph, 0)
    id_ph = tf.placeholder(tf.int32, [rows], "next_id_ids")
    signatures = {
        "score_ids": score("ids", ids_ph, tf.where_v2(is_token, ids_ph, eos_id), is_token),
        "next_id": next_token("ids", id_ph, id_ph),
    }
    if type(run.tokenizer) is Words:
        ids_of = _lookup(run)
        words_ph = tf.placeholder(tf.string, [rows, None], "score_words")
        is_word = tf.not_equal(words_ph, "")
        ids_BT = ids_of(tf.where_v2(is_word, words_ph, EOS))
        word_ph = tf.placeholder(tf.string, [rows], "next_word_words")
        signatures["score"] = score("words", words_ph, ids_BT, is_word)
        signatures["next_word"] = next_token("words", word_ph, ids_of(word_ph))
    default = signatures.get("score", signatures["score_ids"])
    return {**signatures, tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: default}


def _lookup(run: Run) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function from strings to token IDs. An unknown word without `<unk>` is an error."""
    size, unk_id = len(run.tokenizer), run.tokenizer.unk_id
    table = tf.lookup.StaticHashTable(
        tf.lookup.TextFileInitializer(
            os.path.join(run.directory, VOCABULARY_FILE),
            key_dtype=tf.string,
            key_index=tf.lookup.TextFileIndex.WHOLE_LINE,
            value_dtype=tf.int64,
            value_index=tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        default_value=size if unk_id is None else unk_id,
    )

    def ids_of(words: tf.Tensor) -> tf.Tensor:
        ids = tf.cast(table.lookup(words), tf.int32)
        # On a GPU, the embedding would return zeros for an invalid ID.
        check = tf.debugging.assert_less(ids, size, message="not in the vocabulary")
        with tf.control_dependencies([check]):
            return tf.identity(ids)

    return ids_of


def _score(
    network: Network, ids_BT: tf.Tensor, is_token: tf.Tensor, eos_id: int
) -> dict[str, tf.Tensor]:
    """Build the log-probabilities of each token and of the closing `<eos>`, followed by zeros."""
    eos = tf.fill([tf.shape(ids_BT)[0], 1], eos_id)
    log_probs_TB = decoding.target_log_probs(
        network,
        tf.transpose(tf.concat([eos, ids_BT], axis=1)),
        tf.transpose(tf.concat([ids_BT, eos], axis=1)),
    )
    lengths, longest = tf.reduce_sum(tf.cast(is_token, tf.int32), axis=1), tf.shape(ids_BT)[1]
    check = tf.debugging.assert_equal(
        is_token, tf.sequence_mask(lengths, longest), message="padding inside a text"
    )
    with tf.control_dependencies([check]):
        counted = tf.sequence_mask(lengths + 1, longest + 1)
    log_probs = tf.where_v2(counted, tf.transpose(log_probs_TB), 0.0)
    return {"log_probabilities": log_probs, "log_probability": tf.reduce_sum(log_probs, axis=1)}
