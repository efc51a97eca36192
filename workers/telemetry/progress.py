"""The current activity of a worker's interpreter, for its heartbeats: other processes detect and
name a hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.host import world
from penstock.protocol.plan.instructions import Instruction
from penstock.protocol.plan.semantics import COMPUTES
from penstock.protocol.wire.member import Doing
from penstock.workers.telemetry.account import IdleCause, Running


class Progress:
    """The activity of a worker: written by the interpreter's thread, read by the heartbeats'
    thread.

    No lock: each attribute is replaced as a whole, and a heartbeat may mix two instructions. The
    reader makes the texts, so that an instruction costs two assignments.
    """

    def __init__(self) -> None:
        self._count = 0
        self._under_way: tuple[object, str, int] | None = None
        self._awaited: tuple[object, IdleCause, float] | None = None
        self._since_s = 0.0

    def begin(self, what: object, phase: str, number: int) -> None:
        """Begins an instruction (or another activity that ``str(what)`` names) of attempt or
        evaluation batch ``number``.
        """
        self._since_s = world.perf_counter()
        self._under_way = what, phase, number
        self._count += 1

    def rest(self) -> None:
        """Ends the current activity."""
        self._under_way = None

    @contextmanager
    def awaiting(self, what: object, cause: IdleCause) -> Iterator[None]:
        """Marks the instruction as waiting for another member's work; ``str(what)`` names it."""
        self._awaited = what, cause, world.perf_counter()
        try:
            yield
        finally:
            self._since_s = world.perf_counter()
            self._awaited = None

    def doing(self) -> Doing:
        """Returns the activity for a heartbeat."""
        under_way, awaited, count = self._under_way, self._awaited, self._count
        if under_way is None:
            return Doing(progress=count)
        what, phase, number = under_way
        activity = f"{what} of {phase} {number}"
        if awaited is not None:
            activity += f", waiting for {awaited[0]}"
        return Doing(activity=activity, waiting=awaited is not None, progress=count)

    def running(self) -> Running | None:
        """Returns the device's computation or wait in an attempt, and its start, as far as the host
        knows; None between attempts.
        """
        under_way, awaited, since_s = self._under_way, self._awaited, self._since_s
        if under_way is None or not isinstance(under_way[0], Instruction):
            return None
        if awaited is not None:
            return awaited[1:]
        return busy_with(under_way[0], under_way[1]), since_s


def busy_with(instruction: Instruction, phase: str) -> str:
    """Returns the kind of busy time of a device that executes an instruction, for its account."""
    if not isinstance(instruction, COMPUTES):
        return IdleCause.OVERHEAD
    return "evaluate" if phase == "eval" else instruction.opcode.name.lower()
