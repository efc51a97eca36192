"""The order of each device's sends to each other device: a pure function of the plan.

Process groups match by position: both ends must go through the transfers of an ordered pair in the
same order, the sender's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.host.errors import ConfigError
from penstock.protocol.plan.instructions import (
    Instruction,
    Program,
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    ReduceGradients,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.reduction import Reduction
from penstock.protocol.wire.frames import TransferKind
from penstock.workers.channels.inbox import TransferKey

Phase = Literal["train", "eval"]

_SENDS: Mapping[type, TransferKind] = {
    SendActivation: "activation",
    SendGradient: "gradient",
    SendCheckpoint: "checkpoint",
}
_RECEIVES: Mapping[type, TransferKind] = {
    RecvActivation: "activation",
    RecvGradient: "gradient",
    RecvCheckpoint: "checkpoint",
}

_POSITION_BITS = 16
_NUMBER_BITS = 14
MAX_TRANSFERS = (1 << _POSITION_BITS) - 1
"""Largest number of transfers that a direction may have in one job."""

RESERVED_TAG = (1 << 31) - 1
"""A tag that no transfer has."""


class Direction(NamedTuple):
    """A sending and a receiving device, in one phase."""

    sender: int
    receiver: int
    phase: Phase


class OrderedTransfer(NamedTuple):
    """One transfer of a direction."""

    kind: TransferKind
    stage: int
    micro_batch: int

    @classmethod
    def of(cls, key: TransferKey) -> OrderedTransfer:
        """Returns the transfer, the same for all attempts."""
        return cls(key.kind, key.stage, key.micro_batch)


class Place(NamedTuple):
    """The position of a transfer in the order of its direction."""

    direction: Direction
    position: int

    def tag(self, number: int) -> int:
        """Returns a number of 31 bits that identifies the transfer among all current ones between
        the same devices.

        A sender is at most a few attempts, or evaluation batches, ahead of its receiver.
        """
        job = (number % (1 << _NUMBER_BITS)) << 1 | (self.direction.phase == "eval")
        return job << _POSITION_BITS | self.position


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOrder:
    """The transfers of each direction, in the order of its sender's program."""

    transfers: Mapping[Direction, tuple[OrderedTransfer, ...]]
    places: Mapping[tuple[Direction, OrderedTransfer], Place]

    @classmethod
    def of(cls, plan: Plan) -> TransferOrder:
        """Returns the order of all programs, training and evaluation.

        Raises:
            ConfigError: a device does not receive exactly what another sends to it.
        """
        sent: dict[Direction, list[OrderedTransfer]] = defaultdict(list)
        received: dict[Direction, list[OrderedTransfer]] = defaultdict(list)
        reduction = Reduction.of(plan)
        programs: tuple[tuple[Phase, tuple[Program, ...]], ...] = (
            ("train", plan.programs),
            ("eval", plan.evaluation),
        )
        for phase, of_devices in programs:
            for device, program in enumerate(of_devices):
                for instruction in program:
                    _note(sent, received, device, phase, instruction)
                    if isinstance(instruction, ReduceGradients):
                        _reduce(sent, received, reduction, instruction.stage)
        for direction in sorted({*sent, *received}):
            _check(direction, sent[direction], received[direction])
        return cls(
            transfers={direction: tuple(transfers) for direction, transfers in sent.items()},
            places={
                (direction, transfer): Place(direction, position)
                for direction, transfers in sent.items()
                for position, transfer in enumerate(transfers)
            },
        )

    @property
    def members(self) -> tuple[int, ...]:
        """The devices that send or receive anything, ascending."""
        return tuple(
            sorted(
                {d for direction in self.transfers for d in (direction.sender, direction.receiver)}
            )
        )

    def arriving(self, device: int) -> Mapping[tuple[Phase, OrderedTransfer], Place]:
        """Returns the place of each transfer that ``device`` receives."""
        return {
            (direction.phase, transfer): place
            for (direction, transfer), place in self.places.items()
            if direction.receiver == device
        }


def _note(
    sent: dict[Direction, list[OrderedTransfer]],
    received: dict[Direction, list[OrderedTransfer]],
    device: int,
    phase: Phase,
    instruction: Instruction,
) -> None:
    if isinstance(instruction, (SendActivation, SendGradient, SendCheckpoint)):
        transfer = OrderedTransfer(
            _SENDS[type(instruction)], instruction.stage, instruction.micro_batch
        )
        sent[Direction(device, instruction.peer, phase)].append(transfer)
    elif isinstance(instruction, (RecvActivation, RecvGradient, RecvCheckpoint)):
        transfer = OrderedTransfer(
            _RECEIVES[type(instruction)], instruction.stage, instruction.micro_batch
        )
        received[Direction(instruction.peer, device, phase)].append(transfer)


def _reduce(
    sent: dict[Direction, list[OrderedTransfer]],
    received: dict[Direction, list[OrderedTransfer]],
    reduction: Reduction,
    stage: int,
) -> None:
    """Notes the transfer of the sums of a backward stage that is not its own root."""
    if not reduction.publishes(stage):
        sender = reduction.layout.backward[stage].device
        direction = Direction(sender, reduction.root_device(stage), "train")
        sent[direction].append(OrderedTransfer("reduction", stage, 0))
        received[direction].append(OrderedTransfer("reduction", stage, 0))


def _check(
    direction: Direction, sent: list[OrderedTransfer], received: list[OrderedTransfer]
) -> None:
    odd = sorted(set(sent) ^ set(received))
    if odd or len(sent) != len(received):
        named = (
            ", ".join(" ".join(map(str, transfer)) for transfer in odd[:3]) or "one of them twice"
        )
        raise ConfigError(
            f"plan ({direction.phase}): device {direction.receiver} does not receive what device"
            f" {direction.sender} sends to it: {named}"
        )
    if len(sent) > MAX_TRANSFERS:
        raise ConfigError(
            f"plan ({direction.phase}): device {direction.sender} sends {len(sent)} tensors to"
            f" device {direction.receiver}; cluster.transport gloo and nccl take {MAX_TRANSFERS},"
            " zmq any number"
        )
