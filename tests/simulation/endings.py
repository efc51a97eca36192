"""Faults about the end of a run: who asks for it, and who dies, or is away, when it comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.simulation.cluster import Cluster
from tests.simulation.kernel import Machine, Process

VICTIMS = {"schedulerd": 6, "node": 2, "memoryd": 2, "optimizerd": 2, "worker": 2, "mirrord": 2}

LOOKS = 50
"""For so many milliseconds a save is waited for."""

ForAWhile = Callable[[random.Random, float, Callable[[], None]], None]


class Endings:
    """``effective`` counts a fault of a kind; ``for_a_while`` ends a state some time, of so many
    seconds at most.
    """

    def __init__(
        self, cluster: Cluster, effective: Callable[[str], None], for_a_while: ForAWhile
    ) -> None:
        self._cluster = cluster
        self._kernel = cluster.kernel
        self._effective = effective
        self._for_a_while = for_a_while

    def stop_the_run(self, dice: random.Random) -> None:
        """A control client asks for it."""
        if self._cluster.ask("stop"):
            self._effective("stop the run")
            self._perhaps_without_its_scheduler(dice)

    def stop_a_node(self, dice: random.Random) -> None:
        """A node is signalled, as a service manager does where a machine goes down."""
        index = dice.choice((0, dice.randrange(len(self._cluster.nodes))))
        if self._cluster.stop_node(index):
            self._effective("stop a node")
            self._perhaps_without_its_scheduler(dice)

    def _perhaps_without_its_scheduler(self, dice: random.Random) -> None:
        """Who has heard of a stop dies before the state is saved, or is about to."""
        if dice.random() < 0.5:
            strike = partial(self._kill, dice, "kill after a stop", kinds=("schedulerd",))
            self._kernel.after(dice.expovariate(1.0) * 8e-3, strike)

    def stop_in_a_recovery(self, dice: random.Random) -> None:
        """Somebody dies; a stop comes before the next epoch is live. At times when all is saved:
        then nobody is waited for.
        """
        if dice.random() < 0.5 and self._cluster.ask("snapshot"):
            self._when_saved(dice, LOOKS)
        else:
            self._kill_and_stop(dice)

    def _when_saved(self, dice: random.Random, looks: int) -> None:
        machine = self._cluster.scheduler
        if machine is None or not looks or not machine.mirror.unsaved:
            self._kill_and_stop(dice)
        else:
            self._kernel.after(1e-3, partial(self._when_saved, dice, looks - 1))

    def _kill_and_stop(self, dice: random.Random) -> None:
        self._kill(dice, "stop in a recovery")
        ask = dice.choice((self.stop_the_run, self.stop_a_node))
        self._kernel.after(dice.expovariate(1.0) * 20e-3, lambda: ask(dice))

    def insist(self, dice: random.Random) -> None:
        """All nodes are signalled, and once more soon: nothing is saved any more."""
        cluster = self._cluster
        for index in range(len(cluster.nodes)):
            cluster.stop_node(index)
        self._effective("insist")
        self._for_a_while(dice, dice.choice((1e-3, 20e-3, 1.0)), cluster.insist)

    def stop_in_a_hurry(self, dice: random.Random) -> None:
        """All nodes are signalled by somebody who kills what is left soon."""
        self._cluster.stop_all(dice.choice((0.5, 1.0, 3.0, 10.0)))
        self._effective("stop in a hurry")

    def pause(self, dice: random.Random) -> None:
        """Training rests for a while; or until somebody stops it, whom the scheduler cannot hear
        at the moment.
        """
        cluster = self._cluster
        if not cluster.ask("pause"):
            return
        if dice.random() < 0.25:
            self._for_a_while(dice, dice.choice((2.0, 8.0)), self._resume)
            return
        others = range(1, len(cluster.nodes))
        index = dice.choice(others) if others and dice.random() < 0.8 else 0
        if index:
            self._cut_off(dice, index, dice.choice((0.5, 8.0)))
        elif dice.random() < 0.5:
            self._kill(dice, "pause", kinds=("schedulerd",))
        node = cluster.nodes[index]
        if cluster.stop_node(index) and node is not None and node.process is not None:
            self._effective("pause")
            node.process.at_death.append(partial(self._resume_unless_ended, node.process))
        else:
            self._resume()

    def _resume_unless_ended(self, node: Process) -> None:
        """A node that was killed before it could pass a stop on has nobody go on."""
        if node.code is not None and node.code < 0:
            self._resume()

    def _resume(self) -> None:
        self._cluster.ask("resume")

    def strike_at_the_end(self, dice: random.Random) -> None:
        """A moment after the run's end is noted the next time. At times training rests before, so
        that who dies has lived for long, and is started again at once.
        """
        if dice.random() < 0.3 and self._cluster.ask("pause"):
            self._for_a_while(dice, 16.0, self._resume)

        def strike() -> None:
            delay_s = dice.choice((0.0, 2e-3, 20e-3, 0.2))
            for _ in range(dice.randint(1, 3)):
                after_s = dice.random() * delay_s
                self._kernel.after(after_s, partial(self._kill, dice, "strike at the end"))

        self._cluster.history.at_end.append(strike)

    def away_at_the_end(self, dice: random.Random) -> None:
        """Nobody reaches a node, and it reaches nobody, when the run ends the next time."""

        def cut_off() -> None:
            self._effective("away at the end")
            index = dice.randrange(1, len(self._cluster.nodes))
            self._cut_off(dice, index, dice.choice((2.0, 60.0)))

        def at_end() -> None:
            delay_s = dice.choice((0.0, 0.0, 1e-3))
            if delay_s:
                self._kernel.after(dice.random() * delay_s, cut_off)
            else:
                cut_off()

        self._cluster.history.at_end.append(at_end)

    def _cut_off(self, dice: random.Random, index: int, longest_s: float) -> None:
        """Cut one machine from all others."""
        machine, network = self._cluster.machines[index], self._cluster.network
        ways: list[tuple[Machine, Machine]] = []
        for other in self._cluster.machines:
            if other is not machine:
                ways += [(machine, other), (other, machine)]
        for source, target in ways:
            network.cut(source, target)

        def heal() -> None:
            for source, target in ways:
                network.heal(source, target)

        self._for_a_while(dice, longest_s, heal)

    def _kill(self, dice: random.Random, kind: str, kinds: tuple[str, ...] = ()) -> None:
        living: list[Process] = [
            p for p in self._cluster.living if p.kind in (kinds or tuple(VICTIMS))
        ]
        if living:
            self._effective(kind)
            dice.choices(living, [VICTIMS[p.kind] for p in living])[0].kill()


ENDINGS: dict[str, Callable[[Endings, random.Random], None]] = {
    "stop the run": Endings.stop_the_run,
    "stop a node": Endings.stop_a_node,
    "stop in a recovery": Endings.stop_in_a_recovery,
    "insist": Endings.insist,
    "stop in a hurry": Endings.stop_in_a_hurry,
    "pause": Endings.pause,
    "strike at the end": Endings.strike_at_the_end,
    "away at the end": Endings.away_at_the_end,
}
