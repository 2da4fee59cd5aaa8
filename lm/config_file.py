"""Load config files, which contain a config and may define a network.

Loading a config file executes Python code. Therefore, config files come only from the command line
or from the copy in a search directory. A run directory stores only the path and the SHA-256.
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
import types

from lm.config import Config
from lm.errors import UserError, error_class, first_line
from lm.files import short_name
from lm.functions import BUILT_IN, NetworkFunctions
from lm.options import Checked
from lm.system import PROJECT, seeded
from lm.tensorflow_import import import_tensorflow
from lm.user.code import hint, place
from lm.user.config_functions import UserFunctions
from lm.user.loaded_files import LoadedFiles, collected_by, fresh_modules

# The configs are in lm/ in a wheel, and next to lm/ in a checkout. Importing `configs` could find a
# user's directory of the same name.
_CONFIGS = next(
    filter(os.path.isdir, (os.path.join(PROJECT, "lm/configs"), os.path.join(PROJECT, "configs")))
)
_BUILDERS = ("build_outputs", "build_logits")
# The functions of a network; see docs/own_graph.md.
_FUNCTIONS = (
    "state_shapes", "reads_words", *_BUILDERS, "build_losses", "build_optimizer",
    "transform_gradients", "checkpoint_name",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """The contents of a config file."""

    path: str
    sha256: str
    config: Config  # returned by get_config(); may be an instance of a subclass of Config
    functions: NetworkFunctions
    loaded: LoadedFiles


def load_config_file(name_or_path: str) -> ConfigFile:
    """Run `configs/<name>.py` or a user's Python file."""
    path, source = _read(name_or_path)
    sha256 = hashlib.sha256(source).hexdigest()
    if importlib.util.find_spec("tf_keras"):  # enables classic layers and cells
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    if b"tensorflow" in source or b"tf1" in source:  # faster and quieter than a plain import
        import_tensorflow()
    try:
        # All processes must draw the same numbers, because constants are part of a network.
        with seeded(0):
            module, loaded = _run_once(os.path.abspath(path), source)
        loaded.check_unchanged()
        _check_names(module)
        if not hasattr(module, "get_config"):
            raise UserError("get_config() is not defined")
        with seeded(0), collected_by(loaded):
            config = module.get_config()
        if not isinstance(config, Config):
            raise UserError("get_config() must return lm.config.Config")
        Checked.__post_init__(config)  # A subclass may not call it.
        functions = _network_functions(module, path, sha256, type(config), loaded)
    except (Exception, SystemExit) as error:
        raise UserError(f"config {_explain(path, error)}") from error
    return ConfigFile(path, sha256, config, functions, loaded)


def _explain(path: str, error: BaseException) -> str:
    if isinstance(error, SyntaxError):  # A module that the file imports may be invalid too.
        return f"{error.filename or path}, line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    where, message = place(path, frames), first_line(error)
    if isinstance(error, UserError):
        return f"{where}: {error}"
    return f"{where}: {type(error).__name__}: {message}{hint(path, frames, message)}"


def _read(name_or_path: str) -> tuple[str, bytes]:
    is_path = name_or_path.endswith(".py") or os.sep in name_or_path
    path = name_or_path if is_path else os.path.join(_CONFIGS, f"{name_or_path}.py")
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        known = sorted(f[:-3] for f in os.listdir(_CONFIGS) if f.startswith("config_"))
        raise error_class(error)(
            f"cannot read config {name_or_path!r} in {os.path.dirname(os.path.abspath(path))}"
            f" ({error.strerror}): use one of {', '.join(known)}, or a path to a .py"
        ) from error
    if b"\0" in source:
        raise UserError(f"config {path} is not UTF-8 (UTF-16?), so save it as UTF-8")
    return path, source


@functools.cache  # Registering a gradient in TensorFlow fails the second time.
def _run_once(path: str, source: bytes) -> tuple[types.ModuleType, LoadedFiles]:
    module = types.ModuleType(f"lm_config_{short_name(f'{path} {source}')}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # Dataclasses look up the module of their class.
    loaded = LoadedFiles(path, module.__name__)
    with collected_by(loaded), fresh_modules(path) as imported:
        # Python's import could execute a cached version instead of the hashed bytes.
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        loaded.add_modules(imported())
    return module, loaded


def _check_names(module: types.ModuleType) -> None:
    """Reject a function with a misspelled name, which would be ignored."""
    known = ("get_config", *_FUNCTIONS)
    for name, value in vars(module).items():
        is_own = inspect.isfunction(value) and value.__module__ == module.__name__
        if is_own and name not in known and not name.startswith("_"):
            for meant in difflib.get_close_matches(name, known, n=1, cutoff=0.85):
                if not hasattr(module, meant):
                    raise UserError(f"the function {name} is not used: rename it to {meant}")


def _network_functions(
    module: types.ModuleType,
    path: str,
    sha256: str,
    config_class: type[Config],
    loaded: LoadedFiles,
) -> NetworkFunctions:
    found = {
        name: loaded.adapt(getattr(module, name)) for name in _FUNCTIONS if hasattr(module, name)
    }
    builders = found.keys() & set(_BUILDERS)
    if len(builders) > 1 or (found and not builders and "build_losses" not in found):
        raise UserError(
            "a network needs build_outputs, build_logits or build_losses, and not both of the first"
            f" two, but the file defines {' and '.join(found)}"
        )
    if found or config_class is not Config:
        kind = UserFunctions if found else NetworkFunctions
        return kind(path, found, sha256, config_class, loaded.sha256)
    return BUILT_IN
