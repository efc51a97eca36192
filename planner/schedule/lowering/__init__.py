"""The chain of small pure steps from orders to full programs.

Tied tensors need no step: the runtime fetches borrowed tensors with the stage that borrows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.planner.schedule.layout import Order, StageLayout
from penstock.planner.schedule.lowering.transfers import insert_gradient_offload, insert_transfers
from penstock.planner.schedule.lowering.weights import (
    insert_resident_weights,
    insert_streamed_weights,
)
from penstock.protocol.plan.instructions import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Holds full programs, and how many weight buffers they use on a device at most."""

    programs: tuple[Program, ...]
    weight_buffers: int


def complete(
    layout: StageLayout, orders: Sequence[Order], *, streamed: bool, reduces_gradients: bool
) -> Completed:
    """Inserts transfers, gradient offloads and weights into the orders of a scheme, or of an
    evaluation.

    Raises:
        ValueError: the orders cannot finish.
    """
    programs = insert_transfers(layout, orders)
    programs = insert_gradient_offload(programs, reduces_gradients=reduces_gradients)
    insert = insert_streamed_weights if streamed else insert_resident_weights
    programs, weight_buffers = insert(layout, programs)
    return Completed(programs=programs, weight_buffers=weight_buffers)
