"""Faults of whole runs: what is done to which process, when, and how one is drawn at random.

Only values and the draw are here; :mod:`tests.system.striking` carries faults out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Blow(StrEnum):
    """What happens to a process."""

    KILL = "kill"
    PAUSE = "stop for a while"
    STOP = "stop for ever"
    TERM = "ask to end"


class Kind(StrEnum):
    """When a fault happens, and to how many processes."""

    START = "while the run starts"
    STEP = "while it trains"
    SWEEP = "inside a native sweep"
    PAIR = "two processes at once"
    RECOVERY = "one more while the run recovers"
    EVALUATION = "while it evaluates"
    SAVING = "while it saves"
    ENDING = "while it ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A blow to one process, ``after_s`` the fault's instant. ``seconds``: of a pause."""

    target: str
    blow: Blow
    after_s: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        how = f" ({self.seconds:.2f} s)" if self.blow is Blow.PAUSE else ""
        return f"{self.blow} {self.target}{how} after {self.after_s:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: not before ``step`` is committed, at the instant that ``kind`` says."""

    kind: Kind
    step: int
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        return f"{self.kind}, from step {self.step}: " + ", then ".join(map(str, self.strikes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The processes of a run, by kind, and its steps. It evaluates and saves every ``interval``
    steps.
    """

    nodes: tuple[str, ...]
    workers: int
    steps: int
    interval: int

    def members(self, kind: str) -> tuple[str, ...]:
        """Names of the processes of a kind."""
        if kind == "worker":
            return tuple(f"worker.{device}" for device in range(self.workers * len(self.nodes)))
        if kind in ("train", "schedulerd"):
            return (kind,)
        return tuple(f"{kind}.{node}" for node in self.nodes)


WEIGHTS = {"worker": 4, "optimizerd": 4, "memoryd": 3, "schedulerd": 3, "node": 2, "train": 2}
"""How often each kind of process is struck. ``train`` is the command that the user gave; the same
one is given again after it was killed, or asked to end: then all its processes get a SIGTERM, as
batch systems do it.
"""

BLOWS = {Blow.KILL: 5, Blow.PAUSE: 2, Blow.STOP: 3}
BLOWS_TO_TRAIN = {Blow.KILL: 2, Blow.PAUSE: 1, Blow.TERM: 2}
LONG_PAUSE_S = (2.5, 4.0)
"""Beyond the heartbeat deadline of 2 s: the process is replaced before it wakes."""
SHORT_PAUSE_S = (0.1, 1.5)

LONGEST_WAIT_S = {
    Kind.START: 6.0,
    Kind.EVALUATION: 0.1,
    Kind.SAVING: 0.03,
    Kind.ENDING: 0.4,
}
"""After the condition of a kind holds, its fault waits for up to so long; the others 0.3 s."""


def draw(source: random.Random, cast: Cast, count: int) -> tuple[Fault, ...]:
    """``count`` faults of one run, in the order of their steps: one of each kind first, then any
    while it trains.
    """
    kinds = [kind for kind in Kind if kind is not Kind.STEP]
    chosen = source.sample(kinds, min(count, len(kinds)))
    chosen += [Kind.STEP] * (count - len(chosen))
    faults = [_fault(source, cast, kind) for kind in chosen]
    return tuple(sorted(faults, key=lambda fault: (fault.step, fault.kind is Kind.ENDING)))


def _fault(source: random.Random, cast: Cast, kind: Kind) -> Fault:
    wait_s = source.uniform(0.0, LONGEST_WAIT_S.get(kind, 0.3))
    step = source.randrange(1, cast.steps - 2)
    boundary = cast.interval * source.randrange(1, cast.steps // cast.interval)
    first = _strike(source, cast, wait_s)
    match kind:
        case Kind.START:
            return Fault(kind=kind, step=0, strikes=(first,))
        case Kind.EVALUATION:
            return Fault(kind=kind, step=boundary, strikes=(first,))
        case Kind.SAVING:
            return Fault(kind=kind, step=boundary - 1, strikes=(first,))
        case Kind.ENDING:
            return Fault(kind=kind, step=cast.steps, strikes=(first,))
        case Kind.SWEEP:
            victim = source.choice(cast.members("optimizerd"))
            killed = Strike(target=victim, blow=Blow.KILL, after_s=wait_s)
            return Fault(kind=kind, step=step // 2, strikes=(killed,))  # it takes some tries
        case Kind.PAIR:
            return Fault(kind=kind, step=step, strikes=(first, _other(source, cast, first, wait_s)))
        case Kind.RECOVERY:
            killed = Strike(target=first.target, blow=Blow.KILL, after_s=wait_s)
            second = _other(source, cast, first, wait_s + source.uniform(0.02, 1.5))
            return Fault(kind=kind, step=step, strikes=(killed, second))
        case Kind.STEP:
            return Fault(kind=kind, step=step, strikes=(first,))


def _strike(source: random.Random, cast: Cast, after_s: float) -> Strike:
    [process] = source.choices(list(WEIGHTS), list(WEIGHTS.values()))
    blows = BLOWS_TO_TRAIN if process == "train" else BLOWS
    [blow] = source.choices(list(blows), list(blows.values()))
    seconds = source.uniform(*source.choice((SHORT_PAUSE_S, LONG_PAUSE_S)))
    return Strike(
        target=source.choice(cast.members(process)),
        blow=blow,
        after_s=after_s,
        seconds=seconds if blow is Blow.PAUSE else 0.0,
    )


def _other(source: random.Random, cast: Cast, first: Strike, after_s: float) -> Strike:
    """A strike at another process than the first one's."""
    while True:
        second = _strike(source, cast, after_s)
        if second.target != first.target:
            return second
