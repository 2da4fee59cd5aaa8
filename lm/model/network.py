"""A network, built-in or user-defined: from token IDs to the loss.

docs/own_graph.md describes the functions of a network. They are called once for each use of the
network: training windows, evaluation windows and single words. All uses share the variables. This
module adds the loss, and the output layer of networks with `build_outputs`.

Shapes: T time steps, B rows, H units of the outputs, E units of the embedding, V words, N = T * B.
X is H for outputs and V for logits.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.errors import UserError
from lm.functions import BUILT_IN, NetworkFunctions
from lm.model import lstm
from lm.model.context import Context, collected
from lm.model.output_layer import OutputLayer
from lm.model.plain import logits_cross_entropy
from lm.model.variables import shared_variables

State = Mapping[str, tf.Tensor]  # recurrent state by name, [B, ...]
Built = tuple[tf.Tensor, State]  # outputs, logits or losses, and the state after the window

_LSTM = {"state_shapes": lstm.state_shapes, "build_outputs": lstm.build_outputs}


class Network:
    """A network in the current graph. The first use creates its variables."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        functions: NetworkFunctions = BUILT_IN,
        words: Sequence[str] = (),
    ):
        self._words = tuple(words)  # the vocabulary, for `reset_state` and user-defined networks
        self.config, self.vocab_size = functions.resolve(config), vocab_size
        self.where, self.is_built_in = functions.where, functions.is_built_in
        self._functions, self._by_name = functions, functions.by_name or _LSTM
        self.audit = functions.audit(self)
        self._makes_logits = self.defines("build_logits")
        self.has_losses = functions.has_losses
        self.predicts = self._makes_logits or self.defines("build_outputs")
        self.output_layer = OutputLayer(config, vocab_size, self.where)

    @property
    def micro_batch_rows(self) -> int | None:
        """The rows that operations of a user-defined network always have, or None."""
        return None if self.is_built_in else self.config.batch_size // self.config.virtual_ranks

    @functools.cached_property
    def state_parts(self) -> dict[str, tuple[list[int], str]]:
        """The shape and the type of a row's recurrent state by name. The initial state is zero."""
        found = {}
        if self.defines("state_shapes"):
            # A TF 1.x program is built to find the sizes of its states.
            needs_vocabulary = hasattr(self._by_name["state_shapes"], "needs_vocabulary")
            vocabulary = (self.vocab_size, self._words) if needs_vocabulary else ()
            found = self.call("state_shapes", self.config, *vocabulary)
        return self.audit.state_parts(found)

    @property
    def state_shapes(self) -> dict[str, list[int]]:
        """The shapes of a row's recurrent state by name."""
        return {name: shape for name, (shape, _) in self.state_parts.items()}

    @functools.cached_property
    def reads_words(self) -> int | None:
        """The number of words that the network looks at, or None if a state carries the words."""
        found = self.call("reads_words", self.config) if self.defines("reads_words") else None
        if found is not None and (type(found) is not int or found < 1):
            raise UserError(f"{self.where}: reads_words must return a positive int, not {found!r}")
        if found and self.state_shapes:
            raise UserError(
                f"{self.where}: reads_words replaces state_shapes: let reads_words return None, or"
                " let state_shapes return {}"
            )
        return found

    def defines(self, name: str) -> bool:
        """Return whether the network has a function."""
        return name in self._by_name

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the network."""
        return self._functions.call(self._by_name[name], *arguments)

    def context(self, **options: Any) -> Context:
        """Return the context of a use of the network. The options are fields of `Context`."""
        return Context(self.config, self.vocab_size, self._words, **options)

    def build(self, inputs_TB: tf.Tensor, state: State, context: Context) -> Built:
        """Build the network for a window of int32 token IDs; T must be known.

        Return the outputs or logits [T, B, X], and the state after the window.
        """
        if not self.predicts:
            raise UserError(
                f"{self.where} only defines build_losses: lm.generate, lm.export and"
                " --sample_every_steps also need build_logits or build_outputs"
            )
        what, units = ("logits", self.vocab_size) if self._makes_logits else ("outputs", None)
        shape = [*inputs_TB.shape.as_list(), units]
        return self._build(f"build_{what}", shape, (inputs_TB,), state, context)

    def _build(
        self,
        name: str,
        shape: Sequence[int | None],
        words: Sequence[tf.Tensor],
        state: State,
        context: Context,
    ) -> Built:
        """Call a function of the network. `shape` is the shape of the first result."""

        def build() -> tuple[Built, Mapping[str, tf.Variable]]:
            """Return the results of the function, and the variables that it used by name."""
            # Use a separate name scope: if an operation took the name of a variable, the variable
            # would have a different name in this graph.
            scope = tf.name_scope("lm_network")
            with shared_variables(self.config, context.training) as used, scope:
                collected(context).root_scope = tf.get_variable_scope()
                found = self.call(name, *words, dict(state), context)
            collected(context).is_built = True
            return found, used

        return self.audit.build(build, name, shape, words[0], context)

    def losses(
        self, inputs_TB: tf.Tensor, targets_TB: tf.Tensor, state: State, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor, State]:
        """Build the network and the loss for a window of int32 token IDs; T must be known.

        Return the loss to differentiate (a scalar), the losses of the targets (float32 [T, B], in
        nats) and the state after the window. The loss is the sum over the window, divided by the
        size of the GLOBAL batch. The losses of all windows of a step then add up to the loss of the
        step, even if windows have different numbers of rows.
        """
        if self.has_losses:
            shape, words = inputs_TB.shape.as_list(), (inputs_TB, targets_TB)
            losses_TB, after = self._build("build_losses", shape, words, state, context)
            return tf.reduce_sum(losses_TB) / self.config.batch_size, losses_TB, after
        outputs_or_logits_TBX, after = self.build(inputs_TB, state, context)
        loss, losses_TB = self.cross_entropy(outputs_or_logits_TBX, targets_TB, context)
        return loss, losses_TB, after

    def cross_entropy(
        self, outputs_or_logits_TBX: tf.Tensor, targets_TB: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the loss and the losses of the targets; see `losses`.

        The arguments are a result of `build`, and its context.
        """
        units = outputs_or_logits_TBX.shape.as_list()[2]
        outputs_or_logits_NX = tf.reshape(outputs_or_logits_TBX, [-1, units])
        targets_N = tf.reshape(targets_TB, [-1])
        scale_N = tf.fill(tf.shape(targets_N), 1 / self.config.batch_size)
        if self._makes_logits:
            loss, losses_N = logits_cross_entropy(outputs_or_logits_NX, targets_N, scale_N)
        else:
            loss, losses_N = self.output_layer.cross_entropy(
                outputs_or_logits_NX, targets_N, scale_N, context
            )
        return loss, tf.reshape(losses_N, tf.shape(targets_TB))

    def log_probs(self, outputs_or_logits_BX: tf.Tensor, context: Context) -> tf.Tensor:
        """Return the natural log-probabilities of the next word, float32 [B, V].

        The argument is the result of `build` at one time step.
        """
        if self._makes_logits:
            return tf.nn.log_softmax(outputs_or_logits_BX)
        return self.output_layer.log_probs(outputs_or_logits_BX, context)
