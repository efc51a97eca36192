"""Decides which children a node's supervisor starts, kills or abandons, and when the node ends.

Pure: events and the time come in, effects go out (both in
:mod:`penstock.daemons.node.machine.events`). Processes, signals, sockets and files are in
:mod:`penstock.daemons.node.effects`; the loop is in :mod:`penstock.daemons.node.service`.

Life of a node (``NodePhase``)::

    RUNNING -- Shutdown, or schedulerd's exit code is final --> ENDING -- children gone --> ENDED
       |                                                         |
       | a child's code is final, or restarts are used up        | deadline
       +--> FAILING: the scheduler is told -- deadline --------> TERMINATING --> KILLING --> ENDED

A requested stop keeps the phase: dead children are still replaced, because the scheduler needs all
of them to save. Only a repeated request, or the deadline of the stop, kills all children.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from penstock.daemons.kit.events import (
    DrainAsked,
    Exit,
    LogLine,
    RefusedByScheduler,
    SendDrained,
    SendFailed,
    SendReady,
    ShutdownAsked,
    StopAsked,
    Tick,
)
from penstock.daemons.node.machine.budget import RestartBudget
from penstock.daemons.node.machine.events import (
    AskSchedulerToStop,
    CloseLink,
    Effect,
    EpochBegins,
    Event,
    Exited,
    FenceAsked,
    Kill,
    LeaveWord,
    MemberMissing,
    OpenLink,
    SendFenced,
    Start,
    Started,
    StopUnheard,
    Terminate,
    Warmed,
    Watched,
)
from penstock.host.errors import FAILURES, ExitCode
from penstock.host.stopping import StopDeadline, StoppedDetector
from penstock.protocol.run.names import SCHEDULERD
from penstock.protocol.run.run_result import RunEnd

FINAL_SCHEDULER_CODES = frozenset(
    (ExitCode.DONE, ExitCode.STOPPED, *FAILURES),
)
"""schedulerd ends with these on purpose, after it has shut the members down."""


class NodePhase(StrEnum):
    """Phases of a node's life; see the module's picture."""

    RUNNING = "running"
    FAILING = "failing"
    ENDING = "ending"
    TERMINATING = "terminating"
    KILLING = "killing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Deadlines and counts of a node. A child that lived shorter than ``quick_death_s`` is
    restarted after a delay that grows with each such death in a row without a commit.
    ``deaf_grace_s``: time that a child may outlive the scheduler: unconnected children never learn
    of the run's end. ``told_grace_s``: the same if the scheduler is on another node, which stays
    for at most 15 s. ``silence_s``: time that a child may be stopped by a signal; the scheduler
    watches only members that have joined. ``hang_s``: time that the node's schedulerd may be silent
    without being stopped, or another child live without joining. ``warm_up_s``: time that a child's
    first start waits for its preloader, a little more than its own imports would take.
    """

    max_restarts: int
    first_backoff_s: float = 0.1
    last_backoff_s: float = 2.0
    quick_death_s: float = 5.0
    clean_exit_grace_s: float = 1.0
    stop_timeout_s: float = 1800.0
    ask_again_s: float = 2.0
    fail_timeout_s: float = 15.0
    end_timeout_s: float = 60.0
    deaf_grace_s: float = 5.0
    told_grace_s: float = 20.0
    terminate_timeout_s: float = 30.0
    silence_s: float = 10.0
    hang_s: float = 600.0
    warm_up_s: float = 30.0
    lease_s: float | None = None
    """Seconds that members may run without a message of the scheduler. Default: no limit."""


@dataclass(slots=True, kw_only=True)
class Child:
    """One supervised process. ``pid``: None while it is dead. ``start_at_s``: the next start.

    ``is_helper``: it is no member of the run, which continues without it. ``died``: pid and
    description of its last unordered death. ``preloader``: name of the preloader that forks it.
    ``warm``: of a preloader, whether it is ready; None during its first imports.
    """

    name: str
    restarts: RestartBudget
    pid: int | None = None
    started_s: float = 0.0
    start_at_s: float | None = 0.0
    starting: bool = False
    quick_deaths: int = 0
    fence_pid: int | None = None
    is_helper: bool = False
    died: tuple[int, str] | None = None
    preloader: str = ""
    warm: bool | None = None


@dataclass(slots=True, kw_only=True)
class NodeMachine:
    """The supervisor's machine: feed :meth:`handle` with events and carry out what it returns."""

    limits: NodeLimits
    children: dict[str, Child]
    stopped_detector: StoppedDetector
    epoch: int = 0
    """The epoch of the last Begin."""
    version: int = 0
    """The step that was committed at the last Begin."""
    phase: NodePhase = NodePhase.RUNNING
    code: int = 0
    told_code: int = 0
    """The run's exit code, from the scheduler's message about the end."""
    scheduler_code: int | None = None
    failure: str = ""
    """The reason for the node's failure; empty while there is none."""
    stop_asked: bool = False
    deadline_s: float | None = None
    ask_again_at_s: float | None = None
    give_up_s: float | None = None
    """When a stop that may not take for ever has taken too long."""
    run_ended: bool = False
    """The run is over, however long children take to end."""
    noted: bool = False
    """The scheduler has left word that the run is over."""
    lease_out: bool = False
    """True after a lease without any message of a scheduler; members stay dead until one comes."""
    forgiven_s: float = float("-inf")
    """Silence of schedulerd before that proves nothing."""

    @classmethod
    def create(
        cls,
        names: tuple[str, ...],
        limits: NodeLimits,
        helpers: frozenset[str] = frozenset(),
        preloaders: Mapping[str, str] = MappingProxyType({}),
    ) -> NodeMachine:
        """Creates a machine with all children due, in the order of ``names``. ``preloaders``: names
        of the preloaders, by forked child.
        """
        return cls(
            limits=limits,
            children={
                name: Child(
                    name=name,
                    restarts=RestartBudget(limit=limits.max_restarts),
                    is_helper=name in helpers,
                    preloader=preloaders.get(name, ""),
                )
                for name in names
            },
            stopped_detector=StoppedDetector(limits.silence_s),
        )

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Returns what to do about ``event`` at ``now_s`` (any monotonic clock)."""
        effects = _HANDLERS[type(event)](self, event, now_s)
        if (
            self.phase is not NodePhase.RUNNING
            and self.phase is not NodePhase.ENDED
            and not self._alive()
            and not self._untold
        ):
            self.phase = NodePhase.ENDED
            effects.append(Exit(code=self.code or self.told_code))
        return effects

    def next_deadline_s(self) -> float | None:
        """Returns when :class:`Watched` and :class:`Tick` are due at the latest; None: only when
        something happens.
        """
        times = [self.deadline_s, self.ask_again_at_s, self.give_up_s, self.stopped_detector.next_s]
        times += [self._due_s(child) for child in self.children.values()]
        return min((t for t in times if t is not None), default=None)

    def validate(self) -> None:
        """Checks that every child is exactly one of running, being started, due, or abandoned.

        Raises:
            ValueError: naming the child.
        """
        for child in self.children.values():
            states = (child.pid is not None, child.starting, child.start_at_s is not None)
            if sum(states) > 1:
                raise ValueError(f"{child.name}: (running, starting, due) is {states}")
            if child.fence_pid is not None and child.fence_pid != child.pid:
                raise ValueError(f"{child.name}: fencing {child.fence_pid}, running {child.pid}")

    # ---- handlers ----

    def _on_started(self, event: Started, now_s: float) -> list[Effect]:
        child = self.children[event.name]
        child.pid, child.started_s, child.starting = event.pid, now_s, False
        if self.phase is NodePhase.KILLING:
            return [Kill(name=event.name)]
        if child.is_helper and self.phase is NodePhase.ENDING:
            return [Terminate(name=event.name)]
        if event.name == SCHEDULERD and self.stop_asked:
            return [AskSchedulerToStop()]  # its predecessor died before it could stop the run
        return []

    def _on_warmed(self, event: Warmed, now_s: float) -> list[Effect]:
        self.children[event.name].warm = True
        return []

    def _on_exited(self, event: Exited, now_s: float) -> list[Effect]:
        child = self.children[event.name]
        lived_s = now_s - child.started_s if child.pid is not None else 0.0
        child.quick_deaths = 0 if lived_s >= self.limits.quick_death_s else child.quick_deaths + 1
        fenced, child.fence_pid = child.fence_pid, None
        if child.pid is not None and fenced is None:
            child.died = child.pid, describe_exit(event.code)
        child.pid, child.starting, child.warm = None, False, False
        effects: list[Effect] = []
        if fenced is not None:
            effects.append(SendFenced(member=event.name, pid=fenced))
        if self.stop_asked and self.deadline_s is not None and self.phase is NodePhase.RUNNING:
            self.deadline_s = now_s + self.limits.stop_timeout_s  # something moves
        if event.name == SCHEDULERD:
            return effects + self._on_scheduler_exit(event.code, now_s)
        if self.phase is not NodePhase.RUNNING:
            return effects
        if event.code in (ExitCode.BAD_CONFIG, ExitCode.NO_MEMORY) and not child.is_helper:
            error = f"{event.name} ended with exit code {event.code}"
            return effects + self._fail(error, event.code, now_s)
        if self.lease_out and not child.is_helper:
            return effects
        return effects + self._restart(child, event.code, now_s, at_once=fenced is not None)

    def _on_scheduler_exit(self, code: int, now_s: float) -> list[Effect]:
        if code in FINAL_SCHEDULER_CODES:
            self.scheduler_code = code
            self.code = self.code or code
            effects = (
                self._end(now_s) if self.phase in (NodePhase.RUNNING, NodePhase.FAILING) else []
            )
            if self.phase is NodePhase.ENDING:
                self.deadline_s = now_s + self.limits.deaf_grace_s
            return effects
        if self.phase is NodePhase.RUNNING:
            return self._restart(self.children[SCHEDULERD], code, now_s, at_once=False)
        if self.failure and not self.run_ended:
            return [LeaveWord(error=self.failure, code=self.code)]  # it did not, as far as we know
        if self.phase is NodePhase.ENDING:
            # schedulerd was killed during the shutdown, so some members may lack its message.
            # Members that have it end now; if others are left, the run is started again so that it
            # can end properly.
            self.deadline_s = now_s + self.limits.quick_death_s
        return []

    def _on_fence(self, event: FenceAsked, now_s: float) -> list[Effect]:
        child = self.children.get(event.member)
        if child is None or child.pid is None or child.pid != event.pid:
            pid, death = (child.died if child is not None else None) or (0, "")
            death = death if pid == event.pid else ""
            return [SendFenced(member=event.member, pid=event.pid, death=death)]  # replaced already
        child.fence_pid = event.pid
        return [Kill(name=event.member)]

    def _on_missing(self, event: MemberMissing, now_s: float) -> list[Effect]:
        child = self.children.get(event.member)
        if child is None or child.pid is None or self.phase is not NodePhase.RUNNING:
            return []
        lived_s = now_s - child.started_s
        if lived_s < self.limits.hang_s:
            return []
        return self._replace(event.member, f"has not joined the run in {lived_s:.0f} s", now_s)

    def _on_drain(self, event: DrainAsked, now_s: float) -> list[Effect]:
        return [SendDrained(epoch=event.epoch)]

    def _on_begin(self, event: EpochBegins, now_s: float) -> list[Effect]:
        if event.version > self.version:
            for child in self.children.values():
                child.restarts.forgive()
                child.quick_deaths = 0
        self.epoch, self.version = event.epoch, event.version
        effects: list[Effect] = [SendReady(epoch=event.epoch)]
        if self.stop_asked and SCHEDULERD not in self.children:
            # A remote scheduler may have died with the request; the node would know of its own.
            effects.append(AskSchedulerToStop(within_s=self._left_s(now_s)))
        return effects

    def _on_shutdown(self, event: ShutdownAsked, now_s: float) -> list[Effect]:
        if self.phase in (NodePhase.RUNNING, NodePhase.FAILING):
            self.told_code = event.code
            return [LogLine(text=f"the run ends: {event.reason}"), *self._end(now_s)]
        return []

    def _on_refused(self, event: RefusedByScheduler, now_s: float) -> list[Effect]:
        if self.phase is not NodePhase.RUNNING:
            return []
        error = f"the scheduler refuses this node: {event.reason}"
        return self._fail(error, ExitCode.LOST_MEMBERS, now_s)

    def _on_stop(self, event: StopAsked, now_s: float) -> list[Effect]:
        if self.phase is NodePhase.ENDED:
            return []
        if event.again:
            self.code = int(ExitCode.INTERRUPTED)
            return self._kill_all("asked to stop once more")
        if event.within_s is not None:
            self.give_up_s = StopDeadline.NODE.give_up_s(now_s, event.within_s)
        self.stop_asked = True
        if self.phase is not NodePhase.RUNNING:
            return []
        self.deadline_s = now_s + self.limits.stop_timeout_s
        message = "stopping: the step under way is finished and the state saved (again: kill)"
        return [LogLine(text=message), AskSchedulerToStop(within_s=event.within_s)]

    def _on_stop_unheard(self, event: StopUnheard, now_s: float) -> list[Effect]:
        if self.phase is NodePhase.RUNNING:
            self.ask_again_at_s = now_s + self.limits.ask_again_s
        return []

    def _on_watched(self, event: Watched, now_s: float) -> list[Effect]:
        still = self.stopped_detector.look(event.stopped, now_s)
        self._forgive(self.stopped_detector.jump_s, now_s)
        effects: list[Effect] = []
        for name, seconds in still.items():
            effects += self._replace(name, f"is stopped for {seconds:.0f} s", now_s)
        scheduler = self.children.get(SCHEDULERD)
        if scheduler is not None and scheduler.pid is not None and event.heard_s is not None:
            quiet_s = now_s - max(event.heard_s, scheduler.started_s, self.forgiven_s)
            if quiet_s > self.limits.hang_s and self.phase is NodePhase.RUNNING:
                effects += self._replace(SCHEDULERD, f"says nothing for {quiet_s:.0f} s", now_s)
        effects += self._heed_lease(event.heard_s, now_s)
        if self._untold:
            effects.append(self._failed())
        self.noted = event.ended is not None
        if event.ended is not None and self.phase in (NodePhase.RUNNING, NodePhase.FAILING):
            effects += self._on_run_ended(event.ended, now_s)
        return effects

    def _heed_lease(self, heard_s: float | None, now_s: float) -> list[Effect]:
        """Kills the members after the lease has expired: another machine may be this node then."""
        lease_s = self.limits.lease_s
        if lease_s is None or heard_s is None or self.phase is not NodePhase.RUNNING:
            return []
        members = [child for child in self.children.values() if not child.is_helper]
        silent_s, was_out = now_s - heard_s, self.lease_out
        self.lease_out = silent_s > lease_s
        if self.lease_out == was_out:
            return []
        if not self.lease_out:
            for child in members:
                if child.pid is None and not child.starting and child.start_at_s is None:
                    child.start_at_s = now_s
            return [LogLine(text="the scheduler answers again: members are started")]
        for child in members:
            child.start_at_s = None
        text = (
            f"no answer of a scheduler for {silent_s:.1f} s: this node's members are killed, since"
            " another machine may take its place now; their memory is kept"
        )
        return [LogLine(text=text), *(Kill(name=c.name) for c in members if c.pid is not None)]

    def _on_tick(self, event: Tick, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for child in self.children.values():
            due_s = self._due_s(child)
            if due_s is not None and due_s <= now_s:
                child.start_at_s, child.starting = None, True
                effects.append(Start(name=child.name))
        if self.ask_again_at_s is not None and self.ask_again_at_s <= now_s:
            self.ask_again_at_s = None
            effects.append(AskSchedulerToStop(within_s=self._left_s(now_s)))
        if self.give_up_s is not None and self.give_up_s <= now_s:
            self.give_up_s = None
            return effects + self._out_of_time()
        if self.deadline_s is not None and self.deadline_s <= now_s:
            self.deadline_s = None
            effects += self._on_deadline(now_s)
        return effects

    # ---- decisions ----

    def _left_s(self, now_s: float) -> float | None:
        """Returns how long a stop that was asked for may still take; None: as long as it likes."""
        return None if self.give_up_s is None else max(1.0, self.give_up_s - now_s)

    def _due_s(self, child: Child) -> float | None:
        """Returns when a child is to be started; None: not before something happens.

        The first start waits for the preloader, later ones only use it if it is ready.
        """
        preloader = self.children.get(child.preloader)
        if child.start_at_s is None or preloader is None or preloader.warm is not None:
            return child.start_at_s
        return None if preloader.pid is None else preloader.started_s + self.limits.warm_up_s

    def _forgive(self, jump_s: float, now_s: float) -> None:
        """Restarts all deadlines after the node itself was stopped."""
        if not jump_s:
            return
        self.forgiven_s = now_s
        if self.deadline_s is not None:
            self.deadline_s += jump_s
        for child in self.children.values():
            child.started_s += jump_s

    def _replace(self, name: str, why: str, now_s: float) -> list[Effect]:
        """Kills a stopped or hung child; after its death it is started again, if needed."""
        self.forgiven_s = now_s
        return [LogLine(text=f"{name} {why}: killing it"), Kill(name=name)]

    def _on_run_ended(self, end: RunEnd, now_s: float) -> list[Effect]:
        """Ends the node: the scheduler left its end note, and sends the children no message."""
        self.told_code = int(end.code)
        effects = self._end(now_s)
        self.deadline_s = now_s + self.limits.deaf_grace_s
        return [LogLine(text=f"the run has ended: {end.reason}"), *effects]

    def _on_deadline(self, now_s: float) -> list[Effect]:
        left = ", ".join(self._running())
        if self.phase is NodePhase.TERMINATING:
            self.phase = NodePhase.KILLING
            if not self.run_ended:
                self.code = self.code or int(ExitCode.LOST_MEMBERS)
            told_s = self.limits.terminate_timeout_s
            message = f"told to stop {told_s:g} s ago and still running: {left}"
            return [LogLine(text=message), *(Kill(name=name) for name in self._running())]
        scheduler = self.children.get(SCHEDULERD)
        scheduler_gone = scheduler is not None and scheduler.pid is None
        cut_short = scheduler_gone and self.scheduler_code is None and not self.noted
        if self.phase is NodePhase.ENDING and cut_short:
            return self._come_back(now_s)
        if self.phase is not NodePhase.ENDING:
            self.code = self.code or int(ExitCode.LOST_MEMBERS)
        # After a proper end, those left were not connected yet when the scheduler said Shutdown.
        self.phase = NodePhase.TERMINATING
        self._forget_starts()
        self.deadline_s = now_s + self.limits.terminate_timeout_s
        if not left:
            return [LogLine(text="the scheduler has not answered: ending all the same")]
        message = f"still running, terminating: {left}"
        return [LogLine(text=message), *(Terminate(name=name) for name in self._running())]

    def _out_of_time(self) -> list[Effect]:
        """Kills everything: the stop took too long, and its sender would kill the node next."""
        if self.phase in (NodePhase.RUNNING, NodePhase.FAILING):
            self.code = self.code or int(ExitCode.INTERRUPTED)
        return self._kill_all("the time for stopping is over")

    def _kill_all(self, why: str) -> list[Effect]:
        self.phase = NodePhase.KILLING
        self.deadline_s = self.ask_again_at_s = self.give_up_s = None
        self._forget_starts()
        message = f"{why}: killing all processes; the memory of the run is kept for the next start"
        return [LogLine(text=message), *(Kill(name=name) for name in self._running())]

    def _come_back(self, now_s: float) -> list[Effect]:
        """Starts missing children after schedulerd died during the run's end, with members left."""
        self.phase, self.told_code, self.run_ended = NodePhase.RUNNING, 0, False
        effects: list[Effect] = [
            LogLine(text="schedulerd died while it ended the run: it is started once more"),
            OpenLink(),
        ]
        for child in self.children.values():
            if child.pid is None and self.phase is NodePhase.RUNNING:
                effects += self._restart(child, 0, now_s, at_once=True)
        return effects

    def _restart(self, child: Child, code: int, now_s: float, *, at_once: bool) -> list[Effect]:
        if not child.restarts.take(now_s):
            if child.is_helper:
                text = f"{child.name} {describe_exit(code)} once more: the run goes on without it"
                return [LogLine(text=text)]
            error = (
                f"{child.name} died {child.restarts.spent + 1} times within an hour in which no"
                f" step was committed (last: {describe_exit(code)}); cluster.max_restarts is"
                f" {self.limits.max_restarts}"
            )
            return self._fail(error, ExitCode.LOST_MEMBERS, now_s)
        if at_once:
            child.starting = True
            return [Start(name=child.name)]
        delay_s = 0.0
        if code == 0:
            # The child may have received a Shutdown that is still on its way to this node.
            delay_s = self.limits.clean_exit_grace_s
        elif child.quick_deaths:
            delay_s = min(
                self.limits.first_backoff_s * 2 ** (child.quick_deaths - 1),
                self.limits.last_backoff_s,
            )
        child.start_at_s = now_s + delay_s
        message = f"{child.name} {describe_exit(code)}; restarting (number {child.restarts.spent})"
        return [LogLine(text=message)]

    def _fail(self, error: str, code: int, now_s: float) -> list[Effect]:
        self.phase, self.code, self.failure = NodePhase.FAILING, int(code), error
        scheduler = self.children.get(SCHEDULERD)
        nobody_to_tell = scheduler is not None and scheduler.pid is None
        self.deadline_s = now_s + (0.0 if nobody_to_tell else self.limits.fail_timeout_s)
        self._forget_starts()
        word = LeaveWord(error=error, code=self.code) if nobody_to_tell else self._failed()
        return [LogLine(text=error), word]

    @property
    def _untold(self) -> bool:
        """Returns whether the node fails without an answer of the scheduler. The scheduler may be
        restarting or disconnected, and would wait for this node.
        """
        scheduler = self.children.get(SCHEDULERD)
        is_alive = scheduler is None or scheduler.pid is not None
        return is_alive and self.phase is NodePhase.FAILING and self.deadline_s is not None

    def _failed(self) -> SendFailed:
        return SendFailed(error=self.failure, code=self.code, epoch=self.epoch)

    def _end(self, now_s: float) -> list[Effect]:
        self.phase, self.run_ended = NodePhase.ENDING, True
        scheduler = self.children.get(SCHEDULERD)
        # It was killed while it told the members: the rest never will be.
        cut_short = scheduler is not None and scheduler.pid is None
        limits = self.limits
        elsewhere_s = limits.told_grace_s if scheduler is None else limits.end_timeout_s
        self.deadline_s = now_s + (limits.quick_death_s if cut_short else elsewhere_s)
        self._forget_starts()
        # Helpers are no members, so only the node ends them.
        helpers = (c.name for c in self.children.values() if c.is_helper and c.pid is not None)
        return [CloseLink(), *(Terminate(name=name) for name in helpers)]

    def _forget_starts(self) -> None:
        for child in self.children.values():
            child.start_at_s = None

    def _running(self) -> list[str]:
        return [child.name for child in self.children.values() if child.pid is not None]

    def _alive(self) -> bool:
        return any(
            child.pid is not None or child.starting or child.start_at_s is not None
            for child in self.children.values()
        )


def describe_exit(code: int) -> str:
    """Returns ``exited with code 1`` or ``was killed by signal 9``."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


_Handler = Callable[[NodeMachine, Any, float], list[Effect]]
_HANDLERS: dict[type, _Handler] = {
    Started: NodeMachine._on_started,
    Warmed: NodeMachine._on_warmed,
    Exited: NodeMachine._on_exited,
    FenceAsked: NodeMachine._on_fence,
    MemberMissing: NodeMachine._on_missing,
    DrainAsked: NodeMachine._on_drain,
    EpochBegins: NodeMachine._on_begin,
    ShutdownAsked: NodeMachine._on_shutdown,
    RefusedByScheduler: NodeMachine._on_refused,
    StopAsked: NodeMachine._on_stop,
    StopUnheard: NodeMachine._on_stop_unheard,
    Watched: NodeMachine._on_watched,
    Tick: NodeMachine._on_tick,
}
