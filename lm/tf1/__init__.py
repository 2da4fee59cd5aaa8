"""TF 1.x code without edits: modules in which `import tensorflow` means TensorFlow 1.

A config file loads a module with `model = tf1.load("path/to/model.py")`. `modules.py` imports it,
`tensorflow.py` and `contrib.py` are its TensorFlow, `calls.py` prepares each call of a function of
the config file, `draws.py` has its random numbers, and `feeds.py` passes values to it.
"""

import types
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lm.system import import_tensorflow
from lm.user.files import current_files

__all__ = ["fed", "load"]


def fed(
    *placeholders: Any,
    zero_states: Sequence[Any] = (),
    defaults: Mapping[str, Any] | None = None,
) -> AbstractContextManager[None]:
    """Feed the placeholders and initial states of a program; see `lm.tf1.feeds.fed`."""
    from lm.tf1 import feeds

    return feeds.fed(*placeholders, zero_states=zero_states, defaults=defaults)


def load(path: str, root: str | None = None) -> types.ModuleType:
    """Load a Python file, in which `import tensorflow` means `tensorflow.compat.v1`.

    The modules in `root`, by default the directory of the file, are loaded in the same way when the
    file imports them. Flags of `tf.flags` have their defaults. Assign to attributes of the returned
    module to replace its functions or flags, such as `model.FLAGS.rnn_mode = "basic"`. Paths are
    absolute, or relative to the config file.
    """
    files = current_files()
    import_tensorflow()  # silently; the following modules import it too
    from lm.tf1 import calls, modules

    files.adapt = calls.adapt
    with calls.v1_behavior():
        return modules.load(path, root, files)
