"""TensorFlow as the commands import it: the run for each instruction set starts it anew."""

from lm.distributed.startup import import_tensorflow

import_tensorflow()
