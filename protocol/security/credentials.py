"""Credentials for the scheduler's gRPC server: the run's token, or a certificate.

Processes of a run and control clients connect with :class:`Credentials`; the server checks them by
:mod:`penstock.protocol.security.admission`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.generated import scheduler_pb2_grpc as rpc
from penstock.protocol.security.addresses import check_addresses, is_loopback
from penstock.protocol.security.folders import KeyFolder, checked_folder, node_folder
from penstock.protocol.security.identity import SCHEDULER_HOST, Identity, Role
from penstock.protocol.security.token import check_listener, read_token, token_path

TOKEN_KEY = "penstock-token"
"""Metadata key of the token in a call."""

Options = Sequence[tuple[str, int]]


class Joined(Protocol):
    """A member's open stream.

    Iteration yields the scheduler's messages; ``grpc.RpcError`` reports why the stream broke.
    """

    def __iter__(self) -> Iterator[pb.SchedulerMessage]: ...

    def cancel(self) -> object:
        """Ends the stream immediately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A channel, and the metadata of each call on it. Callers call ``check`` before
    each call: it raises LostMemberError if a process of another user would receive the metadata.
    """

    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...] = ()
    check: Callable[[], None] = lambda: None

    def join(self, requests: Iterator[pb.MemberMessage]) -> Joined:
        """Opens a member's stream and sends ``requests``, which another thread iterates."""
        stub = rpc.MembershipStub(self.channel)  # type: ignore[no-untyped-call]  # generated
        joined: Joined = stub.Join(requests, metadata=self.metadata)
        return joined

    def close(self) -> None:
        """Ends the connection and all calls on it."""
        self.channel.close()


@dataclass(frozen=True, slots=True)
class Credentials:
    """The token in a file, or the keys of a node or role. Both are read again for each connection,
    because they may be replaced while a process lives.
    """

    source: Path | KeyFolder

    def connect(self, address: str, options: Options) -> Connection:
        """Returns a connection to ``address`` (``host:port``). A token goes to processes of this
        user only. Keys trust a server with the scheduler's certificate of the same authority, at
        any address, because addresses may change.

        Raises:
            PenstockError: the token or the keys cannot be read.
        """
        if isinstance(self.source, Path):
            return Connection(
                channel=grpc.insecure_channel(address, options=tuple(options)),
                metadata=((TOKEN_KEY, read_token(self.source)),),
                check=lambda: check_listener(address),
            )
        keys = self.source.load()
        credentials = grpc.ssl_channel_credentials(keys.ca, keys.key, keys.certificate)
        named = (*options, ("grpc.ssl_target_name_override", SCHEDULER_HOST))
        return Connection(channel=grpc.secure_channel(address, credentials, options=named))


def keys_of(config: Config) -> Path:
    """Returns the folder of the run's keys.

    Raises:
        ConfigError: it is not set.
    """
    check_addresses(config)
    assert config.cluster.keys is not None
    return config.cluster.keys


def keys_of_node(config: Config, node: str) -> KeyFolder:
    """Returns the keys of a node, for a process that runs on it.

    Raises:
        ConfigError: see :func:`~penstock.protocol.security.folders.node_folder`; or the authority's
            key lies on a node that others reach.
    """
    keys = keys_of(config)
    authority = keys / "authority" / "ca.key"
    alone = all(is_loopback(entry.host) for entry in config.cluster.nodes)
    if authority.exists() and not alone:
        raise ConfigError(
            f"{authority}: lies on a node, and can make keys for every role: give nodes"
            " only what they need (penstock keys pack), or move the folder authority elsewhere"
            " (penstock keys renew DIR --authority ELSEWHERE)"
        )
    return node_folder(keys, config.run.name, node)


def member_credentials(config: Config, run_dir: Path, node: str) -> Credentials:
    """Returns the credentials of processes of ``node`` in the run in ``run_dir``, after a check.

    Raises:
        ConfigError: keys or token are missing, unusable, or readable by others; or an address needs
            keys.
    """
    check_addresses(config)
    if config.cluster.uses_keys:
        return Credentials(keys_of_node(config, node))
    read_token(token_path(run_dir))
    return Credentials(token_path(run_dir))


def client_credentials(config: Config, run_dir: Path, needed: Role) -> Credentials:
    """Returns the credentials of a control client for the run in ``run_dir``. These are the first
    readable keys of role ``needed``, of the more powerful role, or of a node, which may view, save
    and stop.

    Raises:
        ConfigError: this user can read no such keys.
    """
    if not config.cluster.uses_keys:
        return Credentials(token_path(run_dir))
    keys, run = keys_of(config), config.run.name
    candidates = [Identity(run=run, role=role) for role in dict.fromkeys((needed, Role.CONTROL))]
    candidates += [
        Identity(run=run, role=Role.NODE, node=node.name) for node in config.cluster.nodes
    ]
    for identity in candidates:
        # Path.exists would raise if another user's folder cannot be searched.
        if os.access(keys / identity.folder / "tls.key", os.R_OK):
            return Credentials(checked_folder(keys, identity))
    raise ConfigError(
        f"cluster.keys = {str(keys)!r}: has no keys for this: {needed} is needed; copy that folder"
        " here from where penstock keys make was run, or name it with --keys DIR"
    )


def named_credentials(place: Path) -> Credentials:
    """Returns the credentials that ``--keys`` names: a folder of keys, or a run directory with a
    token.

    Raises:
        ConfigError: the folder has neither.
    """
    if os.access(place / "tls.pem", os.R_OK):
        folder = KeyFolder(place)
        folder.load()
        return Credentials(folder)
    if os.access(token_path(place), os.R_OK):
        return Credentials(token_path(place))
    raise ConfigError(
        f"--keys {place}: has neither tls.pem (a folder of penstock keys, such as DIR/look) nor a"
        " token (a run directory)"
    )
