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
      UserError: No such config, or the file fails, or what it defines cannot be used.
    """
    path = _find_config(name_or_path)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise error_class(error)(f"config file {path} cannot be read: {error.strerror}") from error
    sha256 = hashlib.sha256(source).hexdigest()
    if importlib.util.find_spec("tf_keras"):  # without, classic layers and cells are gone
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    if b"tensorflow" in source:  # a plain import of it takes twice as long, and has things to say
        import_tensorflow()
    try:
        # What it draws in Python is the same in each process: constants are part of a network.
        with seeded(0):
            module = _module(path, source)
        _check_classes(module)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise UserError("there is no function get_config()")
        with seeded(0):
            config = get_config()
        if not isinstance(config, Config):
            raise UserError("get_config() must return lm.config.Config")
        _check_fields(type(config))
        Checked.__post_init__(config)  # also where that of a subclass does not call it
    except UserError as error:
        raise UserError(f"config {_place(path, error)}: {error}") from error
    except SyntaxError as error:  # also in a module that it imports
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
    """Return a file and, if some of the frames are in it, the line of the last of them."""
    whole = os.path.abspath(path)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == whole]
    return f"{path}, line {lines[-1]}" if lines else path


def keras_hint(error: BaseException) -> str:
    """Return what to install where an error is that of a classic layer or cell; else nothing."""
    if "Keras 3" not in str(error):
        return ""
    # Of the same version. Without what it needs: that is all of tensorflow, which pip would
    # install over tensorflow-cpu.
    version = sys.modules["tensorflow"].__version__.rpartition(".")[0]
    install = f"pip install --no-deps 'tf_keras=={version}.*'"
    return f"; classic layers and cells need tf_keras: {install}"


def _module(path: str, source: bytes) -> types.ModuleType:
    # Known by its name, as dataclasses expect of the module of a class. Run once: what it registers
    # in TensorFlow, such as a gradient, cannot be registered again.
    key = hashlib.sha256(os.fsencode(os.path.abspath(path)) + b"\n" + source).hexdigest()
    name = f"lm_config_{key[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    beside = os.path.dirname(os.path.abspath(path))
    if beside not in sys.path:
        sys.path.insert(0, beside)  # modules beside it come first, as those beside a program
    try:
        # These bytes, not what Python may have kept of an older file: the checksum is theirs.
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find_config(name_or_path: str) -> str:
    """Return the path of a config's file.

    Args:
      name_or_path: As for `load_config_file`.

    Raises:
      UserError: There is no such config.
    """
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
    """Refuse a subclass of Config that is no dataclass: its options would be no fields."""
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, Config):
            for name, value in vars(cls).items():
                if isinstance(value, dataclasses.Field):  # else its default, or nothing
                    raise UserError(
                        f"{cls.__name__} needs @dataclasses.dataclass(frozen=True) above it: else"
                        f" {name} is no field"
                    )


def _check_fields(cls: type[Config]) -> None:
    """Refuse fields of a subclass that cannot be flags."""
    taken = {"config", "help", *(field.name for field in dataclasses.fields(RunOptions))}
    for field in dataclasses.fields(cls):
        if field.name in taken:
            raise UserError(f"--{field.name} is a flag already: rename that field")


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
