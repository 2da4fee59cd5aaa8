"""Import the modules of TF 1.x programs.

The root directory of a program becomes a package with a unique name, so programs whose modules have
equal names can be loaded together. Its modules have a separate `__import__`, which resolves
`tensorflow` and the modules of the program. No other code is affected.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from lm.errors import UserError
from lm.files import short_name
from lm.tf1 import adapter, old_python
from lm.tf1.call import replaced
from lm.tf1.inert import HOROVOD, Inert, up_to_the_optimizer
from lm.tf1.tensorflow import TensorFlow
from lm.user.code import add_loaded
from lm.user.loaded_files import LoadedFiles, current_files

_programs: dict[str, _Program] = {}  # keys are the names of the packages


@adapter.v1_behavior()
def load(
    path: str,
    root: str | Sequence[str] | None = None,
    stubs: Sequence[str] = (),
    before: Callable[[types.ModuleType], None] | None = None,
) -> types.ModuleType:
    """Load a Python file. In this file, `import tensorflow` imports `tensorflow.compat.v1`.

    Flags of `tf.flags` have their default values, and the command line is empty. To replace the
    functions or flags of the returned module, assign to its attributes, for example
    `model.FLAGS.width = 200`. Paths are absolute, or relative to the config file.

    Args:
      path: The path of the file.
      root: The directory, or the directories, whose modules are loaded in the same way when the
        file imports them. The default is the directory of the file.
      stubs: Names of packages, or of modules of the program, that the program imports but the
        network does not use. They need not be installed.
      before: A function that is called before the file runs. Its argument is the module
        `tensorflow` of the program.
    """
    files = current_files("tf1.load is called")
    program, name, prefix = _find(path, root, stubs, before, files)
    with replaced(sys, {"argv": [path]}):
        module = importlib.import_module(f"{program.package}.{name}")
    program.record(prefix, files)
    return module


@adapter.v1_behavior()
def script(
    path: str,
    root: str | Sequence[str] | None = None,
    stubs: Sequence[str] = (),
    before: Callable[[types.ModuleType], None] | None = None,
) -> Callable[..., types.SimpleNamespace]:
    """Return a function that executes a file. The file builds its graph at the top level.

    Each call executes the file until it creates an optimizer or a session, and returns the
    variables of the file. Variables that are passed to the call, such as `batch_size=rows`, keep
    their values even if the file assigns to them. The arguments are the same as for `load`.
    """
    files = current_files("tf1.script is called")
    program, name, prefix = _find(path, root, stubs, before, files)
    spec = importlib.util.find_spec(f"{program.package}.{name}")
    code = spec.loader.get_code(spec.name)

    def run(**kept: Any) -> types.SimpleNamespace:
        module = importlib.util.module_from_spec(spec)
        program.prepare(module)
        sys.modules[spec.name] = module  # a new module may define its flags again
        names = _Names(vars(module), kept)
        with replaced(sys, {"argv": [path]}), up_to_the_optimizer(program.tensorflow):
            exec(code, vars(module), names)
        if unused := kept.keys() - names.assigned:
            raise UserError(
                f"{path} assigns no {', '.join(sorted(unused))} before it creates an optimizer or"
                " a session: pass names that the file assigns at its top level"
            )
        return types.SimpleNamespace(**vars(module))

    with tf.Graph().as_default():
        run()  # imports the modules of the program
    program.record(prefix, files)
    return run


class _Names(collections.UserDict):
    """The names of a script at its top level. Some keep the values of the config file."""

    def __init__(self, names: dict[str, Any], kept: Mapping[str, Any]):
        self.data, self._kept = names, kept
        self.assigned: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.assigned.add(name)
        self.data[name] = self._kept.get(name, value)


def _find(
    path: str,
    root: str | Sequence[str] | None,
    stubs: Sequence[str],
    before: Callable[[types.ModuleType], None] | None,
    files: LoadedFiles,
) -> tuple[_Program, str, str]:
    """Return the program of a file, the name of its module, and the first root directory."""
    files.adapt = adapter.adapt
    found = files.find(path)
    if not os.path.isfile(found):
        raise UserError(f"{path} is not at {found}; give a path relative to the config file")
    root = os.path.dirname(path) if root is None else root
    roots = [root] if isinstance(root, str) else list(root)
    directories = [files.find(directory) for directory in roots]
    paths = [os.path.relpath(found, directory) for directory in directories]
    inside = [relative for relative in paths if not relative.startswith(os.pardir)]
    if not inside:
        raise UserError(f"{path} is not in the directory {' or '.join(roots)}; see root=")
    # Config files do not share a program, because they may change its flags.
    package = f"lm_tf1_{short_name(os.pathsep.join([files.key, *directories]))}"
    if package not in _programs:
        _programs[package] = _Program(package, directories)
    program = _programs[package]
    program.stubs.update(stubs)
    if before:
        before(program.tensorflow)
    name = min(inside, key=len).removesuffix(".py").replace(os.sep, ".")
    return program, name, roots[0]


class _Program:
    """The modules of a program, in one or more directories and their subdirectories."""

    def __init__(self, package: str, directories: list[str]):
        self.package, self._directory = package, directories[0]
        self.tensorflow = TensorFlow()
        self.stubs: set[str] = set()  # packages and modules without effect
        self._old = old_python.modules()
        self._loaded: dict[str, tuple[str, bytes]] = {}  # path and source by relative path
        module = types.ModuleType(package)
        module.__path__ = directories
        sys.modules[package] = module

    def record(self, prefix: str, files: LoadedFiles) -> None:
        """Record the modules that have been loaded, relative to a root directory."""
        for relative, (path, source) in self._loaded.items():
            files.add(os.path.normpath(os.path.join(prefix, relative)), path, source)

    def add(self, path: str, source: bytes) -> None:
        self._loaded[os.path.relpath(path, self._directory)] = path, source

    def prepare(self, module: types.ModuleType) -> None:
        """Give a module the imports of the program, and names of Python 2."""
        changed = {"__import__": self.import_, **old_python.BUILTINS}
        module.__builtins__ = {**vars(builtins), **changed}

    def import_(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """Import a module for a module of the program; see Python's `__import__`."""
        top = name.partition(".")[0]
        if level == 0 and top == "horovod":
            return HOROVOD
        if level == 0 and top in ("tensorflow", "absl"):
            return self._import_tensorflow(name, fromlist)
        if level == 0 and self.stubs & {top, name}:
            return Inert(name if fromlist else top)
        # Python 2 also imports from the directory of the importing module.
        own = (globals or {}).get("__package__") or self.package
        for package in (self.package, own):
            if level == 0 and _contains(package, top):
                module = builtins.__import__(f"{package}.{name}", globals, locals, fromlist or ())
                return module if fromlist else sys.modules[f"{package}.{top}"]
        if level == 0 and (name in self._old or (top in self._old and not fromlist)):
            return self._old[name if fromlist else top]
        try:
            return builtins.__import__(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            if error.name == top and level == 0:
                error.msg += f"; install it, or pass stubs=({top!r},) to tf1.load or tf1.script"
            raise

    def _import_tensorflow(self, name: str, fromlist: Sequence[str] | None) -> types.ModuleType:
        if name.startswith("absl"):
            is_flags = name == "absl.flags" or "flags" in (fromlist or ())
            module = builtins.__import__(name, fromlist=fromlist or ())
            return self.tensorflow.absl(module, name) if is_flags else module
        module = self.tensorflow.find(name)
        return module if fromlist else self.tensorflow


def _contains(package: str, top: str) -> bool:
    """Return whether a package of a program contains a module or a package."""
    spec = importlib.machinery.PathFinder.find_spec(top, sys.modules[package].__path__)
    if spec is None:
        return False
    # As in Python, a directory without __init__.py comes last.
    return spec.loader is not None or importlib.util.find_spec(top) is None


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes a module of a program."""

    def __init__(self, name: str, path: str, program: _Program):
        super().__init__(name, path)
        self._program = program

    def get_code(self, fullname: str) -> types.CodeType:
        current_files(f"{os.path.basename(self.path)} is imported")
        source = self.get_data(self.path)
        self._program.add(self.path, source)
        add_loaded(self.path)
        try:
            return compile(source, self.path, "exec", dont_inherit=True)  # ignores cached bytecode
        except SyntaxError as error:
            error.msg += old_python.hint(error.msg, self.path)
            raise

    def exec_module(self, module: types.ModuleType) -> None:
        self._program.prepare(module)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of programs."""

    def find_spec(self, fullname, path=None, target=None):
        program = _programs.get(fullname.partition(".")[0])
        if program is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.origin, program)
        return spec


sys.meta_path.insert(0, _Finder())
