"""The network between hosts: its hardware, and the transport with which MPI uses it."""

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from lm.errors import UserError

_TRANSPORTS = {
    "tcp": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib,ofi"},
    # "any": without InfiniBand, UCX uses shared memory and TCP.
    "ucx": {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_pml_ucx_tls": "any",
        "OMPI_MCA_pml_ucx_devices": "any",
    },
    "ofi": {"OMPI_MCA_pml": "cm", "OMPI_MCA_mtl": "ofi"},
}
_COMPONENTS = {"ucx": "mca:pml:ucx:", "ofi": "mca:mtl:ofi:"}  # text in the output of ompi_info
SELECTIONS = ("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl")
# The providers of libfabric that need a fabric. The other providers use TCP or shared memory.
_FABRIC_PROVIDERS = {"cxi", "efa", "gni", "opx", "psm2", "verbs"}
_FABRIC_DEVICES = ("/dev/infiniband/uverbs", "/dev/hfi1", "/dev/cxi")
_SECONDS = 10  # fi_info may hang in a broken driver
_PML_NAMES = {"ob1": "TCP and shared memory", "ucx": "UCX", "cm": "OFI"}


class Fabric(NamedTuple):
    """A network adapter that is faster than TCP."""

    name: str
    gbps: float  # 10^9 bit/s, or 0 if it is unknown


def transport_defaults() -> dict[str, str]:
    """Return the variables of Open MPI that select the transport of $NETWORK.

    The default is "auto": Open MPI selects the transport if this host has a fabric. Otherwise, the
    transport is TCP. Open MPI's own variables take precedence.

    Raises:
      UserError: If Open MPI or this host lacks the transport.
    """
    name = os.environ.get("NETWORK") or "auto"
    if name not in ("auto", *_TRANSPORTS):
        raise UserError(f"NETWORK must be auto, tcp, ucx or ofi, not {name!r}")
    uses_gloo = os.environ.get("HOROVOD_CONTROLLER") == "gloo"  # set by horovodrun
    if uses_gloo or any(variable in os.environ for variable in SELECTIONS):
        return {}
    if name == "auto":
        # openib, which UCX has replaced, crashes in programs with threads.
        return {"OMPI_MCA_btl": "^openib"} if find_fabric() else _TRANSPORTS["tcp"]
    if name in _COMPONENTS and not _has_component(_COMPONENTS[name]):
        raise UserError(
            f"NETWORK={name}, but this Open MPI has no {name.upper()}: set NETWORK=tcp, or install"
            f" an Open MPI with {name.upper()}"
        )
    if name == "ofi" and not find_fabric():
        raise UserError(
            "NETWORK=ofi, but libfabric finds no fabric on this host: set NETWORK=tcp, or"
            " OMPI_MCA_pml=cm with parameters of OMPI_MCA_mtl_ofi"
        )
    return _TRANSPORTS[name]


def _has_component(name: str) -> bool:
    listed = _output_of("ompi_info", "--parsable")
    return name in listed or not listed  # MPI reports a missing component, in more words


def _output_of(program: str, *arguments: str) -> str:
    """Return the output of a program, or nothing if the program is missing or hangs."""
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", "")])
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [shutil.which(program, path=path) or program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS).stdout
    return ""


@functools.cache
def find_fabric(root: str = "/") -> Fabric | None:
    """Return the fastest fabric of this host, or None.

    Linux lists InfiniBand, Omni-Path, RoCE and EFA in the same place. libfabric knows the others.
    """
    ports = []
    for port in Path(root, "sys/class/infiniband").glob("*/ports/*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a port without a rate
            if "ACTIVE" in (port / "state").read_text():
                gbps = float((port / "rate").read_text().split()[0])  # "100 Gb/sec (4X EDR)"
                ports.append(Fabric(port.parts[-3], gbps))
    if ports:
        return max(ports, key=lambda fabric: fabric.gbps)
    listed = re.findall(r"^provider: (\w+)", _output_of("fi_info"), re.MULTILINE)
    found = _FABRIC_PROVIDERS.intersection(listed)
    return Fabric(min(found), 0.0) if found else None


def selected_transport() -> str:
    """Return the transport that Open MPI uses in this process, which has initialized MPI.

    A device of a fabric is listed if this process has opened the device.
    """
    try:
        # Open MPI has no function for this. The component starts with its interface's versions.
        library = ctypes.CDLL("libmpi.so.40")  # the library that this process has loaded
        component = ctypes.c_char.in_dll(library, "mca_pml_base_selected_component")
        name = ctypes.string_at(ctypes.addressof(component) + 84).decode()
    except (OSError, ValueError):
        return "unknown"
    devices = {device for device in _open_files() if device.startswith(_FABRIC_DEVICES)}
    return ", ".join([f"{_PML_NAMES.get(name, name)} (pml {name})", *sorted(devices)])


def _open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this list is closed
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found
