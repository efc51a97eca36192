"""The passes over one block: what the state machine orders, as values.

How they read and write memory is in ``native/passes.h``; :mod:`penstock.daemons.optimizer.kernels`
turns each value into one native call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.shm.control import CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step: everything but the gradients and the model state that decides its bits.

    The step leads to ``version``: its gradients are in copy ``version % 2``, its weights belong
    into slot ``version % 2``. ``coefficient`` multiplies the summed gradients (clipping times
    inverse loss scale), ``bias_step`` counts from 1.
    """

    version: int
    coefficient: float
    learning_rate: float
    bias_step: int

    @classmethod
    def of(cls, record: CommitRecord) -> Update:
        """The step that a commit record promises."""
        return cls(
            version=record.version,
            coefficient=record.coefficient * record.inverse_loss_scale,
            learning_rate=record.learning_rate,
            bias_step=record.bias_step,
        )

    @classmethod
    def speculative(cls, *, version: int, loss_scale: float, learning_rate: float) -> Update:
        """The step as it will be committed if the gradients need no clipping.

        Written so that it is equal, bit for bit, to :meth:`of` the record of such a commit.
        """
        return cls(
            version=version,
            coefficient=1.0 * (1.0 / loss_scale),
            learning_rate=learning_rate,
            bias_step=version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Write the weights that ``update`` leads to; state stays."""

    name: ClassVar[str] = "preview"
    block: int
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Write ``update`` into master and state."""

    name: ClassVar[str] = "settle"
    block: int
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Settle ``pending``, then preview ``update``, in one go."""

    name: ClassVar[str] = "advance"
    block: int
    pending: Update
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSettle:
    """Repair a settle or advance of ``update`` that was cut short, then settle what it left."""

    name: ClassVar[str] = "finish"
    block: int
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStatus:
    """Only look at the gradients in copy ``version % 2``."""

    name: ClassVar[str] = "gradient_status"
    block: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CastWeights:
    """Write the weights of ``version`` from a master that is at ``version``."""

    name: ClassVar[str] = "cast"
    block: int
    version: int


Pass = Preview | Settle | Advance | FinishSettle | GradientStatus | CastWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStatus:
    """What a pass over new gradients learned: ``sum_squares`` of their sum, before any factor."""

    finite: bool
    sum_squares: float


def pass_tag(block: int, state_version: int) -> int:
    """Name, in the undo area, of the one pass that leads a block's state to ``state_version``.

    Unique and never 0 for one filling of the memory; a restore clears the undo area.
    """
    return (block << 40) | state_version
