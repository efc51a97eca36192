"""A folder of keys, as one process reads it::

    KEYS/authority/    ca.pem ca.key                       stays where the keys were made
    KEYS/node.NAME/    ca.pem tls.pem tls.key              identity of the node's processes
                       server.pem server.key               for serving
                       curve.public curve.secret peers/NAME.public ...
                       metrics.sha256                      of the password of KEYS/metrics
    KEYS/control/      ca.pem tls.pem tls.key              for penstock stop and such
    KEYS/look/         ca.pem tls.pem tls.key              for penstock status
    KEYS/metrics/      ca.pem password                     for Prometheus

Files may be replaced while a run is active: clients and servers read them again for each new
connection. Unusable files (half replaced, of another authority, expired) do not replace keys that
were read before.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from penstock.host.errors import ConfigError, reason
from penstock.host.trust import kind_of
from penstock.protocol.security.identity import Identity, Role

MAX_FILE_BYTES = 64 * 1024
WARN_DAYS = 14.0
"""Days before the expiry of keys from which on all readers warn."""
_PATIENCE_S = 1.0
"""A certificate and its key are replaced one after the other; readers wait for the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """A certificate with its key and authority, as PEM, and its content: the identity that it
    names, or the hosts that it serves as.
    """

    ca: bytes
    certificate: bytes
    key: bytes
    identity: Identity | None
    hosts: tuple[str, ...]
    expires: datetime

    def check_time(self, path: Path, now: datetime | None = None) -> None:
        """Refuses an expired certificate.

        Raises:
            ConfigError: names the time of expiry.
        """
        if (now or datetime.now(UTC)) >= self.expires:
            raise ConfigError(
                f"{path}: the certificate expired at {self.expires:%Y-%m-%d %H:%M} UTC; renew it"
                " where the authority's key is: penstock keys renew DIR"
            )


def days_left(expires: datetime, now: datetime | None = None) -> float:
    """Returns days until ``expires``; negative when it has passed."""
    return (expires - (now or datetime.now(UTC))).total_seconds() / 86400.0


def expiry_warning(name: str, expires: datetime, now: datetime | None = None) -> str:
    """Returns a warning about keys that expire soon, or an empty text."""
    left = days_left(expires, now)
    if left >= WARN_DAYS:
        return ""
    when = f"{expires:%Y-%m-%d %H:%M} UTC"
    what = f"expire in {left:.1f} days, at {when}" if left > 0 else f"expired at {when}"
    return f"keys of {name} {what}: penstock keys renew DIR"


class KeyFolder:
    """The keys of one node or role. Reading is cheap: files are parsed when they have changed."""

    def __init__(self, path: Path, names: tuple[str, str] = ("tls.pem", "tls.key")) -> None:
        self.path = path
        self._names = ("ca.pem", *names)
        self._stamps: tuple[tuple[int, int, int], ...] = ()
        self._read: Credential | None = None

    def load(self) -> Credential:
        """Returns the present content of the files.

        Raises:
            ConfigError: a file is missing, readable for others, damaged, or of another authority;
                the certificate does not belong to the key, or has expired.
        """
        credential = self.peek()
        credential.check_time(self.path / self._names[1])
        return credential

    def peek(self) -> Credential:
        """Returns the content of the files, expired or not.

        Raises:
            ConfigError: see :meth:`load`, except for the expiry.
        """
        stamps = self._look()
        if self._read is None or stamps != self._stamps:
            self._read = self._settled()
            self._stamps = stamps
        return self._read

    def reload(self, complain: Callable[[str], None]) -> Credential | None:
        """Returns the present content; while it is unusable, the last usable content."""
        try:
            return self.load()
        except ConfigError as error:
            complain(f"{error}; what was read before stays in use")
            return self._read

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        stamps = []
        for name in self._names:
            try:
                status = (self.path / name).stat()
            except OSError as error:
                raise _unreadable(self.path / name, error) from error
            stamps.append((status.st_ctime_ns, status.st_ino, status.st_size))
        return tuple(stamps)

    def _settled(self) -> Credential:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._parse()
            except _Unmatched:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(0.02)

    def _parse(self) -> Credential:
        ca, certificate, key = (
            read_private(self.path / name, secret=name.endswith(".key")) for name in self._names
        )
        try:
            authority = x509.load_pem_x509_certificate(ca)
            leaf = x509.load_pem_x509_certificate(certificate)
            private = load_pem_private_key(key, password=None)
            form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            matches = leaf.public_key().public_bytes(*form) == private.public_key().public_bytes(
                *form
            )
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{self.path}: damaged keys: {reason(error)}") from error
        if not matches:
            raise _Unmatched(
                f"{self.path}: {self._names[1]} is not the certificate of {self._names[2]}"
            )
        try:
            leaf.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"{self.path}: {self._names[1]} was not issued by the authority in ca.pem; take all"
                " files from one penstock keys make"
            ) from error
        uris, hosts = _names_of(leaf)
        return Credential(
            ca=ca,
            certificate=certificate,
            key=key,
            identity=Identity.parse(uris[0]) if len(uris) == 1 else None,
            hosts=hosts,
            expires=min(leaf.not_valid_after_utc, authority.not_valid_after_utc),
        )


class _Unmatched(ConfigError):
    """Certificate and key are not a pair: one of them may be about to be replaced."""


def node_folder(keys: Path, run: str, node: str) -> KeyFolder:
    """Returns the keys of a node, which are there and are its own.

    Raises:
        ConfigError: see :meth:`KeyFolder.load`, or the keys are of another run or node.
    """
    return checked_folder(keys, Identity(run=run, role=Role.NODE, node=node))


def checked_folder(keys: Path, expected: Identity) -> KeyFolder:
    """Returns the folder of ``expected`` in ``keys``, after it was read once.

    Raises:
        ConfigError: see :meth:`KeyFolder.load`; or the keys are of another owner.
    """
    folder = KeyFolder(keys / expected.folder)
    identity = folder.load().identity
    if identity != expected:
        raise ConfigError(
            f"{folder.path}: these are keys of {identity or 'another owner'}, and {expected} needs"
            " its own; take those that penstock keys make made for it (cluster.keys)"
        )
    return folder


def read_private(path: Path, *, secret: bool = True, links: bool = True) -> bytes:
    """Returns the content of a small file; of a ``secret`` one only if others cannot read it.
    ``links``: the path may be a symbolic link, as Kubernetes makes them of secrets.

    Raises:
        ConfigError: it cannot be read, or belongs to, or is readable or writable for, others.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: is a {kind_of(status)}, and a file is due there")
            check_mode(path, status, secret=secret)
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that no other user can read, atomically: readers see the old content or the
    new.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)  # before the rename: a crash could leave the name with no content
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {reason(error)}") from error


def check_mode(path: Path, status: os.stat_result, *, secret: bool = True) -> None:
    """Refuses a key that others can read, or a file that others can write. The group counts as
    others, except for files of root, because Kubernetes gives keys to a group.

    Raises:
        ConfigError: names mode and remedy.
    """
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path}: belongs to user {status.st_uid}, and this process is user {os.geteuid()};"
            " keys belong to the user of the process: chown"
        )
    allowed = 0o750 if status.st_uid == 0 else 0o700
    forbidden = ~allowed & 0o777 if secret else 0o022
    if mode & forbidden:
        raise ConfigError(
            f"{path}: mode {mode:04o} lets others {'read' if secret else 'change'} it;"
            f" chmod {'0600' if secret else '0644'} it (and if others may have read it, make new"
            " keys)"
        )


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: cannot read it: {reason(error)}; keys are made with penstock keys make, and"
        " packed for a node with penstock keys pack"
    )


def _names_of(leaf: x509.Certificate) -> tuple[list[str], tuple[str, ...]]:
    """Returns the URIs and the DNS names of a certificate."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return [], ()
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris, tuple(names.get_values_for_type(x509.DNSName))
