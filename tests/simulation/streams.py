"""The scheduler's server and members' streams, in the place of gRPC.

Messages are the real ones: serialized when they are sent, parsed when they arrive. The server has
the methods of :class:`penstock.daemons.scheduler.service.SchedulerServer`; to members a stream is
what :meth:`penstock.protocol.security.credentials.Connection.join` returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from penstock.daemons.scheduler.intake import EventQueue, malformed
from penstock.daemons.scheduler.machine.events import (
    ControlAsked,
    ControlCall,
    Joined,
    Received,
    Reply,
    ReplyError,
    StreamClosed,
)
from penstock.host.errors import LostMemberError
from penstock.protocol.generated import scheduler_pb2 as pb
from tests.simulation.kernel import Process
from tests.simulation.network import Network, Pipe
from tests.simulation.promises import Calls
from tests.simulation.threads import Queue, Waiters

LAST_WORDS_S = 3.0
AT_ONCE_S = 1e-3
"""In which a scheduler does what one event leads to."""
CONTROL_TIMEOUT_S = 5.0


class BrokenStream(grpc.RpcError):
    """The call ended with an error."""


class SimAccess:
    """What a simulated process connects to the scheduler with."""

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.network = network

    def connect(self, address: str, options: object) -> SimConnection:
        return SimConnection(self.process, self.network, address)


class SimConnection:
    """See :class:`penstock.protocol.security.credentials.Connection`."""

    def __init__(self, process: Process, network: Network, address: str) -> None:
        self._process = process
        self._network = network
        self._address = address
        self._call: Call | None = None

    def check(self) -> None:
        """Nobody else listens there."""

    def join(self, requests: Iterator[pb.MemberMessage]) -> Call:
        self._call = Call(self._process, self._network, self._address, requests)
        return self._call

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


class Call:
    """A member's end."""

    def __init__(
        self,
        process: Process,
        network: Network,
        address: str,
        requests: Iterator[pb.MemberMessage],
    ) -> None:
        self.process = process
        self.network = network
        self._address = address
        self._requests = requests
        self._inbox: deque[bytes | None] = deque()
        self._arrived = Waiters(process.kernel)
        self._broken = ""
        self._ended = False
        self._stream: ServerStream | None = None
        self.pipe: Pipe | None = None
        self.unheard_s = 0.0
        """Until then nothing of this end's fate gets to the server."""
        process.at_death.append(self._die)
        process.spawn(self._write, "grpc-writer")

    # ---- the member's side ----

    def __iter__(self) -> Iterator[pb.SchedulerMessage]:
        while True:
            while not self._inbox and not self._broken:
                self._arrived.wait(None)
            if not self._inbox:
                raise BrokenStream(self._broken)
            data = self._inbox.popleft()
            if data is None:
                self._leave()
                return
            yield pb.SchedulerMessage.FromString(data)

    def cancel(self) -> None:
        if not self._broken:
            self._broken = "cancelled"
            self._arrived.wake(1)
        self._leave()

    def says(self, message: pb.MemberMessage) -> None:
        """Send a message behind those that were sent before."""
        if self.pipe is not None:
            self.pipe.send(message.SerializeToString())

    def _write(self) -> None:
        if not self._connect():
            return
        assert self.pipe is not None
        kernel, stream = self.process.kernel, self._stream
        assert stream is not None and kernel.current is not None
        for message in self._requests:
            kernel.pass_by(kernel.current, says(message), stream.cut)
            self.pipe.send(message.SerializeToString())
            if self._ended:
                break
        self.pipe.send(None)

    def _connect(self) -> bool:
        kernel, network = self.process.kernel, self.network
        kernel.park(2 * network.delay_s(True))
        server: SimServer | None = network.listeners.get(self._address)
        if server is None or self._broken:
            self.break_off("no server")
            return False
        here, there = self.process.machine, server.process.machine
        if not (network.reaches(here, there) and network.reaches(there, here)):
            kernel.park(1.0)
            self.break_off("unreachable")
            return False
        self._stream = server.open(self)
        self.pipe = Pipe(network, here, there, self._stream.receive)
        self._stream.pipe = Pipe(network, there, here, self.receive)
        return True

    def _leave(self) -> None:
        """The server hears that this end is gone."""
        if self._ended:
            return
        self._ended = True
        stream, kernel = self._stream, self.process.kernel
        if stream is None:
            return
        if kernel.now < self.unheard_s:
            kernel.after(self.unheard_s - kernel.now, stream.closed)
        else:
            tell(self.process, stream.server.process, self.network, stream.closed)

    def _die(self) -> None:
        if self.pipe is not None and self.pipe.under_way:
            self.pipe.lose(self.process.kernel.random.randrange(self.pipe.under_way + 1))
        self._leave()

    # ---- what comes ----

    def receive(self, data: bytes | None) -> None:
        """A message arrives; None: the server has ended the stream."""
        self._inbox.append(data)
        self._arrived.wake(1)

    def break_off(self, why: str) -> None:
        """The connection broke."""
        if not self._broken:
            self._broken = why
            self._arrived.wake(1)


def tell(source: Process, target: Process, network: Network, action: Callable[[], None]) -> None:
    """Let the other end of a connection know of its end, when the network allows it."""
    kernel = source.kernel
    here, there = source.machine, target.machine

    def attempt() -> None:
        if not here.up:
            kernel.after(kernel.random.uniform(4.0, 12.0), action)
        elif not network.reaches(here, there):
            kernel.after(0.5, attempt)
        else:
            action()

    kernel.after(3 * network.delay_s(here is there), attempt)


def says(message: pb.MemberMessage | pb.SchedulerMessage) -> str:
    """Returns the name of the place at which a message leaves."""
    return f"says {message.WhichOneof('body')}"


class ServerStream:
    """The scheduler's end of a stream."""

    def __init__(self, server: SimServer, number: int, call: Call) -> None:
        self.server = server
        self.number = number
        self.call = call
        self.pipe: Pipe | None = None
        self.finished = self.gone = self.joined = False

    def receive(self, data: bytes | None) -> None:
        """A member's message arrives; None: there are no more."""
        if self.gone or not self.server.process.alive:
            return
        if data is None:
            self.finish()
            return
        message = pb.MemberMessage.FromString(data)
        if not self.joined:
            self.joined = True
            assert not malformed(message.hello), "a Hello that the service would refuse"
            self.server.events.put(Joined(stream=self.number, hello=message.hello))
        else:
            history = self.server.process.world.cluster.history
            history.complain(history.announced.heard(message, self.call.process.name))
            self.server.events.put(Received(stream=self.number, message=message))

    def put(self, message: pb.SchedulerMessage) -> None:
        """Queue a message for the member."""
        if not self.finished and not self.gone and self.pipe is not None:
            self.pipe.send(message.SerializeToString())

    def finish(self) -> None:
        """No more messages; then the stream ends."""
        if self.finished or self.gone:
            return
        self.finished = True
        if self.pipe is not None:
            self.pipe.send(None)
        kernel = self.server.process.kernel
        kernel.after(LAST_WORDS_S, self.closed)

    def cut(self) -> None:
        """End it now."""
        if not self.gone:
            call = self.call
            tell(self.server.process, call.process, call.network, lambda: call.break_off("cut"))
            self.closed()

    def half_open(self, unheard_s: float, *, at_member: bool) -> None:
        """Break one end; the other one hears nothing any more, and of that only so much later."""
        call = self.call
        if not at_member:
            call.process.kernel.after(unheard_s, lambda: call.break_off("cut"))
            self.closed()
        elif self.pipe is not None and call.pipe is not None:
            self.pipe.break_off()
            call.pipe.break_off()
            call.unheard_s = call.process.kernel.now + unheard_s
            call.break_off("reset")

    def closed(self) -> None:
        """The stream is over, whoever ended it."""
        if self.gone or not self.server.process.alive:
            return
        self.gone = True
        self.server.streams.pop(self.number, None)
        self.server.events.put(StreamClosed(stream=self.number))


class SimServer:
    """See :class:`penstock.daemons.scheduler.service.SchedulerServer`."""

    def __init__(
        self, process: Process, network: Network, address: str, events: EventQueue
    ) -> None:
        self.process = process
        self.events = events
        self.streams: dict[int, ServerStream] = {}
        self.replies: dict[int, Any] = {}
        self._network = network
        self._address = address
        self._streams_of: dict[str, int] = {}
        self._condemned: set[tuple[str, int]] = set()
        self._dismissed: tuple[Process, float] | None = None
        self._believed: dict[str, Process] = {}
        self._members: dict[tuple[str, int], Call] = {}
        self._next = 1
        self._tickets = 0
        self._calls = Calls(process.kernel)
        process.at_death.append(self._die)
        if not network.listen(address, self):
            raise OSError(f"{address} is taken")

    def open(self, call: Call) -> ServerStream:
        """A member connects."""
        stream = ServerStream(self, self._next, call)
        self._next += 1
        self.streams[stream.number] = stream
        return stream

    # ---- what the machine's thread calls ----

    port = 0

    def start(self) -> None:
        """It listens already."""

    def accept(self, stream: int, member: str) -> None:
        found = self.streams.get(stream)
        if found is not None:
            self._believe(found, member)
        self._streams_of[member] = stream
        self._put(stream, _HEARTBEAT)

    def send(self, member: str, message: pb.SchedulerMessage) -> None:
        self.process.kernel.point("send")
        announced = self.process.world.cluster.history.announced
        self.process.world.cluster.history.complain(announced.sends(member, message))
        if message.HasField("settle"):
            self.process.world.cluster.history.settles()
        if message.HasField("run_attempt"):
            history, run = self.process.world.cluster.history, message.run_attempt
            history.complain(history.numbers.begins(run.epoch, run.attempt))
            if history.vouched is not None:
                history.vouched.begins(run.attempt, run.data_position, run.base_version + 1)
        if message.HasField("fence"):
            self._condemned.add((message.fence.member, message.fence.pid))
            history = self.process.world.cluster.history
            history.fences(message.fence.member, message.fence.pid)
        number = self._streams_of.get(member)
        stream = None if number is None else self.streams.get(number)
        if stream is not None:
            kernel = self.process.kernel
            assert kernel.current is not None
            kernel.pass_by(kernel.current, says(message), stream.cut)
            stream.put(message)

    def beat(self) -> None:
        for stream in self._streams_of.values():
            self._put(stream, _HEARTBEAT)

    def refuse(self, stream: int, reason: str) -> None:
        found = self.streams.get(stream)
        if found is not None:
            found.put(pb.SchedulerMessage(refused=pb.Refused(reason=reason)))
            found.finish()

    def disconnect(self, stream: int) -> None:
        found = self.streams.get(stream)
        if found is not None:
            self._dismissed = (found.call.process, found.call.process.kernel.now)
            found.cut()

    def bid_farewell(self, status: pb.StatusReply) -> None:
        """Nobody watches."""

    def answer(self, effect: Reply | ReplyError) -> None:
        self.replies[effect.ticket] = effect
        self._calls.answered(effect.ticket)

    def close(self, grace_s: float = 1.0) -> None:
        cluster = self.process.world.cluster
        if cluster.scheduler_process is self.process:  # else it could not open its files
            cluster.history.complain(self._calls.unanswered(cluster.scheduler))
        self._network.leave(self._address, self)
        for stream in list(self.streams.values()):
            stream.finish()
        deadline = self.process.kernel.now + grace_s
        while self.streams and self.process.kernel.now < deadline:
            self.process.kernel.park(0.02)
        for stream in list(self.streams.values()):
            stream.cut()

    def _believe(self, stream: ServerStream, member: str) -> None:
        """A process is the member from now on."""
        process, history = stream.call.process, self.process.world.cluster.history
        if (member, process.pid) in self._condemned:
            history.violation(f"{member}: process {process.pid} was ordered dead and is believed")
        before = self._believed.get(member)
        if before is not None and before is not process and before.alive and self._dismissed:
            dismissed, at_s = self._dismissed
            if dismissed is before and self.process.kernel.now - at_s < AT_ONCE_S:
                history.violation(f"{member}: process {process.pid} took a living one's place")
        self._believed[member] = process
        self._members[member, process.pid] = stream.call

    # ---- what others do ----

    def late(self, hello: pb.Hello, delay_s: float) -> None:
        """A connection that a process made before it died, and whose first bytes come late."""
        call = self._members.get((hello.member, hello.pid))
        if call is None:
            return
        stream, kernel = self.open(call), self.process.kernel
        data = pb.MemberMessage(hello=hello).SerializeToString()
        kernel.after(delay_s, lambda: stream.receive(data))
        kernel.after(delay_s + LAST_WORDS_S, stream.closed)

    def ask(self, call: ControlCall, within_s: float | None = None) -> int:
        """A control client calls; returns its ticket."""
        self._tickets += 1
        if call is ControlCall.STOP:
            self.process.world.cluster.history.stop_heard(self.process)
        self._calls.asked(self._tickets, call.value)
        self.events.put(ControlAsked(ticket=self._tickets, call=call, within_s=within_s))
        return self._tickets

    def _put(self, number: int, message: pb.SchedulerMessage) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            stream.put(message)

    def _die(self) -> None:
        self._network.leave(self._address, self)
        for stream in self.streams.values():
            call, pipe = stream.call, stream.pipe
            if pipe is not None and pipe.under_way:
                pipe.lose(self.process.kernel.random.randrange(pipe.under_way + 1))
            tell(self.process, call.process, self._network, _breaking(call))


def _breaking(call: Call) -> Callable[[], None]:
    return lambda: call.break_off("the server is gone")


_HEARTBEAT = pb.SchedulerMessage(heartbeat=pb.Heartbeat())


class SimControlClient:
    """See :class:`penstock.protocol.wire.control.ControlClient`, of which nodes use one call."""

    def __init__(self, address: str, access: SimAccess) -> None:
        self._address = address
        self._access = access

    def __enter__(self) -> SimControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open."""

    def stop(self, within_s: float | None) -> None:
        """Raises LostMemberError without an answer in time."""
        process, network = self._access.process, self._access.network
        kernel = process.kernel
        deadline_s = kernel.now + CONTROL_TIMEOUT_S
        kernel.park(2 * network.delay_s(True))
        server: SimServer | None = network.listeners.get(self._address)
        if server is None:
            raise LostMemberError("nobody listens")
        here, there = process.machine, server.process.machine
        ticket = server.ask(ControlCall.STOP, within_s) if network.reaches(here, there) else 0
        while ticket not in server.replies or not network.reaches(there, here):
            if kernel.now > deadline_s or not server.process.alive:
                raise LostMemberError("no answer")
            kernel.park(1e-3)


__all__ = ["Queue", "SimAccess", "SimControlClient", "SimServer"]
