"""Whom a server lets in: the certificate of a connection, or the token of a call, as a caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.protocol.security.access import TOKEN_KEY, keys_of_node
from penstock.protocol.security.addresses import check_addresses
from penstock.protocol.security.folders import Credential, KeyFolder
from penstock.protocol.security.identity import SCHEDULER_HOST, Identity, Role
from penstock.protocol.security.token import read_token, same_token, token_path

Context = grpc.aio.ServicerContext[Any, Any]
_ANYBODY = frozenset(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """Who calls. ``roles``: all that the caller may act as; ``node``: the one whose processes it
    may speak for, ``None`` for all.
    """

    roles: frozenset[Role]
    node: str | None

    def speaks_for(self, node: str) -> bool:
        """Returns whether the caller may join as a process of ``node``."""
        return Role.NODE in self.roles and self.node in (None, node)


class Admission(Protocol):
    """How a server listens, and whom it knows."""

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Listen on ``address``; returns the port.

        Raises:
            RuntimeError: gRPC cannot.
        """

    def party(self, context: Context) -> Party | None:
        """Returns who makes a call; None for strangers."""


class TokenAdmission:
    """Everybody who has the run's token may do everything."""

    def __init__(self, path: Path) -> None:
        """Reads the token.

        Raises:
            ConfigError: as :func:`~penstock.protocol.security.token.read_token`.
        """
        self._token = read_token(path)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """As :class:`Admission` says."""
        return server.add_insecure_port(address)

    def party(self, context: Context) -> Party | None:
        """As :class:`Admission` says."""
        for key, value in context.invocation_metadata() or ():
            if key == TOKEN_KEY and isinstance(value, str) and same_token(value, self._token):
                return Party(roles=_ANYBODY, node=None)
        return None


class KeyAdmission:
    """Certificates of the run's authority say who calls. Replaced files count from the next
    connection on.
    """

    def __init__(
        self, run: str, own: KeyFolder, serving: KeyFolder, complain: Callable[[str], None]
    ) -> None:
        """``serving`` has the certificate that is shown, ``own`` names this node.

        Raises:
            ConfigError: the keys cannot be used.
        """
        self._run = run
        self._serving = serving
        self._complain = complain
        own.load()
        self._shown = serving.load()

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """As :class:`Admission` says."""
        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._fetch, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def party(self, context: Context) -> Party | None:
        """As :class:`Admission` says."""
        names = [bytes(name) for name in context.auth_context().get("peer_uri", ())]
        identity = Identity.parse(names[0].decode(errors="replace")) if len(names) == 1 else None
        if identity is None or identity.run != self._run:
            return None
        roles = {identity.role, Role.LOOK} if identity.role is Role.CONTROL else {identity.role}
        return Party(roles=frozenset(roles), node=identity.node or None)

    def _fetch(self) -> Any:
        """Called by gRPC for each connection; returns None while nothing has changed."""
        found = self._serving.reload(self._complain)
        if found is None or found is self._shown:
            return None
        self._shown = found
        return _configuration(found)


def _configuration(keys: Credential) -> Any:
    return grpc.ssl_server_certificate_configuration([(keys.key, keys.certificate)], keys.ca)


def scheduler_admission(
    config: Config, run_dir: Path, complain: Callable[[str], None]
) -> Admission:
    """Returns whom the scheduler of the run in ``run_dir`` lets in. ``complain`` is told of keys
    that were replaced by others of no use.

    Raises:
        ConfigError: keys or token are missing, of no use, or readable for others.
    """
    check_addresses(config)
    if not config.cluster.uses_keys:
        return TokenAdmission(token_path(run_dir))
    first = config.cluster.nodes[0].name
    own = keys_of_node(config, first)
    serving = KeyFolder(own.path, ("server.pem", "server.key"))
    admission = KeyAdmission(config.run.name, own, serving, complain)
    if SCHEDULER_HOST not in serving.load().hosts:
        raise ConfigError(
            f"{own.path / 'server.pem'}: is not for the scheduler, which runs on the first of"
            f" cluster.nodes, {first}: penstock keys renew DIR --config FILE"
        )
    return admission
