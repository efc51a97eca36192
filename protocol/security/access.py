"""How a process of a run, or a control client, connects to the scheduler: with a certificate, or
with the run's token.
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
"""Name of the token among a call's metadata."""

Options = Sequence[tuple[str, int]]


class Joined(Protocol):
    """A member's stream that was begun.

    To iterate yields the scheduler's messages; ``grpc.RpcError`` says how it broke.
    """

    def __iter__(self) -> Iterator[pb.SchedulerMessage]: ...

    def cancel(self) -> object:
        """End it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A channel, and the metadata that each call on it carries. ``check`` is to be called before
    each call: it raises LostMemberError where somebody else would get them.
    """

    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...] = ()
    check: Callable[[], None] = lambda: None

    def join(self, requests: Iterator[pb.MemberMessage]) -> Joined:
        """Begin a member's stream, with what ``requests`` yields; it is asked on another thread."""
        stub = rpc.MembershipStub(self.channel)  # type: ignore[no-untyped-call]  # generated
        joined: Joined = stub.Join(requests, metadata=self.metadata)
        return joined

    def close(self) -> None:
        """End the connection and all calls on it."""
        self.channel.close()


class Access(Protocol):
    """What somebody shows to be let in."""

    def connect(self, address: str, options: Options) -> Connection:
        """Returns a connection to ``address`` (``host:port``) with what is valid now.

        Raises:
            PenstockError: there is nothing to show.
        """


@dataclass(frozen=True, slots=True)
class TokenAccess:
    """Shows the token in ``path``, to processes of this user only."""

    path: Path

    def connect(self, address: str, options: Options) -> Connection:
        """As :class:`Access` says."""
        token = read_token(self.path)
        return Connection(
            channel=grpc.insecure_channel(address, options=tuple(options)),
            metadata=((TOKEN_KEY, token),),
            check=lambda: check_listener(address),
        )


@dataclass(frozen=True, slots=True)
class KeyAccess:
    """Shows a certificate, to whoever has the scheduler's of the same authority. Addresses are not
    compared: they may change.
    """

    folder: KeyFolder

    def connect(self, address: str, options: Options) -> Connection:
        """As :class:`Access` says."""
        keys = self.folder.load()
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
        ConfigError: as :func:`~penstock.protocol.security.folders.node_folder`; or the authority's
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


def member_access(config: Config, run_dir: Path, node: str) -> Access:
    """Returns how the processes of ``node`` join the run in ``run_dir``; looks at keys or token.

    Raises:
        ConfigError: they are missing, of no use, or readable for others; or an address needs keys.
    """
    check_addresses(config)
    if config.cluster.uses_keys:
        return KeyAccess(keys_of_node(config, node))
    read_token(token_path(run_dir))
    return TokenAccess(token_path(run_dir))


def client_access(config: Config, run_dir: Path, wanted: Role) -> Access:
    """Returns how a control client reaches the run in ``run_dir`` with the keys that are there:
    those of ``wanted``, of the role that may do more, or of a node, which may look, save and stop.

    Raises:
        ConfigError: there are none that this user can read.
    """
    if not config.cluster.uses_keys:
        return TokenAccess(token_path(run_dir))
    keys, run = keys_of(config), config.run.name
    tried = [Identity(run=run, role=role) for role in dict.fromkeys((wanted, Role.CONTROL))]
    tried += [Identity(run=run, role=Role.NODE, node=node.name) for node in config.cluster.nodes]
    for identity in tried:
        # Not Path.exists: that raises where another user's folder cannot be searched.
        if os.access(keys / identity.folder / "tls.key", os.R_OK):
            return KeyAccess(checked_folder(keys, identity))
    raise ConfigError(
        f"cluster.keys = {str(keys)!r}: has no keys for this: {wanted} is needed; copy that folder"
        " here from where penstock keys make was run, or name it with --keys DIR"
    )


def named_access(place: Path) -> Access:
    """Returns how a control client uses what ``--keys`` names: a folder of keys, or a run directory
    with a token.

    Raises:
        ConfigError: neither is there.
    """
    if os.access(place / "tls.pem", os.R_OK):
        folder = KeyFolder(place)
        folder.load()
        return KeyAccess(folder)
    if os.access(token_path(place), os.R_OK):
        return TokenAccess(token_path(place))
    raise ConfigError(
        f"--keys {place}: has neither tls.pem (a folder of penstock keys, such as DIR/look) nor a"
        " token (a run directory)"
    )
