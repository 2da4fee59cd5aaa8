"""The output layer of networks with `build_outputs`: from outputs to the words.

Shapes: N tokens, B rows, H units of the outputs, E units of the embedding, V words.
"""

from collections.abc import Mapping
from typing import TypeVar

import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.errors import UserError
from lm.model import adaptive
from lm.model.context import Context, collected
from lm.model.variables import shared_variables

Table = TypeVar("Table")


class OutputLayer:
    """The output layer: a full, tied or adaptive softmax. The first use creates its variables.

    Tied weights are the tables of the embedding (Press & Wolf 2017, arXiv:1608.05859; Inan et al.
    2017, arXiv:1611.01462). If H and E differ, the outputs are first projected to E units, as in
    Melis et al. (2018), arXiv:1707.05589.
    """

    def __init__(self, config: Config, vocab_size: int, where: str):
        self._config, self._vocab_size = config, vocab_size
        self._where = f"{where}: build_outputs"  # for messages
        self._cutoffs = config.cutoffs
        if config.tie_weights and self._cutoffs and not config.adaptive_input:
            raise UserError("tie_weights with adaptive_softmax_cutoffs needs adaptive_input")
        if self._cutoffs and self._cutoffs[-1] >= vocab_size:
            raise UserError(
                f"adaptive_softmax_cutoffs {config.adaptive_softmax_cutoffs} are beyond the"
                f" vocabulary of {vocab_size} words: use smaller cutoffs"
            )

    @property
    def variable_names(self) -> set[str]:
        """The names that the variables of the layer may have."""
        of_clusters = [
            f"cluster_{c}/{part}"
            for c in range(len(self._cutoffs))
            for part in ("projection", "words")
        ]
        return {
            f"softmax/{name}"
            for name in ("weights", "bias", "projection", "clusters", *of_clusters)
        }

    def _only(self, setting: str, tables: Mapping[str, Table]) -> Table:
        if len(tables) != 1:
            fix = "give the other tables a name" if tables else "look up the words with it"
            raise UserError(
                f"{self._where}: {setting} needs exactly one table of context.embed(inputs_TB), not"
                f" {', '.join(sorted(tables)) or 'none'}: {fix}"
            )
        (only,) = tables.values()
        return only

    def cross_entropy(
        self, outputs_NH: tf.Tensor, targets_N: tf.Tensor, scale_N: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the sum of the scaled losses (a scalar), and the losses, float32 [N]."""
        if self._cutoffs:
            return adaptive.cross_entropy(
                self._adaptive_weights(outputs_NH, context), outputs_NH, targets_N, scale_N,
                context.ops, context.training,
            )  # fmt: skip
        return context.ops.cross_entropy(
            *self._full_weights(outputs_NH, context),
            targets_N,
            scale_N,
            training=context.training,
            transposed=self._config.tie_weights,
        )

    def log_probs(self, outputs_BH: tf.Tensor, context: Context) -> tf.Tensor:
        """Return the natural log-probabilities of the words, float32 [B, V]."""
        if self._cutoffs:
            weights = self._adaptive_weights(outputs_BH, context)
            return adaptive.log_probs(weights, outputs_BH, context.ops)
        hidden_BE, weights, bias_V = self._full_weights(outputs_BH, context)
        product_BV = context.ops.matmul(hidden_BE, weights, transpose_b=self._config.tie_weights)
        return tf.nn.log_softmax(tf.nn.bias_add(product_BV, bias_V))

    def _adaptive_weights(
        self, outputs_NH: tf.Tensor, context: Context
    ) -> adaptive.AdaptiveWeights:
        config, hidden = self._config, outputs_NH.shape.as_list()[1]
        if config.adaptive_input:
            bands = self._only("adaptive_input", collected(context).bands)
        with shared_variables(config, context.training), tf.variable_scope("softmax"):
            if config.tie_weights:
                reduce = context.reduce_separately
                return adaptive.get_tied_weights(config, bands, hidden, reduce)
            return adaptive.get_weights(config, hidden, self._vocab_size)

    def _full_weights(
        self, outputs_NH: tf.Tensor, context: Context
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Variable]:
        """Return the input, the weights and the bias of the projection to the words.

        The weights are [H, V], or the tied embedding [V, E].
        """
        hidden = outputs_NH.shape.as_list()[1]
        with shared_variables(self._config, context.training), tf.variable_scope("softmax"):
            if self._config.tie_weights:
                table_VE = self._only("tie_weights", collected(context).tables)
                weights = context.reduce_separately(tf.convert_to_tensor(table_VE))
                units = table_VE.shape.as_list()[1]
                if hidden != units:
                    projection_HE = tf.get_variable("projection", [hidden, units])
                    outputs_NH = context.ops.matmul(outputs_NH, projection_HE)
            else:
                weights = tf.get_variable("weights", [hidden, self._vocab_size])
            return outputs_NH, weights, tf.get_variable("bias", [self._vocab_size])
