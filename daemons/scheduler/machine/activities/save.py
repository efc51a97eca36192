"""A save: it starts between attempts, and is written while the next attempts run.

::

    PREPARING --directory--> PINNING --all memoryds--> WRITING --all files--> COMPLETING --> OVER
                                                        |
                                                        attempts go on

Attempts wait until every memoryd has pinned the version, which takes one message each way. From
then on, no sweep overwrites a block that is not read yet (:mod:`penstock.daemons.memory.pinning`).
A copy of the weights alone begins with PINNING, since its caller has made the directory, and is
over with all files.
Version, position and last attempt of the saved state are those at the start of the save. A pinned
save survives a broken epoch if its memoryds live and no memory is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from penstock.daemons.kit.events import LogLine
from penstock.daemons.scheduler.machine.activities.activity import Activity, send_all
from penstock.daemons.scheduler.machine.events import (
    CompleteSave,
    Effect,
    PrepareSave,
    Reply,
    ReplyError,
    SavedState,
)
from penstock.daemons.scheduler.machine.history import Counters, EventHistory, Kind
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.requests import WeightsCall
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.daemons.scheduler.machine.states import SaveState
from penstock.protocol.generated import scheduler_pb2 as pb

Processes = Mapping[str, tuple[int, int]]
"""Pid and nonce of members' processes, by name."""

Answer: TypeAlias = pb.Pinned | pb.Saved
"""Answers of memoryds about a save. They outlive an epoch, as the save does."""


class Save:
    """One save. Members and the disk thread name it by ``number``."""

    def __init__(
        self,
        rules: Rules,
        mirror: JournalMirror,
        number: int,
        processes: Processes,
        tickets: list[int],
        copy_call: WeightsCall | None = None,
    ) -> None:
        assert mirror.position is not None, "only what is committed is saved"
        self.number = number
        """Number of the save, unique within a scheduler process."""
        self.processes = processes
        """Processes of the memoryds that take part."""
        self.tickets = tickets
        """Snapshot calls that the save answers. :class:`Saves` moves them."""
        self.copy_call = copy_call
        """The call for a copy of the weights, which saves no state. None for a save."""
        self.version = mirror.version
        self.directory = f"{rules.state_dir}/.tmp-step-{self.version:08d}"
        if copy_call is not None:
            self.directory = copy_call.directory
        self.phase = SaveState.PREPARING
        self.error = ""
        """Reason of a failed save."""
        self.write_s = 0.0
        """Seconds that the slowest memoryd wrote, without its wait for settled blocks."""
        self.started_s = 0.0
        """Time of :meth:`start`; 0 before."""
        self._position = mirror.position
        self._attempt = mirror.next_attempt - 1
        self.epoch = mirror.epoch
        self._rules, self._mirror = rules, mirror
        self._memoryds = rules.memoryds
        self._unpinned: set[str] = set()
        self._waiting: set[str] = set()
        self._files: list[tuple[str, int, str]] = []
        self._base: list[tuple[str, int, str]] = []
        self.num_bytes = 0
        """Bytes written so far."""

    @property
    def over(self) -> bool:
        """True if the save is done or has failed."""
        return self.phase in (SaveState.SAVED, SaveState.FAILED)

    @property
    def is_pinned(self) -> bool:
        """True if the version is pinned, so that attempts may go on."""
        return self.phase not in (SaveState.PREPARING, SaveState.PINNING)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """memoryds that owe an answer."""
        return tuple(sorted(self._waiting))

    def start(self, now_s: float) -> list[Effect]:
        """Returns the first effects."""
        self.started_s = now_s
        if self.copy_call is not None:  # the caller has made the directory
            return self.prepared("")
        return [PrepareSave(number=self.number, directory=self.directory)]

    def prepared(self, error: str) -> list[Effect]:
        """Sends Save to all memoryds; fails if the directory could not be made."""
        if error:
            self.fail(error)
            return []
        self.phase = SaveState.PINNING
        self._unpinned, self._waiting = set(self._memoryds), set(self._memoryds)
        save = pb.Save(
            epoch=self.epoch,
            number=self.number,
            version=self.version,
            directory=self.directory,
            weights_only=self.copy_call is not None,
        )
        return send_all(self._memoryds, pb.SchedulerMessage(save=save))

    def is_of(self, body: Answer) -> bool:
        """Returns whether an answer is about this save."""
        return (body.epoch, body.number) == (self.epoch, self.number)

    def pinned(self, member: str) -> list[Effect]:
        """Notes that a memoryd holds back all sweeps that would overwrite the version."""
        self._unpinned.discard(member)
        if self.phase is SaveState.PINNING and not self._unpinned:
            self.phase = SaveState.WRITING
        return []

    def saved(self, member: str, body: pb.Saved) -> list[Effect]:
        """Notes a memoryd's files or its error, which may come before other memoryds have
        pinned.
        """
        if member not in self._waiting:
            return []
        self.pinned(member)
        if body.error:
            self.error = self.error or f"{member}: {body.error}"
        self.write_s = max(self.write_s, body.write_seconds)
        for file in body.files:
            listed = self._base if file.base else self._files
            listed.append((file.name, file.bytes, file.sha256))
            self.num_bytes += 0 if file.reused else file.bytes
        self._waiting.discard(member)
        if self._waiting:
            return []
        if self.error:
            self.fail(self.error)
            return []
        if self.copy_call is not None:
            self.phase = SaveState.SAVED
            return []
        self.phase = SaveState.COMPLETING
        return [
            CompleteSave(
                number=self.number,
                version=self.version,
                directory=self.directory,
                files=tuple(sorted(self._files)),
                position=self._position,
                attempt=self._attempt,
                ranking=self._ranking(),
                base=tuple(sorted(self._base)),
            )
        ]

    def copied(self, call: WeightsCall) -> list[Effect]:
        """Returns the answer to the call for a finished copy of the weights."""
        if self.error:
            error = f"copying the weights of step {self.version} failed: {self.error}"
            warning = LogLine(text=f"{error}; training goes on", warning=True)
            return [ReplyError(ticket=call.ticket, error=error), warning]
        files = [
            pb.SavedFile(name=name, bytes=size, sha256=sha256, base=base)
            for base, listed in ((False, self._files), (True, self._base))
            for name, size, sha256 in sorted(listed)
        ]
        reply = pb.WeightsReply(version=self.version, files=files)
        text = f"copied the weights of step {self.version} to {self.directory}"
        return [LogLine(text=text), Reply(ticket=call.ticket, reply=reply)]

    def _ranking(self) -> tuple[int, ...]:
        """Returns the evaluated versions for ``train.keep_best``, the best first."""
        judge = self._rules.best_judge
        return () if judge is None else self._mirror.scores.ranking(judge)

    def finished(self, directory: str, error: str) -> SavedState | None:
        """Ends the save; returns the durable saved state, or None after an error."""
        if self.phase is not SaveState.COMPLETING:
            return None
        if error:
            self.fail(error)
            return None
        self.phase = SaveState.SAVED
        return SavedState(version=self.version, directory=directory, position=self._position)

    def note(
        self, counters: Counters, history: EventHistory, mirror: JournalMirror, now_s: float
    ) -> None:
        """Adds the finished save to counters and history."""
        seconds = now_s - self.started_s
        counters.saved(self.num_bytes, seconds, error=self.error)
        if self.error:
            history.add(Kind.SAVE_FAILED, self.version, now_s, text=self.error)
            return
        text = "" if mirror.saved is None else mirror.saved.directory
        history.add(Kind.SAVED, self.version, now_s, seconds=seconds, text=text)

    def fail(self, error: str) -> None:
        """Ends the save with an error."""
        self.phase, self.error = SaveState.FAILED, error


class Saving(Activity):
    """The wait of attempts for a save: until it is pinned or, ``to_the_end``, until it is over.

    In the latter case no attempt moves the state to the commit, so optimizerds settle it. ``idle``:
    the run is paused, and resuming it ends the wait.
    """

    title = "saving"

    def __init__(
        self,
        rules: Rules,
        mirror: JournalMirror,
        save: Save,
        *,
        to_the_end: bool,
        idle: bool = False,
    ) -> None:
        super().__init__(rules, mirror)
        self.phase = RunPhase.SAVING
        self.save = save
        self.to_the_end = to_the_end
        self.idle = idle

    @property
    def unfinished(self) -> tuple[str, ...]:
        """optimizerds that settle, and memoryds that write."""
        return (*sorted(self.waiting), *self.save.unfinished)

    def start(self, now_s: float) -> list[Effect]:
        """Starts the save if needed, and settles the state, which may lag by one commit."""
        effects = [] if self.save.started_s else self.save.start(now_s)
        if self.to_the_end and self.save.version == self.mirror.version:
            self.phase, self.waiting = RunPhase.SETTLING, set(self.rules.optimizerds)
            settle = pb.Settle(epoch=self.mirror.epoch, version=self.mirror.version)
            effects += send_all(self.rules.optimizerds, pb.SchedulerMessage(settle=settle))
        return effects

    def look(self, *, paused: bool) -> None:
        """Ends the wait if attempts may go on."""
        going_on = self.idle and not paused
        self.done = self.save.over or (self.save.is_pinned and (not self.to_the_end or going_on))

    def _on_settled(self, member: str, body: pb.Settled, now_s: float) -> list[Effect]:
        if body.version == self.mirror.version and self.answered(member):
            self.phase = RunPhase.SAVING
        return []

    answers = {"settled": _on_settled}  # noqa: RUF012
