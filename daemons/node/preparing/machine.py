"""Checks the needs of every run: writable shared memory, a loopback interface, address space, and a
/proc of its own PID namespace.

All are checked before any process starts. Missing ones would appear later as processes that die
repeatedly, or that wait for each other until a timeout.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

from penstock.config.schema import Config
from penstock.host.errors import CapacityError, ConfigError, reason
from penstock.protocol.security.addresses import is_loopback
from penstock.shm.segment import SHM_ROOT

CONNECT_S = 5.0
"""Seconds to wait for a connection over loopback."""

ADDRESS_SPACE_BYTES = 3 << 29
"""Least address space of a process with torch: its libraries, stacks and arenas of its threads. An
estimate on the small side.
"""


def check_machine(config: Config, nodes: Sequence[int]) -> None:
    """Checks this machine for ``nodes`` (indices), which will run on it.

    Raises:
        ConfigError: /proc is not this namespace's, /dev/shm cannot be written, or a node's loopback
            address cannot be reached.
        CapacityError: the address space is limited too tightly.
    """
    check_processes(Path("/proc"), os.getpid())
    check_shared_memory(SHM_ROOT)
    for node in nodes:
        entry = config.cluster.nodes[node]
        if is_loopback(entry.host):
            check_loopback(entry.name, entry.host)
    check_address_space(resource.getrlimit(resource.RLIMIT_AS)[0])


def check_processes(proc: Path, pid: int) -> None:
    """Checks that ``proc``, /proc, shows this process under its ``pid``.

    Raises:
        ConfigError: it does not, so owners of memory and locks could not be identified.
    """
    try:
        shown = os.readlink(proc / "self")
    except OSError as error:
        raise ConfigError(
            f"{proc}: cannot read it ({reason(error)}); mount it: mount -t proc proc {proc}"
        ) from error
    if shown != str(pid):
        raise ConfigError(
            f"{proc}: shows the processes of another PID namespace, in which this process has the"
            f" pid {shown} instead of {pid}; mount a /proc for this namespace, as unshare"
            " --mount-proc does"
        )


def check_shared_memory(root: Path) -> None:
    """Checks that files can be made in ``root``, /dev/shm.

    Raises:
        ConfigError: they cannot; says why.
    """
    if not root.is_dir():
        raise ConfigError(
            f"{root}: is not a folder, and runs keep their state there; mount a tmpfs"
        )
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"{root}: is mounted read-only, and the state of a run is kept there; remount it:"
            f" mount -o remount,rw {root}"
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{root}: this user may not write there, and the state of a run is kept there; its mode"
            " is usually 1777"
        )


def check_loopback(node: str, host: str) -> None:
    """Checks that this machine reaches the loopback address ``host`` of ``node``.

    Raises:
        ConfigError: it does not.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server((str(address[0]), 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.nodes: host of {node} = {host!r}: processes of this machine cannot reach each"
            f" other there ({reason(error)}); bring up the loopback interface: ip link set lo up"
        ) from error


def check_address_space(limit: int) -> None:
    """Checks the limit of a process's address space, in bytes or ``RLIM_INFINITY``.

    Raises:
        CapacityError: a process with torch does not fit.
    """
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE_BYTES:
        raise CapacityError(
            f"a process may have {limit:,} bytes of address space (ulimit -v), and one with torch"
            f" needs at least {ADDRESS_SPACE_BYTES:,}; raise the limit: ulimit -v unlimited"
        )
