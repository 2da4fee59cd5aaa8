"""What ranks check together before a training: versions, devices, exchange, speed, disk."""

from __future__ import annotations

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
from lm.check.checklist import FAIL, FAILURE, OK, WARN, Checklist
from lm.check.exchange import check_exchange, check_scaling
from lm.check.gpus import why_no_gpu
from lm.distributed.agreement import by_rank, first_mismatch, platform_facts
from lm.distributed.communicator import Communicator
from lm.distributed.devices import (
    Device,
    count_cores,
    count_sharers,
    session_config,
    start_tensorflow,
)
from lm.distributed.horovod import horovod_build
from lm.errors import EveryRankError

_SETUP = "run run_scripts/setup.sh on every host"
TENSORFLOWS = ("2.18.1", "2.20.0", "2.21.0")  # of constraints/; Horovod may not build with others
_HOROVOD = "0.28.1"
_MIN_FREE_BYTES = 2 << 30  # checkpoints of config_large, several of them

Facts = Sequence[Mapping[str, Any]]  # by rank


def check_ranks(output_dir: str, comm: Communicator) -> None:
    """Check all ranks; rank 0 prints the lines.

    Raises:
      EveryRankError: A check has failed.
    """
    checklist = Checklist(silent=not comm.is_rank_0)
    device = start_tensorflow(comm)
    facts = comm.gather(_own_facts(comm, device))
    for check in (_check_versions, _check_sameness, _check_devices, _check_kernels):
        check(checklist, facts)
    with tf.Graph().as_default(), tf.Session(config=session_config(device)) as session:
        values_ph = tf.placeholder(tf.float32, [None])
        summed = comm.sum(values_ph, "readiness")
        check_exchange(checklist, comm, lambda values: session.run(summed, {values_ph: values}))
    check_scaling(checklist, comm)
    if comm.is_rank_0:
        check_output_dir(checklist, output_dir)
    checklist.conclude()
    if comm.gather(checklist.counts[FAIL])[0]:
        raise EveryRankError(FAILURE)


def _own_facts(comm: Communicator, device: Device) -> dict[str, Any]:
    build = horovod_build()
    return {
        "host": socket.gethostname(),
        "sharers": count_sharers(comm.local_size),
        "backend": comm.backend,
        "cores": count_cores(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "device": device.name,
        "no_gpu": why_no_gpu(),
        "build": build,
        "kernels": kernels.description(),
        "lacks_kernels": kernels.is_missing(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "horovod": build["version"],
            "numpy": np.__version__,
        },
        "same": platform_facts(),
    }


def _check_versions(checklist: Checklist, facts: Facts) -> None:
    versions, build = facts[0]["versions"], facts[0]["build"]
    good = (
        (3, 10) <= sys.version_info[:2] <= (3, 13)
        and versions["tensorflow"] in TENSORFLOWS
        and versions["horovod"] == _HOROVOD
    )
    checklist.add(
        OK if good else WARN,
        "versions",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        "this program is tested with Python 3.10 to 3.13, "
        f"tensorflow {', '.join(TENSORFLOWS)}, horovod {_HOROVOD}: {_SETUP}",
    )
    unlike = first_mismatch([rank["versions"] for rank in facts])
    if unlike:
        remedy = f"training may work, but this mixture is not tested: {_SETUP}"
        checklist.add(WARN, "versions", unlike, remedy)
    built = ", ".join(name for name, value in build.items() if value is True)
    lacks_nccl = any(rank["gpus"] for rank in facts) and not build["NCCL"]
    checklist.add(
        WARN if lacks_nccl else OK,
        "horovod",
        f"built with {built or 'nothing'}; the ranks use {facts[0]['backend']}",
        f"without NCCL, GPUs exchange through the host's memory: USE_GPU=1, and {_SETUP}",
    )


def _check_sameness(checklist: Checklist, facts: Facts) -> None:
    unlike = first_mismatch([rank["same"] for rank in facts])
    found = f"all {len(facts)} ranks have the same code and packages"
    checklist.add(
        FAIL if unlike else OK,
        "same",
        f"the ranks disagree on {unlike}" if unlike else found,
        f"copy the same checkout to every host and {_SETUP}",
    )


def _check_devices(checklist: Checklist, facts: Facts) -> None:
    hosts = by_rank([rank["host"] for rank in facts])
    checklist.add(OK, "ranks", f"{len(facts)} ranks are connected: {hosts}")
    devices = by_rank([rank["device"] for rank in facts])
    unused = [f"{rank['host']}: {rank['no_gpu']}" for rank in facts if rank["no_gpu"]]
    crowded = sorted({rank["host"] for rank in facts if rank["sharers"] > rank["cores"]})
    status, remedy = OK, ""
    if unused:
        status, remedy = WARN, f"no GPU on {unused[0]}"
    elif crowded:
        status = WARN
        remedy = f"there are more ranks than cores on {', '.join(crowded)}: start fewer there"
    cores = by_rank([rank["cores"] for rank in facts])
    checklist.add(status, "devices", f"{devices}; cores: {cores}", remedy)


def _check_kernels(checklist: Checklist, facts: Facts) -> None:
    descriptions = [rank["kernels"] for rank in facts]
    lacking = [rank["kernels"] for rank in facts if rank["lacks_kernels"]]
    status, found, remedy = OK, descriptions[0], ""
    if lacking:
        status, found = WARN, lacking[0]
        remedy = f"training works, but slower than with them: {_SETUP}"
    elif len(set(descriptions)) > 1:
        status, found = WARN, by_rank(descriptions)
        remedy = (
            "training works, but its results depend on which rank has which: set LM_KERNELS_ISA"
            " to an instruction set that all hosts have, and build them with one compiler"
        )
    checklist.add(status, "kernels", found, remedy)


def check_output_dir(checklist: Checklist, output_dir: str) -> None:
    """Check, on the host of rank 0, which alone writes, that there is a place for runs."""
    existing = os.path.abspath(output_dir)
    while not os.path.exists(existing):  # it need not be there yet
        existing = os.path.dirname(existing)
    try:
        tempfile.TemporaryFile(dir=existing).close()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        found = f"cannot write to {existing}: {error.strerror}"
        checklist.add(FAIL, "output_dir", found, "choose another directory with --output_dir")
        return
    checklist.add(
        OK if free >= _MIN_FREE_BYTES else WARN,
        "output_dir",
        f"{existing} is writable; {free / 2**30:.1f} GiB free",
        "checkpoints of the large config need up to 2 GiB: free some space",
    )
