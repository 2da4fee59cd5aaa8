"""TensorFlow's start: what it imports, its threads, and which GPU it has."""

import subprocess
import sys

import pytest

from lm.distributed import devices
from lm.distributed.communicator import OneProcess
from lm.errors import UserError
from tests.commands import ROOT

# A Saver, a session and an exchange each would make the pools of the process, if they came first.
_COUNT_THREADS = """
import os, sys
from lm.config_file import load_config_file

load_config_file("config_gru")  # it imports TensorFlow, as silently as the programs do
assert not {"keras", "matplotlib"} & set(sys.modules)
os.write(2, b"heard again")
import tensorflow.compat.v1 as tf
from lm.distributed.communicator import OneProcess
from lm.distributed.devices import session_config, start_tensorflow

threads = start_tensorflow(1, intra_op=int(sys.argv[1]))
with tf.Graph().as_default():
    product = tf.matmul(*[tf.random.uniform([500, 500])] * 2)
    tf.get_variable("v", [])
    tf.train.Saver()
    config = session_config(threads, OneProcess())
    with tf.Session() as other, tf.Session(config=config) as session:
        other.run(product)
        session.run(product)
print(len(os.listdir("/proc/self/task")))
tf.keras.layers  # can still be had
"""


def count_threads(intra_op: int) -> int:
    command = [sys.executable, "-c", _COUNT_THREADS, str(intra_op)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100)
    assert result.stderr.startswith(b"heard again")
    return int(result.stdout)


def test_a_process_has_as_many_threads_as_it_was_told():
    assert count_threads(7) - count_threads(2) == 5


def test_each_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch):
    """Only the number of GPUs is made up: no test has one."""
    monkeypatch.setattr(devices.tf.config, "list_physical_devices", lambda kind: ["GPU"] * 2)
    comm = OneProcess()
    comm.local_rank, comm.local_size = 1, 2
    config = devices.session_config(devices.Threads(1, 1), comm)
    assert config.gpu_options.visible_device_list == "1" and devices.device_name(1) == "GPU:1"
    comm.local_size = 3
    with pytest.raises(UserError, match="3 ranks on this host but 2 visible GPUs: start one rank"):
        devices.session_config(devices.Threads(1, 1), comm)
