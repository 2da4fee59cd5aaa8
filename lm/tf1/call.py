"""The call of a network function that is running."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from lm import logger
from lm.model.context import Context
from lm.tf1.draws import seed_of_iteration

active: list[Call] = []  # the calls of functions with a context


class Call:
    """A call of a network function."""

    def __init__(self, context: Context):
        self.context = context
        self.seeds: set[tf.Operation] = set()  # operations of the seeds that the call has drawn
        self.loops: list[tf.Tensor] = []  # indices of the iterations of the surrounding loops
        self.names: set[str] = set()  # names of variables
        self.shards: dict[str, int] = {}  # parts of the rows of a partitioned variable, by name
        self.placeholders: list[tf.Tensor] = []  # values of the next calls of tf.placeholder
        self.defaults: dict[str, Any] = {}  # values for tf.placeholder_with_default, by name
        self.default_names: collections.Counter = collections.Counter()  # calls with each name
        self.words: tf.Tensor | None = None  # [B, T]: value of placeholders without values
        self.logits: list[tf.Tensor] = []  # different logits of the program's cross entropies
        self.scope: tf.VariableScope | None = None
        self._name_scope = tf.get_default_graph().get_name_scope()

    def seed(self) -> tf.Tensor:
        seed = self.context.seed()
        self.seeds.add(seed.op)
        return seed_of_iteration(seed, self.loops)

    def new_name(self, name: str) -> str:
        """Return the name of a new `tf.Variable`: as in TF 1.x, unique in its name scope."""
        while True:
            unique = tf.get_default_graph().unique_name(name)
            unique = unique.removeprefix(f"{self._name_scope}/")
            if unique not in self.names:
                return unique


def see_logits(logits: tf.Tensor) -> None:
    """Remember the logits of a cross entropy."""
    seen = active[-1].logits if active else []
    if all(_source(logits) is not _source(other) for other in seen):
        seen.append(logits)


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that a tensor has the values of."""
    while getattr(getattr(tensor, "op", None), "type", None) in ("Identity", "Reshape"):
        tensor = tensor.op.inputs[0]
    return tensor


def current_call() -> Call | None:
    """Return the innermost call of a network function."""
    return active[-1] if active else None


# Log each message only once.
warn_once = functools.cache(logger.warning)
inform_once = functools.cache(logger.info)


def defining_classes(base: type, name: str) -> list[type]:
    """Return the classes that define an attribute: subclasses, and then their base classes."""
    found = [base]
    for cls in found:  # the list grows
        found += cls.__subclasses__()
    return [cls for cls in dict.fromkeys(reversed(found)) if name in vars(cls)]


@contextlib.contextmanager
def replaced(module: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes of a module."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
