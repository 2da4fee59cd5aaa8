"""TensorFlow as the commands import it: the run for each instruction set starts it anew."""

from lm.startup import import_tensorflow

import_tensorflow()
