"""Static residents: which state a device keeps from attempt to attempt, and what it lacks.

Source: Maurya et al., "Deep Optimizer States", section 4.1. There the device has the only copy of a
resident's state. Here host memory has the truth, as of every block, and takes each commit in by
itself (optimizerd settles it). The device's copy is a cache that takes the same commit in: with the
gradients that it kept, and the step that the commit record says, so it has the same bits and
nothing is fetched. Whenever that is not possible the state is read from host memory again: at the
start of an epoch (whatever was restored or repaired, there was an epoch for it), after attempts
that held, and after a sweep that was broken off.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.plan.step import OptimizerStep
from penstock.shm.control import ControlView


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """What a device's copy lacks: ``whole``, all of it; ``step``, one step with the gradients that
    were kept; or nothing.
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
        """Between the copy and the committed ``base_version``, which host memory has settled."""
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
        """The copy is about to change: until it is kept again, it may be anything."""
        self._kept.pop(block, None)

    def keep(self, block: int, version: int, attempt: int) -> None:
        """The copy is of ``version``, with the gradients of ``attempt``."""
        self._kept[block] = _Kept(version, attempt)
