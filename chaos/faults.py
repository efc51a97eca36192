"""Faults of runs as values, and the random draw of faults.

:mod:`penstock.chaos.faulted_run` injects the faults.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """Actions on one process, connection or file system."""

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
    """Kinds of faults, as ``--kinds`` names them. docs/CHAOS.md describes each kind."""

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


class Moment(StrEnum):
    """Moments of a run at which a fault is injected."""

    STEP = "while it trains"
    START = "while it starts"
    EVALUATION = "while it evaluates"
    SAVING = "while it saves"
    ENDING = "while it ends"


HELPERS = frozenset(
    ("metricsd", "observerd", "fetchd", "tracker", "preload-plain", "preload-torch")
)
"""Processes that a run can do without: their death replaces no other process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """An action on ``target``, ``after_s`` seconds after the instant of the fault.

    ``seconds`` is the duration of a pause or of a full disk. ``which``, from 0 to 1, chooses a
    connection. With ``one_way``, only one end of the connection receives nothing.
    """

    target: str
    action: Action
    after_s: float = 0.0
    seconds: float = 0.0
    which: float = 0.0
    one_way: bool = False

    def __str__(self) -> str:
        how = f" ({self.seconds:.2f} s)" if self.seconds else " (one way)" if self.one_way else ""
        return f"{self.action} {self.target}{how} after {self.after_s:.3f} s"

    @property
    def breaks_epoch(self) -> bool:
        """Returns whether training needs a new epoch. A pause may be short enough."""
        fatal = self.action in (Action.KILL, Action.STOP, Action.TERM, Action.LOSE)
        return fatal and self.target.partition(".")[0] not in HELPERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault at the instant of ``moment``, at the earliest after ``gap_steps`` more steps."""

    kind: FaultKind
    moment: Moment
    gap_steps: int
    injections: tuple[Injection, ...]

    def __str__(self) -> str:
        actions = ", then ".join(map(str, self.injections))
        return f"{self.kind} {self.moment}, from {self.gap_steps} steps on: {actions}"

    @property
    def targets(self) -> frozenset[str]:
        """The kinds of the target processes: ``worker`` for ``worker.1``."""
        return frozenset(injection.target.partition(".")[0] for injection in self.injections)

    def waits_for_timeout(self, heartbeat_timeout_s: float) -> bool:
        """Returns whether only a timeout detects the fault: a silent process may be slow."""
        return any(
            injection.action in (Action.STOP, Action.DEAFEN)
            or (injection.action is Action.PAUSE and injection.seconds > heartbeat_timeout_s)
            for injection in self.injections
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Processes of a run that faults may target, by name; ``train`` is the user's command.

    ``gap_steps`` is the largest number of steps between two faults. ``evaluates`` and ``saves`` are
    True if the run evaluates or saves while it trains.
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
        """Returns the kinds among ``kinds`` that the run has enough processes for."""
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
"""Weights of kinds of processes in the draw; 1 for a kind that is not listed."""

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
"""Longest random delay (seconds) after the instant of a moment; 0.3 s while the run trains."""
_AT_STEPS_ONLY = frozenset(
    (FaultKind.RECOVERY, FaultKind.SWEEP, FaultKind.TERM, FaultKind.HALF_OPEN, FaultKind.SECOND)
)
_DISKS = {FaultKind.DISK: "disk", FaultKind.SHM: "shm"}


def draw(source: random.Random, targets: Targets, kinds: Collection[FaultKind]) -> Fault:
    """Returns the next fault of a run."""
    weights = {kind: KIND_WEIGHTS[kind] for kind in FaultKind if kind in kinds}
    [kind] = source.choices(list(weights), list(weights.values()))
    moment = _moment(source, targets, kind)
    after_s = source.uniform(0.0, LONGEST_WAIT_S.get(moment, 0.3))
    return Fault(
        kind=kind,
        moment=moment,
        gap_steps=source.randint(0, targets.gap_steps),
        injections=_injections(source, targets, kind, moment, after_s),
    )


def draw_last(
    source: random.Random, targets: Targets, kinds: Collection[FaultKind]
) -> Fault | None:
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
    injections = _injections(source, targets, kind, Moment.ENDING, after_s)
    return Fault(kind=kind, moment=Moment.ENDING, gap_steps=0, injections=injections)


def _moment(source: random.Random, targets: Targets, kind: FaultKind) -> Moment:
    if kind in _AT_STEPS_ONLY:
        return Moment.STEP
    weights = dict(MOMENT_WEIGHTS)
    if not targets.members("train"):
        del weights[Moment.START]
    if not targets.evaluates:
        del weights[Moment.EVALUATION]
    if not targets.saves:
        del weights[Moment.SAVING]
    [moment] = source.choices(list(weights), list(weights.values()))
    return moment


def _injections(
    source: random.Random, targets: Targets, kind: FaultKind, moment: Moment, after_s: float
) -> tuple[Injection, ...]:
    if kind is FaultKind.SEVERAL:
        count = min(source.randint(2, 4), len(targets.names))
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[_name(source, targets)] = None
        return tuple(Injection(target=name, action=Action.KILL, after_s=after_s) for name in chosen)
    if kind is FaultKind.RECOVERY:
        name = _name(source, targets, HELPERS)
        first = Injection(target=name, action=Action.KILL, after_s=after_s)
        return _chain(source, targets, first, source.randint(1, 5))
    if kind is FaultKind.LOST:
        name = source.choice(targets.members("node"))
        return _chain(
            source,
            targets,
            Injection(target=name, action=Action.LOSE, after_s=after_s),
            source.randint(0, 3),
        )
    if kind is FaultKind.SWEEP:
        target = source.choice(targets.members("optimizerd"))
        return (Injection(target=target, action=Action.KILL, after_s=after_s),)
    if kind in _DISKS:
        seconds = source.uniform(0.1, 2.0)
        full = Injection(target=_DISKS[kind], action=Action.FILL, after_s=after_s, seconds=seconds)
        if kind is FaultKind.DISK or moment is Moment.START:
            return (full,)
        return full, Injection(
            target=_name(source, targets, HELPERS), action=Action.KILL, after_s=after_s
        )
    if kind in (FaultKind.TERM, FaultKind.SECOND):
        action = Action.TERM if kind is FaultKind.TERM else Action.AGAIN
        return (Injection(target="train", action=action, after_s=after_s),)
    action = _ACTIONS[kind]
    spared: frozenset[str] = frozenset()
    if action in (Action.STOP, Action.CLOSE, Action.DEAFEN):
        spared = frozenset(("train",))  # no process would wake it
    if action in (Action.CLOSE, Action.DEAFEN):
        spared |= HELPERS  # their connections are short
    return (_injection(source, targets, action, _name(source, targets, spared), after_s),)


def _chain(
    source: random.Random, targets: Targets, first: Injection, more: int
) -> tuple[Injection, ...]:
    """Returns an injection, and ``more`` on other targets while the run recovers."""
    injections, after_s = [first], first.after_s
    for _ in range(more):
        after_s += source.uniform(0.02, 1.5)
        target = _name(source, targets, (injections[-1].target.partition(".")[0],))
        action = source.choices([Action.KILL, Action.PAUSE, Action.STOP], [12, 2, 1])[0]
        if target == "train":
            action = Action.KILL
        injections.append(_injection(source, targets, action, target, after_s))
    return tuple(injections)


_ACTIONS = {
    FaultKind.KILL: Action.KILL,
    FaultKind.PAUSE: Action.PAUSE,
    FaultKind.STOP: Action.STOP,
    FaultKind.CLOSED: Action.CLOSE,
    FaultKind.HALF_OPEN: Action.DEAFEN,
}


def _injection(
    source: random.Random, targets: Targets, action: Action, target: str, after_s: float
) -> Injection:
    """Returns an injection. A pause is either shorter than the heartbeat timeout, or so long that
    the process is replaced before it wakes.
    """
    short, long = source.uniform(0.05, 0.75), source.uniform(1.25, 2.0)
    seconds = targets.heartbeat_timeout_s * source.choice((short, long))
    return Injection(
        target=target,
        action=action,
        after_s=after_s,
        seconds=seconds if action is Action.PAUSE else 0.0,
        which=source.random(),
        one_way=action is Action.DEAFEN and source.random() < 0.5,
    )


def _name(source: random.Random, targets: Targets, spared: Collection[str] = ()) -> str:
    """Returns the name of a process of a kind that is not in ``spared``."""
    weights = {kind: WEIGHTS.get(kind, 1) for kind in targets.processes if kind not in spared}
    [kind] = source.choices(list(weights), list(weights.values()))
    return source.choice(targets.members(kind))
