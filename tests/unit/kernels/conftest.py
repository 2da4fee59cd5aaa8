"""Import TensorFlow with the settings of the commands: the tests also run in new processes."""

from lm.system import import_tensorflow

import_tensorflow()
