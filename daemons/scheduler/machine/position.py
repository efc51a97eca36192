"""The position of a run after a decision: the next attempt, or a resumed run, goes on from it.

A position is stored with every journal row and, as the ``scheduler`` object, in every saved state.
The learning rate is no part of it: :mod:`~.activities.learning_rates` derives it from the version.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from penstock.daemons.scheduler.machine.holding import AMENDED, HOLD_WINDOW, HoldLimits
from penstock.host.errors import StateError
from penstock.shm.control import Decision

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5

LIMIT = 2**53
"""Exclusive upper bound of counts: no run reaches it, so a higher count is damage."""

_LETTERS = {Decision.COMMIT: "c", Decision.AMEND: AMENDED, Decision.SKIP: "s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """Rule of the loss scale: ``dynamic`` for fp16 weights, otherwise constant 1.

    The scale doubles after ``growth_interval`` commits in a row, and halves with each skip while it
    is above ``minimum``. The factors are powers of two, so that scaling and its inverse are exact.
    """

    dynamic: bool
    initial: float
    growth_interval: int
    minimum: float = 1.0

    @property
    def start(self) -> float:
        """The scale of the first attempt."""
        return self.initial if self.dynamic else 1.0

    def lowest(self, scale: float) -> bool:
        """Returns whether no skip lowers ``scale`` any more."""
        return not self.dynamic or scale <= self.minimum

    def lowered(self, scale: float) -> float:
        """Returns the scale after a skip."""
        return scale if self.lowest(scale) else max(self.minimum, scale * BACKOFF_FACTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position after a decision."""

    version: int
    """Commits so far."""
    data_position: int
    """Samples consumed so far."""
    loss_scale: float
    clean_commits: int = 0
    """Commits since the last change of the loss scale."""
    skips_in_a_row: int = 0
    recent: str = ""
    """Letters of the last decisions (c, a, s), newest last."""
    hold: bool = False
    """True if the next attempt waits for the norm (:mod:`.holding`)."""

    def after(
        self,
        decision: Decision,
        samples: int,
        scaling: LossScaling,
        limits: HoldLimits = HoldLimits(),  # noqa: B008  # frozen
    ) -> Position:
        """Returns the position after an attempt on ``samples`` that ended with ``decision``."""
        recent = (self.recent + _LETTERS[decision])[-HOLD_WINDOW:]
        data_position = self.data_position + samples
        if decision is Decision.SKIP:
            return dataclasses.replace(
                self,
                data_position=data_position,
                loss_scale=scaling.lowered(self.loss_scale),
                clean_commits=0,
                skips_in_a_row=self.skips_in_a_row + 1,
                recent=recent,
                hold=limits.hold(self.hold, recent),
            )
        grow = scaling.dynamic and self.clean_commits + 1 >= scaling.growth_interval
        return Position(
            version=self.version + 1,
            data_position=data_position,
            loss_scale=self.loss_scale * GROWTH_FACTOR if grow else self.loss_scale,
            clean_commits=0 if grow else self.clean_commits + 1,
            skips_in_a_row=0,
            recent=recent,
            hold=limits.hold(self.hold, recent),
        )

    def to_fields(self) -> dict[str, Any]:
        """Returns a JSON object; :meth:`from_fields` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: Any, source: str) -> Position:
        """Reads a position; unknown keys are ignored.

        Raises:
            StateError: a field is missing or of another type; names ``source``.
        """
        try:
            position = cls(
                version=int(fields["version"]),
                data_position=int(fields["data_position"]),
                loss_scale=float(fields["loss_scale"]),
                clean_commits=int(fields["clean_commits"]),
                skips_in_a_row=int(fields["skips_in_a_row"]),
                recent=str(fields["recent"]),
                hold=bool(fields.get("hold", False)),  # older positions have none
            )
            position.validate()
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"{source}: no scheduler position: {error!r}") from error
        return position

    def validate(self) -> None:
        """Checks ranges.

        Raises:
            ValueError: a field is out of range; names the field.
        """
        for name in ("version", "data_position", "clean_commits", "skips_in_a_row"):
            if not 0 <= getattr(self, name) < LIMIT:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if not (self.loss_scale > 0.0 and math.isfinite(self.loss_scale)):
            raise ValueError(f"loss_scale is {self.loss_scale}")
        if len(self.recent) > HOLD_WINDOW or set(self.recent) - set(_LETTERS.values()):
            raise ValueError(f"recent is {self.recent!r}")
