"""From compute orders to full programs: a chain of small pure passes.

Tied tensors need nothing here: the runtime fetches borrowed tensors with the stage that borrows
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.layout import Order, StageLayout
from penstock.planner.passes.gradients import insert_gradient_offload
from penstock.planner.passes.transfers import insert_transfers
from penstock.planner.passes.weights import insert_weights
from penstock.protocol.instructions import Program


def complete(layout: StageLayout, orders: Sequence[Order]) -> tuple[Program, ...]:
    """Insert transfers, gradient offloads and weights into the orders of a scheme, or of an
    evaluation.
    """
    programs = insert_transfers(layout, orders)
    programs = insert_gradient_offload(programs)
    return insert_weights(layout, programs)
