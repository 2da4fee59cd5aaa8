"""Load a config file: its config, and the functions of the network that it may define.

Config files are Python code, and loading one runs it. Therefore, config files are only taken from
the command line, and from the copy in a search directory. A run directory stores the path and the
SHA-256 of the file, but not the file itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Iterable
from typing import Callable, Literal

from lm.config import Config, RunOptions
from lm.errors import UserError, error_class, first_line
from lm.options import Checked
from lm.record import FileRecord
from lm.system import import_tensorflow, seeded

# Not as a module: a user's own directory `configs` may come first in sys.path.
_CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")
_BUILDERS = {"build_outputs": "outputs", "build_logits": "logits"}


def _no_state(config: Config) -> dict[str, list[int]]:
    return {}


@dataclasses.dataclass(frozen=True)
class NetworkFunctions:
    """The functions that build a network, and the config file that they come from.

    The default is the built-in network, whose functions are in `lm/model/lstm.py`.
    """

    where: str = "the built-in network"  # for messages: the path of the config file
    state_shapes: Callable = _no_state  # config -> shapes of the recurrent state by name
    build: Callable | None = None  # (inputs_TB, state, context) -> (outputs or logits, new state)
    kind: Literal["built-in", "outputs", "logits"] = "built-in"
    sha256: str | None = None  # of the config file; None if runs do not depend on the file
    config_class: type[Config] = Config

    @property
    def is_built_in(self) -> bool:
        """Whether no config file defines the network."""
        return self.kind == "built-in"

    @property
    def file_record(self) -> FileRecord | None:
        """The record of the config file; None if runs do not depend on it."""
        return FileRecord(os.path.abspath(self.where), self.sha256) if self.sha256 else None


BUILT_IN = NetworkFunctions()


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """The contents of a config file."""

    path: str
    sha256: str
    config: Config  # returned by get_config(); may be an instance of a subclass of Config
    functions: NetworkFunctions
    suggest: Callable | None = None  # (trial, config) -> config, for lm.search


def load_config_file(name_or_path: str) -> ConfigFile:
    """Run `configs/<name>.py` or a user's Python file.

    Raises:
      UserError: If the file does not exist, fails, or defines something invalid.
    """
    path = _find_config(name_or_path)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise error_class(error)(f"config file {path} cannot be read: {error.strerror}") from error
    sha256 = hashlib.sha256(source).hexdigest()
    if importlib.util.find_spec("tf_keras"):  # enables classic layers and cells
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    if b"tensorflow" in source:  # faster than a plain import, and without its messages
        import_tensorflow()
    try:
        # All processes must draw the same numbers, because constants are part of a network.
        with seeded(0):
            module = _module(path, source)
        _check_classes(module)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise UserError("get_config() is not defined")
        with seeded(0):
            config = get_config()
        if not isinstance(config, Config):
            raise UserError("get_config() must return lm.config.Config")
        _check_fields(type(config))
        Checked.__post_init__(config)  # in case a subclass does not call it
    except UserError as error:
        raise UserError(f"config {_place(path, error)}: {error}") from error
    except SyntaxError as error:  # in the file, or in a module that it imports
        where = f"{error.filename or path}, line {error.lineno}"
        raise UserError(f"config {where}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        line = f"{type(error).__name__}: {first_line(error)}{keras_hint(error)}"
        raise UserError(f"config {_place(path, error)}: {line}") from error
    functions = _network_functions(module, path, sha256, type(config))
    return ConfigFile(path, sha256, config, functions, getattr(module, "suggest", None))


def _place(path: str, error: BaseException) -> str:
    return place(path, traceback.extract_tb(error.__traceback__))


def place(path: str, frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the path, and the line of the last frame in that file if there is one."""
    whole = os.path.abspath(path)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == whole]
    return f"{path}, line {lines[-1]}" if lines else path


def keras_hint(error: BaseException) -> str:
    """Return the package to install if a classic layer or cell is missing, otherwise ""."""
    if "Keras 3" not in str(error):
        return ""
    # --no-deps: pip would install its dependency tensorflow over tensorflow-cpu.
    version = sys.modules["tensorflow"].__version__.rpartition(".")[0]
    install = f"pip install --no-deps 'tf_keras=={version}.*'"
    return f"; classic layers and cells need tf_keras: {install}"


def _module(path: str, source: bytes) -> types.ModuleType:
    # Register the module: dataclasses look up the module of a class. Run it only once: it may
    # register gradients in TensorFlow, which fails the second time.
    key = hashlib.sha256(os.fsencode(os.path.abspath(path)) + b"\n" + source).hexdigest()
    name = f"lm_config_{key[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    beside = os.path.dirname(os.path.abspath(path))
    if beside not in sys.path:
        sys.path.insert(0, beside)  # as for a script that Python runs
    try:
        # Compile the bytes that were hashed, not a cached version of the file.
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find_config(name_or_path: str) -> str:
    if name_or_path.endswith(".py") or os.sep in name_or_path:
        if not os.path.isfile(name_or_path):
            raise UserError(f"config file {name_or_path} does not exist")
        return name_or_path
    path = os.path.join(_CONFIGS, f"{name_or_path}.py")
    if not os.path.isfile(path):
        known = sorted(f[:-3] for f in os.listdir(_CONFIGS) if f.startswith("config_"))
        raise UserError(
            f"unknown config {name_or_path!r}: use one of {', '.join(known)}, or a path to a .py"
        )
    return path


def _check_classes(module: types.ModuleType) -> None:
    """Reject subclasses of Config that are not dataclasses: their options would be ignored."""
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, Config):
            for name, value in vars(cls).items():
                if isinstance(value, dataclasses.Field):  # @dataclass replaces it by its default
                    raise UserError(
                        f"{cls.__name__} needs @dataclasses.dataclass(frozen=True), otherwise"
                        f" {name} is not a field"
                    )


def _check_fields(cls: type[Config]) -> None:
    """Reject fields whose names are flags of the training."""
    taken = {"config", "help", *(field.name for field in dataclasses.fields(RunOptions))}
    for field in dataclasses.fields(cls):
        if field.name in taken:
            raise UserError(f"--{field.name} is already a flag: rename the field")


def _network_functions(
    module: types.ModuleType, path: str, sha256: str, config_class: type[Config]
) -> NetworkFunctions:
    names = ("state_shapes", *_BUILDERS)
    found = {name: getattr(module, name) for name in names if hasattr(module, name)}
    builders = [name for name in _BUILDERS if name in found]
    if len(builders) > 1 or (found and not builders):
        raise UserError(
            f"config {path}: a network is either build_outputs or build_logits, not"
            f" {' and '.join(found)}"
        )
    for name, value in found.items():
        if not callable(value):
            raise UserError(f"config {path}: {name} must be a function")
    if builders:
        (builder,) = builders
        state_shapes = found.get("state_shapes", _no_state)
        kind = _BUILDERS[builder]
        return NetworkFunctions(path, state_shapes, found[builder], kind, sha256, config_class)
    if config_class is not Config:
        return NetworkFunctions(path, sha256=sha256, config_class=config_class)
    return BUILT_IN
