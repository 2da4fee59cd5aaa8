"""The imports, threads and GPU of TensorFlow."""

import os
import threading

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import config

from lm.distributed import devices
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from tests.commands import run_code

# The first Saver, session or exchange of a process creates its thread pools.
_COUNT_THREADS = """
import os, sys
from lm.config_file import load_config_file

load_config_file("config_gru")  # imports TensorFlow without its log messages, like the programs
assert not {"keras", "matplotlib"} & set(sys.modules)
os.write(2, b"heard again")
import tensorflow.compat.v1 as tf
from lm.distributed.communicator import Communicator
from lm.distributed.devices import session_config, start_tensorflow

def added_threads(intra_op):
    config = session_config(start_tensorflow(Communicator(), intra_op))
    before = len(os.listdir("/proc/self/task"))
    with tf.Session(config=config) as session:
        session.run(product)
        return len(os.listdir("/proc/self/task")) - before

start_tensorflow(Communicator())
with tf.Graph().as_default(), tf.Session() as other:
    product = tf.matmul(*[tf.random.uniform([500, 500])] * 2)
    tf.get_variable("v", [])
    tf.train.Saver()
    other.run(product)
    assert added_threads(7) - added_threads(2) == 5
tf.keras.layers  # is still available
"""


def test_a_process_has_the_requested_number_of_threads():
    result = run_code(_COUNT_THREADS, timeout=100)
    assert result.returncode == 0 and result.stderr.startswith("heard again"), result.stderr


def test_ranks_with_different_flags_exchange_equally_often():
    def count_exchanges(intra_op):
        comm, values = Communicator(), []
        comm.gather = lambda value: values.append(value) or [value]
        devices.start_tensorflow(comm, intra_op)
        return len(values)

    assert count_exchanges(None) == count_exchanges(3)


def test_a_session_has_the_threads_of_its_run_even_after_other_runs():
    """A notebook trains a built-in model, and then a user-defined network."""
    devices.start_tensorflow(Communicator())
    count = os.cpu_count() + 1  # more than any earlier session has
    device = devices.start_tensorflow(Communicator(), None, count, divides_operations=False)
    meeting = threading.Barrier(count, timeout=20)  # raises BrokenBarrierError
    with tf.Graph().as_default():
        waits = [tf.py_func(meeting.wait, [], tf.int64) for _ in range(count)]
        with tf.Session(config=devices.session_config(device)) as session:
            assert sorted(session.run(waits)) == [*range(count)]


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, "--xla_allow_excess_precision=false"),
        ("--xla_dump_to=x", "--xla_dump_to=x --xla_allow_excess_precision=false"),
        ("--xla_allow_excess_precision=true", "--xla_allow_excess_precision=true"),
        ("flags.txt", "flags.txt"),
    ],
)
def test_xla_keeps_conversions_to_bfloat16(monkeypatch, given, expected):
    monkeypatch.setenv("XLA_FLAGS", given or "")
    for _ in range(2):
        devices.start_tensorflow(Communicator())
    assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize(
    "num_visible, uuids, gpu",
    [
        (0, [None, None], None),
        (2, ["a", "a"], 1),  # both ranks see both GPUs
        (1, ["a", "b"], 0),  # each rank sees only its own GPU
    ],
)
def test_each_rank_of_a_host_has_its_own_gpu(num_visible, uuids, gpu):
    """The GPUs are fake, so this test runs on any machine."""
    comm = Communicator()
    comm.local_rank, comm.local_size = 1, 2
    assert devices.choose_gpu(comm, num_visible, uuids) == gpu
    device = devices.Device(1, 1, gpu)
    session_config = devices.session_config(device)
    assert session_config.gpu_options.visible_device_list == ("" if gpu is None else str(gpu))
    assert device.name == ("CPU:0" if gpu is None else f"GPU:{gpu}")


@pytest.mark.parametrize("uuids", [["a", "b", "a"], ["a", "b", None]])
def test_ranks_that_share_a_gpu_are_rejected(uuids):
    comm = Communicator()
    comm.local_rank, comm.local_size = 1, 3
    with pytest.raises(UserError, match="3 ranks on this host but 1 visible GPUs: start one rank"):
        devices.choose_gpu(comm, 1, uuids)


def test_tensorfloat_32_is_off():
    devices.start_tensorflow(Communicator())
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


def test_op_determinism_is_disabled_on_cpus():
    """It rejects the clock and random operations without a seed, which initialize variables."""
    config.enable_op_determinism()
    try:
        devices.start_tensorflow(Communicator())
        with tf.Graph().as_default(), tf.Session() as session:
            session.run([tf.timestamp(), tf.random.uniform([])])
    finally:
        config.disable_op_determinism()
