"""A save: begun between attempts, written while the next ones run.

::

    PREPARING --directory--> PINNING --all memoryds--> WRITING --all files--> COMPLETING --> OVER
                                                        |
                                                        attempts go on

Attempts wait until every memoryd has pinned the version, which takes a message each way; from then
on no sweep overwrites what has not been read (:mod:`penstock.daemons.memory.pinning`). Version,
position and last attempt of the saved state are those of its start. A broken epoch does not concern
a save that is pinned, as long as its memoryds live and nothing is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from penstock.daemons.scheduler.machine.activities.activity import Activity, send_all
from penstock.daemons.scheduler.machine.events import CompleteSave, Effect, PrepareSave, SavedState
from penstock.daemons.scheduler.machine.history import Counters, EventHistory, Kind
from penstock.daemons.scheduler.machine.mirror import JournalMirror
from penstock.daemons.scheduler.machine.rules import Rules, RunPhase
from penstock.daemons.scheduler.machine.states import SaveState
from penstock.protocol.generated import scheduler_pb2 as pb

Processes = Mapping[str, tuple[int, int]]
"""Name of a member -> pid and nonce of its process."""

Answer: TypeAlias = pb.Pinned | pb.Saved
"""What memoryds say of a save. It is not of one epoch, as a save is not."""


class Save:
    """One save; ``number`` tells the saves of a scheduler apart.

    ``processes``: the memoryds that take part. ``tickets``: snapshot calls that it answers.
    ``error``: why there is no saved state, once it is over. ``write_s``: how long the memoryd that
    was last wrote, without what it waited for settling.
    """

    def __init__(
        self,
        rules: Rules,
        mirror: JournalMirror,
        number: int,
        processes: Processes,
        tickets: list[int],
    ) -> None:
        assert mirror.position is not None, "only what is committed is saved"
        self.number = number
        self.processes = processes
        self.tickets = tickets
        self.version = mirror.version
        self.directory = f"{rules.state_dir}/.tmp-step-{self.version:08d}"
        self.phase = SaveState.PREPARING
        self.error = ""
        self.write_s = 0.0
        self.started_s = 0.0
        self._position = mirror.position
        self._attempt = mirror.next_attempt - 1
        self.epoch = mirror.epoch
        self._memoryds = rules.memoryds
        self._unpinned: set[str] = set()
        self._waiting: set[str] = set()
        self._files: list[tuple[str, int, str]] = []

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.phase in (SaveState.SAVED, SaveState.FAILED)

    @property
    def is_pinned(self) -> bool:
        """Whether attempts may go on."""
        return self.phase not in (SaveState.PREPARING, SaveState.PINNING)

    @property
    def num_bytes(self) -> int:
        """What was written so far."""
        return sum(size for _, size, _ in self._files)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """memoryds that owe an answer."""
        return tuple(sorted(self._waiting))

    def start(self, now_s: float) -> list[Effect]:
        """Returns the first effect."""
        self.started_s = now_s
        return [PrepareSave(number=self.number, directory=self.directory)]

    def prepared(self, error: str) -> list[Effect]:
        """The directory is there, or cannot be made."""
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
        )
        return send_all(self._memoryds, pb.SchedulerMessage(save=save))

    def is_of(self, body: Answer) -> bool:
        """Returns whether a memoryd speaks of this save."""
        return (body.epoch, body.number) == (self.epoch, self.number)

    def pinned(self, member: str) -> list[Effect]:
        """A memoryd holds back whatever would overwrite the version."""
        self._unpinned.discard(member)
        if self.phase is SaveState.PINNING and not self._unpinned:
            self.phase = SaveState.WRITING
        return []

    def saved(self, member: str, body: pb.Saved) -> list[Effect]:
        """A memoryd has written its files, or could not; others may not even have pinned."""
        if member not in self._waiting:
            return []
        self.pinned(member)
        if body.error:
            self.error = self.error or f"{member}: {body.error}"
        self.write_s = max(self.write_s, body.write_seconds)
        self._files += [(file.name, file.bytes, file.sha256) for file in body.files]
        self._waiting.discard(member)
        if self._waiting:
            return []
        if self.error:
            self.fail(self.error)
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
            )
        ]

    def finished(self, directory: str, error: str) -> SavedState | None:
        """The effects are through: returns what is on disk for good, or None."""
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
        """Count it, and say what came of it, once it is over."""
        seconds = now_s - self.started_s
        counters.saved(self.num_bytes, seconds, error=self.error)
        if self.error:
            history.add(Kind.SAVE_FAILED, self.version, now_s, text=self.error)
            return
        text = "" if mirror.saved is None else mirror.saved.directory
        history.add(Kind.SAVED, self.version, now_s, seconds=seconds, text=text)

    def fail(self, error: str) -> None:
        """There will be no saved state."""
        self.phase, self.error = SaveState.FAILED, error


class Saving(Activity):
    """Attempts wait for a save: until it is pinned or, ``to_the_end``, until it is over.

    Nothing else makes the state catch up with the commit then, so it is settled. ``idle``: they do
    not wait for the save, but for somebody to resume the run.
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
        """optimizerds that settle, then memoryds that write."""
        return (*sorted(self.waiting), *self.save.unfinished)

    def start(self, now_s: float) -> list[Effect]:
        """State may lag the weights by one commit until it is settled."""
        effects = [] if self.save.started_s else self.save.start(now_s)
        if self.to_the_end and self.save.version == self.mirror.version:
            self.phase, self.waiting = RunPhase.SETTLING, set(self.rules.optimizerds)
            settle = pb.Settle(epoch=self.mirror.epoch, version=self.mirror.version)
            effects += send_all(self.rules.optimizerds, pb.SchedulerMessage(settle=settle))
        return effects

    def look(self, *, paused: bool) -> None:
        """Find out whether attempts may go on."""
        going_on = self.idle and not paused
        self.done = self.save.over or (self.save.is_pinned and (not self.to_the_end or going_on))

    def _on_settled(self, member: str, body: pb.Settled, now_s: float) -> list[Effect]:
        if body.version == self.mirror.version and self.answered(member):
            self.phase = RunPhase.SAVING
        return []

    answers = {"settled": _on_settled}  # noqa: RUF012
