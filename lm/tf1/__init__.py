"""TF 1.x code without edits: modules in which `import tensorflow` means TensorFlow 1.

A config file loads a module with `model = tf1.load("path/to/model.py")`. `modules.py` imports it,
`tensorflow.py` and `contrib.py` are its TensorFlow, and `old_python.py` has names of Python 2.
`calls.py` prepares each call of a function of the config file: `draws.py` has its random numbers,
`feeds.py` passes values to it, and the parts in `inert.py` have no effect. `models.py` has the
functions for frequent forms of models.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lm.system import import_tensorflow
from lm.user.files import current_files

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
    """Load a Python file, in which `import tensorflow` means `tensorflow.compat.v1`.

    Flags of `tf.flags` have their defaults, and the command line is empty. Assign to attributes of
    the returned module to replace its functions or flags, such as `model.FLAGS.width = 200`. Paths
    are absolute, or relative to the config file.

    Args:
      path: The file.
      root: The directory, or the directories, whose modules are loaded in the same way when the
        file imports them. By default, this is the directory of the file.
      stubs: Names of packages that the network does not need, and that need not be installed.
      before: A function of the module `tensorflow` of the program, called before the file runs.
    """
    return _loaded("load", path, root, stubs, before)


def script(
    path: str,
    root: str | Sequence[str] | None = None,
    stubs: Sequence[str] = (),
    before: Callable[[types.ModuleType], None] | None = None,
) -> Callable[..., types.SimpleNamespace]:
    """Return a function that runs a file which builds its graph at the top level.

    Each call runs the file up to its optimizer or its session, and returns its names. Names that
    are passed to the call, such as `batch_size=rows`, keep their values when the file assigns to
    them. The arguments are those of `load`.
    """
    return _loaded("script", path, root, stubs, before)


def network(
    build: Callable[[Any, Any], Any], logits: str | None = None, state: str | None = None
) -> tuple[Callable, Callable]:
    """Return `state_shapes` and `build_logits` for the frequent forms of models.

    Placeholders of integers return the words, and `zero_state` of cells returns the state.

    Args:
      build: Builds the model from the words, int32 [B, T], and the context. The result is an object
        or a dictionary.
      logits: The name of the logits in the result, [B, T, V] or [B * T, V]. By default, these are
        the logits of the program's cross entropy.
      state: The name of the last state in the result, or None if there is no state.
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
    import_tensorflow()  # silently; the following modules import it too
    from lm.tf1 import calls, modules

    files.adapt = calls.adapt
    with calls.v1_behavior():
        return getattr(modules, how)(path, modules.Options(*options), files)
