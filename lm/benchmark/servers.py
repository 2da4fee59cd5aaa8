"""What a worker process can be asked to do; each method's arguments and result are JSON."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any, Optional

from lm.batches import TrainBatches, rows_of_rank
from lm.benchmark.workload import load_words
from lm.config import Config
from lm.distributed import Communicator


class StepServer:
    """Trains on one rank.

    Args:
      comm: The ranks.
      contestant: "ours", "tensorflow" or a name of `peer_torch`'s VARIANTS.
      config: The fields of the Config.
      threads: Threads inside an operation.
      batch_sizes: Global batches that may be asked for.
      data_path: Directory of a corpus, or None for random words.
    """

    def __init__(
        self,
        comm: Communicator,
        contestant: str,
        config: dict[str, Any],
        threads: int,
        batch_sizes: Sequence[int],
        data_path: Optional[str],
    ):
        self._config = Config(**config)
        self._threads = threads
        words = load_words(self._config, max(batch_sizes), data_path)
        self._batches = {
            size: TrainBatches(
                words.ids, size, self._config.num_steps, rows_of_rank(size, comm.rank, comm.size)
            )
            for size in batch_sizes
        }
        self._steps = self._build(contestant, words.vocab_size, batch_sizes, comm)
        self._index = 0
        self._gemm = None
        self._info = {"vocab_size": words.vocab_size, "local_size": comm.local_size}

    def _build(self, contestant: str, vocab_size: int, batch_sizes, comm) -> dict:
        sized = dataclasses.replace(self._config, batch_size=batch_sizes[0])
        if contestant == "ours":
            from lm.benchmark import ours

            session_config = self._session_config(inter_op=1, comm=comm)
            return ours.build_steps(self._config, vocab_size, batch_sizes, comm, session_config)
        if contestant == "tensorflow":
            from lm.benchmark import peer_tensorflow

            # The tutorial left the number of operations at a time to TensorFlow: all cores.
            session_config = self._session_config(inter_op=self._threads, comm=comm)
            step = peer_tensorflow.build_step(sized, vocab_size, session_config)
        else:
            from lm.benchmark import peer_torch

            step = peer_torch.build_step(sized, vocab_size, contestant, self._threads)
        return {(batch_sizes[0], True): step}

    def _session_config(self, inter_op: int, comm: Communicator):
        from lm.session import Threads, session_config, unbind_from_core

        unbind_from_core()
        threads = Threads(self._threads, inter_op)
        return session_config(threads, comm.local_rank, comm.local_size)

    def first_step(self) -> dict[str, Any]:
        """Take the first step of the first batch size.

        Returns:
          Its `loss` and `grad_norm`, and `vocab_size` and `local_size`.
        """
        batch_size = next(iter(self._batches))
        loss, grad_norm = self._steps[batch_size, True](*self._batches[batch_size].window(0))
        return {"loss": loss, "grad_norm": grad_norm, **self._info}

    def steps(self, batch_size: int, count: int, untimed: int, exchange: bool = True) -> dict:
        """Take some steps one after the other.

        Returns:
          `seconds` and `input_seconds` of a step, both means, and this process's `peak_rss` in
          bytes.
        """
        step, batches = self._steps[batch_size, exchange], self._batches[batch_size]
        input_seconds = 0.0
        for index in range(untimed + count):
            if index == untimed:
                start, input_seconds = time.perf_counter(), 0.0
            input_start = time.perf_counter()
            self._index += 1
            window = batches.window(self._index % batches.steps_per_epoch)
            input_seconds += time.perf_counter() - input_start
            step(*window)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds / count,
            "input_seconds": input_seconds / count,
            "peak_rss": _peak_rss(),
        }

    def gemm(self, size: int, count: int) -> float:
        """Return the operations a second of a product of two square matrices."""
        from lm.benchmark.gemm_peak import GemmPeak

        if self._gemm is None:
            config = self._session_config(inter_op=1, comm=Communicator())
            self._gemm = GemmPeak(size, self._config.precision, config)
        return self._gemm.measure(count)


class ExchangeServer:
    """Exchanges buffers by way of Horovod, as training does."""

    def __init__(self, comm: Communicator):
        import tensorflow.compat.v1 as tf

        from lm.session import Threads, session_config

        self._comm, self._tf, self._sums = comm, tf, {}
        self._session_config = session_config(Threads(1, 1), comm.local_rank, comm.local_size)

    def allreduce(self, num_bytes: int, count: int, untimed: int) -> float:
        """Return the mean seconds of summing one float32 buffer over the ranks."""
        if num_bytes not in self._sums:
            self._sums[num_bytes] = self._build_sum(num_bytes)
        session, sum_op = self._sums[num_bytes]
        for _ in range(untimed):
            session.run(sum_op)
        start = time.perf_counter()
        for _ in range(count):
            session.run(sum_op)
        return (time.perf_counter() - start) / count

    def _build_sum(self, num_bytes: int):
        tf = self._tf
        with tf.Graph().as_default():
            buffer = tf.get_variable("buffer", initializer=tf.zeros([num_bytes // 4]))
            total = self._comm.sum(tf.identity(buffer), f"allreduce_{num_bytes}")
            session = tf.Session(config=self._session_config)
            session.run(tf.global_variables_initializer())
        return session, total.op


def _peak_rss() -> int:
    # Not getrusage, whose peak a process inherits from the one that started it.
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024
