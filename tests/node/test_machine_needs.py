"""What every run needs of its machine, asked before anything is started."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from penstock.daemons.node.preparing.machine import (
    ADDRESS_SPACE_BYTES,
    check_address_space,
    check_loopback,
    check_processes,
    check_shared_memory,
)
from penstock.host.errors import CapacityError, ConfigError


def test_shared_memory_that_is_missing_or_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_shared_memory(tmp_path)
    with pytest.raises(ConfigError, match=r"shm: is not a folder, .* mount a tmpfs"):
        check_shared_memory(tmp_path / "shm")
    flags = os.statvfs_result((0,) * 8 + (os.ST_RDONLY, 255))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: flags)
        with pytest.raises(ConfigError, match="is mounted read-only"):
            check_shared_memory(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="this user may not write there"):
        check_shared_memory(tmp_path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.7"])
def test_loopback(host: str) -> None:
    check_loopback("a", host)


def test_an_address_of_no_interface() -> None:
    """198.51.100.0/24 is reserved for documentation (RFC 5737)."""
    with pytest.raises(ConfigError, match=r"host of a = '198\.51\.100\.7': .*Cannot assign"):
        check_loopback("a", "198.51.100.7")


def test_processes_of_another_namespace(tmp_path: Path) -> None:
    check_processes(Path("/proc"), os.getpid())
    with pytest.raises(ConfigError, match=r"cannot read it .* mount -t proc"):
        check_processes(tmp_path, 7)
    (tmp_path / "self").symlink_to("4711")
    with pytest.raises(ConfigError, match="has the pid 4711 instead of 7"):
        check_processes(tmp_path, 7)


def test_address_space() -> None:
    check_address_space(resource.RLIM_INFINITY)
    check_address_space(ADDRESS_SPACE_BYTES)
    with pytest.raises(CapacityError, match=r"may have 1,000,000 bytes of address space \(ulimit"):
        check_address_space(1_000_000)
