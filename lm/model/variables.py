"""The variables of a network: made once, found again, and the same for the same seed."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops.control_flow_util_v2 import in_defun

from lm.config import Config
from lm.errors import UserError
from lm.system import seeded

_KEPT = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]
# What Horovod can broadcast.
_DTYPES = [tf.float32, tf.float64, tf.float16, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8,
           tf.uint16, tf.bool]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Uniform:
    """An initializer: uniform in +-scale, of numbers that the seed and the variable's name decide.

    `shared_variables` puts what draws them in its place: an initializer is not told the name.
    """

    scale: float

    def __call__(self, shape, dtype=None, partition_info=None):
        raise NotImplementedError


@contextlib.contextmanager
def shared_variables(config: Config, training: bool) -> Iterator[dict[str, tf.Variable]]:
    """Let `tf.get_variable` make each variable of a network once in a graph, and find it again.

    As in TF 1.x, a name that is asked for twice, and not with `reuse`, is a mistake: two layers
    would be one. Names do not depend on where in the graph that is. Initial values depend on the
    seed and the variable's name only, so all ranks start equal: those without an initializer are
    uniform in +-init_scale, and random operations without a seed get one of the name. Initializers
    of Keras have drawn theirs in Python, before there is a name: they depend on their order, too.

    Args:
      config: For `init_scale` and `seed`.
      training: Whether this use is for training.

    Yields:
      The variables that are asked for, by name, as they are.
    """
    used: dict[str, tf.Variable] = {}
    asked: set[str] = set()
    is_over = False

    def get(getter, name: str, shape=None, **options) -> tf.Variable:
        # The same code is run again for a gradient (tf.recompute_grad), and by tf.function.
        if name in asked and not (options.get("reuse") or is_over or in_defun()):
            raise UserError(
                f"variable {name} is made twice: each needs a tf.variable_scope of its own, or"
                " reuse=tf.AUTO_REUSE where they are to be one"
            )
        asked.add(name)
        variable = getter(name, shape=shape, **_settled(name, options, config.seed, training))
        _check(variable, name)
        _seed_initial_value(variable, config.seed)
        used[variable.op.name] = variable
        return variable

    root = tf.VariableScope(
        False, initializer=Uniform(config.init_scale), custom_getter=get, use_resource=True
    )
    with seeded(config.seed), tf.variable_scope(root, auxiliary_name_scope=False):
        yield used
    is_over = True


def _settled(name: str, options: dict, seed: int, training: bool) -> dict:
    """Return the options of `tf.get_variable` as they are for each variable of a network."""
    if options.get("regularizer"):
        raise UserError(
            f"variable {name} has a regularizer, which nothing uses here: --weight_decay, in its"
            " place"
        )
    # All that a trained network needs, also what is not trained, and wherever its author puts it:
    # the ranks start with the same values, and a checkpoint has them.
    others = set(options.get("collections") or []) - {tf.GraphKeys.LOCAL_VARIABLES, *_KEPT}
    # A variable in parts is for parameter servers; one of the old kind is updated by operations of
    # the optimizers that here are not used.
    settled = {**options, "use_resource": True, "partitioner": None}
    settled["collections"] = [*_KEPT, *sorted(others)]
    if isinstance(options.get("initializer"), Uniform):
        key, scale = [seed, zlib.crc32(name.encode())], options["initializer"].scale
        is_floating = tf.as_dtype(options.get("dtype") or tf.float32).is_floating
        # What counts or tells yes from no starts with zeros, as TensorFlow has it.
        settled["initializer"] = _stateless_uniform(key, scale) if is_floating else None
    # Other uses of the network in this graph have made it, or will. (The first one of a program
    # that does not train makes all.)
    if not (training and options.get("reuse") is True):
        settled["reuse"] = tf.AUTO_REUSE
    return settled


def _check(variable: tf.Variable, name: str) -> None:
    """Refuse what cannot be trained, broadcast or saved under the name that was asked for."""
    dtype = variable.dtype.base_dtype
    if variable.trainable and dtype != tf.float32:
        raise UserError(
            f"variable {variable.op.name} is {dtype.name}: what is trained must be float32"
        )
    if dtype not in _DTYPES or not variable.shape.num_elements():
        raise UserError(
            f"variable {variable.op.name} is {dtype.name} of the shape {variable.shape}: what is"
            f" kept must be numbers, and at least one, of {', '.join(d.name for d in _DTYPES)}"
        )
    if variable.op.name != name:
        made = tf.get_collection(tf.GraphKeys.MODEL_VARIABLES)  # not the global step, nor slots
        # Where one has the name, but for its case, this gets the same other in each graph.
        if name.lower() not in {v.op.name.lower() for v in made if v is not variable}:
            raise UserError(
                f"variable {name}: an operation of the training has this name: call it something"
                " else"
            )


def _stateless_uniform(seed: list[int], scale: float):
    def initial_value(shape, dtype=tf.float32, partition_info=None):
        return tf.random.stateless_uniform(shape, seed, -scale, scale, dtype)

    return initial_value


def operations_behind(*tensors: tf.Tensor) -> set[tf.Operation]:
    """Return the operations that tensors are made of."""
    found: set[tf.Operation] = set()
    stack = [tensor.op for tensor in tensors]
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [tensor.op for tensor in op.inputs]
    return found


def _seed_initial_value(variable: tf.Variable, seed: int) -> None:
    """Give the random operations of a variable's initial value seeds that its name decides.

    Without, they draw other numbers on each rank and in each run. TensorFlow's own way, a seed of
    the graph, counts the operations before them too.
    """
    for op in operations_behind(variable.initializer.inputs[1]):
        if "seed2" in op.node_def.attr and not (op.get_attr("seed") or op.get_attr("seed2")):
            place = op.name.rpartition("/")[2]  # of two in one initial value
            key = zlib.crc32(f"{variable.op.name}/{place}".encode())
            op._set_attr("seed", attr_value_pb2.AttrValue(i=seed % 2**63))
            op._set_attr("seed2", attr_value_pb2.AttrValue(i=key))
