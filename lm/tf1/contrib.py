"""The frequent parts of `tf.contrib`. Calling any other name is an error with a replacement.

`tf_slim` contains the layers and the helpers of `tf.contrib.framework`.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf
from tensorflow.python.framework import ops
from tensorflow.python.util import nest

from lm.errors import UserError
from lm.tf1.call import see_logits
from lm.tf1.inert import STEPS, no_train_op
from lm.tf1.namespace import Namespace

_REPLACEMENTS = {  # keys are names, or the modules of replaced names
    "contrib.layers.batch_norm": "tf.layers.batch_normalization",
    "contrib.rnn.LSTMBlockFusedCell": "tf.nn.rnn_cell.LSTMCell and tf.nn.dynamic_rnn",
    "contrib.rnn.AttentionCellWrapper": "attention over a window (configs/config_transformer.py)",
    "contrib.rnn.EmbeddingWrapper": "tf.nn.embedding_lookup before the cell",
    "contrib.rnn.InputProjectionWrapper": "tf.layers.dense before the cell",
    "contrib.rnn.OutputProjectionWrapper": "tf.layers.dense after the cell",
    "contrib.rnn": "a cell of tf.nn.rnn_cell",
    "contrib.cudnn_rnn": "tf.nn.rnn_cell.LSTMCell and tf.nn.dynamic_rnn",
    "contrib.seq2seq": "tf.nn.static_rnn or tf.while_loop",
    "contrib.opt": "the flag --optimizer, or build_optimizer",
    "contrib.learn": "python -m lm.train",
    "contrib.estimator": "python -m lm.train",
    "contrib.tpu": "python -m lm.train",
    "contrib.distribute": "mpirun python -m lm.train",
    "contrib.training": "a field of Config",
    "estimator": "python -m lm.train",
}
# Modules of the cells, which moved several times.
RNN_CELLS = ("rnn_cell", "rnn_cell_impl", "core_rnn_cell", "core_rnn_cell_impl")
_OTHERS = "stock operations, or replace the function that uses it, in the config file"
MODE_KEYS = types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer", INFER="infer")
NEST = Namespace("nest", nest, is_sequence=nest.is_nested)
_TINY = 1e-12  # avoids a division by zero, as in tf.contrib


def _fix_of(name: str) -> str:
    """Return the replacement of a name that TensorFlow 2 does not have."""
    while name and name not in _REPLACEMENTS:
        name = name.rpartition(".")[0]
    return _REPLACEMENTS.get(name, _OTHERS)


class Missing:
    """A name that TensorFlow 2 does not have. It can be imported, and fails when it is called."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("_"):  # Python looks for optional names
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Missing(f"{self.__name__}.{name}"))

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        fix = _fix_of(self.__name__)
        raise UserError(f"tf.{self.__name__} does not exist in TensorFlow 2; use {fix}")

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (type(self.__name__, (), {"__init__": self}),)

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __eq__(self, other: Any) -> bool:
        return self is other or self()  # An unknown constant must not silently differ.

    __hash__ = object.__hash__


class _Part(Namespace):
    """A module of `tf.contrib`."""

    def __getattr__(self, name: str) -> Any:
        # The internal modules have the same names, such as contrib.layers.python.layers.layers.
        if name in ("python", "ops", self.__name__.rpartition(".")[2]):
            return self
        if f"{self.__name__}.{name}" in _REPLACEMENTS:
            return self._missing(name)
        return super().__getattr__(name)

    def _missing(self, name: str) -> Any:
        return self.__dict__.setdefault(name, Missing(f"{self.__name__}.{name}"))


class _Cells(_Part):
    """The module `tf.contrib.rnn`, with cells that only tf_keras has, under their old names."""

    def _missing(self, name: str) -> Any:
        if name in ("NASCell", "LayerNormBasicLSTMCell"):
            return getattr(importlib.import_module("lm.tf1.cells"), name)
        with contextlib.suppress(ModuleNotFoundError):
            from tf_keras.src.layers.rnn import legacy_cells

            for found in (name, name.removeprefix("_")):  # classes were private in some versions
                if hasattr(legacy_cells, found):
                    return getattr(legacy_cells, found)
        return super()._missing(name)


class InternalCells(Namespace):
    """One of TensorFlow's internal modules of cells.

    A name that the module lacks raises ImportError, because programs catch this error.
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Missing):
            raise AttributeError(name)
        return value


class Contrib(_Part):
    """The module `tf.contrib` for the `tf.nn` of a program."""

    def __init__(self, nn: types.ModuleType):
        rnn = _Cells("contrib.rnn", nn.rnn_cell, nn, LSTMBlockCell=_lstm_block_cell)
        rnn.GRUBlockCell = rnn.GRUBlockCellV2 = _gru_block_cell
        for name in RNN_CELLS:
            setattr(rnn, name, rnn)
        super().__init__(
            "contrib",
            rnn=rnn,
            seq2seq=_Part("contrib.seq2seq", sequence_loss=_sequence_loss),
            legacy_seq2seq=nn.seq2seq,
            training=_Part("contrib.training", HParams=HParams, create_train_op=no_train_op),
            learn=_Part("contrib.learn", ModeKeys=MODE_KEYS),
            util=_Part("contrib.util", constant_value=tf.get_static_value),
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("layers", "framework", "slim"):
            slim = _import_slim(name)
            behind = {"slim": [], "layers": [slim.layers], "framework": [tf]}[name]
            part = _Part(
                f"contrib.{name}",
                slim,
                *behind,
                nest=NEST,
                embed_sequence=_embed_sequence,
                optimize_loss=no_train_op,
                learning=Namespace("slim.learning", slim.learning, create_train_op=no_train_op),
                **STEPS,
            )
            return self.__dict__.setdefault(name, part)  # keeps the assignments of a config file
        return super().__getattr__(name)


def _import_slim(name: str) -> types.ModuleType:
    try:
        import tf_slim
    except ModuleNotFoundError as error:
        raise UserError(f"tf.contrib.{name} needs tf_slim; run pip install tf_slim") from error
    for kind in (tf.Tensor, tf.IndexedSlices):  # tf_slim uses the names in an internal module
        if not hasattr(ops, kind.__name__):
            setattr(ops, kind.__name__, kind)
    return tf_slim


def _embed_sequence(
    ids: tf.Tensor,
    vocab_size: int | None = None,
    embed_dim: int | None = None,
    unique: bool = False,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
    scope: Any = None,
    reuse: bool | None = None,
) -> tf.Tensor:
    """Return the embeddings of IDs; `unique` has no effect on the values."""
    with tf.variable_scope(scope, "EmbedSequence", reuse=reuse):
        embeddings = tf.get_variable(
            "embeddings",
            [vocab_size, embed_dim],
            initializer=initializer,
            regularizer=regularizer,
            trainable=trainable,
        )
        return tf.nn.embedding_lookup(embeddings, ids)


class HParams:
    """Hyperparameters as attributes; see tf.contrib.training.HParams."""

    def __init__(self, **values: Any):
        self.__dict__.update(values)

    def values(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def get(self, key: str, default: Any = None) -> Any:
        return self.__dict__.get(key, default)

    def __contains__(self, key: str) -> bool:
        return key in self.__dict__

    def add_hparam(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    set_hparam = add_hparam

    def override_from_dict(self, values: Mapping[str, Any]) -> HParams:
        self.__dict__.update(values)
        return self


def _lstm_block_cell(
    num_units: int,
    forget_bias: float = 1.0,
    cell_clip: float | None = None,
    use_peephole: bool = False,
    dtype: Any = None,
    reuse: bool | None = None,
    name: str = "lstm_cell",
) -> Any:
    """Return a BasicLSTMCell, which computes the same with the same variables."""
    if cell_clip is not None or use_peephole:
        raise UserError(
            "tf.contrib.rnn.LSTMBlockCell with cell_clip or use_peephole does not exist in"
            " TensorFlow 2; use tf.nn.rnn_cell.LSTMCell"
        )
    return tf.nn.rnn_cell.BasicLSTMCell(num_units, forget_bias, reuse=reuse, name=name, dtype=dtype)


def _gru_block_cell(
    num_units: int | None = None,
    cell_size: int | None = None,
    reuse: bool | None = None,
    name: str = "gru_cell",
) -> Any:
    """Return a GRUCell, which computes the same. Its variables have the names of GRUBlockCellV2."""
    return tf.nn.rnn_cell.GRUCell(
        cell_size if num_units is None else num_units, None, reuse, name=name
    )


def _cross_entropy(loss: Callable | None, logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    if loss:
        return loss(labels=targets, logits=logits)
    labels = tf.reshape(targets, [-1])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _sequence_loss(
    logits: tf.Tensor,
    targets: tf.Tensor,
    weights: tf.Tensor,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Callable | None = None,
    name: str | None = None,
    sum_over_timesteps: bool = False,
    sum_over_batch: bool = False,
) -> tf.Tensor:
    """Return the weighted cross entropy of logits [B, T, V], averaged over axes.

    With `sum_over_timesteps` or `sum_over_batch`, the sum is divided by the number of weights that
    are not zero, and otherwise by the sum of the weights.
    """
    if not softmax_loss_function:
        see_logits(logits)
    logits_NV = tf.reshape(logits, [-1, tf.shape(logits)[2]])
    losses_N = _cross_entropy(softmax_loss_function, logits_NV, tf.reshape(targets, [-1]))
    losses_BT = weights * tf.reshape(losses_N, tf.shape(logits)[:2])
    axes = [0] * (average_across_batch or sum_over_batch)
    axes += [1] * (average_across_timesteps or sum_over_timesteps)
    if not axes:
        return losses_BT
    if sum_over_timesteps or sum_over_batch:
        weights = tf.cast(tf.not_equal(weights, 0), tf.float32)
    return tf.reduce_sum(losses_BT, axes) / (tf.reduce_sum(weights, axes) + _TINY)


def _loss_by_example(
    logits: Sequence[tf.Tensor],
    targets: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    average_across_timesteps: bool = True,
    softmax_loss_function: Callable | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Return the weighted cross entropy [B] of a list of logits [B, V], one per time step."""
    if not softmax_loss_function:
        for step_logits in logits:
            see_logits(step_logits)
    losses = [
        weight * _cross_entropy(softmax_loss_function, *parts)
        for *parts, weight in zip(logits, targets, weights)
    ]
    total = tf.add_n(losses)
    return total / (tf.add_n(weights) + _TINY) if average_across_timesteps else total


def _legacy_sequence_loss(
    logits: Sequence[tf.Tensor],
    targets: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Callable | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Return the sum or the mean of `_loss_by_example` over the rows."""
    losses = _loss_by_example(
        logits, targets, weights, average_across_timesteps, softmax_loss_function
    )
    return tf.reduce_mean(losses) if average_across_batch else tf.reduce_sum(losses)


def _rnn_decoder(
    decoder_inputs: Sequence[tf.Tensor],
    initial_state: Any,
    cell: Any,
    loop_function: Callable | None = None,
    scope: Any = None,
) -> tuple[list[tf.Tensor], Any]:
    """Run a cell over inputs [B, units], one per time step, and return outputs and last state.

    `loop_function` computes an input from the previous output and the index of the time step.
    """
    outputs, state = [], initial_state
    with tf.variable_scope(scope or "rnn_decoder"):
        for step, values in enumerate(decoder_inputs):
            if step:
                tf.get_variable_scope().reuse_variables()
            if step and loop_function:
                with tf.variable_scope("loop_function", reuse=True):
                    values = loop_function(outputs[-1], step)
            output, state = cell(values, state)
            outputs.append(output)
    return outputs, state


def legacy_seq2seq() -> types.ModuleType:
    """Return the module `tf.contrib.legacy_seq2seq`, which was `tf.nn.seq2seq` in TF 0.x."""
    return _Part(
        "contrib.legacy_seq2seq",
        sequence_loss_by_example=_loss_by_example,
        sequence_loss=_legacy_sequence_loss,
        rnn_decoder=_rnn_decoder,
    )
