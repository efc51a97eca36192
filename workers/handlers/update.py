"""UPDATE: a block's next weights on this device, instead of on its node's CPU cores."""

from __future__ import annotations

from penstock.protocol.instructions import Update
from penstock.workers.attempt import Attempt


def update(instruction: Update, attempt: Attempt) -> None:
    """Start; the attempt ends when it is done. In an attempt that holds, the CPU updates all."""
    attempt.update(instruction)
