"""Requests to stop: the signals that count, the meaning of a second one, and the time for a stop.

Job schedulers, service managers and ``timeout`` signal all processes of a run at once, and some of
them twice. So a child process of a run obeys its parent only. It blocks all stop signals, reads the
sender of each from the kernel, and logs signals that it leaves to its parent. Parents order a stop
with :data:`STOP_ORDER`, which no other signal can swallow. SIGKILL ends any process. A process
without a parent in the run obeys every sender.

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
"""Signals that announce an end: a closed connection, and the signal of ``--signal`` of Slurm and
submitit. They request a stop and never escalate: SIGTERM follows at the end of the time.
"""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *WARNINGS)
STOP_ORDER = signal.SIGRTMIN
"""Signal by which a process of the run orders a child to stop.

Of several pending SIGTERMs the kernel keeps the first, possibly of a foreign sender. Real-time
signals queue: each arrives, with its own sender.
"""
HEARD_SIGNALS = (*STOP_SIGNALS, STOP_ORDER)
"""Signals that a child of the run blocks and waits for."""
SAME_ROUND_S = 5.0
"""Seconds after the first request in which further SIGTERMs belong to the same broadcast."""
SAME_KEY_S = 0.05
"""Seconds after the first SIGINT in which further SIGINTs are copies: no person types that fast."""
KILL_WAIT_S = 30.0
"""Slurm's default ``KillWait``: from SIGTERM at the end of a job's time to SIGKILL."""
JOB_END_VARIABLE = "SLURM_JOB_END_TIME"

_log = logging.getLogger(__name__)

_is_interrupted = False
"""True from the stop signal on that interrupted this process's command."""


class Demand(Enum):
    """Request of a signal. ``NOW``: a repeated request, which does not wait for a save."""

    STOP = "stop"
    NOW = "now"


class StopEscalation:
    """Distinguishes a repeated stop request from a broadcast of the first one.

    The first signal requests a stop. A second SIGINT escalates, and so does any signal at least
    :data:`SAME_ROUND_S` after the first. :data:`WARNINGS` never escalate, and a SIGTERM after a
    warning is the first SIGTERM.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._ordered_s: float | None = None  # the first that was no warning
        self._typed_s: float | None = None

    def heard(self, number: int, now_s: float) -> Demand | None:
        """Returns the request of a signal at ``now_s`` (any monotonic clock); None: nothing new."""
        typed_s, requested = self._typed_s, self._first_s is not None
        since_s = self._first_s if number == signal.SIGINT else self._ordered_s
        if self._first_s is None:
            self._first_s = now_s
        if number not in WARNINGS and self._ordered_s is None:
            self._ordered_s = now_s
        if number == signal.SIGINT and typed_s is None:
            self._typed_s = now_s
        if not requested:
            return Demand.STOP
        if number in WARNINGS:
            return None
        again = number == signal.SIGINT and typed_s is not None and now_s - typed_s >= SAME_KEY_S
        late = since_s is not None and now_s - since_s >= SAME_ROUND_S
        return Demand.NOW if again or late else None


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt for the first stop signal; the signals that follow are ignored.

    This is the signal handler of a command that has nothing to save yet. Python drops an exception
    that is raised in a finalizer. The run that the command starts obeys the signal all the same.
    """
    global _is_interrupted
    _is_interrupted = True
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
    over; also signals that the starter of this process has blocked. Other threads than the main
    thread receive none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _is_interrupted
    _is_interrupted = False
    before = {number: signal.getsignal(number) for number in stopping_signals()}
    for number in before:
        signal.signal(number, interrupt)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


def block_stop_signals() -> None:
    """Blocks stop signals until a thread waits for them. Called in a process of a run before any of
    its threads starts: threads and children inherit the mask.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_SIGNALS)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Blocks stop signals in processes that are started inside the block, so that no signal ends
    them before they wait for signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequests:
    """Receives stop signals and :data:`STOP_ORDER` for a process of the run.

    ``on_demand`` is called with every :class:`Demand`: in a signal handler on the main thread, or,
    with ``parent_pid``, on another thread. ``on_demand`` must neither block nor take locks.
    """

    def __init__(self, on_demand: Callable[[Demand], None], parent_pid: int | None) -> None:
        self._on_demand = on_demand
        self._parent_pid = parent_pid
        self._escalation = StopEscalation()

    def install(self) -> None:
        """Handles stop signals from this call until the end of the process (main thread only). A
        signal that interrupted the command before, without effect, requests a stop.
        """
        if self._parent_pid is None:
            for number in stopping_signals():
                signal.signal(number, self._handle)
            if _is_interrupted:
                self._hear(signal.SIGTERM)
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
    """A flag that is set when the process is asked to stop; ``wait`` returns whether it is set.

    :class:`threading.Event` would deadlock: its lock is not reentrant, and a handler may interrupt
    ``wait`` while it holds the lock. A handler may fill a SimpleQueue.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def install(self, parent_pid: int | None) -> StopSignal:
        """Obeys stop signals from this call on, only those of ``parent_pid`` if given (main thread
        only).
        """
        StopRequests(lambda demand: self.set(), parent_pid).install()
        return self

    @property
    def is_set(self) -> bool:
        """True if the process was asked to stop."""
        return self._is_set

    def set(self) -> None:
        """Asks the process to stop."""
        self._is_set = True
        self._wakeups.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the flag is set or ``timeout_s`` passed."""
        if not self._is_set:
            try:
                self._wakeups.get(timeout=timeout_s)
            except queue.Empty:
                return self._is_set
            self._wakeups.put(None)  # for other waiting threads
        return self._is_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """Time at which a stopped run will be killed from outside, as far as it is known.

    ``seconds``: time from the request to the kill (``--grace-seconds``). ``job_end_s``: end of the
    job's time, in seconds since 1970 (``SLURM_JOB_END_TIME``). Either may be unknown.
    """

    seconds: float | None = None
    job_end_s: float | None = None

    @classmethod
    def of(cls, seconds: float | None, environment: Mapping[str, str]) -> Grace:
        """Returns the grace of ``seconds`` and of the job in the environment."""
        text = environment.get(JOB_END_VARIABLE, "").strip()
        if text and not text.isdecimal():
            _log.warning("%s=%s is not a time: ignored", JOB_END_VARIABLE, text[:40])
        return cls(seconds=seconds, job_end_s=float(text) if text.isdecimal() else None)

    def left_s(self, wall_s: float) -> float | None:
        """Returns how many seconds a stop requested at ``wall_s`` (since 1970) may take; None
        without a limit.

        ``KillWait`` follows the end of a job's time. An end in the past does not count: the job was
        extended, or a shell of another job has left the variable.
        """
        known = [] if self.seconds is None else [self.seconds]
        if self.job_end_s is not None and self.job_end_s > wall_s:
            known.append(self.job_end_s - wall_s)
        elif self.job_end_s is not None and self.seconds is None:
            killed_s = self.job_end_s + KILL_WAIT_S
            known += [killed_s - wall_s] if killed_s > wall_s else []
        return min(known, default=None)


def reserve_s(within_s: float) -> float:
    """Returns the seconds of a stop that are reserved for the time after the save: for messages to
    all processes, and their end. Outer processes wait a little longer (:class:`StopDeadline`).
    """
    return min(5.0, within_s / 4)


class StopDeadline(Enum):
    """Shares of the reserve that are left when a process stops waiting."""

    SCHEDULER = 1.0
    NODE = 0.5
    TRAIN = 0.25

    def give_up_s(self, asked_s: float, within_s: float) -> float:
        """Returns the end of the wait for a stop requested at ``asked_s``, on the same clock."""
        return asked_s + within_s - self.value * reserve_s(within_s)


SHORTEST_JUMP_S = 4.0
"""Seconds between two calls from which on the process itself, or its machine, must have been
stopped.
"""


class StoppedDetector:
    """Measures how long processes are stopped. ``silence_s``: seconds that a process may be
    stopped.

    The kernel's state counts, not heartbeats: a loaded machine delays heartbeats, and no process is
    killed for a delay. The class is pure: the kernel's states and the time are arguments.

    ``jump_s``: seconds between the last two calls, if so long that the calling process must have
    been stopped itself; else 0.
    """

    def __init__(self, silence_s: float) -> None:
        self.jump_s = 0.0
        self._silence_s = silence_s
        self._looked_s: float | None = None
        self._since_s: dict[str, float] = {}

    def look(self, stopped: frozenset[str], now_s: float) -> dict[str, float]:
        """Returns processes stopped longer than the limit, mapped to seconds. Each is reported
        once; a clock jump resets all timers.
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
        """Time of the next call, at which a process will have been stopped for too long; None if no
        process was stopped at the last call.
        """
        return min((since_s + self._silence_s for since_s in self._since_s.values()), default=None)
