"""The work of a device in an attempt: floating-point operations, by the plan.

A block table has the operations of a block's forward per token. A backward takes twice as many,
half for the gradients of inputs, half for those of weights. Work that a forward leaves out, because
its stage is computed again anyway, counts where it is computed first.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Keep,
    Program,
    Recompute,
)
from penstock.protocol.plan.layout import StageLayout
from penstock.shm.table import BlockTable


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations per token of a micro-batch: of the model, and of recomputation."""

    model: float = 0.0
    recomputed: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.model + other.model, self.recomputed + other.recomputed)


def flops_of(program: Program, layout: StageLayout, table: BlockTable) -> Flops:
    """Returns the work of a device's program."""
    selective = {
        (i.stage, i.micro_batch)
        for i in program
        if isinstance(i, Forward) and i.keep is Keep.SELECTIVE
    }
    flops = Flops()
    for instruction in program:
        if isinstance(instruction, Recompute):
            if (instruction.stage, instruction.micro_batch) in selective:
                continue
        flops += _flops(instruction, layout, table)
    return flops


def _flops(instruction: Instruction, layout: StageLayout, table: BlockTable) -> Flops:
    def forward(blocks: range) -> float:
        return sum(table.blocks[block].forward_flops for block in blocks)

    match instruction:
        case Forward(stage=stage, keep=keep):
            stops = keep is Keep.INPUT and layout.is_last_forward(stage)
            computed = layout.blocks_for_checkpoints(stage) if stops else None
            return Flops(forward(layout.forward[stage].blocks if computed is None else computed))
        case Recompute(stage=stage):
            blocks = layout.backward[stage].blocks
            known = max(blocks.start, min(blocks.stop, _computed_until(layout)))
            if not layout.is_last_backward(stage):
                known = blocks.stop
            return Flops(
                model=forward(range(known, blocks.stop)),
                recomputed=forward(range(blocks.start, known)),
            )
        case Backward(stage=stage):
            return Flops(2.0 * forward(layout.backward[stage].blocks))
        case BackwardInput(stage=stage):
            return Flops(forward(layout.backward[stage].blocks))
        case BackwardWeight(stage=stage, micro_batches=micro_batches):
            return Flops(len(micro_batches) * forward(layout.backward[stage].blocks))
    return Flops()


def _computed_until(layout: StageLayout) -> int:
    """Returns the end of the last stage's forward, a block, if it leaves checkpoints only."""
    last = next(s for s in range(len(layout.forward)) if layout.is_last_forward(s))
    return layout.blocks_for_checkpoints(last).stop
