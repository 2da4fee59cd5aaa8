"""The context of a network function: settings, dropout, embeddings and added losses.

Shapes: T time steps, B rows, H units, V words.
"""

import dataclasses
import math
from typing import NamedTuple

import tensorflow.compat.v1 as tf
from tensorflow.python.ops.control_flow_util_v2 import in_defun

from lm.config import Config
from lm.errors import UserError
from lm.model import adaptive
from lm.model.candidates import Candidates, sample_candidates
from lm.model.ops import Ops, plain_ops
from lm.model.variables import Uniform

_DRAWS_PER_KEY = 1024  # of a step; more draws use the next key
_KEY_STEP = 0x1E3779B97F4A7C15  # an arbitrary number: the next key is no seed of another run


# The tokens at which `reset_state` resets the state: of each group, the first token that the
# vocabulary contains. Merged tokens of a BPE may contain line ends, too.
_LINE_ENDS = ("\n", "\u010a")  # GPT-2's vocabulary writes a line end as U+010A
_SEPARATORS = {
    "line": (_LINE_ENDS, ("<0x0A>",), ("<eos>",), ("</s>",)),
    "document": (("<|endoftext|>", "<|end_of_text|>", "</s>"),),
}


class SeparateReduction(NamedTuple):
    """A use of weights whose gradient is summed over the ranks separately."""

    weights: tf.Tensor
    used: tf.Tensor  # equal to the weights, but no gradient flows from it into the weights


class VariableUpdate(NamedTuple):
    """A change of an untrained variable, such as a moving average."""

    variable: tf.Variable
    change: tf.Tensor  # this computation's part of the mean change over the global batch


@dataclasses.dataclass
class Collected:
    """Values that the program collects during one use of a network; users do not see them."""

    separate_reductions: list[SeparateReduction] = dataclasses.field(default_factory=list)
    added_losses: list[tf.Tensor] = dataclasses.field(default_factory=list)  # parts of the loss
    updates: list[VariableUpdate] = dataclasses.field(default_factory=list)
    tables: dict[str, tf.Variable] = dataclasses.field(default_factory=dict)  # for tie_weights
    bands: dict[str, list[tf.Variable]] = dataclasses.field(default_factory=dict)  # adaptive_input
    called: set[str] = dataclasses.field(default_factory=set)  # methods that settings depend on
    root_scope: tf.VariableScope | None = None  # the scope of the network function
    is_built: bool = False  # whether the network function has returned


@dataclasses.dataclass
class Context:
    """The last argument of the functions of a network, in one use of the network."""

    config: Config
    vocab_size: int
    words: tuple[str, ...] = ()  # the vocabulary; the index of a word is its token ID
    ops: Ops = dataclasses.field(default_factory=plain_ops)
    num_rows: int | None = None  # B, if it is known
    first_row: tf.Tensor | int = 0  # index of the first row in the global batch
    step: tf.Tensor | None = None  # the global step (int64 scalar), or None except in training
    spans_micro_batches: bool = False  # whether the rows may belong to several micro-batches
    num_draws: int = 0  # random draws (dropout masks and seeds) so far
    _collected: Collected = dataclasses.field(default_factory=Collected, init=False)

    @property
    def training(self) -> bool:
        """Whether this use is for training. Dropout and added losses apply only in training."""
        return self.step is not None

    def dropout(self, x: tf.Tensor, keep_prob: float) -> tf.Tensor:
        """Drop units in training, with masks that do not depend on the number of ranks.

        Masks depend on the seed, the step, the index of the call and the global row: axis 1 of
        [T, B, ...], otherwise axis 0 of [B, ...]. If neither axis has B rows, the mask belongs to
        the micro-batch. With `locked_dropout`, all time steps of [T, B, ...] share a mask. Kept
        units are divided by `keep_prob`.
        """
        draw = self._next_draw()
        if not self._drops(keep_prob):
            return x
        self._check_reproducible("context.dropout")
        shape = x.shape.as_list() if x.shape.rank is not None else [None]
        axis = self._batch_axis(shape)
        if self.config.locked_dropout and axis != 1 and len(shape) > 2:
            raise UserError(f"context.dropout: locked_dropout needs [T, B, ...], not {shape}")
        if axis is None:
            kept = tf.random.stateless_uniform(tf.shape(x), self._seed(draw)) < keep_prob
            return x * tf.cast(kept, tf.float32) / keep_prob
        num_steps = shape[0] if axis else 1
        x_TBH = tf.reshape(x, [num_steps, self.num_rows, math.prod(shape[axis + 1 :])])
        if self.config.locked_dropout:
            ones_1BH = tf.ones([1, *x_TBH.shape[1:]])
            x_TBH *= self._dropped(ones_1BH, keep_prob, draw, self.first_row)
        else:
            x_TBH = self._dropped(x_TBH, keep_prob, draw, self.first_row)
        return tf.reshape(x_TBH, shape)

    def _batch_axis(self, shape: list[int | None]) -> int | None:
        if None in shape:
            return None
        axes = (1, 0) if len(shape) > 2 else (0,)
        return next((axis for axis in axes if shape[axis:][:1] == [self.num_rows]), None)

    def seed(self) -> tf.Tensor:
        """Return a seed, int32 [2], for operations such as `tf.random.stateless_uniform`.

        It depends on the seed of the config, the step, the index of the call and the micro-batch.
        Except in training, it only depends on the index of the call.
        """
        draw = self._next_draw()
        self._check_reproducible("context.seed")
        return self._seed(draw) if self.training else tf.constant([0, draw])

    def sample_candidates(
        self,
        true_classes: tf.Tensor,
        num_sampled: int,
        num_classes: int | None = None,
        unique: bool = True,
        distribution: str = "log_uniform",
    ) -> Candidates:
        """Draw the candidates of a sampled loss from `seed()`, the same on any number of ranks.

        The result is the argument `sampled_values` of `tf.nn.sampled_softmax_loss`. All words of a
        micro-batch share the candidates.

        Args:
          true_classes: The targets, int64 [N, any].
          num_sampled: The number of candidates.
          num_classes: The number of classes, by default the size of the vocabulary.
          unique: Whether all candidates differ.
          distribution: `log_uniform`, if the classes are sorted by frequency, or `uniform`.
        """
        count = num_classes or self.vocab_size
        seed = self.seed()
        return sample_candidates(seed, true_classes, num_sampled, count, unique, distribution)

    def _seed(self, draw: int) -> tf.Tensor:
        # Each of the two draws mixes its seed, so that similar seeds lead to unrelated numbers.
        of_step = tf.stack([tf.constant(self._key(draw), tf.int64), self._step_counter(draw)])
        mixed = tf.random.stateless_uniform([2], of_step, None, None, tf.int64)
        of_rows = tf.stack([mixed[0], mixed[1] + tf.cast(self.first_row, tf.int64)])
        return tf.random.stateless_uniform([2], of_rows, None, None, tf.int32)

    def _next_draw(self) -> int:
        self.num_draws += 1
        return self.num_draws - 1

    def _key(self, draw: int) -> int:
        return (self.config.seed + draw // _DRAWS_PER_KEY * _KEY_STEP) % 2**63

    def _step_counter(self, draw: int) -> tf.Tensor:
        return self.step * _DRAWS_PER_KEY + draw % _DRAWS_PER_KEY

    def _drops(self, keep_prob: float) -> bool:
        if not 0 < keep_prob <= 1:
            raise UserError(f"keep_prob must be above 0 and at most 1, not {keep_prob}")
        return self.training and keep_prob != 1

    def _dropped(
        self, x_TBH: tf.Tensor, keep_prob: float, draw: int, first_row: tf.Tensor | int
    ) -> tf.Tensor:
        # Each row owns a range of counters of the Philox generator, and each counter yields four
        # numbers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
        num_steps, _, units = x_TBH.shape.as_list()
        key = tf.constant([self._key(draw)], tf.uint64)
        first_counter = tf.cast(first_row, tf.uint64) * -(-num_steps * units // 4)
        counter = tf.stack([first_counter, tf.cast(self._step_counter(draw), tf.uint64)])
        return self.ops.dropout(x_TBH, keep_prob, key, counter)

    def drop_weights(self, weights: tf.Tensor, keep_prob: float) -> tf.Tensor:
        """Drop weights in training, with the same mask on all ranks and for all rows.

        This is DropConnect (Wan et al. 2013). On recurrent weights, it is the weight-drop of Merity
        et al. (2018), arXiv:1708.02182, section 2. The weights, a float32 matrix, must be computed
        from variables only. Kept weights are divided by `keep_prob`.
        """
        self._collected.called.add("drop_weights")
        if not self._drops(keep_prob):
            return weights
        self._check_reproducible("context.drop_weights")
        _check_not_in_loop("context.drop_weights")
        stacked = tf.convert_to_tensor(weights)[None]
        dropped = self._dropped(stacked, keep_prob, self._next_draw(), first_row=0)
        return self.reduce_separately(dropped[0])

    def reduce_separately(self, weights: tf.Tensor) -> tf.Tensor:
        """Sum the gradient of this use of the weights over the ranks before it flows into them.

        Otherwise, the number of ranks would change the rounding when a mask is applied to the
        gradient, or when the gradients of two uses of a variable are added. This is not
        necessary if each micro-batch is computed separately. The weights must be computed from
        variables only.
        """
        if not (self.training and self.spans_micro_batches):
            return weights
        self._collected.separate_reductions.append(
            SeparateReduction(weights, tf.stop_gradient(weights))
        )
        return self._collected.separate_reductions[-1].used

    def penalize(self, outputs_TBH: tf.Tensor, dropped_TBH: tf.Tensor) -> None:
        """Add the activation penalties of the config to the differentiated loss.

        These are AR and TAR of Merity et al. (2017), arXiv:1708.01009, of the outputs of the top
        layer before and after dropout. As in their code, the penalties are means of squares over
        the units of the global batch. Here they are multiplied by T, because the loss is a sum over
        the time steps of a row.
        """
        self._collected.called.add("penalize")
        if not self.training:
            return
        _check_not_in_loop("context.penalize")
        shapes = [outputs_TBH.shape, dropped_TBH.shape]
        if not all(shape.is_compatible_with([None, self.num_rows, None]) for shape in shapes):
            raise UserError(
                f"context.penalize: the outputs before and after dropout must be [T, B, H] with"
                f" {self.num_rows} rows, not {shapes[0]} and {shapes[1]}"
            )
        config, (steps, _, units) = self.config, shapes[0].as_list()
        num_units = config.batch_size * units
        if config.activation_penalty:
            factor = config.activation_penalty / num_units
            self._collected.added_losses.append(factor * tf.reduce_sum(tf.square(dropped_TBH)))
        if config.temporal_activation_penalty and steps > 1:
            factor = config.temporal_activation_penalty * steps / (steps - 1) / num_units
            change_TBH = outputs_TBH[1:] - outputs_TBH[:-1]
            self._collected.added_losses.append(factor * tf.reduce_sum(tf.square(change_TBH)))

    def kept_state(self, inputs_TB: tf.Tensor) -> tf.Tensor | None:
        """Return the factor of the recurrent state before each token, float32 [T, B, 1].

        The factor is 0 if `reset_state` resets the state at the token, and otherwise 1. If the
        state is never reset, the result is None.
        """
        self._collected.called.add("kept_state")
        if self.config.reset_state == "never":
            return None
        groups = _SEPARATORS[self.config.reset_state]
        found = {next((name for name in group if name in self.words), None) for group in groups}
        ids = [
            index
            for index, word in enumerate(self.words)
            if word in found or any(end in word for end in found.intersection(_LINE_ENDS))
        ]
        if not ids:
            names = ", ".join(repr(name) for group in groups for name in group)
            raise UserError(
                f"reset_state {self.config.reset_state}: the vocabulary has none of the tokens"
                f" {names}"
            )
        is_kept_TB1 = tf.reduce_all(tf.not_equal(inputs_TB[:, :, None], ids), axis=2, keepdims=True)
        return tf.cast(is_kept_TB1, tf.float32)

    def add_loss(self, loss: tf.Tensor) -> None:
        """Add a float32 scalar to the differentiated loss in training.

        The other part of the loss is the sum over the time steps, averaged over the rows. Each
        micro-batch adds its own scalar, and the scalars are averaged over the micro-batches.
        """
        if not self.training:
            return
        _check_not_in_loop("context.add_loss")
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank != 0 or loss.dtype != tf.float32:
            raise UserError(
                f"context.add_loss needs a float32 scalar, not {loss.dtype.name} {loss.shape}: use"
                " tf.reduce_mean"
            )
        self._collected.added_losses.append(loss * self.share_of_batch)

    @property
    def share_of_batch(self) -> float:
        """The number of rows, divided by the rows of the global batch."""
        return self.num_rows / self.config.batch_size

    def _check_reproducible(self, name: str) -> None:
        # A second call would use a different mask in the gradient than in the loss.
        if self._collected.is_built:
            raise UserError(
                f"{name} is called again for the gradient, as tf.recompute_grad does: call it"
                " outside of the recomputed function"
            )
        if in_defun():
            raise UserError(
                f"{name} is called in a tf.function, whose calls would all draw the same numbers:"
                " remove @tf.function"
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
        scope = tf.get_variable_scope()  # a second call in this scope finds the same table
        # Only the scopes of TF 1.x programs have no initializer.
        default = scope.initializer or Uniform(config.init_scale)
        initializer = Uniform(scale) if scale else default
        with tf.variable_scope(scope, reuse=tf.AUTO_REUSE, auxiliary_name_scope=False):
            if config.adaptive_input and name == "embedding":
                with tf.variable_scope(name) as bands_scope:
                    bands, projection_KE = adaptive.get_embedding(
                        config, units, self.vocab_size, initializer
                    )
                self._collected.bands[bands_scope.name] = bands
                return adaptive.embed(bands, projection_KE, inputs_TB, self.ops)
            table_VH = tf.get_variable(name, [self.vocab_size, units], initializer=initializer)
        if name == "embedding":  # the scope does not matter
            self._collected.tables[table_VH.op.name] = table_VH
        # Look up the words of each row in turn. The gradient then lists the words in the order of
        # the global rows. Therefore, the concatenated lists of several ranks equal the list of a
        # single rank. tf.transpose of int32 would print a oneDNN warning.
        inputs_BT = tf.stack(tf.unstack(inputs_TB), axis=1)
        return tf.transpose(tf.gather(table_VH, inputs_BT), [1, 0, 2])

    def output_layer(self, units: int) -> tuple[tf.Variable, tf.Variable]:
        """Return the weights [units, V] and the bias [V] of the built-in output layer.

        `build_losses` can use them, and `build_outputs` then predicts words. The gradient of a
        sampled softmax is dense, because it transposes the weights.
        """
        with (
            tf.variable_scope(
                self._collected.root_scope, reuse=tf.AUTO_REUSE, auxiliary_name_scope=False
            ),
            tf.variable_scope("softmax"),
        ):
            weights_HV = tf.get_variable("weights", [units, self.vocab_size])
            return weights_HV, tf.get_variable("bias", [self.vocab_size])


def collected(context: Context) -> Collected:
    """Return the values that the program collected in a context."""
    return context._collected


def _check_not_in_loop(name: str) -> None:
    if tf.get_default_graph().building_function:
        raise UserError(
            f"{name} is for weights and outputs of all time steps: call it outside the loop"
        )
