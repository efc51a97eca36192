"""Orders to stop, and to leave an epoch: how they reach simulated processes, and how long these may
take to obey.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.daemons.kit.events import StopAsked
from penstock.host import world
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.run_result import RunEnd
from penstock.protocol.wire.member import MemberLink
from tests.simulation.kernel import Process

OBEYS_S = 25.0
"""A process that was told to leave is killed after 30 s: none should need it."""
LEAVES_S = 5.0
"""A worker asks every 50 ms at least whether its epoch is over; its devices may be at work."""
_SLACK_S = 1e-6
CLOSES_S = 5.0
"""A link waits 2 s for the scheduler to take its last words; its thread, 1 s for a connection."""


class Obedience:
    """Who was told to leave, of a node's children."""

    def __init__(self) -> None:
        self._told_s: dict[Process, float] = {}

    def told(self, process: Process) -> None:
        """A stop is ordered. A schedulerd may save before it obeys, unless the run is over."""
        cluster = process.world.cluster
        cluster.history.told(process.name)
        if process.name != SCHEDULERD or RunEnd.read(cluster.run.path) is not None:
            self._told_s.setdefault(process, process.kernel.now)

    def killed(self, process: Process) -> None:
        """Its node has it killed: for what, if it does not stand still?"""
        told_s = self._told_s.pop(process, None)
        if told_s is None or process.hung or process.stopped:
            return
        late_s = process.kernel.now - max(told_s, process.continued_s)
        if late_s > OBEYS_S:
            history = process.world.cluster.history
            history.violation(f"{process.name} was told to stop {late_s:.0f} s ago, and lives")


def heeds_drains(listens: Callable[[Any], Callable[[Any], None]]) -> Callable[[Any], Any]:
    """A worker that has read a Drain leaves its epoch soon, whatever it waits for."""

    def listener(fence: Any) -> Callable[[Any], None]:
        real, process = listens(fence), _here()

        def look(epoch: int, heard_s: float) -> None:
            kept = process.hung or process.stopped or process.continued_s > heard_s
            if process.alive and not kept and process.drained < epoch:
                history = process.world.cluster.history
                history.violation(f"{process.name} was drained {LEAVES_S:g} s ago, and goes on")

        def listen(message: Any) -> None:
            real(message)
            if message.HasField("drain"):
                kernel, epoch = process.kernel, message.drain.epoch
                heard_s = kernel.now
                kernel.after(LEAVES_S * process.machine.slow, lambda: look(epoch, heard_s))

        return listen

    return listener


def notes_drains(drain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A worker has left its epoch."""

    def drained(session: Any, message: Any) -> None:
        drain(session, message)
        _here().drained = message.epoch

    return drained


def hear_stops(events: Any, grace: Any, parent_pid: int | None) -> None:
    """A stop signal for a schedulerd becomes an event, with the time that is left."""
    process = _here()
    cluster = process.world.cluster
    process.listen(lambda: events.put(StopAsked(within_s=cluster.left_s)))


_real_close = MemberLink.close


def close_link(link: MemberLink, timeout_s: float = 2.0) -> None:
    """As the real one, which must not take longer than it says, whatever the scheduler does."""
    process = _here()
    begun_s, closed = process.kernel.now, False

    def look() -> None:
        late_s = process.kernel.now - max(begun_s, process.continued_s)
        if late_s > CLOSES_S and not (closed or process.stopped or process.hung):
            history = process.world.cluster.history
            history.violation(f"{process.name} has closed its link for {late_s:.1f} s")

    process.at_death.append(look)
    if link._stream is not None:
        _watch_for_a_cut(link._stream, begun_s + timeout_s)
    _real_close(link, timeout_s)
    look()
    closed = True
    left = [thread.name for thread in (link._reader, link._beater) if thread.is_alive()]
    if left:
        process.world.cluster.history.violation(f"{process.name} has closed its link but {left}")


def _watch_for_a_cut(stream: Any, until_s: float) -> None:
    """A link closes: it waits until the scheduler has taken what was said, but not for ever."""
    real, process = stream.cut, _here()

    def cut() -> None:
        if process.kernel.now < until_s - _SLACK_S:
            process.world.cluster.history.violation(f"{process.name} cuts its last words off")
        real()

    stream.cut = cut


def _here() -> Process:
    process = world.here().process  # type: ignore[attr-defined]
    assert isinstance(process, Process)
    return process
