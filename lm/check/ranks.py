"""The checks that all ranks run together: software, devices, sums, bandwidth and scaling."""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.distributed.agreement import by_rank, first_mismatch, platform_facts
from lm.distributed.communicator import Communicator
from lm.distributed.cores import claim_cores, count_sharers
from lm.distributed.devices import Device, session_config, start_tensorflow
from lm.distributed.transport import Fabric, find_fabric
from lm.errors import EveryRankError
from lm.system import package_version, script

_SETUP = f"run {script('setup.sh')} on every host"
TENSORFLOWS = ("2.18.1", "2.21.0")  # the versions in constraints/
_HOROVOD = "0.28.1"
_EXCHANGED_BYTES = 16 << 20  # about the size of config_small's gradients
_MIN_BYTES_PER_SECOND = 100e6  # about 1 Gbit/s Ethernet
_MIN_SHARE_OF_FABRIC = 0.05  # the ranks also add numbers and copy them
_NVIDIA_DRIVER = "/proc/driver/nvidia/version"
_NUMBERS = 8_000_000  # the computation on them takes a few tenths of a second
_MIN_EFFICIENCY = 0.6

Facts = Sequence[Mapping[str, Any]]  # one mapping per rank


class Result(NamedTuple):
    """The result of a check. If there is a fix, the check found a problem."""

    name: str
    text: str
    fix: str = ""
    prevents_training: bool = False

    @property
    def status(self) -> str:
        """OK, WARN or FAIL."""
        if not self.fix:
            return "OK"
        return "FAIL" if self.prevents_training else "WARN"

    def __str__(self) -> str:
        fix = f"\n{'':18}-> {self.fix}" if self.fix else ""
        return f"{self.status:4}  {self.name:10}  {self.text}{fix}"


def check_ranks(comm: Communicator) -> None:
    """Run all checks. Rank 0 prints the results."""
    statuses = []
    for result in _checks(comm):
        statuses.append(result.status)
        if comm.is_rank_0:
            print(result, flush=True)
    failed = comm.gather(statuses.count("FAIL"))[0]
    if comm.is_rank_0:
        verdict = "not ready" if failed else "ready"
        print(f"{verdict}: {failed} FAIL, {statuses.count('WARN')} WARN", flush=True)
    if failed:
        raise EveryRankError("not ready to train: see the lines marked FAIL above")


def _checks(comm: Communicator) -> Iterator[Result]:
    device = start_tensorflow(comm)
    facts = comm.gather(_own_facts(comm, device))
    yield from check_software(facts)
    yield from check_devices(facts)
    yield check_kernels(facts)
    yield check_network(facts)
    yield from check_exchange(comm, session_config(device), bytes_per_second_of_fabric(facts))
    yield check_scaling(comm)


def _own_facts(comm: Communicator, device: Device) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "sharers": count_sharers(comm),
        "backend": comm.backend,
        "transport": comm.transport,
        "fabric": find_fabric(),
        "cores": claim_cores(),
        "device": device.name,
        "has_unused_gpu": os.path.exists(_NVIDIA_DRIVER)
        and not tf.config.list_physical_devices("GPU"),
        "kernels": kernels.description(),
        "arithmetic": kernels.arithmetic("float32"),
        "lacks_kernels": kernels.is_missing(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "horovod": package_version("horovod"),
            "numpy": np.__version__,
        },
        "software": platform_facts(),
    }


def check_software(facts: Facts) -> Iterator[Result]:
    """Check that the versions are tested and equal on all ranks, and that GPUs use NCCL."""
    versions, backend = facts[0]["versions"], facts[0]["backend"]
    mismatch = first_mismatch([rank["versions"] for rank in facts])
    is_tested = (
        not mismatch
        and (3, 10) <= sys.version_info[:2] <= (3, 13)
        and versions["tensorflow"] in TENSORFLOWS
        and versions["horovod"] == _HOROVOD
    )
    text = mismatch or ", ".join(f"{name} {version}" for name, version in versions.items())
    fix = (
        "this program is tested with equal versions on all ranks, Python 3.10 to 3.13,"
        f" tensorflow {' or '.join(TENSORFLOWS)}, and horovod {_HOROVOD}: {_SETUP}"
    )
    yield Result("versions", text, "" if is_tested else fix)
    lacks_nccl = any(rank["device"] != "CPU:0" for rank in facts) and "NCCL" not in backend
    fix = f"without NCCL, GPUs exchange through the memory of the host: USE_GPU=1, and {_SETUP}"
    yield Result("horovod", f"the ranks use {backend}", fix if lacks_nccl else "")
    mismatch = first_mismatch([rank["software"] for rank in facts])
    if mismatch:
        fix = f"copy the same checkout to every host, and {_SETUP}"
        yield Result("same", f"the ranks disagree on {mismatch}", fix, prevents_training=True)
    else:
        yield Result("same", f"all {len(facts)} ranks have the same code and packages")


def check_devices(facts: Facts) -> Iterator[Result]:
    """List hosts, devices and cores, and check for unused GPUs and too many ranks."""
    hosts = by_rank([rank["host"] for rank in facts])
    yield Result("ranks", f"{len(facts)} ranks are connected: {hosts}")
    problems = [
        f"TensorFlow does not see the GPUs of {rank['host']}: see docs/gpu.md"
        for rank in facts
        if rank["has_unused_gpu"]
    ]
    problems += [
        f"there are more ranks than cores on {rank['host']}: start fewer ranks there"
        for rank in facts
        if rank["sharers"] > rank["cores"]
    ]
    devices = by_rank([rank["device"] for rank in facts])
    cores = by_rank([rank["cores"] for rank in facts])
    yield Result("devices", f"{devices}; cores: {cores}", problems[0] if problems else "")


def check_kernels(facts: Facts) -> Result:
    """Check that the compiled operations of all ranks compute the same float32 results."""
    descriptions = [rank["kernels"] for rank in facts]
    fix = ""
    if any(rank["lacks_kernels"] for rank in facts):
        fix = f"training works, but more slowly: {_SETUP}"
    elif len({rank["arithmetic"] for rank in facts}) > 1:
        fix = (
            "training works, but results depend on the placement of the ranks: set LM_KERNELS_ISA"
            " to an instruction set that all hosts have, and use the same compiler"
        )
    return Result("kernels", by_rank(descriptions), fix)


def check_network(facts: Facts) -> Result:
    """Check that the job uses the fabrics of its hosts."""
    fabrics = [Fabric(*rank["fabric"]) if rank["fabric"] else None for rank in facts]
    names = by_rank([f"{f.name} ({f.gbps:g} Gbit/s)" if f else "no fabric" for f in fabrics])
    text = f"the transport is {facts[0]['transport']}; the hosts have {names}"
    fix = ""
    if _needs_fabric(facts) and facts[0]["transport"].startswith("TCP"):
        fix = (
            "the job does not use the fabric: unset NETWORK, OMPI_MCA_pml and OMPI_MCA_btl, or use"
            " an Open MPI with UCX or OFI"
        )
    elif any(fabrics) and not all(fabrics):
        fix = "Open MPI may select different transports on these hosts: set NETWORK=tcp"
    return Result("network", text, fix)


def _needs_fabric(facts: Facts) -> bool:
    """Return whether the ranks are on several hosts that all have a fabric."""
    return len({rank["host"] for rank in facts}) > 1 and all(rank["fabric"] for rank in facts)


def bytes_per_second_of_fabric(facts: Facts) -> float:
    """Return the lowest bandwidth of the hosts' fabrics, or 0 if it is unknown or not needed."""
    if not _needs_fabric(facts):
        return 0.0
    return min(Fabric(*rank["fabric"]).gbps for rank in facts) * 1e9 / 8


def check_exchange(
    comm: Communicator, config: tf.ConfigProto, bytes_per_second_of_fabric: float
) -> Iterator[Result]:
    """Check that the ranks compute correct sums, and measure latency and bandwidth."""
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        values_ph = tf.placeholder(tf.float32, [None])
        sum_op = comm.sum(values_ph, "check")
        one, many = (np.ones(size, np.float32) for size in (1, _EXCHANGED_BYTES // 4))
        result = session.run(sum_op, {values_ph: many})
        latency = _best_seconds(comm, lambda: session.run(sum_op, {values_ph: one}))
        seconds = _best_seconds(comm, lambda: session.run(sum_op, {values_ph: many}))
    barrier = _best_seconds(comm, comm.barrier)
    text, fix = f"the sum of ones over the ranks is {comm.size}", ""
    right = comm.gather(bool((result == comm.size).all()))
    if wrong := [rank for rank, is_right in enumerate(right) if not is_right]:
        text = f"the sum of ones over the ranks is not {comm.size} on ranks {wrong}"
        fix = f"if it is wrong on all ranks, Horovod was built for a different MPI: {_SETUP}"
    yield Result("allreduce", text, fix, prevents_training=True)
    speed = _EXCHANGED_BYTES / seconds
    text = (
        f"the ranks sum {_EXCHANGED_BYTES >> 20} MiB in {1000 * seconds:.1f} ms"
        f" ({speed / 1e6:.0f} MB/s), and one number in {1000 * latency:.2f} ms; a barrier takes"
        f" {1000 * barrier:.2f} ms"
    )
    if bytes_per_second_of_fabric:
        text += f"; this is {speed / bytes_per_second_of_fabric:.0%} of the fabric's bandwidth"
    fix = (
        "the network is slow, or MPI uses the wrong interface: select an interface with"
        " OMPI_MCA_btl_tcp_if_include (TCP) or UCX_NET_DEVICES (UCX)"
    )
    needed = max(_MIN_BYTES_PER_SECOND, _MIN_SHARE_OF_FABRIC * bytes_per_second_of_fabric)
    yield Result("bandwidth", text, fix if speed < needed else "")


def check_scaling(comm: Communicator) -> Result:
    """Compare the time of a computation on only rank 0 with its time on all ranks together."""
    alone = _best_seconds(comm, lambda: comm.is_rank_0 and _compute())
    efficiency = alone / _best_seconds(comm, _compute)
    text = (
        f"{comm.size} ranks compute {comm.size * efficiency:.1f} times as fast as one rank"
        f" (efficiency {efficiency:.0%})"
    )
    fix = (
        "the ranks compete for cores: start mpirun with --bind-to none or with fewer ranks, or"
        " stop other jobs on the hosts"
    )
    return Result("scaling", text, fix if efficiency < _MIN_EFFICIENCY else "")


def _compute() -> None:
    np.sqrt(np.random.default_rng(0).random(_NUMBERS, np.float32)).sum()


def _best_seconds(comm: Communicator, work: Callable) -> float:
    """Return the seconds until the slowest rank finishes, in the best of three attempts."""
    times = []
    for _ in range(3):
        comm.barrier()
        start = time.perf_counter()
        work()
        times.append(max(comm.gather(time.perf_counter() - start)))
    return min(times)
