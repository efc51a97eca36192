"""The supervisor's loop: collect events (pidfds, the scheduler's messages, signals, time), feed the
machine, carry out its effects.

One thread does all of it; MemberLink's reading thread only announces messages through an eventfd.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.daemons.kit.events import StopAsked, Tick
from penstock.daemons.kit.loop import Loop
from penstock.daemons.kit.messages import COMMON_EVENTS, event_of
from penstock.daemons.kit.story import FlightRecorder
from penstock.daemons.node.children import Children
from penstock.daemons.node.effects import LinkSettings, NodeEffects, NodeMetrics
from penstock.daemons.node.machine.events import (
    EpochBegins,
    Event,
    Exited,
    FenceAsked,
    MemberMissing,
    Warmed,
    Watched,
    is_routine,
)
from penstock.daemons.node.machine.machine import NodeMachine, NodePhase
from penstock.daemons.node.service_manager import NodeReports, NodeView
from penstock.host.stopping import Demand, Grace, StopRequests
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.process import monotonic_s
from penstock.protocol.run.run_result import EndWatch

LONGEST_SLEEP_S = 1.0
RECEIVE_TIMEOUT_S = 1.0
"""A message is in the link's queue right after it was announced."""

_log = logging.getLogger(__name__)

_EVENTS: dict[str, Callable[[Any], Event]] = {
    **COMMON_EVENTS,
    "begin": lambda m: EpochBegins(epoch=m.epoch, version=m.record.version),
    "fence": lambda m: FenceAsked(member=m.member, pid=m.pid),
    "missing": lambda m: MemberMissing(member=m.member),
}
"""Builds events of the scheduler's messages that concern a node; other messages are for members
with work.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """Sender and limits of a stop. ``parent_pid``: the process with permission to stop the node
    (None: any). The rest: how long a stop may take.
    """

    parent_pid: int | None
    grace: Grace


class Supervisor:
    """Runs one node's children until the run ends; :meth:`run` returns the exit code."""

    def __init__(
        self,
        machine: NodeMachine,
        children: Children,
        link: LinkSettings,
        metrics: NodeMetrics,
        stops: StopSettings,
        ending: EndWatch,
        reports: NodeReports,
    ) -> None:
        self._machine = machine
        self._children = children
        self._metrics = metrics
        self._grace = stops.grace
        self._ending = ending
        self._reports = reports
        self._requests = StopRequests(self._on_demand, stops.parent_pid)
        # Each counts what waits: messages that are about to be in the link's queue, stop signals.
        self._announced = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stops = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listening = False
        self._demands: queue.SimpleQueue[Demand] = queue.SimpleQueue()
        self._effects = NodeEffects(
            children=children,
            run_dir=ending.run_dir,
            hosts_scheduler=SCHEDULERD in machine.children,
            link=link,
            epoch=lambda: machine.epoch,
            announce=lambda: os.eventfd_write(self._announced, 1),
            metrics=metrics,
        )
        self._loop = Loop(machine, self._effects, story=FlightRecorder(routine=is_routine))

    def run(self) -> int:
        """Supervises until the machine decides to exit. Installs the handlers of stop signals."""
        self._listening = True  # a signal may be waiting since before this process began
        self._requests.install()
        try:
            self._effects.open_link()
            self._loop.feed(Tick())
            while self._loop.exit is None:
                self._turn()
            return self._loop.exit.code
        finally:
            self._listening = False
            self._children.kill_all()
            self._effects.close_link()
            self._reports.over()
            os.close(self._announced)
            os.close(self._stops)

    def _turn(self) -> None:
        poll = select.poll()
        pidfds, warming = self._children.pidfds, self._children.warming
        for descriptor in (self._announced, self._stops, *pidfds, *warming):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(self._sleep_s() * 1000)}
        # Before what happened: children that ended with the run are not to be started again.
        self._loop.feed(self._watch())
        for descriptor in ready & warming.keys():
            if self._children.warmed(warming[descriptor]):
                self._loop.feed(Warmed(name=warming[descriptor]))
        for pidfd in ready & pidfds.keys():
            name = pidfds[pidfd]
            pid, code = self._children.reap(name)
            self._metrics.exited(name, code)
            _log.info("%s ended", name, extra={"child_pid": pid, "exit_code": code})
            self._loop.feed(Exited(name=name, pid=pid, code=code))
        if self._stops in ready:
            for _ in range(os.eventfd_read(self._stops)):
                again = self._demands.get() is Demand.NOW
                within_s = self._grace.left_s(time.time())
                self._loop.feed(StopAsked(again=again, within_s=within_s))
        if self._announced in ready:
            for _ in range(os.eventfd_read(self._announced)):
                self._receive()
        self._loop.feed(Tick())
        # Last: the watchdog is fed only after a complete turn.
        self._reports.turned(self._view(), monotonic_s())

    def _view(self) -> NodeView:
        machine, link = self._machine, self._effects.link
        running = all(child.pid is not None for child in machine.children.values())
        return NodeView(
            up=running and link is not None and link.connected,
            ending=machine.stop_asked or machine.phase is not NodePhase.RUNNING,
            well=machine.run_ended,
        )

    def _watch(self) -> Watched:
        """Returns what the node observes. The note about the run's end counts only without a
        connection: connected nodes receive a message.
        """
        link = self._effects.link
        connected = link is not None and link.connected
        return Watched(
            stopped=self._children.stopped,
            heard_s=None if link is None else link.heard_s,
            ended=None if connected else self._ending.look(),
        )

    def _receive(self) -> None:
        """Takes one announced message; there is none if the link was closed meanwhile."""
        link = self._effects.link
        message = link.receive(RECEIVE_TIMEOUT_S) if link is not None else None
        event = event_of(message, _EVENTS) if message is not None else None
        if event is not None:
            self._loop.feed(event)

    def _sleep_s(self) -> float:
        deadline_s = self._machine.next_deadline_s()
        if deadline_s is None:
            return LONGEST_SLEEP_S
        return min(max(0.0, deadline_s - monotonic_s()), LONGEST_SLEEP_S)

    def _on_demand(self, demand: Demand) -> None:
        """Receives a stop request, in a signal handler or on the thread that waits for signals."""
        if self._listening:
            self._demands.put(demand)
            os.eventfd_write(self._stops, 1)
