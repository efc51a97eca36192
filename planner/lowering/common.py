"""What the passes share."""

from __future__ import annotations

from penstock.protocol.plan.instructions import (
    OffloadGradients,
    Program,
    ReduceGradients,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)

_FOLLOWERS = SendActivation | SendGradient | SendCheckpoint | ReduceGradients | OffloadGradients


def after_sends(program: Program, position: int) -> int:
    """The first position behind ``position`` and the sends and offloads that belong to it.

    Peers wait for sends and the optimizer for offloads, so nothing is put in front of them.
    """
    position += 1
    while position < len(program) and isinstance(program[position], _FOLLOWERS):
        position += 1
    return position
