"""The scheduler's saves and copies: the one under way, and answers of members and disk about it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from penstock.daemons.scheduler.machine.activities.activity import Activity
from penstock.daemons.scheduler.machine.activities.barrier import Barrier
from penstock.daemons.scheduler.machine.activities.save import Answer, Save, Saving
from penstock.daemons.scheduler.machine.events import (
    Effect,
    SavedState,
    SaveFinished,
    SavePrepared,
)
from penstock.daemons.scheduler.machine.membership import Membership
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.requests import Next, Requests, WeightsCall
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.protocol.generated import scheduler_pb2 as pb

_TO_THE_END: Mapping[Next, bool] = MappingProxyType(
    {
        Next.SAVE: False,
        Next.SAVE_AND_WAIT: True,
        Next.WAIT_FOR_SAVE: True,
        Next.IDLE_SAVE: True,
        Next.COPY_WEIGHTS: False,
    }
)


class Saves:
    """At most one save is under way."""

    def __init__(self, rules: Rules, mirror: JournalMirror, members: Membership) -> None:
        self.under_way: Save | None = None
        """The save under way; None without one. Only this class replaces it."""
        self._rules = rules
        self._mirror = mirror
        self._members = members
        self._number = 0

    @property
    def version(self) -> int | None:
        """Version of the save or copy under way; None without one. Initial weights are version
        0.
        """
        return None if self.under_way is None else self.under_way.version

    @property
    def copying(self) -> bool:
        """True if a copy of the weights is under way, which saves no state."""
        return self.under_way is not None and self.under_way.copy_call is not None

    @property
    def present(self) -> tuple[int | None, bool]:
        """Returns :attr:`version` and :attr:`copying`."""
        return self.version, self.copying

    @property
    def saved_version(self) -> int | None:
        """Version of the state that is being saved; None without one. A copy saves no state."""
        return None if self.copying else self.version

    @property
    def number(self) -> int:
        """Number of the save under way, for Drain; 0 without one."""
        return 0 if self.under_way is None else self.under_way.number

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Memoryds that owe an answer to the save under way."""
        return () if self.under_way is None else self.under_way.unfinished

    def activity(self, choice: Next, requests: Requests) -> Activity | None:
        """Returns the wait of attempts for a save, if the choice is about one. A new save replaces
        the one under way.
        """
        if choice not in _TO_THE_END:
            return None
        save = self.under_way
        if choice is Next.COPY_WEIGHTS:
            save = self._begin([], requests.copies.pop(0))
        elif save is None or choice in (Next.SAVE, Next.SAVE_AND_WAIT):
            tickets = requests.take_tickets()
            if save is not None:
                tickets += save.tickets
                _take_back_copy(save, requests)
            save = self._begin(tickets)
        to_the_end = _TO_THE_END[choice]
        idle = choice is Next.IDLE_SAVE
        return Saving(self._rules, self._mirror, save, to_the_end=to_the_end, idle=idle)

    def _begin(self, tickets: list[int], copy_call: WeightsCall | None = None) -> Save:
        self._number += 1
        processes = self._members.processes(self._rules.memoryds)
        save = Save(self._rules, self._mirror, self._number, processes, tickets, copy_call)
        self.under_way = save
        return save

    def join(self, requests: Requests) -> None:
        """Adds waiting snapshot calls to the save under way, if it saves the committed version."""
        save = self.under_way
        if save is None or save.over or self.copying:
            return
        if save.version == self._mirror.version:
            save.tickets += requests.take_tickets()

    def on_prepared(self, event: SavePrepared) -> list[Effect]:
        """Handles the answer of the disk thread about the directory."""
        save = self.under_way
        known = save is not None and save.number == event.number
        return save.prepared(event.error) if save is not None and known else []

    def on_finished(self, event: SaveFinished) -> SavedState | None:
        """Returns the saved state that is durable now, if any."""
        save = self.under_way
        if save is None or save.number != event.number:
            return None
        return save.finished(event.directory, event.error)

    def on_answer(self, member: str, body: Answer) -> list[Effect]:
        """Handles a memoryd's answer about a save."""
        save = self.under_way
        if save is None or not save.is_of(body):
            return []
        return save.saved(member, body) if isinstance(body, pb.Saved) else save.pinned(member)

    def epoch_broke(self, requests: Requests) -> None:
        """Drops a save that is not pinned: no sweep waits for it. The next epoch starts it
        again.
        """
        save = self.under_way
        if save is not None and not save.is_pinned:
            requests.tickets += save.tickets
            _take_back_copy(save, requests)
            self.under_way = None

    def leave(self, requests: Requests) -> None:
        """Takes back the calls of the save under way: the run ends without waiting for it."""
        if self.under_way is not None:
            requests.tickets += self.under_way.tickets
            self.under_way.tickets = []
            _take_back_copy(self.under_way, requests)

    def look(self, activity: Activity | None, *, live: bool) -> Save | None:
        """Returns a save that is over, once."""
        save = self.under_way
        if save is None:
            return None
        if not live and not save.over:
            self._look_at_members(save, activity)
        if not save.over:
            return None
        self.under_way = None
        return save

    def _look_at_members(self, save: Save, activity: Activity | None) -> None:
        """Fails a save between epochs: memory under restore has lost the version, and a replaced
        memoryd does not know the save.
        """
        if isinstance(activity, Barrier) and activity.phase is RunPhase.RESTORING:
            save.fail("the memory had to be restored")
        elif self._members.complete:
            present = self._members.processes(self._rules.memoryds)
            lost = [name for name, process in save.processes.items() if present[name] != process]
            if lost:
                work = "saved" if save.copy_call is None else "copied"
                save.fail(f"{lost[0]} was lost while it {work}")


def _take_back_copy(save: Save, requests: Requests) -> None:
    """Puts the call of a dropped copy first among those that wait."""
    if save.copy_call is not None:
        requests.copies.insert(0, save.copy_call)
