"""Where tensors go in a plan: stages by route, what becomes of a forward's output, and who sums
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.plan.instructions import BackwardInput, SwapOut
from penstock.protocol.plan.layout import StageLayout, skipped_forwards
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.wire.frames import TransferKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The stages of a plan, and what training does to some (stage, micro-batch).

    ``skipped``: forwards that it leaves out. ``split``: backwards in two halves. ``swapped``: what
    a forward keeps is swapped.
    """

    layout: StageLayout
    reduction: Reduction
    skipped: frozenset[tuple[int, int]]
    split: frozenset[tuple[int, int]]
    swapped: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, plan: Plan) -> Flow:
        """From all programs of the plan."""
        layout = StageLayout.of(plan)
        found: dict[type, set[tuple[int, int]]] = {BackwardInput: set(), SwapOut: set()}
        for program in plan.programs:
            for instruction in program:
                if isinstance(instruction, (BackwardInput, SwapOut)):
                    found[type(instruction)].add((instruction.stage, instruction.micro_batch))
        return cls(
            layout=layout,
            reduction=Reduction.of(plan),
            skipped=skipped_forwards(layout, plan.programs),
            split=frozenset(found[BackwardInput]),
            swapped=frozenset(found[SwapOut]),
        )

    def output(
        self, stage: int, micro_batch: int, *, training: bool
    ) -> tuple[TransferKind, int] | None:
        """What the output of a forward is, and of which stage; ``None`` where nobody needs it.

        It is the input of the next forward or, where that is left out, the checkpoint of the
        backward stage that starts there. Evaluation leaves none out.
        """
        if self.layout.is_last_forward(stage):
            return None
        if not training or (stage + 1, micro_batch) not in self.skipped:
            return "activation", stage
        following = self.layout.checkpoint_after(stage)
        return None if following is None else ("checkpoint", following)
