"""Carries out the decisions of a node's supervisor: children, the link to the scheduler, logs and
metrics.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.daemons.kit.events import Exit, LogLine, SendDrained, SendFailed, SendReady
from penstock.daemons.kit.messages import answer
from penstock.daemons.node.children import Children
from penstock.daemons.node.machine.events import (
    AskSchedulerToStop,
    CloseLink,
    Effect,
    Event,
    Exited,
    Kill,
    LeaveWord,
    OpenLink,
    SendFenced,
    Start,
    Started,
    StopUnheard,
    Terminate,
)
from penstock.host import world
from penstock.host.errors import ExitCode, PenstockError
from penstock.host.process_identity import boot_id
from penstock.host.stopping import STOP_ORDER
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.metrics.node import NODE, RestartCause
from penstock.protocol.metrics.registry import MetricRegistry
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.run_result import RunEnd
from penstock.protocol.security.credentials import Credentials
from penstock.protocol.wire.control import ControlClient
from penstock.protocol.wire.member import MemberLink

_log = logging.getLogger(__name__)

_RESTARTS, _FENCES = (metric.name for metric in NODE)


class NodeMetrics:
    """Prometheus metrics of one supervisor of ``members``, in their own registry. All begin at 0:
    the increase of a counter that begins at 1 is not seen.
    """

    def __init__(self, members: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self._page = MetricRegistry(NODE, self.registry)
        for member in members:
            self._page.add(_FENCES, 0, member)
            for cause in RestartCause:
                self._page.add(_RESTARTS, 0, member, cause)
        self._causes: dict[str, RestartCause] = {}
        """Causes of the last death of each restarted child; already HUNG while the child is being
        killed.
        """

    def started(self, member: str) -> None:
        """Counts a start of a child, perhaps a restart."""
        cause = self._causes.pop(member, None)
        if cause is not None:
            self._page.add(_RESTARTS, 1, member, cause)

    def killed(self, member: str) -> None:
        """Notes that the node has killed a child."""
        self._causes[member] = RestartCause.HUNG

    def exited(self, member: str, code: int) -> None:
        """Notes that a child is dead and reaped. ``code``: its exit code, or minus the signal that
        killed it.
        """
        cause = RestartCause.KILLED if code < 0 else RestartCause.EXITED
        self._causes.setdefault(member, cause)

    def fenced(self, member: str) -> None:
        """Counts an answered fence."""
        self._page.add(_FENCES, 1, member)
        if self._causes.get(member) is RestartCause.HUNG:
            self._causes[member] = RestartCause.FENCED


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Settings for joining the run."""

    address: str
    access: Credentials
    run_id: str
    member: str
    heartbeat_interval_s: float
    silence_timeout_s: float


class NodeEffects:
    """Carries out the machine's decisions, on the main thread.

    ``epoch`` returns the membership epoch of the node, for the Hello of a new stream. ``announce``
    is called on the link's thread after the link has received a message.
    """

    def __init__(
        self,
        *,
        children: Children,
        run_dir: Path,
        hosts_scheduler: bool,
        link: LinkSettings,
        epoch: Callable[[], int],
        announce: Callable[[], None],
        metrics: NodeMetrics,
    ) -> None:
        self.exit: Exit | None = None
        self.link: MemberLink | None = None
        self._children = children
        self._run_dir = run_dir
        self._hosts_scheduler = hosts_scheduler
        self._settings = link
        self._epoch = epoch
        self._announce = announce
        self._metrics = metrics

    def carry_out(self, effects: Sequence[Effect]) -> Sequence[Event]:
        """Carries out effects in order; returns the resulting events of children and of a stop."""
        events = [_HANDLERS[type(effect)](self, effect) for effect in effects]
        return [event for event in events if event is not None]

    def open_link(self) -> None:
        """Connects to the scheduler; the link announces received messages."""
        settings = self._settings
        self.link = MemberLink(
            address=settings.address,
            access=settings.access,
            hello=lambda: pb.Hello(
                run_id=settings.run_id,
                member=settings.member,
                pid=world.pid(),
                epoch=self._epoch(),
                machine=str(boot_id()),
            ),
            heartbeat_interval_s=settings.heartbeat_interval_s,
            silence_timeout_s=settings.silence_timeout_s,
            listener=lambda message: self._announce(),
        )
        self.link.start()

    def close_link(self) -> None:
        """Ends the stream to the scheduler, if it is open."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def _start(self, effect: Start) -> Event:
        try:
            pid = self._children.start(effect.name)
        except OSError as error:
            self._say(f"cannot start {effect.name}: {error}")
            self._metrics.exited(effect.name, 1)
            return Exited(name=effect.name, pid=0, code=1)
        _log.info("started %s", effect.name, extra={"child_pid": pid})
        self._metrics.started(effect.name)
        return Started(name=effect.name, pid=pid)

    def _terminate(self, effect: Terminate) -> None:
        self._children.signal(effect.name, STOP_ORDER)

    def _kill(self, effect: Kill) -> None:
        self._metrics.killed(effect.name)
        self._children.signal(effect.name, signal.SIGKILL)

    def _send_fenced(self, effect: SendFenced) -> None:
        _log.info("fenced %s", effect.member, extra={"child_pid": effect.pid})
        self._metrics.fenced(effect.member)
        fenced = pb.Fenced(member=effect.member, pid=effect.pid, death=effect.death)
        self._send(pb.MemberMessage(fenced=fenced))

    def _answer(self, effect: SendDrained | SendReady | SendFailed) -> None:
        self._send(answer(effect))

    def _ask_to_stop(self, effect: AskSchedulerToStop) -> Event | None:
        if self._hosts_scheduler:
            self._children.signal(SCHEDULERD, STOP_ORDER)
            return None
        try:
            with ControlClient(self._settings.address, self._settings.access) as client:
                client.stop(effect.within_s)
        except PenstockError as error:
            self._say(f"the scheduler cannot be asked to stop the run: {error}")
            return StopUnheard()
        return None

    def _leave_word(self, effect: LeaveWord) -> None:
        note = RunEnd(
            reason=effect.error,
            code=ExitCode(effect.code),
            keep_memory=True,
            failed=True,
            written_s=world.wall(),
        )
        try:
            note.write(self._run_dir)
        except PenstockError as error:
            self._say(f"cannot write the note of the run's end: {error}")

    def _close_link(self, effect: CloseLink) -> None:
        self.close_link()

    def _open_link(self, effect: OpenLink) -> None:
        self.open_link()

    def _on_say(self, effect: LogLine) -> None:
        self._say(effect.text)

    def _exit(self, effect: Exit) -> None:
        _log.info("ending", extra={"exit_code": effect.code})
        self.exit = effect

    def _say(self, message: str) -> None:
        _log.warning("%s", message)
        sys.stderr.write(f"{self._settings.member}: {message}\n")
        sys.stderr.flush()

    def _send(self, message: pb.MemberMessage) -> None:
        if self.link is not None:
            self.link.send(message)


_HANDLERS: dict[type, Callable[[NodeEffects, Any], Event | None]] = {
    Start: NodeEffects._start,
    Terminate: NodeEffects._terminate,
    Kill: NodeEffects._kill,
    SendFenced: NodeEffects._send_fenced,
    SendDrained: NodeEffects._answer,
    SendReady: NodeEffects._answer,
    SendFailed: NodeEffects._answer,
    AskSchedulerToStop: NodeEffects._ask_to_stop,
    LeaveWord: NodeEffects._leave_word,
    CloseLink: NodeEffects._close_link,
    OpenLink: NodeEffects._open_link,
    LogLine: NodeEffects._on_say,
    Exit: NodeEffects._exit,
}
