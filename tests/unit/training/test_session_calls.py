"""SessionCalls, which replaces session.run in a step."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from lm.training.session_calls import SessionCalls


def test_they_return_what_session_run_returns():
    columns = np.arange(12.0).reshape(3, 4)
    with tf.Graph().as_default(), tf.Session() as session:
        x, index = tf.placeholder(tf.float32, [3, 2], "x"), tf.placeholder(tf.int64, [], "index")
        row, check_op = tf.gather(x, index, name="row"), tf.debugging.assert_positive(index + 1)
        fetches = [{"row": row, "all": x}, (check_op, index)]
        run = SessionCalls(session)
        for first in range(3):
            feed = {x: columns[:, first : first + 2], index: first}
            found, expected = run(fetches, feed), session.run(fetches, feed)
            assert list(map(type, found)) == list(map(type, expected))
            for name in ("row", "all"):
                np.testing.assert_array_equal(found[0][name], expected[0][name])
            assert found[1] == expected[1] == (None, first)
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            run(row, {x: columns[:, :2], index: 7})
    assert error.value.op is row.op  # messages name the line that created the operation
