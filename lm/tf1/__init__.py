"""Load TF 1.x code without edits. In this code, `import tensorflow` imports the TensorFlow 1 API.

A config file loads a module with `model = tf1.load("path/to/model.py")`. `modules.py` imports the
module. `tensorflow.py` and `contrib.py` define the TensorFlow that the module imports, and
`old_python.py` defines names of Python 2. `calls.py` prepares each call of a function of the config
file. During these calls, `draws.py` generates random numbers, `feeds.py` passes values to
placeholders and initial states, and the names in `inert.py` have no effect. `models.py` defines the
functions of a config file for frequent forms of models.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lm.tensorflow_import import import_tensorflow
from lm.user.loaded_files import current_files

__all__ = ["fed", "load", "network", "script"]


def fed(
    *placeholders: Any,
    zero_states: Sequence[Any] = (),
    defaults: Mapping[str, Any] | None = None,
) -> AbstractContextManager[None]:
    """Feed the placeholders and initial states of a program; see `lm.tf1.feeds.fed`."""
    from lm.tf1 import feeds

    return feeds.fed(*placeholders, zero_states=zero_states, defaults=defaults)


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
    return _loaded("load", path, root, stubs, before)


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
    return _loaded("script", path, root, stubs, before)


def network(
    build: Callable[[Any, Any], Any], logits: str | None = None, state: str | None = None
) -> tuple[Callable, Callable]:
    """Return `state_shapes` and `build_logits` for the frequent forms of models.

    Calls of `tf.placeholder` with an integer type return the words, and calls of `zero_state` of
    cells return the state.

    Args:
      build: A function that builds the model from the words, int32 [B, T], and the context. It
        returns an object or a dictionary.
      logits: The name of the logits in the result, [B, T, V] or [B * T, V]. By default, these are
        the logits that the program passes to its cross entropy.
      state: The name of the final state in the result, or None if there is no state.
    """

    def state_shapes(config):
        from lm.tf1.models import Network

        return Network(build, logits, state).state_shapes(config) if state else {}

    def build_logits(inputs_TB, state_by_name, context):
        from lm.tf1.models import Network

        return Network(build, logits, state).build_logits(inputs_TB, state_by_name, context)

    return state_shapes, build_logits


def _loaded(how: str, path: str, *options: Any) -> Any:
    files = current_files(f"tf1.{how} is called")
    import_tensorflow()  # Silences TensorFlow before the following modules import it.
    from lm.tf1 import calls, modules

    files.adapt = calls.adapt
    with calls.v1_behavior():
        return getattr(modules, how)(path, modules.Options(*options), files)
