"""Faults that strike a process at a named point of its work: two rare ones, one after the other,
and a Drain in the middle of what takes long.

All points are equally likely, first and second, however rare the states are that lead there. The
second one is laid when the first has struck, so it often strikes in the recovery from the first,
and the process that it strikes is often the one that came in the first one's place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.simulation.cluster import Cluster
from tests.simulation.kernel import Process, Trap
from tests.simulation.rare import POINTS, WORK

PAIR = "one after the other"
EXPIRES = 3
"""Decided attempts after which a trap that caught nobody is taken away."""
AT_WORK = "drain at work"
STANDS_STILL_S = (0.01, 0.3, 3.0)
SLOW, SLOW_S = 50.0, 0.5
"""How many times as long work takes on a machine that is drained, and for how long at most."""

ForAWhile = Callable[[random.Random, float, Callable[[], None]], None]
AfterDecisions = Callable[[int, Callable[[], None]], None]
GoesDown = Callable[[int, random.Random, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blow:
    """``passes``: times that the point is passed before; ``how``: what happens to the process."""

    kind: str
    point: str
    passes: int
    how: str


class Pairs:
    """``effective`` counts a fault of a kind; the others are what an injector can do."""

    def __init__(
        self,
        cluster: Cluster,
        effective: Callable[[str], None],
        after_decisions: AfterDecisions,
        for_a_while: ForAWhile,
        goes_down: GoesDown,
        close_a_connection: Callable[[random.Random], None],
    ) -> None:
        self._cluster = cluster
        self._kernel = cluster.kernel
        self._effective = effective
        self._after_decisions = after_decisions
        self._for_a_while = for_a_while
        self._goes_down = goes_down
        self._close_a_connection = close_a_connection

    def one_after_the_other(self, dice: random.Random) -> None:
        """In half of all cases memory is filled, or saved, meanwhile."""
        first, second = self._blow(dice), self._blow(dice)
        self._lay(first, dice, lambda: self._lay(second, dice, lambda: None))
        prelude = dice.choice(("", "", "lose memory", "save"))
        if prelude == "lose memory":
            self._goes_down(dice.randrange(len(self._cluster.machines)), dice, PAIR)
        elif prelude == "save":
            self._cluster.ask("snapshot")

    def drain_at_work(self, dice: random.Random) -> None:
        """The epoch breaks while a process is at work, and nobody is dead: so the Drain comes at
        once, and what goes on is not over by then.
        """
        kinds = [kind for kind in WORK if kind != "mirrord" or self._cluster.kept]
        kind = dice.choice(kinds)
        passes, point = dice.choice((0, 1, 4)), dice.choice(WORK[kind])
        blow = _Blow(kind=kind, point=point, passes=passes, how="drain")
        self._lay(blow, dice, lambda: None, AT_WORK)

    def _blow(self, dice: random.Random) -> _Blow:
        kinds = [kind for kind in POINTS if kind != "mirrord" or self._cluster.kept]
        kind = dice.choice(kinds)
        return _Blow(
            kind=kind,
            point=dice.choice(POINTS[kind]),
            passes=dice.choice((0, 0, 1, 3)),
            how=dice.choices(("die", "lose the machine", "stand still", "drain"), (6, 1, 1, 2))[0],
        )

    def _lay(
        self, blow: _Blow, dice: random.Random, then: Callable[[], None], fault: str = PAIR
    ) -> None:
        if blow.point == "cut":
            self._cut(blow.kind, dice, then)
            return

        def springs(process: Process) -> None:
            self._effective(fault)
            self._strike(process, blow.how, dice)
            then()

        trap = Trap(kind=blow.kind, point=blow.point, passes=blow.passes, springs=springs)
        self._kernel.trap = trap

        def expire() -> None:
            if self._kernel.trap is trap:
                self._kernel.trap = None

        self._after_decisions(EXPIRES, expire)

    def _cut(self, kind: str, dice: random.Random, then: Callable[[], None]) -> None:
        victims = [process for process in self._cluster.living if process.kind == kind]
        if victims:
            self._cluster.cuts[dice.choice(victims).name] = dice.random()
            self._cluster.history.at_cut.append(then)

    def _strike(self, process: Process, how: str, dice: random.Random) -> None:
        machines = self._cluster.machines
        if how == "stand still":
            process.stop()
            self._for_a_while(dice, dice.choice(STANDS_STILL_S), process.go_on)
        elif how == "drain":
            machine = process.machine
            machine.slow = SLOW
            self._for_a_while(dice, SLOW_S, lambda: setattr(machine, "slow", 1.0))
            self._close_a_connection(dice)
        elif how == "lose the machine":
            down = partial(self._goes_down, machines.index(process.machine), dice, PAIR)
            process.kill()
            self._kernel.after(0.0, down)
        else:
            process.kill()


PAIRS: dict[str, Callable[[Pairs, random.Random], None]] = {
    PAIR: Pairs.one_after_the_other,
    AT_WORK: Pairs.drain_at_work,
}
