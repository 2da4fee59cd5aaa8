"""What ranks check together before a training: versions, devices, exchange, speed, disk."""

from __future__ import annotations

import collections
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from lm import kernels
from lm.check.checklist import Checklist
from lm.check.exchange import check_exchange, check_scaling
from lm.distributed.agreement import by_rank, check_agreement, first_disagreement, platform_facts
from lm.distributed.communicator import Communicator
from lm.distributed.cores import count_cores, unbind_from_core
from lm.distributed.devices import (
    choose_threads,
    device_name,
    session_config,
    start_tensorflow,
)
from lm.distributed.horovod import horovod_build
from lm.errors import EveryRankError, UserError

_SETUP = "run run_scripts/setup.sh on every host"
_KNOWN_GOOD = {"tensorflow": "2.18.1", "horovod": "0.28.1"}  # other pairs may not even build
_MIN_FREE_BYTES = 2 << 30  # checkpoints of config_large, several of them

Facts = Sequence[Mapping[str, Any]]  # by rank


def check_ranks(output_dir: str, comm: Communicator) -> None:
    """Check all ranks; rank 0 prints the lines.

    Raises:
      EveryRankError: A check has failed.
    """
    checklist = Checklist(silent=not comm.is_rank_0)
    unbind_from_core()
    start_tensorflow(choose_threads(None, None, comm.local_size))
    facts = comm.gather(_own_facts(comm))
    _check_versions(checklist, facts)
    _check_sameness(checklist, facts)
    _check_devices(checklist, facts)
    _check_kernels(checklist, facts)
    with tf.Graph().as_default(), tf.Session(config=_session_config(comm, facts)) as session:
        values_ph = tf.placeholder(tf.float32, [None])
        summed = comm.sum(values_ph, "readiness")
        check_exchange(checklist, comm, lambda values: session.run(summed, {values_ph: values}))
    check_scaling(checklist, comm)
    if comm.is_rank_0:
        check_output_dir(checklist, output_dir)
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
        "cores": count_cores(),
        "gpus": gpus,
        "device": device_name(comm.local_rank),
        "device_error": device_error,
        "nvidia_driver": os.path.exists("/proc/driver/nvidia/version"),
        "build": horovod_build(),
        "kernels": kernels.description(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "horovod": horovod_build()["version"],
            "numpy": np.__version__,
        },
        "same": platform_facts(),
    }


def _check_versions(checklist: Checklist, facts: Facts) -> None:
    versions, build = facts[0]["versions"], facts[0]["build"]
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    good = (3, 9) <= sys.version_info[:2] <= (3, 12) and all(
        versions[name] == version for name, version in _KNOWN_GOOD.items()
    )
    wanted = ", ".join(f"{name} {version}" for name, version in _KNOWN_GOOD.items())
    checklist.judge(good, "versions", found, f"tested with Python 3.9-3.12, {wanted}: {_SETUP}")
    unlike = first_disagreement([rank["versions"] for rank in facts])
    if unlike:
        checklist.warn("versions", unlike, f"training may work, but nobody tests that: {_SETUP}")
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


def _check_kernels(checklist: Checklist, facts: Facts) -> None:
    descriptions = [rank["kernels"] for rank in facts]
    lacking = [found for found in descriptions if "not built" in found or "not load" in found]
    if lacking:
        remedy = f"training works, but slower than it could: {_SETUP}"
        checklist.warn("kernels", lacking[0], remedy)
    elif len(set(descriptions)) > 1:
        checklist.warn(
            "kernels",
            by_rank(descriptions),
            "training works, but results depend on which rank has which: set LM_KERNELS_ISA to one"
            " that all have",
        )
    else:
        checklist.ok("kernels", descriptions[0])


def _session_config(comm: Communicator, facts: Facts) -> tf.ConfigProto:
    # The same decision on all ranks: a rank on the CPU and one on a GPU cannot exchange.
    if any(rank["device_error"] for rank in facts):
        return tf.ConfigProto(device_count={"GPU": 0})
    threads = choose_threads(None, None, comm.local_size)
    return session_config(threads, comm.local_rank, comm.local_size)


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
