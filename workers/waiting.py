"""Interruptible waits with deadlines, and the fence that ends the waits of a finished epoch.

Every wait of a worker ends in one of three ways. Its condition holds, or the attempt is aborted
(:class:`Interrupted`, not an error), or the deadline passes (:class:`LostMemberError`, which names
the condition). Time in which the whole process was stopped does not count towards a deadline.

:class:`EpochFence` holds the epoch that may still work. The thread that reads the scheduler's
stream sets the fence, and every wait checks it.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.host import world
from penstock.host.errors import LostMemberError

POLL_S = 0.05
"""Longest single sleep of a wait; an abort is noticed after this long at the latest."""

_MAX_COUNTED_SLICE_S = 1.0


class Interrupted(Exception):
    """The attempt was aborted from outside; its results are void."""


class Abort:
    """A flag that ends work. Any thread sets it once, or ``stopped`` becomes true."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._event = world.event()
        self._reason = "the process was asked to stop"
        self._stopped = stopped

    def set(self, reason: str) -> None:
        """Sets the flag; the first reason is kept."""
        if not self._event.is_set():
            # The reason comes before the flag: a reader that sees the flag must find the reason.
            self._reason = reason
            self._event.set()

    @property
    def is_set(self) -> bool:
        """True if the work must end."""
        return self._event.is_set() or self._stopped()

    def check(self) -> None:
        """Raises if the work must end.

        Raises:
            Interrupted: the flag is set.
        """
        if self.is_set:
            raise Interrupted(self._reason)


class WaitBudget:
    """The remaining time of a wait, of ``timeout_s`` seconds. The wait calls :meth:`spend` once per
    slice; a longer gap counts as one second.

    A gap much longer than a slice means that this process was stopped (SIGSTOP, a suspended
    machine). The awaited message may lie in its socket unread.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._waited_s = 0.0
        self._last = world.monotonic()

    def spend(self, what: str) -> None:
        """Counts the seconds since the last call.

        Raises:
            LostMemberError: the deadline passed; ``what`` was awaited.
        """
        now = world.monotonic()
        self._waited_s += min(now - self._last, _MAX_COUNTED_SLICE_S)
        self._last = now
        if self._waited_s > self.timeout_s:
            raise LostMemberError(f"waited {self.timeout_s:g} s for {what}")


def wait_until(
    condition: Callable[[], bool],
    what: Callable[[], str],
    abort: Abort,
    timeout_s: float,
    held_back: Callable[[], bool] = lambda: False,
) -> float:
    """Waits for a condition that changes in shared memory; returns the seconds waited.

    Spins briefly, then checks every 0.2 ms. While ``held_back`` returns true no time counts, and
    the deadline restarts after it: another process works first, and the scheduler watches that
    process.

    Raises:
        Interrupted: the work was aborted.
        LostMemberError: the deadline passed.
    """
    abort.check()
    if condition():
        return 0.0
    start = world.perf_counter()
    budget: WaitBudget | None = WaitBudget(timeout_s)
    while not condition():
        abort.check()
        # The word belongs to another process, which cannot notify this one.
        if not world.look_again(start):
            continue
        if held_back():
            budget = None
            continue
        budget = budget or WaitBudget(timeout_s)
        budget.spend(what())
    return world.perf_counter() - start


FOREVER = 2**64
"""Fences below this number end every epoch."""


class EpochFence:
    """Aborts an epoch's work as soon as a message ends the epoch.

    A fence is permanent. The message that ends an epoch may be read before the epoch is entered:
    such an epoch is aborted from its start. The order in which the two are handled does not matter.
    """

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Makes a fence for the first epoch. Every wait checks ``stopped``; True aborts waits,
        too.
        """
        self._stopped = stopped
        self._lock = world.lock()
        self._fenced_below = 0
        self._reason = ""
        self._epoch = 0
        self._abort = Abort(self._stopped)

    def fence(self, below: int, reason: str) -> None:
        """Ends all epochs before ``below``, entered or not."""
        # Under the lock, so that enter() sees either the fence or has its flag set by it.
        with self._lock:
            if below > self._fenced_below:
                self._fenced_below, self._reason = below, reason
            if self._epoch < self._fenced_below:
                self._abort.set(self._reason)

    def enter(self, epoch: int) -> Abort:
        """Enters an epoch; returns its flag. The flag of the epoch before is set."""
        with self._lock:
            self._abort.set("a new membership began")
            self._epoch, self._abort = epoch, Abort(self._stopped)
            if epoch < self._fenced_below:
                self._abort.set(self._reason)
            return self._abort

    @property
    def epoch(self) -> int:
        """The epoch entered last, 0 before the first."""
        return self._epoch
