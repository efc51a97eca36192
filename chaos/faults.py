"""Faults of whole runs: what is done to which process, when, and how one is drawn at random.

Only values and the draw are here; :mod:`penstock.chaos.faulted_run` carries faults out.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Blow(StrEnum):
    """What happens to one process, connection or file system."""

    KILL = "kill"
    PAUSE = "stop for a while"
    STOP = "stop for ever"
    TERM = "ask to end"
    CLOSE = "close a connection of"
    DEAFEN = "cut a connection of, unsaid"
    FILL = "fill"
    AGAIN = "start a second time"
    LOSE = "lose, with its memory and all its processes,"


class FaultKind(StrEnum):
    """Names of faults, as ``--kinds`` takes them."""

    KILL = "kill"
    SEVERAL = "several"
    RECOVERY = "recovery"
    SWEEP = "sweep"
    PAUSE = "pause"
    STOP = "stop"
    TERM = "term"
    CLOSED = "closed"
    HALF_OPEN = "half-open"
    DISK = "disk"
    SHM = "shm"
    SECOND = "second"
    LOST = "lost"


MEANINGS: Mapping[FaultKind, str] = {
    FaultKind.KILL: "SIGKILL of one process",
    FaultKind.SEVERAL: "SIGKILL of two to four at once",
    FaultKind.RECOVERY: "SIGKILL of one process, and up to five more blows while the run recovers",
    FaultKind.SWEEP: "SIGKILL of an optimizerd inside a native sweep",
    FaultKind.PAUSE: "SIGSTOP for a while",
    FaultKind.STOP: "SIGSTOP for ever",
    FaultKind.TERM: "SIGTERM to all processes, then the same command",
    FaultKind.CLOSED: "a connection closes",
    FaultKind.HALF_OPEN: "a TCP connection falls silent, in one direction or both",
    FaultKind.DISK: "the run directory's disk is full for a while",
    FaultKind.SHM: "/dev/shm is full while a process dies, or while the run starts",
    FaultKind.SECOND: "the same command while the run lives",
    FaultKind.LOST: "a node dies with its memory, and up to three more blows while it comes back",
}


class Moment(StrEnum):
    """When a fault happens."""

    STEP = "while it trains"
    START = "while it starts"
    EVALUATION = "while it evaluates"
    SAVING = "while it saves"
    ENDING = "while it ends"


HELPERS = frozenset(
    ("metricsd", "observerd", "fetchd", "tracker", "preload-plain", "preload-torch")
)
"""A run goes on without them: nobody else is replaced when one dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A blow to ``target``, ``after_s`` the fault's instant.

    ``seconds``: of a pause or a full disk. ``which``: from 0 to 1, chooses a connection;
    ``one_way``: only one of its ends no longer hears the other.
    """

    target: str
    blow: Blow
    after_s: float = 0.0
    seconds: float = 0.0
    which: float = 0.0
    one_way: bool = False

    def __str__(self) -> str:
        how = f" ({self.seconds:.2f} s)" if self.seconds else " (one way)" if self.one_way else ""
        return f"{self.blow} {self.target}{how} after {self.after_s:.3f} s"

    @property
    def breaks_epoch(self) -> bool:
        """Returns whether nobody can train on in the same epoch; a pause may be short enough."""
        fatal = self.blow in (Blow.KILL, Blow.STOP, Blow.TERM, Blow.LOSE)
        return fatal and self.target.partition(".")[0] not in HELPERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, at the instant that ``moment`` says, not before ``gap_steps`` more steps."""

    kind: FaultKind
    moment: Moment
    gap_steps: int
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        what = ", then ".join(map(str, self.strikes))
        return f"{self.kind} {self.moment}, from {self.gap_steps} steps on: {what}"

    @property
    def targets(self) -> frozenset[str]:
        """The kinds of processes that are struck: ``worker`` for ``worker.1``."""
        return frozenset(strike.target.partition(".")[0] for strike in self.strikes)

    def waits_for_timeout(self, heartbeat_timeout_s: float) -> bool:
        """Returns whether nobody can know of it before a deadline: silence looks like patience."""
        return any(
            strike.blow in (Blow.STOP, Blow.DEAFEN)
            or (strike.blow is Blow.PAUSE and strike.seconds > heartbeat_timeout_s)
            for strike in self.strikes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who can be struck: names of a run's processes (``train`` is the command that the user gave),
    and what it does besides training. ``gap_steps``: at most so many steps lie between two faults.
    """

    names: tuple[str, ...]
    heartbeat_timeout_s: float
    gap_steps: int
    evaluates: bool
    saves: bool

    def members(self, kind: str) -> tuple[str, ...]:
        """Returns the names of the processes of a kind."""
        return tuple(name for name in self.names if name.partition(".")[0] == kind)

    @property
    def processes(self) -> tuple[str, ...]:
        """The kinds of processes."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.names))

    def possible(self, kinds: Collection[FaultKind]) -> frozenset[FaultKind]:
        """Returns those of ``kinds`` for which there are processes enough."""
        impossible = set()
        members = set(self.processes) - HELPERS
        if len(self.processes) < 2 or not members:
            impossible |= {FaultKind.RECOVERY, FaultKind.SEVERAL}
        if not self.members("optimizerd"):
            impossible.add(FaultKind.SWEEP)
        if not self.members("node"):
            impossible.add(FaultKind.LOST)
        if self.processes == ("train",):
            impossible.add(FaultKind.STOP)
        if not members - {"train"}:
            impossible |= {FaultKind.CLOSED, FaultKind.HALF_OPEN}
        return frozenset(kinds) - impossible


WEIGHTS = {
    "worker": 5,
    "optimizerd": 5,
    "memoryd": 5,
    "mirrord": 4,
    "schedulerd": 5,
    "node": 2,
    "train": 2,
    "metricsd": 1,
    "observerd": 1,
    "fetchd": 1,
    "tracker": 1,
    "preload-plain": 1,
    "preload-torch": 1,
}
"""How often each kind of process is struck; others once, too."""

KIND_WEIGHTS = {
    FaultKind.KILL: 24,
    FaultKind.SEVERAL: 6,
    FaultKind.RECOVERY: 8,
    FaultKind.SWEEP: 1,
    FaultKind.PAUSE: 4,
    FaultKind.STOP: 2,
    FaultKind.TERM: 1,
    FaultKind.CLOSED: 6,
    FaultKind.HALF_OPEN: 1,
    FaultKind.DISK: 1,
    FaultKind.SHM: 1,
    FaultKind.SECOND: 2,
    FaultKind.LOST: 8,
}
MOMENT_WEIGHTS = {Moment.STEP: 12, Moment.START: 1, Moment.EVALUATION: 2, Moment.SAVING: 2}
LONGEST_WAIT_S = {
    Moment.START: 6.0,
    Moment.EVALUATION: 0.1,
    Moment.SAVING: 0.03,
    Moment.ENDING: 0.4,
}
"""After the instant of a moment a fault waits for up to so long; while it trains 0.3 s."""
_AT_STEPS_ONLY = frozenset(
    (FaultKind.RECOVERY, FaultKind.SWEEP, FaultKind.TERM, FaultKind.HALF_OPEN, FaultKind.SECOND)
)
_DISKS = {FaultKind.DISK: "disk", FaultKind.SHM: "shm"}


def draw(source: random.Random, cast: Cast, kinds: Collection[FaultKind]) -> Fault:
    """Returns the next fault of a run."""
    weights = {kind: KIND_WEIGHTS[kind] for kind in FaultKind if kind in kinds}
    [kind] = source.choices(list(weights), list(weights.values()))
    moment = _moment(source, cast, kind)
    after_s = source.uniform(0.0, LONGEST_WAIT_S.get(moment, 0.3))
    return Fault(
        kind=kind,
        moment=moment,
        gap_steps=source.randint(0, cast.gap_steps),
        strikes=_strikes(source, cast, kind, moment, after_s),
    )


def draw_last(source: random.Random, cast: Cast, kinds: Collection[FaultKind]) -> Fault | None:
    """Returns a fault for the end of a run, or None."""
    allowed = [
        kind
        for kind in (FaultKind.KILL, FaultKind.SEVERAL, FaultKind.PAUSE, FaultKind.STOP)
        if kind in kinds
    ]
    if not allowed or source.random() < 0.25:
        return None
    kind = source.choice(allowed)
    after_s = source.uniform(0.0, LONGEST_WAIT_S[Moment.ENDING])
    strikes = _strikes(source, cast, kind, Moment.ENDING, after_s)
    return Fault(kind=kind, moment=Moment.ENDING, gap_steps=0, strikes=strikes)


def _moment(source: random.Random, cast: Cast, kind: FaultKind) -> Moment:
    if kind in _AT_STEPS_ONLY:
        return Moment.STEP
    weights = dict(MOMENT_WEIGHTS)
    if not cast.members("train"):
        del weights[Moment.START]
    if not cast.evaluates:
        del weights[Moment.EVALUATION]
    if not cast.saves:
        del weights[Moment.SAVING]
    [moment] = source.choices(list(weights), list(weights.values()))
    return moment


def _strikes(
    source: random.Random, cast: Cast, kind: FaultKind, moment: Moment, after_s: float
) -> tuple[Strike, ...]:
    if kind is FaultKind.SEVERAL:
        count = min(source.randint(2, 4), len(cast.names))
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[_name(source, cast)] = None
        return tuple(Strike(target=name, blow=Blow.KILL, after_s=after_s) for name in chosen)
    if kind is FaultKind.RECOVERY:
        name = _name(source, cast, HELPERS)
        first = Strike(target=name, blow=Blow.KILL, after_s=after_s)
        return _chain(source, cast, first, source.randint(1, 5))
    if kind is FaultKind.LOST:
        name = source.choice(cast.members("node"))
        return _chain(
            source, cast, Strike(target=name, blow=Blow.LOSE, after_s=after_s), source.randint(0, 3)
        )
    if kind is FaultKind.SWEEP:
        target = source.choice(cast.members("optimizerd"))
        return (Strike(target=target, blow=Blow.KILL, after_s=after_s),)
    if kind in _DISKS:
        seconds = source.uniform(0.1, 2.0)
        full = Strike(target=_DISKS[kind], blow=Blow.FILL, after_s=after_s, seconds=seconds)
        if kind is FaultKind.DISK or moment is Moment.START:
            return (full,)
        return full, Strike(target=_name(source, cast, HELPERS), blow=Blow.KILL, after_s=after_s)
    if kind in (FaultKind.TERM, FaultKind.SECOND):
        blow = Blow.TERM if kind is FaultKind.TERM else Blow.AGAIN
        return (Strike(target="train", blow=blow, after_s=after_s),)
    blow = _BLOWS[kind]
    spared: frozenset[str] = frozenset()
    if blow in (Blow.STOP, Blow.CLOSE, Blow.DEAFEN):
        spared = frozenset(("train",))  # nobody would wake it
    if blow in (Blow.CLOSE, Blow.DEAFEN):
        spared |= HELPERS  # they have connections for moments
    return (_strike(source, cast, blow, _name(source, cast, spared), after_s),)


def _chain(source: random.Random, cast: Cast, first: Strike, more: int) -> tuple[Strike, ...]:
    """Returns a blow, and ``more`` to others while the run recovers."""
    strikes, after_s = [first], first.after_s
    for _ in range(more):
        after_s += source.uniform(0.02, 1.5)
        target = _name(source, cast, (strikes[-1].target.partition(".")[0],))
        blow = source.choices([Blow.KILL, Blow.PAUSE, Blow.STOP], [12, 2, 1])[0]
        if target == "train":
            blow = Blow.KILL
        strikes.append(_strike(source, cast, blow, target, after_s))
    return tuple(strikes)


_BLOWS = {
    FaultKind.KILL: Blow.KILL,
    FaultKind.PAUSE: Blow.PAUSE,
    FaultKind.STOP: Blow.STOP,
    FaultKind.CLOSED: Blow.CLOSE,
    FaultKind.HALF_OPEN: Blow.DEAFEN,
}


def _strike(source: random.Random, cast: Cast, blow: Blow, target: str, after_s: float) -> Strike:
    """A pause is shorter than the heartbeat's deadline, or so long that the process is replaced
    before it wakes.
    """
    short, long = source.uniform(0.05, 0.75), source.uniform(1.25, 2.0)
    seconds = cast.heartbeat_timeout_s * source.choice((short, long))
    return Strike(
        target=target,
        blow=blow,
        after_s=after_s,
        seconds=seconds if blow is Blow.PAUSE else 0.0,
        which=source.random(),
        one_way=blow is Blow.DEAFEN and source.random() < 0.5,
    )


def _name(source: random.Random, cast: Cast, spared: Collection[str] = ()) -> str:
    """Returns a process of a kind that is not spared."""
    weights = {kind: WEIGHTS.get(kind, 1) for kind in cast.processes if kind not in spared}
    [kind] = source.choices(list(weights), list(weights.values()))
    return source.choice(cast.members(kind))
