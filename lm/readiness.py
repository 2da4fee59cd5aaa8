"""What ranks check together before a training: versions, devices, exchange, speed, disk."""

from __future__ import annotations

import collections
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from lm.agreement import check_agreement, code_checksum
from lm.checklist import Checklist
from lm.distributed import Communicator, horovod_build
from lm.errors import EveryRankError, UserError
from lm.session import (
    choose_threads,
    device_name,
    host_cores,
    session_config,
    silence_banner,
    unbind_from_core,
)

_SETUP = "run run_scripts/setup.sh on every host"
_KNOWN_GOOD = {"tensorflow": "2.18.1", "horovod": "0.28.1"}  # other pairs may not even build
_EXCHANGED_BYTES = 16 << 20  # near the gradients of config_small
_MIN_BYTES_PER_SECOND = 100e6  # about an Ethernet of 1 Gbit/s
_MIN_FREE_BYTES = 2 << 30  # checkpoints of config_large, several of them
_PI_POINTS = 4_000_000  # a rank; some tenths of a second
_MIN_EFFICIENCY = 0.6

Facts = Sequence[Mapping[str, Any]]  # by rank


class ReadinessJob(NamedTuple):
    """A check-up of the ranks."""

    output_dir: str

    def facts(self) -> dict[str, Any]:
        """Return nothing: ranks that differ are to be a line of the check-up, not its end."""
        return {}


def check_ranks(job: ReadinessJob, comm: Communicator) -> None:
    """Check all ranks; rank 0 prints the lines.

    Raises:
      EveryRankError: A check has failed.
    """
    checklist = Checklist(silent=not comm.is_chief)
    unbind_from_core()
    silence_banner()
    facts = comm.gather(_own_facts(comm))
    _check_versions(checklist, facts)
    _check_sameness(checklist, facts)
    _check_devices(checklist, facts)
    with tf.Graph().as_default(), tf.Session(config=_session_config(comm, facts)) as session:
        values_ph = tf.placeholder(tf.float32, [None])
        summed = comm.sum(values_ph, "readiness")
        _check_exchange(checklist, comm, lambda values: session.run(summed, {values_ph: values}))
    _check_scaling(checklist, comm)
    if comm.is_chief:
        check_output_dir(checklist, job.output_dir)
    checklist.conclude()
    num_failures = comm.gather(checklist.num_failures)[0]
    if num_failures:
        raise EveryRankError(f"{num_failures} check(s) failed; see the remedies above")


def _own_facts(comm: Communicator) -> dict[str, Any]:
    gpus, device_error = len(tf.config.list_physical_devices("GPU")), None
    try:
        session_config(
            choose_threads(None, None, comm.local_size), comm.local_rank, comm.local_size
        )
    except UserError as error:
        device_error = str(error)
    return {
        "host": socket.gethostname(),
        "local_size": comm.local_size,
        "backend": comm.backend,
        "cores": len(host_cores()),
        "gpus": gpus,
        "device": device_name(comm.local_rank),
        "device_error": device_error,
        "nvidia_driver": os.path.exists("/proc/driver/nvidia/version"),
        "build": horovod_build(),
        "same": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "horovod": horovod_build()["version"],
            "numpy": np.__version__,
            "code": code_checksum(),
        },
    }


def _check_versions(checklist: Checklist, facts: Facts) -> None:
    versions, build = facts[0]["same"], facts[0]["build"]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "code")
    good = (3, 9) <= sys.version_info[:2] <= (3, 12) and all(
        versions[name] == version for name, version in _KNOWN_GOOD.items()
    )
    wanted = ", ".join(f"{name} {version}" for name, version in _KNOWN_GOOD.items())
    checklist.judge(good, "versions", found, f"tested with Python 3.9-3.12, {wanted}: {_SETUP}")
    built = ", ".join(name for name, value in build.items() if value is True)
    lacks_nccl = any(rank["gpus"] for rank in facts) and not build["NCCL"]
    checklist.judge(
        not lacks_nccl,
        "horovod",
        f"built with {built or 'nothing'}; the ranks use {facts[0]['backend']}",
        f"GPUs without NCCL exchange through the host's memory: {_SETUP}",
    )


def _check_sameness(checklist: Checklist, facts: Facts) -> None:
    try:
        check_agreement([rank["same"] for rank in facts])
    except UserError as error:
        checklist.fail("same", str(error), f"copy the same checkout to every host and {_SETUP}")
    else:
        checklist.ok("same", f"code and packages are the same on all {len(facts)} ranks")


def _check_devices(checklist: Checklist, facts: Facts) -> None:
    hosts = collections.Counter(rank["host"] for rank in facts)
    found = ", ".join(f"{host}: {count} rank(s)" for host, count in hosts.items())
    checklist.ok("ranks", f"{len(facts)} ranks have met; {found}")
    devices = ", ".join(f"{r['host']}/{r['device']}" for r in facts)
    errors = [rank["device_error"] for rank in facts if rank["device_error"]]
    unused = [rank["host"] for rank in facts if rank["nvidia_driver"] and not rank["gpus"]]
    crowded = [rank["host"] for rank in facts if rank["local_size"] > rank["cores"]]
    if errors:
        checklist.fail("devices", devices, errors[0])
    elif unused:
        checklist.warn(
            "devices",
            f"{devices}; TensorFlow sees no GPU on {unused[0]}, which has an NVIDIA driver",
            f"{_SETUP} (tensorflow[and-cuda]), or look at CUDA_VISIBLE_DEVICES",
        )
    else:
        checklist.judge(
            not crowded,
            "devices",
            f"{devices}; cores: {', '.join(str(rank['cores']) for rank in facts)}",
            f"more ranks than cores on {', '.join(sorted(set(crowded)))}: start fewer there",
        )


def _session_config(comm: Communicator, facts: Facts) -> tf.ConfigProto:
    # The same decision on all ranks: a rank on the CPU and one on a GPU cannot exchange.
    if any(rank["device_error"] for rank in facts):
        return tf.ConfigProto(device_count={"GPU": 0})
    threads = choose_threads(None, None, comm.local_size)
    return session_config(threads, comm.local_rank, comm.local_size)


def _check_exchange(
    checklist: Checklist, comm: Communicator, allreduce: Callable[[np.ndarray], np.ndarray]
) -> None:
    result = allreduce(np.ones(1000, np.float32))
    checklist.judge(
        bool((result == comm.size).all()),
        "allreduce",
        f"the sum of ones over the ranks is {result[0]:g}, as it should be {comm.size}",
        f"Horovod does not fit this MPI: {_SETUP}",
        fatal=True,
    )
    latency = _best_seconds(comm, lambda: allreduce(np.ones(1, np.float32)))
    values = np.ones(_EXCHANGED_BYTES // 4, np.float32)
    seconds = _best_seconds(comm, lambda: allreduce(values))
    speed = _EXCHANGED_BYTES / seconds
    checklist.judge(
        speed >= _MIN_BYTES_PER_SECOND,
        "bandwidth",
        f"{_EXCHANGED_BYTES >> 20} MiB in {1000 * seconds:.1f} ms ({speed / 1e6:.0f} MB/s), one"
        f" number in {1000 * latency:.2f} ms",
        "a slow network, or the wrong one: choose the interface with -mca btl_tcp_if_include",
    )


def _check_scaling(checklist: Checklist, comm: Communicator) -> None:
    """Estimate pi on rank 0 alone, then on all ranks at once, each with as many points."""
    random = np.random.default_rng(comm.rank)
    hits = []
    alone = _best_seconds(comm, lambda: comm.is_chief and hits.append(_count_hits(random)))
    together = _best_seconds(comm, lambda: hits.append(_count_hits(random)))
    counts = comm.gather([sum(hits), len(hits)])
    pi = 4 * sum(h for h, _ in counts) / (_PI_POINTS * sum(n for _, n in counts))
    efficiency = alone / together
    checklist.judge(
        abs(pi - np.pi) < 0.01 and efficiency >= _MIN_EFFICIENCY,
        "scaling",
        f"pi is about {pi:.4f}; {comm.size} ranks do the work of"
        f" {comm.size * efficiency:.1f} ({efficiency:.0%})",
        "the ranks take each other's cores: start with --bind-to none, fewer ranks, or stop"
        " other jobs on the hosts",
    )


def _count_hits(random: np.random.Generator) -> int:
    x, y = random.random((2, _PI_POINTS), np.float32)
    return int(np.count_nonzero(x * x + y * y < 1))


def _best_seconds(comm: Communicator, work: Callable[[], Any], turns: int = 3) -> float:
    """Time work that starts on all ranks at once, to the end of the slowest; the best turn."""
    times = []
    for _ in range(turns):
        comm.barrier()
        start = time.perf_counter()
        work()
        times.append(max(comm.gather(time.perf_counter() - start)))
    return min(times)


def check_output_dir(checklist: Checklist, output_dir: str) -> None:
    """Check, on the host of rank 0, which alone writes, that there is a place for runs."""
    existing = os.path.abspath(output_dir)
    while not os.path.isdir(existing):  # it need not be there yet
        existing = os.path.dirname(existing)
    try:
        tempfile.TemporaryFile(dir=existing).close()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        checklist.fail(
            "output_dir",
            f"cannot write to {existing}: {error.strerror}",
            "choose another directory with --output_dir",
        )
        return
    checklist.judge(
        free >= _MIN_FREE_BYTES,
        "output_dir",
        f"{existing} is writable; {free / 2**30:.1f} GiB free",
        "checkpoints of the large config need up to 2 GiB: free some space",
    )
