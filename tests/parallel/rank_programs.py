"""Test programs for the Communicator. Usage on each rank: python -m ...rank_programs NAME...

A failed assertion on any rank ends the job with a nonzero exit code.
"""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

from lm.config import Config
from lm.distributed import horovod
from lm.distributed.devices import session_config, start_tensorflow
from lm.distributed.launch import connect
from lm.model.variables import TYPES
from lm.optimize.gradients import exchange_gradients
from lm.optimize.optimizer import build_update


def gather(comm):
    """Each call returns the values of all ranks in rank order."""
    for _ in range(3):
        values = comm.gather({"rank": comm.rank, "text": "line\nbreak " * comm.rank})
        assert values == [{"rank": r, "text": "line\nbreak " * r} for r in range(comm.size)]


def threads(comm):
    """After an exchange, a session has its own number of threads inside an operation."""
    comm.gather(None)
    device = start_tensorflow(comm, 7)
    before = set(os.listdir("/proc/self/task"))
    with tf.Session(config=session_config(device)) as session:
        session.run(tf.matmul(tf.ones([9, 9]), tf.ones([9, 9])))
        assert len(set(os.listdir("/proc/self/task")) - before) >= 6


def update(comm):
    """Gradients are summed over ranks, and each word's rows are merged before the norm."""
    assert comm.size == 4
    table = tf.get_variable("table", initializer=np.zeros([5, 2], "f"), use_resource=True)
    dense = tf.get_variable("dense", initializer=np.zeros([2], "f"), use_resource=True)
    words = [comm.rank, 4, 4]  # all ranks use word 4 twice, and one other word
    loss = tf.reduce_sum(tf.gather(table, words)) + tf.reduce_sum(dense * (comm.rank + 1))
    config = Config(max_grad_norm=1e9, batch_size=1, num_steps=1)
    step = tf.train.get_or_create_global_step()
    exchange = exchange_gradients(loss, 1, comm)
    update = build_update(config, exchange, tf.constant(1.0), step, comm)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        norm, _ = session.run([update.grad_norm, update.train_op])
        table, dense = session.run([table, dense])
    np.testing.assert_allclose(table, -np.array([[1, 1], [1, 1], [1, 1], [1, 1], [8, 8]]))
    np.testing.assert_allclose(dense, [-10, -10])
    np.testing.assert_allclose(norm, np.sqrt(8 * 1 + 2 * 64 + 2 * 100), rtol=1e-6)


def sums(comm):
    """Sums are complete on both sides of each size in lm/distributed/open_mpi_rules.conf."""
    ranks, limits = comm.size, {2: (16 << 20,), 4: (64 << 10,)}
    sizes = [num_bytes // 4 + more for num_bytes in limits[comm.size] for more in (-1, 0, 3)]
    sizes.append(5_000_003)  # 20 MB
    for size in sizes:
        values = tf.range(size, dtype=tf.float32) % 1000 + comm.rank
        with tf.Session() as session:
            total = session.run(comm.sum(values, f"sum_{size}"))
        expected = np.arange(size) % 1000 * ranks + ranks * (ranks - 1) // 2
        np.testing.assert_array_equal(total, expected)
    assert comm.why_inexact(sizes) == ""


def probes(comm):
    """Arrays above the largest probe are represented by one array of this size."""
    probed, sum_ = [], comm.sum
    comm.sum = lambda tensor, name: probed.append(tensor.shape[0]) or sum_(tensor, name)
    largest, horovod._LARGEST_PROBE = horovod._LARGEST_PROBE, 1999
    assert comm.why_inexact([10, 2000, 3000]) == "" and probed == [10, 1999]
    horovod._LARGEST_PROBE = largest
    comm.sum = lambda tensor, name: sum_(tensor, name) * 1.0001
    assert comm.why_inexact([10]) == "the exchange adds up 10 numbers in its own order"
    comm.sum = sum_


def broadcast(comm):
    """All ranks start with rank 0's weights and with their own recurrent state."""
    shared = tf.get_variable("shared", initializer=float(comm.rank + 5), use_resource=True)
    own = tf.get_variable(
        "own",
        initializer=float(comm.rank),
        use_resource=True,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
    )
    of_types = [
        tf.get_variable(f"of_{dtype}", initializer=tf.cast(comm.rank, dtype), use_resource=True)
        for dtype in TYPES
    ]
    broadcast_op = comm.broadcast_variables()
    with tf.train.SingularMonitoredSession() as session:
        session.run(broadcast_op)
        assert session.run([shared, own]) == [5.0, comm.rank]
        assert not any(session.run(of_types))


def broadcast_from_devices(comm):
    """Ranks do not wait for each other forever if the variables are on several devices."""
    for index in range(40):
        with tf.device("cpu:0" if index % 2 else None):
            tf.get_variable(f"v{index}", initializer=float(comm.rank), use_resource=True)
    broadcast_op = comm.broadcast_variables()
    one_thread = tf.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Session(config=one_thread) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(50):
            session.run(broadcast_op)
        assert not any(session.run(tf.global_variables()))


def fusion(comm):
    """A run with fused buffers is not reported as exact, because fusion depends on timing."""
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "1"  # read at each call
    assert "a matter of timing" in comm.why_inexact([4])
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"


if __name__ == "__main__":
    tf.disable_eager_execution()
    comm = connect()
    for name in sys.argv[1:]:  # one launch for all: launching takes the longest
        with tf.Graph().as_default():
            globals()[name](comm)
