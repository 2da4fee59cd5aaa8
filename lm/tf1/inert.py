"""Parts of a TF 1.x program that have no effect, because the trainer does their work.

These parts are sessions, savers, summaries, seeds, losses, the global step and Horovod. Programs
often contain them in the same file as the code of their network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.tf1.call import current_call, defining_classes, replaced, warn_once
from lm.tf1.namespace import Namespace, class_like
from lm.user.code import current_line, place


class Inert:
    """An object that has no effect. Its attributes and the results of its calls are inert too.

    A program can use the object as a base class, as a decorator, and as a context manager. The
    object has no value: converting it to a number or an array, or iterating over it, is an error.
    """

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("_"):  # Python and TensorFlow check for optional attributes.
            raise AttributeError(name)
        return self.__dict__.setdefault(name, Inert(f"{self.__name__}.{name}"))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not options
        return arguments[0] if is_decorator else self

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __enter__(self) -> Inert:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def _no_value(self, *arguments: Any) -> NoReturn:
        raise UserError(f"{self.__name__} has no effect in a loaded program, so it has no result")

    __iter__ = __len__ = __getitem__ = __float__ = __int__ = __array__ = _no_value


# A package `horovod` with one rank, because the trainer exchanges the gradients of all ranks.
HOROVOD = Namespace(
    "horovod",
    Inert("hvd"),
    **dict.fromkeys(("rank", "local_rank", "cross_rank"), lambda: 0),
    **dict.fromkeys(("size", "local_size", "cross_size"), lambda: 1),
    **dict.fromkeys(
        ("DistributedOptimizer", "allreduce", "broadcast"), lambda value, *args, **options: value
    ),
)
HOROVOD.tensorflow = HOROVOD.keras = HOROVOD
STEPS = dict.fromkeys(
    ("get_global_step", "get_or_create_global_step", "create_global_step"),
    lambda graph=None: global_step(tf.int64),
)


def parts_of_tensorflow() -> dict[str, Any]:
    """Return the inert names of the module `tensorflow`, and their values."""
    # Initializers have no effect. Otherwise, the audit would reject a network whose results depend
    # on one, because it assigns to variables.
    names = (
        "Session", "InteractiveSession", "reset_default_graph", "set_random_seed",
        "global_variables_initializer", "local_variables_initializer", "variables_initializer",
        "tables_initializer", "initialize_all_variables", "initialize_local_variables",
        "initialize_variables", "initialize_all_tables",
    )  # fmt: skip
    inert = {name: Inert(f"tf.{name}") for name in names}
    train = {
        name: Inert(f"tf.train.{name}")
        for name in (
            "Saver", "Supervisor", "Coordinator", "MonitoredTrainingSession", "SessionManager",
            "start_queue_runners", "SummaryWriter",
        )
    }  # fmt: skip
    seeds = dict.fromkeys(("set_seed", "set_random_seed"), inert["set_random_seed"])
    return {
        **inert,
        "Graph": class_like(tf.Graph, _graph),
        "assign": _unless_step(tf.assign),
        "assign_add": _unless_step(tf.assign_add),
        "train": Namespace("tensorflow.train", tf.train, **train, **STEPS),
        "random": Namespace("tensorflow.random", tf.random, **seeds),
        "summary": Namespace(
            "tensorflow.summary", tf.summary, FileWriter=Inert("tf.summary.FileWriter")
        ),
    }


def _graph() -> tf.Graph:
    """Return the trainer's graph in a network function, because a program cannot replace it."""
    return tf.get_default_graph() if current_call() else tf.Graph()


def global_step(dtype: Any) -> tf.Tensor:
    """Return the global step as a tensor, because only the trainer may assign to it."""
    call = current_call()
    # An optimizer asks for the step after build_optimizer has returned.
    value = call.context.step if call else tf.train.get_global_step()
    if value is None:
        step = tf.placeholder(dtype, [], "global_step_outside_of_training")
    else:
        step = tf.identity(tf.cast(value, dtype))
    for method in ("assign", "assign_add", "assign_sub", "value", "read_value"):
        setattr(step, method, lambda *arguments, **options: step)
    return step


def _unless_step(assign: Any) -> Any:
    """Return a version of `tf.assign` or `tf.assign_add` that does not change the global step."""

    def assign_unless_step(ref: Any, value: Any, *arguments: Any, **options: Any) -> Any:
        is_step = isinstance(ref, tf.Tensor)
        return ref if is_step else assign(ref, value, *arguments, **options)

    return assign_unless_step


@contextlib.contextmanager
def without_training() -> Iterator[None]:
    """Disable optimizers, averages of weights, and the collections of losses and summaries."""
    averages = {"apply": _average_nothing, "average": _average}
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(tf.train.ExponentialMovingAverage, averages))
        for optimizer in defining_classes(tf.train.Optimizer, "apply_gradients"):
            stack.enter_context(replaced(optimizer, {"apply_gradients": _apply_nothing}))
        yield
    # The next call may be outside of a loop that contains the summaries of this call.
    tf.get_collection_ref(tf.GraphKeys.SUMMARIES).clear()
    losses = tf.get_collection_ref(tf.GraphKeys.LOSSES)
    if losses:
        warn_once(
            f"{place('', losses[0].op.traceback)}: the collection of tf.losses is not used: the"
            " trainer computes the loss of the words, and context.add_loss adds other terms"
        )
        losses.clear()


def _apply_nothing(
    optimizer: tf.train.Optimizer,
    gradients: Any = None,
    global_step: Any = None,
    *arguments: Any,
    **options: Any,
) -> tf.Operation:
    if current_call().context.training:
        # Nothing executes this. The audit warns if a result depends on the variable, but rejects
        # assignments in the branches of tf.cond and in loops.
        if hasattr(global_step, "assign_add") and not tf.get_default_graph().building_function:
            global_step.assign_add(1)
        _warn_unused(type(optimizer).__name__)
    return tf.no_op()


def no_train_op(*arguments: Any, **options: Any) -> tf.Operation:
    """Replace a function that creates an optimizer."""
    call = current_call()
    if call and call.context.training:
        _warn_unused("optimizer")
    return tf.no_op()


def _warn_unused(optimizer: str) -> None:
    warn_once(
        f"the program's {optimizer} is not used: set --optimizer and --learning_rate, or define"
        " build_optimizer"
    )


def _average_nothing(average: Any, variables: Any = None) -> tf.Operation:
    is_of_tensors = any(isinstance(variable, tf.Tensor) for variable in variables or ())
    fix = "set --ema_decay to average the weights"
    if is_of_tensors:
        fix = "use tf.layers.batch_normalization, or assign to an untrained variable in UPDATE_OPS"
    if current_call().context.training:
        warn_once(f"{current_line()}: the program's {type(average).__name__} is not used: {fix}")
    return tf.no_op()


def _average(average: Any, variable: Any) -> Any:
    """Return a variable itself. No result may depend on the average of a tensor."""
    if isinstance(variable, tf.Tensor):
        return tf.placeholder(variable.dtype, variable.shape, "average_of_a_tensor")
    return variable


class _Complete(BaseException):
    """Raised when a script has built its network."""


@contextlib.contextmanager
def up_to_the_optimizer(program_tf: Namespace) -> Iterator[None]:
    """End the execution of a script when it creates an optimizer or a session."""

    def end(*arguments: Any, **options: Any) -> NoReturn:
        raise _Complete

    sessions = dict.fromkeys(("Session", "InteractiveSession"), end)
    with (
        contextlib.suppress(_Complete),
        replaced(tf.train.Optimizer, {"__init__": end}),
        replaced(program_tf, sessions),
    ):
        yield
