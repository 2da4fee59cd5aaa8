"""The communicator for several ranks: Horovod over MPI, Gloo or NCCL.

No other module imports Horovod.
"""

import functools
import json
import os
import sys
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.distributed.communicator import Communicator
from lm.distributed.launch import launched_size
from lm.distributed.transport import SELECTIONS, selected_transport, transport_defaults
from lm.errors import UserError, first_line
from lm.system import script
from lm.tensorflow_import import cpu_session

_FUSION = "HOROVOD_FUSION_THRESHOLD"
_DEFAULTS = {
    # Let a waiting rank yield its core. Otherwise, Horovod's thread spins inside MPI on a core that
    # the computation needs (58 instead of 42 ms per step on two ranks with one thread each).
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Exchange through shared memory between the ranks of a host. Open MPI's default, copies by the
    # kernel, made a step of config_small 5% slower. With huge pages, these copies are
    # faster, but print errors if ranks may not read each other's memory (docs/performance.md).
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    # Open MPI's default without "put". With "put", acknowledgments queue behind all data in
    # flight, and the two directions of a slow network take turns (docs/performance.md).
    "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
    # Ranks wait while rank 0 evaluates. The stall check would warn after a minute.
    "HOROVOD_STALL_CHECK_DISABLE": "1",
}
# Set these defaults only if the user has not set any variable with this prefix, because a rules
# file overrides the user's settings with this prefix.
_TUNED = "OMPI_MCA_coll_tuned_"
_TUNED_DEFAULTS = {
    _TUNED + "use_dynamic_rules": "1",
    _TUNED + "dynamic_rules_filename": str(Path(__file__).with_name("open_mpi_rules.conf")),
}

_NUM_RANDOM = 1000  # random numbers in a probe; longer arrays repeat them
_LARGEST_PROBE = 1 << 24  # numbers (64 MB); above this size, no known algorithm changes


class HorovodCommunicator(Communicator):
    """The ranks of an MPI, Gloo or NCCL job with `size` processes."""

    def __init__(self, size: int) -> None:
        hvd = import_horovod()
        self._on_gpu = bool(tf.config.list_physical_devices("GPU"))
        _set_environment(self._on_gpu)
        # Horovod starts the thread that sums the gradients.
        with kernels.subnormals_are_zero():
            hvd.init()
        if hvd.size() != size:
            raise UserError(
                f"the launcher started {size} processes, but Horovod sees {hvd.size()}, because it"
                " was built with a different MPI: use the MPI of the setup, or run"
                f" {script('setup.sh')} with your Open MPI 4 in PATH and a new directory in VENV"
            )
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        self.backend = "MPI" if hvd.mpi_enabled() else "Gloo"
        self.transport = selected_transport() if hvd.mpi_enabled() else "TCP"
        if self._on_gpu and hvd.nccl_built():
            self.backend += ", and NCCL between GPUs"

    @property
    def settings(self) -> dict[str, str]:
        names = [*_DEFAULTS, _FUSION, *SELECTIONS]
        names += [name for name in os.environ if name.startswith(_TUNED)]
        return {name: os.environ[name] for name in names if name in os.environ}

    def why_inexact(self, sizes: Collection[int]) -> str:
        if self.size <= 2:  # a + b equals b + a
            return ""
        if self.backend != "MPI":
            return f"{self.backend} chooses its own summation order"
        if os.environ.get(_FUSION) != "0":
            return f"with {_FUSION} the summation order is a matter of timing"
        # Test the sums instead of reading the settings: a parameter file, or a component that only
        # some builds of Open MPI have, may select a different algorithm.
        for size in sorted({min(size, _LARGEST_PROBE) for size in sizes}):
            if not all(self.gather(self._sums_neighbors_first(size))):
                return f"the exchange adds up {size:,} numbers in its own order"
        return ""

    def distribute(self, optimizer):
        # Use Sum instead of Horovod's default Average, because the loss of each rank is already
        # divided by the size of the global batch, and ranks may have different numbers of rows.
        return self._hvd.DistributedOptimizer(optimizer, op=self._hvd.Sum)

    def sum(self, tensor, name: str):
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name)

    def broadcast(self, tensor, name: str):
        return self._hvd.broadcast(tensor, root_rank=0, name=name)

    def broadcast_variables(self):
        # Horovod's session hook does not exist in TensorFlow 2.16 and later. In place, because a
        # copy of a large embedding would need as much memory. Horovod creates an operation for each
        # device. It blocks a thread, so the ranks would wait for each other forever if they started
        # these operations in different orders.
        by_device: dict[str, list[tf.Variable]] = {}
        for variable in tf.global_variables():
            by_device.setdefault(variable.device, []).append(variable)
        done = tf.no_op()
        for variables in by_device.values():
            with tf.control_dependencies([done]):
                done = self._hvd.broadcast_variables(variables, root_rank=0, inplace=True)
        return done

    def concat(self, array: np.ndarray) -> np.ndarray:
        session, payload_ph, joined = self._concat_graph
        payload = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        all_bytes = session.run(joined, {payload_ph: payload}).tobytes()
        return np.frombuffer(all_bytes, array.dtype).reshape(-1, *array.shape[1:])

    def gather(self, value: Any) -> list:
        # JSON escapes newlines, so a newline can terminate the value of each rank.
        payload = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8)
        return [json.loads(line) for line in self.concat(payload).tobytes().splitlines()]

    def _sums_neighbors_first(self, size: int) -> bool:
        """Whether the exchange sums random numbers as ((a0 + a1) + (a2 + a3)) + ..."""
        random = np.random.default_rng(0)
        sums = random.standard_normal((self.size, min(size, _NUM_RANDOM)), np.float32)
        own = np.resize(sums[self.rank], size)
        while len(sums) > 1:
            sums = sums[::2] + sums[1::2]
        with tf.Graph().as_default(), tf.device("cpu:0"):
            own_ph = tf.placeholder(tf.float32, [size])
            total = self.sum(own_ph, f"probe_{size}")
            with cpu_session() as session:
                found = session.run(total, {own_ph: own})
        return np.array_equal(found, np.resize(sums[0], size))

    @functools.cached_property
    def _concat_graph(self) -> tuple:
        # Use a separate graph, because exchanges happen before the training graph exists and after
        # it is finalized.
        with tf.Graph().as_default():
            payload_ph = tf.placeholder(tf.uint8, [None])
            with tf.device("cpu:0"):
                joined = self._hvd.allgather(payload_ph, name="concat")
            return cpu_session(), payload_ph, joined


def _set_environment(on_gpu: bool) -> None:
    if not any(name.startswith(_TUNED) for name in os.environ):
        os.environ.update(_TUNED_DEFAULTS)
    for name, value in {**_DEFAULTS, **transport_defaults()}.items():
        os.environ.setdefault(name, value)
    if not on_gpu:
        # Fused buffers depend on timing, and the summation order depends on the buffers: runs on
        # three or more ranks would differ in the last bits. Runs on GPUs are not exact anyway.
        os.environ.setdefault(_FUSION, "0")


def import_horovod() -> types.ModuleType:
    """Import Horovod without Keras.

    Raises:
      UserError: If Horovod cannot be imported.
    """
    # This unused module of Horovod imports Keras, which takes long.
    unused = types.SimpleNamespace(SyncBatchNormalization=None)
    sys.modules.setdefault("horovod.tensorflow.sync_batch_norm", unused)
    try:
        import horovod.tensorflow as hvd
    except (ImportError, tf.errors.NotFoundError) as error:  # Horovod or a library is missing
        raise UserError(
            f"the launcher started {launched_size()} processes, but Horovod cannot be imported"
            f" by {sys.executable} ({first_line(error)}): `source .venv/bin/activate`, run"
            f" {script('setup.sh')}, build Horovod (docs/installation.md), or start one process"
        ) from error
    return hvd
