"""What a worker's interpreter is at, for its heartbeats: a hang is seen, and named, by others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.protocol.wire.member import Doing


class Progress:
    """Written by the interpreter's thread, read by the one that sends heartbeats.

    No lock: each attribute is replaced as a whole, and a heartbeat may well mix two instructions.
    Texts are made by the reader, so that an instruction costs two assignments.
    """

    def __init__(self) -> None:
        self._count = 0
        self._under_way: tuple[object, str, int] | None = None
        self._awaited: object = None

    def begin(self, what: object, phase: str, number: int) -> None:
        """An instruction (or whatever ``str(what)`` names) of attempt or evaluation batch
        ``number`` begins.
        """
        self._under_way = what, phase, number
        self._count += 1

    def rest(self) -> None:
        """Nothing is under way."""
        self._under_way = None

    @contextmanager
    def awaiting(self, what: object) -> Iterator[None]:
        """The instruction waits for what another member makes; ``str(what)`` names it."""
        self._awaited = what
        try:
            yield
        finally:
            self._awaited = None

    def doing(self) -> Doing:
        """For a heartbeat."""
        under_way, awaited, count = self._under_way, self._awaited, self._count
        if under_way is None:
            return Doing(progress=count)
        what, phase, number = under_way
        activity = f"{what} of {phase} {number}"
        if awaited is not None:
            activity += f", waiting for {awaited}"
        return Doing(activity=activity, waiting=awaited is not None, progress=count)
