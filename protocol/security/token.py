"""The token of a run, which its processes and control clients send without certificates.

Loopback addresses are open to every user of a machine. So the scheduler demands a token that only
the run's user can read (``RUN_DIR/token``, mode 0600). A client first checks that the listening
process is this user's, or root's. After a scheduler's death, any user can take its port for a
moment.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import pwd
import secrets
import socket as sockets
import struct
from collections.abc import Iterator
from pathlib import Path

from penstock.host.errors import ConfigError, LostMemberError
from penstock.host.trust import objection
from penstock.protocol.security.addresses import is_loopback
from penstock.protocol.security.folders import read_private, write_private

TOKEN_FILE = "token"
_LISTEN = "0A"
_UCRED = struct.Struct("=iII")
"""``struct ucred``: pid, uid, gid (unix(7))."""
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def token_path(run_dir: Path) -> Path:
    """Returns the path of a run's token."""
    return run_dir / TOKEN_FILE


def ensure_token(run_dir: Path) -> None:
    """Makes the token of a run that is not active, if none exists or others may have read it.

    Raises:
        ConfigError: the token cannot be written.
    """
    path = token_path(run_dir)
    try:
        status = path.lstat()
        safe = not objection(status, (0,)) and status.st_size > 0
    except FileNotFoundError:
        safe = False
    if not safe:
        write_private(path, secrets.token_hex(32).encode())


def read_token(path: Path) -> str:
    """Returns the token.

    Raises:
        ConfigError: there is none, or others can read it.
    """
    token = read_private(path, links=False).decode("ascii", errors="replace").strip()
    if not token.isalnum():
        raise ConfigError(f"{path}: is no token; the next start of the run writes one")
    return token


def same_token(given: str, own: str) -> bool:
    """Returns whether two tokens are equal, in a time that does not depend on the position of a
    difference.
    """
    return hmac.compare_digest(given.encode(errors="replace"), own.encode())


def check_listener(address: str) -> None:
    """Refuses to send the token to another user: checks the owner of the process that listens on a
    loopback ``address`` (``host:port``). The owner of other addresses is unknown.

    Raises:
        LostMemberError: no process listens there, or another user's does.
    """
    if _loopback_place(address) and not refuse_foreign_listener(address):
        raise LostMemberError(f"no process listens on {address}")


def refuse_foreign_listener(address: str) -> bool:
    """Refuses a loopback ``address`` (``host:port``) on which another user's process listens;
    returns whether any process listens.

    Raises:
        LostMemberError: another user's process listens.
    """
    place = _loopback_place(address)
    owners = set(_listeners(*place)) if place else set()
    if foreign := owners - {0, os.geteuid()}:
        raise LostMemberError(
            f"{address}: a process of user {min(foreign)} listens there, and this run is of user"
            f" {os.geteuid()}: nothing is sent to it"
        )
    return bool(owners)


def describe_listener(address: str) -> str:
    """Returns the process that listens on ``address`` (``host:port``) of this machine, as far as
    this user may read /proc.
    """
    host, _, port = address.rpartition(":")
    listeners = sorted(set(_sockets_at(host.strip("[]"), int(port))))
    if not listeners:
        return "no process is seen to listen there"
    user, inode = listeners[0]
    pid = _process_with(inode)
    process = "a process" if pid is None else f"process {pid}"
    return f"{process} of {user_name(user)} listens there"


def user_name(user: int) -> str:
    """Returns ``user 1000 (alice)``, or the number alone where it has no name."""
    try:
        return f"user {user} ({pwd.getpwuid(user).pw_name})"
    except KeyError:
        return f"user {user}"


def refuse_foreign_owner(name: str) -> None:
    """Refuses a local socket on which another user's process listens. ``name`` is a path, or an
    abstract name that begins with ``@``. A socket without a listener is not refused.

    Raises:
        LostMemberError: another user's process listens.
    """
    place = f"\0{name[1:]}" if name.startswith("@") else name
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(place)
        except OSError:
            return
        pid, user = peer_process(probe)
    if user not in (0, os.geteuid()):
        raise LostMemberError(
            f"{name}: process {pid} of user {user} listens there, and this run is of user"
            f" {os.geteuid()}: nothing is sent to it"
        )


def peer_process(connection: sockets.socket) -> tuple[int, int]:
    """Returns the process at the other end of a local connection, and its user."""
    raw = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _UCRED.size)
    pid, user, _ = _UCRED.unpack(raw)
    return pid, user


def _loopback_place(address: str) -> tuple[str, int] | None:
    """Returns host and port of an address on this machine that every user reaches."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return (host, int(port)) if is_loopback(host) and port.isdecimal() else None


def _listeners(host: str, port: int) -> Iterator[int]:
    """Yields the users with sockets that would accept a connection to ``host:port``."""
    return (user for user, _ in _sockets_at(host, port))


def _process_with(inode: int) -> int | None:
    """Returns the process that has a socket open; None: another user's, which cannot be seen."""
    link = f"socket:[{inode}]"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(path) == link for path in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue  # ended meanwhile, or another user's
    return None


def _sockets_at(host: str, port: int) -> Iterator[tuple[int, int]]:
    """Yields user and inode of the sockets that would accept a connection to ``host:port``.
    Addresses in net/tcp (proc(5)) are words in the machine's byte order, here little-endian.
    """
    hosts = {"127.0.0.1", "::1"} if host == "localhost" else {host}
    for name in _TABLES:
        try:
            lines = Path(name).read_text().splitlines()[1:]
        except OSError:
            continue  # a kernel without this kind of address
        for line in lines:
            fields = line.split()
            place, _, number = fields[1].partition(":")
            if fields[3] != _LISTEN or int(number, 16) != port:
                continue
            words = bytes.fromhex(place)
            raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            listening = ipaddress.ip_address(raw)
            # gRPC listens on 127.0.0.1 with a socket of both kinds, as ::ffff:127.0.0.1.
            mapped = getattr(listening, "ipv4_mapped", None) or listening
            if str(mapped) in hosts or mapped.is_unspecified:
                yield int(fields[7]), int(fields[9])
