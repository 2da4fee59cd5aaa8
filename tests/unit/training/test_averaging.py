"""The average of the weights: its value, and where it stands."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.training.averaging import Average


def test_it_is_the_mean_and_changes_places_with_the_weights_bit_for_bit():
    random = np.random.default_rng(0)
    every = random.normal(size=[7, 5, 3]).astype("f")
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable("table", [5, 3], use_resource=True)
        tf.get_variable("slot", [2], trainable=False, use_resource=True)
        average = Average()
        stored = {variable.op.name: variable for variable in tf.global_variables()}
        assert set(stored) == {"table", "slot", "table/average"}
        session.run(tf.global_variables_initializer())
        for count, value in enumerate(every, start=1):
            table.load(value, session)
            average.add(session, count)
            if count == 1:
                np.testing.assert_array_equal(session.run(stored["table/average"]), value)
        mean = session.run(stored["table/average"])
        np.testing.assert_allclose(mean, every.mean(axis=0), rtol=1e-5, atol=1e-6)
        # As when a signal to stop comes during the validation.
        with pytest.raises(KeyError), average.in_place(session):
            np.testing.assert_array_equal(session.run(table), mean)
            raise KeyError
        np.testing.assert_array_equal(session.run(table), every[-1])
        np.testing.assert_array_equal(session.run(stored["table/average"]), mean)
