"""What carries bytes between processes: links with delays, order, partitions and losses.

A :class:`Pipe` is one direction of one connection: in order, late by a random time. Between
machines that are cut from each other it holds everything back, and delivers it when the cut ends
before the connection's patience does; then it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.kernel import Kernel, Machine

LOCAL_S = 80e-6
REMOTE_S = 400e-6


class Network:
    """All connections of a cluster."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.listeners: dict[str, Any] = {}
        self.awaiting: dict[str, list[Callable[[], None]]] = {}
        self.held: list[Pipe] = []
        self.connections: list[Any] = []
        """ZeroMQ's, seen from the end that connected; see :meth:`open_connections`."""
        self.slow = 1.0
        self._often_late = kernel.random.choice((0.01, 0.01, 0.1))
        self._skewed = kernel.random.random() < 0.5
        self._port = 20000

    def new_port(self) -> int:
        """Returns a port that nobody has had."""
        self._port += 1
        return self._port

    def listen(self, address: str, listener: Any) -> bool:
        """Take an address; returns False if somebody has it."""
        if address in self.listeners:
            return False
        self.listeners[address] = listener
        for connect in self.awaiting.pop(address, ()):
            self.kernel.after(self.delay_s(True), connect)
        return True

    def leave(self, address: str, listener: Any) -> None:
        """Give an address back."""
        if self.listeners.get(address) is listener:
            del self.listeners[address]

    def open_connections(self) -> list[Any]:
        """Returns the connections of ZeroMQ whose ends both live."""
        self.connections = [link for link in self.connections if link.open]
        return self.connections

    def delay_s(self, local: bool) -> float:
        """Returns how long a message takes now."""
        random = self.kernel.random
        delay_s = (LOCAL_S if local else REMOTE_S) * (0.2 + random.random()) * self.slow
        return delay_s * 50 if random.random() < self._often_late else delay_s

    def skew(self) -> float:
        """Returns how many times slower than others a new connection is, in one direction."""
        if not self._skewed:
            return 1.0
        return self.kernel.random.choice((1.0, 1.0, 1.0, 8.0, 40.0))

    @staticmethod
    def reaches(source: Machine, target: Machine) -> bool:
        """Returns whether bytes get from one machine to another."""
        return target.name not in source.cut_from

    def cut(self, source: Machine, target: Machine) -> None:
        """Let nothing through from one machine to another."""
        source.cut_from.add(target.name)

    def heal(self, source: Machine, target: Machine) -> None:
        """Let everything through again: what was held back first."""
        source.cut_from.discard(target.name)
        held, self.held = self.held, []
        for pipe in held:
            pipe.flush()


class Pipe:
    """One direction of a connection."""

    def __init__(
        self, network: Network, source: Machine, target: Machine, deliver: Callable[[Any], None]
    ) -> None:
        self._network = network
        self._source, self._target = source, target
        self._deliver = deliver
        self._skew = network.skew()
        self._free_s = 0.0
        self._waiting: list[Any] = []
        self.broken = False
        self.sent = self.arrived = 0

    def send(self, message: Any) -> None:
        """Take a message along; it comes later, behind those before it."""
        if self.broken:
            return
        self.sent += 1
        self._waiting.append(message)
        if not self._network.reaches(self._source, self._target):
            if self not in self._network.held:
                self._network.held.append(self)
            return
        self._schedule()

    def flush(self) -> None:
        """The way is free again, or not."""
        if self._network.reaches(self._source, self._target):
            for _ in range(len(self._waiting)):
                self._schedule()
        elif self not in self._network.held:
            self._network.held.append(self)

    def lose(self, keep: int) -> None:
        """Whoever sends is dead: of what is under way, the first ``keep`` messages come."""
        del self._waiting[keep:]

    def break_off(self) -> None:
        """Nothing comes any more."""
        self.broken = True
        self._waiting.clear()

    @property
    def under_way(self) -> int:
        """Messages that were sent and have not come."""
        return len(self._waiting)

    def _schedule(self) -> None:
        kernel = self._network.kernel
        local = self._source is self._target
        at_s = max(self._free_s, kernel.now + self._skew * self._network.delay_s(local))
        self._free_s = at_s
        kernel.after(at_s - kernel.now, self._arrive)

    def _arrive(self) -> None:
        if not self._waiting or self.broken:
            return
        if not self._network.reaches(self._source, self._target):
            if self not in self._network.held:
                self._network.held.append(self)
            return
        self.arrived += 1
        self._deliver(self._waiting.pop(0))
