"""Load TF 1.x code without edits. In this code, `import tensorflow` imports the TensorFlow 1 API.

A config file loads a module with `model = tf1.load("path/to/model.py")`. `modules.py` imports the
module. `tensorflow.py` and `contrib.py` define the TensorFlow that the module imports, and
`old_python.py` defines names of Python 2. `adapter.py` prepares each call of a function of the
config file. During these calls, `draws.py` generates random numbers, `feeds.py` passes values to
placeholders and initial states, and the names in `inert.py` have no effect. `models.py` defines the
functions of a config file for frequent forms of models. `call.py` has the state of a running call,
`keras.py` and `cells.py` define layers and cells, and `namespace.py` replaces names of modules.
"""

from lm.tf1.feeds import fed
from lm.tf1.models import network
from lm.tf1.modules import load, script

__all__ = ["fed", "load", "network", "script"]
