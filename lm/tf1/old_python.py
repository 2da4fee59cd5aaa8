"""Names of Python 2 and of old versions of NumPy that a TF 1.x program may use."""

import builtins
import collections
import inspect
import re
import types

import numpy as np

from lm.tf1.namespace import Namespace

BUILTINS = {"xrange": range, "unicode": str, "long": int, "raw_input": input, "unichr": chr}
_NUMPY = {
    "float": float, "int": int, "long": int, "complex": complex, "object": object, "str": str,
    "float_": np.float64, "complex_": np.complex128, "unicode": str, "unicode_": np.str_,
    "Inf": np.inf, "infty": np.inf, "NaN": np.nan, "product": np.prod, "cumproduct": np.cumprod,
    "asscalar": lambda array: array.item(), "in1d": np.isin, "row_stack": np.vstack,
}  # fmt: skip
_IN_PYTHON_2 = re.compile(
    "Missing parentheses in call to|multiple exception types must|leading zeros in decimal"
)
_ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")


def modules() -> dict[str, types.ModuleType]:
    """Return modules with the names that they lost."""
    return {
        "collections": Namespace("collections", collections, collections.abc),
        "inspect": Namespace("inspect", inspect, getargspec=_getargspec),
        "numpy": Namespace("numpy", np, **_NUMPY),
        "past.builtins": Namespace("past.builtins", builtins, **BUILTINS),
    }


def _getargspec(function: types.FunctionType) -> _ArgSpec:
    return _ArgSpec(*inspect.getfullargspec(function)[:4])


def hint(message: str, path: str) -> str:
    """Return the fix of a syntax error, after a semicolon; otherwise, an empty string."""
    if not _IN_PYTHON_2.search(message):
        return ""
    return f"; this is Python 2: convert the file with python3.11 -m lib2to3 -w {path}"
