"""Interruptible waits with deadlines, and the fence that ends the waits of an epoch that is over.

Every wait of a worker ends in one of three ways: what it waits for is there, the attempt is aborted
(:class:`Interrupted`, nobody's fault), or the deadline passed (:class:`LostMemberError`, which says
what was awaited). Time in which the whole process was stopped does not count towards a deadline.

:class:`EpochFence` says which epoch may still work: the thread that reads the scheduler's stream
fences, and everything that waits asks.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.host import world
from penstock.host.errors import LostMemberError

POLL_S = 0.05
"""Longest single sleep of a wait; an abort is noticed after this long at the latest."""

_MAX_COUNTED_SLICE_S = 1.0


class Interrupted(Exception):
    """The attempt was aborted from outside; what it did so far means nothing."""


class Abort:
    """A flag that ends work. It is set once, from any thread, or by ``stopped`` becoming true."""

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        self._event = world.event()
        self._reason = "the process was asked to stop"
        self._stopped = stopped

    def set(self, reason: str) -> None:
        """Set the flag; the first reason is kept."""
        if not self._event.is_set():
            # The reason comes before the flag: whoever sees the flag finds the reason there.
            self._reason = reason
            self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the work must end."""
        return self._event.is_set() or self._stopped()

    def check(self) -> None:
        """Raise if the work must end.

        Raises:
            Interrupted: the flag is set.
        """
        if self.is_set:
            raise Interrupted(self._reason)


class WaitBudget:
    """How much longer a wait may take, of ``timeout_s`` seconds. To be asked once per slice of the
    wait; a longer gap counts as one second.

    A gap much longer than a slice means that this process was stopped (SIGSTOP, a suspended
    machine): what it waits for may lie in its socket unread.
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
    """Wait for a condition that changes in shared memory; returns the seconds waited.

    Spins briefly, then looks every 0.2 ms. While ``held_back`` returns true no time counts,
    and the deadline begins anew after it: somebody else is at work first, whom the scheduler
    watches.

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
        # The word belongs to another process, which nothing here can notify.
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
    """Aborts work of an epoch as soon as a message says that the epoch is over.

    A fence stays: an epoch that is entered after the message that ends it was read is aborted from
    its start, in whichever order the two are handled.
    """

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """``stopped`` is asked by everything that waits; when it is true, waits are aborted,
        too.
        """
        self._stopped = stopped
        self._lock = world.lock()
        self._fenced_below = 0
        self._reason = ""
        self._epoch = 0
        self._abort = Abort(self._stopped)

    def fence(self, below: int, reason: str) -> None:
        """End all epochs before ``below``, entered or not."""
        # Under the lock, so that enter() sees either the fence or has its flag set by it.
        with self._lock:
            if below > self._fenced_below:
                self._fenced_below, self._reason = below, reason
            if self._epoch < self._fenced_below:
                self._abort.set(self._reason)

    def enter(self, epoch: int) -> Abort:
        """Enter an epoch; returns its flag. The flag of the epoch before is set."""
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
