"""TensorFlow's threads and the GPU of this process."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm.distributed.agreement import on_all_ranks
from lm.distributed.communicator import Communicator
from lm.distributed.cores import claim_cores, count_threads
from lm.errors import UserError
from lm.tensorflow_import import without_stderr

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

# A fork inherits the cached process ID, but not TensorFlow's threads.
_process_of_first_call = functools.cache(os.getpid)


class Device(NamedTuple):
    """The threads and the GPU of this process."""

    intra_op: int  # threads per operation
    inter_op: int  # operations that run at the same time
    gpu: int | None  # index among the GPUs that this process sees; None on a CPU

    @property
    def name(self) -> str:
        """TensorFlow's name of the device that computes."""
        return "CPU:0" if self.gpu is None else f"GPU:{self.gpu}"


def start_tensorflow(
    comm: Communicator,
    intra_op: int | None = None,
    inter_op: int | None = None,
    divides_operations: bool = True,
) -> Device:
    """Claim this rank's part of its host. All ranks call this function before using TensorFlow.

    The ranks of a host share its cores and GPUs. The arguments override the numbers of threads.
    Unless `divides_operations`, the threads compute different operations at the same time, because
    the results of some of TensorFlow's operations depend on the number of their threads.
    """
    import tensorflow.compat.v1 as tf
    from tensorflow.python.framework.config import disable_op_determinism

    # The first exchange also reports the errors of ranks that did not get this far.
    with on_all_ranks(comm):
        check_process()
        cores = claim_cores()
    share = count_threads(comm, cores)  # an exchange, even if only some ranks need it
    count = intra_op or share
    with on_all_ranks(comm):
        threads = (count, inter_op or 1) if divides_operations else (1, inter_op or count)
        _keep_conversions()
        # The first session creates the threads of all sessions without their own threads. Without
        # this session, creating a Saver would give each rank one thread per core of the host. The
        # first session also prints three lines about MLIR at every log level.
        config = _threads_config(*threads)
        config.device_count["GPU"] = 0
        with without_stderr(), tf.Graph().as_default() as graph:
            tf.Session(graph=graph, config=config).run(tf.no_op())
        # TensorFloat-32 would round the factors of float32 products to 10 bits.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    if not num_gpus:
        # Op determinism rejects the clock and random operations without a seed. On CPUs,
        # TensorFlow's operations and the kernels are deterministic without it.
        disable_op_determinism()
    host = socket.gethostname()
    found = comm.gather({"host": host, "uuid": _gpu_uuid() if num_gpus else None})
    uuids = [rank["uuid"] for rank in found if rank["host"] == host]
    with on_all_ranks(comm):
        return Device(*threads, choose_gpu(comm, num_gpus, uuids))


def check_process() -> None:
    """Check that this process is not a fork of a process that used TensorFlow: it would hang."""
    if _process_of_first_call() != os.getpid():
        raise UserError(
            "this process was forked after TensorFlow had started: start processes with"
            ' multiprocessing.get_context("spawn"), or use runs only in the forked processes'
        )


def _keep_conversions() -> None:
    """Let XLA keep all conversions to bfloat16. Call this before XLA reads its flags."""
    flags, name = os.environ.get("XLA_FLAGS", ""), "--xla_allow_excess_precision"
    is_file = flags and not flags.startswith("-")  # the name of a file with flags
    if name not in flags and not is_file:
        os.environ["XLA_FLAGS"] = f"{flags} {name}=false".strip()


def choose_gpu(comm: Communicator, num_visible: int, uuids: Sequence[str | None]) -> int | None:
    """Return the index of this rank's GPU among its visible GPUs.

    `uuids` has the first visible GPU of each rank on this host.
    """
    if not num_visible:
        return None
    # One process per GPU: two processes would compete for the memory of the GPU.
    if comm.local_size <= num_visible:
        return comm.local_rank
    # Slurm's --gpus-per-task and similar settings show each rank only its own GPU.
    if None not in uuids and len(set(uuids)) == len(uuids):
        return 0
    raise UserError(
        f"{comm.local_size} ranks on this host but {num_visible} visible GPUs: start one rank per"
        " GPU, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def _gpu_uuid() -> str | None:
    """Return the UUID of the first visible GPU, or None if the driver does not report it."""
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        calls = cuda.cuInit, cuda.cuDeviceGet, cuda.cuDeviceGetUuid_v2
    except (OSError, AttributeError):
        return None
    init, get, get_uuid = calls
    failed = init(0) or get(ctypes.byref(device), 0) or get_uuid(uuid, device)
    return None if failed else uuid.raw.hex()


def session_config(device: Device) -> tf.ConfigProto:
    """Return the config of a session on this process's device."""
    config = _threads_config(device.intra_op, device.inter_op)
    # Otherwise, the threads of the first run of this process would also start the operations of
    # later runs. They may be fewer.
    config.use_per_session_threads = True
    if device.gpu is not None:
        config.gpu_options.visible_device_list = str(device.gpu)
        config.gpu_options.allow_growth = True
    return config


def _threads_config(intra_op: int, inter_op: int) -> tf.ConfigProto:
    import tensorflow.compat.v1 as tf
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

    config = tf.ConfigProto(
        intra_op_parallelism_threads=intra_op,
        inter_op_parallelism_threads=inter_op,
        allow_soft_placement=True,  # for tf.device("/gpu:0") in networks on hosts without a GPU
    )
    # With this optimization, results of some networks differ between runs of the same graph.
    config.graph_options.rewrite_options.memory_optimization = RewriterConfig.NO_MEM_OPT
    # A session keeps folded constants until its end, and initial zeros are as large as variables.
    config.graph_options.rewrite_options.experimental_disable_compressed_tensor_optimization = True
    config.graph_options.optimizer_options.max_folded_constant_in_bytes = 2**20
    return config
