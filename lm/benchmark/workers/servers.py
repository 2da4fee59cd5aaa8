"""What a worker process can be asked to do; each method's arguments and result are JSON."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any, Optional

from lm.benchmark.workers.workload import load_words
from lm.config_file import load_config_file
from lm.data.batches import TrainBatches, rows_of_rank
from lm.distributed.communicator import Communicator
from lm.model.shape import step_flops
from lm.startup import import_tensorflow


class StepServer:
    """Trains on one rank.

    Args:
      comm: The ranks.
      contestant: "ours", "tensorflow" or a name of `lm/benchmark/peers/torch.py`.
      config_file: Name or path, as of --config; it may bring the network.
      config: The fields of the Config.
      threads: Threads inside an operation.
      batch_sizes: Global batches that may be asked for.
      data_path: Directory of a corpus, or None for random words.
    """

    def __init__(
        self,
        comm: Communicator,
        contestant: str,
        config_file: str,
        config: dict[str, Any],
        threads: int,
        batch_sizes: Sequence[int],
        data_path: Optional[str],
    ):
        self._file = load_config_file(config_file)
        self._comm, self._threads = comm, threads
        self._config = type(self._file.config)(**config)
        words = load_words(self._config, max(batch_sizes), data_path)
        self._vocab_size = words.vocab_size
        self._batches = {
            size: TrainBatches(
                words.ids, size, self._config.num_steps, rows_of_rank(size, comm.rank, comm.size)
            )
            for size in batch_sizes
        }
        self._steps = self._build(contestant, batch_sizes)
        self._index = 0

    def _build(self, contestant: str, batch_sizes: Sequence[int]) -> dict:
        if not contestant.startswith("torch"):
            import_tensorflow()
        if contestant == "ours":
            from lm.benchmark.workers import ours

            return ours.build_steps(
                self._config,
                self._file.functions,
                self._vocab_size,
                batch_sizes,
                self._comm,
                self._session_config(),
            )
        sized = dataclasses.replace(self._config, batch_size=batch_sizes[0])
        if contestant == "tensorflow":
            from lm.benchmark.peers import tensorflow as peer_tensorflow

            # The tutorial left the number of operations at a time to TensorFlow: all cores.
            session_config = self._session_config(inter_op=self._threads)
            step = peer_tensorflow.build_step(sized, self._vocab_size, session_config)
        else:
            from lm.benchmark.peers import torch as peer_torch

            step = peer_torch.build_step(sized, self._vocab_size, contestant, self._threads)
        return {(batch_sizes[0], True): step}

    def _session_config(self, inter_op: int = 1):
        from lm.distributed import devices

        threads = devices.start_tensorflow(self._comm.local_size, self._threads, inter_op)
        return devices.session_config(threads, self._comm)

    def vocab_size(self) -> int:
        """Return the number of words."""
        return self._vocab_size

    def kernels(self) -> str:
        """Return what computes our step."""
        from lm import kernels  # not above: it imports TensorFlow

        return kernels.description()

    def step_flops(self) -> Optional[int]:
        """Return the operations of a step's matrix products; None for a config file's network."""
        if not self._file.functions.is_built_in:
            return None
        return step_flops(self._config, self._vocab_size)

    def steps(
        self, batch_size: int, count: int, untimed: int, exchange: bool = True
    ) -> dict[str, Any]:
        """Take some steps one after the other.

        Returns:
          `seconds` and `input_seconds` of a step, both means, the `losses` and `grad_norms` of
          all, and this process's `peak_rss` in bytes.
        """
        batches, step = self._batches[batch_size], self._steps[batch_size, exchange]
        told, input_seconds = [], 0.0
        for index in range(untimed + count):
            if index == untimed:
                start, input_seconds = time.perf_counter(), 0.0
            input_start = time.perf_counter()
            window = batches.window(self._index % batches.steps_per_epoch)
            self._index += 1
            input_seconds += time.perf_counter() - input_start
            told.append(step(*window))
        seconds = time.perf_counter() - start
        losses, grad_norms = zip(*told)
        return {
            "seconds": seconds / count,
            "input_seconds": input_seconds / count,
            "losses": losses,
            "grad_norms": grad_norms,
            "peak_rss": _peak_rss(),
        }

    def gemm(self, size: int, count: int) -> float:
        """Return the operations per second of a product of two square matrices."""
        from lm.benchmark.workers.gemm_peak import gemm_peak

        return gemm_peak(size, count, self._config.precision, self._session_config())


class ExchangeServer:
    """Exchanges buffers by way of Horovod, as training does."""

    def __init__(self, comm: Communicator):
        self._comm, self._sums = comm, {}

    def allreduce(self, sizes: Sequence[int], count: int, untimed: int) -> float:
        """Return the mean seconds of summing float32 buffers, all at once, over the ranks.

        Args:
          sizes: Bytes of each buffer.
          count: Times to do it.
          untimed: Times to do it before that.
        """
        key = tuple(sizes)
        if key not in self._sums:
            self._sums[key] = self._build_sum(key)
        session, sum_ops = self._sums[key]
        for _ in range(untimed):
            session.run(sum_ops)
        start = time.perf_counter()
        for _ in range(count):
            session.run(sum_ops)
        return (time.perf_counter() - start) / count

    def _build_sum(self, sizes: tuple[int, ...]):
        import tensorflow.compat.v1 as tf

        from lm.distributed.devices import session_config, start_tensorflow

        threads = start_tensorflow(self._comm.local_size, intra_op=1)
        with tf.Graph().as_default():
            sums = []
            for index, size in enumerate(sizes):
                buffer = tf.get_variable(f"buffer_{index}", initializer=tf.zeros([size // 4]))
                name = f"allreduce_{len(self._sums)}_{index}"
                sums.append(self._comm.sum(tf.identity(buffer), name))
            session = tf.Session(config=session_config(threads, self._comm))
            session.run(tf.global_variables_initializer())
        # Not a tf.group: TensorFlow's optimizer would drop the exchanges that it waits for.
        return session, [each.op for each in sums]


def _peak_rss() -> int:
    # Not getrusage, whose peak a process inherits from the one that started it.
    with open("/proc/self/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read())[1]) * 1024
