"""SEND_* and RECV_*: a send queues what was just computed, a receive says what will come."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.planner.schedule.tensors import Receive, Send
from penstock.protocol.plan.instructions import Opcode
from penstock.protocol.plan.semantics import RECEIVES, SENDS
from penstock.protocol.wire.frames import TransferKind
from penstock.workers.attempt import Attempt

_KINDS: Mapping[Opcode, TransferKind] = MappingProxyType(
    {
        transfer.opcode: kind.value
        for transfers in (SENDS, RECEIVES)
        for kind, transfer in transfers.items()
    }
)


def send(instruction: Send, attempt: Attempt) -> None:
    """Queues a tensor for the device that needs it, which becomes its only owner."""
    kind = _KINDS[instruction.opcode]
    attempt.send(kind, instruction.stage, instruction.micro_batch, instruction.peer)


def receive(instruction: Receive, attempt: Attempt) -> None:
    """Announces a tensor; the instruction that takes it waits."""
    kind = _KINDS[instruction.opcode]
    attempt.post(kind, instruction.stage, instruction.micro_batch, instruction.peer)
