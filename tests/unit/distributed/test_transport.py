"""The fabrics of a host, and the transport that $NETWORK selects."""

import pytest

from lm.distributed import transport
from lm.errors import UserError


@pytest.fixture(autouse=True)
def programs(monkeypatch, tmp_path):
    """Return a function that replaces a program, on a host without a selected transport."""
    for name in ("NETWORK", *transport.SELECTIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    find_fabric = transport.find_fabric
    find_fabric.cache_clear()

    def replace(name, output):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{output}'\n")
        (tmp_path / name).chmod(0o755)

    yield replace
    find_fabric.cache_clear()


def test_the_fastest_active_port_is_found(tmp_path, programs):
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "100 Gb/sec (4X EDR)"),
        ("mlx5_1", "4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("mlx5_2", "1: DOWN", "400 Gb/sec (4X NDR)"),
        ("broken", "4: ACTIVE", ""),
    ):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text(f"{rate}\n")
    assert transport.find_fabric(str(tmp_path)) == ("mlx5_1", 200)
    programs("fi_info", "provider: tcp;ofi_rxm\nprovider: cxi\n    fabric: cxi")
    assert transport.find_fabric(str(tmp_path / "other")) == ("cxi", 0)
    programs("fi_info", "provider: tcp;ofi_rxm\nprovider: shm")
    assert transport.find_fabric(str(tmp_path / "third")) is None


def test_the_transport_depends_on_the_fabric(monkeypatch):
    monkeypatch.setattr(transport, "find_fabric", lambda: None)
    assert transport.transport_defaults()["OMPI_MCA_pml"] == "ob1"
    monkeypatch.setattr(transport, "find_fabric", lambda: transport.Fabric("mlx5_0", 100))
    assert transport.transport_defaults() == {"OMPI_MCA_btl": "^openib"}
    with monkeypatch.context() as gloo:
        gloo.setenv("HOROVOD_CONTROLLER", "gloo")
        assert transport.transport_defaults() == {}
    monkeypatch.setenv("NETWORK", "tcp")
    assert transport.transport_defaults()["OMPI_MCA_pml"] == "ob1"
    monkeypatch.setenv("OMPI_MCA_pml", "cm")  # the user's choice
    assert transport.transport_defaults() == {}


@pytest.mark.parametrize(
    "name, components, message",
    [
        ("infiniband", "", "NETWORK must be auto, tcp, ucx or ofi, not 'infiniband'"),
        ("ucx", "mca:pml:ob1:", "NETWORK=ucx, but this Open MPI has no UCX: set NETWORK=tcp"),
        ("ofi", "mca:mtl:ofi:", "libfabric finds no fabric on this host"),
    ],
)
def test_a_missing_transport_is_an_error_with_a_fix(
    monkeypatch, programs, name, components, message
):
    monkeypatch.setattr(transport, "find_fabric", lambda: None)
    programs("ompi_info", components)
    monkeypatch.setenv("NETWORK", name)
    with pytest.raises(UserError, match=message):
        transport.transport_defaults()
