"""The context of a network function: settings, dropout, embeddings and penalties.

Shapes: T time steps, B rows, H units, V words.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.ops.control_flow_util_v2 import in_defun

from lm.config import Config
from lm.data.batches import Rows
from lm.errors import UserError
from lm.model.ops import Ops, plain_ops
from lm.model.variables import Uniform

_NO_ROWS = Rows(0, 0)
_MAX_MASKS = 1024  # per step; a larger index would repeat a mask of the next step


class SeparateReduction(NamedTuple):
    """A use of weights whose gradient is summed over the ranks separately."""

    weights: tf.Tensor
    used: tf.Tensor  # equal to the weights, but no gradient flows from it into the weights


@dataclasses.dataclass
class Context:
    """The argument of `build_outputs` or `build_logits` in one use of the network."""

    config: Config
    vocab_size: int
    ops: Ops = dataclasses.field(default_factory=plain_ops)
    rows: Rows = _NO_ROWS  # the local rows of the global batch, which only training uses
    step: tf.Tensor | None = None  # the global step (int64 scalar), or None in other uses
    num_masks: int = 0  # dropout masks used so far
    separate_reductions: list[SeparateReduction] = dataclasses.field(default_factory=list)
    penalties: list[tf.Tensor] = dataclasses.field(default_factory=list)  # added to the loss
    tables: dict[str, tf.Variable] = dataclasses.field(default_factory=dict)  # for tie_weights
    is_built: bool = False  # whether the network function has returned

    @property
    def training(self) -> bool:
        """Whether this use is for training. Dropout and penalties apply only in training."""
        return self.step is not None

    def dropout(self, x: tf.Tensor, keep_prob: float, batch_axis: int | None = None) -> tf.Tensor:
        """Drop units in training, with masks that do not depend on the number of ranks.

        Masks depend on the seed, the step, the index of the call and the global row. With
        `locked_dropout`, all time steps of an x of shape [T, B, ...] share a mask.

        Args:
          x: float32 [T, B, ...], or [B, H].
          keep_prob: Probability of keeping a unit. Kept units are divided by it.
          batch_axis: Axis of the rows, 0 or 1. The default is 0 for two axes, otherwise 1.
        """
        mask_index, self.num_masks = self.num_masks, self.num_masks + 1
        if not self._drops(keep_prob):
            return x
        self._check_not_built("context.dropout")
        if in_defun():
            raise UserError(
                "context.dropout is called in a tf.function, whose calls would all have the same"
                " mask: remove @tf.function"
            )
        shape = x.shape.as_list()
        if batch_axis is None:
            batch_axis = 0 if len(shape) == 2 else 1
        rows, first_row = self.rows.count, self.rows.first
        if batch_axis >= len(shape) or shape[batch_axis] != rows or None in shape:
            raise UserError(
                f"context.dropout: axis {batch_axis} of {shape} is not the batch of {rows} rows:"
                " give batch_axis=0 or batch_axis=1"
            )
        if self.config.locked_dropout and batch_axis == 0 and len(shape) > 2:
            raise UserError(
                f"context.dropout: locked_dropout needs [T, B, ...], not {shape} with batch_axis=0"
            )
        steps = shape[0] if batch_axis else 1
        x_TBH = tf.reshape(x, [steps, rows, math.prod(shape[batch_axis + 1 :])])
        if self.config.locked_dropout:
            ones_1BH = tf.ones([1, *x_TBH.shape[1:]])
            x_TBH *= self._dropped(ones_1BH, keep_prob, mask_index, first_row)
        else:
            x_TBH = self._dropped(x_TBH, keep_prob, mask_index, first_row)
        return tf.reshape(x_TBH, shape)

    def _drops(self, keep_prob: float) -> bool:
        if not 0 < keep_prob <= 1:
            raise UserError(f"keep_prob must be above 0 and at most 1, not {keep_prob}")
        return self.training and keep_prob != 1

    def _dropped(
        self, x_TBH: tf.Tensor, keep_prob: float, mask_index: int, first_row: int
    ) -> tf.Tensor:
        """Drop units with a mask that only depends on (seed, step, mask index, global row).

        Each row owns a range of the counters of the Philox generator (Salmon et al. 2011,
        "Parallel random numbers: as easy as 1, 2, 3"). Each counter yields four numbers.
        """
        if mask_index >= _MAX_MASKS:
            raise UserError(f"dropout has more than {_MAX_MASKS} masks in a step")
        num_steps, _, units = x_TBH.shape.as_list()
        counters_per_row = -(-num_steps * units // 4)
        key = tf.constant([self.config.seed], tf.uint64)
        counter = tf.stack(
            [
                tf.constant(first_row * counters_per_row, tf.uint64),
                tf.cast(self.step, tf.uint64) * _MAX_MASKS + mask_index,
            ]
        )
        return self.ops.dropout(x_TBH, keep_prob, key, counter)

    def drop_weights(self, weights: tf.Tensor, keep_prob: float) -> tf.Tensor:
        """Drop weights in training, with the same mask on all ranks and for all rows.

        This is DropConnect (Wan et al. 2013). On recurrent weights, it is the weight-drop of Merity
        et al. (2018), arXiv:1708.02182, section 2. The weights, a float32 matrix, must be computed
        from variables only. Kept weights are divided by `keep_prob`.
        """
        if not self._drops(keep_prob):
            return weights
        self._check_not_built("context.drop_weights")
        _check_not_in_loop("context.drop_weights")
        mask_index, self.num_masks = self.num_masks, self.num_masks + 1
        stacked = tf.convert_to_tensor(weights)[None]
        return self.reduce_separately(self._dropped(stacked, keep_prob, mask_index, 0)[0])

    def reduce_separately(self, weights: tf.Tensor) -> tf.Tensor:
        """Sum the gradient of this use of the weights over the ranks before it flows into them.

        Otherwise, the number of ranks would change the rounding when a mask is applied to the
        gradient, or when the gradients of two uses of a variable are added. The weights must be
        computed from variables only.
        """
        if not self.training:
            return weights
        self.separate_reductions.append(SeparateReduction(weights, tf.stop_gradient(weights)))
        return self.separate_reductions[-1].used

    def penalize(self, outputs_TBH: tf.Tensor, dropped_TBH: tf.Tensor) -> None:
        """Add the activation penalties of the config to the differentiated loss.

        These are AR and TAR of Merity et al. (2017), arXiv:1708.01009, of the outputs of the top
        layer before and after dropout. As in their code, the penalties are means of squares over
        the units of the global batch. Here they are multiplied by T, because the loss is a sum over
        the time steps of a row.
        """
        if not self.training:
            return
        _check_not_in_loop("context.penalize")
        shapes = [outputs_TBH.shape, dropped_TBH.shape]
        if not all(shape.is_compatible_with([None, self.rows.count, None]) for shape in shapes):
            raise UserError(
                f"context.penalize: the outputs before and after dropout must be [T, B, H] with"
                f" {self.rows.count} rows, not {shapes[0]} and {shapes[1]}"
            )
        config, (steps, _, units) = self.config, shapes[0].as_list()
        num_units = config.batch_size * units
        if config.activation_penalty:
            factor = config.activation_penalty / num_units
            self.penalties.append(factor * tf.reduce_sum(tf.square(dropped_TBH)))
        if config.temporal_activation_penalty and steps > 1:
            factor = config.temporal_activation_penalty * steps / (steps - 1) / num_units
            change_TBH = outputs_TBH[1:] - outputs_TBH[:-1]
            self.penalties.append(factor * tf.reduce_sum(tf.square(change_TBH)))

    def _check_not_built(self, name: str) -> None:
        # A second call would use a different mask in the gradient than in the loss.
        if self.is_built:
            raise UserError(
                f"{name} is called again for the gradient, as tf.recompute_grad does: call it"
                " outside of the recomputed function"
            )

    def embed(
        self, inputs_TB: tf.Tensor, units: int | None = None, name: str = "embedding"
    ) -> tf.Tensor:
        """Look up token IDs in the table [V, units] with this name, as float32 [T, B, units].

        T must be known. The default for `units` is `embedding_size`, or `hidden_size`.
        """
        config = self.config
        units = units or config.embedding_size or config.hidden_size
        scale = config.embedding_init_scale
        initializer = Uniform(scale) if scale else None  # None: the scope's initializer
        scope = tf.get_variable_scope()  # a second call in this scope finds the same table
        with tf.variable_scope(scope, reuse=tf.AUTO_REUSE, auxiliary_name_scope=False):
            table_VH = tf.get_variable(name, [self.vocab_size, units], initializer=initializer)
        if name == "embedding":  # the scope does not matter
            self.tables[table_VH.op.name] = table_VH
        # Look up the words of each row in turn. The gradient then lists the words in the order of
        # the global rows. Therefore, the concatenated lists of several ranks equal the list of a
        # single rank. tf.transpose of int32 would print a oneDNN warning.
        inputs_BT = tf.stack(tf.unstack(inputs_TB), axis=1)
        return tf.transpose(tf.gather(table_VH, inputs_BT), [1, 0, 2])


def _check_not_in_loop(name: str) -> None:
    if tf.get_default_graph().building_function:
        raise UserError(
            f"{name} is for weights and outputs of all time steps: call it outside the loop"
        )
