"""SEND_* and RECV_*: a send queues what was just computed, a receive only says that something will
come.
"""

from __future__ import annotations

from penstock.protocol.plan.instructions import (
    RecvActivation,
    RecvCheckpoint,
    RecvGradient,
    SendActivation,
    SendCheckpoint,
    SendGradient,
)
from penstock.workers.attempt import Attempt


def send_activation(instruction: SendActivation, attempt: Attempt) -> None:
    """To the device of the next forward stage."""
    attempt.send("activation", instruction.stage, instruction.micro_batch, instruction.peer)


def send_gradient(instruction: SendGradient, attempt: Attempt) -> None:
    """To the device of the backward stage before."""
    attempt.send("gradient", instruction.stage, instruction.micro_batch, instruction.peer)


def send_checkpoint(instruction: SendCheckpoint, attempt: Attempt) -> None:
    """To the device that will recompute from it."""
    attempt.send("checkpoint", instruction.stage, instruction.micro_batch, instruction.peer)


def receive_activation(instruction: RecvActivation, attempt: Attempt) -> None:
    """For FORWARD of the next stage."""
    attempt.post("activation", instruction.stage, instruction.micro_batch, instruction.peer)


def receive_gradient(instruction: RecvGradient, attempt: Attempt) -> None:
    """For BACKWARD of the stage before."""
    attempt.post("gradient", instruction.stage, instruction.micro_batch, instruction.peer)


def receive_checkpoint(instruction: RecvCheckpoint, attempt: Attempt) -> None:
    """For RECOMPUTE of the same stage."""
    attempt.post("checkpoint", instruction.stage, instruction.micro_batch, instruction.peer)
