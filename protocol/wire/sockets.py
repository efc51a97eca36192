"""Access to the ZeroMQ sockets of a run that listen on TCP: authentication of both sides.

Each context that binds such a socket has a :class:`ZapAuthenticator`. libzmq asks its thread about
every handshake (ZAP, ZeroMQ's RFC 27), before it delivers anything from the peer.
``cluster.security`` selects a server's demands.

* ``tls``: a key in the node's list of peers, by which everything is encrypted
  (:class:`CurveAccess`).

* ``none`` and ``insecure``: a password that follows from the run's token (:class:`PlainAccess`).

Without an authenticator that answers, every handshake fails.

Addresses of sockets travel as text, in ``Hello`` and ``Begin``. With ``tls`` an address names the
listener's key: ``tcp://10.0.0.2:4711?key=`` and 64 hexadecimal digits. A client searches the key in
its own list, under the name of the node that the plan has at the address. So an address cannot name
a key of another node. Local sockets need none of this: the kernel keeps other users away from them
(:func:`~penstock.protocol.wire.connection_limiter.allow_own_user_only`).
"""

from __future__ import annotations

import hmac
import logging
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from penstock.config.schema import Config
from penstock.host import world
from penstock.host.errors import ConfigError, ProtocolError
from penstock.host.logs import Complaints
from penstock.protocol.run.names import place_of_member
from penstock.protocol.security.folders import read_private
from penstock.protocol.security.token import (
    read_token,
    refuse_foreign_listener,
    refuse_foreign_owner,
    token_path,
)

DOMAIN = b"penstock"
ENCRYPTION_BYTES = 33
"""Bytes by which encryption makes a frame longer on the wire; ``MAXMSGSIZE`` counts them."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_POLL_MS = 100
_REREAD_S = 0.5
_KEY_TEXT_BYTES = 40
_NAMED_KEY = "?key="
_LOCAL = "ipc://"
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_HEEDED = _REFUSALS | _BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED
_HANG_UPS = 3
"""Handshakes in a row that the peer broke off. The side that first sees different mechanisms
closes, and the other side receives no reason; a peer that dies breaks off only one.
"""

_log = logging.getLogger(__name__)


class SocketAccess(Protocol):
    """Authentication of sockets on TCP: demands of a server, credentials of a client."""

    @property
    def encrypts(self) -> bool:
        """True if traffic over TCP is encrypted."""

    @property
    def pre_auth_reply_bytes(self) -> int | None:
        """Most bytes that a server sends to a client before the client has authenticated: a client
        that has acknowledged more has authenticated. None: all clients are accepted.
        """

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Sets options of a socket that will listen on TCP; before it is bound."""

    def announce(self, endpoint: str) -> str:
        """Returns the text that tells others of a bound socket."""

    def admits(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        """Returns whether a client with these credentials is accepted; called on the
        authenticator's thread.
        """

    def check(self, address: str, node: str) -> None:
        """Refuses an announced address on TCP that is not a place of ``node``.

        Raises:
            ProtocolError: names the reason.
        """

    def connect(self, socket: zmq.Socket[Any], address: str) -> None:
        """Connects a socket to an announced or local address.

        Raises:
            ProtocolError: the address lacks the key that this access needs.
        """


class OpenAccess:
    """No authentication: for sockets outside of runs."""

    encrypts = False
    pre_auth_reply_bytes: int | None = None

    def protect(self, socket: zmq.Socket[Any]) -> None:
        """Sets nothing."""

    def announce(self, endpoint: str) -> str:
        return endpoint

    def admits(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        return True

    def check(self, address: str, node: str) -> None:
        _check_unnamed(address, node)

    def connect(self, socket: zmq.Socket[Any], address: str) -> None:
        _check_unnamed(address, "there")
        _connect(socket, address)


OPEN = OpenAccess()


class PlainAccess:
    """PLAIN (ZeroMQ's RFC 24) with a password that follows from the run's token and the address. A
    listener without the token learns nothing that is valid elsewhere.
    """

    encrypts = False
    # The greeting (64 bytes) and ERROR (12); WELCOME (10) and READY (43) are for those let in.
    pre_auth_reply_bytes: int | None = 64 + 12

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._passwords: tuple[bytes, ...] = ()

    def protect(self, socket: zmq.Socket[Any]) -> None:
        socket.set(zmq.PLAIN_SERVER, 1)
        _require_authentication(socket)

    def announce(self, endpoint: str) -> str:
        self._passwords = (*self._passwords, self.password(endpoint))
        return endpoint

    def admits(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        return (
            mechanism == b"PLAIN"
            and len(credentials) == 2
            and any([hmac.compare_digest(credentials[1], password) for password in self._passwords])
        )

    def check(self, address: str, node: str) -> None:
        _check_unnamed(address, node)

    def connect(self, socket: zmq.Socket[Any], address: str) -> None:
        # The password goes to no process of another user on this machine.
        _check_unnamed(address, "there")
        if _is_tcp(address):
            refuse_foreign_listener(address.removeprefix("tcp://"))
            socket.set(zmq.PLAIN_USERNAME, DOMAIN)
            socket.set(zmq.PLAIN_PASSWORD, self.password(address))
        _connect(socket, address)

    def password(self, address: str) -> bytes:
        """Returns the password for the listener on an announced address."""
        return hmac.new(self._token, address.encode(), "sha256").hexdigest().encode()


class CurveAccess:
    """CURVE (ZeroMQ's RFC 26) with the keys of one node's folder.

    A process keeps the pair of keys that it read at its start. The list of peers is read again when
    its files change: ``peers/NAME.public`` has one key a line. All of them are keys of that node,
    so that an old and a new key are valid while both are listed.
    """

    encrypts = True
    # The greeting (64 bytes), WELCOME (170) and ERROR (12); READY would be 52 at least.
    pre_auth_reply_bytes: int | None = 64 + 170 + 12

    def __init__(self, folder: Path) -> None:
        """Reads the keys in ``folder`` (``KEYS/node.NAME``).

        Raises:
            ConfigError: a file is missing, damaged, or readable for others; or the two keys are no
                pair.
        """
        self._folder = folder
        self._public = _key(folder / "curve.public", secret=False)
        self._secret = _key(folder / "curve.secret", secret=True)
        if z85.decode(zmq.curve_public(z85.encode(self._secret))) != self._public:
            raise ConfigError(
                f"{folder}: curve.public is not the public key of curve.secret; take both from one"
                " penstock keys make"
            )
        # For the keys below, which authenticators and connecting threads share.
        self._lock = world.lock()
        self._complaints = Complaints(_log)
        self._files: dict[Path, tuple[int, int]] = {}
        self._node_of: dict[bytes, str] = {}
        self._looked_s = float("-inf")
        self._look()

    def protect(self, socket: zmq.Socket[Any]) -> None:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._secret)
        _require_authentication(socket)

    def announce(self, endpoint: str) -> str:
        return f"{endpoint}{_NAMED_KEY}{self._public.hex()}"

    def admits(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        return mechanism == b"CURVE" and len(credentials) == 1 and bool(self._owner(credentials[0]))

    def check(self, address: str, node: str) -> None:
        if _is_tcp(address) and self._owner(self._named_key(address)) != node:
            raise ProtocolError(
                f"{address}: this is not a key of node {node} in {self._folder / 'peers'}: give all"
                " nodes the keys of one penstock keys make, the lists of peers first"
            )

    def connect(self, socket: zmq.Socket[Any], address: str) -> None:
        if _is_tcp(address):
            socket.set(zmq.CURVE_SERVERKEY, self._named_key(address))
            socket.set(zmq.CURVE_PUBLICKEY, self._public)
            socket.set(zmq.CURVE_SECRETKEY, self._secret)
        _connect(socket, address.partition(_NAMED_KEY)[0])

    def _named_key(self, address: str) -> bytes:
        """Returns the key in an address, if it belongs to a known node."""
        try:
            key = bytes.fromhex(address.partition(_NAMED_KEY)[2])
        except ValueError:
            key = b""
        if not self._owner(key):
            raise ProtocolError(
                f"{address}: it names no key in {self._folder / 'peers'}, and cluster.security is"
                " tls: give all nodes one configuration, and the keys of one penstock keys make"
            )
        return key

    def _owner(self, key: bytes) -> str | None:
        """Returns the node that a key belongs to."""
        with self._lock:
            if world.monotonic() - self._looked_s > _REREAD_S:
                try:
                    self._look()
                except ConfigError as error:
                    self._complaints.say(f"{error}; what was read before stays in use")
            return self._node_of.get(key)

    def _look(self) -> None:
        """Reads the list of peers if a file was changed, added or removed."""
        self._looked_s = world.monotonic()
        folder = self._folder / "peers"
        try:
            stamps = {
                path: (status.st_ctime_ns, status.st_ino)
                for path in sorted(folder.glob("*.public"))
                for status in [path.stat()]
            }
        except OSError as error:
            raise ConfigError(f"{folder}: cannot read it: {error}") from error
        if stamps == self._files:
            return
        node_of: dict[bytes, str] = {}
        for path in stamps:
            for line in read_private(path, secret=False).split():
                node_of[_decoded(path, line)] = path.name.removesuffix(".public")
        self._files, self._node_of = stamps, node_of


def socket_access(config: Config, run_dir: Path, node: str) -> SocketAccess:
    """Returns the authentication of sockets of a process on ``node`` of the run in ``run_dir``.

    Raises:
        ConfigError: keys or token are missing or of no use.
    """
    if not config.cluster.uses_keys:
        return PlainAccess(read_token(token_path(run_dir)))
    if config.cluster.keys is None:
        raise ConfigError("cluster.keys is not set, and cluster.security: tls needs it")
    return CurveAccess(config.cluster.keys / f"node.{node}")


def checked_places(
    config: Config, access: SocketAccess, announced: Mapping[str, str]
) -> dict[str, str]:
    """Returns the addresses of members (by name) after a check of their nodes. The configuration
    names the node of a member; an address never does.

    Raises:
        ProtocolError: an address is not a place of the member's node.
    """
    for member, address in announced.items():
        access.check(address, place_of_member(config, member)[0])
    return dict(announced)


class ZapAuthenticator:
    """Answers libzmq about the handshakes of one context, on a thread of its own.

    Made before the first protected socket of the context is bound; closed before the context is.
    """

    def __init__(self, context: zmq.Context[Any], access: SocketAccess) -> None:
        """Starts to answer."""
        self._access = access
        self._complaints = Complaints(_log)
        self._thread: threading.Thread | None = None
        if access.pre_auth_reply_bytes is None:
            return  # libzmq does not ask
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        self._closing = world.event()
        self._thread = world.thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Rejects all further clients, and ends the thread; a second call does nothing."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                if self._socket.poll(_POLL_MS):
                    self._answer(self._socket.recv_multipart())
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        _, request, domain, address, _, mechanism, *credentials = frames
        admitted = domain == DOMAIN and self._access.admits(mechanism, credentials)
        if not admitted:
            self._complaints.say(
                f"turned {address.decode(errors='replace')} away: no key or token of ours"
            )
        status = [b"200", b"OK"] if admitted else [b"400", b""]
        self._socket.send_multipart([_ZAP_VERSION, request, *status, b"", b""])


class Connection:
    """A socket that connects to one address, and the reason of a failure: libzmq reports no failed
    handshake. Used by one thread at a time, like its socket.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], address: str, access: SocketAccess, watched: int = 0
    ) -> None:
        """Connects ``socket``, which is closed with this.

        If ``watched`` has events, the caller reads :attr:`monitor`, which then also delivers them,
        and passes each to :meth:`note`.

        Raises:
            ProtocolError: see :meth:`SocketAccess.connect`; the socket is closed.
        """
        self.socket = socket
        self.monitor: zmq.Socket[Any] = socket.get_monitor_socket(_HEEDED | watched)
        self._is_watched = bool(watched)
        self._seen = ""
        self._broken = 0
        try:
            access.connect(socket, address)
        except BaseException:
            self.close()
            raise

    def refusal(self) -> str:
        """Returns the reason why the peer cannot be reached; empty as long as a connection may
        succeed.
        """
        while not self._is_watched and self.monitor.poll(0):
            event: Any = recv_monitor_message(self.monitor)
            self.note(event["event"])
        return self._seen

    def note(self, event: int) -> None:
        """Handles an event of the monitor."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken, self._seen = 0, ""
        self._broken += event == _BROKEN
        if event & _REFUSALS or self._broken >= _HANG_UPS:
            self._seen = (
                "it does not let this node's key or token in"
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                else "it has not the cluster.security of this process"
            )

    def close(self) -> None:
        """Closes the socket and drops messages in flight."""
        # Disable the monitor first: an event that no thread reads would block the socket's end.
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


def _check_unnamed(address: str, node: str) -> None:
    if _NAMED_KEY in address:
        raise ProtocolError(
            f"{address}: node {node} asks for a key, and this process has cluster.security: none:"
            " give all nodes one configuration"
        )


def _connect(socket: zmq.Socket[Any], address: str) -> None:
    """Connects, but not to another user's process that took the name of one of ours.

    Raises:
        LostMemberError: another user's process listens there.
    """
    if address.startswith(_LOCAL):
        refuse_foreign_owner(address.removeprefix(_LOCAL))
    socket.connect(address)


def _is_tcp(address: str) -> bool:
    return address.startswith("tcp:")


def _require_authentication(socket: zmq.Socket[Any]) -> None:
    """Lets libzmq ask the authenticator about every handshake, and reject all while none
    answers.
    """
    socket.set(zmq.ZAP_DOMAIN, DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _key(path: Path, *, secret: bool) -> bytes:
    return _decoded(path, read_private(path, secret=secret).strip())


def _decoded(path: Path, text: bytes) -> bytes:
    """Returns the 32 bytes of a key that is written as ZeroMQ's Z85."""
    try:
        key = z85.decode(text)
    except (ValueError, KeyError, struct.error):  # the last: five characters of over 32 bits
        key = b""
    if len(text) != _KEY_TEXT_BYTES or len(key) != 32:
        raise ConfigError(f"{path}: is no key; take it from penstock keys make again")
    return bytes(key)
