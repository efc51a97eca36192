"""Tensors that travel between stages, and the devices that they travel between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.planner.schedule.layout import StageLayout
from penstock.protocol.plan.instructions import (
    Instruction,
    Opcode,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)
from penstock.protocol.plan.resources import TensorKind
from penstock.protocol.plan.semantics import row_of

__all__ = ["Receive", "Send", "Tensor", "TensorKind", "endpoints", "taken_by", "transferred"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """``stage`` as in transfers: the producing stage; of a checkpoint the backward stage that needs
    it.
    """

    kind: TensorKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


Send = SendActivation | SendGradient | SendCheckpoint
Receive = RecvActivation | RecvGradient | RecvCheckpoint

_KIND: Mapping[Opcode, TensorKind] = {
    Opcode.SEND_ACTIVATION: TensorKind.ACTIVATION,
    Opcode.RECV_ACTIVATION: TensorKind.ACTIVATION,
    Opcode.SEND_GRADIENT: TensorKind.GRADIENT,
    Opcode.RECV_GRADIENT: TensorKind.GRADIENT,
    Opcode.SEND_CHECKPOINT: TensorKind.CHECKPOINT,
    Opcode.RECV_CHECKPOINT: TensorKind.CHECKPOINT,
}


def transferred(instruction: Send | Receive) -> Tensor:
    """Returns the tensor that a send or receive moves."""
    return Tensor(
        kind=_KIND[instruction.opcode],
        stage=instruction.stage,
        micro_batch=instruction.micro_batch,
    )


def taken_by(instruction: Instruction) -> Tensor | None:
    """Returns the tensor that an instruction takes, if another stage makes one for it."""
    for kind, step, stays, _ in row_of(instruction).reads:
        if isinstance(kind, TensorKind) and not stays:
            stage: int = instruction.stage + step  # type: ignore[attr-defined]  # readers have it
            micro_batch: int = instruction.micro_batch  # type: ignore[attr-defined]  # as above
            return Tensor(kind=kind, stage=stage, micro_batch=micro_batch)
    return None


def endpoints(
    layout: StageLayout, kind: TensorKind, stage: int, *, skipped: bool = False
) -> tuple[int, int] | None:
    """Returns the devices that make and use a tensor; ``None`` if a stage has no such tensor.

    ``skipped``: of a checkpoint, that the FORWARD of the stage that contains its block is left out
    for its micro-batch (``skipped`` of :class:`~penstock.protocol.plan.resources.PlanFacts`).
    """
    forward, backward = layout.forward, layout.backward
    if kind is TensorKind.ACTIVATION and 0 <= stage < len(forward):
        if layout.is_last_forward(stage):
            return None
        return forward[stage].device, forward[stage + 1].device
    if not 0 <= stage < len(backward) or layout.is_first_backward(stage):
        return None
    if kind is TensorKind.GRADIENT:
        return backward[stage].device, backward[stage - 1].device
    source = layout.checkpoint_source(stage, skipped=skipped)
    return forward[source].device, backward[stage].device
