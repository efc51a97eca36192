"""Addresses of the hosts that an engine names, as the other nodes reach them."""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from penstock.host.errors import ConfigError

LOOPBACK = "127.0.0.1"
SCONTROL_TIMEOUT_S = 20.0
_ANY_PORT = 9
"""Connecting a datagram socket sends nothing: the port does not matter."""

Find = Callable[[Sequence[str]], Mapping[str, str]]


def find_addresses(hosts: Sequence[str]) -> Mapping[str, str]:
    """Returns the numeric addresses of hosts by name: as the system resolves it, else as Slurm
    knows it (``NodeAddr``). A host that neither knows is left out.
    """
    addresses = {host: address for host in hosts if (address := _resolved(host)) is not None}
    strange = [host for host in hosts if host not in addresses]
    return addresses | _known_to_slurm(strange) if strange else addresses


def own_address_towards(address: str) -> str | None:
    """Returns the address by which this machine reaches another one; None without a way there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def addresses_of(
    hosts: Sequence[str],
    engine: str,
    find: Find = find_addresses,
    own_towards: Callable[[str], str | None] = own_address_towards,
) -> tuple[str, ...]:
    """Returns the addresses of all hosts as seen from the first host, on which this runs.

    Many systems resolve their own name to a loopback address, which other hosts cannot use. The
    first host then gets the address from which it reaches another host.

    Raises:
        ConfigError: a host has no address, or one that the others cannot reach.
    """
    known = find(hosts)
    unknown = [host for host in hosts if host not in known]
    if unknown:
        raise ConfigError(
            f"{engine}: {', '.join(unknown[:8])} has no address here: neither the system's resolver"
            " nor scontrol knows one; set the addresses of all nodes in cluster.nodes"
        )
    addresses = [known[host] for host in hosts]
    if is_loopback(addresses[0]):
        other = next((address for address in addresses if not is_loopback(address)), None)
        addresses[0] = addresses[0] if other is None else own_towards(other) or addresses[0]
    stuck = [host for host, address in zip(hosts, addresses, strict=True) if is_loopback(address)]
    if 0 < len(stuck) < len(hosts):
        raise ConfigError(
            f"{engine}: {', '.join(stuck)} resolve to a loopback address on {hosts[0]}, which other"
            " nodes cannot reach; fix /etc/hosts there, or set the addresses of all nodes in"
            " cluster.nodes"
        )
    return tuple(addresses)


def is_loopback(address: str) -> bool:
    """Returns whether a numeric address stays on its machine; names never do."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_own(host: str) -> bool:
    """Returns whether a process of this machine can listen on ``host``."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _resolved(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _known_to_slurm(hosts: Sequence[str]) -> dict[str, str]:
    """Asks scontrol, where there is one, once for all. ``NodeAddr`` may be a name itself."""
    try:
        answer = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", ",".join(hosts)],
            capture_output=True,
            text=True,
            timeout=SCONTROL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    named = re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", answer.stdout, re.MULTILINE)
    return {
        host: address
        for host, name in named
        if host in hosts and (address := _resolved(name)) is not None
    }
