"""Requests to stop: whose signals count, what a second one means, and how long a stop may take.

Schedulers of jobs, service managers and ``timeout`` signal all processes of a run at once, and some
of them twice. So a process that was started by another one of the run obeys that one only: it
blocks all signals that stop, learns the sender of each from the kernel, and logs what it leaves to
its parent. Parents order a stop with :data:`STOP_ORDER`, which no stranger's signal swallows.
SIGKILL ends any process, as ever. A process that nobody of the run started obeys whoever signals
it.

:class:`StoppedDetector` tells a parent which processes a signal has stopped (SIGSTOP), and for how
long.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import FrameType

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that announce an end: a closed connection, and what ``--signal`` of Slurm and submitit
send. They ask for a stop and never insist: SIGTERM follows when the time is over.
"""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *WARNINGS)
STOP_ORDER = signal.SIGRTMIN
"""What a process of the run sends to a child that is to stop.

Of several SIGTERMs that wait the kernel keeps the first, whose sender may be a stranger. Real-time
signals queue up: each arrives, with its own sender.
"""
HEARD_SIGNALS = (*STOP_SIGNALS, STOP_ORDER)
"""What a child of the run blocks and listens to."""
SAME_ROUND_S = 5.0
"""SIGTERMs that come sooner after the first request belong to it."""
SAME_KEY_S = 0.05
"""SIGINTs that come sooner after the first are its copies: nobody types that fast."""
KILL_WAIT_S = 30.0
"""Slurm's default ``KillWait``: from SIGTERM at the end of a job's time to SIGKILL."""
JOB_END_VARIABLE = "SLURM_JOB_END_TIME"

_log = logging.getLogger(__name__)


class Demand(Enum):
    """What a signal asks for. ``NOW``: somebody insists, and does not want to wait for a save."""

    STOP = "stop"
    NOW = "now"


class StopEscalation:
    """Tells who insists from who only says the same thing to everybody.

    The first signal asks for a stop. A second SIGINT insists, and so does any signal that comes
    :data:`SAME_ROUND_S` after the first or later. :data:`WARNINGS` never insist, and a SIGTERM
    after a warning is the first SIGTERM.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._ordered_s: float | None = None  # the first that was no warning
        self._typed_s: float | None = None

    def heard(self, number: int, now_s: float) -> Demand | None:
        """Returns what a signal at ``now_s`` (any monotonic clock) asks for; None: nothing new."""
        typed_s, asked = self._typed_s, self._first_s is not None
        since_s = self._first_s if number == signal.SIGINT else self._ordered_s
        if self._first_s is None:
            self._first_s = now_s
        if number not in WARNINGS and self._ordered_s is None:
            self._ordered_s = now_s
        if number == signal.SIGINT and typed_s is None:
            self._typed_s = now_s
        if not asked:
            return Demand.STOP
        if number in WARNINGS:
            return None
        again = number == signal.SIGINT and typed_s is not None and now_s - typed_s >= SAME_KEY_S
        late = since_s is not None and now_s - since_s >= SAME_ROUND_S
        return Demand.NOW if again or late else None


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt for the first stop signal; the signals that follow are ignored.

    This is the signal handler of a command that has nothing to save yet.
    """
    ignore_stop_signals()
    raise KeyboardInterrupt


def ignore_stop_signals() -> None:
    """Ignores stop signals from now on: nothing is left to stop (main thread only)."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def stopping_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that stop this process. A warning that is ignored (``nohup``) or that the
    program handles itself is none of them.
    """
    free = (signal.SIG_DFL, interrupt)
    warnings = (number for number in WARNINGS if signal.getsignal(number) in free)
    return (signal.SIGTERM, signal.SIGINT, *warnings)


@contextmanager
def interrupted_by_stop_signals() -> Iterator[None]:
    """Makes stop signals raise KeyboardInterrupt inside the block, until a run takes the signals
    over. Other threads than the main thread receive none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in stopping_signals()}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


def block_stop_signals() -> None:
    """Keep stop signals waiting until somebody asks for them. For a process of a run, before any of
    its threads starts: threads (and children) inherit what is blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_SIGNALS)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Processes that are started inside the block are born with stop signals blocked, so that none
    can hit them before they are ready to listen.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequests:
    """Receives stop signals and :data:`STOP_ORDER` for a process of the run.

    ``on_demand`` is called with every :class:`Demand`: in a signal handler on the main thread, or,
    with ``parent_pid``, on a thread of its own. It must neither block nor take locks.
    """

    def __init__(self, on_demand: Callable[[Demand], None], parent_pid: int | None) -> None:
        self._on_demand = on_demand
        self._parent_pid = parent_pid
        self._escalation = StopEscalation()

    def install(self) -> None:
        """Listen from now on, to the end of the process (main thread only)."""
        if self._parent_pid is None:
            for number in stopping_signals():
                signal.signal(number, self._handle)
            return
        block_stop_signals()
        threading.Thread(target=self._listen, name="stop-requests", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._hear(number)

    def _listen(self) -> None:
        while True:
            info = signal.sigwaitinfo(HEARD_SIGNALS)
            if info.si_pid == self._parent_pid:
                self._hear(info.si_signo)
                continue
            _log.info(
                "%s of process %d is left to process %d, which started this one and stops it;"
                " SIGKILL would end this one alone",
                signal.Signals(info.si_signo).name,
                info.si_pid,
                self._parent_pid,
            )

    def _hear(self, number: int) -> None:
        demand = self._escalation.heard(number, time.monotonic())
        if demand is not None:
            self._on_demand(demand)


class StopSignal:
    """Set when the process is asked to stop; ``wait`` returns whether it is set.

    Not built on :class:`threading.Event`: its lock is not reentrant, so a handler that interrupts
    ``wait`` at the wrong moment would deadlock. A SimpleQueue may be filled from a handler.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def install(self, parent_pid: int | None) -> StopSignal:
        """Obey stop signals from now on, ``parent_pid``'s only if that is given (main thread
        only).
        """
        StopRequests(lambda demand: self.set(), parent_pid).install()
        return self

    @property
    def is_set(self) -> bool:
        """Whether the process was asked to stop."""
        return self._is_set

    def set(self) -> None:
        """Asks the process to stop."""
        self._is_set = True
        self._wakeups.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until set or ``timeout_s`` passed."""
        if not self._is_set:
            try:
                self._wakeups.get(timeout=timeout_s)
            except queue.Empty:
                return self._is_set
            self._wakeups.put(None)  # for others who wait
        return self._is_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """What is known of the moment at which a stopped run will be killed from outside.

    ``seconds``: how long after the request (``--grace-seconds``). ``job_end_s``: when the job's
    time is over, in seconds since the epoch (``SLURM_JOB_END_TIME``). Either may be unknown.
    """

    seconds: float | None = None
    job_end_s: float | None = None

    @classmethod
    def of(cls, seconds: float | None, environment: Mapping[str, str]) -> Grace:
        """With what the environment says about the job."""
        text = environment.get(JOB_END_VARIABLE, "").strip()
        if text and not text.isdecimal():
            _log.warning("%s=%s is not a time: ignored", JOB_END_VARIABLE, text[:40])
        return cls(seconds=seconds, job_end_s=float(text) if text.isdecimal() else None)

    def left_s(self, wall_s: float) -> float | None:
        """Returns how many seconds a stop asked for at ``wall_s`` (since the epoch) may take; None:
        as many as it needs.

        ``KillWait`` follows the end of a job's time. An end that passed before is none: the job
        was extended, or a shell of another job has left the variable.
        """
        known = [] if self.seconds is None else [self.seconds]
        if self.job_end_s is not None and self.job_end_s > wall_s:
            known.append(self.job_end_s - wall_s)
        elif self.job_end_s is not None and self.seconds is None:
            killed_s = self.job_end_s + KILL_WAIT_S
            known += [killed_s - wall_s] if killed_s > wall_s else []
        return min(known, default=None)


def reserve_s(within_s: float) -> float:
    """Returns the part of a stop's time that is kept for what follows the save: telling everyone,
    and ending. Who is nearer to the outside waits a little longer (:class:`StopDeadline`).
    """
    return min(5.0, within_s / 4)


class StopDeadline(Enum):
    """Shares of the reserve that are left when a process gives up waiting."""

    SCHEDULER = 1.0
    NODE = 0.5
    TRAIN = 0.25

    def give_up_s(self, asked_s: float, within_s: float) -> float:
        """Returns when to stop waiting for a stop asked for at ``asked_s``, on that clock."""
        return asked_s + within_s - self.value * reserve_s(within_s)


SHORTEST_JUMP_S = 4.0
"""Who sees nothing for so long was stopped itself, or its machine was."""


class StoppedDetector:
    """Since when processes stand still. ``silence_s``: how long one may.

    The kernel's word is taken, not heartbeats: a loaded machine delays those, and nobody is killed
    for that. The class is pure: what the kernel says, and the time, are arguments.

    ``jump_s``: for how long nobody had looked at the last look, if that was so long that the looker
    must have been stopped itself; else 0.
    """

    def __init__(self, silence_s: float) -> None:
        self.jump_s = 0.0
        self._silence_s = silence_s
        self._looked_s: float | None = None
        self._since_s: dict[str, float] = {}

    def look(self, stopped: frozenset[str], now_s: float) -> dict[str, float]:
        """Returns who of those that are stopped now has been for too long, and for how long
        (seconds); told once, then time starts anew, as it does for all after a jump.
        """
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        self.jump_s = gap_s if gap_s > max(self._silence_s / 2, SHORTEST_JUMP_S) else 0.0
        known = {} if self.jump_s else self._since_s
        self._since_s = {name: known.get(name, now_s) for name in sorted(stopped)}
        late = {
            name: now_s - since_s
            for name, since_s in self._since_s.items()
            if now_s >= since_s + self._silence_s
        }
        for name in late:
            del self._since_s[name]
        return late

    @property
    def next_s(self) -> float | None:
        """Returns when the next look is due, because a process is stopped for too long then; None:
        no process was stopped at the last look.
        """
        return min((since_s + self._silence_s for since_s in self._since_s.values()), default=None)
