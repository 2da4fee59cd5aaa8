"""The cores, threads and GPU that this process uses."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm.distributed.agreement import on_all_ranks
from lm.distributed.communicator import Communicator
from lm.errors import UserError
from lm.system import stat_fields, without_stderr

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

_CORES_AT_START = os.sched_getaffinity(0)
# More cores than any host has. The kernel keeps the cores that exist and that the container may
# use. os.cpu_count() would not do: if cores are offline, or if a container has its own /proc
# (lxcfs), the cores are not numbered from 0 to the count.
_ALL_CORES = frozenset(range(8192))
# The slots of a job that shares its hosts with other jobs: "FIRST:COUNT:TOTAL".
HOST_SLOTS = "LM_HOST_SLOTS"


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

    # The first exchange also reports the errors of ranks that did not get this far.
    with on_all_ranks(comm):
        unbind_from_core()
        count = intra_op or cores_of_rank(comm.local_size)
        threads = (count, inter_op or 1) if divides_operations else (1, inter_op or count)
        # The thread pools of the first session serve all later sessions, even if their configs
        # differ. Without this session, creating a Saver would give each rank one thread per core of
        # the host. The first session also prints three lines about MLIR at every log level.
        config = _threads_config(*threads)
        config.device_count["GPU"] = 0
        with without_stderr(), tf.Graph().as_default() as graph:
            tf.Session(graph=graph, config=config).run(tf.no_op())
        # TensorFloat-32 would round the factors of float32 products to 10 bits.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    host = socket.gethostname()
    found = comm.gather({"host": host, "uuid": _gpu_uuid() if num_gpus else None})
    uuids = [rank["uuid"] for rank in found if rank["host"] == host]
    with on_all_ranks(comm):
        return Device(*threads, _choose_gpu(comm, num_gpus, uuids))


def _choose_gpu(comm: Communicator, num_visible: int, uuids: Sequence[str | None]) -> int | None:
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
    return config


def unbind_from_core() -> None:
    """Let this process use all cores of its job, before TensorFlow starts threads.

    Open MPI binds each of one or two ranks to a single core, so most of the host would be idle. A
    binding that the user requested (taskset, srun, mpirun --bind-to) stays.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, _given_cores())
        os.sched_setaffinity(0, cores_of_slots(sorted(os.sched_getaffinity(0)), *_host_slots()))


def _given_cores() -> Collection[int]:
    bound = "OMPI_MCA_orte_bound_at_launch" in os.environ
    if not bound or "OMPI_MCA_hwloc_base_binding_policy" in os.environ:
        return _CORES_AT_START
    # Open MPI bound this process by default. Use the cores of the launcher: the first
    # ancestor outside the job. A container may hide the launcher.
    with contextlib.suppress(OSError, IndexError):
        parent = os.getppid()
        while b"OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{parent}/environ").read_bytes():
            parent = int(stat_fields(parent)[1])
        return os.sched_getaffinity(parent)
    return _ALL_CORES


def cores_of_slots(cores: Sequence[int], first: int, count: int, total: int) -> Sequence[int]:
    """Return the cores of a job that has `count` of the `total` slots of its host, from `first` on.

    Jobs in other slots get other cores. If the host has fewer cores than slots, jobs share cores.
    """
    low, high = (len(cores) * slot // total for slot in (first, first + count))
    return cores[low : max(high, low + 1)]


def _host_slots() -> tuple[int, int, int]:
    first, count, total = map(int, os.environ.get(HOST_SLOTS, "0:1:1").split(":"))
    return first, count, total


def count_cores() -> int:
    """Return the number of cores that this process was given. Undo the default binding."""
    unbind_from_core()
    _, count, total = _host_slots()
    # Round up: one thread cannot use the time of 1.5 cores.
    return math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota() * count / total))


def cores_of_rank(local_size: int) -> int:
    """Return the number of cores that this rank may use.

    The ranks of a host share its cores, unless the launcher gave each rank separate cores (srun,
    mpirun --bind-to).
    """
    return max(count_cores() // count_sharers(local_size), 1)


def count_sharers(local_size: int) -> int:
    """Return the number of ranks on this host that share this rank's cores, including itself."""
    given, parent, shares = set(_given_cores()), os.getppid(), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError, IndexError):  # the process just exited
            if int(stat_fields(pid)[1]) == parent:
                shares.append(not given.isdisjoint(os.sched_getaffinity(pid)))
    if len(shares) < local_size:  # each rank has a separate parent process
        return local_size
    return max(1, min(sum(shares), local_size))


def cpu_quota(root: str = "/") -> float:
    """Return the number of cores whose time the control groups grant this process, or infinity.

    A container may see all cores of its host. After a container has used its quota, the kernel
    stops its threads for the rest of each 0.1 s. One thread per core would be too many, because
    threads would wait most of the time. Quotas of control groups version 1 are not read.
    """
    mount, quotas = Path(root, "sys/fs/cgroup"), [math.inf]
    with contextlib.suppress(OSError):
        path = Path(root, "proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        # The limits of all parent groups apply too. A container sees its own group at the mount
        # point, and the listed path may exist only on the host.
        for group in (mount / path, *(mount / path).parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or its quota is "max"
                quota, period = map(int, (group / "cpu.max").read_text().split())
                quotas.append(quota / period)
    return min(quotas)
