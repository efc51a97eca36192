"""ZeroMQ as far as Penstock uses it: contexts, ROUTER, DEALER, PUSH and PULL sockets, monitors.

What libzmq does that matters here: a connecting socket queues until its peer listens, and connects
again when the connection breaks; frames sent without a copy are read from where they lie when they
leave, not when they are sent; a ROUTER drops what is for somebody who is gone; what was under way
on a connection that broke is lost. Left out: credentials, handshakes, the high-water mark of
receivers (docs/SIMULATION.md).
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import zmq

from tests.simulation.kernel import Process
from tests.simulation.network import Network, Pipe
from tests.simulation.threads import Waiters

SEND_HWM = 1000


class Frame(bytes):
    """``zmq.Frame``."""

    @property
    def bytes(self) -> bytes:
        return bytes(self)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self)


class Context:
    """``zmq.Context``."""

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.network = network
        self.sockets: list[Socket] = []
        self.terminated = False
        self._changed = Waiters(process.kernel)
        process.at_death.append(self._abandon)

    def socket(self, kind: int) -> Socket:
        socket = Socket(self, kind)
        self.sockets.append(socket)
        return socket

    def destroy(self, linger: int | None = None) -> None:
        for socket in list(self.sockets):
            socket.close(linger)
        self.terminated = True

    def term(self) -> None:
        self.terminated = True
        for socket in self.sockets:
            socket.arrived.wake(len(socket.arrived.tasks))
        while self.sockets:
            self._changed.wait(None)

    def closed_one(self, socket: Socket) -> None:
        """A socket was closed."""
        self.sockets.remove(socket)
        self._changed.wake(len(self._changed.tasks))

    def _abandon(self) -> None:
        for socket in self.sockets:
            socket.abandon()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error: object) -> None:
        self.term()


class Link:
    """A connection between two sockets, seen from one of them."""

    def __init__(self, socket: Socket, identity: bytes) -> None:
        self.socket = socket
        self.identity = identity
        self.peer: Link | None = None
        self.pipe: Pipe | None = None

    @property
    def open(self) -> bool:
        """Whether both ends live, and neither has lost the other."""
        ends = [self] if self.peer is None else [self, self.peer]
        return all(end.socket.context.process.alive and end.socket.has(end) for end in ends)

    @property
    def busy(self) -> bool:
        """Whether a message is under way, one way or the other."""
        ends = [self] if self.peer is None else [self, self.peer]
        return any(end.pipe is not None and end.pipe.under_way for end in ends)

    def sever(self) -> None:
        """The connection breaks, though both ends live: what is under way is lost."""
        assert self.peer is not None
        for end in (self, self.peer):
            end.socket.lost(end)

    def receive(self, frames: list[Any]) -> None:
        """Messages of the other end arrive."""
        self.socket.arrive(frames, self)


class Socket:
    """``zmq.Socket``."""

    def __init__(self, context: Context, kind: int) -> None:
        self.context = context
        self.kind = kind
        self.closed = False
        self.arrived = Waiters(context.process.kernel)
        self.pollers: list[Waiters] = []
        self._options: dict[int, Any] = {}
        self._inbox: deque[tuple[list[bytes], Link]] = deque()
        self._rest: deque[bytes] = deque()
        self._links: dict[bytes, Link] = {}
        self._unsent: deque[list[Any]] = deque()
        self._bound: list[str] = []
        self._targets: list[str] = []
        self._monitor: Monitor | None = None
        self._endpoint = ""

    # ---- options ----

    def set(self, option: int, value: Any) -> None:
        self._options[option] = value

    def get(self, option: int) -> Any:
        if option == zmq.RCVMORE:
            return int(bool(self._rest))
        return self._options.get(option)

    def get_string(self, option: int) -> str:
        return self._endpoint

    def get_monitor_socket(self, events: int) -> Monitor:
        self._monitor = Monitor(self.context, events)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    # ---- connections ----

    def bind(self, address: str) -> None:
        if address.startswith("tcp://"):
            host, _, port = address[6:].rpartition(":")
            number = int(port) or self.context.network.new_port()
            address = f"tcp://{host}:{number}"
        if not self.context.network.listen(address, self):
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self._bound.append(address)
        self._endpoint = address

    def unbind(self, address: str) -> None:
        self.context.network.leave(address, self)
        self._bound.remove(address)

    def connect(self, address: str) -> None:
        self._targets.append(address)
        kernel, network = self.context.process.kernel, self.context.network
        kernel.after(network.delay_s(True), lambda: self._try_to_connect(address))

    def _try_to_connect(self, address: str) -> None:
        process = self.context.process
        if self.closed or not process.alive or address not in self._targets:
            return
        network = self.context.network
        other: Socket | None = network.listeners.get(address)
        if other is None:
            network.awaiting.setdefault(address, []).append(lambda: self._try_to_connect(address))
            return
        here, there = process.machine, other.context.process.machine
        if not (network.reaches(here, there) and network.reaches(there, here)):
            process.kernel.after(0.1, lambda: self._try_to_connect(address))
            return
        kernel = process.kernel
        kernel.number += 1
        identity = kernel.number.to_bytes(5, "big")
        mine, theirs = Link(self, identity), Link(other, identity)
        mine.peer, theirs.peer = theirs, mine
        mine.pipe = Pipe(network, here, there, theirs.receive)
        theirs.pipe = Pipe(network, there, here, mine.receive)
        self._links[identity] = mine
        other._links[identity] = theirs
        network.connections.append(mine)
        self._tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, address)
        unsent, self._unsent = self._unsent, deque()
        for frames in unsent:
            self._transmit(mine, frames)

    def has(self, link: Link) -> bool:
        """Returns whether a connection is still there, for this end."""
        return link.identity in self._links

    def lost(self, link: Link) -> None:
        """The connection broke; a connecting socket makes another one."""
        if self._links.pop(link.identity, None) is None or self.closed:
            return
        if link.pipe is not None:
            link.pipe.break_off()
        kernel = self.context.process.kernel
        for address in self._targets:
            self._tell(zmq.EVENT_DISCONNECTED, address)
            kernel.after(0.02, lambda address=address: self._try_to_connect(address))

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        self.abandon()
        self.arrived.wake(len(self.arrived.tasks))
        self.context.closed_one(self)

    def abandon(self) -> None:
        """The socket, or its process, is gone: peers hear of it if the network lets them."""
        network, process = self.context.network, self.context.process
        for address in self._bound:
            network.leave(address, self)
        links, self._links = self._links, {}
        for link in links.values():
            peer, pipe = link.peer, link.pipe
            assert peer is not None and pipe is not None
            if pipe.under_way and not self.closed:
                pipe.lose(process.kernel.random.randrange(pipe.under_way + 1))
            self._hang_up(link, peer)

    def _hang_up(self, link: Link, peer: Link) -> None:
        """The other end sees the end of the connection behind all that was sent before."""
        process = self.context.process
        machine, other = process.machine, peer.socket.context.process.machine
        network, kernel = self.context.network, process.kernel

        def tell() -> None:
            if not machine.up:
                kernel.after(kernel.random.uniform(2.0, 6.0), lambda: peer.socket.lost(peer))
            elif not network.reaches(machine, other):
                kernel.after(0.5, tell)
            else:
                peer.socket.lost(peer)

        kernel.after(3 * network.delay_s(machine is other), tell)

    def _tell(self, event: int, address: str) -> None:
        if self._monitor is not None:
            self._monitor.tell(event, address)

    # ---- messages ----

    def send(self, data: Any, flags: int = 0, copy: bool = True) -> None:
        self.send_multipart([data], flags, copy)

    def send_multipart(self, frames: list[Any], flags: int = 0, copy: bool = True) -> None:
        if self.context.terminated:
            raise zmq.ContextTerminated
        kept = [bytes(frame) for frame in frames] if copy else list(frames)
        if self.kind == zmq.ROUTER:
            link = self._links.get(bytes(kept[0]))
            if link is not None:
                self._transmit(link, kept[1:])
            return
        link = next(iter(self._links.values()), None)
        if link is not None:
            self._transmit(link, kept)
        elif len(self._unsent) < self._options.get(zmq.SNDHWM, SEND_HWM):
            self._unsent.append(kept)
        else:
            raise zmq.Again

    def _transmit(self, link: Link, frames: list[Any]) -> None:
        """The I/O thread takes the frames a moment later: it reads memory as it is then."""
        process = self.context.process
        kernel = process.kernel

        def leave() -> None:
            if process.alive and link.pipe is not None and not link.pipe.broken:
                link.pipe.send([bytes(frame) for frame in frames])

        if all(isinstance(frame, bytes) for frame in frames):
            assert link.pipe is not None
            link.pipe.send(frames)
        else:
            leave_s = kernel.random.random() * 1e-4
            kernel.after(leave_s, leave)

    def arrive(self, frames: list[bytes], link: Link) -> None:
        """A message is complete."""
        if self.closed or not self.context.process.alive:
            return
        self._inbox.append((frames, link))
        self.arrived.wake(1)
        for poller in self.pollers:
            poller.wake(1)

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if self._rest:
            return self._rest.popleft()
        frames = self._take(flags)
        self._rest.extend(frames[1:])
        return frames[0]

    def recv_into(self, buffer: Any) -> int:
        data = self.recv()
        buffer[: len(data)] = data
        return len(data)

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        frames = self._take(flags)
        return frames if copy else [Frame(frame) for frame in frames]

    def _take(self, flags: int) -> list[bytes]:
        kernel = self.context.process.kernel
        self._rest.clear()
        deadline = None
        if zmq.RCVTIMEO in self._options:
            deadline = kernel.now + self._options[zmq.RCVTIMEO] / 1000
        while not self._inbox:
            if self.context.terminated:
                raise zmq.ContextTerminated
            if flags & zmq.NOBLOCK:
                raise zmq.Again
            if deadline is not None and kernel.now >= deadline:
                raise zmq.Again
            self.arrived.wait(None if deadline is None else deadline - kernel.now)
        frames, link = self._inbox.popleft()
        return [link.identity, *frames] if self.kind == zmq.ROUTER else frames

    def poll(self, timeout: float | None = None) -> int:
        kernel = self.context.process.kernel
        deadline = None if timeout is None else kernel.now + timeout / 1000
        while not self._inbox:
            left = None if deadline is None else deadline - kernel.now
            if (left is not None and left <= 0.0) or self.closed:
                return 0
            self.arrived.wait(left)
        return int(zmq.POLLIN)

    @property
    def readable(self) -> bool:
        """Whether a message is here."""
        return bool(self._inbox)


class Monitor(Socket):
    """The socket that tells of another's connections."""

    def __init__(self, context: Context, events: int) -> None:
        super().__init__(context, zmq.PAIR)
        context.sockets.append(self)
        self._events = events

    def tell(self, event: int, address: str) -> None:
        """Queue an event, if it is asked for."""
        if event & self._events:
            self.arrive([struct.pack("=hi", event, 0), address.encode()], Link(self, b""))


class Poller:
    """``zmq.Poller``, for reading."""

    def __init__(self, process: Process) -> None:
        self._waiters = Waiters(process.kernel)
        self._sockets: list[Socket] = []
        self._kernel = process.kernel

    def register(self, socket: Socket, flags: int = zmq.POLLIN) -> None:
        self._sockets.append(socket)
        socket.pollers.append(self._waiters)

    def poll(self, timeout: float | None = None) -> list[tuple[Socket, int]]:
        deadline = None if timeout is None else self._kernel.now + timeout / 1000
        while True:
            ready = [(socket, int(zmq.POLLIN)) for socket in self._sockets if socket.readable]
            left = None if deadline is None else deadline - self._kernel.now
            if ready or (left is not None and left <= 0.0):
                return ready
            self._waiters.wait(left)
