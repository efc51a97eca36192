"""Finds the fetchds of other nodes through their memoryds, connects, disconnects and reconnects.

A memoryd publishes the offer of its node's fetchd: addresses, keys, and the generation that
distinguishes its starts. So fetchd does not listen here, and memoryd decides which clients may ask.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import zmq

from penstock.daemons.fetch.agent import Agent, TransferError
from penstock.daemons.fetch.reads import Places
from penstock.host.errors import PenstockError, ProtocolError
from penstock.protocol.run.names import node_index
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.wire.blocks import connect
from penstock.protocol.wire.frames import AgentReply, AgentRequest, decode, encode
from penstock.protocol.wire.sockets import OPEN, SocketAccess

LOOKUP_TIMEOUT_S = 2.0
AWAY_S = 0.5
"""A peer that had nothing to offer, or failed, is asked again so much later."""
SILENT_S = 10.0
"""The same of one that did not finish a read in time."""
HINT_S = 0.02

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Peer:
    """Another node, as the address of its memoryd names it. ``places`` None: not met now."""

    address: str
    socket: zmq.Socket[bytes] | None = None
    places: Places | None = None
    name: str = ""
    generation: int = 0
    asked_s: float | None = None
    away_until_s: float = 0.0
    why: str = ""
    flights: int = 0
    """Reads of it under way; it cannot be forgotten before they have ended."""
    hinted_s: float = 0.0


class Peers:
    """All that were asked for. Belongs to the service's thread."""

    def __init__(
        self,
        agent: Agent,
        run: RunDirectory,
        context: zmq.Context[Any],
        access: SocketAccess = OPEN,
    ) -> None:
        """Creates the set of peers. ``access``: credentials shown to memoryds of other nodes."""
        self._access = access
        self._agent = agent
        self._run = run
        self._context = context
        self._peers: dict[str, Peer] = {}

    @property
    def sockets(self) -> dict[zmq.Socket[bytes], Peer]:
        """Those on which answers are awaited."""
        return {
            peer.socket: peer
            for peer in self._peers.values()
            if peer.socket is not None and peer.asked_s is not None
        }

    def find(self, address: str, now_s: float) -> Peer:
        """Returns the peer; a lookup begins if it is not known, or was away long enough."""
        peer = self._peers.setdefault(address, Peer(address))
        known = peer.places is not None or peer.asked_s is not None
        if not known and not peer.flights and now_s >= peer.away_until_s:
            self._forget(peer)
            if peer.socket is None:
                try:
                    peer.socket = connect(self._context, address, self._access)
                except ProtocolError as error:
                    self.away(peer, str(error), now_s + AWAY_S)
                    return peer
            request = AgentRequest(run_id=self._run.run_id, generation=peer.generation)
            peer.socket.send(encode(request), zmq.NOBLOCK)
            peer.asked_s = now_s
        return peer

    def answered(self, peer: Peer, now_s: float) -> None:
        """Handles a lookup's answer, and connects to the peer."""
        assert peer.socket is not None, "an answer came on a socket"
        try:
            reply = decode(peer.socket.recv(zmq.NOBLOCK), AgentReply)
            if not reply.offers:
                raise ProtocolError(reply.error or "there is no fetchd on that node")
            offer = reply.offers[0]
            if offer.run_id != self._run.run_id:
                raise ProtocolError("it is of another run")
            self._access.check(peer.address, offer.node)
            spec = self._run.memory_spec(node_index(self._run.config, offer.node))
            places = Places(offer, spec)
            name = self._agent.add_peer(offer.metadata)
        except zmq.Again:
            return
        except PenstockError as error:
            self.away(peer, str(error), now_s + AWAY_S)
            return
        peer.asked_s, peer.why = None, ""
        peer.places, peer.name, peer.generation = places, name, offer.generation
        _log.info("met fetchd.%s, generation %x", offer.node, offer.generation)

    def expire(self, now_s: float) -> None:
        """Drops lookups without an answer."""
        for peer in self._peers.values():
            if peer.asked_s is not None and now_s - peer.asked_s > LOOKUP_TIMEOUT_S:
                self._hang_up(peer)
                self.away(peer, f"memoryd at {peer.address} does not answer", now_s + AWAY_S)

    def away(self, peer: Peer, why: str, until_s: float) -> None:
        """Marks the peer as unreachable until then; running transfers end by themselves."""
        if peer.places is not None:
            _log.warning("fetchd of the node at %s: %s", peer.address, why)
        peer.asked_s, peer.places, peer.why, peer.away_until_s = None, None, why, until_s
        if not peer.flights:
            self._forget(peer)

    def landed(self, peer: Peer) -> None:
        """Notes that a read from the peer has ended, with or without success."""
        peer.flights -= 1
        if not peer.flights and peer.places is None:
            self._forget(peer)

    def hint(self, peer: Peer, now_s: float) -> None:
        """Keeps the peer lively while its bytes are on their way."""
        if now_s - peer.hinted_s > HINT_S:
            peer.hinted_s = now_s
            self._agent.hint(peer.name)

    def close(self) -> None:
        """Closes the connections to memoryds."""
        for peer in self._peers.values():
            self._hang_up(peer)

    def _forget(self, peer: Peer) -> None:
        name, peer.name = peer.name, ""
        if name:
            try:
                self._agent.remove_peer(name)
            except TransferError as error:
                _log.info("%s: %s", name, error)

    def _hang_up(self, peer: Peer) -> None:
        if peer.socket is not None:
            peer.socket.close(linger=0)
            peer.socket = None
