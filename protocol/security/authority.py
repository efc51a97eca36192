"""Makes and renews the keys of a run: an authority of its own, and what it issues.

Keys are elliptic (P-256); certificates are X.509, written by ``cryptography``. Nothing is
overwritten but by :func:`renew`, which replaces whole files; every file is 0600 in folders 0700.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import zmq
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.host.errors import ConfigError, reason
from penstock.protocol.security.folders import KeyFolder, read_private, write_private
from penstock.protocol.security.identity import METRICS_HOST, SCHEDULER_HOST, Identity, Role

AUTHORITY_DAYS = 3650
"""Days of an authority: as long as the longest run, independent of its certificates."""
DEFAULT_DAYS = 90
_EARLIER = timedelta(minutes=10)
"""Certificates are valid since a little before they are made: clocks of machines differ."""
_ROLES = (Role.CONTROL, Role.LOOK)
_AUTHORITY_NAME = "penstock authority"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """When the certificates in a folder of keys expire. ``what``: the folder's name."""

    what: str
    identity: str
    expires: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


def make(
    keys: Path,
    run: str,
    nodes: Sequence[str],
    days: float = DEFAULT_DAYS,
    authority_dir: Path | None = None,
) -> None:
    """Makes the keys of run ``run`` in the new folder ``keys``, and their authority in the new
    folder ``authority_dir``, by default ``keys/authority``. The scheduler may run on the first of
    ``nodes``. Certificates are valid for ``days``.

    Raises:
        ConfigError: there are keys already, or they cannot be written.
    """
    place = authority_dir or keys / "authority"
    for folder in (keys, place):
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: is not empty, and keys are never overwritten; name a new folder, or"
                " renew what is there: penstock keys renew DIR"
            )
    _make_folder(keys)
    authority = _new_authority()
    write_private(place / "ca.pem", authority.pem)
    write_private(place / "ca.key", _private_pem(authority.key))
    write_private(keys / "metrics" / "ca.pem", authority.pem)
    write_private(keys / "metrics" / "password", secrets.token_urlsafe(32).encode())
    for node in nodes:
        _issue_node(authority, keys, Identity(run=run, role=Role.NODE, node=node), nodes[0], days)
    for role in _ROLES:
        _issue(authority, keys, Identity(run=run, role=role), days)
    _make_curve_pairs(keys)


def renew(
    keys: Path,
    authority_dir: Path | None = None,
    days: float = DEFAULT_DAYS,
    nodes: Sequence[str] = (),
) -> list[str]:
    """Issues new certificates, with new keys, for all nodes and roles in ``keys``; returns the
    folders. With ``nodes``, each of them has keys afterwards, and the scheduler may run on the
    first. The authority, existing CURVE pairs and the metrics' password stay.

    Raises:
        ConfigError: the authority's key is missing, or certificates are of another authority.
    """
    authority = _read_authority(authority_dir or keys / "authority")
    owners, first = [], nodes[0] if nodes else ""
    for folder in _folders(keys):
        old = KeyFolder(folder).peek()
        if old.ca != authority.pem or old.identity is None:
            raise ConfigError(f"{folder}: is of another authority than {authority_dir or keys}")
        owners.append(old.identity)
        if old.identity.role is Role.NODE and not nodes:
            serving = KeyFolder(folder, ("server.pem", "server.key")).peek()
            first = old.identity.node if SCHEDULER_HOST in serving.hosts else first
    if not owners:
        raise ConfigError(f"{keys}: has no keys of nodes or roles to renew")
    known = {identity.node for identity in owners}
    for node in nodes:
        if node not in known:
            owners.append(Identity(run=owners[0].run, role=Role.NODE, node=node))
    for identity in owners:
        if identity.role is Role.NODE:
            _issue_node(authority, keys, identity, first, days)
        else:
            _issue(authority, keys, identity, days)
    _make_curve_pairs(keys)
    return [identity.folder for identity in owners]


def expiries(keys: Path) -> list[Expiry]:
    """Returns when everything in ``keys`` expires, soonest first; ``keys`` may be one folder of it.

    Raises:
        ConfigError: there are no keys, or they are damaged.
    """
    expiry_dates = []
    for folder in [keys] if (keys / "tls.pem").exists() else list(_folders(keys)):
        credential = KeyFolder(folder).peek()
        expiry_dates.append(
            Expiry(
                what=folder.name,
                identity=str(credential.identity),
                expires=credential.expires,
            )
        )
    if not expiry_dates:
        raise ConfigError(f"{keys}: has no keys; make some with penstock keys make")
    return sorted(expiry_dates, key=lambda expiry: (expiry.expires, expiry.what))


def pack(keys: Path, node: str) -> bytes:
    """Returns a tar archive with what node ``node`` needs, and nothing else.

    Raises:
        ConfigError: there are no keys of this node.
    """
    folder = keys / f"node.{node}"
    if not (folder / "tls.key").exists():
        names = ", ".join(sorted(f.name[5:] for f in _folders(keys) if f.name.startswith("node.")))
        raise ConfigError(f"{folder}: has no keys; {keys} has keys of: {names or 'no node'}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in (folder, *sorted(folder.rglob("[!.]*"))):
            archive.add(path, arcname=str(path.relative_to(keys)), recursive=False, filter=_plain)
    return buffer.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Returns an entry without the names and numbers of users here."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o700 if info.isdir() else 0o600
    return info


def _folders(keys: Path) -> Iterator[Path]:
    try:
        entries = sorted(keys.iterdir())
    except OSError as error:
        raise ConfigError(f"{keys}: cannot read it: {reason(error)}") from error
    for entry in entries:
        if entry.name in _ROLES or entry.name.startswith("node."):
            yield entry


def _new_authority() -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # Strangers see this name when they connect, so the run's is not in it.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY_NAME)])
    public, now = key.public_key(), datetime.now(UTC)
    usage = _usage(signs_certificates=True)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
    return _Authority(certificate=builder.sign(key, hashes.SHA256()), key=key)


def _read_authority(folder: Path) -> _Authority:
    certificate = read_private(folder / "ca.pem", secret=False)
    key_pem = read_private(folder / "ca.key")
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        authority = x509.load_pem_x509_certificate(certificate)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{folder}: damaged keys: {reason(error)}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder / 'ca.key'}: is no key of penstock keys make")
    return _Authority(certificate=authority, key=key)


def _issue_node(
    authority: _Authority, keys: Path, identity: Identity, first: str, days: float
) -> None:
    """Issues two certificates. The first identifies the node to servers that have authenticated
    themselves. The second is for serving: strangers see it, so it names neither run nor node.
    ``first``: the node on which the scheduler may run.
    """
    _issue(authority, keys, identity, days)
    folder = keys / identity.folder
    hosts = [METRICS_HOST, *([SCHEDULER_HOST] if identity.node == first else [])]
    names = [x509.DNSName(host) for host in hosts]
    certificate, key = _signed(authority, names, ExtendedKeyUsageOID.SERVER_AUTH, days)
    write_private(folder / "server.key", key)
    write_private(folder / "server.pem", certificate)
    password = read_private(keys / "metrics" / "password")
    write_private(folder / "metrics.sha256", hashlib.sha256(password).hexdigest().encode())


def _issue(authority: _Authority, keys: Path, identity: Identity, days: float) -> None:
    names = [x509.UniformResourceIdentifier(identity.uri)]
    certificate, key = _signed(authority, names, ExtendedKeyUsageOID.CLIENT_AUTH, days)
    folder = keys / identity.folder
    write_private(folder / "ca.pem", authority.pem)
    write_private(folder / "tls.key", key)
    write_private(folder / "tls.pem", certificate)


def _signed(
    authority: _Authority,
    names: Sequence[x509.GeneralName],
    usage: x509.ObjectIdentifier,
    days: float,
) -> tuple[bytes, bytes]:
    """Returns a new certificate for ``names``, and its key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    now, issuer = datetime.now(UTC), authority.certificate
    end = min(now + timedelta(days=days), issuer.not_valid_after_utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), _private_pem(key)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _make_curve_pairs(keys: Path) -> None:
    """Makes a pair for each node without one. Every node receives the public keys of all nodes,
    including its own.
    """
    public: dict[str, bytes] = {}
    folders = [folder for folder in _folders(keys) if folder.name.startswith("node.")]
    for folder in folders:
        if not (folder / "curve.secret").exists():
            pair = zmq.curve_keypair()
            write_private(folder / "curve.public", pair[0] + b"\n")
            write_private(folder / "curve.secret", pair[1] + b"\n")
        name = folder.name.removeprefix("node.")
        public[name] = read_private(folder / "curve.public", secret=False)
    for folder in folders:
        for name, key in public.items():
            if not (folder / "peers" / f"{name}.public").exists():
                write_private(folder / "peers" / f"{name}.public", key)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"{path}: cannot make it: {reason(error)}") from error
