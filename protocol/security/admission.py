"""Admission of callers, by the certificate of a connection or the token of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.protocol.security.addresses import check_addresses
from penstock.protocol.security.credentials import TOKEN_KEY, keys_of_node
from penstock.protocol.security.folders import Credential, KeyFolder
from penstock.protocol.security.identity import SCHEDULER_HOST, Identity, Role
from penstock.protocol.security.token import read_token, same_token, token_path

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A caller. ``roles``: all roles that it may act as. ``node``: the node that it may represent;
    ``None``: any node.
    """

    roles: frozenset[Role]
    node: str | None

    def speaks_for(self, node: str) -> bool:
        """Returns whether the caller may join as a process of ``node``."""
        return Role.NODE in self.roles and self.node in (None, node)


class TokenAdmission:
    """Admits every caller with the run's token, in all roles."""

    def __init__(self, path: Path) -> None:
        """Reads the token.

        Raises:
            ConfigError: see :func:`~penstock.protocol.security.token.read_token`.
        """
        self._token = read_token(path)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Makes ``server`` listen on ``address``; returns the port.

        Raises:
            RuntimeError: gRPC cannot listen there.
        """
        return server.add_insecure_port(address)

    def party(self, context: Context) -> Party | None:
        """Returns the caller; None for a stranger."""
        for key, value in context.invocation_metadata() or ():
            if key == TOKEN_KEY and isinstance(value, str) and same_token(value, self._token):
                return Party(roles=frozenset(Role), node=None)
        return None


class KeyAdmission:
    """Admits callers by certificates of the run's authority. Replaced files apply from the next
    connection on.
    """

    def __init__(
        self, run: str, node: KeyFolder, serving: KeyFolder, complain: Callable[[str], None]
    ) -> None:
        """Creates the admission. ``serving`` has the certificate that the server shows, ``node``
        the keys of its node.

        Raises:
            ConfigError: the keys cannot be used.
        """
        self._run = run
        self._serving = serving
        self._complain = complain
        node.load()
        self._shown = serving.load()

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Makes ``server`` listen on ``address``; returns the port.

        Raises:
            RuntimeError: gRPC cannot listen there.
        """
        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._fetch, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def party(self, context: Context) -> Party | None:
        """Returns the caller; None for a stranger."""
        names = [bytes(name) for name in context.auth_context().get("peer_uri", ())]
        identity = Identity.parse(names[0].decode(errors="replace")) if len(names) == 1 else None
        if identity is None or identity.run != self._run:
            return None
        roles = {identity.role, Role.LOOK} if identity.role is Role.CONTROL else {identity.role}
        return Party(roles=frozenset(roles), node=identity.node or None)

    def _fetch(self) -> Any:
        """Returns new keys, or None without a change; gRPC calls it for each connection."""
        keys = self._serving.reload(self._complain)
        if keys is None or keys is self._shown:
            return None
        self._shown = keys
        return _configuration(keys)


Admission: TypeAlias = TokenAdmission | KeyAdmission


def _configuration(keys: Credential) -> Any:
    return grpc.ssl_server_certificate_configuration([(keys.key, keys.certificate)], keys.ca)


def scheduler_admission(
    config: Config, run_dir: Path, complain: Callable[[str], None]
) -> Admission:
    """Returns the admission of the scheduler of the run in ``run_dir``. ``complain`` receives a
    text if replaced keys are unusable.

    Raises:
        ConfigError: keys or token are missing, unusable, or readable by others.
    """
    check_addresses(config)
    if not config.cluster.uses_keys:
        return TokenAdmission(token_path(run_dir))
    first = config.cluster.nodes[0].name
    node = keys_of_node(config, first)
    serving = KeyFolder(node.path, ("server.pem", "server.key"))
    admission = KeyAdmission(config.run.name, node, serving, complain)
    if SCHEDULER_HOST not in serving.load().hosts:
        raise ConfigError(
            f"{node.path / 'server.pem'}: is not for the scheduler, which runs on the first of"
            f" cluster.nodes, {first}: penstock keys renew DIR --config FILE"
        )
    return admission
