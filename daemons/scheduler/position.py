"""Where a run stands after a decision: what the next attempt and a resumed run go on from.

A position is stored with every journal row and, as the ``scheduler`` object, in every saved state.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock.protocol.errors import StateError
from penstock.shm.control import Decision

HOLD_WINDOW = 20
"""Attempts that are looked at to decide whether speculation pays."""
MIN_LOSS_SCALE = 1.0

_LETTERS = {Decision.COMMIT: "c", Decision.AMEND: "a", Decision.SKIP: "s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """How the loss scale moves; ``dynamic`` only when weights are fp16, otherwise it stays 1."""

    dynamic: bool
    initial: float
    growth_interval: int

    @property
    def start(self) -> float:
        """The scale of the first attempt."""
        return self.initial if self.dynamic else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """After some decision: ``data_position`` samples are consumed, ``version`` commits are made.

    ``clean_commits``: commits since the loss scale last changed. ``skips_in_a_row``: consecutive
    skips. ``recent``: the last decisions, newest last, a letter each (c, a, s).
    """

    version: int
    data_position: int
    loss_scale: float
    clean_commits: int = 0
    skips_in_a_row: int = 0
    recent: str = ""

    @property
    def hold(self) -> bool:
        """Whether more than half of the last attempts were amended: the optimizer then waits."""
        return self.recent.count("a") > HOLD_WINDOW // 2

    def after(self, decision: Decision, samples: int, scaling: LossScaling) -> Position:
        """The position after an attempt that consumed ``samples`` and ended with ``decision``."""
        recent = (self.recent + _LETTERS[decision])[-HOLD_WINDOW:]
        data_position = self.data_position + samples
        if decision is Decision.SKIP:
            halved = max(MIN_LOSS_SCALE, self.loss_scale / 2)
            return dataclasses.replace(
                self,
                data_position=data_position,
                loss_scale=halved if scaling.dynamic else self.loss_scale,
                clean_commits=0,
                skips_in_a_row=self.skips_in_a_row + 1,
                recent=recent,
            )
        grow = scaling.dynamic and self.clean_commits + 1 >= scaling.growth_interval
        return Position(
            version=self.version + 1,
            data_position=data_position,
            loss_scale=self.loss_scale * 2 if grow else self.loss_scale,
            clean_commits=0 if grow else self.clean_commits + 1,
            skips_in_a_row=0,
            recent=recent,
        )

    def to_fields(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_fields` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: Any, source: str) -> Position:
        """Read a position; unknown keys are left alone.

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
            )
            position.validate()
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{source}: no scheduler position: {error!r}") from error
        return position

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ValueError: naming the field.
        """
        for name in ("version", "data_position", "clean_commits", "skips_in_a_row"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if not self.loss_scale >= MIN_LOSS_SCALE:
            raise ValueError(f"loss_scale is {self.loss_scale}")
        if len(self.recent) > HOLD_WINDOW or set(self.recent) - set(_LETTERS.values()):
            raise ValueError(f"recent is {self.recent!r}")
