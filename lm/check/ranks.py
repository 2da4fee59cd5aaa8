"""The checks that all ranks run together: software, devices, sums, bandwidth and scaling."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.check.gpus import why_no_gpu
from lm.distributed.agreement import by_rank, first_mismatch, platform_facts
from lm.distributed.communicator import Communicator
from lm.distributed.devices import count_cores, count_sharers, session_config, start_tensorflow
from lm.distributed.horovod import horovod_build
from lm.errors import EveryRankError

_SETUP = "run run_scripts/setup.sh on every host"
TENSORFLOWS = ("2.18.1", "2.21.0")  # the versions in constraints/
_HOROVOD = "0.28.1"
_MIN_FREE_BYTES = 2 << 30  # several checkpoints of config_large
_EXCHANGED_BYTES = 16 << 20  # about the size of config_small's gradients
_MIN_BYTES_PER_SECOND = 100e6  # about 1 Gbit/s Ethernet
_NUMBERS = 8_000_000  # the computation on them takes a few tenths of a second
_MIN_EFFICIENCY = 0.6

OK, WARN, FAIL = "OK", "WARN", "FAIL"
Facts = Sequence[Mapping[str, Any]]  # one mapping per rank


class Checklist:
    """Prints the results of checks, unless it is silent, and counts them."""

    def __init__(self, silent: bool = False):
        self._print = (lambda line: None) if silent else partial(print, flush=True)
        self.counts = {OK: 0, WARN: 0, FAIL: 0}

    def add(self, status: str, name: str, result: str, fix: str = "") -> None:
        """Print a result, and its fix unless the status is OK."""
        self.counts[status] += 1
        self._print(f"{status:4}  {name:10}  {result}")
        if status != OK:
            self._print(f"{'':18}-> {fix}")

    def conclude(self) -> None:
        """Print the last line: whether training can start."""
        verdict = "not ready" if self.counts[FAIL] else "ready"
        self._print(f"{verdict}: {self.counts[FAIL]} FAIL, {self.counts[WARN]} WARN")


def check_ranks(output_dir: str, comm: Communicator) -> None:
    """Run all checks. Rank 0 prints the results."""
    checklist = Checklist(silent=not comm.is_rank_0)
    device = start_tensorflow(comm)
    facts = comm.gather({**_own_facts(comm), "device": device.name})
    check_versions(checklist, facts)
    check_equal_software(checklist, facts)
    check_devices(checklist, facts)
    check_kernels(checklist, facts)
    check_exchange(checklist, comm, session_config(device))
    check_scaling(checklist, comm)
    if comm.is_rank_0:
        check_output_dir(checklist, output_dir)
    checklist.conclude()
    if comm.gather(checklist.counts[FAIL])[0]:
        raise EveryRankError("not ready to train: see the lines marked FAIL above")


def _own_facts(comm: Communicator) -> dict[str, Any]:
    build = horovod_build()
    return {
        "host": socket.gethostname(),
        "sharers": count_sharers(comm.local_size),
        "backend": comm.backend,
        "cores": count_cores(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "no_gpu": why_no_gpu(),
        "build": build,
        "kernels": kernels.description(),
        "arithmetic": kernels.arithmetic("float32"),
        "lacks_kernels": kernels.is_missing(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "horovod": build["version"],
            "numpy": np.__version__,
        },
        "software": platform_facts(),
    }


def check_versions(checklist: Checklist, facts: Facts) -> None:
    """Check that the versions are tested and equal, and how Horovod was built."""
    versions, build = facts[0]["versions"], facts[0]["build"]
    mismatch = first_mismatch([rank["versions"] for rank in facts])
    tested = (
        not mismatch
        and (3, 10) <= sys.version_info[:2] <= (3, 13)
        and versions["tensorflow"] in TENSORFLOWS
        and versions["horovod"] == _HOROVOD
    )
    checklist.add(
        OK if tested else WARN,
        "versions",
        mismatch or ", ".join(f"{name} {version}" for name, version in versions.items()),
        "this program is tested with equal versions on all ranks, Python 3.10 to 3.13,"
        f" tensorflow {' or '.join(TENSORFLOWS)}, and horovod {_HOROVOD}: {_SETUP}",
    )
    built = ", ".join(name for name, value in build.items() if value is True)
    lacks_nccl = any(rank["gpus"] for rank in facts) and not build["NCCL"]
    checklist.add(
        WARN if lacks_nccl else OK,
        "horovod",
        f"built with {built or 'nothing'}; the ranks use {facts[0]['backend']}",
        f"without NCCL, GPUs exchange through the memory of the host: USE_GPU=1, and {_SETUP}",
    )


def check_equal_software(checklist: Checklist, facts: Facts) -> None:
    """Check that all ranks have the same code, packages and kind of device."""
    mismatch = first_mismatch([rank["software"] for rank in facts])
    if mismatch:
        fix = f"copy the same checkout to every host, and {_SETUP}"
        checklist.add(FAIL, "same", f"the ranks disagree on {mismatch}", fix)
    else:
        checklist.add(OK, "same", f"all {len(facts)} ranks have the same code and packages")


def check_devices(checklist: Checklist, facts: Facts) -> None:
    """List hosts, devices and cores, and check for unused GPUs and too many ranks."""
    hosts = by_rank([rank["host"] for rank in facts])
    checklist.add(OK, "ranks", f"{len(facts)} ranks are connected: {hosts}")
    problems = [f"no GPU on {rank['host']}: {rank['no_gpu']}" for rank in facts if rank["no_gpu"]]
    problems += [
        f"there are more ranks than cores on {rank['host']}: start fewer ranks there"
        for rank in facts
        if rank["sharers"] > rank["cores"]
    ]
    fix = problems[0] if problems else ""
    devices = by_rank([rank["device"] for rank in facts])
    cores = by_rank([rank["cores"] for rank in facts])
    checklist.add(WARN if fix else OK, "devices", f"{devices}; cores: {cores}", fix)


def check_kernels(checklist: Checklist, facts: Facts) -> None:
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
    result = by_rank(descriptions) if len(set(descriptions)) > 1 else descriptions[0]
    checklist.add(WARN if fix else OK, "kernels", result, fix)


def check_exchange(checklist: Checklist, comm: Communicator, config: tf.ConfigProto) -> None:
    """Check that the ranks compute correct sums, and measure latency and bandwidth."""
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        values_ph = tf.placeholder(tf.float32, [None])
        sum_op = comm.sum(values_ph, "check")
        one, many = (np.ones(size, np.float32) for size in (1, _EXCHANGED_BYTES // 4))
        result = session.run(sum_op, {values_ph: many})
        latency = _best_seconds(comm, lambda: session.run(sum_op, {values_ph: one}))
        seconds = _best_seconds(comm, lambda: session.run(sum_op, {values_ph: many}))
    barrier = _best_seconds(comm, comm.barrier)
    checklist.add(
        OK if (result == comm.size).all() else FAIL,
        "allreduce",
        f"the sum of ones over the ranks is {result[0]:g}, and must be {comm.size}",
        f"Horovod was built for a different MPI: {_SETUP}",
    )
    speed = _EXCHANGED_BYTES / seconds
    checklist.add(
        OK if speed >= _MIN_BYTES_PER_SECOND else WARN,
        "bandwidth",
        f"the ranks sum {_EXCHANGED_BYTES >> 20} MiB in {1000 * seconds:.1f} ms"
        f" ({speed / 1e6:.0f} MB/s), and one number in {1000 * latency:.2f} ms; a barrier takes"
        f" {1000 * barrier:.2f} ms",
        "the network is slow, or MPI uses the wrong interface: select an interface with"
        " -mca btl_tcp_if_include",
    )


def check_scaling(checklist: Checklist, comm: Communicator) -> None:
    """Compare the time of a computation on only rank 0 with its time on all ranks together."""
    alone = _best_seconds(comm, lambda: comm.is_rank_0 and _compute())
    efficiency = alone / _best_seconds(comm, _compute)
    checklist.add(
        OK if efficiency >= _MIN_EFFICIENCY else WARN,
        "scaling",
        f"{comm.size} ranks compute {comm.size * efficiency:.1f} times as fast as one rank"
        f" (efficiency {efficiency:.0%})",
        "the ranks compete for cores: start mpirun with --bind-to none or with fewer ranks, or"
        " stop other jobs on the hosts",
    )


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


def check_output_dir(checklist: Checklist, output_dir: str) -> None:
    """Check that rank 0 can write to the directory of future runs."""
    existing = os.path.abspath(output_dir)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    try:
        tempfile.TemporaryFile(dir=existing).close()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        result = f"cannot write to {existing}: {error.strerror}"
        checklist.add(FAIL, "output_dir", result, "choose another directory with --output_dir")
        return
    checklist.add(
        OK if free >= _MIN_FREE_BYTES else WARN,
        "output_dir",
        f"{existing} is writable; {free / 2**30:.1f} GiB free",
        "checkpoints of config_large need up to 2 GiB: free some space",
    )
