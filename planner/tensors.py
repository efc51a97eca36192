"""What travels between stages, and between which devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from penstock.planner.layout import StageLayout
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    Opcode,
    Recompute,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)


class TensorKind(StrEnum):
    """What travels between stages."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    CHECKPOINT = "checkpoint"


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
    """The tensor that a send or receive moves."""
    return Tensor(
        kind=_KIND[instruction.opcode],
        stage=instruction.stage,
        micro_batch=instruction.micro_batch,
    )


_TAKES: Mapping[type[Instruction], tuple[TensorKind, int]] = MappingProxyType(
    {
        Forward: (TensorKind.ACTIVATION, -1),
        Recompute: (TensorKind.CHECKPOINT, 0),
        Backward: (TensorKind.GRADIENT, 1),
        BackwardInput: (TensorKind.GRADIENT, 1),
    }
)
"""What an instruction takes, and of which stage, counted from its own."""


def taken_by(instruction: Instruction) -> Tensor | None:
    """The tensor that an instruction takes, if another stage makes one for it."""
    need = _TAKES.get(type(instruction))
    if need is None:
        return None
    kind, step = need
    return Tensor(
        kind=kind,
        stage=instruction.stage + step,  # type: ignore[attr-defined]  # those in _TAKES have it
        micro_batch=instruction.micro_batch,  # type: ignore[attr-defined]  # as above
    )


def endpoints(
    layout: StageLayout, kind: TensorKind, stage: int, *, skipped: bool = False
) -> tuple[int, int] | None:
    """Devices that produce and consume a tensor; ``None`` when the stage has no such tensor.

    ``skipped``: of a checkpoint, that the FORWARD of the stage that contains its block is left out
    for its micro-batch (:func:`penstock.planner.layout.skipped_forwards`).
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
