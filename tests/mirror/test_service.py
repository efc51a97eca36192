"""What a mirrord's heartbeats say of its progress."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

from penstock.daemons.kit.events import Exit
from penstock.daemons.mirror.machine.events import Seeded
from penstock.daemons.mirror.service import MirrorService, SeedOutcome
from penstock.host.errors import ExitCode

SEEDED = SeedOutcome(event=Seeded(epoch=1, block=0, version=14, incarnation=7), num_bytes=768)


class Hands:
    """Ends the service after so many events."""

    def __init__(self, events: int) -> None:
        self.left = events
        self.exit: Exit | None = None

    def carry_out(self, effects: Any) -> list[Any]:
        self.left -= 1
        if not self.left:
            self.exit = Exit(code=ExitCode.DONE, reason="enough")
        return []


class Machine:
    """Takes a block at its third seed: of the two before it has not heard that they are committed.
    A service can be asked what it does while it runs.
    """

    epoch = 1

    def __init__(self) -> None:
        self.replica = SimpleNamespace(missing=(0,))
        self.progress: list[int] = []
        self.service: MirrorService | None = None

    def handle(self, event: Any, now_s: float) -> list[Any]:
        assert self.service is not None
        self.progress.append(self.service.doing().progress)
        if len(self.progress) == 3:
            self.replica.missing = ()
        return []

    def validate(self) -> None:
        """Nothing can contradict itself here."""


def test_a_block_that_is_read_again_and_again_is_no_progress() -> None:
    machine, inbox = Machine(), queue.Queue[Any]()
    for _ in range(4):
        inbox.put(SEEDED)
    parts: Any = SimpleNamespace(
        effects=Hands(4),
        server=SimpleNamespace(failure=None, stuck=""),
        sweeps=SimpleNamespace(running=None),
        metrics=SimpleNamespace(seeded=lambda num_bytes: None),
    )
    service = MirrorService(machine=machine, inbox=inbox, parts=parts)  # type: ignore[arg-type]
    machine.service = service
    service.run()
    assert machine.progress == [0, 0, 0, 1], "it was [0, 1, 2, 3]"
