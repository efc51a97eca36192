"""Static residents: state that a device keeps from attempt to attempt.

Source: Maurya et al., "Deep Optimizer States", section 4.1. In the paper the device has the only
copy of a resident's state. In this project host memory has the truth, as for every block, and
optimizerd settles each commit in host memory. The device's copy is a cache that takes in the same
commit. The cache applies its kept gradients and the step of the commit record, so it has the same
bits and fetches nothing.

The device reads the state from host memory again after a synchronous step, an interrupted sweep, or
the start of an epoch. Every restore or repair begins an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.plan.step import OptimizerStep
from penstock.shm.control import ControlView


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The difference of a device's copy: ``whole``, everything is missing; ``step``, one step with
    the kept gradients; or nothing.
    """

    whole: bool
    step: OptimizerStep | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """State of ``version``, and the gradients of ``attempt``, which may lead to the next one."""

    version: int
    attempt: int


class Residents:
    """The copies of one device. Lives for one epoch, and begins with none."""

    def __init__(self, control: ControlView) -> None:
        self._control = control
        self._kept: dict[int, _Kept] = {}

    def lag(self, block: int, base_version: int) -> Lag:
        """Returns the difference between the copy and the committed ``base_version``, which host
        memory has settled.
        """
        kept = self._kept.get(block)
        if kept is not None and kept.version == base_version:
            return Lag(whole=False)  # the attempt after it was skipped, or is this one
        record = self._control.record(base_version)
        if (
            kept is None
            or record is None
            or kept.version + 1 != base_version
            or kept.attempt != record.attempt
        ):
            return Lag(whole=True)
        return Lag(whole=False, step=OptimizerStep.of(record))

    def forget(self, block: int) -> None:
        """Forgets the copy, because it is about to change. Until it is kept again, its contents are
        undefined.
        """
        self._kept.pop(block, None)

    def keep(self, block: int, version: int, attempt: int) -> None:
        """Records the copy as that of ``version``, with the gradients of ``attempt``."""
        self._kept[block] = _Kept(version, attempt)
