"""The loop of a fetchd: turns requests of local clients into reads of peers' memory.

It polls without pause while bytes arrive here or, according to hints, leave from here; otherwise it
polls every :data:`IDLE_MS`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from penstock.daemons.fetch.agent import Agent, Transfer, TransferError
from penstock.daemons.fetch.clients import MAX_CLIENTS, Client, Listener
from penstock.daemons.fetch.peers import AWAY_S, SILENT_S, Peer, Peers
from penstock.daemons.fetch.reads import Read, StaleError, Step
from penstock.daemons.fetch.serving import Serving
from penstock.host.errors import PenstockError, ProtocolError
from penstock.protocol.metrics.memory import READ_BYTES, READS
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.wire.frames import ReadReply, ReadRequest, encode

IDLE_MS = 2
LOOK_S = 0.0001
"""Seconds between checks of the sockets while it polls without pause."""
LIVELY_S = 0.05
"""It works without pause for so long after a peer's hint."""
CHORE_S = 0.5
TRANSFER_TIMEOUT_S = 4.0
"""Seconds for one transfer. A peer behind a cut network never reports a failure; it is only silent.
"""
MAX_RETIRED = 8
"""Limit of staging memories of disconnected clients that a silent peer may still write into."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Flight:
    """A read under way. ``client`` may be gone; its slot is busy all the same."""

    client: Client
    peer: Peer
    request: ReadRequest
    read: Read
    transfer: Transfer
    begun_s: float
    given_up: bool = False


class FetchService:
    """Serves until it is stopped, or its memory was replaced."""

    def __init__(
        self,
        *,
        agent: Agent,
        serving: Serving,
        listener: Listener,
        peers: Peers,
        memoryd: zmq.Socket[bytes],
        metrics: MetricRegistry,
        stopped: Callable[[], bool],
    ) -> None:
        """Creates the service. ``memoryd``: the local socket of the node's memoryd, which receives
        the offer.
        """
        self._agent = agent
        self._serving = serving
        self._listener = listener
        self._peers = peers
        self._memoryd = memoryd
        self._metrics = metrics
        self._stopped = stopped
        self._clients: dict[int, Client] = {}
        self._retired: list[Client] = []
        self._flights: list[_Flight] = []
        self._waiting: list[tuple[Client, ReadRequest]] = []
        self._lively_until_s = self._next_look_s = self._next_chore_s = 0.0

    def run(self) -> None:
        """Serves until stopped.

        Raises:
            PenstockError: too much memory waits for silent peers; fetchd must be restarted.
        """
        try:
            while not self._stopped():
                now_s = time.monotonic()
                if now_s >= self._next_chore_s:
                    if not self._serving.is_current:
                        _log.info("the node's memory was replaced: the service starts again")
                        return
                    self._do_chores(now_s)
                self._turn(now_s)
        finally:
            self._peers.close()

    def _turn(self, now_s: float) -> None:
        if self._agent.progress():
            self._lively_until_s = now_s + LIVELY_S
        self._advance(now_s)
        at_work = bool(self._flights) or now_s < self._lively_until_s
        if at_work and now_s < self._next_look_s:
            os.sched_yield()
            return
        self._look(0 if at_work else IDLE_MS)
        self._next_look_s = time.monotonic() + LOOK_S

    def _do_chores(self, now_s: float) -> None:
        self._next_chore_s = now_s + CHORE_S
        try:
            self._memoryd.send(encode(self._serving.offer), zmq.NOBLOCK)
        except zmq.Again:
            pass  # memoryd is being restarted; it gets the next offer
        self._peers.expire(now_s)
        self._retired = [client for client in self._retired if not self._freed(client)]
        if len(self._retired) > MAX_RETIRED:
            raise PenstockError(
                f"{len(self._retired)} staging memories wait for peers that are silent"
            )

    def _look(self, timeout_ms: int) -> None:
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        for descriptor in self._clients:
            poller.register(descriptor, zmq.POLLIN)
        lookups = self._peers.sockets
        for socket in lookups:
            poller.register(socket, zmq.POLLIN)
        for readable, _ in poller.poll(timeout_ms):
            if readable in lookups:
                self._peers.answered(lookups[readable], time.monotonic())
            elif readable == self._listener.socket.fileno():
                self._accept()
            elif isinstance(readable, int):
                self._receive(self._clients[readable])
        self._begin_waiting()

    def _accept(self) -> None:
        connection = self._listener.accept()
        if connection is None:
            return
        try:
            if len(self._clients) >= MAX_CLIENTS:
                raise ProtocolError(f"{MAX_CLIENTS} clients are connected already")
            client = Client(self._agent, connection, self._serving.offer.generation)
        except (OSError, PenstockError) as error:
            _log.warning("a client cannot be served: %s", error)
            connection.close()
            return
        self._clients[connection.fileno()] = client

    def _receive(self, client: Client) -> None:
        try:
            while (request := client.receive()) is not None:
                client.busy.add(request.slot)
                self._waiting.append((client, request))
        except ProtocolError as error:
            _log.debug("%s", error)
            self._retire(client)

    def _retire(self, client: Client) -> None:
        """Disconnects a client; its memory is freed after the last transfer into it."""
        if self._clients.pop(client.socket.fileno(), None) is not None:
            client.gone = True
            self._waiting = [entry for entry in self._waiting if entry[0] is not client]
            client.busy &= {f.request.slot for f in self._flights if f.client is client}
            self._retired.append(client)

    def _freed(self, client: Client) -> bool:
        if not client.busy:
            client.free()
        return not client.busy

    def _begin_waiting(self) -> None:
        """Begins waiting reads where possible; answers those without a reachable peer."""
        now_s, waiting = time.monotonic(), self._waiting
        self._waiting = []
        for client, request in waiting:
            peer = self._peers.find(request.address, now_s)
            if peer.places is not None:
                self._begin(client, request, peer, now_s)
            elif peer.asked_s is not None:
                self._waiting.append((client, request))
            else:
                self._answer(client, request, _away(request, peer.why))

    def _begin(self, client: Client, request: ReadRequest, peer: Peer, now_s: float) -> None:
        assert peer.places is not None, "the peer is met"
        try:
            read = Read(request.serial, request.block, peer.places, client.target(request.slot))
            transfer = self._agent.read(peer.name, read.pieces())
        except ProtocolError as error:  # memoryd will say the same
            self._answer(client, request, _away(request, str(error)))
        except TransferError as error:
            self._peers.away(peer, str(error), now_s + AWAY_S)
            self._answer(client, request, _away(request, str(error)))
        else:
            peer.flights += 1
            self._flights.append(_Flight(client, peer, request, read, transfer, now_s))

    def _advance(self, now_s: float) -> None:
        if not self._flights:
            return
        flights, self._flights = self._flights, []
        for flight in flights:
            try:
                still = self._step(flight, now_s)
            except (TransferError, StaleError) as error:
                why = str(error) or "an earlier fetchd has answered"
                self._peers.away(flight.peer, why, now_s + AWAY_S)
                self._land(flight, _away(flight.request, why))
            else:
                if still:
                    self._flights.append(flight)

    def _step(self, flight: _Flight, now_s: float) -> bool:
        """Returns whether the flight goes on."""
        if flight.read.step is Step.DATA and not flight.given_up:
            self._peers.hint(flight.peer, now_s)
        while self._agent.is_done(flight.transfer):
            reply = None if flight.given_up else flight.read.arrived()
            if flight.given_up or reply is not None:
                self._land(flight, reply)
                return False
            flight.transfer = self._agent.read(flight.peer.name, flight.read.pieces())
            flight.begun_s = now_s
        if not flight.given_up and now_s - flight.begun_s > TRANSFER_TIMEOUT_S:
            # Its bytes may still come: the slot stays busy, and its client gets other memory.
            flight.given_up = True
            why = f"silent for {TRANSFER_TIMEOUT_S:g} s in the middle of a read"
            self._peers.away(flight.peer, why, now_s + SILENT_S)
            flight.client.reply(_away(flight.request, why))
            self._retire(flight.client)
        return True

    def _land(self, flight: _Flight, reply: ReadReply | None) -> None:
        self._peers.landed(flight.peer)
        if reply is None:
            flight.client.busy.discard(flight.request.slot)
        else:
            self._answer(flight.client, flight.request, reply)

    def _answer(self, client: Client, request: ReadRequest, reply: ReadReply) -> None:
        client.busy.discard(request.slot)
        client.reply(reply)
        self._metrics.add(READS.name, 1, reply.status)
        if reply.status == "ok":
            self._metrics.add(READ_BYTES.name, request.block.num_bytes)


def _away(request: ReadRequest, why: str) -> ReadReply:
    return ReadReply(serial=request.serial, status="away", incarnation=0, sequence=0, error=why)
