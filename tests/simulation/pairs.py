"""Faults that strike a process at a named point of its work: two rare ones, one after the other,
one behind a refill, a Drain in the middle of what takes long, and a message that is lost.

All points are equally likely, first and second, however rare the states are that lead there. The
second one is laid when the first has struck, so it often strikes in the recovery from the first,
and the process that it strikes is often the one that came in the first one's place.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from penstock.protocol.generated import scheduler_pb2 as pb
from tests.simulation.cluster import Cluster
from tests.simulation.kernel import Process, Trap
from tests.simulation.rare import MESSAGES, OF_SAVES, POINTS, WORK

PAIR = "one after the other"
AT_WORK = "drain at work"
LOST_MESSAGE = "lose a message"
BEHIND_A_REFILL = "strike behind a refill"
EXPIRES = 3
"""Decided attempts after which a trap that caught nobody is taken away."""
STANDS_STILL_S = (0.01, 0.3, 3.0)
HELD_S = (5e-3, 0.05, 0.3, 1.5)
"""How long at most a thread is held at its work while its epoch breaks."""
SLOW, SLOW_S = 50.0, 0.5
"""How many times as long work takes on a machine that is drained, and for how long at most."""
LOOKS_FOR_WHOLE = 12
"""After how many decisions a fault looks again for a replica that is whole."""
SOON_S = (1e-3, 2e-2, 0.2)
"""How long at most after a refill began another machine is lost."""

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
    ) -> None:
        self._cluster = cluster
        self._kernel = cluster.kernel
        self._effective = effective
        self._after_decisions = after_decisions
        self._for_a_while = for_a_while
        self._goes_down = goes_down

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
        kind = dice.choice([kind for kind in self._kinds(WORK) if kind != "schedulerd"])
        points = WORK[kind] if dice.random() < 0.7 else POINTS[kind]
        how = dice.choice(("hold", "hold", "hold", "drain"))
        passes = dice.choice((0, 1, 4))
        blow = _Blow(kind=kind, point=dice.choice(points), passes=passes, how=how)
        self._lay(blow, dice, lambda: None, AT_WORK)

    def lose_a_message(self, dice: random.Random) -> None:
        """A stream breaks just as a message leaves on it, between two that live."""
        kind = dice.choice(self._kinds(MESSAGES))
        message = dice.choice(MESSAGES[kind])
        blow = _Blow(
            kind=kind,
            point=f"says {message}",
            passes=dice.choice((0, 0, 1, 2)),
            how="break the stream",
        )
        self._lay(blow, dice, lambda: None, LOST_MESSAGE)
        if message in OF_SAVES:
            self._cluster.ask("snapshot")

    def strike_behind_a_refill(self, dice: random.Random) -> None:
        """A machine is lost whose replica is whole. As soon as its memory is to be filled from
        there another machine is lost, too, or a process is struck then or in the epoch behind it.
        """
        self._lose_a_kept_one(dice, LOOKS_FOR_WHOLE)

    def _lose_a_kept_one(self, dice: random.Random, looks: int) -> None:
        cluster = self._cluster
        whole = sorted(cluster.history.partners.whole)
        if not whole:
            if looks:
                self._after_decisions(1, partial(self._lose_a_kept_one, dice, looks - 1))
            return
        machines = range(len(cluster.machines))
        first, second = dice.choice(whole), dice.choice(machines)
        kind = dice.choice([*self._kinds(POINTS), "optimizerd", "optimizerd"])
        point, passes = dice.choice(POINTS[kind]), dice.choice((0, 0, 1, 3))
        blow = _Blow(kind=kind, point=point, passes=passes, how="die")

        def strike() -> None:
            if dice.random() < 0.4:
                delay_s = dice.random() * dice.choice(SOON_S)
                down = partial(self._goes_down, second, dice, BEHIND_A_REFILL)
                self._kernel.after(delay_s, down)
            else:
                self._lay(blow, dice, lambda: None, BEHIND_A_REFILL)

        if self._goes_down(first, dice, BEHIND_A_REFILL):
            cluster.history.at_refill.append(strike)

    def _kinds(self, table: dict[str, tuple[str, ...]]) -> list[str]:
        return [kind for kind in table if kind != "mirrord" or self._cluster.kept]

    def _blow(self, dice: random.Random) -> _Blow:
        kind = dice.choice(self._kinds(POINTS))
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

        def springs(process: Process, break_stream: Callable[[], None]) -> None:
            self._effective(fault)
            if blow.how == "break the stream":
                break_stream()
            else:
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
            self._break_the_epoch(dice)
        elif how == "hold":
            task = self._kernel.current
            assert task is not None
            task.held = True
            self._for_a_while(dice, dice.choice(HELD_S), lambda: setattr(task, "held", False))
            self._break_the_epoch(dice)
        elif how == "lose the machine":
            down = partial(self._goes_down, machines.index(process.machine), dice, PAIR)
            process.kill()
            self._kernel.after(0.0, down)
        else:
            process.kill()

    def _break_the_epoch(self, dice: random.Random) -> None:
        """Nobody dies: a worker says that messages were lost, or a member's stream breaks."""
        server = self._cluster.server
        streams = [] if server is None else list(server.streams.values())
        members = [stream for stream in streams if stream.call.process.kind != "node"]
        workers = [stream for stream in members if stream.call.process.kind == "worker"]
        if workers and dice.random() < 0.6:
            cut_off = pb.CutOff(epoch=self._cluster.history.epoch, loss="a connection broke")
            dice.choice(workers).call.says(pb.MemberMessage(cut_off=cut_off))
        elif members:
            dice.choice(members).cut()


PAIRS: dict[str, Callable[[Pairs, random.Random], None]] = {
    PAIR: Pairs.one_after_the_other,
    AT_WORK: Pairs.drain_at_work,
    LOST_MESSAGE: Pairs.lose_a_message,
    BEHIND_A_REFILL: Pairs.strike_behind_a_refill,
}
