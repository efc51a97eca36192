"""Network interfaces that the addresses of a cluster's nodes lead over, and what they have counted.

Only what passes the kernel's network stack is counted: reads by RDMA (``cluster.fetch: nixl``) are
in ``penstock_fetch_bytes_total``.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40
"""Bytes of struct ifreq on 64 bits: a name of 16 bytes, and a struct sockaddr_in (family, port,
address) in a union of 24. See netdevice(7).
"""
_MAX_ENTRIES = 256
_ANY_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """Counters of an interface. ``bytes_per_s``: its speed in each direction; None if unknown."""

    name: str
    received_bytes: int
    sent_bytes: int
    bytes_per_s: float | None

    @classmethod
    def read(cls, name: str, root: Path = Path("/sys/class/net")) -> Interface | None:
        """Returns that of an interface; None: it is gone."""
        folder = root / name
        try:
            received = int((folder / "statistics" / "rx_bytes").read_text())
            sent = int((folder / "statistics" / "tx_bytes").read_text())
        except (OSError, ValueError):
            return None
        return cls(name=name, received_bytes=received, sent_bytes=sent, bytes_per_s=_speed(folder))


def interfaces_to(own_host: str, others: Iterable[str]) -> frozenset[str]:
    """Returns the names of the interfaces with this node's address, or with a route to the other
    hosts. Hosts without a known address are skipped.
    """
    addresses = _addresses_of(own_host)
    sources = {_source_towards(address) for host in others for address in _addresses_of(host)}
    names = {**_names_by_ipv4(), **_names_by_ipv6()}
    # Any address of 127.0.0.0/8 is the loopback interface's.
    loopback = names.get("127.0.0.1", names.get("::1"))
    interfaces = (
        loopback if ipaddress.ip_address(address).is_loopback else names.get(address)
        for address in (addresses | sources) - {""}
    )
    return frozenset(name for name in interfaces if name is not None)


def _addresses_of(host: str) -> frozenset[str]:
    try:
        entries = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return frozenset()
    return frozenset(_without_zone(entry[4][0]) for entry in entries)


def _source_towards(address: str) -> str:
    """Returns the own address from which packets to another one leave, or nothing; none is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return ""
        return _without_zone(probe.getsockname()[0])


def _without_zone(address: object) -> str:
    return str(address).partition("%")[0]


def _names_by_ipv4() -> dict[str, str]:
    """Returns own address -> interface, as the kernel lists them."""
    entries = array.array("B", bytes(_MAX_ENTRIES * _ENTRY_BYTES))
    place, _ = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iL", len(entries), place))
    length, _ = struct.unpack("iL", answer)
    raw = entries.tobytes()[:length]
    return {
        socket.inet_ntoa(raw[start + 20 : start + 24]): _label(raw[start : start + 16])
        for start in range(0, length, _ENTRY_BYTES)
    }


def _label(name: bytes) -> str:
    """Returns the interface of an address; a second address may be labelled ``eth0:1``."""
    return name.partition(b"\0")[0].decode(errors="replace").partition(":")[0]


def _names_by_ipv6() -> dict[str, str]:
    """Returns own address -> interface (proc(5), net/if_inet6)."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}  # a kernel without this kind of address
    fields = (line.split() for line in lines)
    return {str(ipaddress.ip_address(bytes.fromhex(line[0]))): line[-1] for line in fields}


def _speed(folder: Path) -> float | None:
    """Returns bytes a second each way; of devices only: virtual interfaces make numbers up."""
    if not (folder / "device").exists():
        return None
    try:
        megabits = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None  # the link is down, or the driver does not know
    return megabits * 1e6 / 8 if megabits > 0 else None
