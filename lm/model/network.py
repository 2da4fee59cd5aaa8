"""A network, the built-in one or that of a config file: from word ids to the loss.

All networks come through this door. Their own part is two functions (docs/own_graph.md), called
once for each use of the network: windows of training and of evaluation, and single words. The
variables are shared. The output layer of `build_outputs` and the loss are made here.

Shapes: T time steps, B rows, H units of the outputs, V words, N = T * B.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.config_file import BUILT_IN, NetworkFunctions
from lm.errors import UserError
from lm.model import lstm
from lm.model.context import Context
from lm.model.guard import call, checked_result, checked_shapes
from lm.model.plain import logits_cross_entropy
from lm.model.rules import operations, placeholders, refuse, refuse_cuts_of_others, warnings_of
from lm.model.variables import shared_variables

logger = logging.getLogger("lm")

State = Mapping[str, tf.Tensor]  # by name, float32 [B, ...]: what passes from window to window

_OUTPUT_LAYER = ("weights", "bias", "projection")  # its variables, in the scope softmax


class Network:
    """A network in the current graph; its variables are made at its first use.

    Args:
      config: Sizes and seed.
      vocab_size: V.
      functions: The functions of the network.
    """

    def __init__(self, config: Config, vocab_size: int, functions: NetworkFunctions = BUILT_IN):
        self.config, self.vocab_size = config, vocab_size
        self.is_built_in = functions.is_built_in
        self._where, self._makes_logits = functions.where, functions.kind == "logits"
        self._state_shapes, self._build = functions.state_shapes, functions.build
        if self.is_built_in:
            self._state_shapes, self._build = lstm.state_shapes, lstm.build_outputs
        self._names: Optional[set[str]] = None  # of the variables of its first use
        self._warnings: set[str] = set()  # that were given
        self._table: Optional[tf.Variable] = None  # the embedding, where it is the softmax's too

    @property
    def state_shapes(self) -> dict[str, list[int]]:
        """The shapes of a row's recurrent state, by name; it is zero at the start.

        Raises:
          UserError: The config file's function fails, or returns something else.
        """
        found = call(self._where, self._state_shapes, self.config)
        return checked_shapes(self._where, found)

    def run(self, inputs_TB: tf.Tensor, state: State, context: Context) -> tuple[tf.Tensor, State]:
        """Run the network over a window.

        Args:
          inputs_TB: int32 ids; T must be known, B need not.
          state: Before the window.
          context: What this use of the network is.

        Returns:
          What `cross_entropy` and `log_probs` take, [T, B, H], or [T, B, V] where the network makes
          the logits; and the state after the window.

        Raises:
          UserError: The config file's function fails or makes something else; in one line, which.
        """
        before, fed = set(tf.global_variables()), placeholders()
        there = {} if self.is_built_in else operations()
        # A scope of ours: else one of the network's, made where the graph has none around it, may
        # take the name of a variable, which would get another one there.
        with shared_variables(self.config, context.training) as used, tf.name_scope("lm_network"):
            found = call(self._where, self._build, inputs_TB, dict(state), context)
        context.is_built = True
        where = f"{self._where}: {'build_logits' if self._makes_logits else 'build_outputs'}"
        for name in sorted(placeholders() - fed):
            raise UserError(
                f"{where} makes the placeholder {name}, which nothing feeds: use context.training,"
                " or a field of context.config"
            )
        units = self.vocab_size if self._makes_logits else None
        shape = [*inputs_TB.shape.as_list(), units]
        what = "logits" if self._makes_logits else "outputs"
        top, after = checked_result(where, found, what, shape, self.state_shapes)
        self._check_variables(where, used, set(tf.global_variables()) - before)
        if self.config.tie_weights:
            tables = [used["embedding"]] if "embedding" in used else list(context.tables.values())
            self._table = self._tied_table(where, tables)
        if not self.is_built_in:
            made = {name: node for name, node in operations().items() if name not in there}
            refuse(where, made, used, context.training)
            if context.training:
                self._refuse_unused(where, context)
                refuse_cuts_of_others(where, context.cuts, [inputs_TB, *state.values()])
            results = [top, *after.values(), *context.penalties]
            for line in warnings_of(where, made, state, results):
                if line not in self._warnings:  # of another use
                    self._warnings.add(line)
                    logger.warning(line)
        return top, after

    def _refuse_unused(self, where: str, context: Context) -> None:
        config = self.config
        changes = config.num_steps > 1  # from a time step to the next
        penalty = config.activation_penalty or (changes and config.temporal_activation_penalty)
        if penalty and not context.penalties:
            raise UserError(
                f"{where} does not call context.penalize, without which there is no"
                " activation_penalty nor temporal_activation_penalty"
            )
        if config.recurrent_keep_prob < 1 and not context.cuts:
            raise UserError(
                f"{where} does not call context.drop_weights, without which there is no"
                " recurrent_keep_prob"
            )

    def _tied_table(self, where: str, tables: Sequence[tf.Variable]) -> tf.Variable:
        if self._makes_logits:
            raise UserError(f"{where} makes its output layer itself: tie_weights cannot tie it")
        if len(tables) != 1:
            names = ", ".join(sorted(table.op.name for table in tables)) or "none"
            raise UserError(
                f"{where}: tie_weights ties the table of context.embed(inputs_TB), of which there"
                f" must be one, not {names}: give others a name"
            )
        (table,) = tables
        if table.shape.rank != 2 or table.shape[0] != self.vocab_size:
            raise UserError(
                f"{where}: tie_weights ties the variable embedding, which must have the shape"
                f" ({self.vocab_size}, any), not {table.shape}"
            )
        return table

    def _check_variables(self, where: str, used: Mapping[str, tf.Variable], made: set) -> None:
        anew = sorted({variable.op.name for variable in made} - used.keys())
        if anew:
            raise UserError(
                f"{where} makes {anew[0]} anew at each call: make it with tf.get_variable,"
                " which finds it again"
            )
        ours = set() if self._makes_logits else {f"softmax/{part}" for part in _OUTPUT_LAYER}
        for name in sorted(used.keys() & ours):
            raise UserError(
                f"{where} has the variable {name}, which is one of the output layer's: call it"
                " something else"
            )
        saved_state = sorted(used.keys() & {f"state/{part}" for part in self.state_shapes})
        if saved_state:
            raise UserError(
                f"{where} has the variable {saved_state[0]}, which is the name of the recurrent"
                " state in a checkpoint: call it something else"
            )
        self._names = set(used) if self._names is None else self._names
        not_always = sorted(self._names.symmetric_difference(used))
        if not_always:
            raise UserError(
                f"{where} uses the variable {not_always[0]} in some calls only (training, or"
                " evaluation, or single words): all must use the same (one that a tf.function at"
                " the top of the file makes is of the first call: write it inside)"
            )

    def cross_entropy(
        self, top_TBX: tf.Tensor, targets_N: tf.Tensor, scale_N: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the loss and the nll of each token; see `plain.cross_entropy`.

        Args:
          top_TBX: From `run`.
          targets_N: int32 ids of the words to predict.
          scale_N: Factor of each token in the loss.
          context: As for `run`.
        """
        top_NX = tf.reshape(top_TBX, [-1, top_TBX.shape.as_list()[2]])
        if self._makes_logits:
            return logits_cross_entropy(top_NX, targets_N, scale_N)
        return context.ops.cross_entropy(
            *self._output_layer(top_NX, context),
            targets_N,
            scale_N,
            training=context.training,
            transposed=self.config.tie_weights,
        )

    def log_probs(self, top_BX: tf.Tensor, context: Context) -> tf.Tensor:
        """Return the natural log-probabilities of the next word, float32 [B, V].

        Args:
          top_BX: From `run`, at one time step.
          context: As for `run`.
        """
        logits_BV = top_BX
        if not self._makes_logits:
            hidden_BE, weights, bias_V = self._output_layer(top_BX, context)
            tied = self.config.tie_weights
            logits_BV = tf.nn.bias_add(tf.matmul(hidden_BE, weights, transpose_b=tied), bias_V)
        return tf.nn.log_softmax(logits_BV)

    def _output_layer(
        self, top_NH: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Variable]:
        """Return what is projected to the words, the weights of that, and the bias.

        The weights are [H, V], or the embedding [V, E] where that is tied (Press & Wolf 2017,
        arXiv:1608.05859; Inan et al. 2017, arXiv:1611.01462). Outputs of another size than E are
        first projected down to it, as by Melis et al. (2018), arXiv:1707.05589.
        """
        hidden = top_NH.shape.as_list()[1]
        with shared_variables(self.config, context.training), tf.variable_scope("softmax"):
            if self._table is None:
                weights = tf.get_variable("weights", [hidden, self.vocab_size])
            else:
                weights = context.cut(tf.convert_to_tensor(self._table))
                units = self._table.shape.as_list()[1]
                if hidden != units:
                    projection_HE = tf.get_variable("projection", [hidden, units])
                    top_NH = context.ops.matmul(top_NH, projection_HE)
            return top_NH, weights, tf.get_variable("bias", [self.vocab_size])
