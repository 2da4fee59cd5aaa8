"""Where results go: a JSON file, and a table for people."""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import math
import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm import files
from lm.cli.tables import markdown_table
from lm.distributed.cores import count_cores

logger = logging.getLogger("lm")


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


def print_table(columns: Sequence[tuple[str, str]], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table for people.

    Args:
      columns: For each its header, and the format of its cells in the names of the rows' values.
      rows: Values by name.
    """
    cells = [[form.format_map(row) for _, form in columns] for row in rows]
    print(markdown_table([header for header, _ in columns], cells))


def write_json(stem: str, record: dict[str, Any]) -> None:
    """Write a record to `stem.json`."""
    path = f"{stem}.json"
    files.write_json(path, _plain(record))
    logger.info("wrote %s", path)


def _plain(value: Any) -> Any:
    """Named tuples become objects, and infinity and NaN, which JSON does not have, null."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
