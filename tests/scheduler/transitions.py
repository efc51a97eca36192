"""Compares the transitions of a scheduler's machine with the table of states."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple, Protocol

from penstock.daemons.kit.events import StopAsked
from penstock.daemons.scheduler.machine.activities.activity import Activity
from penstock.daemons.scheduler.machine.activities.save import Save
from penstock.daemons.scheduler.machine.activities.saves import Saves
from penstock.daemons.scheduler.machine.activities.transaction import Transaction
from penstock.daemons.scheduler.machine.events import Event, Received
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.requests import Requests
from penstock.daemons.scheduler.machine.states import (
    ANY,
    EPOCH_BEGINS,
    EPOCH_BREAKS,
    IS_DUE,
    RUN_ENDS,
    TABLES,
    AttemptState,
    EpochState,
    MemberState,
    SaveState,
    Transition,
)
from penstock.shm.control import Decision


class Step(NamedTuple):
    """A transition that a machine made; no state before it where an attempt or a save begins."""

    before: StrEnum | None
    event: str
    after: StrEnum
    member: str = ""
    stopping: bool = False
    """True if a stop was requested, so that ``ANY`` event may be the reason."""


class Observed(Protocol):
    """The parts of the machine that have states."""

    activity: Activity | None
    live: bool
    members: Membership
    mirror: JournalMirror
    requests: Requests
    saves: Saves

    @property
    def epoch_state(self) -> EpochState:
        """State of the membership epoch."""


class Observer:
    """Reads a machine after each event. The machine must not handle events in between."""

    def __init__(self, machine: Observed) -> None:
        self.machine = machine
        self._read()

    def _read(self) -> None:
        machine = self.machine
        statuses = machine.members.status(0.0, machine.live)
        self._members = {status.member: MemberState(status.state) for status in statuses}
        self._epoch, self._number = machine.epoch_state, machine.mirror.epoch
        self._attempt = machine.activity if isinstance(machine.activity, Transaction) else None
        self._attempt_state = self._state_of_attempt(self._attempt)
        self._save = machine.saves.under_way
        self._save_state = self._state_of_save(self._save)

    def steps(self, event: Event) -> list[Step]:
        """Returns the transitions that the machine made by an event."""
        name = event_name(event)
        epoch, number, members = self._epoch, self._number, self._members
        attempt, attempt_state = self._attempt, self._attempt_state
        save, save_state = self._save, self._save_state
        self._read()
        steps = list(self._steps_of_members(members, name))
        if (epoch, number) != (self._epoch, self._number):
            stopping = bool(self.machine.requests.stop_reason) or name == StopAsked.__name__
            steps.append(Step(epoch, name, self._epoch, stopping=stopping))
        if attempt_state is not None:
            after = self._state_of_attempt(attempt)
            cause = self._break if after is AttemptState.DROPPED else name
            steps.append(Step(attempt_state, cause, after or attempt_state))
        if self._attempt not in (None, attempt):
            steps.append(Step(None, IS_DUE, AttemptState.RUNNING))
        if save_state is not None:
            after_save = self._state_of_save(save)
            cause = name
            if after_save is SaveState.DROPPED:
                cause = EPOCH_BREAKS if self._save is None else IS_DUE
            steps.append(Step(save_state, cause, after_save or save_state))
        if self._save not in (None, save):
            steps.append(Step(None, IS_DUE, self._save_state))
        return [step for step in steps if step.before is not step.after or step.before in _AGAIN]

    @property
    def _break(self) -> str:
        return RUN_ENDS if self._epoch is EpochState.ENDING else EPOCH_BREAKS

    def _steps_of_members(self, before: dict[str, MemberState], event: str) -> Iterator[Step]:
        for member, after in self._members.items():
            cause = event
            if {before[member], after} == {MemberState.JOINING, MemberState.READY}:
                cause = EPOCH_BEGINS if after is MemberState.READY else self._break
            yield Step(before[member], cause, after, member)

    def _state_of_attempt(self, attempt: Transaction | None) -> AttemptState | None:
        if attempt is None:
            return None
        if attempt.done:
            assert attempt._decided is not None
            skipped = attempt._decided[1].decision is Decision.SKIP
            return AttemptState.SKIPPED if skipped else AttemptState.COMMITTED
        if attempt is not self.machine.activity:
            return AttemptState.DROPPED
        return AttemptState(attempt.phase.value)

    def _state_of_save(self, save: Save | None) -> SaveState | None:
        if save is None or save.over or save is self.machine.saves.under_way:
            return None if save is None else save.phase
        return SaveState.DROPPED


_AGAIN = frozenset((EpochState.DRAINING,))
"""States that a transition may lead back to: a new epoch drains as well."""


def event_name(event: Event) -> str:
    """The name that the table gives an event."""
    if isinstance(event, Received):
        return event.message.WhichOneof("body") or "empty"
    return type(event).__name__


def is_event(step: Step, row: Transition) -> bool:
    """Whether a row names the event of a transition."""
    return step.event in row.events or (step.stopping and ANY in row.events)


def unknown(step: Step) -> bool:
    """Whether the table lacks a transition."""
    rows = TABLES[type(step.after)]
    return not any(
        step.after is row.next
        and is_event(step, row)
        and (step.before in row.states if step.before is not None else not row.states)
        for row in rows
    )
