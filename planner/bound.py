"""How fast could it be at best? A bound that every order of the same work obeys.

Compute only: transfers, copies and the optimizer can only add to it. How near a schedule comes to
the best order itself, by trying orders, is another question.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.costs import Costs
from penstock.planner.layout import Order, OrderedInstruction, StageLayout, skipped_forwards
from penstock.planner.timing import seconds_of
from penstock.protocol.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
)


def lower_bound_s(layout: StageLayout, orders: Sequence[Order], costs: Costs) -> float:
    """Seconds that the instructions of ``orders`` take on their devices, in whatever order.

    The largest of these. For each device: the forwards of one micro-batch that must be over before
    it can start, plus its work, plus the backwards that can only follow its last backward. The same
    without its weight gradients where backwards are split (they need not come first). And one
    micro-batch alone, all the way forward and back.
    """
    return _Bound(layout, orders, costs).seconds()


class _Bound:
    """``before[s]``: forwards below forward stage s; ``after[b]``: backwards below stage b."""

    def __init__(self, layout: StageLayout, orders: Sequence[Order], costs: Costs) -> None:
        self._layout = layout
        self._orders = orders
        self._seconds_of = seconds_of(layout, costs)
        split = any(isinstance(i, BackwardInput) for order in orders for i in order)
        skipped = {stage for stage, _ in skipped_forwards(layout, orders)}
        forward = [
            0.0 if i in skipped else costs.of(s.blocks).forward_s
            for i, s in enumerate(layout.forward)
        ]
        stages = [costs.of(s.blocks) for s in layout.backward]
        backward = [s.backward_input_s if split else s.backward_s for s in stages]
        self._before = _running(forward, [layout.is_first_forward(i) for i in range(len(forward))])
        self._after = _running(
            backward, [layout.is_first_backward(i) for i in range(len(backward))]
        )
        last = len(forward) - 1, len(backward) - 1
        self._one_micro_batch = (
            self._before[last[0]] + forward[last[0]] + self._after[last[1]] + backward[last[1]]
        )

    def seconds(self) -> float:
        return max([self._one_micro_batch, *map(self._device, self._orders)])

    def _device(self, order: Order) -> float:
        """The bound by one device's work."""
        if not order:
            return 0.0
        head = min((h for h in map(self._head, order) if h is not None), default=0.0)
        tail = min((t for t in map(self._tail, order) if t is not None), default=0.0)
        work = [(self._seconds_of(i), isinstance(i, BackwardWeight)) for i in order]
        weights = sum(seconds for seconds, is_weight in work if is_weight)
        rest = sum(seconds for seconds, is_weight in work if not is_weight)
        return head + max(rest + tail, rest + weights)

    def _head(self, instruction: OrderedInstruction) -> float | None:
        match instruction:
            case Forward(stage=s):
                return self._before[s]
            case Recompute(stage=b):
                return self._before[self._layout.checkpoint_source(b)]
        return None

    def _tail(self, instruction: OrderedInstruction) -> float | None:
        match instruction:
            case Backward(stage=b) | BackwardInput(stage=b):
                return self._after[b]
        return None


def _running(seconds: Sequence[float], restarts: Sequence[bool]) -> list[float]:
    """Sums of what stands before each, anew where a route begins."""
    sums: list[float] = []
    total = 0.0
    for value, restart in zip(seconds, restarts, strict=True):
        total = 0.0 if restart else total
        sums.append(total)
        total += value
    return sums
