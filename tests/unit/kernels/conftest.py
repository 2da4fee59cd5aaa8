"""TensorFlow as the commands import it: the run for each instruction set starts it anew."""

from lm.system import import_tensorflow

import_tensorflow()
