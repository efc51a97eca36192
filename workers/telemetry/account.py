"""An account of a device's time: every second since the worker was ready is in one of these sums.

Seconds are those of ``time.perf_counter``. In an attempt, instructions report their compute times,
once those are known. Time in between is divided among the waits in it; the rest is the host's
overhead. Between attempts the worker names its current wait. So busy and idle seconds add up to the
elapsed time, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from penstock.host import world
from penstock.protocol.metrics.worker import BUSY

SHOWN_AFTER_S = 1.0
"""Seconds after which a current activity appears in :meth:`TimeAccount.seconds`, so that an endless
wait is visible.
"""


class IdleCause(StrEnum):
    """The causes of a device's idle time.

    ``WEIGHTS``, ``ACTIVATIONS`` and ``GRADIENTS`` on their way; ``OPTIMIZER`` to settle, or to
    decide; ``PEERS`` that still compute; ``DATA`` to be read; ``SCHEDULER`` for its next message;
    ``RECOVERY`` from one epoch to the next; ``OVERHEAD`` of the host between instructions.
    """

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    PEERS = "peers"
    DATA = "data"
    SCHEDULER = "scheduler"
    RECOVERY = "recovery"
    OVERHEAD = "overhead"


Running = tuple[str, float]
"""The current computation or wait, a key of the sums, and its start."""


class TimeAccount:
    """The sums. The interpreter's thread writes; any thread may read with :meth:`seconds`."""

    def __init__(self, clock: Callable[[], float] = world.perf_counter) -> None:
        self._clock = clock
        self._sums = dict.fromkeys((*BUSY, *IdleCause), 0.0)
        self._until_s: float | None = None
        self._cause = IdleCause.OVERHEAD
        self._waits: dict[IdleCause, float] = {}

    def turn(self, cause: IdleCause) -> None:
        """Sets the cause of later idle time, until another call. Time before the first wait for the
        scheduler does not count: the worker starts.
        """
        if self._until_s is None and cause is IdleCause.SCHEDULER:
            self._until_s = self._clock()
        self._wait_until(self._clock(), self._cause)
        self._cause = cause

    def waited(self, cause: IdleCause, seconds: float) -> None:
        """Assigns seconds of the unaccounted time to a wait for ``cause``."""
        self._waits[cause] = self._waits.get(cause, 0.0) + max(0.0, seconds)

    def computed(
        self, what: str, start_s: float, end_s: float, awaited: IdleCause | None = None
    ) -> None:
        """Adds a computation. The rest of the unaccounted time before it was a wait for
        ``awaited``.
        """
        if self._until_s is None:
            return
        self._wait_until(start_s, awaited or self._cause)
        self._sums[what] += max(0.0, end_s - self._until_s)
        self._until_s = max(self._until_s, end_s)

    def decided(self, peers_s: float, optimizer_s: float) -> None:
        """Assigns the time after this worker's end of an attempt, now decided. Other workers
        computed for ``peers_s``, then the optimizer took ``optimizer_s``; then the journal was
        written.
        """
        if self._cause is not IdleCause.PEERS or self._until_s is None:
            return
        left_s = self._clock() - self._until_s
        for cause, seconds in ((IdleCause.PEERS, peers_s), (IdleCause.OPTIMIZER, optimizer_s)):
            self.waited(cause, min(seconds, left_s))
            left_s -= min(seconds, left_s)
        self._cause = IdleCause.SCHEDULER
        self.turn(IdleCause.SCHEDULER)

    def seconds(self, running: Running | None) -> dict[str, float]:
        """Returns the sums. ``running`` is the current activity in an attempt, by the host's clock;
        between attempts the account knows it.
        """
        # In this order: a sum that grows meanwhile is missed, but nothing is counted twice.
        sums, until_s, cause = dict(self._sums), self._until_s, self._cause
        if until_s is not None:
            what, since_s = running or (cause, until_s)
            lasted_s = self._clock() - max(since_s, until_s)
            if lasted_s >= SHOWN_AFTER_S:
                sums[what] += lasted_s
        return sums

    def _wait_until(self, end_s: float, otherwise: IdleCause) -> None:
        """Assigns all time until ``end_s`` to waits: first the recorded ones, the rest to
        ``otherwise``.
        """
        waits, self._waits = self._waits, {}
        if self._until_s is None or end_s <= self._until_s:
            return
        left_s, waited_s = end_s - self._until_s, sum(waits.values())
        # On devices that run on while the host waits, the host may have waited longer than they.
        share = min(1.0, left_s / waited_s) if waited_s else 0.0
        for cause, seconds in waits.items():
            self._sums[cause] += seconds * share
        self._sums[otherwise] += left_s - waited_s * share
        self._until_s = end_s
