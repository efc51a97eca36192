"""The supervisor's loop: collect events (pidfds, the scheduler's messages, signals, time), feed the
machine, carry out its effects.

One thread does all of it; MemberLink's reading thread only announces messages through an eventfd.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.daemons.node.effects import Children
from penstock.daemons.node.machine.events import (
    AskSchedulerToStop,
    BeginAsked,
    CloseLink,
    DrainAsked,
    Effect,
    Event,
    Exit,
    Exited,
    FenceAsked,
    Kill,
    OpenLink,
    RefusedByScheduler,
    Say,
    SendDrained,
    SendFailed,
    SendFenced,
    SendReady,
    ShutdownAsked,
    Start,
    Started,
    StopAsked,
    StopUnheard,
    Terminate,
    Tick,
    Watched,
)
from penstock.daemons.node.machine.state import NodeState
from penstock.daemons.node.metrics import NodeMetrics
from penstock.protocol.errors import PenstockError, ending_code
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.run.ended import EndWatch
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.process import monotonic_s
from penstock.protocol.run.stopping import Demand, Grace, StopRequests
from penstock.protocol.wire.control import ControlClient
from penstock.protocol.wire.member import MemberLink

LONGEST_SLEEP_S = 1.0
RECEIVE_TIMEOUT_S = 1.0
"""A message is in the link's queue right after it was announced."""

_log = logging.getLogger(__name__)

_MESSAGES: dict[str, Callable[[Any], Event]] = {
    "fence": lambda m: FenceAsked(member=m.member, pid=m.pid),
    "drain": lambda m: DrainAsked(epoch=m.epoch),
    "begin": lambda m: BeginAsked(epoch=m.epoch),
    "shutdown": lambda m: ShutdownAsked(reason=m.reason, code=ending_code(m.exit_code)),
    "refused": lambda m: RefusedByScheduler(reason=m.reason),
}
"""The scheduler's messages that concern a node; the others are for those who have work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What a node needs to join the run."""

    address: str
    run_id: str
    member: str
    metrics_port: int
    heartbeat_interval_s: float
    silence_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """Whose stop signals a node obeys (None: anybody's), and how long a stop may take."""

    parent_pid: int | None
    grace: Grace


class Supervisor:
    """Runs one node's children until the run ends; :meth:`run` returns the exit code."""

    def __init__(
        self,
        state: NodeState,
        children: Children,
        link: LinkSettings,
        metrics: NodeMetrics,
        stops: StopSettings,
        ending: EndWatch,
    ) -> None:
        self._state = state
        self._children = children
        self._settings = link
        self._metrics = metrics
        self._grace = stops.grace
        self._ending = ending
        self._requests = StopRequests(self._on_demand, stops.parent_pid)
        self._hosts_scheduler = SCHEDULERD in state.children
        self._epoch = 0
        self._started: set[str] = set()
        # Each counts what waits: messages that are about to be in the link's queue, stop signals.
        self._announced = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stops = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listening = False
        self._demands: queue.SimpleQueue[Demand] = queue.SimpleQueue()
        self._link: MemberLink | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Supervise until the machine says Exit. Listens for stop signals."""
        self._listening = True  # a signal may be waiting since before this process began
        self._requests.install()
        try:
            self._open_link()
            self._feed(Tick())
            while self._code is None:
                self._turn()
            return self._code
        finally:
            self._listening = False
            self._children.kill_all()
            self._close_link()
            os.close(self._announced)
            os.close(self._stops)

    def _turn(self) -> None:
        poll = select.poll()
        pidfds = self._children.pidfds
        for descriptor in (self._announced, self._stops, *pidfds):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(self._sleep_s() * 1000)}
        # Before what happened: children that ended with the run are not to be started again.
        self._feed(self._watch())
        for pidfd in ready & pidfds.keys():
            name = pidfds[pidfd]
            pid, code = self._children.reap(name)
            self._metrics.exited(name)
            _log.info("%s ended", name, extra={"child_pid": pid, "exit_code": code})
            self._feed(Exited(name=name, pid=pid, code=code))
        if self._stops in ready:
            for _ in range(os.eventfd_read(self._stops)):
                again = self._demands.get() is Demand.NOW
                within_s = self._grace.left_s(time.time())
                self._feed(StopAsked(again=again, within_s=within_s))
        if self._announced in ready:
            for _ in range(os.eventfd_read(self._announced)):
                self._receive()
        self._feed(Tick())

    def _watch(self) -> Watched:
        """The note about the run's end is for those who are not told: who is connected will be."""
        connected = self._link is not None and self._link.connected
        return Watched(
            stopped=self._children.stopped,
            heard_s=None if self._link is None else self._link.heard_s,
            ended=None if connected else self._ending.look(),
        )

    def _receive(self) -> None:
        """Take one announced message; there is none when the link was closed meanwhile."""
        message = self._link.receive(RECEIVE_TIMEOUT_S) if self._link is not None else None
        if message is None:
            return
        kind = message.WhichOneof("body")
        if kind in _MESSAGES:
            self._feed(_MESSAGES[kind](getattr(message, kind)))

    def _sleep_s(self) -> float:
        deadline_s = self._state.next_deadline_s()
        if deadline_s is None:
            return LONGEST_SLEEP_S
        return min(max(0.0, deadline_s - monotonic_s()), LONGEST_SLEEP_S)

    def _on_demand(self, demand: Demand) -> None:
        """Called in a signal handler, or on the thread that waits for signals."""
        if self._listening:
            self._demands.put(demand)
            os.eventfd_write(self._stops, 1)

    def _feed(self, event: Event) -> None:
        for effect in self._state.handle(event, monotonic_s()):
            _EFFECTS[type(effect)](self, effect)

    # ---- effects ----

    def _start(self, effect: Start) -> None:
        try:
            pid = self._children.start(effect.name)
        except OSError as error:
            self._say(f"cannot start {effect.name}: {error}")
            self._feed(Exited(name=effect.name, pid=0, code=1))
            return
        _log.info("started %s", effect.name, extra={"child_pid": pid})
        self._metrics.started(effect.name, again=effect.name in self._started)
        self._started.add(effect.name)
        self._feed(Started(name=effect.name, pid=pid))

    def _terminate(self, effect: Terminate) -> None:
        self._children.signal(effect.name, signal.SIGTERM)

    def _kill(self, effect: Kill) -> None:
        self._children.signal(effect.name, signal.SIGKILL)

    def _send_fenced(self, effect: SendFenced) -> None:
        _log.info("fenced %s", effect.member, extra={"child_pid": effect.pid})
        self._metrics.fenced(effect.member)
        fenced = pb.Fenced(member=effect.member, pid=effect.pid)
        self._send(pb.MemberMessage(fenced=fenced))

    def _send_drained(self, effect: SendDrained) -> None:
        self._send(pb.MemberMessage(drained=pb.Drained(epoch=effect.epoch)))

    def _send_ready(self, effect: SendReady) -> None:
        self._epoch = effect.epoch
        self._send(pb.MemberMessage(ready=pb.Ready(epoch=effect.epoch)))

    def _send_failed(self, effect: SendFailed) -> None:
        failed = pb.Failed(error=effect.error, exit_code=effect.code, epoch=self._epoch)
        self._send(pb.MemberMessage(failed=failed))

    def _ask_to_stop(self, effect: AskSchedulerToStop) -> None:
        if self._hosts_scheduler:
            self._children.signal(SCHEDULERD, signal.SIGTERM)
            return
        try:
            with ControlClient(self._settings.address) as client:
                client.stop(effect.within_s)
        except PenstockError as error:
            self._say(f"the scheduler cannot be asked to stop the run: {error}")
            self._feed(StopUnheard())

    def _on_close_link(self, effect: CloseLink) -> None:
        self._close_link()

    def _on_open_link(self, effect: OpenLink) -> None:
        self._open_link()

    def _on_say(self, effect: Say) -> None:
        self._say(effect.message)

    def _exit(self, effect: Exit) -> None:
        _log.info("ending", extra={"exit_code": effect.code})
        self._code = effect.code

    # ---- helpers ----

    def _say(self, message: str) -> None:
        _log.warning("%s", message)
        sys.stderr.write(f"{self._settings.member}: {message}\n")
        sys.stderr.flush()

    def _send(self, message: pb.MemberMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    def _open_link(self) -> None:
        settings = self._settings
        self._link = MemberLink(
            address=settings.address,
            hello=lambda: pb.Hello(
                run_id=settings.run_id,
                member=settings.member,
                pid=os.getpid(),
                epoch=self._epoch,
                metrics_port=settings.metrics_port,
            ),
            heartbeat_interval_s=settings.heartbeat_interval_s,
            silence_timeout_s=settings.silence_timeout_s,
            listener=lambda message: os.eventfd_write(self._announced, 1),
        )
        self._link.start()

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


_EFFECTS: dict[type[Effect], Callable[[Supervisor, Any], None]] = {
    Start: Supervisor._start,
    Terminate: Supervisor._terminate,
    Kill: Supervisor._kill,
    SendFenced: Supervisor._send_fenced,
    SendDrained: Supervisor._send_drained,
    SendReady: Supervisor._send_ready,
    SendFailed: Supervisor._send_failed,
    AskSchedulerToStop: Supervisor._ask_to_stop,
    CloseLink: Supervisor._on_close_link,
    OpenLink: Supervisor._on_open_link,
    Say: Supervisor._on_say,
    Exit: Supervisor._exit,
}
