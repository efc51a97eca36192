"""What the instructions of a plan take on an emulated device, and what they send."""

from __future__ import annotations

from typing import Any

from penstock.planner.costs import Costs
from penstock.planner.timing import seconds_of
from penstock.protocol.instructions import Forward, Keep, SendActivation
from penstock.protocol.layout import StageLayout


class Durations:
    """Emulated seconds and bytes of a plan's instructions."""

    def __init__(self, layout: StageLayout, costs: Costs) -> None:
        self._layout = layout
        self._costs = costs
        self._seconds = seconds_of(layout, costs)
        self._drops: dict[tuple[int, int], tuple[str, ...]] = {}

    def seconds(self, instruction: Any) -> float:
        """On the compute stream; a forward of the last stage ends at its last checkpoint."""
        layout = self._layout
        if isinstance(instruction, Forward):
            self._drops[instruction.stage, instruction.micro_batch] = instruction.drop
        if (
            isinstance(instruction, Forward)
            and instruction.keep is Keep.INPUT
            and layout.is_last_forward(instruction.stage)
        ):
            blocks = layout.forward[instruction.stage].blocks
            starts = (layout.backward[b].start for b in layout.checkpoints_of(instruction.stage))
            needed = range(blocks.start, max(starts, default=blocks.start))
            return self._costs.of(needed).forward_s + self._costs.instruction_s
        return self._seconds(instruction)

    def num_bytes(self, send: Any) -> float:
        """Of what an instruction sends."""
        if isinstance(send, SendActivation):
            block = self._layout.forward[send.stage].stop - 1
        else:
            block = self._layout.backward[send.stage].start - 1
        return self._costs.blocks[block].output_bytes

    def kept_bytes(self, stage: int, micro_batch: int) -> float:
        """Of what a forward, whose seconds were asked for before, kept."""
        cost = self._costs.of(self._layout.forward[stage].blocks)
        return cost.activation_bytes - cost.drop_bytes(self._drops.get((stage, micro_batch), ()))
