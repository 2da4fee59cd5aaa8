"""What passes between ranks, under real mpirun."""

import sys

import pytest

from tests.commands import ROOT, environment, mpirun

import subprocess


def run_ranks(num_ranks, body, timeout=60, env=None):
    """Run Python code on each rank, with `comm`, `tf` and `np` at hand."""
    code = (
        "import numpy as np, tensorflow.compat.v1 as tf\n"
        "from lm.distributed import connect\n"
        "tf.disable_eager_execution()\n"
        "comm = connect()\n" + body
    )
    result = subprocess.run(
        [*mpirun(num_ranks), sys.executable, "-c", code],
        cwd=ROOT, env=environment(**(env or {})), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gather_returns_the_values_by_rank(num_ranks):
    run_ranks(
        num_ranks,
        "for turn in range(3):\n"
        "    values = comm.gather({'rank': comm.rank, 'text': 'line\\nbreak ' * comm.rank})\n"
        "    expected = [{'rank': r, 'text': 'line\\nbreak ' * r} for r in range(comm.size)]\n"
        "    assert values == expected, values\n"
        f"assert comm.size == {num_ranks}\n",
    )


def test_gradients_are_summed_and_rows_of_a_word_merged():
    run_ranks(
        3,
        "from lm.config import Config\n"
        "from lm.optimizer import build_update\n"
        "table = tf.get_variable('t', initializer=np.zeros([4, 2], 'f'), use_resource=True)\n"
        "dense = tf.get_variable('d', initializer=np.zeros([2], 'f'), use_resource=True)\n"
        "words = [comm.rank, 3, 3]\n"  # word 3 twice on each rank, the others on one
        "loss = tf.reduce_sum(tf.gather(table, words)) + tf.reduce_sum(dense * (comm.rank + 1))\n"
        "config = Config(max_grad_norm=1e9, batch_size=1, num_steps=1)\n"
        "update = build_update(config, loss, tf.constant(1.0), tf.train.get_or_create_global_step(),"
        " 4, comm.distribute)\n"
        "with tf.Session() as session:\n"
        "    session.run(tf.global_variables_initializer())\n"
        "    norm, _ = session.run([update.grad_norm, update.train_op])\n"
        "    table, dense = session.run([table, dense])\n"
        "np.testing.assert_allclose(table, -np.array([[1, 1], [1, 1], [1, 1], [6, 6]]))\n"
        "np.testing.assert_allclose(dense, [-6, -6])\n"
        "np.testing.assert_allclose(norm, np.sqrt(6 * 1 + 2 * 36 + 2 * 36), rtol=1e-6)\n",
    )


def test_all_ranks_start_with_the_weights_of_rank_0():
    run_ranks(
        2,
        "value = tf.get_variable('v', initializer=float(comm.rank + 5), use_resource=True)\n"
        "local = tf.get_variable('l', initializer=float(comm.rank), use_resource=True,"
        " collections=[tf.GraphKeys.LOCAL_VARIABLES])\n"
        "with tf.train.SingularMonitoredSession(hooks=comm.hooks()) as session:\n"
        "    assert session.run([value, local]) == [5.0, comm.rank]\n",
    )


def test_a_launch_without_a_working_horovod_is_refused():
    """A launcher's variables with one process each: Horovod would see size 1."""
    code = "from lm.distributed import connect\nconnect()\n"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=environment(PMI_SIZE="2", PMI_RANK="0"),
    )  # fmt: skip
    assert "launcher started 2 processes, but Horovod sees 1" in result.stderr
