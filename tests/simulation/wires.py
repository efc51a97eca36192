"""Faults of what is between processes: networks cut, connections and streams that break."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.cluster import Cluster

HALF_OPEN_S = 900.0
LOOKS_FOR_BUSY = 60
"""How often a fault looks for a connection on which something is under way."""
ForAWhile = Callable[[random.Random, float, Callable[[], None]], None]


class Wires:
    """``watch``: a fault of a kind counts as effective if it breaks the epoch; ``for_a_while`` ends
    a state some time, of so many seconds at most.
    """

    def __init__(
        self, cluster: Cluster, watch: Callable[[str], None], for_a_while: ForAWhile
    ) -> None:
        self._cluster = cluster
        self._kernel = cluster.kernel
        self._watch = watch
        self._for_a_while = for_a_while

    def cut_the_network(self, dice: random.Random) -> None:
        self._network(dice, both=True)

    def cut_one_way(self, dice: random.Random) -> None:
        self._network(dice, both=False)

    def _network(self, dice: random.Random, *, both: bool) -> None:
        network = self._cluster.network
        one, other = dice.sample(self._cluster.machines, 2)
        ways = [(one, other), (other, one)] if both else [(one, other)]
        self._watch("network")
        for source, target in ways:
            network.cut(source, target)

        def heal() -> None:
            for source, target in ways:
                network.heal(source, target)

        self._for_a_while(dice, dice.choice((0.2, 2.0, 8.0)), heal)

    def close_a_connection(self, dice: random.Random) -> None:
        """Between two that live: both hear of it, and what was under way is lost. Often one on
        which something is.
        """
        self._watch("close a connection")
        if dice.random() < 0.4:
            self._sever_a_busy_one(dice, LOOKS_FOR_BUSY)
            return
        links, server = self._cluster.network.open_connections(), self._cluster.server
        streams = [] if server is None else list(server.streams.values())
        if dice.random() < 0.5 and links:
            dice.choice(links).sever()
        elif streams:
            dice.choice(streams).cut()

    def _sever_a_busy_one(self, dice: random.Random, looks: int) -> None:
        busy = [link for link in self._cluster.network.open_connections() if link.busy]
        if busy:
            dice.choice(busy).sever()
        elif looks:
            again = partial(self._sever_a_busy_one, dice, looks - 1)
            self._kernel.after(dice.random() * 1e-3, again)

    def half_open_stream(self, dice: random.Random) -> None:
        """One end of a member's stream breaks, and the other hears nothing of it for as long as TCP
        has patience, as where something between the two forgot the connection. Often a node's:
        nobody replaces it.
        """
        server = self._cluster.server
        streams = [] if server is None else list(server.streams.values())
        nodes = [stream for stream in streams if stream.call.process.kind == "node"]
        if streams:
            self._watch("half-open stream")
            stream = dice.choice(nodes if nodes and dice.random() < 0.5 else streams)
            stream.half_open(HALF_OPEN_S, at_member=dice.random() < 0.4)


WIRES: dict[str, Callable[[Wires, random.Random], None]] = {
    "cut the network": Wires.cut_the_network,
    "cut one way": Wires.cut_one_way,
    "close a connection": Wires.close_a_connection,
    "half-open stream": Wires.half_open_stream,
}
