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

from lm import logger
from lm.config import Config
from lm.config_file import BUILT_IN, NetworkFunctions
from lm.errors import UserError
from lm.model import adaptive, lstm, network_rules
from lm.model.context import Context
from lm.model.plain import logits_cross_entropy
from lm.model.user_errors import call, hint_for_words
from lm.model.variables import shared_variables

State = Mapping[str, tf.Tensor]  # recurrent state by name, [B, ...]

_LSTM = {"state_shapes": lstm.state_shapes, "build_outputs": lstm.build_outputs}
_OUTPUT_LAYER = {  # variable names
    "softmax/weights", "softmax/bias", "softmax/projection", "softmax/clusters",
}  # fmt: skip


class Network:
    """A network in the current graph. The first use creates its variables."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        functions: NetworkFunctions = BUILT_IN,
        words: Sequence[str] = (),
    ):
        self._words = tuple(words)  # the vocabulary, which only user-defined networks may need
        self.config, self.vocab_size = functions.resolve(config), vocab_size
        self.where, self.is_built_in = functions.where, functions.is_built_in
        self._functions = functions.by_name or _LSTM
        self._makes_logits = "build_logits" in self._functions
        self.has_losses = functions.has_losses
        self.predicts = self._makes_logits or "build_outputs" in self._functions
        self.why_irreproducible = ""  # why results of the training differ between runs, or ""
        self._names: dict[str, set[str]] = {}  # variables of the first call of each function
        self._table: tf.Variable | None = None  # the embedding, if tied to the output layer
        self._bands: Sequence[tf.Variable] = ()  # the tables of an adaptive input
        _check_output_layer(config, vocab_size, functions)

    @property
    def micro_batch_rows(self) -> int | None:
        """The rows that operations of a user-defined network always have, or None."""
        return None if self.is_built_in else self.config.batch_size // self.config.virtual_ranks

    @functools.cached_property
    def state_parts(self) -> dict[str, tuple[list[int], str]]:
        """The shape and the type of a row's recurrent state by name. The initial state is zero."""
        found = self.call("state_shapes", self.config) if self.defines("state_shapes") else {}
        return network_rules.checked_state(self.where, found)

    @property
    def state_shapes(self) -> dict[str, list[int]]:
        """The shapes of a row's recurrent state by name."""
        return {name: shape for name, (shape, _) in self.state_parts.items()}

    @functools.cached_property
    def reads_words(self) -> int | None:
        """The number of words that the network looks at, or None if the file does not define it."""
        if not self.defines("reads_words"):
            return None
        found = self.call("reads_words", self.config)
        if type(found) is not int or found < 1:
            raise UserError(f"{self.where}: reads_words must return a positive int, not {found!r}")
        return found

    def defines(self, name: str) -> bool:
        """Return whether the config file defines a function."""
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the config file; if it fails, the error names the line of the file."""
        return call(self.where, self._functions[name], *arguments)

    def context(self, **options: Any) -> Context:
        """Return the context of a use of the network. The options are fields of `Context`."""
        return Context(self.config, self.vocab_size, self._words, **options)

    def build(
        self, inputs_TB: tf.Tensor, state: State, context: Context
    ) -> tuple[tf.Tensor, State]:
        """Build the network for a window of int32 token IDs; T must be known.

        Return the outputs or logits [T, B, X], and the state after the window.
        """
        if not self.predicts:
            raise UserError(
                f"{self.where} only defines build_losses: lm.generate and lm.export also need"
                " build_logits or build_outputs"
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
    ) -> tuple[tf.Tensor, State]:
        """Call a function of the network, and check its results and its operations.

        `shape` is the shape of the first result; see `checked_result`.
        """
        where, variables_before = f"{self.where}: {name}", set(tf.global_variables())
        there = {} if self.is_built_in else network_rules.operations()
        # Use a separate name scope: if an operation took the name of a variable, the variable would
        # have a different name in this graph.
        with shared_variables(self.config, context.training) as used, tf.name_scope("lm_network"):
            context.root_scope = tf.get_variable_scope()
            found = self.call(name, *words, dict(state), context)
            network_rules.add_regularization(context)
        context.is_built = True
        what = name.removeprefix("build_")
        try:
            top, after = network_rules.checked_result(where, found, what, shape, self.state_parts)
        except UserError as error:
            raise UserError(f"{error}{hint_for_words(words[0], context)}") from error
        created = {variable.op.name for variable in set(tf.global_variables()) - variables_before}
        self._check_variables(name, used, created, context)
        if not self.is_built_in:
            made = {n: node for n, node in network_rules.operations().items() if n not in there}
            results = [top, *after.values(), *context.added_losses]
            self._check_graph(where, made, used, results, context)
        return top, after

    def _check_variables(
        self, name: str, used: Mapping[str, tf.Variable], created: set[str], context: Context
    ) -> None:
        where, first_used = f"{self.where}: {name}", self._names.setdefault(name, set(used))
        reserved = {f"state/{part}" for part in self.state_shapes}
        if name == "build_outputs":
            reserved |= _OUTPUT_LAYER
            for c in range(len(self.config.cutoffs)):
                reserved |= {f"softmax/cluster_{c}/{part}" for part in ("projection", "words")}
        network_rules.check_variables(where, used, created, reserved, first_used)
        if self.config.adaptive_input:
            self._bands = network_rules.only_table(where, "adaptive_input", context.bands)
        elif self.config.tie_weights:
            own = {"embedding": used["embedding"]} if "embedding" in used else context.tables
            self._table = network_rules.only_table(where, "tie_weights", own)
            network_rules.check_rows(where, self._table, self.vocab_size)

    def _check_graph(
        self,
        where: str,
        made: network_rules.Nodes,
        used: Mapping[str, tf.Variable],
        results: Sequence[tf.Tensor],
        context: Context,
    ) -> None:
        """Check the operations of a user-defined network."""
        if context.training:
            network_rules.check_training(where, context)
            context.updates += network_rules.find_updates(where, made, used, context)
            results = [*results, *(update.change for update in context.updates)]
            self._find_irreproducible(where, made, results)
        network_rules.check_operations(where, made, used, results)

    def _find_irreproducible(
        self, where: str, made: network_rules.Nodes, results: Sequence[tf.Tensor | tf.Operation]
    ) -> None:
        """Store why results of the training can differ between runs, and warn."""
        draws = network_rules.why_irreproducible(made, results)
        if draws and not self.why_irreproducible:  # several calls have the same reason
            self.why_irreproducible = f"{where} {draws}"
            logger.warning(self.why_irreproducible)

    def check_update(self, there: network_rules.Nodes, train_op: tf.Operation) -> None:
        """Warn if the update draws random numbers that are not repeatable.

        The operations of `there` existed before the functions of the config file were called.
        """
        made = {n: node for n, node in network_rules.operations().items() if n not in there}
        self._find_irreproducible(f"{self.where}: the update", made, [train_op])

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
        elif self.config.cutoffs:
            weights = self._adaptive_weights(units, context)
            loss, losses_N = adaptive.cross_entropy(
                weights, outputs_or_logits_NX, targets_N, scale_N, context.ops, context.training
            )
        else:
            loss, losses_N = context.ops.cross_entropy(
                *self._output_layer(outputs_or_logits_NX, context),
                targets_N,
                scale_N,
                training=context.training,
                transposed=self.config.tie_weights,
            )
        return loss, tf.reshape(losses_N, tf.shape(targets_TB))

    def log_probs(self, outputs_or_logits_BX: tf.Tensor, context: Context) -> tf.Tensor:
        """Return the natural log-probabilities of the next word, float32 [B, V].

        The argument is the result of `build` at one time step.
        """
        if self._makes_logits:
            return tf.nn.log_softmax(outputs_or_logits_BX)
        if self.config.cutoffs:
            units = outputs_or_logits_BX.shape.as_list()[1]
            return adaptive.log_probs(self._adaptive_weights(units, context), outputs_or_logits_BX)
        hidden_BE, weights, bias_V = self._output_layer(outputs_or_logits_BX, context)
        product_BV = tf.matmul(hidden_BE, weights, transpose_b=self.config.tie_weights)
        return tf.nn.log_softmax(tf.nn.bias_add(product_BV, bias_V))

    def _adaptive_weights(self, hidden: int, context: Context) -> adaptive.AdaptiveWeights:
        with shared_variables(self.config, context.training), tf.variable_scope("softmax"):
            if self.config.tie_weights:
                reduce = context.reduce_separately
                return adaptive.get_tied_weights(self.config, self._bands, hidden, reduce)
            return adaptive.get_weights(self.config, hidden, self.vocab_size)

    def _output_layer(
        self, outputs_NH: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Variable]:
        """Return the input, the weights and the bias of the projection to the words.

        The weights are [H, V], or the tied embedding [V, E] (Press & Wolf 2017, arXiv:1608.05859;
        Inan et al. 2017, arXiv:1611.01462). If H and E differ, the outputs are first projected to
        E units, as in Melis et al. (2018), arXiv:1707.05589.
        """
        hidden = outputs_NH.shape.as_list()[1]
        with shared_variables(self.config, context.training), tf.variable_scope("softmax"):
            if self._table is None:
                weights = tf.get_variable("weights", [hidden, self.vocab_size])
            else:
                weights = context.reduce_separately(tf.convert_to_tensor(self._table))
                units = self._table.shape.as_list()[1]
                if hidden != units:
                    projection_HE = tf.get_variable("projection", [hidden, units])
                    outputs_NH = context.ops.matmul(outputs_NH, projection_HE)
            return outputs_NH, weights, tf.get_variable("bias", [self.vocab_size])


def _check_output_layer(config: Config, vocab_size: int, functions: NetworkFunctions) -> None:
    fields = [name for name in ("tie_weights", "adaptive_softmax_cutoffs") if getattr(config, name)]
    own = sorted(functions.by_name.keys() & {"build_losses", "build_logits"})
    if fields and own:
        raise UserError(
            f"{functions.where} builds its own output layer, so {fields[0]} has no effect: define"
            f" build_outputs instead of {own[0]}"
        )
    if len(fields) == 2 and not config.adaptive_input:
        raise UserError("tie_weights with adaptive_softmax_cutoffs needs adaptive_input")
    if config.cutoffs and config.cutoffs[-1] >= vocab_size:
        raise UserError(
            f"adaptive_softmax_cutoffs {config.adaptive_softmax_cutoffs} are beyond the vocabulary"
            f" of {vocab_size} words: use smaller cutoffs"
        )
