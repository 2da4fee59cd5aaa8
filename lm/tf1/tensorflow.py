"""The module `tensorflow` of TF 1.x: `tensorflow.compat.v1` with the names that it lost."""

import collections
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import absl.flags
import tensorflow
import tensorflow.compat.v1 as tf
from tensorflow.python import tf2
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import (
    array_ops,
    control_flow_ops,
    functional_ops,
    gen_training_ops,
    math_ops,
    nn_ops,
)

from lm.errors import UserError
from lm.tf1 import adapter, feeds, inert
from lm.tf1.call import current_call, see_logits
from lm.tf1.contrib import (
    MODE_KEYS,
    NEST,
    RNN_CELLS,
    Contrib,
    InternalCells,
    Missing,
    legacy_seq2seq,
)
from lm.tf1.namespace import Namespace, Package, class_like

absl.flags.disclaim_key_flags()  # Flags belong to the module of the program, not to this module.
_REAL = ("python", "core", "tools")  # packages that still exist
_RENAMED = {  # names of TF 0.x
    "pack": tf.stack,
    "unpack": tf.unstack,
    "mul": tf.multiply,
    "sub": tf.subtract,
    "neg": tf.negative,
    "select": tf.where,
    "all_variables": tf.global_variables,
    "scalar_summary": tf.summary.scalar,
    "histogram_summary": tf.summary.histogram,
    "merge_summary": tf.summary.merge,
    "merge_all_summaries": tf.summary.merge_all,
}
_CROSS_ENTROPIES = (
    "softmax_cross_entropy_with_logits",
    "sparse_softmax_cross_entropy_with_logits",
    "sigmoid_cross_entropy_with_logits",
)
_SAMPLED_LOSSES = ("nce_loss", "sampled_softmax_loss")
_LOSSES = ("softmax_cross_entropy", "sparse_softmax_cross_entropy")
_OLD_OPTIONS = {"flag_name": "name", "default_value": "default", "docstring": "help"}  # of flags
_EstimatorSpec = collections.namedtuple(
    "EstimatorSpec",
    "mode predictions loss train_op eval_metric_ops export_outputs training_chief_hooks"
    " training_hooks scaffold evaluation_hooks prediction_hooks",
    defaults=[None] * 10,
)


class TensorFlow(Namespace):
    """The module `tensorflow` of one program, which has its own flags."""

    def __init__(self):
        nn = Namespace(
            "tensorflow.nn",
            tf.nn,
            dynamic_rnn=_dynamic_rnn,
            embedding_lookup=_embedding_lookup,
            rnn=tf.nn.static_rnn,
            bidirectional_rnn=tf.nn.static_bidirectional_rnn,
            rnn_cell=Namespace("tensorflow.nn.rnn_cell", tf.nn.rnn_cell, _linear=_linear),
            seq2seq=legacy_seq2seq(),
            **{name: _with_logits_first(getattr(tf.nn, name)) for name in _CROSS_ENTROPIES},
            **{name: _with_either_order(getattr(tf.nn, name)) for name in _SAMPLED_LOSSES},
        )
        nn.softmax_cross_entropy_with_logits_v2 = nn.softmax_cross_entropy_with_logits
        self._flags = _flags()
        super().__init__(
            "tensorflow",
            tf,
            tensorflow,
            **_RENAMED,
            **inert.parts_of_tensorflow(),
            Variable=class_like(tensorflow.Variable, adapter.create_variable),
            while_loop=adapter.while_loop,
            placeholder=feeds.placeholder,
            placeholder_with_default=feeds.placeholder_with_default,
            concat=_concat,
            split=_split,
            scatter_update=_scatter_update,
            nn=nn,
            contrib=Contrib(nn),
            losses=Namespace(
                "tensorflow.losses",
                tf.losses,
                **{name: _with_logits_second(getattr(tf.losses, name)) for name in _LOSSES},
            ),
            estimator=Namespace(
                "tensorflow.estimator",
                Missing("estimator"),
                ModeKeys=MODE_KEYS,
                EstimatorSpec=_EstimatorSpec,
            ),
            flags=self._flags,
            app=Namespace("tensorflow.app", tf.app, flags=self._flags),
            models=types.SimpleNamespace(rnn=Namespace("rnn", nn, nn.rnn_cell, nn.seq2seq)),
        )
        self.compat = Namespace("tensorflow.compat", tensorflow.compat, v1=self)
        self._add_packages()

    def _add_packages(self) -> None:
        """Add the packages that still exist, with the names that moved."""
        for package in _REAL:
            setattr(self, package, Package(f"tensorflow.{package}"))
        ops = self.python.ops
        ops.nn = Namespace("tensorflow.python.ops.nn", self.nn, nn_ops)
        for module in (array_ops, control_flow_ops, functional_ops, math_ops):
            name = module.__name__.rpartition(".")[2]
            setattr(ops, name, Namespace(module.__name__, module, self))
        ops.array_ops.concat, ops.array_ops.split = _concat, _split  # see TF 0.x
        self.python.framework.ops = Namespace(framework_ops.__name__, framework_ops, self)
        for name in RNN_CELLS:  # moved to Keras
            setattr(ops, name, InternalCells(f"tensorflow.python.ops.{name}", self.contrib.rnn))
        self.python.training.training_ops = _TrainingOps("training_ops", gen_training_ops)
        self.python.util.nest = NEST
        self.python.tf2 = Namespace("tensorflow.python.tf2", tf2, enabled=lambda: False)

    def find(self, name: str) -> Any:
        """Return a module by its full name."""
        _, *parts = name.split(".")
        try:
            return functools.reduce(getattr, parts, self)
        except AttributeError as error:
            raise ModuleNotFoundError(f"No module named {name!r}") from error

    def absl(self, module: types.ModuleType, name: str) -> types.ModuleType:
        """Return `absl` or `absl.flags` with the flags of this program."""
        if name == "absl.flags" and module is absl.flags:
            return self._flags
        return Namespace("absl", module, flags=self._flags)


class _TrainingOps(Namespace):
    """The operations of optimizers, which update resource variables as in TF 1.x."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("apply_", "sparse_apply_")):
            return super().__getattr__(name)
        apply = super().__getattr__(f"resource_{name}")

        def call(variable: tf.Variable, *arguments: Any, **options: Any) -> tf.Tensor:
            values = [getattr(value, "handle", value) for value in arguments]
            options = {key: getattr(value, "handle", value) for key, value in options.items()}
            with tf.control_dependencies([apply(variable.handle, *values, **options)]):
                return tf.identity(variable)

        return call


def _linear(
    args: Any,
    output_size: int,
    bias: bool,
    bias_start: float = 0.0,
    scope: Any = None,
) -> tf.Tensor:
    """Return the product of concatenated inputs [B, units] and a weight matrix, plus a bias."""
    inputs = tf.concat(tf.nest.flatten(args), 1)
    with tf.variable_scope(scope or "Linear"):
        product = inputs @ tf.get_variable("Matrix", [inputs.shape[1], output_size])
        if not bias:
            return product
        start = tf.constant_initializer(bias_start)
        return product + tf.get_variable("Bias", [output_size], initializer=start)


def _scatter_update(*arguments: Any, **options: Any) -> Any:
    if not current_call():  # an optimizer may scatter its updates
        return tf.scatter_update(*arguments, **options)
    raise UserError(
        "tf.scatter_update changes a variable outside of the optimizer; use constraint= of"
        " tf.get_variable, or remove it with MODULE.tf.scatter_update = lambda *arguments: None"
    )


def _embedding_lookup(
    params: Any, ids: Any, partition_strategy: str = "mod", *arguments: Any, **options: Any
) -> tf.Tensor:
    """Look up the rows of a partitioned variable as TF 1.x does.

    This trainer does not partition variables. With "mod", the ID i is row i // N of part i % N.
    """
    call = current_call()
    num_parts = call.shards.get(getattr(params, "name", None), 1) if call else 1
    if num_parts > 1 and partition_strategy == "mod":
        size, rest = divmod(params.shape.as_list()[0], num_parts)  # The first parts are larger.
        part = ids % num_parts
        ids = part * size + tf.minimum(part, rest) + ids // num_parts
    return tf.nn.embedding_lookup(params, ids, partition_strategy, *arguments, **options)


def _concat(values: Any, axis: Any, name: str = "concat") -> tf.Tensor:
    if isinstance(values, int):  # the order of TF 0.x
        values, axis = axis, values
    return tf.concat(values, axis, name)


def _split(value: Any, num_or_size_splits: Any, axis: Any = 0, *rest: Any, **options: Any) -> Any:
    if isinstance(value, int) and not isinstance(axis, int):  # the order of TF 0.x
        value, axis = axis, value
    return tf.split(value, num_or_size_splits, axis, *rest, **options)


def _with_logits_first(cross_entropy: Callable) -> Callable:
    """Return a cross entropy for arguments without names: TF 0.x has them, TF 1.x rejects them."""

    @functools.wraps(cross_entropy)
    def call(*logits_and_labels: tf.Tensor, **options: Any) -> tf.Tensor:
        options.update(zip(("logits", "labels"), logits_and_labels))
        see_logits(options.get("logits"))
        return cross_entropy(**options)

    return call


def _with_either_order(loss: Callable) -> Callable:
    """Return a sampled loss whose labels may follow its inputs, as in TF 0.x."""

    @functools.wraps(loss)
    def call(*arguments: Any, **options: Any) -> tf.Tensor:
        if len(arguments) > 3:
            weights, biases, labels, inputs, *others = arguments
            if tf.convert_to_tensor(labels).dtype.is_floating:
                labels, inputs = inputs, labels
            arguments = weights, biases, labels, inputs, *others
        return loss(*arguments, **options)

    return call


def _with_logits_second(loss: Callable) -> Callable:
    """Return a function of `tf.losses` that remembers its logits."""

    @functools.wraps(loss)
    def call(*arguments: tf.Tensor, **options: Any) -> tf.Tensor:
        see_logits(arguments[1] if len(arguments) > 1 else options.get("logits"))
        return loss(*arguments, **options)

    return call


def _flags() -> Namespace:
    """Return `absl.flags` with separate flags, which do not read the command line."""
    values = absl.flags.FlagValues()
    values.mark_as_parsed()  # the flags have their defaults

    def with_values(define: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            options = {_OLD_OPTIONS.get(name, name): value for name, value in options.items()}
            return define(*arguments, **{"flag_values": values, **options})

        return call

    defines = {
        name: with_values(define)
        for name, define in vars(absl.flags).items()
        if name.startswith("DEFINE")
    }
    return Namespace(
        "tensorflow.flags",
        absl.flags,
        FLAGS=values,
        mark_flag_as_required=lambda *names, **options: None,
        mark_flags_as_required=lambda *names, **options: None,
        **defines,
    )


def _dynamic_rnn(*args: Any, **kwargs: Any) -> tuple[tf.Tensor, Any]:
    """Unroll `tf.nn.dynamic_rnn` if T is known, so that time steps have different dropout masks."""
    call = inspect.signature(tf.nn.dynamic_rnn).bind(*args, **kwargs)
    call.apply_defaults()
    given, axis = call.arguments, 0 if call.arguments["time_major"] else 1
    inputs = given["inputs"]
    is_tensor = isinstance(inputs, tf.Tensor) and inputs.shape.rank is not None
    is_full = given["sequence_length"] is None
    if is_full and is_tensor and inputs.shape.as_list()[axis] is not None:
        steps = tf.unstack(inputs, axis=axis)
        options = {name: given[name] for name in ("initial_state", "dtype", "scope")}
        outputs, state = tf.nn.static_rnn(given["cell"], steps, **options)
        return tf.nest.map_structure(lambda *parts: tf.stack(parts, axis), *outputs), state
    return tf.nn.dynamic_rnn(*args, **kwargs)
