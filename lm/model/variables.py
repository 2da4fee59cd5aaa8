"""The variables of a network: created once per graph, and initialized from the seed."""

import collections
import contextlib
import dataclasses
import re
import zlib
from collections.abc import Iterator

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops.control_flow_util_v2 import in_defun

from lm.config import Config
from lm.errors import UserError, first_names
from lm.system import seeded

# Horovod broadcasts variables of these types.
TYPES = "bool uint8 int8 int32 int64 float16 float32 float64".split()
_SAVED = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Initialize a variable uniformly in [-scale, scale]. `shared_variables` sets the seed."""

    scale: float
    seed: tuple[int, int] = (0, 0)

    def __call__(self, shape, dtype=tf.float32, partition_info=None):
        # TensorFlow's optimizer would compute constants too, and need memory for one more table.
        seed = tf.placeholder_with_default(tf.constant(self.seed), [2])
        return tf.random.stateless_uniform(shape, seed, -self.scale, self.scale, dtype)


@contextlib.contextmanager
def shared_variables(config: Config, training: bool) -> Iterator[dict[str, tf.Variable]]:
    """Let `tf.get_variable` create each variable of a network once per graph, and find it again.

    As in TF 1.x, requesting a name twice without `reuse` is an error, because two layers would
    share their weights. Names do not depend on the surrounding scopes. Initial values only depend
    on the seed and the variable's name, so they are identical on all ranks: variables without an
    initializer are uniform in [-init_scale, init_scale], and random operations without a seed get a
    seed. Keras initializers draw in Python, without a name, so their values also depend on their
    order.

    Yields:
      The requested variables by name. Variables are added when they are requested.
    """
    used: dict[str, tf.Variable] = {}
    requested: set[str] = set()
    is_over = False

    def get(getter, name: str, shape=None, **options) -> tf.Variable:
        # tf.recompute_grad and tf.function run the same code again.
        if name in requested and not (options.get("reuse") or is_over or in_defun()):
            raise UserError(
                f"variable {name} is created twice: use a separate tf.variable_scope for each, or"
                " reuse=tf.AUTO_REUSE to share it"
            )
        requested.add(name)
        if name == tf.GraphKeys.GLOBAL_STEP:
            raise UserError(f"variable {name} belongs to the trainer: use context.step")
        variable = getter(name, shape=shape, **_options(name, options, config.seed, training))
        _check(variable, name)
        seed_initial_value(variable, config.seed)
        used[variable.op.name] = variable
        return variable

    root = tf.VariableScope(
        False, initializer=Uniform(config.init_scale), custom_getter=get, use_resource=True
    )
    with seeded(config.seed), tf.variable_scope(root, auxiliary_name_scope=False):
        yield used
    is_over = True


def _options(name: str, options: dict, seed: int, training: bool) -> dict:
    """Return the options of `tf.get_variable` with the settings that hold for all variables."""
    # Broadcast and save all variables, even untrainable variables and variables that the network
    # adds to other collections.
    collections = set(options.get("collections") or []) - {tf.GraphKeys.LOCAL_VARIABLES, *_SAVED}
    # Partitions are only for parameter servers. The optimizers only update resource variables.
    options = {**options, "use_resource": True, "partitioner": None}
    options["collections"] = [*_SAVED, *sorted(collections)]
    if isinstance(options.get("initializer"), Uniform):
        uniform = Uniform(options["initializer"].scale, (seed, zlib.crc32(name.encode())))
        is_floating = tf.as_dtype(options.get("dtype") or tf.float32).is_floating
        # TensorFlow initializes integers and booleans with zero.
        options["initializer"] = uniform if is_floating else None
    # Another use of the network in this graph may have created the variable. (In a program that
    # does not train, the first use creates all variables.)
    if not (training and options.get("reuse") is True):
        options["reuse"] = tf.AUTO_REUSE
    return options


def _check(variable: tf.Variable, name: str) -> None:
    """Reject a variable that cannot be trained, broadcast, or saved under the requested name."""
    dtype = variable.dtype.base_dtype
    if variable.trainable and dtype != tf.float32:
        raise UserError(
            f"variable {variable.op.name} is {dtype.name}: trainable variables must be float32"
        )
    check_kind(variable)
    if variable.op.name != name:
        made = tf.get_collection(tf.GraphKeys.MODEL_VARIABLES)  # the variables of networks
        # If two names only differ in case, TensorFlow renames one of them, equally in each graph.
        if name.lower() not in {v.op.name.lower() for v in made if v is not variable}:
            raise UserError(
                f"variable {name} has the name of an operation of the trainer: rename it"
            )


def check_kind(variable: tf.Variable) -> None:
    """Reject a variable that cannot be broadcast or saved because of its type or its shape."""
    dtype = variable.dtype.base_dtype.name
    if dtype not in TYPES:
        raise UserError(f"variable {variable.op.name} is {dtype}, not one of {', '.join(TYPES)}")
    if not variable.shape.num_elements():
        raise UserError(
            f"variable {variable.op.name} has the shape {variable.shape}: the number of elements"
            " must be known and at least 1"
        )


def operations_behind(
    *results: tf.Tensor | tf.Operation, control_inputs: bool = False
) -> dict[tf.Operation, None]:
    """Return the operations that results are computed from, optionally with control inputs.

    Their order only depends on the part of the graph that computes the results.
    """
    found: dict[tf.Operation, None] = {}
    stack = [result if isinstance(result, tf.Operation) else result.op for result in results]
    while stack:
        op = stack.pop()
        if op not in found:
            found[op] = None
            stack += [tensor.op for tensor in op.inputs]
            stack += op.control_inputs if control_inputs else []
    return found


def seed_initial_value(variable: tf.Variable, seed: int) -> None:
    """Seed the random operations of an initial value by the variable's name.

    With TensorFlow's graph seed, the numbers would depend on the number of previous operations.
    """
    repetitions: collections.Counter = collections.Counter()
    for op in operations_behind(variable.initializer.inputs[1]):
        if "seed2" in op.node_def.attr and not (op.get_attr("seed") or op.get_attr("seed2")):
            place = op.name.rpartition("/")[2]
            number = repetitions[place] or ""  # the draws of an initial value are independent
            repetitions[place] += 1
            key = zlib.crc32(f"{variable.op.name}/{place}{number}".encode())
            op._set_attr("seed", attr_value_pb2.AttrValue(i=seed % 2**63))
            op._set_attr("seed2", attr_value_pb2.AttrValue(i=key))


def check_no_graph_seed(where: str) -> None:
    """Reject a seed of the graph: seeds derived from it depend on the number of ranks."""
    if tf.get_default_graph().seed is not None:
        raise UserError(f"{where} sets TensorFlow's seed: remove it, --seed decides everything")


def freeze(trainable: str) -> None:
    """Freeze the weights of the current graph whose names do not match a regular expression."""
    weights = tf.get_collection_ref(tf.GraphKeys.TRAINABLE_VARIABLES)
    trained = [v for v in weights if re.search(trainable, v.op.name)]
    if weights and not trained:
        names = first_names([v.op.name for v in weights])
        raise UserError(f"--trainable {trainable} matches none of the weights {names}")
    weights[:] = trained
