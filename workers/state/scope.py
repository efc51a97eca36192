"""One attempt as its gradients, stages and weights see it: numbers, waits, messages and times.

The attempt passes one :class:`AttemptScope` to all of them. They call its methods, and know neither
transport nor telemetry.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from penstock.protocol.plan.instructions import Phase
from penstock.workers.device import Copied, Stamp
from penstock.workers.telemetry.account import IdleCause
from penstock.workers.waiting import Abort


class AttemptScope(Protocol):
    """The numbers of an attempt, and its connection to other processes and to telemetry."""

    @property
    def epoch(self) -> int:
        """The epoch of the attempt."""

    @property
    def attempt(self) -> int:
        """The number of the attempt, or the key of an evaluation batch's messages."""

    @property
    def base_version(self) -> int:
        """The committed version that the attempt starts from; it aims at the next one."""

    @property
    def abort(self) -> Abort:
        """The flag that ends all waits of the attempt."""

    @property
    def timeout_s(self) -> float:
        """Seconds that one wait may take."""

    def awaiting(self, what: object, cause: IdleCause) -> AbstractContextManager[None]:
        """Measures a wait of the current instruction for work of other processes."""

    def await_settled(self, block: int) -> None:
        """Waits until the state of a block of this node contains the step of the block's last
        committed gradients.
        """

    def published(self, block: int, partial: int) -> None:
        """Notifies the owner's optimizerd of a complete gradient partial; its ready word is set."""

    def copied(self, direction: str, kind: str, copied: Copied) -> None:
        """Records a copy to the device (``h2d``) or from it (``d2h``); from any thread."""

    def loaded(self, stage: int, phase: Phase, start: Stamp, end: Stamp, *, early: bool) -> None:
        """Records the load of a stage's weights; from any thread.

        ``early``: another thread than the interpreter's did it.
        """
