"""Perplexity of a split."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from lm.batches import EvalBatches
from lm.metrics import NllSum
from lm.model import Model


def run_evaluation(session: tf.Session, model: Model, batches: EvalBatches) -> NllSum:
    """Run a model over a split, starting with an empty recurrent state.

    Args:
      session: Session of the model's graph.
      model: A model built without dropout.
      batches: The split's windows.

    Returns:
      The split's summed nll and its number of tokens, each token counted once.
    """
    session.run(model.reset_state_op)
    total = NllSum()
    for index in range(batches.num_windows):
        inputs, targets, weights = batches.window(index)
        feed = {
            model.inputs_ph: inputs,
            model.targets_ph: targets,
            model.weights_ph: weights,
        }
        nats, _ = session.run([model.nll_sum, model.keep_state_op], feed)
        total += NllSum(float(nats), int(weights.sum()))
    return total
