"""What each instruction does on a device: the table that the interpreter works from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.protocol.plan.instructions import Opcode
from penstock.workers.attempt import Attempt
from penstock.workers.handlers import (
    compute,
    transfers,
)
from penstock.workers.handlers import (
    state as gradients,
)
from penstock.workers.handlers import (
    state as memory,
)
from penstock.workers.handlers import (
    state as update,
)

Handler = Callable[[Any, Attempt], None]
"""Called with an instruction of its opcode and the attempt."""

HANDLERS: Mapping[Opcode, Handler] = MappingProxyType(
    {
        Opcode.FORWARD: compute.forward,
        Opcode.RECOMPUTE: compute.recompute,
        Opcode.BACKWARD: compute.backward,
        Opcode.BACKWARD_INPUT: compute.backward_input,
        Opcode.BACKWARD_WEIGHT: compute.backward_weight,
        Opcode.SEND_ACTIVATION: transfers.send_activation,
        Opcode.RECV_ACTIVATION: transfers.receive_activation,
        Opcode.SEND_GRADIENT: transfers.send_gradient,
        Opcode.RECV_GRADIENT: transfers.receive_gradient,
        Opcode.SEND_CHECKPOINT: transfers.send_checkpoint,
        Opcode.RECV_CHECKPOINT: transfers.receive_checkpoint,
        Opcode.FETCH_WEIGHTS: memory.fetch_weights,
        Opcode.RELEASE_WEIGHTS: memory.release_weights,
        Opcode.REDUCE_GRADIENTS: gradients.reduce_gradients,
        Opcode.OFFLOAD_GRADIENTS: gradients.offload_gradients,
        Opcode.UPDATE: update.update,
        Opcode.SWAP_OUT: memory.swap_out,
        Opcode.SWAP_IN: memory.swap_in,
    }
)
"""Those in :data:`penstock.protocol.plan.executable.EXECUTED`."""

__all__ = ["HANDLERS", "Handler"]
