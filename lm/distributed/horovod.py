"""Horovod, over MPI, Gloo or NCCL; the only module that imports it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lm.distributed import mpirun
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.startup import import_tensorflow

_DEFAULTS = {
    # A rank that waits gives its core away: spinning inside MPI, Horovod's thread took it from
    # the computation (58 ms per step instead of 42, two ranks of one thread each).
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Ranks of one host exchange through shared memory. Letting the kernel copy from one process to
    # the other instead, Open MPI's default, took 5 % more of config_small's step.
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    # Open MPI's default without "put". With it, what a rank must hear before it sends on comes
    # after all the data under way, and the two directions of a slow network take turns: 274 ms,
    # not 143, for 16 MB at 1 Gbit/s. (btl_tcp_links=2 helps as well, but hung while connecting.)
    "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
    # Ranks wait for as long as rank 0 evaluates; the stall check would warn after a minute.
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    # Fusing would pick the buffers by timing, and with them the order of the sums: with it, two
    # runs on three or more ranks differ in the last bits. Our few large gradients gain nothing.
    "HOROVOD_FUSION_THRESHOLD": "0",
}
# Left out where the user has set anything of this kind: a rules file goes before all the rest.
_TUNED = "OMPI_MCA_coll_tuned_"
_TUNED_DEFAULTS = {
    _TUNED + "use_dynamic_rules": "1",
    _TUNED + "dynamic_rules_filename": str(Path(__file__).with_name("open_mpi_rules.conf")),
}
_GLOO_SERVER = "HOROVOD_GLOO_RENDEZVOUS_ADDR"  # where Gloo's ranks meet

_PROBED = 1000  # different numbers; more are the same again
_MOST_PROBED = 1 << 24  # 64 MB: no algorithm is known to change at more


class HorovodCommunicator(Communicator):
    """The ranks of an MPI, Gloo or NCCL job, by way of Horovod.

    Args:
      size: The number of processes that the launcher says it started.
      timeline: Whether `start_timeline` will be called.

    Raises:
      UserError: Horovod is missing or sees a different number: the processes would train the same
        model side by side and overwrite each other's files. Or it was told to exchange by Gloo,
        but nothing brings the ranks together.
    """

    def __init__(self, size: int, timeline: bool = False) -> None:
        _set_environment(timeline)
        _check_gloo()
        _allow_many_files()
        hvd = _import_horovod(size)
        # All ranks must know each other before anything can be exchanged. The thread that it starts
        # adds up the gradients.
        from lm import kernels  # not above: it imports TensorFlow

        with kernels.subnormals_are_zero():
            hvd.init()
        if hvd.size() != size:
            raise UserError(
                f"the launcher started {size} processes, but Horovod sees {hvd.size()}: it was"
                " built for another MPI than this launcher's; run run_scripts/setup.sh with it in"
                " PATH"
            )
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self._concat_session: Optional[tuple] = None

    @property
    def backend(self) -> str:
        import tensorflow as tf

        backend = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        nccl = self._hvd.nccl_built() and tf.config.list_physical_devices("GPU")
        return f"{backend}, and NCCL between GPUs" if nccl else backend

    @property
    def settings(self) -> dict[str, str]:
        names = [*_DEFAULTS, *(name for name in os.environ if name.startswith(_TUNED))]
        return {name: os.environ[name] for name in names if name in os.environ}

    def why_inexact(self, sizes: Collection[int]) -> str:
        if self.size <= 2:  # a + b is b + a
            return ""
        if self.backend != "MPI":
            return f"{self.backend} adds up in an order of its own"
        if os.environ.get("HOROVOD_FUSION_THRESHOLD") != "0":
            return "with HOROVOD_FUSION_THRESHOLD the order of the sums is a matter of timing"
        # Tried, not told by the settings: a parameter file, or a component that only some builds
        # of Open MPI have, may choose another algorithm.
        for size in sorted({min(size, _MOST_PROBED) for size in sizes}):
            if not self._adds_neighbours_first(size):
                return f"the exchange adds up {size:,} numbers in an order of its own"
        return ""

    def distribute(self, optimizer):
        # Sum, not the default Average: each rank's loss is already its part of the global
        # loss, also where the ranks have different numbers of rows.
        return self._hvd.DistributedOptimizer(optimizer, op=self._hvd.Sum)

    def sum(self, tensor, name: str):
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name)

    def broadcast(self, tensor, name: str):
        return self._hvd.broadcast(tensor, root_rank=0, name=name)

    def start_timeline(self, path: str) -> None:
        self._hvd.start_timeline(path)

    def stop_timeline(self) -> None:
        self._hvd.stop_timeline()

    def hooks(self) -> list:
        return [_broadcast_hook(self._hvd)]

    def concat(self, array: np.ndarray) -> np.ndarray:
        if self._concat_session is None:
            self._concat_session = self._build_concat()
        session, payload_ph, joined = self._concat_session
        payload = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        every_byte = session.run(joined, {payload_ph: payload}).tobytes()
        return np.frombuffer(every_byte, array.dtype).reshape(-1, *array.shape[1:])

    def gather(self, value: Any) -> list:
        # JSON has no bare newline, so a newline can end each rank's part.
        payload = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8)
        return [json.loads(line) for line in self.concat(payload).tobytes().splitlines()]

    def _adds_neighbours_first(self, size: int) -> bool:
        """Add up random numbers over the ranks, and compare with ((a0 + a1) + (a2 + a3)) + ..."""
        import tensorflow.compat.v1 as tf

        random = np.random.default_rng(0)
        sums = random.standard_normal((self.size, min(size, _PROBED)), np.float32)
        own = np.resize(sums[self.rank], size)
        while len(sums) > 1:
            sums = sums[::2] + sums[1::2]
        with tf.Graph().as_default(), tf.device("cpu:0"):
            own_ph = tf.placeholder(tf.float32, [size])
            total = self.sum(own_ph, f"probe_{size}")
            with tf.Session(config=tf.ConfigProto(device_count={"GPU": 0})) as session:
                found = session.run(total, {own_ph: own})
        return np.array_equal(found, np.resize(sums[0], size))

    def _build_concat(self) -> tuple:
        import tensorflow.compat.v1 as tf

        # A graph of its own: it is needed before the training graph exists and after it is
        # finalized. Without GPUs, whose memory is not its business.
        with tf.Graph().as_default():
            payload_ph = tf.placeholder(tf.uint8, [None])
            with tf.device("cpu:0"):
                joined = self._hvd.allgather(payload_ph, name="concat")
            session = tf.Session(config=tf.ConfigProto(device_count={"GPU": 0}))
        return session, payload_ph, joined


def _broadcast_hook(hvd):
    """A hook that gives all ranks rank 0's variables before the first step.

    Horovod's own hook does not exist for TensorFlow 2.16 and later.
    """
    import tensorflow.compat.v1 as tf

    class BroadcastHook(tf.train.SessionRunHook):
        def begin(self):
            # Global variables only: the recurrent state is local and differs by rank.
            self._broadcast_op = hvd.broadcast_variables(tf.global_variables(), root_rank=0)

        def after_create_session(self, session, coord):
            session.run(self._broadcast_op)

    return BroadcastHook()


def _set_environment(timeline: bool) -> None:
    if not any(name.startswith(_TUNED) for name in os.environ):
        os.environ.update(_TUNED_DEFAULTS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if timeline:
        # Not always: from the start on, its writer turns in a loop that takes a third of a core.
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    mpirun.find_open_mpi()


def _check_gloo() -> None:
    # Horovod would crash (signal 11) without a word.
    for name in ("HOROVOD_CPU_OPERATIONS", "HOROVOD_CONTROLLER"):
        if os.environ.get(name, "").lower() == "gloo" and _GLOO_SERVER not in os.environ:
            raise UserError(
                f"{name}=gloo, but {_GLOO_SERVER} is not set: start the ranks with `horovodrun"
                f" --gloo`, which sets both, or unset {name} to exchange by MPI"
            )


def _allow_many_files() -> None:
    # Rank 0 has a connection to each rank on other hosts: 1,000 ranks are more than the 1,024 open
    # files that are usual leave room for.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _import_horovod(size: int):
    try:
        import_tensorflow()
        import tensorflow as tf

        # The only part of Horovod that would import Keras at once, which takes long; not used here.
        unused = types.SimpleNamespace(SyncBatchNormalization=None)
        sys.modules.setdefault("horovod.tensorflow.sync_batch_norm", unused)
        try:
            import horovod.tensorflow as hvd
        except tf.errors.NotFoundError as error:  # a library that Horovod was built with is gone
            raise ImportError(error.message) from error
    except ImportError as error:
        raise UserError(
            f"the launcher started {size} processes, but Horovod cannot be imported ({error}):"
            " run run_scripts/setup.sh, or start one process"
        ) from error
    return hvd


def horovod_version() -> Optional[str]:
    """Return the version of the Horovod that is installed, or None."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def horovod_build() -> dict[str, Any]:
    """Tell the version of the Horovod that is installed and what it was built with.

    Raises:
      ImportError: There is none.
    """
    import horovod.tensorflow as hvd

    parts = ("MPI", "Gloo", "NCCL", "CUDA")
    built = {part: bool(getattr(hvd, f"{part.lower()}_built")()) for part in parts}
    return {"version": horovod_version(), **built}
