"""The functions of a config file for the frequent forms of TF 1.x models.

Shapes: T time steps, B rows, V words.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.errors import UserError
from lm.model.context import Context
from lm.model.variables import shared_variables
from lm.tf1.adapter import adapt
from lm.tf1.call import current_call, replaced
from lm.tf1.feeds import cell_classes


def network(
    build: Callable[[Any, Any], Any], logits: str | None = None, state: str | None = None
) -> tuple[Callable, Callable]:
    """Return `state_shapes` and `build_logits` for the frequent forms of models.

    Calls of `tf.placeholder` with an integer type and two axes, or no shape, return the words.
    Calls of `zero_state` of cells return the state.

    Args:
      build: A function that builds the model from the words, int32 [B, T], and the context. It
        returns an object or a dictionary.
      logits: The name of the logits in the result, [B, T, V] or [B * T, V]. By default, these are
        the logits that the program passes to its cross entropy.
      state: The name of the final state in the result, or None if there is no state.
    """
    model = Network(build, logits, state)
    return model.state_shapes, model.build_logits


class Network:
    """The functions that `network` returns."""

    def __init__(self, build: Callable, logits: str | None, state: str | None):
        self._build, self._logits, self._state = build, logits, state

    def state_shapes(
        self, config: Config, vocab_size: int = 16, words: tuple[str, ...] = ()
    ) -> dict[str, list[int]]:
        """Return the sizes of the states that the program creates, in a graph for one row."""
        if not self._state:
            return {}
        sizes: list[int] = []

        def create(size: int, dtype: tf.DType) -> tf.Tensor:
            sizes.append(size)
            with tf.init_scope():  # The program may also use this state outside of a loop.
                return tf.zeros([1, size], dtype)

        context = Context(config, vocab_size, words, num_rows=1)
        # As in training, operations must not take the names of variables.
        scope = tf.name_scope("lm_network")
        with tf.Graph().as_default(), shared_variables(config, training=False), scope:
            words_TB = tf.zeros([config.num_steps, 1], tf.int32)
            adapt(self._run)(words_TB, create, context)
        if not sizes:
            raise UserError(
                f"tf1.network: the program calls no zero_state of a cell, so {self._state} would"
                " not reach the next window: define state_shapes and build_logits with tf1.fed"
            )
        return {str(index): [size] for index, size in enumerate(sizes)}

    state_shapes.needs_vocabulary = True

    def build_logits(
        self, inputs_TB: tf.Tensor, state: Mapping[str, tf.Tensor], context: Context
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        parts = iter(state.values())
        logits, last = self._run(inputs_TB, lambda *_: next(parts), context)
        steps, rows = inputs_TB.shape.as_list()
        if logits.shape.rank == 3 and logits.shape.as_list()[:2] == [steps, rows] != [rows, steps]:
            raise UserError(
                "tf1.network: the logits are [T, B, V]: return"
                " tf.transpose(logits, [1, 0, 2]) in build"
            )
        if logits.shape.rank == 3 and logits.shape.as_list()[:2] == [rows, (steps or 0) - 1]:
            raise UserError(
                "tf1.network: the logits have one time step less than the words, so the program"
                " takes its targets from the words: append any word to the words"
            )
        size = logits.shape.as_list()[-1] if logits.shape.rank else None
        vocab_size = context.vocab_size
        if size not in (None, vocab_size):
            raise UserError(
                f"tf1.network: the logits are for {size:,} tokens, but the tokenizer has"
                f" {vocab_size:,}: build the program with context.vocab_size"
            )
        logits_BTV = tf.reshape(logits, [-1 if rows is None else rows, steps, context.vocab_size])
        if len(last) != len(state):
            raise UserError(
                f"tf1.network: {self._state} has {len(last)} parts, but the zero_state calls of the"
                f" cells return {len(state)}, so they cannot be paired: define state_shapes and"
                " build_logits with tf1.fed"
            )
        return tf.transpose(logits_BTV, [1, 0, 2]), dict(zip(state, last))

    def _run(
        self, inputs_TB: tf.Tensor, state_part: Callable, context: Context
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the logits and the parts of the last state of the program's model.

        `state_part` returns the next part of the initial state for a size and a type.
        """
        states: dict[Any, Any] = {}

        def zero_state(cell: Any, batch_size: Any, dtype: tf.DType) -> Any:
            if cell not in states:  # A program may request the state of a cell twice.
                own = [state_part(n, dtype) for n in tf.nest.flatten(cell.state_size)]
                states[cell] = tf.nest.pack_sequence_as(cell.state_size, own)
            return states[cell]

        call = current_call()
        call.words, call.logits = tf.transpose(inputs_TB), []
        with contextlib.ExitStack() as stack:
            # Without a state, the cells of a model start with zeros in each window.
            for cls in cell_classes() if self._state else ():
                stack.enter_context(replaced(cls, {"zero_state": zero_state}))
            built = self._build(call.words, context)
        if self._logits:
            call.logits = [_part(built, self._logits)]
        if len(call.logits) != 1:
            number = f"{len(call.logits)} different cross entropies"
            raise UserError(
                f"tf1.network: the program computes {number if call.logits else 'no cross entropy'}"
                "; pass the name of its logits"
            )
        return call.logits[0], tf.nest.flatten(_part(built, self._state)) if self._state else []


def _part(built: Any, name: str) -> Any:
    """Return a value of a dictionary, or an attribute."""
    try:
        return built[name] if isinstance(built, Mapping) else getattr(built, name)
    except (AttributeError, KeyError) as error:
        names = sorted(built if isinstance(built, Mapping) else getattr(built, "__dict__", ()))
        found = ", ".join(names) or f"the {type(built).__name__} that build returned"
        raise UserError(f"tf1.network: there is no {name} in {found}") from error
