"""Config files: the settings that they return, and the network that they may bring.

They are code, and are run. So they come from the command line alone, but for the copy in the
directory of a search: what a run's directory holds of one is its path and its SHA-256, which tell
the right file from another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Iterable, Mapping
from typing import Callable, Optional

from lm import run_files
from lm.config import Config, RunOptions
from lm.errors import UserError, first_line, kind_of
from lm.options import Checked
from lm.seeding import seeded
from lm.startup import import_tensorflow

# Not as a module: a user's own directory `configs` may come first in sys.path.
_CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")
_BUILD = ("build_outputs", "build_logits")


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A config file that was run."""

    path: str
    checksum: str  # SHA-256 of its bytes
    config: Config  # what get_config() returned, a Config or of a subclass of it
    functions: Mapping[str, Callable]  # of the network; {} where it brings none
    suggest: Optional[Callable] = None  # (trial, config) -> config, for lm.search

    @property
    def is_part_of_run(self) -> bool:
        """Whether a run that was trained with it needs it ever after: for its network, or for the
        fields of its config."""
        return bool(self.functions) or type(self.config) is not Config

    @property
    def record(self) -> dict[str, str]:
        """What a run's directory keeps of it."""
        return {"path": os.path.abspath(self.path), "sha256": self.checksum}


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
        raise kind_of(error)(f"config file {path} cannot be read: {error.strerror}") from error
    checksum = hashlib.sha256(source).hexdigest()
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
    functions = _network_functions(module, path)
    return ConfigFile(path, checksum, config, functions, getattr(module, "suggest", None))


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


def _network_functions(module: types.ModuleType, path: str) -> dict[str, Callable]:
    found = {
        name: getattr(module, name) for name in ("state_shapes", *_BUILD) if hasattr(module, name)
    }
    builders = [name for name in _BUILD if name in found]
    if len(builders) > 1 or (found and not builders):
        raise UserError(
            f"config {path}: a network is either build_outputs or build_logits, not"
            f" {' and '.join(found)}"
        )
    for name, value in found.items():
        if not callable(value):
            raise UserError(f"config {path}: {name} must be a function")
    return found


def check_belongs(directory: str, file: Optional[ConfigFile]) -> None:
    """Check that a run is used with a config file where it was trained with one, and only there.

    Args:
      directory: Of the run.
      file: What the user gave.

    Raises:
      UserError: It is missing, or not needed.
    """
    recorded = _recorded_path(directory)
    if recorded is None:
        if file is not None:
            raise UserError(
                f"{directory} was trained without a network or fields of a config file: leave out"
                f" --config {file.path}"
            )
        return
    if file is None:
        raise UserError(
            f"{directory} was trained with the network or fields of a config file: give it with"
            f" --config, as in --config {recorded}"
        )


def check_unchanged(file: ConfigFile, trained_with: str, source: str) -> None:
    """Check that a config file is the one that a checkpoint was trained with.

    Args:
      file: What the user gave.
      trained_with: SHA-256 of the one that it was trained with.
      source: The checkpoint.

    Raises:
      UserError: It is another one.
    """
    if file.checksum != trained_with:
        raise UserError(
            f"{file.path} is not the file that {source} was trained with (its SHA-256 is"
            f" {file.checksum[:12]}..., not {trained_with[:12]}...): give that one, or"
            " --allow_changed_network"
        )


def _recorded_path(directory: str) -> Optional[str]:
    """Return where the config file of a run was; None for a run that has none."""
    path = os.path.join(directory, run_files.CONFIG_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)["path"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
