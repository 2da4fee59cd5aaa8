"""Errors in a user's code: the line that failed, and hints for known failures."""

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable

_PROJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (_PROJECT, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
)
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_CALLERS = {  # functions of this project that call a user's code
    (os.path.join(_PROJECT, "config_file.py"), "load_config_file"),
    (os.path.join(_PROJECT, "user", "failures.py"), "call"),
}
_GENERATED = ("<", "__autograph_generated_file")  # the start of the names of generated files

_LOAD = "load the file with tf1.load (docs/own_graph.md)"
# The end of the name of a tf.placeholder without a value. If a result depends on the placeholder,
# `lm/user/audit.py` rejects it. `_HINTS` covers errors that TensorFlow raises earlier.
NOT_FED = "_not_fed"
_LOADED: set[str] = set()  # the paths of files that tf1.load has loaded
_UNLESS_LOADED = (  # patterns of the message and of the failed line, for other files
    (r"has no attribute 'value'", "", f"sizes have .value in TF 1.x; {_LOAD}"),
    (r"contrib", r"contrib", _LOAD),
    ("", r"\bconcat\(\s*-?\d", "this is the order of TF 0.x; write tf.concat(values, axis)"),
    ("", r"\bsplit\(\s*-?\d", "this is the order of TF 0.x; write tf.split(value, count, axis)"),
)
_HINTS = (
    (
        r"'float' object cannot be interpreted as an integer|of type 'float'|must be integer",
        r"[^/]/[^/]",
        "in Python 3, / returns a float; write // for sizes",
    ),
    ("not declared to be dynamic", "", "the state of LSTM cells is an LSTMStateTuple(c, h)"),
    (NOT_FED, "", "pass a value for each placeholder to tf1.fed, in the order of their creation"),
    (
        "scale must be 1D tensor",
        "",
        "TensorFlow's fused layer norm needs a scale [H], not [1, H]; change the shape, or set"
        " TF_ENABLE_ONEDNN_OPTS=0",
    ),
    ("Registering two gradient", "", "TensorFlow registers a gradient only once: restart Python"),
    ("", r"scatter_update\(", "to fix rows of a variable, use constraint= of tf.get_variable"),
)


def place(path: str, frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the file and the innermost line of the user's files, or the config file.

    Files of this project and of installed packages are not the user's files. `path` is the path of
    the config file, as the user wrote it. The innermost frame is the last.
    """
    frame = _innermost(path, frames)
    return f"{_shown(path, frame.filename)}, line {frame.lineno}" if frame else path


def add_loaded(path: str) -> None:
    """Record that the names and argument orders of TF 1.x work in a file."""
    _LOADED.add(path)


def current_line() -> str:
    """Return the file and the line of the user's code that is running."""
    return place("", traceback.extract_stack())


def hint(path: str, frames: Iterable[traceback.FrameSummary], message: str) -> str:
    """Return the fix of a known failure, after a semicolon; otherwise, an empty string."""
    if "Keras 3" in message:
        # Otherwise, pip would install the dependency tensorflow over tensorflow-cpu.
        version = sys.modules["tensorflow"].__version__.rpartition(".")[0]
        install = f"pip install --no-deps 'tf_keras=={version}.*'"
        return f"; classic layers and cells need tf_keras ({install})"
    frame = _innermost(path, frames)
    line = frame.line if frame else ""
    is_loaded = frame is not None and frame.filename in _LOADED
    for in_message, in_line, fix in _HINTS + (() if is_loaded else _UNLESS_LOADED):
        if re.search(in_message, message) and re.search(in_line, line):
            return f"; {fix}"
    return ""


def _innermost(
    path: str, frames: Iterable[traceback.FrameSummary]
) -> traceback.FrameSummary | None:
    frames, config_file = list(frames), os.path.abspath(path)
    calls = [i for i, frame in enumerate(frames) if (frame.filename, frame.name) in _CALLERS]
    # Frames outside of a call belong to a program that uses this project.
    inside = calls[-1] if calls else len(frames)
    for i, frame in reversed(list(enumerate(frames))):
        if os.path.abspath(frame.filename) == config_file:
            return frame
        if i > inside and is_of_user(frame.filename):
            return frame
    return None


def is_of_user(filename: str) -> bool:
    if os.path.basename(filename).startswith(_GENERATED):
        return False
    # The source of a compiled package does not exist.
    return os.path.isfile(filename) and not is_of_library(filename)


def is_of_library(path: str) -> bool:
    """Return whether a file or a directory belongs to this project or to an installed package."""
    return os.path.abspath(path).startswith(_LIBRARIES) or bool(_PACKAGES.search(path))


def _shown(path: str, filename: str) -> str:
    """Return a filename as the user would write it."""
    if os.path.abspath(filename) == os.path.abspath(path):
        return path
    relative = os.path.relpath(filename)
    return filename if relative.startswith(os.pardir) else relative
