"""Where results go: a JSON file, and a table for people."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import logging
import os
import platform
import socket
import sys
from typing import Any

from lm.distributed.cores import count_cores
from lm.errors import UserError

_logger = logging.getLogger("lm")


def make_directory(path: str) -> None:
    """Make the directory of results, before hours of measurements.

    Raises:
      UserError: It cannot be written to.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"cannot write to the directory {path}")


def environment_facts() -> dict[str, Any]:
    """Return what a reader needs to repeat a measurement: command, machine, versions, load."""
    versions = {"python": platform.python_version()}
    for package in ("tensorflow", "tensorflow-cpu", "horovod", "torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": " ".join(["python -m lm.benchmark", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cores": count_cores(),
        # Above 0 before the start, someone else was using the cores.
        "load_average_before": os.getloadavg()[0],
        "versions": versions,
    }


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_json(directory: str, stem: str, record: dict[str, Any]) -> None:
    """Write a record to `directory/stem.json`."""
    path = os.path.join(directory, f"{stem}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(_plain(record), file, indent=2)
        file.write("\n")
    _logger.info("wrote %s", path)


def _plain(value: Any) -> Any:
    """Named tuples become objects, and infinity, which JSON does not have, null."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and abs(value) == float("inf"):
        return None
    return value
