"""What the function of a network is told, and what it may call."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf
from tensorflow.python.ops.control_flow_util_v2 import in_defun

from lm.config import Config
from lm.data.batches import Rows
from lm.errors import UserError
from lm.model.ops import Ops, plain_ops
from lm.model.variables import Uniform

_NO_ROWS = Rows(0, 0)
_MAX_SITES = 1024  # of a step; with more, the last would get the masks of the next step's first


class Cut(NamedTuple):
    """A use of weights whose gradient is exchanged by itself; see `Context.cut`."""

    weights: tf.Tensor
    used: tf.Tensor  # equal to them; no gradient flows from here into them


@dataclasses.dataclass
class Context:
    """What `build_outputs` or `build_logits` is told of one use of the network.

    Shapes: T time steps, B rows, V words. The first two and the methods are for every network.
    `ops` and `rows` are what the built-in one computes with.
    """

    config: Config
    vocab_size: int
    ops: Ops = dataclasses.field(default_factory=plain_ops)
    rows: Rows = _NO_ROWS  # in training: which ones of the global batch B are
    step: Optional[tf.Tensor] = None  # int64 scalar in training, which keys the dropout masks
    sites: int = 0  # sets of masks so far
    cuts: list[Cut] = dataclasses.field(default_factory=list)
    penalties: list[tf.Tensor] = dataclasses.field(default_factory=list)  # of the loss
    tables: dict[str, tf.Variable] = dataclasses.field(default_factory=dict)  # of words, to tie
    is_built: bool = False  # whether the function of the network has returned

    @property
    def training(self) -> bool:
        """Whether this use is for training: dropout and penalties are of it alone."""
        return self.step is not None

    def dropout(
        self, x: tf.Tensor, keep_prob: float, batch_axis: Optional[int] = None
    ) -> tf.Tensor:
        """Drop units in training, with masks that do not depend on the number of ranks.

        They depend on the seed, the step, which call of this function it is, and the global row;
        with `locked_dropout` not on the time step, where x is [T, B, ...].

        Args:
          x: float32 [T, B, ...], or [B, ...] of two axes.
          keep_prob: Probability of keeping a unit; kept ones are divided by it.
          batch_axis: Which axis is B, 0 or 1; None: 0 where there are two axes, else 1.

        Returns:
          As x.

        Raises:
          UserError: The batch axis has not as many rows as the batch, keep_prob is out of range,
            there are too many calls, it is in a tf.function, or locked_dropout finds no time
            steps to lock.
        """
        site, self.sites = self.sites, self.sites + 1
        if not self._drops(keep_prob):
            return x
        self._refuse_late("context.dropout")
        if in_defun():
            raise UserError(
                "context.dropout is called in a tf.function, which is traced once: all its calls"
                " would have one mask; leave @tf.function out"
            )
        shape = x.shape.as_list()
        if batch_axis is None:
            batch_axis = 0 if len(shape) == 2 else 1
        rows = self.rows.count
        if batch_axis >= len(shape) or shape[batch_axis] != rows or None in shape:
            raise UserError(
                f"context.dropout: axis {batch_axis} of {shape} is not the batch of {rows} rows:"
                " give batch_axis=0 or batch_axis=1"
            )
        if self.config.locked_dropout and batch_axis == 0 and len(shape) > 2:
            raise UserError(
                f"context.dropout: locked_dropout is for [T, B, ...], not for {shape} with"
                " batch_axis=0, whose time steps are not known"
            )
        steps = shape[0] if batch_axis else 1
        x_TBH = tf.reshape(x, [steps, rows, math.prod(shape[batch_axis + 1 :])])
        if self.config.locked_dropout:
            x_TBH *= self._dropped(tf.ones([1, *x_TBH.shape[1:]]), keep_prob, site, self.rows.first)
        else:
            x_TBH = self._dropped(x_TBH, keep_prob, site, self.rows.first)
        return tf.reshape(x_TBH, shape)

    def _drops(self, keep_prob: float) -> bool:
        if not 0 < keep_prob <= 1:
            raise UserError(f"keep_prob must be above 0 and at most 1, not {keep_prob}")
        return self.training and keep_prob != 1

    def _dropped(self, x_TBH: tf.Tensor, keep_prob: float, site: int, first_row: int) -> tf.Tensor:
        """Drop units with masks that depend on (seed, step, site, global row) alone.

        So the same rows get the same masks however many ranks share them, and after a resume. Each
        row owns a range of the counters of the Philox generator (Salmon et al. 2011, "Parallel
        random numbers: as easy as 1, 2, 3"), whose every counter gives four numbers.
        """
        if site >= _MAX_SITES:
            raise UserError(f"dropout has more than {_MAX_SITES} sites in a step")
        num_steps, _, units = x_TBH.shape.as_list()
        counters_per_row = -(-num_steps * units // 4)
        key = tf.constant([self.config.seed], tf.uint64)
        counter = tf.stack(
            [
                tf.constant(first_row * counters_per_row, tf.uint64),
                tf.cast(self.step, tf.uint64) * _MAX_SITES + site,
            ]
        )
        return self.ops.dropout(x_TBH, keep_prob, key, counter)

    def drop_weights(self, weights: tf.Tensor, keep_prob: float) -> tf.Tensor:
        """Drop weights in training, the same ones on all ranks and for all rows and time steps.

        DropConnect (Wan et al. 2013) on recurrent weights is the weight-drop of Merity et al.
        (2018), arXiv:1708.02182, section 2. The masks depend on the seed, the step and the site.

        Args:
          weights: float32 matrix.
          keep_prob: Probability of keeping a weight; kept ones are divided by it.

        Returns:
          As weights.

        Raises:
          UserError: keep_prob is out of range, there are too many calls, or it is in a loop's body.
        """
        if not self._drops(keep_prob):
            return weights
        self._refuse_late("context.drop_weights")
        _refuse_in_loop("context.drop_weights")
        site, self.sites = self.sites, self.sites + 1
        return self.cut(self._dropped(tf.convert_to_tensor(weights)[None], keep_prob, site, 0)[0])

    def cut(self, weights: tf.Tensor) -> tf.Tensor:
        """Have the gradient of a use of weights exchanged by itself.

        It is summed over the ranks, and flows on into the weights after that. So a mask on them is
        applied to the sum, and a part of a variable's gradient is added to the others when each is
        a sum over the ranks: else the run would depend, by a rounding, on their number.

        Args:
          weights: Made of variables alone, the same on all ranks.

        Returns:
          As weights.
        """
        if not self.training:
            return weights
        self.cuts.append(Cut(weights, tf.stop_gradient(weights)))
        return self.cuts[-1].used

    def penalize(self, outputs_TBH: tf.Tensor, dropped_TBH: tf.Tensor) -> None:
        """Add the activation penalties of the config to the loss that is differentiated.

        AR and TAR of Merity et al. (2017), arXiv:1708.01009. As in their code, means of squares
        over the units of the global batch; here times T, like the loss, which is a sum over the
        time steps of a row.

        Args:
          outputs_TBH: Of the top layer.
          dropped_TBH: The same after dropout.

        Raises:
          UserError: They are of other shapes, or it is in a loop's body.
        """
        if not self.training:
            return
        _refuse_in_loop("context.penalize")
        shapes = [outputs_TBH.shape, dropped_TBH.shape]
        if not all(shape.is_compatible_with([None, self.rows.count, None]) for shape in shapes):
            raise UserError(
                f"context.penalize: outputs, and the same after dropout, must be [T, B, H] of"
                f" {self.rows.count} rows, not {shapes[0]} and {shapes[1]}"
            )
        config, (steps, _, units) = self.config, shapes[0].as_list()
        whole = config.batch_size * units
        if config.activation_penalty:
            factor = config.activation_penalty / whole
            self.penalties.append(factor * tf.reduce_sum(tf.square(dropped_TBH)))
        if config.temporal_activation_penalty and steps > 1:
            factor = config.temporal_activation_penalty * steps / (steps - 1) / whole
            change_TBH = outputs_TBH[1:] - outputs_TBH[:-1]
            self.penalties.append(factor * tf.reduce_sum(tf.square(change_TBH)))

    def _refuse_late(self, what: str) -> None:
        # It would drop other units than those that the loss was computed without.
        if self.is_built:
            raise UserError(
                f"{what} is called anew for the gradient, as tf.recompute_grad does: call it"
                " outside of what is recomputed"
            )

    def embed(
        self, inputs_TB: tf.Tensor, units: Optional[int] = None, name: str = "embedding"
    ) -> tf.Tensor:
        """Look words up in a table of this name, [V, units].

        Args:
          inputs_TB: int32 ids; T must be known, B need not.
          units: Of a word; None: embedding_size, or else hidden_size.
          name: Of the variable.

        Returns:
          float32 [T, B, units].
        """
        config = self.config
        units = units or config.embedding_size or config.hidden_size
        scale = config.embedding_init_scale
        initializer = Uniform(scale) if scale else None  # the scope's
        scope = tf.get_variable_scope()  # where a second call finds the same table
        with tf.variable_scope(scope, reuse=tf.AUTO_REUSE, auxiliary_name_scope=False):
            table_VH = tf.get_variable(name, [self.vocab_size, units], initializer=initializer)
        if name == "embedding":  # in whatever scope
            self.tables[table_VH.op.name] = table_VH
        # Row by row, for the sake of the gradient: its list of words is then in the order of the
        # global rows, and the same when the ranks' lists are put one after the other.
        # (Not a transpose: for int32 oneDNN complains of it on stderr.)
        inputs_BT = tf.stack(tf.unstack(inputs_TB), axis=1)
        return tf.transpose(tf.gather(table_VH, inputs_BT), [1, 0, 2])


def _refuse_in_loop(what: str) -> None:
    if tf.get_default_graph().building_function:
        raise UserError(
            f"{what} is for weights and outputs of all time steps: call it outside the loop"
        )
