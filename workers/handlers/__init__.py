"""Handlers of instructions on a device: the table that the interpreter uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.protocol.plan.instructions import Opcode, by_opcode
from penstock.workers.attempt import Attempt
from penstock.workers.handlers import compute, state

Handler = Callable[[Any, Attempt], None]
"""Called with an instruction of its opcode and the attempt."""

HANDLERS: Mapping[Opcode, Handler] = by_opcode(
    "handler",
    {
        Opcode.FORWARD: compute.forward,
        Opcode.RECOMPUTE: compute.recompute,
        Opcode.BACKWARD: compute.backward,
        Opcode.BACKWARD_INPUT: compute.backward_input,
        Opcode.BACKWARD_WEIGHT: compute.backward_weight,
        Opcode.SEND_ACTIVATION: state.send,
        Opcode.RECV_ACTIVATION: state.receive,
        Opcode.SEND_GRADIENT: state.send,
        Opcode.RECV_GRADIENT: state.receive,
        Opcode.SEND_CHECKPOINT: state.send,
        Opcode.RECV_CHECKPOINT: state.receive,
        Opcode.FETCH_WEIGHTS: state.fetch_weights,
        Opcode.RELEASE_WEIGHTS: state.release_weights,
        Opcode.REDUCE_GRADIENTS: state.reduce_gradients,
        Opcode.OFFLOAD_GRADIENTS: state.offload_gradients,
        Opcode.UPDATE: state.update,
        Opcode.SWAP_OUT: state.swap_out,
        Opcode.SWAP_IN: state.swap_in,
    },
)

__all__ = ["HANDLERS", "Handler"]
