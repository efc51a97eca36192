"""Where stages are: the part of a plan that schemes and passes work from, before programs exist."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.instructions import Backward, Forward, Recompute
from penstock.protocol.plan import Plan, StageRange

ComputeInstruction = Forward | Recompute | Backward
"""What schemes order and passes insert around."""

Order = tuple[ComputeInstruction, ...]
"""The compute instructions of one device, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Both cuts of the model with their devices; see :class:`penstock.protocol.plan.Plan`."""

    num_devices: int
    num_microbatches: int
    forward: tuple[StageRange, ...]
    backward: tuple[StageRange, ...]

    @classmethod
    def of(cls, plan: Plan) -> StageLayout:
        """The stages of a plan, without its programs."""
        return cls(
            num_devices=plan.num_devices,
            num_microbatches=plan.num_microbatches,
            forward=plan.forward_stages,
            backward=plan.backward_stages,
        )

    def is_coupled(self, stage: int) -> bool:
        """Forward and backward stage ``stage`` are the same blocks on the same device."""
        return (
            stage < len(self.forward)
            and stage < len(self.backward)
            and self.forward[stage] == self.backward[stage]
        )

    def checkpoint_source(self, backward_stage: int) -> int:
        """Forward stage whose forwards leave the input checkpoint of a backward stage."""
        start = self.backward[backward_stage].start
        return next(i for i, stage in enumerate(self.forward) if start in stage.blocks)

    def forward_stages_on(self, device: int) -> tuple[int, ...]:
        """Forward stages of a device, in the order of the model."""
        return tuple(i for i, stage in enumerate(self.forward) if stage.device == device)

    def backward_stages_on(self, device: int) -> tuple[int, ...]:
        """Backward stages of a device, last first: the order in which backward passes can run."""
        found = (i for i, stage in enumerate(self.backward) if stage.device == device)
        return tuple(sorted(found, reverse=True))
