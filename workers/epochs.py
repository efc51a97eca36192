"""Which epoch may still work. Fenced by the stream's reading thread, asked by everything that
waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.workers.waiting import Abort

FOREVER = 2**64


class EpochFence:
    """Aborts work of an epoch as soon as a message says that the epoch is over.

    A fence stays: an epoch that is entered after the message that ends it was read is aborted from
    its start, in whichever order the two are handled.
    """

    def __init__(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """``stopped``: asked by everything that waits; true aborts too."""
        self._stopped = stopped
        self._lock = threading.Lock()
        self._fenced_below = 0
        self._reason = ""
        self._epoch = 0
        self._abort = Abort(self._stopped)

    def fence(self, below: int, reason: str) -> None:
        """Epochs before ``below`` are over."""
        with self._lock:
            if below > self._fenced_below:
                self._fenced_below, self._reason = below, reason
            if self._epoch < self._fenced_below:
                self._abort.set(self._reason)

    def enter(self, epoch: int) -> Abort:
        """The flag of ``epoch``; that of the epoch before is set."""
        with self._lock:
            self._abort.set("a new epoch began")
            self._epoch, self._abort = epoch, Abort(self._stopped)
            if epoch < self._fenced_below:
                self._abort.set(self._reason)
            return self._abort

    @property
    def epoch(self) -> int:
        """The epoch entered last, 0 before the first."""
        return self._epoch
